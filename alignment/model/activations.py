"""Bytes that a model needs beside its weights, for one token: activations, keys and values.

The coefficients of the closed form stand first, each with its unit, where it comes from, what
measurement would show it wrong, and what reads it."""

from alignment.model.loading import mlp_width

FP32 = 4  # bytes of a number in float32

# --- what a layer keeps of a token for backward ---------------------------------------------------

KEPT_MLP_VECTORS = {"eager": 4, "liger": 3, "compiled": 2}
"""Kernels (--kernels) -> vectors of the MLP's width, in the type of products, that a layer keeps of
a token for backward.

Source: a Llama-like MLP keeps the gate's and the up projection's outputs, the gate after its
activation, and the product of the two; a fused kernel makes the activated gate again, `GatedMLP`
the product, too. Shown wrong by: torch's peak of an update, divided by its tokens: SmolLM2-135M in
float32 took 1.53 MB a token, 1.50 by this formula; an H200 took 3.30 MB of 1.5 billion parameters,
as by it (docs/gpus.md#memory), and with Liger's kernels 2.5, as by it (64 GB for 75). Compiled ones
are counted over fake tensors alone (benchmarks/gpu_cost.md). Read by: `mlp_bytes`."""

KEPT_HIDDEN_VECTORS = {"eager": 11, "liger": 8, "compiled": 4}
"""Kernels -> vectors of the hidden size, in the type of products, that a layer keeps of a token for
backward.

Source: for compiled kernels two norms' outputs, the turned queries, and attention's output. With
the others the formula agrees with the measurements that `KEPT_MLP_VECTORS` names; no count of the
tensors is on record. Shown wrong by: what shows `KEPT_MLP_VECTORS` wrong. Read by:
`activation_bytes`."""

FP32_NORM_VECTORS = 2
"""Vectors of the hidden size, in fp32, that a layer has of a token beside these under autocast to 2
bytes.

Source: autocast computes the two norms of a layer in float32. Shown wrong by: torch's peak of an
update in bfloat16, divided by its tokens. Read by: `_norm_bytes`."""

CHECKPOINTED_END_VECTORS = 3
"""Vectors of the hidden size, in fp32, that a token keeps outside the layers under gradient
checkpointing.

Assumption: the embedding's output, and the last norm's input and output. Shown wrong by: torch's
peak of an update whose layers are computed twice. Read by: `checkpointed_activation_bytes`."""

# --- what a layer has of a token while nothing is kept --------------------------------------------

PASSING_MLP_VECTORS = 3
"""Vectors of the MLP's width, in the type of products, that one layer has of a token at work.

Assumption: the gate's and the up projection's outputs, and their product, of a Llama-like MLP.
Shown wrong by: torch's peak of a pass for log-probs, divided by its tokens. Read by:
`passing_bytes`."""

PASSING_HIDDEN_VECTORS = 6
"""Vectors of the hidden size, in the type of products, that one layer has of a token at work.

Assumption: the residual, the norm's output, queries, keys, values and attention's output at most.
Shown wrong by: torch's peak of a pass for log-probs, divided by its tokens. Read by:
`passing_bytes`."""

# --- our own decoding -----------------------------------------------------------------------------

CACHE_BYTES = {
    "cpu": 2 * 2**30,
    "cuda": 16 * 2**30,
}
"""Bytes of keys and values of the rows in flight in our own decoding, at most, by type of device.

Assumption: a choice of what decoding may take beside the policy, to which our sampler keeps. Shown
wrong by: tokens a second by `benchmarks.sampler` with half and with twice as much. Read by:
`Decoding`, `StepWork`, `TransformersSampler`."""


def activation_bytes(config, itemsize: int = 4, kernels: str = "eager") -> int:
    """Bytes of activations that backward needs for one token of a Llama-like decoder, with products
    of numbers of `itemsize` bytes and one of --kernels:

        L (I (4 M + 11 H) + 8 H in bfloat16)   L layers, I bytes, MLP of M, hidden size H; eager
        L (I (3 M +  8 H) + 8 H)               liger
        L (I (2 M +  4 H) + 8 H)               compiled"""
    hidden = itemsize * KEPT_HIDDEN_VECTORS[kernels] * config.hidden_size
    norms = _norm_bytes(config, itemsize)
    if kernels != "eager":
        norms = _norm_bytes(config, 2)  # They keep what they are given, which is in float32.
    mlps = mlp_bytes(config, itemsize, kernels)
    return config.num_hidden_layers * (hidden + norms) + mlps


def mlp_bytes(config, itemsize: int, kernels: str) -> int:
    """Bytes of these that are inside of MLPs."""
    vectors = KEPT_MLP_VECTORS[kernels] * config.num_hidden_layers
    return itemsize * vectors * mlp_width(config)


def _norm_bytes(config, itemsize: int) -> int:
    """Bytes of the vectors of a layer that autocast to 2 bytes computes in float32."""
    return FP32_NORM_VECTORS * FP32 * config.hidden_size if itemsize == 2 else 0


def checkpointed_activation_bytes(
    config, itemsize: int = 4, layers: float = 1.0, kernels: str = "eager"
) -> int:
    """`activation_bytes` under gradient checkpointing, of that share of the layers: the input of
    each, vectors at the ends, one whole layer."""
    one_layer = activation_bytes(config, itemsize, kernels) // config.num_hidden_layers
    vectors = layers * config.num_hidden_layers + CHECKPOINTED_END_VECTORS
    return int(FP32 * vectors * config.hidden_size) + one_layer


def passing_bytes(config, itemsize: int) -> int:
    """Bytes of one token while one layer computes it and nothing is kept for backward."""
    vectors = itemsize * (
        PASSING_MLP_VECTORS * mlp_width(config) + PASSING_HIDDEN_VECTORS * config.hidden_size
    )
    return vectors + _norm_bytes(config, itemsize)


def key_value_bytes(config, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    # a model without attention keeps less, whatever the length
    query_heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    return 2 * config.num_hidden_layers * heads * head_dim * itemsize
