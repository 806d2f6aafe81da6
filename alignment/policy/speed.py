"""Seconds of a step's phases, from shapes alone: a device's operations, bytes in its memory, launches of kernels, and bytes
between devices and to the disk, each times the seconds of one. Nothing here knows a device; `policy/hardware.py` does."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignment.policy.memory import activation_bytes, key_value_bytes
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.placement import ModelShape
from alignment.policy.policy import RANKED

# Kernels, counted in a Llama-like decoder of transformers under our attention: of a layer's forward pass, and of all else.
LAYER_KERNELS, OTHER_KERNELS = 53, 90
VLLM_KERNELS = 400  # that one token of vLLM's costs the host: it replays a graph, and schedules
TRAFFIC = 3  # times that a byte of activations passes through memory in a forward pass: written, and read by others
LOGIT_TRAFFIC = 8  # times that an fp32 logit does: product, softmax, log-prob, entropy or draw
OPTIMIZER_BYTES = 40  # of a trained parameter in an AdamW step and in the gradient's norm: read, and written


@dataclass(frozen=True)
class Load:
    """What a step computes, and what shares it."""

    policy_parallelism: str  # A key of `POLICIES`.
    devices: int  # Of the policy, on each machine.
    machines: int
    engines: int  # Of the sampler, on all machines.
    sampler_tensor_parallel: int
    vllm: bool
    in_place: bool  # Whether the sampler reads the policy's weights where they are.
    itemsize: int  # Bytes of a number in matrix products.
    optimizer: str
    prompts_per_rollout: int
    group_size: int
    prompt: float  # Mean tokens of a prompt.
    response: float  # Mean tokens of a response.
    max_new_tokens: int
    cache_bytes: int  # Of keys and values in flight in our own decoding, at most.
    trained: float  # Share of responses with a gradient.
    epochs_per_rollout: int
    updates_per_rollout: int
    micro_batch_tokens: int
    checkpointing: bool
    needs_old_policy: bool
    reference: bool
    problems: int  # Of an evaluation.
    eval_response: float  # Mean tokens of a response there.
    eval_max_new_tokens: int
    refills: float = 0.0  # Groups sampled beyond those of the step, as a share of these.


def work_of_phases(shape: ModelShape, config: Any, load: Load) -> dict[str, Counter]:
    """Phase -> what the busiest device does in it: "operations" of matrix products (an addition is one, a multiplication
    another), "bytes", "launches", and bytes over a "link", the "network" and to the "disk". A checkpoint and an evaluation are
    each one's, not a step's. A mixture's experts are counted as if every token took all."""
    decoder, lora = _Decoder(shape, config, load.itemsize), bool(shape.adapters)
    ranked, rows, response = load.policy_parallelism in RANKED, load.prompts_per_rollout * load.group_size, load.response
    ranks = load.devices * load.machines if ranked else 1
    total, trained = sum(shape.parameters.values()), shape.trained(shape.parameters)
    parts = load.devices if load.policy_parallelism == "sharded" else 1
    tokens = (load.prompts_per_rollout * load.prompt + rows * response) / ranks
    context = (load.prompts_per_rollout * load.prompt**2 / 2 + rows * response * (load.prompt + response / 2)) / ranks / tokens
    pieces = math.ceil(tokens * load.trained / load.updates_per_rollout / load.micro_batch_tokens) * load.updates_per_rollout

    def passes(share: float, pieces: int) -> Counter:
        forward = decoder.forward(share * tokens, context, share * rows / ranks * response, pieces)
        # A rank gathers what others hold of the fp32 weights.
        return forward + Counter(link=4 * total * (1 - 1 / parts) * pieces)

    forward, log_probs = passes(load.trained, pieces), passes(1.0, math.ceil(tokens / load.micro_batch_tokens))
    # Backward computes the gradients of inputs and of trained weights, the logits again, and with checkpointing all layers.
    times = 2 + (not lora) + load.checkpointing
    casts = 6 * decoder.inner * pieces * (load.itemsize == 2)
    update = _times(forward, load.epochs_per_rollout * times) + Counter(
        bytes=casts + (OPTIMIZER_BYTES * load.updates_per_rollout + 12 * pieces) * trained / parts,
        launches=3 * LAYER_KERNELS / 2 * load.updates_per_rollout,
    )
    summed = 8 * trained * load.updates_per_rollout / parts  # an all-reduce sends and receives each gradient
    if parts > 1:
        update += Counter(link=4 * trained * (1 - 1 / parts) * pieces)
    elif ranked and load.devices > 1:
        update += Counter(link=summed)
    update += Counter(network=summed * (ranked and load.machines > 1))
    update += Counter(link=OPTIMIZERS[load.optimizer].host_bytes * trained * load.updates_per_rollout)
    if load.policy_parallelism == "layer_split":  # hidden states and their gradients
        update += Counter(link=8 * config.hidden_size * tokens * (load.devices - 1) * load.epochs_per_rollout)
    sampled = 1 + load.refills
    phases = {
        "sampling": decoder.sample(load, sampled * load.prompts_per_rollout, load.group_size, response, load.max_new_tokens),
        "old_log_probs": log_probs if load.needs_old_policy else Counter(),
        "reference": log_probs if load.reference else Counter(),
        "update": update,
        "sync": Counter() if load.in_place else Counter(bytes=total * (4 + 3 * load.itemsize), link=total * load.itemsize),
        "checkpoint": Counter(disk=4 * total + (OPTIMIZERS[load.optimizer].device_bytes - 8) * trained),
        "evaluation": decoder.sample(load, load.problems, 1, load.eval_response, load.eval_max_new_tokens),
    }
    return {phase: work for phase, work in phases.items() if work}


