r"""What a text with boxes states. One \boxed or \fbox holds the answer, unless it is a part of a
larger one: `3, \boxed{5}` states two values and `\frac{1}{\boxed{5}}` states one fifth. Several boxes
state all that they hold, unless the text takes one back."""

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
from alignment.rewards.grading.reading import MAX_PARTS, read
from alignment.rewards.grading.text import TABLES, normalise

# A longer text is not read but compared as it stands, for reading takes the square of its length.
READ_CHARS = 400
_SIGN = re.compile(r"\\(?P<box>boxed|fbox)(?![A-Za-z])\s*(?P<braced>\{)?|\\.|[{}]", re.DOTALL)
_TURNING = frozenset(TABLES["turning_words"].split())


@dataclass(frozen=True)
class Boxes:
    """A text with its outermost boxes: `opened` is the text without the signs of boxes, `contents`
    what each box holds, `gaps` the text before each, back to the one before, and `rest` all text
    outside of boxes."""

    opened: str
    contents: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    rest: str = ""


def has_box(text: str) -> bool:
    return r"\boxed" in text or r"\fbox" in text


def find_boxes(text: str) -> Boxes:
    """The boxes of a text, in linear time. A text with a box that never closes has none."""
    characters = list(text)  # those of boxes' signs and braces become empty
    contents: list[slice] = []
    braces: list[int] = []  # for each open brace where its box's content begins, or -1 without a box
    open_boxes = line_end = 0
    for match in _SIGN.finditer(text):
        start, end = match.span()
        if match["box"]:
            characters[start:end] = [" ", *[""] * (end - start - 1)]
            if match["braced"]:
                braces.append(end)
                open_boxes += 1
            elif not open_boxes and start >= line_end:
                # `\boxed 5` holds the rest of its line or formula.
                line_end = end + len(text[end:].partition("$")[0].partition("\n")[0])
                contents.append(slice(end, line_end))
        elif match[0] == "{":
            braces.append(-1)
        elif match[0] == "}" and braces and (content := braces.pop()) >= 0:
            characters[start] = " "
            open_boxes -= 1
            if not open_boxes and start >= line_end:
                contents.append(slice(content, start))
    if open_boxes or not contents:
        return Boxes(text)
    ends = [0, *(content.stop for content in contents)]
    outside = [slice(end, content.start) for end, content in zip(ends, contents, strict=False)]

    def part(place: slice) -> str:
        return "".join(characters[place]).strip()

    gaps = tuple(map(part, outside))
    rest = " ".join([*gaps, part(slice(ends[-1], None))])
    return Boxes("".join(characters).strip(), tuple(map(part, contents)), gaps, rest)


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
        return _of_several(boxes)
    return boxes.opened if _is_one_answer(boxes) else boxes.contents[0]


def boxed_answer(text: str) -> str:
    """The content of a text's box, or what its several boxes state together; the text itself
    without a box."""
    boxes = find_boxes(text) if has_box(text) else Boxes(text)
    if len(boxes.contents) == 1:
        return boxes.contents[0]
    return _of_several(boxes) if boxes.contents else text


def _of_several(boxes: Boxes) -> str:
    """The last of several boxes where all hold one value, or where the words before it take back
    those before; else all."""
    *others, last = boxes.contents
    if len(others) < MAX_PARTS and all(_same_value(other, last) for other in others):
        return last
    if _is_one_answer(boxes):
        return boxes.opened
    start = 0
    for k, gap in enumerate(boxes.gaps):
        words = re.findall("[a-z]+", gap.lower())
        if k > 0 and not _TURNING.isdisjoint(words):
            start = k
    return ", ".join(boxes.contents[start:])


def _same_value(a: str, b: str) -> bool:
    if a == b:
        return True
    if max(len(a), len(b)) > READ_CHARS:
        return False
    return Comparison().texts(normalise(a), normalise(b)) is True


def _is_one_answer(boxes: Boxes) -> bool:
    r"""Whether the whole text around the boxes reads as one answer, of which a single box is a part,
    and not as a sentence. The values of other names, as in `a = 3, c = \boxed{5}`, are no part of
    one answer."""
    if not boxes.rest.strip(" .$") or len(boxes.opened) > READ_CHARS:
        return False
    with suppress(Refused):
        answer = unlabelled(read(normalise(boxes.opened)))
        if isinstance(answer, Quantity):
            words = re.search("[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", boxes.rest))
            return bool(answer.unit) or not words
        if isinstance(answer, Listing) and answer.kind == "=":
            return len(boxes.contents) > 1
        return isinstance(answer, Listing | Matrix | Region) and not _has_words(answer)
    return False


def _has_words(answer: Answer) -> bool:
    """Whether a list without brackets holds words, as "4, no, 5" does."""
    if not isinstance(answer, Listing) or answer.kind not in ("", "or"):
        return False
    parts = map(unlabelled, answer.parts)
    return any(isinstance(part, Words) and part.text not in ("∞", "-∞", "∅") for part in parts)
