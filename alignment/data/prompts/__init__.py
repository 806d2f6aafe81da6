"""Prompt templates with one `{question}`: NAME.prompt, or a user's file, is the whole text;
NAME.chat, or a user's FILE.chat, the turns of a chat. `chat` is the question alone in the model's
own chat template.

A chat has the headings `### system`, `### user` and `### assistant`, each on a line of its own,
with the text of a turn below. The model's chat template joins them; where the last is the
assistant's, it begins the response. Earlier turns of user and assistant are examples.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import overload

from alignment.core.records import Endless, Problem, Problems
from alignment.core.text import added_ids
from alignment.system.errors import UserError
from alignment.system.files import read_text, read_toml
from alignment.system.nearest import did_you_mean, did_you_mean_path
from alignment.system.terminal import say_once

Messages = Sequence[Mapping[str, str]]  # with "role" and "content", as a chat template takes them

# <think>, [THINK], <|channel|>, \u25c1think\u25b7
OPENING_TAG = re.compile(r"<\|?[A-Za-z]\w*\|?>|\[[A-Za-z]\w*\]|\u25c1\w+\u25b7")
LONGEST_REPETITION = 200  # characters of a prompt's end


def _read_templates(kind: str) -> dict[str, str]:
    """The templates beside this module, by their names."""
    files = sorted(Path(__file__).parent.glob(f"*.{kind}"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


PROMPTS = _read_templates("prompt")
CHATS = _read_templates("chat")
CHAT = "chat"
ROLES = ("system", "user", "assistant")
_HEADING = re.compile(r"^### (\w+)\n", re.MULTILINE)
INSTRUCTIONS: Sequence[Mapping] = read_toml(
    Path(__file__).with_name("instructions.toml"), "--prompt"
)["instruction"]


@dataclass(frozen=True)
class ChatOptions:
    """What a prompt has beside its question."""

    system_prompt: str = ""
    """The system turn of `chat`; empty: what the model's makers publish, else the chat template's
    own."""
    boxed: bool = False
    """Whether `chat` asks for the final answer in a box."""
    examples: tuple[tuple[str, str], ...] = ()
    """(question, response) pairs before the question: as earlier turns of a chat, else as text."""


def is_chat_file(name: str) -> bool:
    """Whether --prompt names a user's file with the turns of a chat."""
    return name.endswith(".chat")


def read_template(name: str) -> str:
    """The template `name`, or that file's text less its last line break, which a chat keeps as each
    of its turns does; of `chat`, and of "" that leaves the choice to the model, the bare question.
    Raises `UserError` for neither, no {question}, or a chat whose turns cannot be."""
    if name in ("", CHAT):
        return "{question}"
    templates = PROMPTS | CHATS
    if name in templates:
        return templates[name]
    if not Path(name).is_file():
        names = sorted([*templates, CHAT])
        nearest = did_you_mean(name, names) or did_you_mean_path(name)
        raise UserError(
            f"--prompt {name}: there is no such template{nearest}; choose one of"
            f" {', '.join(names)}, a file"
        )
    text = read_text(Path(name))
    if not is_chat_file(name):  # `chat_turns` takes off that of each turn
        text = text.removesuffix("\n")
    if "{question}" not in text:
        raise UserError(
            f"--prompt {name}: the file has no place for the question; write {{question}} where it"
            " goes"
        )
    if is_chat_file(name):
        _check_chat(name, text)
    return text


def _check_chat(name: str, text: str) -> None:
    """Raise `UserError` where a file of a chat has no turns or turns that no chat template
    joins."""
    before, *parts = _HEADING.split(text)
    headings = "### system, ### user and ### assistant, each on a line of its own"
    if before.strip() or not parts:
        raise UserError(
            f"--prompt {name}: the text {before.strip()[:40]!r} is in no turn of the chat; write"
            f" the headings {headings}"
        )
    roles = parts[::2]
    for role in roles:
        if role not in ROLES:
            raise UserError(f"--prompt {name}: ### {role} is no turn of a chat; write {headings}")
    dialogue = roles[1:] if roles[0] == "system" else roles
    expected = ["user", "assistant"] * len(dialogue)
    if not dialogue or dialogue != expected[: len(dialogue)]:
        raise UserError(
            f"--prompt {name}: its turns are {', '.join(roles)}; after the system's, turns of user"
            " and assistant must follow each other, and the user's is the first"
        )
    last_question = max(place for place, role in enumerate(roles) if role == "user")
    if "{question}" not in parts[2 * last_question + 1]:
        raise UserError(f"--prompt {name}: write {{question}} into the last ### user turn")


def read_system_prompt(value: str) -> str:
    """The text of --system_prompt: that of the file of this name, where there is one, else the
    value itself. Raises `UserError` for a file that is not UTF-8."""
    with suppress(OSError):  # a long text is no name of a file
        if value and Path(value).is_file():
            return read_text(Path(value)).strip()
    return value


Turns = tuple[tuple[str, str], ...]  # (role, text) of each


