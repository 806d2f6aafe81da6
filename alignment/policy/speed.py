"""Seconds of a step's phases, from shapes alone: operations, bytes in memory, launches of kernels, and bytes between devices and
to the disk, each times the seconds of one. Nothing here knows a device; `policy/hardware.py` does."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from alignment.policy.memory import StepShape, activation_bytes, key_value_bytes
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.placement import ModelShape
from alignment.policy.policy import RANKED

# Kernels, counted in Llama-like decoders of transformers under our attention: of a layer's forward pass, and of all else.
LAYER_KERNELS, OTHER_KERNELS = 53, 90
VLLM_KERNELS, VLLM_ROWS = 400, 256  # what a token of vLLM's costs the host, which replays a graph; rows it has in flight
TRAFFIC = 3  # times that a byte of activations passes through memory in a forward pass: written, and read by others
LOGIT_TRAFFIC = 8  # times that an fp32 logit does: product, softmax, log-prob, entropy or draw
OPTIMIZER_BYTES = 40  # read and written of a trained parameter by the gradient's norm and AdamW
Work = Counter[str]
Rates = Mapping[str, tuple[float, float]]
"""Kind of work -> seconds of one unit, at best and at worst."""


@dataclass(frozen=True)
class Load:
    """What a step computes, and what shares it."""

    step: StepShape
    devices: int  # Of the policy, on each machine.
    machines: int
    engines: int  # Of the sampler, on all machines.
    sampler_tensor_parallel: int
    in_place: bool  # Whether the sampler reads the policy's weights where they are.
    cache_bytes: int  # Of keys and values in flight in our own decoding, at most.
    prompts_per_rollout: int
    group_size: int
    epochs_per_rollout: int
    updates_per_rollout: int
    micro_batch_tokens: int
    passes: tuple[str, ...]  # Of "old_log_probs" and "reference", those that the loss needs.
    problems: int  # Of an evaluation.
    eval_max_new_tokens: int
    prompt: float  # Mean tokens of a prompt.
    response: float  # Mean share of --max_new_tokens that a response takes.
    trained: float  # Share of responses with a gradient.
    refills: float = 0.0  # Groups sampled beyond a step's, as a share of these.


def work_of_phases(shape: ModelShape, config: Any, load: Load) -> dict[str, Work]:
    """Phase -> what the busiest device does: "operations" of matrix products (a multiplication and an addition are two),
    "bytes", "launches", and bytes over a "link", the "network" and to the "disk". A checkpoint and an evaluation are each one's,
    not a step's. Of a mixture's experts every token counts as taking all."""
    step, ranked = load.step, load.step.policy_parallelism in RANKED
    ranks, parts = load.devices * load.machines * ranked or 1, load.devices if step.policy_parallelism == "sharded" else 1
    stages, asked = load.devices if step.policy_parallelism == "layer_split" else 1, load.prompts_per_rollout * (1 + load.refills)
    rows, response = load.prompts_per_rollout * load.group_size / ranks, load.response * step.max_new_tokens
    prompts, total = load.prompts_per_rollout * load.prompt / ranks, sum(shape.parameters.values())
    tokens = prompts + rows * response
    seen = (prompts * load.prompt / 2 + rows * response * (load.prompt + response / 2)) / tokens
    trained, updates = shape.trained(shape.parameters) / parts, load.updates_per_rollout
    pieces = updates * ceil(load.epochs_per_rollout * load.trained * tokens / updates / load.micro_batch_tokens)
    forward = _forward(shape, config, step.itemsize, (tokens, seen, rows * response))
    gathered = Counter(link=4 * total * (1 - 1 / parts))  # what other ranks hold of the fp32 weights
    layers = sum(shape.parameters[name] for name in shape.layers)

    def in_pieces(share: float, number: int) -> Work:
        weights = Counter(bytes=(4 + step.itemsize) * total, launches=LAYER_KERNELS * len(shape.layers) + OTHER_KERNELS)
        # The first of several stages is idle while the last micro-batches pass the others (Huang et al. 2019, section 2).
        work, busy = _times(share, forward) + _times(number, weights), (number + stages - 1) / (number * stages)
        return work + _times(busy - 1, Counter(operations=work["operations"], bytes=work["bytes"])) + _times(number, gathered)

    # Backward computes the gradients of inputs and of trained weights.
    update = _times(2 if shape.adapters else 3, in_pieces(load.trained * load.epochs_per_rollout, pieces))
    update += Counter(
        bytes=12 * trained * pieces + OPTIMIZER_BYTES * trained * updates + 6 * layers * pieces * (step.itemsize == 2),
        launches=LAYER_KERNELS / 2 * len(shape.layers) * updates,
        # Ranks sum gradients: parts of a sum, or two ways of a whole one; split layers hand on hidden states and gradients.
        link=(4 * trained * parts * pieces * (1 - 1 / parts) if parts > 1 else 8 * trained * updates * (ranks > load.machines))
        + 8 * config.hidden_size * tokens * (stages - 1) * load.epochs_per_rollout
        + OPTIMIZERS[step.optimizer].host_bytes * trained * updates,
        network=8 * trained * updates * (ranked and load.machines > 1),
    )
    phases = {
        "sampling": _sampling(shape, config, load, asked, load.group_size, step.max_new_tokens),
        **dict.fromkeys(load.passes, in_pieces(1.0, ceil(tokens / load.micro_batch_tokens))),
        "update": update,
        "sync": Counter() if load.in_place else Counter(bytes=(4 + 3 * step.itemsize) * total, link=step.itemsize * total),
        "checkpoint": Counter(disk=4 * total + 8 * trained * parts),
        "evaluation": _sampling(shape, config, load, load.problems, 1, load.eval_max_new_tokens),
    }
    return {phase: work for phase, work in phases.items() if work}


def _forward(shape: ModelShape, config: Any, itemsize: int, counts: tuple[float, float, float]) -> Work:
    """A forward pass of (tokens, tokens that each sees on average, tokens with logits), but for what each piece of it adds."""
    tokens, seen, logits = counts
    heads = getattr(config, "num_attention_heads", 1)
    groups = heads / (getattr(config, "num_key_value_heads", None) or heads)
    queries = groups * key_value_bytes(config, 1) / 2  # numbers of a token's queries, in all layers
    products = sum(shape.parameters[name] for name in shape.layers) * tokens + config.vocab_size * config.hidden_size * logits
    activations = TRAFFIC * activation_bytes(config, itemsize) * tokens
    attention = 4 * queries * seen * tokens
    return Counter(operations=2 * products + attention, bytes=activations + 4 * LOGIT_TRAFFIC * config.vocab_size * logits)


def _sampling(shape: ModelShape, config: Any, load: Load, prompts: float, group_size: int, longest: int) -> Work:
    """What one engine does: prefill, and for each token of the longest responses a pass over all weights."""
    step, prompts = load.step, prompts / load.engines
    token_bytes, rows, drawn = key_value_bytes(config, step.itemsize), prompts * group_size, load.response * longest
    lots = rows / VLLM_ROWS if step.vllm else prompts * (load.prompt + group_size * longest) * token_bytes / load.cache_bytes
    steps = ceil(lots) * min(longest, 2 * drawn)  # a row that ends early makes room for others, or waits for the longest
    prefill = _forward(shape, config, step.itemsize, (prompts * load.prompt, load.prompt / 2, prompts))
    decode = _forward(shape, config, step.itemsize, (rows * drawn, load.prompt + drawn / 2, rows * drawn))
    kernels = VLLM_KERNELS if step.vllm else LAYER_KERNELS * len(shape.layers) + OTHER_KERNELS
    cache = rows * drawn * token_bytes * (load.prompt / group_size + drawn / 2)
    passes = Counter(bytes=step.itemsize * sum(shape.parameters.values()) * steps + cache, launches=kernels * steps)
    return _times(1 / load.sampler_tensor_parallel, prefill + decode + passes)


def _times(factor: float, work: Work) -> Work:
    return Counter({kind: factor * amount for kind, amount in work.items()})


def seconds(work: Work, rates: Rates) -> tuple[float, float]:
    """The least and the most seconds: at best all kinds of work overlap, at worst each waits for the others."""
    best, worst = ([amount * rates[kind][end] for kind, amount in work.items()] for end in (0, 1))
    return max(best, default=0.0), sum(worst)
