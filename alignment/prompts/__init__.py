"""Prompt templates: text files with one `{question}` to fill in."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


def fill_prompt(name: str, question: str) -> str:
    """The template `name`.prompt with its question filled in; braces inside the question stay as they are."""
    return _template(name).replace("{question}", question)


@lru_cache
def _template(name: str) -> str:
    return (Path(__file__).parent / f"{name}.prompt").read_text(encoding="utf-8")
