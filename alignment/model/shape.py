"""The modules of a model and their sizes, read from its configuration without any weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from alignment.system.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelShape:
    """The modules of a causal language model that a device map names, in forward order, and their
    sizes."""

    parameters: Mapping[str, int]
    """Hugging Face module name -> number of its parameters. A tied head counts 0: its matrix is
    counted as the embedding."""
    layers: tuple[str, ...]
    head: str
    cast: int = 0
    """How many parameters are among `cast_by_autocast`."""
    adapters: Mapping[str, int] | None = None
    """With --lora_rank, the parameters of each module's adapters, which are then all that is
    trained."""

    @classmethod
    def from_config(cls, config: Any, lora_rank: int = 0, lora_targets: str = "") -> ModelShape:
        """Count a model that has no weights. Raises `UserError` as `of` and `adapted_layers` do.

        A plan asks a hundred times for the shape of one model, which takes a tenth of a second."""
        key = (type(config), config.to_json_string(), lora_rank, lora_targets)
        if key not in _shapes:
            _shapes[key] = cls._count(config, lora_rank, lora_targets)
        return _shapes[key]

    @classmethod
    def _count(cls, config: Any, lora_rank: int, lora_targets: str) -> ModelShape:
        model = empty_model(config)
        shape = cls.of(model)
        if not lora_rank:
            return shape
        adapters = dict.fromkeys(shape.parameters, 0)
        for name, layer in adapted_layers(model, lora_targets).items():
            owner = next(module for module in adapters if f"{name}.".startswith(f"{module}."))
            # A [rank, inputs] and B [outputs, rank]
            adapters[owner] += lora_rank * sum(layer.weight.shape)
        return replace(shape, adapters=adapters)

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """Read a model's modules. Raises `UserError` for a family without one list of layers
        between its embedding and head."""
        names = {module: name for name, module in model.named_modules()}
        decoder = model.get_decoder()
        head: Any = model.get_output_embeddings()
        stacks: list[Any] = []
        children: Any = decoder.children()
        for child in children:
            is_list = type(child).__name__ == "ModuleList"
            if is_list and len(child) == model.config.num_hidden_layers:
                stacks.append(child)
        parameters: dict[str, int] = {}
        counted: set[Any] = set()
        # a decoder's own tensors would get no device
        if len(stacks) == 1 and not [*decoder.buffers(recurse=False)]:
            # Modules without parameters, such as rotary embeddings, compute with the embedding's
            # output, so they come first.
            children = sorted(
                decoder.children(), key=lambda child: any(True for _ in child.parameters())
            )
            start = children.index(stacks[0])
            for module in (*children[:start], *stacks[0], *children[start + 1 :], head):
                own = set(module.parameters()) - counted
                counted |= own
                parameters[names[module]] = sum(parameter.numel() for parameter in own)
        if counted != set(model.parameters()):
            kind = model.config.model_type
            raise UserError(
                f"model_type {kind!r} is no embedding, list of layers and head, so it cannot be"
                " placed"
            )
        cast = sum(parameter.numel() for parameter in cast_by_autocast(model))
        layers = tuple(names[layer] for layer in stacks[0])
        return cls(parameters, layers, names[head], cast=cast)

    @property
    def is_tied(self) -> bool:
        """Whether the head's matrix is the embedding's."""
        return self.parameters[self.head] == 0

    def layer_share(self, modules: Sequence[str]) -> float:
        """The share of the layers that is among some modules."""
        return len([name for name in self.layers if name in modules]) / len(self.layers)

    def trained(self, modules: Iterable[str]) -> int:
        """The trained parameters of some modules."""
        return sum((self.adapters or self.parameters)[name] for name in modules)

    def state_bytes(self, modules: Iterable[str], trained_bytes: int) -> int:
        """Bytes of some modules' weights, gradients and moments, of which a trained parameter has
        `trained_bytes`."""
        frozen = sum(self.parameters[name] for name in modules) if self.adapters else 0
        return 4 * frozen + trained_bytes * self.trained(modules)

    def frozen_bytes(self, itemsize: int) -> int:
        """Bytes of a model that only computes log-probs: `itemsize` for each number that autocast
        casts, 4 for others."""
        return 4 * sum(self.parameters.values()) - (4 - itemsize) * self.cast


_shapes: dict[tuple[type, str, int, str], ModelShape] = {}
"""Those that were counted, by `from_config`'s arguments."""


def empty_model(config: Any) -> PreTrainedModel:
    """A model that has no weights. Raises `UserError` where transformers makes none of the
    configuration."""
    import torch  # here, as transformers below: both take seconds, and arguments are checked before

    from alignment.model.huggingface import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of many kinds
        raise UserError(
            f"--model: transformers makes no {config.model_type} of its config.json ({error!r})"
        ) from None


def adapted_layers(model: PreTrainedModel, targets: str) -> dict[str, Any]:
    """Name -> linear layer that gets an adapter: by --lora_targets (`UserError` for others), or all
    but the head."""
    head = model.get_output_embeddings()
    layers = {}
    for name, module in model.named_modules():
        if module is not head and _is_linear(module):
            layers[name] = module
    kinds = list(dict.fromkeys(_last_name(name) for name in layers))
    wanted = [target for target in targets.split(",") if target]
    unknown = [target for target in wanted if target not in kinds]
    if unknown:
        raise UserError(
            f"--lora_targets {targets}: {unknown[0]!r} is none of this model's linear layers:"
            f" {', '.join(kinds)}"
        )
    if not targets:
        return layers
    return {name: layer for name, layer in layers.items() if _last_name(name) in wanted}


def _is_linear(module: Any) -> bool:
    """Whether a module is a linear layer: GPT-2's are Conv1D, Falcon's of a class derived from
    Linear."""
    names = {base.__name__ for base in type(module).__mro__}
    return not names.isdisjoint({"Linear", "Conv1D"})


def _last_name(name: str) -> str:
    """A module's name within its parent."""
    return name.rpartition(".")[2]


def cast_by_autocast(model: PreTrainedModel) -> list[Any]:
    """The parameters that autocast casts for a product and that nothing else reads: of linear
    layers and GPT-2's, but for a head that is the embedding, and stacks of experts' matrices.
    Subclasses of these layers may compute otherwise."""
    linear = []
    stacks = []
    for module in model.modules():
        kind = type(module).__name__
        for parameter in module.parameters(recurse=False):
            if kind in ("Linear", "Conv1D"):
                linear.append(parameter)
            # Of one matrix alone there is no stack: RWKV's factors of the shape [1, 1, H] enter no
            # product.
            if parameter.ndim == 3 and len(parameter) > 1 and not kind.startswith("Conv"):
                stacks.append(parameter)
    embedding = model.get_input_embeddings().weight
    return [parameter for parameter in (*linear, *stacks) if parameter is not embedding]
