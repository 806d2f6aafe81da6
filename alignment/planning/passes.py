"""What passes through a model ask of a device: operations, bytes and kernels."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from alignment.model.activations import activation_bytes, key_value_bytes
from alignment.model.shape import ModelShape
from alignment.planning.work import Work

LAYER_KERNELS = 53
"""Kernels of a layer's forward pass.

Source: counted in Llama-like decoders of transformers under our attention. Shown wrong by: a
profile of an update (`benchmarks.profile_step`), divided by its layers and passes. Read by:
`forward`."""

OTHER_KERNELS = 90
"""Kernels of a forward pass outside the layers.

Source: counted in the same decoders. Shown wrong by: the same profile. Read by: `forward`."""

VLLM_ROWS = 256
"""Responses that vLLM has in flight at a time.

Source: `max_num_seqs`, vLLM's own default, which we leave; it is larger for some cards and uses.
Shown wrong by: the engine's log of running requests. Read by: `decoding`."""

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


@dataclass(frozen=True)
class ComputedModel:
    """A model and the size of the numbers that its products multiply."""

    shape: ModelShape
    config: Any  # Of transformers.
    itemsize: int  # Bytes of a number in matrix products.

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
