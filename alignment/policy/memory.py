"""Bytes on a device: the micro-batch tokens that the free memory allows; a training step's peak, by kind, from shapes alone."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.loading import devices_of, mlp_width
from alignment.policy.log_probs import row_pieces
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.packing import QUERIES_AT_A_TIME
from alignment.policy.placement import ModelShape, Roles, Share, engine_share, policy_shares
from alignment.policy.policy import RANKED, PolicyConfig

MAX_TOKENS = 16384  # larger micro-batches are no faster on a CPU (benchmarks/README.md); not measured on a GPU
# 3 GiB are enough for two parallel micro-batches that keep a CPU busy; on a GPU only the free memory is a limit.
MAX_ACTIVATION_BYTES = {"cpu": 3 * 2**30, "cuda": 2**40}
ACTIVATION_SHARE = 0.5  # of the free memory; logits, copies and other processes use the rest
CACHE_BYTES = {"cpu": 2 * 2**30, "cuda": 16 * 2**30}  # keys and values of the rows in flight in our own decoding, at most
STATE_SHARE = 0.7  # of a device's memory that weights, gradients and moments may take; the rest is for activations
CONTEXT_BYTES = int(0.8e9)  # of a process on a GPU: CUDA's context, and workspaces of matrix products
SPARE = 0.05  # of a card, which is left to fragmentation


def activation_bytes(config, itemsize: int = 4) -> int:
    """Bytes of activations that backward needs for one token of a Llama-like decoder, with products of numbers of `itemsize`
    bytes. Each layer stores four vectors of the MLP's width and about eleven of the hidden size; under autocast to 2 bytes two
    more, since norms stay in float32. (SmolLM2-135M in float32: 1.50 MB by this formula, 1.53 MB measured.)"""
    norms = 8 * config.hidden_size * (itemsize == 2)
    return config.num_hidden_layers * (itemsize * (4 * mlp_width(config) + 11 * config.hidden_size) + norms)


def checkpointed_activation_bytes(config, itemsize: int = 4) -> int:
    """`activation_bytes` under gradient checkpointing: each layer's input, three vectors at the ends, one whole layer."""
    one_layer = activation_bytes(config, itemsize) // config.num_hidden_layers
    return 4 * (config.num_hidden_layers + 3) * config.hidden_size + one_layer