def chosen_prompt(name: str, tokenizer, boxed: bool) -> str:
    """The prompt of that name; of "", which leaves the choice to the model, `chat` where its
    tokenizer has a chat template, else the one for a base model."""
    if name:
        return name
    if getattr(tokenizer, "chat_template", None):
        return CHAT
    return "boxed" if boxed else "question"


@overload
def prompted(
    problems: Sequence[Problem], name: str, tokenizer, options: ChatOptions = ...
) -> Sequence[Problem]: ...
@overload
def prompted(problems: Problems, name: str, tokenizer, options: ChatOptions = ...) -> Problems: ...


def prompted(
    problems: Problems,
    name: str,
    tokenizer,
    options: ChatOptions = ChatOptions(),  # noqa: B008, it is frozen
) -> Problems:
    """The problems with prompts by the template `name` (`chosen_prompt`); of conversations by the
    tokenizer's chat template. Those without a question have theirs already.

    Raises `UserError` for an unknown template, or a chat if the tokenizer has no chat template."""
    name = chosen_prompt(name, tokenizer, options.boxed)
    turns_of = _turns_of_prompt(name, tokenizer, options)
    template = _prompt_template(name, turns_of("{question}"), tokenizer)
    before = ""
    if not turns_of(""):
        before = _examples_as_text(template, options.examples)

    def fill(problem: Problem) -> Problem:
        if problem.turns:
            prompt = _render_prompt(problem.id, _prompt_messages(problem), tokenizer)
            return dataclasses.replace(problem, prompt=before + prompt)
        if not problem.question:
            return dataclasses.replace(problem, prompt=before + problem.prompt)
        prompt = before + template.replace("{question}", problem.question)
        return dataclasses.replace(problem, prompt=prompt, turns=turns_of(problem.question))

    if isinstance(problems, Endless):
        return Endless(lambda index: fill(problems[index]))
    return list(map(fill, problems))


def _turns_of_prompt(name: str, tokenizer, options: ChatOptions) -> Callable[[str], Turns]:
    """A function that gives the turns of a question's prompt; () where the prompt is plain text."""
    if name != CHAT:
        return partial(chat_turns, name, examples=options.examples)
    system = options.system_prompt
    behind_question = ""
    if options.boxed and r"\boxed" not in system:
        instruction = _published_instruction(tokenizer)
        if instruction["turn"] == "system" and not system:
            system = instruction["text"]
        else:
            behind_question = f"\n\n{instruction['text']}"

    def turns_of(question: str) -> Turns:
        turns: list[tuple[str, str]] = []
        if system:
            turns.append(("system", system))
        for example, response in options.examples:
            turns += [("user", example + behind_question), ("assistant", response.strip())]
        turns.append(("user", question + behind_question))
        return tuple(turns)

    return turns_of


def _prompt_template(name: str, turns: Turns, tokenizer) -> str:
    """The text of a prompt with a place for its question. `turns` are those of a chat, by the
    tokenizer's chat template; the last of a file of a chat begins the response."""
    if not turns:
        return read_template(name)
    beginning = ""
    last_role, last_text = turns[-1]
    if last_role == "assistant":
        beginning = last_text
        turns = turns[:-1]
    messages = [{"role": role, "content": text} for role, text in turns]
    remedy = f"; choose one of {', '.join(PROMPTS)}"
    return _render_prompt(f"--prompt {name}", messages, tokenizer, remedy) + beginning


def _examples_as_text(template: str, examples: Sequence[tuple[str, str]]) -> str:
    """Worked examples by a template, each followed by an empty line."""
    text = ""
    for question, response in examples:
        prompt = template.replace("{question}", question)
        text += f"{prompt}{without_repeated_tag(prompt, response)}\n\n"
    return text


def _published_instruction(tokenizer) -> Mapping:
    """The entry of `INSTRUCTIONS` for the tokenizer's chat template."""
    chat_template = str(getattr(tokenizer, "chat_template", None))
    for instruction in INSTRUCTIONS[:-1]:
        if any(mark in chat_template for mark in instruction["template_contains"]):
            return instruction
    return INSTRUCTIONS[-1]


def fill_prompt(name: str, question: str) -> str:
    """The prompt of a question, by the plain template `name`; braces inside the question stay as
    they are."""
    return PROMPTS[name].replace("{question}", question)


def chat_turns(
    name: str, question: str = "{question}", examples: Sequence[tuple[str, str]] = ()
) -> Turns:
    """The (role, text) turns of a question's prompt by the chat `name`, with (question, response)
    examples as earlier turns; a last one of the assistant begins the response. () for a prompt of
    plain text."""
    if name == CHAT:
        return (("user", question),)
    if name not in CHATS and not is_chat_file(name):
        return ()
    # What stands before the first heading, then roles and texts by turns.
    _, *parts = _HEADING.split(read_template(name))
    turns = []
    for role, text in zip(parts[::2], parts[1::2], strict=True):
        turns.append((role, text.removesuffix("\n")))
    beginning = ""
    if turns[-1][0] == "assistant":
        beginning = turns[-1][1]
    last_question = max(place for place, (role, _) in enumerate(turns) if role == "user")
    asked = turns[last_question][1]
    shown: list[tuple[str, str]] = []
    for example, response in examples:
        answer = beginning + without_repeated_tag(beginning, response)
        shown.append(("user", asked.replace("{question}", example)))
        shown.append(("assistant", answer.strip()))
    filled = [(role, text.replace("{question}", question)) for role, text in turns]
    return (*filled[:last_question], *shown, *filled[last_question:])


