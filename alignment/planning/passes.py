"""What passes through a model ask of a device: operations, bytes and kernels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from alignment.model.activations import activation_bytes, key_value_bytes
from alignment.model.loading import mlp_width
from alignment.model.shape import ModelShape
from alignment.planning.measured_card import MEASURED
from alignment.planning.work import Work

LAYER_KERNELS = 53
"""Kernels of a layer's forward pass on a CPU, and of a decoded token.

Source: counted in Llama-like decoders of transformers under our attention; `benchmarks.gpu_cost`
counts 1,540 for a token of 28 layers, of which this and the next explain 1,574. Shown wrong by: a
profile of an update (`benchmarks.profile_step`), divided by its layers and passes. Read by:
`forward`."""

OTHER_KERNELS = 90
"""The same outside the layers.

Source: counted in the same decoders. Shown wrong by: the same profile. Read by: `forward`."""

VLLM_ROWS = 256
"""Responses that vLLM has in flight at a time, whose passes cards.toml has the rate of.

Source: `max_num_seqs`, vLLM's own default, which we leave. On cards of 70 GiB and more, but for an
A100, it is 1,024; but what takes the time of a pass is its host's work for each row, so that a pass
of so many rows counts as four. Shown wrong by: seconds of sampling of more rows. Read by:
`decoding`."""

ACTIVATION_PASSES = 3
"""Times that a byte of activations passes through memory in a forward pass.

