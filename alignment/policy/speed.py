"""Work of passes through a model, from shapes alone. Nothing here knows a device; `policy/hardware.py` does."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from alignment.policy.memory import activation_bytes, key_value_bytes
from alignment.policy.placement import ModelShape

KINDS = ("operations", "bytes", "launches", "link", "network", "disk")
"""Of work: products' multiplications and additions, bytes moved in a device's memory, kernels, bytes between devices of a machine,
between machines, to the disk."""
# Kernels, counted in Llama-like decoders of transformers under our attention: of a layer's forward pass, and of all else.
LAYER_KERNELS, OTHER_KERNELS = 53, 90
VLLM_KERNELS, VLLM_ROWS = 400, 256  # what a token of vLLM's costs the host, which replays a graph; rows it has in flight
TRAFFIC = 3  # times that a byte of activations passes through memory in a forward pass: written, and read by others
LOGIT_TRAFFIC = 8  # times that an fp32 logit does: product, softmax, log-prob, entropy or draw


def work(**amounts: float) -> np.ndarray:
    """Amounts of KINDS, in their order."""
    return np.array([amounts.pop(kind, 0.0) for kind in KINDS])


def forward(shape: ModelShape, config: Any, itemsize: int, counts: Sequence[float], pieces: float) -> np.ndarray:
    """A forward pass in so many pieces, each of which reads all weights. `counts`: tokens; how many of them each sees on average;
    how many have logits. Of a mixture's experts a token counts as taking all."""
    tokens, seen, logits = counts
    heads, layers = getattr(config, "num_attention_heads", 1), sum(shape.parameters[name] for name in shape.layers)
    queries = heads / (getattr(config, "num_key_value_heads", None) or heads) * key_value_bytes(config, 1) / 2  # of a token
    products = layers * tokens + config.vocab_size * config.hidden_size * logits + 2 * queries * seen * tokens
    moved = TRAFFIC * activation_bytes(config, itemsize) * tokens + 4 * LOGIT_TRAFFIC * config.vocab_size * logits
    kernels = LAYER_KERNELS * len(shape.layers) + OTHER_KERNELS
    read = itemsize * sum(shape.parameters.values()) * pieces
    return work(operations=2 * products, bytes=moved + read, launches=kernels * pieces)


def sampling(shape: ModelShape, config: Any, itemsize: int, rows: Sequence[float], cache_bytes: int) -> np.ndarray:
    """Prefill, and a pass for each token of the longest responses in flight. `rows`: prompts; responses to each; mean tokens of a
    prompt, and of a response; the most of a response. `cache_bytes`: of keys and values at once; 0: vLLM's."""
    prompts, size, prompt, response, longest = rows
    kept, drawn = key_value_bytes(config, itemsize), prompts * size * response
    lots = prompts * (prompt + size * longest) * kept / cache_bytes if cache_bytes else prompts * size / VLLM_ROWS
    steps = np.ceil(lots) * min(longest, 2 * response)  # rows that end early make room for others, or wait for the longest
    decode = forward(shape, config, itemsize, (drawn, prompt + response / 2, drawn), steps)
    decode += work(bytes=drawn * kept * (prompt / size + response / 2))
    decode[KINDS.index("launches")] = VLLM_KERNELS * steps if not cache_bytes else decode[KINDS.index("launches")]
    return decode + forward(shape, config, itemsize, (prompts * prompt, prompt / 2, prompts), np.ceil(lots))
