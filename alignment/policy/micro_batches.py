"""How many tokens a micro-batch may have: what its activations take, and what is free."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from alignment.model.activations import (
    activation_bytes,
    checkpointed_activation_bytes,
    mlp_bytes,
)
from alignment.model.device_map import partition_layers
from alignment.model.huggingface import PreTrainedModel
from alignment.model.loading import devices_of
from alignment.model.shape import ModelShape
from alignment.model.shards import own_part
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import PolicyConfig
from alignment.system.device_memory import free_bytes, release_memory

MAX_TOKENS = 16384
"""Tokens of a micro-batch at most.

Source: larger ones are no faster on a CPU (benchmarks/README.md); on an H200 16,384 were faster
than 8,192, and more were not measured. Shown wrong by: seconds of an update by `benchmarks.update`
with more. Read by: `tokens_that_fit`."""

MAX_ACTIVATION_BYTES = {"cpu": 3 * 2**30, "cuda": 2**40}
"""Bytes of a micro-batch's activations at most, by type of device.

Assumption: 3 GiB are enough for two parallel micro-batches that keep a CPU busy; on a GPU only the
free memory is a limit. Shown wrong by: seconds of an update on a CPU of many cores with more. Read
by: `choose_micro_batch_tokens`, `micro_batches_beside`."""

ACTIVATION_SHARE = 0.5
"""Share of the free memory that a micro-batch's activations may take; logits, copies and other
processes use the rest.

Assumption: a choice. Shown wrong by: the measured peaks of updates, by what they leave free. Read
by: `tokens_that_fit`."""

SHARE_OF_GIVEN = 0.85
"""Share of the free memory that the activations of micro-batches may take whose tokens
--micro_batch_tokens gives, before MLPs are computed again.

Assumption: the rest has casts of weights and the head's logits, which 1.5 billion parameters' 5 GB
of the 55 beside their weights, gradients and moments on a card of 80 GB show. Shown wrong by: a run
that ends for want of memory, or leaves some free and computes MLPs again. Read by:
`tokens_that_fit`."""

GATHERED_LAYERS = 2
"""Layers whose weights a rank has gathered at a time.

Source: FSDP2 has one at work while the next is on its way. Shown wrong by:
`benchmarks.rank_memory`. Read by: `gathered_bytes`, `LogProbPass`, `RankUpdate`."""

WEIGHT_BYTES = 4  # of a trained weight, in fp32


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch that memory allows."""

    tokens: int
    """A power of two, so that slightly less free memory changes no repeated run."""
    checkpointing: bool
    """Whether it takes gradient checkpointing, which computes layers twice."""
    recomputed_mlps: int = 0
    """Layers of which the MLP's inside is computed twice."""


@dataclass(frozen=True)
class ActivationRoom:
    """What a device has for activations."""

    free: int
    """Its free bytes."""
    limit: int
    """The most bytes that activations may take, however many are free."""
    layers: float = 1.0
    """Its share of the model's layers."""


@dataclass(frozen=True)
class MicroBatchNeed:
    """What a policy's micro-batches must have or may do."""

    longest: int
    """Tokens of the longest row."""
    checkpointing: bool = False
    """Whether layers are computed twice in any case."""
    given: int = 0
    """Their tokens, where they are given."""
    kernels: str = "eager"
    """A key of `KEPT_MLP_VECTORS`."""


def choose_micro_batch_tokens(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    config: PolicyConfig,
    need: MicroBatchNeed,
    processes: int = 1,
    copied_bytes: int = 0,
) -> MicroBatchSize:
    """The largest micro-batch whose activations fit beside weights, gradients, moments and
    `copied_bytes` of gathered weights, where `processes` share a device; see `tokens_that_fit`."""
    devices = [str(device) for device in devices_of(model)]
    # a device's share of the trained parameters and of their moments
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = sum(own_part(parameter).numel() for parameter in trained) // len(devices)
    moment_bytes = _allocated_moment_bytes(optimizer, devices) // len(devices)
    # The weights are allocated already, and of a resumed run the moments.
    bytes_beside_weight = OPTIMIZERS[config.optimizer].device_bytes - WEIGHT_BYTES
    to_allocate = parameters * bytes_beside_weight - moment_bytes + copied_bytes
    release_memory()
    least_free = min(free_bytes(device) for device in devices)
    return tokens_that_fit(
        model.config,
        getattr(torch, config.dtype).itemsize,
        ActivationRoom(
            free=least_free // processes - to_allocate,
            limit=MAX_ACTIVATION_BYTES[model.device.type] // processes,
            layers=largest_layer_share(model, devices),
        ),
        need,
    )


def _allocated_moment_bytes(optimizer: torch.optim.Optimizer, devices: Sequence[str]) -> int:
    """Bytes that this process's moments take of these devices. An optimiser has none before its
    first step; counts of steps are no moments."""
    allocated = 0
    for state in optimizer.state.values():
        for value in state.values():
            is_moment = torch.is_tensor(value) and value.ndim > 0
            if is_moment and str(value.device) in devices:
                allocated += own_part(value).nbytes
    return allocated


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
    config, itemsize: int, room: ActivationRoom, need: MicroBatchNeed
) -> MicroBatchSize:
    """The largest micro-batch whose activations, in a type of `itemsize` bytes, fit the `room` of a
    device; or the given one. Where the longest row, or the given tokens, do not fit, what is inside
    of MLPs is computed twice, in as few layers as that takes. Where all of these are not enough for
    a row, and no number is given, whole layers are; or from the start, if `need` says so."""
    layers = room.layers
    bytes_of_token = layers * activation_bytes(config, itemsize, need.kernels)
    of_an_mlp = mlp_bytes(config, itemsize, need.kernels) / config.num_hidden_layers
    available = int(ACTIVATION_SHARE * max(room.free, 0))
    least = need.longest
    if need.given:
        available = int(SHARE_OF_GIVEN * max(room.free, 0))
        least = max(need.given, need.longest)
    # Of all layers, as many on each device as its share.
    excess = max(bytes_of_token - available / least, 0)
    mlps = ceil(excess / (layers * of_an_mlp))
    checkpointing = need.checkpointing
    if mlps > config.num_hidden_layers and not need.given:
        checkpointing = True
    mlps = 0 if checkpointing else min(mlps, config.num_hidden_layers)
    if need.given:
        return MicroBatchSize(need.given, checkpointing, mlps)
    bytes_of_token -= mlps * layers * of_an_mlp
    if checkpointing:
        bytes_of_token = checkpointed_activation_bytes(config, itemsize, layers, need.kernels)
    fitting = max(int(min(available, room.limit) / bytes_of_token), 1)
    tokens = min(fitting, int(MAX_TOKENS / layers))
    power_of_two = 2 ** (tokens.bit_length() - 1)
    return MicroBatchSize(power_of_two, checkpointing, mlps)


def gathered_bytes(layers: Sequence[int], outside: int, itemsize: int) -> int:
    """Bytes that a rank holds beside its own parts, of layers of so many parameters and so many
    outside."""
    # The gathered layers have weights and gradients in fp32, and so has what is outside.
    in_fp32 = outside + GATHERED_LAYERS * max(layers)
    gathered = 2 * WEIGHT_BYTES * in_fp32
    if itemsize == 2:
        # autocast keeps its casts of all layers until the pass ends
        gathered += itemsize * sum(layers)
    return gathered
