"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters beside frozen linear layers, as PEFT makes them. The one module
that imports PEFT."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from alignment.policy.huggingface import Conv1D, PreTrainedModel
from alignment.policy.policy import PolicyConfig
from alignment.system.errors import UserError

NAME = "default"  # of the adapters in PEFT's tables
PROBE = 1.0  # norm of random adapters' products, as a multiple of their weights'

Whole = Callable[[torch.Tensor], torch.Tensor]
"""Gives a tensor with the parts that other ranks hold."""


def target_layers(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The full names of the linear layers that end in one of `targets`; without targets, of all but the output head. Raises
    `UserError` for a target that names no linear layer, and for a head that is also the embedding."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    matches = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    if unmatched := [target for target, names in matches.items() if not names]:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise UserError(f"--lora_targets {unmatched[0]}: no linear layer has this name; there are {known}")
    if not targets:
        return [name for name, module in linear.items() if module is not head]
    chosen = {name for names in matches.values() for name in names}
    if head.weight is model.get_input_embeddings().weight and any(linear[name] is head for name in chosen):
        raise UserError("--lora_targets names the output head, whose matrix is the embedding's: leave it out")
    return [name for name in linear if name in chosen]


def add_adapters(model: PreTrainedModel, config: PolicyConfig) -> None:
    """Freeze a model on the CPU, and put adapters beside its layers: those of the folder `config.adapter`, or new ones whose
    products are 0."""
    from peft import LoraConfig, inject_adapter_in_model

    names = target_layers(model, config.lora_targets)
    base = Path(config.model_path)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=names,
        fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base.resolve() if base.exists() else base),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        inject_adapter_in_model(lora, model)
    if config.adapter:
        saved = load_file(Path(config.adapter) / "adapter_model.safetensors")
        with torch.no_grad():
            for name, parameter in adapters(model):
                parameter.copy_(saved[peft_name(name)])


def adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The (name, parameter) of each adapter's two matrices."""
    return ((name, parameter) for name, parameter in model.named_parameters() if ".lora_" in name)


def peft_name(name: str) -> str:
    """The name of a matrix in PEFT's files."""
    return f"base_model.model.{name.removesuffix(f'.{NAME}.weight')}.weight"


def adapted_weight(layer: torch.nn.Module, whole: Whole = lambda tensor: tensor) -> torch.Tensor:
    """The weight of a linear layer, with its adapter where it has one: W + alpha / rank * B A. W itself does not change."""
    weight = whole(layer.weight)
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return weight
    product = whole(layer.lora_B[NAME].weight) @ whole(layer.lora_A[NAME].weight)
    return weight + layer.scaling[NAME] * (product.T if layer.fan_in_fan_out else product)


@torch.no_grad()
def merged_weights(model: torch.nn.Module, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every weight as though it had no adapter, one at a time."""
    for name, parameter in model.named_parameters():
        layer, wrapped, own = name.rpartition(".base_layer.")
        if wrapped and own == "weight":
            yield f"{layer}.weight", adapted_weight(model.get_submodule(layer), whole).detach()
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), whole(parameter.detach())


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Have a model compute what its base computes."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    try:
        for layer in layers:
            layer._disable_adapters = True  # PEFT's method would also change what is trained
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def probe_values(model: torch.nn.Module, whole: Whole) -> dict[str, torch.Tensor]:
    """For each adapter's B, by name, random values on the CPU that give B A `PROBE` times the norm of W."""
    generator, values = torch.Generator().manual_seed(0), {}
    for name, parameter in adapters(model):
        if ".lora_B." in name:
            layer = model.get_submodule(name.partition(".lora_B.")[0])
            norms = [whole(tensor.detach()).norm().item() for tensor in (layer.weight, layer.lora_A[NAME].weight)]
            size = PROBE * norms[0] / (layer.scaling[NAME] * norms[1] * len(parameter) ** 0.5)
            values[name] = size * torch.randn(parameter.shape, generator=generator)
    return values


def save_adapters(model: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the adapters as a folder that PEFT loads on the base."""
    dataclasses.replace(model.peft_config[NAME], inference_mode=True).save_pretrained(folder)
    save_file({peft_name(name): tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
