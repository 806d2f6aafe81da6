r"""The answer that a text with boxes, \boxed or \fbox, states.

One box holds the answer, unless it is only a part of the answer: `3, \boxed{5}` states two values,
and `\frac{1}{\boxed{5}}` states one fifth. Several boxes state the list of their contents, but the
words between them may take back the boxes before: `\boxed{4}. No, wait: \boxed{5}` states 5.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from alignment.rewards.grading.answers import (
    Answer,
    Family,
    Listing,
    Matrix,
    Quantity,
    Region,
    Words,
    unlabelled,
)
from alignment.rewards.grading.compare import Comparison
from alignment.rewards.grading.expressions import Refused
from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.reading import MAX_PARTS, read
from alignment.rewards.grading.text import normalise, single_backslashes

# A longer text is not parsed, only compared as a string: the time to parse grows with the square of
# the length.
READ_CHARS = 400
_SIGN = re.compile(r"\\(?P<box>boxed|fbox)(?![A-Za-z])\s*(?P<braced>\{)?|\\.|[{}]", re.DOTALL)
# The rest of a line or formula. It matches everywhere, so its match is never None.
_LINE: Any = re.compile(r"[^$\n]*")
# Group "word": what separates a formula from the sentence around it, which is a word, the end of a
# sentence or of a line. Commands match too, without the group, so that their names are no words.
_WORD = re.compile(
    r"\\[A-Za-z]+|(?P<word>[A-Za-z]{2,}|[\u3040-\u30ff\u4e00-\u9fff]|[.,:;?!](?=\s)|\n)"
)
# To find words in a text, commands are removed first.
_SENTENCE_WORD = re.compile("[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
# Without a space between, a digit or letter before a box or a digit after it belongs to the value.
_TOUCHES_BEFORE = re.compile("[0-9]$|(?<![A-Za-z])[a-z]$")
_TOUCHES_AFTER = re.compile("[0-9]")
# A text that begins so states the condition of an answer.
_CONDITION = re.compile(r"(?i:for|when|if|where|with|since|because|as|at) ")
# Words with which a text takes back what it said, or concludes.
_TURNING = frozenset(TABLES["turning_words"].split())


@dataclass(frozen=True)
class Boxes:
    """A text with its outermost boxes.

    `opened` is the text without \\boxed and its braces, `contents` what each box holds. `outside`
    has one text more than there are boxes: before the first, between each two, and after the last.
    """

    opened: str
    contents: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    @property
    def gaps(self) -> tuple[str, ...]:
        """The text before the first box and between each two, without white space around it."""
        return tuple(text.strip() for text in self.outside[:-1])

    @property
    def rest(self) -> str:
        """All text outside of boxes."""
        return " ".join(text.strip() for text in self.outside)


def has_box(text: str) -> bool:
    return r"\boxed" in text or r"\fbox" in text


_PLAIN_BRACE = -1  # in place of a position, for a brace that opens no box


def find_boxes(text: str) -> Boxes:
    """The boxes of a text, in linear time. A text with a box that never closes has none."""
    # A box's sign with its opening brace becomes one space, and its closing brace another.
    characters = list(text)
    contents: list[slice] = []
    # For each open brace, where its box's content begins, or _PLAIN_BRACE.
    content_starts: list[int] = []
    open_boxes = 0
    # Where the last box without braces ends: `\boxed 5` holds the rest of its line or formula.
    line_end = 0
    for match in _SIGN.finditer(text):
        start, end = match.span()
        is_outermost = open_boxes == 0 and start >= line_end
        if match["box"]:
            characters[start:end] = [" ", *[""] * (end - start - 1)]
            if match["braced"]:
                content_starts.append(end)
                open_boxes += 1
            elif is_outermost:
                line_end = _LINE.match(text, end).end()
                contents.append(slice(end, line_end))
        elif match[0] == "{":
            content_starts.append(_PLAIN_BRACE)
        elif match[0] == "}" and content_starts:
            content_start = content_starts.pop()
            if content_start == _PLAIN_BRACE:
                continue
            characters[start] = " "
            open_boxes -= 1
            if open_boxes == 0 and start >= line_end:
                contents.append(slice(content_start, start))
    if open_boxes or not contents:
        return Boxes(text)
    texts = []
    for content in contents:
        texts.append("".join(characters[content]).strip())
    return Boxes("".join(characters).strip(), tuple(texts), _outside(characters, contents))


def _outside(characters: list[str], contents: list[slice]) -> tuple[str, ...]:
    """The text before the first box, between each two, and after the last."""
    starts = [*(content.start for content in contents), len(characters)]
    ends = [0, *(content.stop for content in contents)]
    outside = []
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        between = "".join(characters[end:start])
        if k > 0:
            between = between.removeprefix(" ")  # in place of the closing brace
        if k < len(contents):
            between = between.removesuffix(" ")  # in place of the box's sign
        outside.append(between)
    return tuple(outside)


@lru_cache(maxsize=10_000)
def stated(text: str) -> str:
    """The part of a text that states its answer: the content of its box, with the formula around it
    or the whole text where these make it one answer; the text itself if it has no box."""
    text = single_backslashes(text)
    if not has_box(text):
        return text
    boxes = find_boxes(text)
    if not boxes.contents:
        return text
    if len(boxes.contents) > 1:
        return _join_boxes(boxes)
    if _is_one_answer(boxes):
        return boxes.opened
    return _value_of_box(boxes, 0)


def boxed_answer(text: str) -> str:
    """The content of a text's box, whatever stands around it, or what several boxes state together;
    the text itself if it has no box."""
    if not has_box(text):
        return text
    boxes = find_boxes(text)
    if not boxes.contents:
        return text
    if len(boxes.contents) == 1:
        return boxes.contents[0]
    return _join_boxes(boxes)


def _join_boxes(boxes: Boxes) -> str:
    """The answer that several boxes state: their one value if all have the same; else the whole
    text if it reads as one answer; else the list of their values, from the last box on before which
    a turning word stands."""
    values = list(boxes.contents)
    if len(values) <= MAX_PARTS:
        values = [_value_of_box(boxes, k) for k in range(len(values))]
    *others, last = values
    if len(others) < MAX_PARTS and all(_same_value(other, last) for other in others):
        return last
    if _is_one_answer(boxes):
        return boxes.opened
    first = 0  # of the boxes that are not taken back
    for k, gap in enumerate(boxes.gaps):
        words = re.findall("[a-z]+", gap.lower())
        if k > 0 and not _TURNING.isdisjoint(words):
            first = k
    return ", ".join(values[first:])


def _value_of_box(boxes: Boxes, k: int) -> str:
    r"""The value that box `k` states: its content, or the formula of which it is a part.

    The formula is the text around the box up to the next words. It is the value if it reads as one
    quantity, as in `the answer is -\boxed{5}`. If a digit or letter touches the box, it is the
    value without being read.
    """
    content = boxes.contents[k]
    before = _text_after_words(boxes.outside[k])
    after = _text_before_words(boxes.outside[k + 1])
    if _TOUCHES_BEFORE.search(before) or _TOUCHES_AFTER.match(after):
        return f"{before}{content}{after}"
    before = before.lstrip(" }$*:=")  # as the brace after \text{The answer is}
    after = after.rstrip(" $*.,;:!?")
    # "- " is a dash, "-" a sign.
    is_dash = before.rstrip() in ("-", "–", "—") and before.endswith(" ")
    follows_letter_or_digit = re.search(r"\w\s*$", before)
    is_alone = not f"{before}{after}".strip(" $")
    if is_dash or follows_letter_or_digit or is_alone:
        return content
    formula = f"{before} {content} {after}"
    if len(formula) > READ_CHARS:
        return content
    with suppress(Refused):
        if isinstance(read(normalise(formula)), Quantity):
            return formula
    return content


def _text_after_words(text: str) -> str:
    """The end of a text, after its last word."""
    ends = [match.end() for match in _WORD.finditer(text) if match["word"]]
    return text[max(ends, default=0) :]


def _text_before_words(text: str) -> str:
    """The beginning of a text, before its first word."""
    starts = [match.start() for match in _WORD.finditer(text) if match["word"]]
    return text[: min(starts, default=None)]


def _same_value(a: str, b: str) -> bool:
    if a == b:
        return True
    if max(len(a), len(b)) > READ_CHARS:
        return False
    return Comparison().compare_texts(normalise(a), normalise(b)) is True


def _is_one_answer(boxes: Boxes) -> bool:
    r"""Whether the whole text, with its boxes opened, is one answer and not a sentence.

    The text around a single box is no part of the answer if it gives a value to another name, as in
    `a = 3, c = \boxed{5}`, or a condition, as in `For n = 4, \boxed{5}`.
    """
    if not boxes.rest.strip(" .$") or len(boxes.opened) > READ_CHARS:
        return False
    if _CONDITION.match(boxes.rest):
        return False
    with suppress(Refused):
        answer = unlabelled(read(normalise(boxes.opened)))
        if isinstance(answer, Family):
            answer = unlabelled(answer.answer)
        if isinstance(answer, Quantity):
            # Words are a unit, or else a sentence.
            has_words = _SENTENCE_WORD.search(_COMMAND.sub(" ", boxes.rest))
            return bool(answer.unit) or not has_words
        if isinstance(answer, Listing) and answer.kind == "=":
            return len(boxes.contents) > 1
        return isinstance(answer, Listing | Matrix | Region) and not _has_words(answer)
    return False


def _has_words(answer: Answer) -> bool:
    """Whether an answer is a list without brackets in which some part is words: "4, no, 5"."""
    if not isinstance(answer, Listing) or answer.kind not in ("", "or"):
        return False
    for part in map(unlabelled, answer.parts):
        if isinstance(part, Words) and part.text not in ("∞", "-∞", "∅"):
            return True
    return False
