"""How much of a rollout is computed at a time: what activations take, and what is free for them."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import psutil
import torch
from rich.console import Console
from transformers import PreTrainedModel

from alignment.args import RLArgs, SFTArgs
from alignment.policy.loading import devices_of
from alignment.policy.placement import TRAINED_BYTES

MOST_TOKENS = 16384  # at once, beyond which more is no faster (benchmarks/README.md); not measured on a GPU
# Of activations: two micro-batches at once keep a CPU at work by then, a GPU takes what is free.
MOST_BYTES = {"cpu": 3 * 2**30, "cuda": 2**40}
SHARE = 0.5  # of the free memory that activations may take; the rest is for logits, copies and what else runs
BF16_SHARE = 0.6  # of a token's bytes in float32 that are kept under autocast: norms stay in float32

Trained = TypeVar("Trained", RLArgs, SFTArgs)


def token_bytes(config) -> int:
    """What backward keeps of a token, in float32, in a Llama-like decoder: four rows of the MLP's width and about eleven of the
    model's, a layer. (SmolLM2-135M: 1.50 MB by this, 1.53 MB measured.)"""
    return 4 * config.num_hidden_layers * (4 * config.intermediate_size + 11 * config.hidden_size)


def checkpointed_token_bytes(config) -> int:
    """The same where each layer's input alone is kept, and some rows at the model's ends, and one layer at a time is computed
    again."""
    one_layer = token_bytes(config) // config.num_hidden_layers
    return 4 * (config.num_hidden_layers + 3) * config.hidden_size + one_layer


def free_bytes(device: str) -> int:
    """Memory that nobody uses."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available


def fit(
    policy: PreTrainedModel,
    args: Trained,
    longest: int,
    console: Console,
    dtype: torch.dtype = torch.float32,
    optimizer: torch.optim.Optimizer | None = None,
    before: int = 0,
) -> Trained:
    """The arguments with --micro_batch_tokens decided, where they leave it open: a power of two, so that a run that is repeated
    beside other work is cut alike. `longest`: tokens of the longest row there can be. `dtype`: of matrix products. `optimizer`:
    whose moments may be there already. `before`: what the run was cut by before it was stopped.

    OrderedAccumulation on gradient checkpointing where even one such row would not fit: it computes each layer twice.
    """
    if args.micro_batch_tokens:
        return args
    devices = [str(device) for device in devices_of(policy)]
    trained = sum(parameter.numel() for parameter in policy.parameters()) // len(devices)
    kind = args.optimizer if isinstance(args, RLArgs) else "adamw"
    states = [value for state in (optimizer.state.values() if optimizer else ()) for value in state.values()]
    there = sum(value.nbytes for value in states if torch.is_tensor(value) and value.ndim and str(value.device) in devices)
    # The weights are there already. A split policy has some of the layers on each device: what all of them take is more.
    free = min(free_bytes(device) for device in devices) - trained * (TRAINED_BYTES[kind] - 4) + there // len(devices)
    room = int(SHARE * max(free, 0))
    share = 1 if dtype == torch.float32 else BF16_SHARE
    each = int(share * token_bytes(policy.config))
    if room < longest * each:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        console.print("memory is short: activations are computed again in backward (gradient checkpointing)")
        each = int(share * checkpointed_token_bytes(policy.config))
    most = min(max(min(room, MOST_BYTES[policy.device.type]) // each, 1), MOST_TOKENS)
    return dataclasses.replace(args, micro_batch_tokens=before or 2 ** (most.bit_length() - 1))