def trained_response(problem: Problem, response: str, tokenizer) -> str:
    """What follows the problem's prompt where a demonstration gives this response: without an
    opening tag that the prompt ends with already; and with the thoughts that the response's own
    message holds apart from its content, as the chat template renders them.

    Raises `UserError` where the template renders them elsewhere or not at all."""
    messages = _row_messages(problem)
    if problem.turns and len(messages) > len(problem.turns):
        message = messages[len(problem.turns)]
        thoughts = [name for name in message if name not in ("role", "content")]
        if thoughts:
            response = _render_response(problem, thoughts, tokenizer)
    return without_repeated_tag(problem.prompt, response)


def without_repeated_tag(prompt: str, response: str) -> str:
    """The response without its beginning where that repeats the prompt's end from an opening tag
    on, such as <think>, or an empty thought, <think></think>."""
    stripped = response.lstrip()
    for tag in OPENING_TAG.finditer(prompt, max(0, len(prompt) - LONGEST_REPETITION)):
        ending = prompt[tag.start() :]
        words = ending.rstrip()
        if stripped.startswith(words):
            return stripped.removeprefix(words).removeprefix(ending[len(words) :])
    return response


def _render_response(problem: Problem, thoughts: Sequence[str], tokenizer) -> str:
    """The message after the problem's prompt as the chat template renders it, up to the end of its
    content."""
    messages = _row_messages(problem)[: len(problem.turns) + 1]
    text = _render(problem.id, messages, tokenizer, add_generation_prompt=False)
    rendered = text.removeprefix(problem.prompt)
    response = messages[-1]
    content = response["content"].strip()
    parts = [response[name].strip() for name in thoughts] + [content]
    is_complete = all(part in rendered for part in parts)
    if rendered == text or not is_complete:
        where = "after its own generation prompt" if is_complete else "at all"
        fault = f'the chat template of this model does not render "{thoughts[0]}" {where}'
        remedy = 'write it into "content", as the model is to say it'
        raise UserError(f"{problem.id}: {fault}: {remedy}")
    return rendered[: rendered.rindex(content) + len(content)]


def _row_messages(problem: Problem) -> list[dict[str, str]]:
    """The messages of the problem's own row; none where it has no such column."""
    messages = problem.columns.get("messages")
    return messages if isinstance(messages, list) else []


def _prompt_messages(problem: Problem) -> list[dict[str, str]]:
    """The messages of a conversation before the one to be answered with; with thoughts, where its
    row has them."""
    if "messages" in problem.columns:
        return _row_messages(problem)[: len(problem.turns)]
    return [{"role": role, "content": text} for role, text in problem.turns]


def _render_prompt(place: str, messages: Messages, tokenizer, remedy: str = "") -> str:
    """The messages as one text, up to where the assistant's next one begins. Errors name the
    `place`, and one the `remedy`."""
    text = _render(place, messages, tokenizer, add_generation_prompt=True, remedy=remedy)
    if text == _render(place, messages, tokenizer, add_generation_prompt=False):
        text += _header_of_answers(place, messages, text, tokenizer)
    return text


def _header_of_answers(place: str, messages: Messages, text: str, tokenizer) -> str:
    """What the chat template puts between these messages, rendered as `text`, and an answer to
    them; "" where this is nothing but white space, as after [/INST].

    A template without a generation prompt leaves it out, and a prompt must end with it. Raises
    `UserError` where it cannot be told."""
    answer = "An answer, 4711."
    with_answer = [*messages, {"role": "assistant", "content": answer}]
    answered = _render(place, with_answer, tokenizer, add_generation_prompt=False)
    header, rendered_answer, _ = answered.removeprefix(text).partition(answer)
    if not rendered_answer or not answered.startswith(text):
        fault = "the chat template of this model has no generation prompt"
        remedy = "what begins an answer cannot be told from its answers: give it one"
        raise UserError(f"{place}: {fault}, and {remedy}, for add_generation_prompt")
    if not header.strip():
        return ""
    fault = "the chat template of this model has no generation prompt"
    say_once(f"{fault}: prompts end with {header!r}, as its answers begin")
    return header


def _render(
    place: str, messages: Messages, tokenizer, *, add_generation_prompt: bool, remedy: str = ""
) -> str:
    """The messages as the chat template writes them, less a BOS token that encoding adds again."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{place}: it is a chat, and the tokenizer of this model has no chat template{remedy}"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # the model's template may refuse a system turn
        raise UserError(f"{place}: the chat template of this model refuses it ({error})") from None
    prefix, _ = added_ids(tokenizer)  # such as BOS, which encoding the prompt adds again
    return text.removeprefix("".join(tokenizer.convert_ids_to_tokens(list(prefix))))
