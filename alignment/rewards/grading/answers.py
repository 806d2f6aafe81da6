"""The kinds of answers: quantities with units, words, listings, matrices, ..., and the arithmetic of regions of the line."""

from collections.abc import Iterable
from typing import NamedTuple

from flint import arb

from alignment.rewards.grading.expressions import Node, Refused
from alignment.rewards.grading.values import is_narrow, real_value


class Words(NamedTuple):
    """An answer in words, or a sign that is no number: ∅, ∞."""

    text: str


class Quantity(NamedTuple):
    """A value with its unit, "" where none was given. `decimals` and `digits` (significant ones) say how a decimal number was
    written; both are 0 for anything else."""

    value: Node
    unit: str = ""
    decimals: int = 0
    digits: int = 0


class About(NamedTuple):
    """An answer marked as an approximation: ≈ 3.14, about 5."""

    answer: "Answer"


class Labelled(NamedTuple):
    """`label = answer`."""

    label: str
    answer: "Answer"


class Listing(NamedTuple):
    """Several answers. `kind` is the pair of brackets; "" for a bare list, "or" for alternatives in any order, "=" for
    values of several labels, ":" for a ratio, "+" for a measure in two units."""

    kind: str
    parts: tuple["Answer", ...]


class Matrix(NamedTuple):
    """Rows of cells."""

    rows: tuple[tuple["Answer", ...], ...]


Cut = tuple[arb, bool]
"""A place between the real numbers: before the point, or with True after it."""


class Region(NamedTuple):
    """A union of intervals. Its cuts are in order; it begins at the first, ends at the second, begins at the third, ..."""

    cuts: tuple[Cut, ...]


class Relation(NamedTuple):
    """`left sign right`, with sign one of = < ≤ ≠, that is neither labelled nor a region."""

    sign: str
    left: Node
    right: Node


class Clock(NamedTuple):
    """A time of day: seconds since midnight; `half` is "am", "pm", "24" for an hour past twelve or below one, else ""."""

    seconds: int
    half: str


Answer = Words | Quantity | About | Labelled | Listing | Matrix | Region | Relation | Clock


def unlabelled(answer: Answer) -> Answer:
    return answer.answer if isinstance(answer, Labelled) else answer


_INFINITY = arb.pos_inf()
_LOWEST, _HIGHEST = (-_INFINITY, True), (_INFINITY, False)
EVERYWHERE = Region((_LOWEST, _HIGHEST))


def is_interval(answer: Answer) -> bool:
    return isinstance(answer, Listing) and answer.kind in ("()", "(]", "[)", "[]") and len(answer.parts) == 2


def edge(answer: Answer) -> arb:
    if isinstance(answer, Words) and answer.text in ("∞", "-∞"):
        return _INFINITY if answer.text == "∞" else -_INFINITY
    if isinstance(answer, Quantity) and answer.unit in ("", "degree"):
        end = real_value(answer.value)
        if is_narrow(end):
            return end
    raise Refused("no end of an interval")


def interval(low: arb, low_closed: bool, high: arb, high_closed: bool) -> Region:
    """The region between two ends; nothing where they are in the wrong order."""
    return _region([((low, not low_closed), (high, high_closed))])


def half_line(sign: str, end: arb) -> Region:
    below, above = interval(-_INFINITY, False, end, sign == "≤"), interval(end, sign == "≥", _INFINITY, False)
    return union([below, above]) if sign == "≠" else below if sign in "<≤" else above


def as_region(answer: Answer) -> Region:
    """An interval or a set of numbers as a region. Raises `Refused` for anything else."""
    if isinstance(answer, Labelled):
        return as_region(answer.answer)
    if isinstance(answer, Region):
        return answer
    if answer == Words("∅"):
        return Region(())
    if isinstance(answer, Listing) and answer.kind == "{}":
        return union(interval(point, True, point, True) for point in map(edge, answer.parts))
    if is_interval(answer):
        low, high = map(edge, answer.parts)
        return interval(low, answer.kind[0] == "[", high, answer.kind[1] == "]")
    raise Refused("no region")


def same_point(a: arb, b: arb) -> bool:
    """Whether two ends of intervals are equal."""
    return a == b or (a - b).contains(0)  # the first for infinities


def _before(a: Cut, b: Cut) -> bool:
    return a[0] < b[0] or (same_point(a[0], b[0]) and a[1] < b[1])


def _region(pieces: Iterable[tuple[Cut, Cut]]) -> Region:
    """The union of pieces between two cuts; those that touch or overlap become one. Empty ones are dropped."""
    full = (piece for piece in pieces if _before(*piece))
    cuts: list[Cut] = []
    for low, high in sorted(full, key=lambda piece: (float(piece[0][0]), piece[0][1])):
        if not cuts or _before(cuts[-1], low):
            cuts += [low, high]
        elif _before(cuts[-1], high):
            cuts[-1] = high
    return Region(tuple(cuts))


def union(regions: Iterable[Region]) -> Region:
    return _region(piece for region in regions for piece in zip(region.cuts[::2], region.cuts[1::2], strict=True))


def complement(region: Region) -> Region:
    ends = (_LOWEST, *region.cuts, _HIGHEST)
    return _region(zip(ends[::2], ends[1::2], strict=True))


def intersection(regions: Iterable[Region]) -> Region:
    return complement(union(map(complement, regions)))
