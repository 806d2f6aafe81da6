"""Prompt templates with one `{question}`: NAME.prompt, or a user's file, is the whole text; NAME.chat, the turns of a chat.

A chat has `### system`, `### user` and `### assistant`: the model's chat template joins two, the last begins the response."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from alignment.core.records import Endless, Problem
from alignment.core.text import added_ids
from alignment.system.errors import UserError
from alignment.system.files import read_text

_files = lambda kind: sorted(Path(__file__).parent.glob(f"*.{kind}"))
PROMPTS, CHATS = ({file.stem: file.read_text(encoding="utf-8") for file in _files(kind)} for kind in ("prompt", "chat"))


def read_template(name: str) -> str:
    """The template `name`, or that file's text less its last line break. Raises `UserError` for neither, or no {question}."""
    if name in PROMPTS | CHATS:
        return (PROMPTS | CHATS)[name]
    if not Path(name).is_file():
        choices = ", ".join(sorted(PROMPTS | CHATS))
        raise UserError(f"--prompt {name}: there is no such template; choose one of {choices}, a file")
    text = read_text(Path(name)).removesuffix("\n")
    if "{question}" not in text:
        raise UserError(f"--prompt {name}: the file has no place for the question; write {{question}} where it goes")
    return text


def prompted(problems: Sequence[Problem], name: str, tokenizer) -> Sequence[Problem]:
    """The problems with prompts by the template `name`; of conversations by the tokenizer's chat template; those without a
    question have theirs. Raises `UserError` for an unknown template, or a chat if the tokenizer has no chat template."""
    if name in CHATS:
        *turns, (_, beginning) = chat_turns(name)
        template = _chat_text(f"--prompt {name}", turns, tokenizer, f"; choose one of {', '.join(PROMPTS)}") + beginning
    else:
        template = read_template(name)

    def fill(problem: Problem) -> Problem:
        if problem.turns:
            return dataclasses.replace(problem, prompt=_chat_text(problem.id, problem.turns, tokenizer))
        if not problem.question:
            return problem
        prompt, turns = template.replace("{question}", problem.question), chat_turns(name, problem.question)
        return dataclasses.replace(problem, prompt=prompt, turns=turns)

    return Endless(lambda i: fill(problems[i])) if isinstance(problems, Endless) else list(map(fill, problems))


def fill_prompt(name: str, question: str) -> str:
    """The prompt of a question, by the plain template `name`; braces inside the question stay as they are."""
    return PROMPTS[name].replace("{question}", question)


def chat_turns(name: str, question: str = "{question}") -> tuple[tuple[str, str], ...]:
    """The (role, text) turns of a question's prompt by the chat `name`, the last beginning the response; () if it is plain."""
    parts = re.split(r"^### (\w+)\n", CHATS.get(name, ""), flags=re.MULTILINE)[1:]
    texts = (text.removesuffix("\n").replace("{question}", question) for text in parts[1::2])
    return tuple(zip(parts[::2], texts, strict=True))


def _chat_text(place: str, turns: Iterable[tuple[str, str]], tokenizer, remedy: str = "") -> str:
    """The turns as one text, up to where the assistant's next one begins. Errors name the `place`, and one the `remedy`."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"{place}: it is a chat, and the tokenizer of this model has no chat template{remedy}")
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the model's template may refuse a system turn
        raise UserError(f"{place}: the chat template of this model refuses it ({error})") from None
    prefix, _ = added_ids(tokenizer)  # such as BOS, which encoding the prompt adds again
    return text.removeprefix("".join(tokenizer.convert_ids_to_tokens(list(prefix))))
