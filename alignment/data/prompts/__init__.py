"""Prompt templates with one `{question}`: NAME.prompt is the whole text, NAME.chat the turns of a chat.

A chat has the parts `### system`, `### user` and `### assistant`. The model's chat template joins the first two; the last is
the beginning of the response.
"""

import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from alignment.core.records import Endless, Problem
from alignment.system.errors import UserError

FOLDER = Path(__file__).parent


def prompt_names() -> list[str]:
    """The names of all templates."""
    return sorted(path.stem for path in FOLDER.iterdir() if path.suffix in (".prompt", ".chat"))


def check_template(name: str) -> None:
    """Raise `UserError` where there is no template of that name."""
    if name not in prompt_names():
        raise UserError(f"--prompt {name}: there is no such template; choose one of {', '.join(prompt_names())}")


def prompted(problems: Sequence[Problem], name: str, tokenizer) -> Sequence[Problem]:
    """The problems with their prompts filled in from the template `name`; `Endless` problems stay endless. Raises `UserError`
    for an unknown template, and for a chat if the tokenizer has no chat template."""
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
    if problems and fill(problems[0]) == problems[0]:  # the task fills in this template itself
        return problems
    return [fill(problem) for problem in problems]


def fill_prompt(name: str, question: str) -> str:
    """The prompt of a question, by the plain template `name`; braces inside the question stay as they are."""
    return _template(f"{name}.prompt").replace("{question}", question)


def _chat(name: str, tokenizer) -> str:
    """The chat `name` as one text that still contains `{question}`."""
    parts = re.split(r"^### (\w+)\n", _template(f"{name}.chat"), flags=re.MULTILINE)[1:]
    turns = {role: text.removesuffix("\n") for role, text in zip(parts[::2], parts[1::2], strict=True)}
    beginning = turns.pop("assistant")
    messages = [{"role": role, "content": text} for role, text in turns.items()]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the model's template may refuse a system turn
        raise UserError(f"--prompt {name}: the chat template of this model refuses it ({error})") from None
    first = tokenizer("a")["input_ids"][:1]
    if first and first[0] == tokenizer.bos_token_id:  # encoding the prompt adds it again
        text = text.removeprefix(tokenizer.bos_token)
    return text + beginning


@lru_cache
def _template(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")
