"""The number of tokens in a micro-batch, from the bytes of activations per token and the free memory."""

import gc
from collections.abc import Sequence

import psutil
import torch

from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.loading import devices_of, mlp_width
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import PolicyConfig

MAX_TOKENS = 16384  # larger micro-batches are no faster on a CPU (benchmarks/README.md); not measured on a GPU
# 3 GiB are enough for two parallel micro-batches that keep a CPU busy; on a GPU only the free memory is a limit.
MAX_ACTIVATION_BYTES = {"cpu": 3 * 2**30, "cuda": 2**40}
ACTIVATION_SHARE = 0.5  # of the free memory; logits, copies and other processes use the rest
CACHE_BYTES = {"cpu": 2 * 2**30, "cuda": 16 * 2**30}  # keys and values of the rows in flight in our own decoding, at most
STATE_SHARE = 0.7  # of a device's memory that weights, gradients and moments may take; the rest is for activations


def activation_bytes(config, itemsize: int = 4) -> int:
    """Bytes of activations that backward needs for one token of a Llama-like decoder, with products of numbers of `itemsize`
    bytes. Each layer stores four vectors of the MLP's width and about eleven of the hidden size; under autocast to 2 bytes two
    more, since norms stay in float32. (SmolLM2-135M in float32: 1.50 MB by this formula, 1.53 MB measured.)"""
    norms = 8 * config.hidden_size * (itemsize == 2)
    return config.num_hidden_layers * (itemsize * (4 * mlp_width(config) + 11 * config.hidden_size) + norms)


def checkpointed_activation_bytes(config, itemsize: int = 4) -> int:
    """`activation_bytes` under gradient checkpointing: the input of every layer, about three vectors at the model's ends, and
    the activations of the one layer that backward recomputes."""
    one_layer = activation_bytes(config, itemsize) // config.num_hidden_layers
    return 4 * (config.num_hidden_layers + 3) * config.hidden_size + one_layer


def key_value_bytes(config, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * itemsize


def release_memory() -> None:
    """Give back what torch keeps of a GPU's memory that nothing uses any more: others take it for used."""
    gc.collect()
    torch.cuda.empty_cache()


def free_bytes(device: str) -> int:
    """Free memory of a GPU, or of the host. On a GPU what torch keeps unused is not among it: see `release_memory`."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else psutil.virtual_memory().available


def total_bytes(device: str) -> int:
    """The memory of a GPU, or of the host."""
    cuda = device.startswith("cuda")
    return torch.cuda.get_device_properties(device).total_memory if cuda else psutil.virtual_memory().total


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, which may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all processes, where it is sharded; called on all of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def choose_micro_batch_tokens(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: PolicyConfig, longest: int, processes=1, whole=0
) -> tuple[int, bool]:
    """`tokens_that_fit` a device beside weights, gradients and moments. So many `processes` share its memory, and each also
    holds `whole` bytes of copies of weights."""
    devices = [str(device) for device in devices_of(model)]
    parameters = sum(own_part(parameter).numel() for parameter in model.parameters() if parameter.requires_grad) // len(devices)
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = [value for value in states if torch.is_tensor(value) and value.ndim and str(value.device) in devices]
    moment_bytes = sum(own_part(moment).nbytes for moment in moments) // len(devices)
    # The weights are allocated already. (A device of a split policy needs fewer activations than all layers do.)
    to_allocate = parameters * (OPTIMIZERS[config.optimizer].device_bytes - 4) - moment_bytes + whole
    release_memory()
    free = min(free_bytes(device) for device in devices) // processes - to_allocate
    limit = MAX_ACTIVATION_BYTES[model.device.type] // processes
    return tokens_that_fit(model.config, getattr(torch, config.dtype).itemsize, free, longest, limit)


def tokens_that_fit(config, itemsize: int, free: int, longest: int, limit: int) -> tuple[int, bool]:
    """(tokens of the largest micro-batch whose activations fit so many free bytes, whether it takes gradient checkpointing).
    Tokens are rounded down to a power of two, so that slightly less free memory does not change a repeated run.

    `longest` is the number of tokens of the longest row. If it does not fit, gradient checkpointing is needed, which computes
    layers twice. Activations take `limit` bytes at most."""
    available = int(ACTIVATION_SHARE * max(free, 0))
    per_token = activation_bytes(config, itemsize)
    checkpointing = available < longest * per_token
    if checkpointing:
        per_token = checkpointed_activation_bytes(config, itemsize)
    tokens = min(max(min(available, limit) // per_token, 1), MAX_TOKENS)
    return 2 ** (tokens.bit_length() - 1), checkpointing


def gathered_bytes(layers: Sequence[int], outside: int, itemsize: int) -> int:
    """Bytes that a rank holds beside its own parts, of layers of so many parameters and so many outside them. In fp32, as
    weights and as gradients: what is outside and two layers, the one at work and one on its way. Autocast's casts of all
    layers stay until backward."""
    return 8 * (outside + 2 * max(layers)) + 2 * sum(layers) * (itemsize == 2)
