"""Prompt templates with one `{question}` to fill in: NAME.prompt is the whole text, NAME.chat a chat's turns.

A chat has the parts `### system`, `### user` and `### assistant`; the model's own chat template joins them, and the last is how
the response begins.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from alignment.core.records import Endless, Problem
from alignment.system.errors import UserError

FOLDER = Path(__file__).parent


def prompt_names() -> list[str]:
    """Names of all templates."""
    return sorted(path.stem for path in FOLDER.iterdir() if path.suffix in (".prompt", ".chat"))


def check_template(name: str) -> None:
    """Raise `UserError` where there is no template of that name."""
    if name not in prompt_names():
        raise UserError(f"--prompt {name}: there is no such template; choose one of {', '.join(prompt_names())}")


def prompted(problems: Sequence[Problem], name: str, tokenizer) -> Sequence[Problem]:
    """The problems with their prompts, by the template `name`.

    Raises `UserError` for a name that there is not, and for a chat where the tokenizer has no chat template.
    """
    check_template(name)
    if (FOLDER / f"{name}.chat").exists():
        if not getattr(tokenizer, "chat_template", None):
            plain = ", ".join(other for other in prompt_names() if (FOLDER / f"{other}.prompt").exists())
            raise UserError(
                f"--prompt {name}: it is a chat, and the tokenizer of this model has no chat template; choose one of {plain}"
            )
        template = _chat(name, tokenizer)
    else:
        template = _template(f"{name}.prompt")

    def fill(problem: Problem) -> Problem:
        return dataclasses.replace(problem, prompt=template.replace("{question}", problem.question))

    if isinstance(problems, Endless):
        return Endless(lambda i: fill(problems[i]))
    if problems and fill(problems[0]) == problems[0]:  # the template that the task itself fills in
        return problems
    return [fill(problem) for problem in problems]


def fill_prompt(name: str, question: str) -> str:
    """The plain template `name` with its question filled in; braces inside the question stay as they are."""
    return _template(f"{name}.prompt").replace("{question}", question)


def _chat(name: str, tokenizer) -> str:
    """A chat as one text, with `{question}` still to be filled in."""
    parts = re.split(r"^### (\w+)\n", _template(f"{name}.chat"), flags=re.MULTILINE)[1:]
    turns = {role: text.removesuffix("\n") for role, text in zip(parts[::2], parts[1::2], strict=True)}
    begins = turns.pop("assistant")
    messages = [{"role": role, "content": text} for role, text in turns.items()]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the template is the model's, and may refuse a system's turn
        raise UserError(f"--prompt {name}: the chat template of this model refuses it ({error})") from None
    first = tokenizer("a")["input_ids"][:1]
    if first and first[0] == tokenizer.bos_token_id:  # which encoding the prompt adds once more
        text = text.removeprefix(tokenizer.bos_token)
    return text + begins


@lru_cache
def _template(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")
