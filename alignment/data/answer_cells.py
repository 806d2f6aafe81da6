r"""The final answer in a cell of the user's own data, and cells of rows in other projects' shapes.

A cell with a worked solution ends in an answer that a mark or a box shows: `#### 22` as in GSM8K
(Cobbe et al. 2021, arXiv:2110.14168), or \boxed{22} as in MATH (Hendrycks et al. 2021,
arXiv:2103.03874). Rows of verl have the question as "prompt", a list of messages, and the answer
nested in "reward_model"; rows of chats have both as "messages"."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeGuard

from alignment.data.row_warnings import stripped
from alignment.system.errors import UserError

MARKER = re.compile("#{4,}")  # GSM8K's, before the final answer
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# \boxed 5, without braces.
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$\\.,]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

AFTER_MARKER = "after ####"
IN_BOX = r"in \boxed{}"
WHOLE_CELL = "whole cells"


class FinalAnswer(NamedTuple):
    """A cell's answer, "" where it has none, what stands before it, and where it was found."""

    steps: str
    answer: str
    source: str


def final_answer(cell: str, pattern: re.Pattern | None = None) -> FinalAnswer:
    r"""The final answer of a cell.

    By a pattern, it is the first group of its last match in which that is not blank. Without one,
    it is the line of the last #### (the next line, where nothing else is on its own); or else the
    content of the last \boxed{}, with those on the same line; or else the whole cell."""
    if pattern is not None:
        matches = [match for match in pattern.finditer(cell) if (match[1] or "").strip()]
        if not matches:
            return FinalAnswer("", "", "")
        return FinalAnswer(cell[: matches[-1].start()], stripped(matches[-1][1]), "")
    marks = list(MARKER.finditer(cell))
    if marks:
        before = cell[: marks[-1].start()]
        lines = map(stripped, cell[marks[-1].end() :].split("\n"))
        return FinalAnswer(before, next(filter(None, lines), ""), AFTER_MARKER)
    cell = _BARE_BOX.sub(r"\\boxed{\1}", cell)
    boxes = _boxes_of_last_line(cell)
    if not boxes:
        return FinalAnswer("", cell, WHOLE_CELL)
    contents = [stripped(box.content) for box in boxes]
    answer = ", ".join(dict.fromkeys(contents))
    # A cell that is nothing but its boxes has no solution.
    outside = cell[: boxes[0].start] + cell[boxes[-1].end :]
    steps = cell if re.search(r"\w", outside) else ""
    return FinalAnswer(steps, answer, IN_BOX)


class _Box(NamedTuple):
    """A box's place in a text, its command included, and its content."""

    start: int
    end: int
    content: str


def _boxes_of_last_line(text: str) -> list[_Box]:
    """The boxes on the line on which the last one begins; [] where there is none that closes."""
    boxes: list[_Box] = []
    for match in _BOX.finditer(text):
        # A box inside another one is a part of its content.
        if boxes and match.start() < boxes[-1].end:
            continue
        end = _closing_brace(text, match.end())
        if not end:
            return []
        if boxes and "\n" in text[boxes[-1].end : match.start()]:
            boxes = []
        boxes.append(_Box(match.start(), end, text[match.end() : end - 1]))
    return boxes


def _closing_brace(text: str, start: int) -> int:
    """The position after the brace that closes the one before `start`; 0 where none does."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
        if not depth:
            return match.end()
    return 0


# --- rows in other projects' shapes ---------------------------------------------------------------


def cell_at(row: Mapping[str, Any], column: str) -> object:
    """The cell of a column, or a nested one: "reward_model.ground_truth". None where it is not
    there."""
    if column in row:
        return row[column]
    value: object = row
    for name in column.split("."):
        if isinstance(value, str):
            value = opened_json(value)
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def opened_json(cell: object) -> object:
    """The list or object that a cell holds as JSON text, or as Python prints it, as cells of CSV
    do; any other cell as it is."""
    if isinstance(cell, str) and cell.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return json.loads(cell)
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(cell.strip())
    return cell


def present_column(row: Mapping[str, Any], column: str, default: str, others: Sequence[str]) -> str:
    """The column that the user named; or, where that is the default and a row has none, the first
    of the others that it has."""
    if column == default and cell_at(row, column) is None:
        for other in others:
            if cell_at(row, other) is not None:
                return other
    return column


def is_messages(cell: object) -> TypeGuard[list[Mapping[str, Any]]]:
    """Whether a cell is a list of messages, of which each has a role."""
    if not isinstance(cell, list) or not cell:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in cell)


class Turns(NamedTuple):
    """What messages say: a question, the answer's message or "", and whether the system spoke."""

    question: object
    answer: object
    has_system: bool


def read_turns(place: str, column: str, messages: Sequence[Mapping[str, Any]]) -> Turns:
    """The one question in a list of messages. Raises `UserError`, naming the place, for others."""
    roles = [str(message["role"]) for message in messages]
    has_system = roles[:1] == ["system"]
    turns = list(messages[has_system:])
    if roles[has_system:] not in (["user"], ["user", "assistant"]):
        wanted = (
            "one message of the user, and one of the assistant or none, after one of the system"
        )
        raise UserError(f'{place}: "{column}" must hold {wanted} or none, not {roles}')
    question = _content(place, turns[0])
    answer = _content(place, turns[1]) if len(turns) == 2 else ""
    return Turns(question, answer, has_system)


def _content(place: str, message: Mapping[str, Any]) -> object:
    """The content of a message, as `joined_parts`. Raises `UserError` where it has none."""
    content = message.get("content")
    if content is None:
        raise UserError(f'{place}: a message of the {message["role"]} has no "content"')
    return joined_parts(place, content)


def joined_parts(place: str, content: object) -> object:
    """The text of a message's content that is a list of parts of text; any other as it is. Raises
    `UserError` for other parts, such as images."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UserError(f'{place}: the "content" of a message has a part that is no text')
        texts.append(part["text"])
    return "".join(texts)
