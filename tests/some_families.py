"""Families of models as parameters of a test: those that differ most in every run of the tests, all
others among the slow ones."""

from collections.abc import Iterable

import pytest

# Rotary and learnt positions, windows, caps, sinks, scales, experts, one norm less.
QUICK = {"cohere", "falcon", "gemma2", "gpt2", "gpt_oss", "llama", "mistral", "qwen2", "qwen3_moe"}


def by_speed(families: Iterable[str]) -> list:
    """A parameter for each family, sorted; those that are not in `QUICK` are marked as slow."""
    parameters = []
    for family in sorted(families):
        marks = [] if family in QUICK else [pytest.mark.slow]
        parameters.append(pytest.param(family, marks=marks))
    return parameters
