"""How many tokens are computed at a time: what activations take, and what memory is free for them."""

from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedModel

from alignment.policy.loading import devices_of
from alignment.policy.optimizers import OPTIMIZERS

MOST_TOKENS = 16384  # at once, beyond which more is no faster (benchmarks/README.md); not measured on a GPU
# Of activations: two micro-batches at once keep a CPU at work by then, a GPU takes what is free.
MOST_BYTES = {"cpu": 3 * 2**30, "cuda": 2**40}
SHARE = 0.5  # of the free memory that activations may take; the rest is for logits, copies and what else runs
BF16_SHARE = 0.6  # of a token's bytes in float32 that are kept under autocast: norms stay in float32


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


@dataclass(frozen=True)
class Budget:
    """Tokens computed at once, and whether activations must be computed again in backward to get there."""

    tokens: int
    checkpointing: bool


def choose_micro_batch_tokens(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, kind: str, dtype: torch.dtype, longest: int
) -> Budget:
    """How many tokens the memory that is free now allows: a power of two, so that a run that is repeated beside other work is
    cut alike.

    `optimizer`, of the kind `kind` in `OPTIMIZERS`, may hold its moments already; `dtype` is the type of matrix products;
    `longest` is the number of tokens of the longest row there can be. Where even one such row would not fit, gradient
    checkpointing is needed: it computes each layer twice.
    """
    devices = [str(device) for device in devices_of(model)]
    trained = sum(parameter.numel() for parameter in model.parameters()) // len(devices)
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = sum(value.nbytes for value in states if torch.is_tensor(value) and value.ndim and str(value.device) in devices)
    # The weights are in memory already. A split policy has only some layers on each device: what all of them take is more.
    free = min(free_bytes(device) for device in devices)
    free += held // len(devices) - trained * (OPTIMIZERS[kind].device_bytes - 4)
    room = int(SHARE * max(free, 0))
    share = 1 if dtype == torch.float32 else BF16_SHARE
    each = int(share * token_bytes(model.config))
    checkpointing = room < longest * each
    if checkpointing:
        each = int(share * checkpointed_token_bytes(model.config))
    most = min(max(min(room, MOST_BYTES[model.device.type]) // each, 1), MOST_TOKENS)
    return Budget(2 ** (most.bit_length() - 1), checkpointing)
