"""Bytes that a model needs beside its weights, for one token: activations, keys and values."""

from alignment.model.loading import mlp_width

# keys and values of the rows in flight in our own decoding, at most
CACHE_BYTES = {
    "cpu": 2 * 2**30,
    "cuda": 16 * 2**30,
}


def activation_bytes(config, itemsize: int = 4) -> int:
    """Bytes of activations that backward needs for one token of a Llama-like decoder, with products
    of numbers of `itemsize` bytes. Each layer stores four vectors of the MLP's width and about
    eleven of the hidden size; under autocast to 2 bytes two more, since norms stay in float32.
    (SmolLM2-135M in float32: 1.50 MB by this formula, 1.53 MB measured.)"""
    vectors = itemsize * (4 * mlp_width(config) + 11 * config.hidden_size)
    return config.num_hidden_layers * (vectors + _norm_bytes(config, itemsize))


def _norm_bytes(config, itemsize: int) -> int:
    """Bytes of the two vectors of a layer that autocast to 2 bytes computes in float32."""
    return 8 * config.hidden_size if itemsize == 2 else 0


def checkpointed_activation_bytes(config, itemsize: int = 4, layers: float = 1.0) -> int:
    """`activation_bytes` under gradient checkpointing, of that share of the layers: the input of
    each, three vectors at the ends, one whole layer."""
    one_layer = activation_bytes(config, itemsize) // config.num_hidden_layers
    return int(4 * (layers * config.num_hidden_layers + 3) * config.hidden_size) + one_layer


def passing_bytes(config, itemsize: int) -> int:
    """Bytes of one token while one layer computes it and nothing is kept for backward."""
    vectors = itemsize * (3 * mlp_width(config) + 6 * config.hidden_size)
    return vectors + _norm_bytes(config, itemsize)


def key_value_bytes(config, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    # a model without attention keeps less, whatever the length
    query_heads = getattr(config, "num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    return 2 * config.num_hidden_layers * heads * head_dim * itemsize
