"""Configurations of published models, whose weights no test needs."""

from transformers import LlamaConfig, Qwen2Config, Qwen3Config


def qwen2(
    hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_attention_heads: int
) -> Qwen2Config:
    """A Qwen2.5 model with tied embeddings and two heads of keys."""
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def qwen2_1_5b() -> Qwen2Config:
    """Qwen2.5-Math-1.5B."""
    return qwen2(1536, 8960, 28, 12)


def llama_1b() -> LlamaConfig:
    """Llama-3.2-1B, but untied, so that its head sits at the end."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
    )


def qwen3_0_6b() -> Qwen3Config:
    """Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def qwen2_7b() -> Qwen2Config:
    """Qwen2.5-7B, whose head is a matrix of its own."""
    return Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
