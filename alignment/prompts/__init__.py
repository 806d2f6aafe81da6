"""Prompt templates: text files with one `{question}` to fill in."""

from __future__ import annotations

from pathlib import Path


def fill_prompt(name: str, question: str) -> str:
    """The template `name`.prompt with its question filled in; braces inside the question stay as they are."""
    return (Path(__file__).parent / f"{name}.prompt").read_text(encoding="utf-8").replace("{question}", question)
