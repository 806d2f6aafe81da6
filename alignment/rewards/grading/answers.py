"""The kinds of answers: quantities with units, words, listings, matrices, ..., and the arithmetic
of regions of the line."""

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import NamedTuple, TypeGuard

from alignment.rewards.grading.expressions import Node, Refused
from alignment.rewards.grading.values import rounded_value


class Words(NamedTuple):
    """An answer in words, or a sign that is no number: ∅, ∞.

    `written` is a single word as it was written, which may be a product of letters: vT.
    """

    text: str
    written: str = ""


class Quantity(NamedTuple):
    """A value with its unit, or "".

    `decimals` and `digits` (significant) are a decimal number's as it was written, else 0.
    """

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
    """Several answers.

    `kind` is the pair of brackets; "" for a bare list, "or" for alternatives in any order, "=" for
    values of several labels, ":" for a ratio, "+" for a measure in two units.
    """

    kind: str
    parts: tuple["Answer", ...]


class Matrix(NamedTuple):
    """Rows of cells, all of one length."""

    rows: tuple[tuple["Answer", ...], ...]


# A place between the real numbers: before the point, or with True after it.
Cut = tuple[Decimal, bool]


class Region(NamedTuple):
    """A union of intervals.

    Its cuts are in order; it begins at the first, ends at the second, begins at the third, ...
    """

    cuts: tuple[Cut, ...]


class Relation(NamedTuple):
    """`left sign right`, with sign one of = < ≤ ≠, that is neither labelled nor a region.

    `unit` is that of an equation's right side, or "".
    """

    sign: str
    left: Node
    right: Node
    unit: str = ""


class Clock(NamedTuple):
    """A time of day: seconds since midnight.

    `half` is "am", "pm", "24" for an hour past twelve or below one, else "".
    """

    seconds: int
    half: str


class Family(NamedTuple):
    """An answer with a free parameter, for all integers: π/4 + kπ, k ∈ ℤ; or, without `is_integer`,
    for all natural numbers."""

    answer: "Answer"
    parameter: str
    is_integer: bool = True


Answer = Words | Quantity | About | Labelled | Listing | Matrix | Region | Relation | Clock | Family


def unlabelled(answer: Answer) -> Answer:
    if isinstance(answer, Labelled):
        return answer.answer
    return answer


_MODULUS = re.compile("(≡ )?mod ([0-9]+)")


def modulus(quantity: Quantity) -> int:
    """The 7 of `3 (mod 7)` and of `x ≡ 3 (mod 7)`; 0 for other quantities."""
    match = _MODULUS.fullmatch(quantity.unit)
    return int(match[2]) if match else 0


def is_class(quantity: Quantity) -> bool:
    """Whether a quantity is a class of numbers, as the x of `x ≡ 3 (mod 7)` is."""
    return quantity.unit.startswith("≡")


def are_quantities(parts: Iterable[Answer]) -> TypeGuard[tuple[Quantity, ...]]:
    return all(isinstance(part, Quantity) for part in parts)


_INFINITY = Decimal("Infinity")
_LOWEST: Cut = (-_INFINITY, True)
_HIGHEST: Cut = (_INFINITY, False)
EVERYWHERE = Region((_LOWEST, _HIGHEST))


def is_interval(answer: Answer) -> TypeGuard[Listing]:
    return (
        isinstance(answer, Listing)
        and answer.kind in ("()", "(]", "[)", "[]")
        and len(answer.parts) == 2
    )


def edge(answer: Answer) -> Decimal:
    """The number at an end of an interval, or an infinity. Raises `Refused` for anything else."""
    if answer == Words("∞"):
        return _INFINITY
    if answer == Words("-∞"):
        return -_INFINITY
    if isinstance(answer, Quantity) and answer.unit in ("", "degree"):
        return rounded_value(answer.value)
    raise Refused("no end of an interval")


def interval(low: Decimal, low_closed: bool, high: Decimal, high_closed: bool) -> Region:
    """The region between two ends; nothing where they are in the wrong order."""
    start: Cut = (low, not low_closed)
    end: Cut = (high, high_closed)
    if start < end:
        return Region((start, end))
    return Region(())


def single_point(point: Decimal) -> Region:
    return interval(point, True, point, True)


def half_line(sign: str, end: Decimal) -> Region:
    """The numbers that stand in the relation `sign`, one of < ≤ > ≥ ≠, to `end`."""
    if sign == "≠":
        return complement(single_point(end))
    if sign in "<≤":
        return interval(-_INFINITY, False, end, sign == "≤")
    return interval(end, sign == "≥", _INFINITY, False)


def as_region(answer: Answer) -> Region:
    """An interval or a set of numbers as a region. Raises `Refused` for anything else."""
    answer = unlabelled(answer)
    if isinstance(answer, Region):
        return answer
    if answer == Words("∅"):
        return Region(())
    if isinstance(answer, Listing) and answer.kind == "{}":
        return combine(any, [single_point(edge(part)) for part in answer.parts])
    if is_interval(answer):
        low, high = map(edge, answer.parts)
        return interval(low, answer.kind[0] == "[", high, answer.kind[1] == "]")
    raise Refused("no region")


def combine(holds: Callable[[list[bool]], bool], regions: Iterable[Region]) -> Region:
    """The numbers for which `holds`, which gets for each region whether it contains the number.

    `any` gives the union, `all` the intersection.
    """
    regions = list(regions)
    places = [_LOWEST]
    for region in regions:
        places += region.cuts
    cuts: list[Cut] = []
    for place in sorted(places):
        membership = [_is_inside(region, place) for region in regions]
        # After an odd number of cuts the result contains the numbers up to this place.
        is_open = len(cuts) % 2 == 1
        if (place < _HIGHEST and holds(membership)) != is_open:
            cuts.append(place)
    if len(cuts) % 2 == 1:
        cuts.append(_HIGHEST)
    return Region(tuple(cuts))


def _is_inside(region: Region, place: Cut) -> bool:
    """Whether the region contains the numbers just after a place."""
    cuts_before = [cut for cut in region.cuts if cut <= place]
    return len(cuts_before) % 2 == 1


def complement(region: Region) -> Region:
    return combine(lambda membership: not membership[0], [region])
