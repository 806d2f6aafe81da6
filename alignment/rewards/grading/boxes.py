r"""What a text with boxes states.

One \boxed or \fbox holds the answer, unless it is a part of a larger one: `3, \boxed{5}` states
two values and `\frac{1}{\boxed{5}}` states one fifth. Several boxes state all that they hold,
unless the text takes one back.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from alignment.rewards.grading.answers import (
    Answer,
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
from alignment.rewards.grading.text import normalise

# A longer text is not read but compared as it stands, for reading takes the square of its length.
READ_CHARS = 400
_SIGN = re.compile(r"\\(?P<box>boxed|fbox)(?![A-Za-z])\s*(?P<braced>\{)?|\\.|[{}]", re.DOTALL)
# What separates a formula from the sentence around it: words, but no commands, and signs between
# sentences.
_WORD = re.compile(
    r"\\[A-Za-z]+|(?P<word>[A-Za-z]{2,}|[\u3040-\u30ff\u4e00-\u9fff]|[.,:;?!](?=\s)|\n)"
)
# Words of a sentence around a formula, but not commands.
_SENTENCE_WORD = re.compile("[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
# A digit or a letter that touches a box.
_TOUCHES_BEFORE = re.compile("[0-9]$|(?<![A-Za-z])[a-z]$")
_TOUCHES_AFTER = re.compile("[0-9]")
_CONDITION = re.compile(r"(?i:for|when|if|where|with|since|because|as|at) ")
_TURNING = frozenset(TABLES["turning_words"].split())


@dataclass(frozen=True)
class Boxes:
    """A text with its outermost boxes.

    `opened` is the text without the signs of boxes, `contents` what each box holds, and `outside`
    the text before each, back to the one before, and the text behind the last.
    """

    opened: str
    contents: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    @property
    def gaps(self) -> tuple[str, ...]:
        """The text before each box, without white space around it."""
        return tuple(text.strip() for text in self.outside[:-1])

    @property
    def rest(self) -> str:
        """All text outside of boxes."""
        return " ".join(text.strip() for text in self.outside)


def has_box(text: str) -> bool:
    return r"\boxed" in text or r"\fbox" in text


# In the stack of open braces: a brace that opens no box.
_PLAIN_BRACE = -1


def find_boxes(text: str) -> Boxes:
    """The boxes of a text, in linear time. A text with a box that never closes has none."""
    characters = list(text)  # the ones of boxes' signs and braces become empty
    contents: list[slice] = []
    content_starts: list[int] = []  # for each open brace, where its box's content begins
    open_boxes = 0
    line_end = 0  # of the last box without braces, which holds all that follows on its line
    for match in _SIGN.finditer(text):
        start, end = match.span()
        is_outermost = open_boxes == 0 and start >= line_end
        if match["box"]:
            characters[start:end] = [" ", *[""] * (end - start - 1)]
            if match["braced"]:
                content_starts.append(end)
                open_boxes += 1
            elif is_outermost:
                # `\boxed 5` holds the rest of its line or formula.
                line_end = end + len(text[end:].partition("$")[0].partition("\n")[0])
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
    return Boxes(
        "".join(characters).strip(),
        tuple("".join(characters[content]).strip() for content in contents),
        _outside(characters, contents),
    )


def _outside(characters: list[str], contents: list[slice]) -> tuple[str, ...]:
    """The text before each box, back to the one before, and behind the last."""
    starts = [*(content.start for content in contents), len(characters)]
    ends = [0, *(content.stop for content in contents)]
    outside = []
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        between = "".join(characters[end:start])
        if k > 0:
            between = between.removeprefix(" ")  # which stands for the brace that closes a box
        if k < len(contents):
            between = between.removesuffix(" ")  # which stands for the sign that opens one
        outside.append(between)
    return tuple(outside)


@lru_cache(maxsize=10_000)
def stated(text: str) -> str:
    """The text of the answer that a text states: that of its box, or the whole where the box is a
    part of it."""
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
    """The content of a text's box, or what its several boxes state together; the text itself
    without a box."""
    if not has_box(text):
        return text
    boxes = find_boxes(text)
    if not boxes.contents:
        return text
    if len(boxes.contents) == 1:
        return boxes.contents[0]
    return _join_boxes(boxes)


def _join_boxes(boxes: Boxes) -> str:
    """The last of several boxes where all hold one value, or where the words before it take back
    those before; else all."""
    values = list(boxes.contents)
    if len(values) <= MAX_PARTS:
        values = [_value_of_box(boxes, k) for k in range(len(values))]
    *others, last = values
    if len(others) < MAX_PARTS and all(_same_value(other, last) for other in others):
        return last
    if _is_one_answer(boxes):
        return boxes.opened
    first_that_counts = 0
    for k, gap in enumerate(boxes.gaps):
        words = re.findall("[a-z]+", gap.lower())
        if k > 0 and not _TURNING.isdisjoint(words):
            first_that_counts = k
    return ", ".join(values[first_that_counts:])


def _value_of_box(boxes: Boxes, k: int) -> str:
    r"""The value that box `k` states: its content, or the formula around it.

    The formula reaches up to the next word, and counts where the box is a part of a single value,
    as in `the answer is -\boxed{5}`. A digit or a letter that touches the box is a part of it, too,
    whatever both state together.
    """
    content = boxes.contents[k]
    before = _text_after_words(boxes.outside[k])
    after = _text_before_words(boxes.outside[k + 1])
    if _TOUCHES_BEFORE.search(before) or _TOUCHES_AFTER.match(after):
        return f"{before}{content}{after}"
    before = before.lstrip(" }$*:=")  # of \text{The answer is}
    after = after.rstrip(" $*.,;:!?")
    is_dash = before.rstrip() in ("-", "–", "—") and before.endswith(" ")  # of a sentence
    if is_dash or re.search(r"\w\s*$", before) or not f"{before}{after}".strip(" $"):
        return content
    formula = f"{before} {content} {after}"
    if len(formula) > READ_CHARS:
        return content
    with suppress(Refused):
        if isinstance(read(normalise(formula)), Quantity):
            return formula
    return content


def _text_after_words(text: str) -> str:
    ends = [match.end() for match in _WORD.finditer(text) if match["word"]]
    return text[max(ends, default=0) :]


def _text_before_words(text: str) -> str:
    starts = [match.start() for match in _WORD.finditer(text) if match["word"]]
    return text[: min(starts, default=None)]


def _same_value(a: str, b: str) -> bool:
    if a == b:
        return True
    if max(len(a), len(b)) > READ_CHARS:
        return False
    return Comparison().compare_texts(normalise(a), normalise(b)) is True


def _is_one_answer(boxes: Boxes) -> bool:
    r"""Whether the whole text around the boxes reads as one answer, of which a single box is a
    part, and not as a sentence.

    The values of other names, as in `a = 3, c = \boxed{5}`, are no part of one answer, and neither
    is the condition of `For n = 4, \boxed{5}`.
    """
    if not boxes.rest.strip(" .$") or len(boxes.opened) > READ_CHARS:
        return False
    if _CONDITION.match(boxes.rest):
        return False
    with suppress(Refused):
        answer = unlabelled(read(normalise(boxes.opened)))
        if isinstance(answer, Quantity):
            has_words = _SENTENCE_WORD.search(_COMMAND.sub(" ", boxes.rest))
            return bool(answer.unit) or not has_words
        if isinstance(answer, Listing) and answer.kind == "=":
            return len(boxes.contents) > 1
        return isinstance(answer, Listing | Matrix | Region) and not _has_words(answer)
    return False


def _has_words(answer: Answer) -> bool:
    """Whether a list without brackets holds words, as "4, no, 5" does."""
    if not isinstance(answer, Listing) or answer.kind not in ("", "or"):
        return False
    for part in map(unlabelled, answer.parts):
        if isinstance(part, Words) and part.text not in ("∞", "-∞", "∅"):
            return True
    return False
