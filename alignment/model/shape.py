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
    cast: int = 0  # How many parameters are among `cast_by_autocast`.
    adapters: Mapping[str, int] | None = None
    """With --lora_rank, the parameters of each module's adapters, which are then all that is
    trained."""

    @classmethod
    def from_config(cls, config: Any, lora_rank: int = 0, lora_targets: str = "") -> ModelShape:
        """Count a model that has no weights. Raises `UserError` as `of` and `adapted_layers` do."""
        model = empty_model(config)
        shape = cls.of(model)
        if not lora_rank:
            return shape
        adapters = dict.fromkeys(shape.parameters, 0)
        for name, layer in adapted_layers(
            model, lora_targets
        ).items():  # A [rank, inputs] and B [outputs, rank]
            adapters[next(m for m in adapters if f"{name}.".startswith(f"{m}."))] += (
                lora_rank * sum(layer.weight.shape)
            )
        return replace(shape, adapters=adapters)

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """Read a model's modules. Raises `UserError` for a family without one list of layers
        between its embedding and head."""
        names = {module: name for name, module in model.named_modules()}
        number, decoder = model.config.num_hidden_layers, model.get_decoder()
        stacks = [
            each
            for each in decoder.children()
            if type(each).__name__ == "ModuleList" and len(each) == number
        ]
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
            for module in (
                *children[:start],
                *stacks[0],
                *children[start + 1 :],
                model.get_output_embeddings(),
            ):
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
        return cls(
            parameters,
            tuple(names[layer] for layer in stacks[0]),
            names[model.get_output_embeddings()],
            cast=cast,
        )

    @property
    def is_tied(self) -> bool:
        """Whether the head's matrix is the embedding's."""
        return self.parameters[self.head] == 0

    def layer_share(self, modules: Sequence[str]) -> float:
        """The share of the layers that is among some modules."""
        return sum(name in modules for name in self.layers) / len(self.layers)

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
    named = (
        (name, module)
        for name, module in model.named_modules()
        if module is not model.get_output_embeddings()
    )
    # GPT-2's layers are of the latter class, Falcon's of one derived from the former
    linear = {
        "Linear",
        "Conv1D",
    }
    layers = {
        name: module
        for name, module in named
        if linear & {kind.__name__ for kind in type(module).__mro__}
    }
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    if unknown := [target for target in filter(None, targets.split(",")) if target not in kinds]:
        raise UserError(
            f"--lora_targets {targets}: {unknown[0]!r} is none of this model's linear layers:"
            f" {', '.join(kinds)}"
        )
    return {
        name: layer
        for name, layer in layers.items()
        if not targets or name.rpartition(".")[2] in targets.split(",")
    }


def cast_by_autocast(model: PreTrainedModel) -> list[Any]:
    """The parameters that autocast casts for a product and that nothing else reads: of linear
    layers and GPT-2's, but for a head that is the embedding, and stacks of experts' matrices.
    Subclasses of these layers may compute otherwise."""
    of_kinds = [
        (type(module).__name__, own)
        for module in model.modules()
        for own in module.parameters(recurse=False)
    ]
    linear = [own for kind, own in of_kinds if kind in ("Linear", "Conv1D")]
    # Of one matrix alone there is no stack: RWKV's factors of the shape [1, 1, H] enter no product.
    stacks = [
        own
        for kind, own in of_kinds
        if own.ndim == 3 and len(own) > 1 and not kind.startswith("Conv")
    ]
    return [own for own in (*linear, *stacks) if own is not model.get_input_embeddings().weight]
