"""How many tokens a micro-batch may have: what its activations take, and what is free."""

from collections.abc import Sequence

import torch

from alignment.model.activations import activation_bytes, checkpointed_activation_bytes
from alignment.model.device_map import partition_layers
from alignment.model.huggingface import PreTrainedModel
from alignment.model.loading import devices_of
from alignment.model.shape import ModelShape
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import PolicyConfig
from alignment.policy.shards import own_part
from alignment.system.device_memory import free_bytes, release_memory

# larger micro-batches are no faster on a CPU (benchmarks/README.md); not measured on a GPU
MAX_TOKENS = 16384


# 3 GiB are enough for two parallel micro-batches that keep a CPU busy; on a GPU only the free
# memory is a limit.
MAX_ACTIVATION_BYTES = {"cpu": 3 * 2**30, "cuda": 2**40}


ACTIVATION_SHARE = 0.5  # of the free memory; logits, copies and other processes use the rest


def choose_micro_batch_tokens(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    config: PolicyConfig,
    longest: int,
    processes=1,
    whole=0,
) -> tuple[int, bool]:
    """`tokens_that_fit` beside weights, gradients, moments and `whole` bytes of copies, where
    `processes` share a device."""
    devices = [str(device) for device in devices_of(model)]
    parameters = sum(
        own_part(parameter).numel() for parameter in model.parameters() if parameter.requires_grad
    ) // len(devices)
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.ndim
    ]
    moment_bytes = sum(
        own_part(moment).nbytes for moment in moments if str(moment.device) in devices
    ) // len(devices)
    # The weights are allocated already.
    to_allocate = (
        parameters * (OPTIMIZERS[config.optimizer].device_bytes - 4) - moment_bytes + whole
    )
    release_memory()
    free = min(free_bytes(device) for device in devices) // processes - to_allocate
    limit = MAX_ACTIVATION_BYTES[model.device.type] // processes
    layers = largest_layer_share(model, devices)
    return tokens_that_fit(
        model.config, getattr(torch, config.dtype).itemsize, free, longest, limit, layers
    )


def largest_layer_share(model: PreTrainedModel, devices: Sequence[str]) -> float:
    """The largest share of a model's layers that one of its devices has."""
    if len(devices) == 1:
        return 1.0
    shape = ModelShape.of(model)
    device_of_module = partition_layers(shape, devices)
    shares = []
    for device in devices:
        modules = [name for name, owner in device_of_module.items() if owner == device]
        shares.append(shape.layer_share(modules))
    return max(shares)


def tokens_that_fit(
    config, itemsize: int, free: int, longest: int, limit: int, layers: float = 1.0
) -> tuple[int, bool]:
    """(tokens of the largest micro-batch whose activations fit `free` and `limit` bytes of a device
    with that share of the `layers`, whether it takes gradient checkpointing, which computes layers
    twice: where the longest row, of `longest` tokens, does not fit otherwise). Tokens are rounded
    down to a power of two: slightly less free memory changes no repeated run."""
    available = int(ACTIVATION_SHARE * max(free, 0))
    per_token = layers * activation_bytes(config, itemsize)
    if checkpointing := available < longest * per_token:
        per_token = checkpointed_activation_bytes(config, itemsize, layers)
    tokens = min(max(int(min(available, limit) / per_token), 1), int(MAX_TOKENS / layers))
    return 2 ** (tokens.bit_length() - 1), checkpointing


def gathered_bytes(layers: Sequence[int], outside: int, itemsize: int) -> int:
    """Bytes that a rank holds beside its own parts, of layers of so many parameters and so many
    outside: in fp32, as weights and as gradients, what is outside and two layers, at work and on
    its way; and autocast's casts of all layers."""
    return 8 * (outside + 2 * max(layers)) + 2 * sum(layers) * (itemsize == 2)
