"""The kinds of answers: quantities with units, words, listings, matrices, ..., and the arithmetic
of regions of the line."""

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import NamedTuple

from alignment.rewards.grading.expressions import Node, Refused
from alignment.rewards.grading.values import rounded_value


# an answer in words, or a sign that is no number: ∅, ∞
class Words(NamedTuple):
    text: str


class Quantity(NamedTuple):
    """A value with its unit, or "". `decimals` and `digits` (significant) are a decimal number's as
    it was written, else 0."""

    value: Node
    unit: str = ""
    decimals: int = 0
    digits: int = 0


# an answer marked as an approximation: ≈ 3.14, about 5
class About(NamedTuple):
    answer: "Answer"


class Labelled(NamedTuple):
    label: str
    answer: "Answer"  # `label = answer`


class Listing(NamedTuple):
    """Several answers. `kind` is the pair of brackets; "" for a bare list, "or" for alternatives in
    any order, "=" for values of several labels, ":" for a ratio, "+" for a measure in two units."""

    kind: str
    parts: tuple["Answer", ...]


class Matrix(NamedTuple):
    rows: tuple[tuple["Answer", ...], ...]  # rows of cells


# a place between the real numbers: before the point, or with True after it
Cut = tuple[Decimal, bool]


class Region(NamedTuple):
    """A union of intervals. Its cuts are in order; it begins at the first, ends at the second,
    begins at the third, ..."""

    cuts: tuple[Cut, ...]


class Relation(NamedTuple):
    """`left sign right`, with sign one of = < ≤ ≠, that is neither labelled nor a region."""

    sign: str
    left: Node
    right: Node


class Clock(NamedTuple):
    """A time of day: seconds since midnight; `half` is "am", "pm", "24" for an hour past twelve or
    below one, else ""."""

    seconds: int
    half: str


Answer = Words | Quantity | About | Labelled | Listing | Matrix | Region | Relation | Clock


def unlabelled(answer: Answer) -> Answer:
    return answer.answer if isinstance(answer, Labelled) else answer


_INFINITY = Decimal("Infinity")
_LOWEST, _HIGHEST = (-_INFINITY, True), (_INFINITY, False)
EVERYWHERE = Region((_LOWEST, _HIGHEST))


def is_interval(answer: Answer) -> bool:
    return (
        isinstance(answer, Listing)
        and answer.kind in ("()", "(]", "[)", "[]")
        and len(answer.parts) == 2
    )


def edge(answer: Answer) -> Decimal:
    if isinstance(answer, Words) and answer.text in ("∞", "-∞"):
        return _INFINITY if answer.text == "∞" else -_INFINITY
    if isinstance(answer, Quantity) and answer.unit in ("", "degree"):
        return rounded_value(answer.value)
    raise Refused("no end of an interval")


def interval(low: Decimal, low_closed: bool, high: Decimal, high_closed: bool) -> Region:
    """The region between two ends; nothing where they are in the wrong order."""
    cuts = (low, not low_closed), (high, high_closed)
    return Region(cuts if cuts[0] < cuts[1] else ())


def half_line(sign: str, end: Decimal) -> Region:
    """The numbers that stand in the relation `sign`, one of < ≤ > ≥ ≠, to `end`."""
    if sign == "≠":
        return complement(interval(end, True, end, True))
    return (
        interval(-_INFINITY, False, end, sign == "≤")
        if sign in "<≤"
        else interval(end, sign == "≥", _INFINITY, False)
    )


def as_region(answer: Answer) -> Region:
    """An interval or a set of numbers as a region. Raises `Refused` for anything else."""
    answer = unlabelled(answer)
    if isinstance(answer, Region):
        return answer
    if answer == Words("∅"):
        return Region(())
    if isinstance(answer, Listing) and answer.kind == "{}":
        return combine(
            any, (interval(point, True, point, True) for point in map(edge, answer.parts))
        )
    if is_interval(answer):
        low, high = map(edge, answer.parts)
        return interval(low, answer.kind[0] == "[", high, answer.kind[1] == "]")
    raise Refused("no region")


def combine(holds: Callable[[list[bool]], bool], regions: Iterable[Region]) -> Region:
    """The numbers for which `holds`, told which regions contain each: `any` gives the union, `all`
    the intersection."""
    regions = list(regions)
    places = [_LOWEST, *(cut for region in regions for cut in region.cuts)]
    cuts: list[Cut] = []
    for place in sorted(places):
        inside = [sum(cut <= place for cut in region.cuts) % 2 == 1 for region in regions]
        if (place < _HIGHEST and holds(inside)) != len(cuts) % 2:
            cuts.append(place)
    return Region((*cuts, _HIGHEST) if len(cuts) % 2 else tuple(cuts))


def complement(region: Region) -> Region:
    return combine(lambda inside: not inside[0], [region])