def key_value_bytes(config, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    query_heads = getattr(config, "num_attention_heads", 1)  # a model without attention keeps less, whatever the length
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    heads = getattr(config, "num_key_value_heads", None) or query_heads
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
    """`tokens_that_fit` beside weights, gradients, moments and `whole` bytes of copies, where `processes` share a device."""
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
    """(tokens of the largest micro-batch whose activations fit `free` and `limit` bytes, whether it takes gradient
    checkpointing, which computes layers twice: where the longest row, of `longest` tokens, does not fit otherwise). Tokens are
    rounded down to a power of two, so that slightly less free memory does not change a repeated run."""
    available = int(ACTIVATION_SHARE * max(free, 0))
    per_token = activation_bytes(config, itemsize)
    checkpointing = available < longest * per_token
    if checkpointing:
        per_token = checkpointed_activation_bytes(config, itemsize)
    tokens = min(max(min(available, limit) // per_token, 1), MAX_TOKENS)
    return 2 ** (tokens.bit_length() - 1), checkpointing


def gathered_bytes(layers: Sequence[int], outside: int, itemsize: int) -> int:
    """Bytes that a rank holds beside its own parts, of layers of so many parameters and so many outside: in fp32, as weights
    and as gradients, what is outside and two layers, at work and on its way; and autocast's casts of all layers."""
    return 8 * (outside + 2 * max(layers)) + 2 * sum(layers) * (itemsize == 2)


@dataclass(frozen=True)
class StepShape:
    """What a training step needs to know to count its bytes."""

    card: int  # Bytes of each GPU.
    policy_parallelism: str  # A key of `POLICIES`.
    itemsize: int  # Bytes of a number in matrix products: 2 under autocast to bfloat16, else 4.
    optimizer: str
    micro_batch_tokens: int  # 0: what `choose_micro_batch_tokens` would take.
    prompt: int  # Tokens of the longest prompt.
    max_new_tokens: int  # Of the longest response.
    rows: int  # Most responses that are sampled at once, by our own decoding.
    sampled: int  # Tokens of these and their prompts.
    truncated: bool  # Whether top-p or top-k leaves tokens out.
    frozen: int  # Frozen models kept on the reference's device: the reference, and the old policy.
    vllm: bool  # Whether vLLM samples, or our own decoding.
    gpu_memory_utilization: float | None  # vLLM's share of a GPU's memory, for each engine; None: `engine_share`.
    engines: int  # On a GPU that samples and evaluates.


@dataclass(frozen=True)
class DevicePeak:
    """What a rank of the policy, or a device, holds at the worst moment of each phase."""

    device: str
    rank: int | None  # None: a device of a policy of one process, or of other roles.
    phases: dict[str, dict[str, int]]  # Phase -> kind -> bytes; only the phases that occur there.

    @property
    def name(self) -> str:
        """The device, and which rank's it is."""
        return self.device if self.rank is None else f"rank {self.rank}, {self.device}"

    @property
    def worst(self) -> str:
        """The phase that takes the most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def total(self) -> int:
        """Bytes of that phase."""
        return sum(self.phases[self.worst].values())


def peak_bytes(shape: ModelShape, config: Any, roles: Roles, step: StepShape) -> list[DevicePeak]:
    """The peaks of the machine's ranks, or of the devices of a policy of one process, then of other roles' own devices. The
    worst is the head of an update's later micro-batch: all of its activations, earlier ones'
    gradient, and temporaries of logits; for a rank also where whole layers or their gradients are on their way; or sampling,
    with keys and values but no gradients. Engines and frozen models stay. For fp32 weights whose linear layers are autocast."""
    shares = policy_shares(shape, roles.policy, step.policy_parallelism, step.optimizer)
    number, others = len(shares), {*roles.sample, roles.eval, roles.reference} - {share.device for share in shares}
    shares += [Share(device, "", (), 0) for device in sorted(others)]
    # Ranks may share the host's CPU, where the first of them has the other roles, too.
    none = replace(roles, sample=(), eval="", reference="")
    here = [none if share in shares[:i] else roles for i, share in enumerate(shares)]
    ranks = number if step.policy_parallelism in RANKED else 0
    phases = [_peak_of(share, shape, config, there, step) for share, there in zip(shares, here)]
    return [DevicePeak(share.device, i if i < ranks else None, phases[i]) for i, share in enumerate(shares)]


def _peak_of(share: Share, shape: ModelShape, config: Any, roles: Roles, step: StepShape) -> dict[str, dict[str, int]]:
    """Phase -> kind -> bytes of one share of the policy and the other roles on its device."""
    device, held = share.device, share.modules
    total, trained = sum(shape.parameters.values()), shape.trained(held) // share.parts
    samples = device in (*roles.sample, roles.eval)
    engines = step.engines if roles.eval in roles.sample else 1
    frozen, vllm = step.frozen * (device == roles.reference), step.vllm
    memory_share = step.gpu_memory_utilization or engine_share(roles, device, engines)
    kept = {
        "weights": shape.state_bytes(held, 4) // share.parts,
        "moments": (OPTIMIZERS[step.optimizer].device_bytes - 8) * trained,
        "sampler": engines * samples * (int(memory_share * step.card) if vllm else step.itemsize * total),
        "reference": shape.frozen_bytes(step.itemsize) * frozen,
        "context": CONTEXT_BYTES * (bool(held or frozen or not vllm) + engines * (samples and vllm)),
    }
    update = {**kept, "gradients": 4 * trained}
    ranked = bool(held) and step.policy_parallelism in RANKED
    layers = [shape.parameters[name] for name in shape.layers]
    gathered = gathered_bytes(layers, total - sum(layers), step.itemsize) if ranked else 0
    longest = step.prompt + step.max_new_tokens
    fit, checkpointing = tokens_that_fit(config, step.itemsize, step.card - sum(update.values()) - gathered, longest, step.card)
    tokens = max(step.micro_batch_tokens or fit * (not checkpointing), longest)  # one row at least
    if held:
        update |= _activations(shape, config, step, held, tokens)
    head = head_bytes(config, step, tokens, trained=shape.head in held and not shape.adapters)
    update["logits"] = head if shape.head in held or frozen else 0
    moments = [*_rank_moments(shape, config, update)] if ranked else [update]
    phases = {"update": max(moments, key=lambda moment: sum(moment.values()))}
    if samples and not vllm:
        all_rows = step.sampled * key_value_bytes(config, 2)
        cache = min(CACHE_BYTES["cuda"], all_rows)  # waves of rows keep to it
        logits = 4 * step.rows * cache // all_rows * config.vocab_size * (5 if step.truncated else 4)
        phases["sampling"] = kept | {"keys and values": cache, "logits": logits}
    return phases


def _activations(shape: ModelShape, config: Any, step: StepShape, held: Sequence[str], tokens: int) -> dict[str, int]:
    """Bytes of the layers held: autocast's casts, which backward keeps, activations, and what attention keeps beside them."""
    layers = [name for name in shape.layers if name in held]
    heads = getattr(config, "num_attention_heads", 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # Rows of one prompt need a bias, which each layer casts, and keeps where one piece has all of a row's queries; other rows'
    # keys and values are repeated.
    rows, queries = (tokens - step.prompt) // step.max_new_tokens, min(step.max_new_tokens, QUERIES_AT_A_TIME)
    bias = rows * (heads // kv_heads) * queries * (step.prompt + step.max_new_tokens) if rows > 1 else 0
    kept = len(layers) if queries == step.max_new_tokens else 1
    repeated = 4 * tokens * config.hidden_size * (heads > kv_heads)
    ends = 12 * config.hidden_size * (shape.head in held)  # about three vectors at the head
    # Of two norms a layer, what only the gradient of their weights needs.
    unkept = 8 * config.hidden_size * len(layers) * bool(shape.adapters)
    a_token = activation_bytes(config, step.itemsize) * len(layers) // config.num_hidden_layers - unkept + ends
    return {
        "casts": shape.state_bytes(layers, 4) // 2 * (step.itemsize == 2),
        "activations": tokens * a_token,
        "attention": kept * 2 * bias + len(layers) * repeated + 4 * bias,
    }


def _rank_moments(shape: ModelShape, config: Any, update: dict[str, int]) -> Iterator[dict[str, int]]:
    """The update of a rank, which gathers in fp32 (or copies, where it has all weights) what is outside the layers for a whole
    micro-batch, and each layer for its forward and backward pass: at the head, and in backward of the last layer but one, where
    the next one is gathered ahead, this one's gradient is whole, and the last one's is on its way to its ranks."""
    outside = shape.state_bytes([name for name in shape.parameters if name not in shape.layers], 4)
    layer = max(shape.state_bytes([name], 4) for name in shape.layers)
    gradient = 4 * max(shape.trained([name]) for name in shape.layers)
    # In bf16 the gradient of one matrix, and in fp32 the head's.
    products = 0 if shape.adapters else 2 * mlp_width(config) * config.hidden_size + 4 * config.vocab_size * config.hidden_size
    left = max(len(shape.layers) - 2, 0) / len(shape.layers)
    kept = {kind: int(left * update[kind]) for kind in ("casts", "activations", "attention")}
    yield update | {"gathered": outside}
    yield update | kept | {"logits": 0, "gathered": outside + 2 * layer, "whole gradients": 2 * gradient + products}


def head_bytes(config: Any, step: StepShape, tokens: int, trained: bool) -> int:
    """Bytes of `LabelLogProbs`: the head's weight cast; its gradient, in fp32 and as a bf16 product; and temporaries, as
    multiples of a piece's fp32 logits: with entropies, in forward alone, or without. Truncation adds a copy, masks, ranks."""
    head = config.vocab_size * config.hidden_size
    cast = 2 * head * (step.itemsize == 2)
    piece = 4 * row_pieces(tokens - step.prompt, config.vocab_size)[0].stop * config.vocab_size
    with_entropies, without = (5, 5) if step.truncated else (4, 3)
    backward = 4 * head + max(without * piece, cast + 3 * piece // 2)
    return cast + max(with_entropies * piece, backward * trained)
