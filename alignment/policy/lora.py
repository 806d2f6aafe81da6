"""Low-rank adapters, by PEFT: W + alpha / rank * B A, of which A and B are trained (Hu et al. 2021,
arXiv:2106.09685, 4.1)."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from alignment.model.huggingface import PreTrainedModel
from alignment.model.kernel_choice import small_model
from alignment.model.loading import load_model, load_weights
from alignment.model.shape import adapted_layers
from alignment.model.shards import whole
from alignment.policy.policy import PolicyConfig
from alignment.system.errors import UserError
from alignment.system.files import guard_library_write

ADAPTER = "adapter"  # the folder, in PEFT's format, beside a model's merged weights
FILE = "adapter_model.safetensors"


def load_trained_model(config: PolicyConfig, devices: tuple[str, ...]) -> PreTrainedModel:
    """A policy's model, in float32. With --lora_rank only adapters are trained: new ones, where B
    is 0, or `config.checkpoint`'s. Raises `UserError` as `load_model` and `adapted_layers` do, if
    PEFT adds adapters to other layers, and if these do not make its weights."""
    model = load_model(config.model_path, devices, torch.float32)
    if config.lora_rank:
        _add_adapters(model, config)
    if config.lora_rank and config.checkpoint:
        _load_adapters(model, Path(config.checkpoint))
    return model


def small_trained_model(
    model: PreTrainedModel, config: PolicyConfig, device: torch.device
) -> PreTrainedModel:
    """`small_model` of a policy's model, with adapters where the policy has some."""
    small = small_model(model, device)
    if config.lora_rank:
        _add_adapters(small, config)
    return small


def _add_adapters(model: PreTrainedModel, config: PolicyConfig) -> None:
    # here, because it takes a second, and only this needs it
    from peft import LoraConfig, inject_adapter_in_model

    layers = adapted_layers(model, config.lora_targets)
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=list(layers),
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in layers.values()),
        base_model_name_or_path=config.model_path,
    )
    # the same matrices on all ranks, whatever each has drawn before
    with torch.random.fork_rng(devices=[]), _targets_as_they_are():
        torch.manual_seed(config.seed)
        inject_adapter_in_model(lora, model)
    others = _adapted(model).keys() ^ layers.keys()
    if others:
        raise UserError(
            f"--lora_rank {config.lora_rank}: PEFT adds adapters to other layers of"
            f" {model.config.model_type} than its linear ones, such as {min(others)}: choose some"
            " by --lora_targets, or train all weights"
        )


def _targets_as_they_are() -> AbstractContextManager[object]:
    """Have PEFT, within the block, add adapters to the modules that it is given. From 0.19 on it
    takes MLPs of some mixtures for the experts of transformers 4, and adds adapters to the stacks
    that transformers 5 has in their place."""
    return patch("peft.tuners.tuners_utils.is_transformers_ge_v5", new=False, create=True)


@torch.no_grad()
def _load_adapters(model: PreTrainedModel, checkpoint: Path) -> None:
    saved = load_file(checkpoint / ADAPTER / FILE)
    merged = dict(load_weights(str(checkpoint), torch.float32))
    for name, parameter in _parameters(model).items():
        parameter.copy_(saved[name])
    for name, weight in merged_weights(model):
        if not torch.allclose(weight.cpu(), merged[name], rtol=1e-3, atol=1e-6):
            raise UserError(
                f"--resume: {model.name_or_path} has changed since the run began: {name} is not"
                f" {checkpoint}'s"
            )


def _adapted(model: torch.nn.Module) -> Mapping[str, Any]:
    """Name -> PEFT's layer, of the layers that have an adapter."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapters' matrices, by their names in PEFT's files."""
    matrices = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            name_in_file = name.removesuffix(".default.weight")
            matrices[f"base_model.model.{name_in_file}.weight"] = parameter
    return matrices


def merged_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of each weight, unsharded, tied ones once; adapters go into a
    copy: none is rounded twice."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in _adapted(model).items()}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = whole(parameter.detach())
        if name in layers:
            layer = layers[name]
            a = whole(layer.lora_A["default"].weight.detach())
            b = whole(layer.lora_B["default"].weight.detach())
            change = (b @ a) * (layer.lora_alpha["default"] / layer.r["default"])
            if layer.fan_in_fan_out:
                change = change.T
            weight = weight + change
        yield name.replace(".base_layer.", "."), weight


def without_adapters(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Have a model compute, within the block, with the weights that its adapters, if any, started
    from."""
    if not _adapted(model):
        return nullcontext()
    from peft.helpers import rescale_adapter_scale  # here, as above

    return rescale_adapter_scale(model, 0)


@torch.no_grad()
def use_adapters(model: torch.nn.Module, kind: str) -> None:
    """See `Policy.use_adapters`. The new B gives alpha / rank * B A the variance 1 / inputs; PEFT's
    A has 1 / (3 * inputs)."""
    # here, because it takes a second
    from torch.distributed.tensor import (
        DTensor,
        distribute_tensor,
    )

    for number, layer in enumerate(_adapted(model).values()):
        b = layer.lora_B["default"].weight
        if kind == "random":
            layer.trained_b = b.detach().clone()
            # the same on every rank
            numbers = torch.randn(b.shape, generator=torch.Generator().manual_seed(number))
            numbers *= (3 / b.shape[1]) ** 0.5 / layer.scaling["default"]
            if isinstance(b, DTensor):
                numbers = distribute_tensor(numbers, b.device_mesh, b.placements)
            b.copy_(numbers)
        else:
            b.copy_(layer.trained_b)


def save(model: PreTrainedModel, folder: Path, writes: bool = True) -> None:
    """Write a model's adapters, if any, to adapter/ in `folder`, as PEFT reads them. All ranks call
    it; one `writes`."""
    matrices = {}
    for name, parameter in _parameters(model).items():
        matrices[name] = whole(parameter.detach()).cpu()
    if matrices and writes:
        model.peft_config["default"].save_pretrained(folder / ADAPTER)
        with guard_library_write(folder):
            save_file(matrices, folder / ADAPTER / FILE, metadata={"format": "pt"})