Assumption: it is written, and read by two others. Shown wrong by: the bytes that a profiler of the
card counts in a forward pass (ncu's dram__bytes). Read by: `forward`."""

LOGIT_PASSES = 8
"""Times that an fp32 logit passes through memory.

Assumption: for the product, the softmax, the log-prob, and an entropy or a draw. Shown wrong by:
the same profiler, at the head. Read by: `forward`."""

EARLY_END = 2
"""Times the mean response that passes take at most: rows that end early make room for others.

Assumption: it holds where the longest response in flight is at most twice the mean. Shown wrong by:
the completions of a step, by their longest `token_ids` over their mean, where --group_size and
prompts are few enough that nothing waits; in runs of the tiny preset the two differ by 6 %, so that
it has no effect there. Read by: `decoding`."""

FP32 = 4  # bytes of a number in float32

FORWARD = "log_probs"
"""A forward pass for log-probs alone, in `PASS_COUNTS`."""

UPDATE = "update"
"""A forward and a backward pass there."""

PASSES = {FORWARD: 1, UPDATE: 3}
"""Forward passes' products in these.

Source: arithmetic: in backward the gradients of inputs, and those of weights. Shown wrong by: the
operations of `benchmarks.gpu_cost`. Read by: `pass_on_card`, `StepWork`."""

HOST_COUNTS = "host"
"""How a CPU computes a pass: `forward` counts it."""


ATTENTION_OF_BACKWARD = 2.5
"""Products of attention's backward pass, of its forward pass's.

Source: arithmetic of flash kernels: five products for two. Shown wrong by: the operations of
`benchmarks.gpu_cost`. Read by: `_attention_on_card`."""


class PassCount(NamedTuple):
    """What a pass asks of a GPU beside its products.

    Source: h200.toml, fitted by `benchmarks.gpu_passes` to what `benchmarks.gpu_cost` counts of
    the product's own code; that other kernels reach what an H200's did is in them. Shown wrong by:
    a profile of an update. Read by: `pass_on_card`."""

    hidden: float
    """Bytes, as many as a copy moves in that time, for each token, layer and number of the hidden
    size."""
    mlp: float
    """The same for each token, layer and number of an MLP's width."""
    weight: float
    """For each micro-batch and parameter of a layer."""
    attention: float
    """As `hidden`, of attention's kernels, by the bytes that they move."""
    logit: float
    """For each logit."""
    end_hidden: float
    """For each token and number of the hidden size, outside of layers."""
    end_weight: float
    """For each micro-batch and parameter outside of layers."""
    layer_launches: float
    """Kernels, for each micro-batch and layer."""
    ends_launches: float
    """Kernels outside of layers, for each micro-batch."""


PASS_COUNTS: Mapping[str, Mapping[str, PassCount]] = {
    name: {work: PassCount(**count) for work, count in table.items()}
    for name, table in MEASURED["passes"].items()
}
"""How a pass is computed, --kernels or "parts" (eager kernels, with attention by its parts, as in
float32), and `FORWARD` or `UPDATE` -> its count.

Source: that of `PassCount`. Shown wrong by: what shows that. Read by: `pass_on_card`."""


def counts_on_card(kernels: str, itemsize: int) -> str:
    """The key of `PASS_COUNTS` of a GPU's passes by some --kernels, with products of numbers of
    `itemsize` bytes. Fused kernels in float32 count as those in 16 bits."""
    return "parts" if kernels == "eager" and itemsize == FP32 else kernels


@dataclass(frozen=True)
class ComputedModel:
    """A model and the size of the numbers that its products multiply."""

    shape: ModelShape
    config: Any  # Of transformers.
    itemsize: int  # Bytes of a number in matrix products.
    counts: str = HOST_COUNTS
    """How a pass is computed: a key of `PASS_COUNTS`, or on a CPU `HOST_COUNTS`."""

    @property
    def parameters(self) -> int:
        return sum(self.shape.parameters.values())

    @property
    def layer_parameters(self) -> int:
        return sum(self.shape.parameters[name] for name in self.shape.layers)

    @property
    def query_numbers(self) -> float:
        """Numbers of one token's queries in all layers. Of grouped queries several share the keys
        and values, which are half each of what a token has of both."""
        heads = getattr(self.config, "num_attention_heads", 1)
        key_heads = getattr(self.config, "num_key_value_heads", None) or heads
        return heads / key_heads * key_value_bytes(self.config, 1) / 2


class PassTokens(NamedTuple):
    """The tokens of a forward pass."""

    tokens: float
    seen: float  # How many others each token sees on average.
    with_logits: float


class DecodedRows(NamedTuple):
    """The rows of a decoding."""

    prompts: float
    responses: int  # To each prompt.
    prompt_tokens: float  # Of a prompt, on average.
    response_tokens: float  # Of a response, on average.
    longest: int  # Tokens of the longest response.


def forward(model: ComputedModel, rows: PassTokens, pieces: float) -> Work:
    """The work of a forward pass of T tokens in so many pieces, which each read all weights.

        operations    2 x ((layers' parameters + 2 x queries x seen) T + V H x tokens with logits)
        memory_bytes  3 x activations of a token x T + 8 x 4 V x tokens with logits
                      + weights x pieces
        launches      (53 L + 90) x pieces

    Every token of a mixture counts as taking all experts."""
    config = model.config
    # queries times keys, and probabilities times values
    attention = 2 * model.query_numbers * rows.seen
    head = config.vocab_size * config.hidden_size * rows.with_logits
    products = (model.layer_parameters + attention) * rows.tokens + head
    activations = ACTIVATION_PASSES * activation_bytes(config, model.itemsize) * rows.tokens
    logits = FP32 * LOGIT_PASSES * config.vocab_size * rows.with_logits
    weights = model.itemsize * model.parameters * pieces
    kernels = LAYER_KERNELS * len(model.shape.layers) + OTHER_KERNELS
    return Work(
        operations=2 * products,
        memory_bytes=activations + (logits + weights),
        launches=kernels * pieces,
    )


def pass_on_card(model: ComputedModel, rows: PassTokens, pieces: float, work: str) -> Work:
    """The work `FORWARD` or `UPDATE` of T tokens on a GPU, in so many micro-batches, by its
    `PassCount`. Attention counts as products that take as long, or as bytes that do, whichever
    takes longer."""
    config = model.config
    count = PASS_COUNTS[model.counts][work]
    layers = len(model.shape.layers)
    hidden = config.hidden_size * rows.tokens
    with_logits = config.vocab_size * rows.with_logits
    of_layers = layers * (count.hidden * hidden + count.mlp * mlp_width(config) * rows.tokens)
    ends = count.logit * with_logits + count.end_hidden * hidden
    outside = model.parameters - model.layer_parameters
    weights = pieces * (count.weight * model.layer_parameters + count.end_weight * outside)
    # An update's head makes its logits again in backward.
    heads = PASSES[work] + (work == UPDATE)
    of_head = heads * config.hidden_size * with_logits
    products = PASSES[work] * model.layer_parameters * rows.tokens + of_head
    return Work(
        operations=2 * products,
        memory_bytes=of_layers + ends + weights,
        launches=pieces * (count.layer_launches * layers + count.ends_launches),
    ) + _attention_on_card(model, rows, work)


def _attention_on_card(model: ComputedModel, rows: PassTokens, work: str) -> Work:
    """Attention's part of `pass_on_card`."""
    kind = "efficient" if model.counts == "parts" else "flash"
    share = MEASURED["efficiency"]
    # queries times keys, and probabilities times values, two operations each
    pairs = 2 * 2 * model.query_numbers * rows.seen * rows.tokens
    times = 1 / share[f"{kind} attention, forward"]
    if work == UPDATE:
        times += ATTENTION_OF_BACKWARD / share[f"{kind} attention, backward"]
    operations = pairs * times * share["products"]
    moved = PASS_COUNTS[model.counts][work].attention * model.query_numbers * rows.tokens
    card = MEASURED["card"]
    operations_of_byte = card["products"] * share["products"] / card["bandwidth"]
    if operations > moved * operations_of_byte:
        return Work(operations=operations)
    return Work(memory_bytes=moved)


def decoding(model: ComputedModel, rows: DecodedRows, cache_bytes: int) -> Work:
    """The work of prefill, and of a pass for each token of the longest responses in flight; of as
    many prompts at a time as have room in `cache_bytes` of keys and values, or 0: vLLM's, whose
    passes replay a CUDA graph, and take its host's time instead of launches.

    Each drawn token reads the keys and values of its prompt, which its group shares, and of half a
    response."""
    token_bytes = key_value_bytes(model.config, model.itemsize)
    drawn = rows.prompts * rows.responses * rows.response_tokens
    if cache_bytes:
        group_bytes = (rows.prompt_tokens + rows.responses * rows.longest) * token_bytes
        lots = math.ceil(rows.prompts * group_bytes / cache_bytes)
    else:
        lots = math.ceil(rows.prompts * rows.responses / VLLM_ROWS)
    # rows that end early make room for others, or wait for the longest
    steps = lots * min(rows.longest, EARLY_END * rows.response_tokens)
    seen_in_response = rows.prompt_tokens + rows.response_tokens / 2
    passes = forward(model, PassTokens(drawn, seen_in_response, drawn), steps)
    if not cache_bytes:
        passes = replace(passes, launches=0.0, engine_passes=steps)
    prompt_tokens = rows.prompts * rows.prompt_tokens
    prefill = forward(model, PassTokens(prompt_tokens, rows.prompt_tokens / 2, rows.prompts), lots)
    read_tokens = rows.prompt_tokens / rows.responses + rows.response_tokens / 2
    return passes + prefill + Work(memory_bytes=drawn * token_bytes * read_tokens)