class _Decoder:
    """The sizes of a model that its work depends on."""

    def __init__(self, shape: ModelShape, config: Any, itemsize: int):
        self.itemsize, self.layers = itemsize, len(shape.layers)
        self.inner = sum(shape.parameters[name] for name in shape.layers)
        self.vocabulary, self.head = config.vocab_size, config.vocab_size * config.hidden_size
        heads = getattr(config, "num_attention_heads", 1)
        self.key_values = key_value_bytes(config, itemsize)
        groups = heads / (getattr(config, "num_key_value_heads", None) or heads)
        self.queries = self.key_values / 2 / itemsize * groups  # numbers of a token's queries in all layers
        self.activations = activation_bytes(config, itemsize)

    def forward(self, tokens: float, context: float, logits: float, pieces: int) -> Counter:
        """A forward pass of tokens, each of which sees `context` on average, and logits of some, in so many pieces."""
        return Counter(
            operations=2 * self.inner * tokens + 4 * self.queries * context * tokens + 2 * self.head * logits,
            bytes=self.itemsize * (self.inner + self.head) * pieces
            + TRAFFIC * self.activations * tokens
            + LOGIT_TRAFFIC * 4 * self.vocabulary * logits,
            launches=(LAYER_KERNELS * self.layers + OTHER_KERNELS) * pieces,
        )

    def sample(self, load: Load, prompts: float, group_size: int, response: float, longest: int) -> Counter:
        """Prefill, and a pass for each token of the longest response in flight, on one engine of several."""
        prompts = prompts / load.engines
        token_bytes, rows, steps = self.key_values, prompts * group_size, min(longest, 2 * response)
        group = (load.prompt + group_size * longest) * token_bytes
        waves = 1 if load.vllm else math.ceil(prompts / max(1, load.cache_bytes // group))
        prefill = self.forward(prompts * load.prompt, load.prompt / 2, prompts, waves)
        decode = self.forward(rows * response, load.prompt + response / 2, rows * response, math.ceil(steps * waves))
        cache = rows * response * token_bytes * (load.prompt / group_size + response / 2)
        work = prefill + decode + Counter(bytes=cache)
        if load.vllm:
            work["launches"] = VLLM_KERNELS * steps
        return _times(work, 1 / load.sampler_tensor_parallel)


def _times(work: Counter, factor: float) -> Counter:
    return Counter({kind: factor * amount for kind, amount in work.items()})


Rates = Mapping[str, tuple[float, float]]
"""Kind of work -> seconds of one unit, at best and at worst."""


def seconds(work: Counter, rates: Rates) -> tuple[float, float]:
    """The least and the most seconds: at best all kinds of work overlap, at worst each waits for the others."""
    best, worst = ([amount * rates[kind][end] for kind, amount in work.items()] for end in (0, 1))
    return max(best, default=0.0), sum(worst)
