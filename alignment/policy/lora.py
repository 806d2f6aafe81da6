"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters beside frozen linear layers. The one module that imports PEFT."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from alignment.policy.huggingface import Conv1D, PreTrainedModel
from alignment.policy.policy import PolicyConfig
from alignment.system.errors import UserError

NAME, FILE = "default", "adapter_model.safetensors"  # PEFT's


def target_layers(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The full names of the linear layers that end in one of `targets`; without targets, of all but the output head. Raises
    `UserError` for a target that names no linear layer, and for a head that is also the embedding."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    if not targets:
        return [name for name, module in linear.items() if module is not head]
    chosen: set[str] = set()
    for target in targets:
        if not (matches := {name for name in linear if f".{name}".endswith(f".{target}")}):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise UserError(f"--lora_targets {target}: no linear layer has this name; there are {known}")
        chosen |= matches
    if head.weight is model.get_input_embeddings().weight and any(linear[name] is head for name in chosen):
        raise UserError("--lora_targets names the output head, whose matrix is the embedding's: leave it out")
    return [name for name in linear if name in chosen]


def add_adapters(model: PreTrainedModel, config: PolicyConfig) -> None:
    """Freeze a model on the CPU, and put adapters beside its layers: those of the folder `config.adapter`, or new ones whose
    products are 0."""
    from peft import LoraConfig, inject_adapter_in_model

    names, base = target_layers(model, config.lora_targets), Path(config.model_path)
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha or 2 * config.lora_rank, task_type="CAUSAL_LM", target_modules=names,
        fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
        base_model_name_or_path=str(base.resolve() if base.exists() else base),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        inject_adapter_in_model(lora, model)
    saved = load_file(Path(config.adapter) / FILE) if config.adapter else {}
    for name, parameter in adapters(model) if saved else ():
        parameter.data.copy_(saved[name])


def adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name in PEFT's files, parameter) of each adapter's two matrices."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield f"base_model.model.{name.removesuffix(f'.{NAME}.weight')}.weight", parameter


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all ranks, where it is sharded; called on all of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def adapted_weight(layer: torch.nn.Module) -> torch.Tensor:
    """The weight of a linear layer, with its adapter where it has one: W + alpha / rank * B A. W itself does not change."""
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return whole(layer.weight)
    product = whole(layer.lora_B[NAME].weight) @ whole(layer.lora_A[NAME].weight)
    return whole(layer.weight) + layer.scaling[NAME] * (product.T if layer.fan_in_fan_out else product)


@torch.no_grad()
def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every weight as though it had no adapter, one at a time."""
    for name, parameter in model.named_parameters():
        layer, _, own = name.rpartition(".base_layer.")
        if layer and own == "weight":
            yield f"{layer}.weight", adapted_weight(model.get_submodule(layer)).detach()
        elif ".lora_" not in name:
            yield name.replace(".base_layer.", "."), whole(parameter.detach())


def disable_adapters(model: torch.nn.Module, off: bool) -> None:
    """Have a model compute what its base computes, or go back."""
    for layer in (module for module in model.modules() if hasattr(module, "lora_A")):
        layer._disable_adapters = off  # PEFT's method would also change what is trained


@torch.no_grad()
def probe(model: torch.nn.Module, on: bool, stored: Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor]) -> None:
    """Make each B random, so that new adapters' products are as large as their weights; or put the trained one back.
    `stored(parameter, tensor)` is a whole tensor as the policy keeps it."""
    generator = torch.Generator().manual_seed(0)
    for layer in (module for module in model.modules() if hasattr(module, "lora_A")):
        b = layer.lora_B[NAME].weight
        if on:
            size = whole(layer.weight).norm().item() / layer.scaling[NAME] / (b.numel() / 3) ** 0.5  # |A| is (rank / 3) ** 0.5
            layer.trained_b = b.clone()
            b.copy_(stored(b, size * torch.randn(b.shape, generator=generator)))
        else:
            b.copy_(layer.trained_b)


def save(model: PreTrainedModel, folder: Path, weights: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    """Write weights as a Hugging Face folder, and the tensors of `adapters` as a folder in it that PEFT loads on the base."""
    model.save_pretrained(folder, state_dict=weights or None)
    if tensors:
        dataclasses.replace(model.peft_config[NAME], inference_mode=True).save_pretrained(folder / "adapter")
        save_file(tensors, folder / "adapter" / FILE)
