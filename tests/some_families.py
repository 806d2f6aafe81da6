"""Families of models as parameters of a test: those that differ most in every run of the tests, all
others among the slow ones; and a model with a buffer."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from benchmarks.families import family_model

# Rotary and learnt positions, windows, caps, sinks, scales, experts, one norm less.
QUICK = {"cohere", "falcon", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "qwen2", "qwen3_moe"}
BUFFER = "model.layers.1.mlp.gate.e_score_correction_bias"


def by_speed(families: Iterable[str]) -> list:
    """A parameter for each family, sorted; those that are not in `QUICK` are marked as slow."""
    parameters = []
    for family in sorted(families):
        marks = [] if family in QUICK else [pytest.mark.slow]
        parameters.append(pytest.param(family, marks=marks))
    return parameters


def save_with_buffer(folder: Path) -> torch.Tensor:
    """Write a tiny DeepSeek-V3, whose `BUFFER` is not what a new model has; returns this buffer."""
    model = family_model("deepseek_v3", std=0.1)
    buffer = model.get_buffer(BUFFER)
    buffer.copy_(torch.tensor([1 / 3, -0.5, 0.125, -1e-3]))
    model.save_pretrained(folder)
    return buffer
