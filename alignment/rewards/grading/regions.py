"""Unions of intervals of the real line, open and closed."""

from collections.abc import Iterable

from flint import arb

from alignment.rewards.grading.answers import Answer, Cut, Labelled, Listing, Quantity, Region, Words
from alignment.rewards.grading.expressions import Refused
from alignment.rewards.grading.values import is_narrow, real_value

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
