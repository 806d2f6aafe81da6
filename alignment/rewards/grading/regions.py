"""Unions of intervals of the real line, open and closed."""

from collections.abc import Sequence

from flint import arb

from alignment.rewards.grading.answers import Answer, Interval, Labelled, Listing, Quantity, Region, Words
from alignment.rewards.grading.expressions import Refused
from alignment.rewards.grading.values import is_narrow, real_value


def is_interval(answer: Answer) -> bool:
    return isinstance(answer, Listing) and answer.kind in ("()", "(]", "[)", "[]") and len(answer.parts) == 2


_INFINITY = arb.pos_inf()
EVERYWHERE = Region((Interval(-_INFINITY, False, _INFINITY, False),))


def edge(answer: Answer) -> arb:
    if isinstance(answer, Words) and answer.text in ("∞", "-∞"):
        return _INFINITY if answer.text == "∞" else -_INFINITY
    if isinstance(answer, Quantity) and answer.unit in ("", "degree"):
        end = real_value(answer.value)
        if is_narrow(end):
            return end
    raise Refused("no end of an interval")


def half_line(sign: str, end: arb) -> Region:
    below = Interval(-_INFINITY, False, end, sign in "≤")
    above = Interval(end, sign in "≥", _INFINITY, False)
    return region_of([below, above] if sign == "≠" else [below] if sign in "<≤" else [above])


def as_region(answer: Answer) -> Region:
    """An interval or a set of numbers as a region. Raises `Refused` for anything else."""
    if isinstance(answer, Labelled):
        return as_region(answer.answer)
    if isinstance(answer, Region):
        return answer
    if answer == Words("∅"):
        return Region(())
    if isinstance(answer, Listing) and answer.kind == "{}":
        points = [edge(part) for part in answer.parts]
        return region_of([Interval(point, True, point, True) for point in points])
    if is_interval(answer):
        low, high = map(edge, answer.parts)
        return region_of([Interval(low, answer.kind[0] == "[", high, answer.kind[1] == "]")])
    raise Refused("no region")


def same_point(a: arb, b: arb) -> bool:
    """Whether two ends of intervals are equal."""
    return a == b or (a - b).contains(0)  # the first for infinities


def region_of(intervals: Sequence[Interval]) -> Region:
    """The union of intervals, in order; those that touch or overlap become one. Empty ones are dropped."""
    pieces: list[Interval] = []
    whole = [i for i in intervals if i.low < i.high or (same_point(i.low, i.high) and i.low_closed and i.high_closed)]
    for new in sorted(whole, key=lambda i: (float(i.low), not i.low_closed)):
        last = pieces[-1] if pieces else None
        if last is None or new.low > last.high or (
            same_point(new.low, last.high) and not (new.low_closed or last.high_closed)
        ):  # fmt: skip
            pieces.append(new)
            continue
        reaches = new.high > last.high or (same_point(new.high, last.high) and new.high_closed)
        high, closed = (new.high, new.high_closed) if reaches else (last.high, last.high_closed)
        low_closed = last.low_closed or (same_point(new.low, last.low) and new.low_closed)
        pieces[-1] = Interval(last.low, low_closed, high, closed)
    return Region(tuple(pieces))


def union(regions: Sequence[Region]) -> Region:
    return region_of([piece for region in regions for piece in region.pieces])


def complement(region: Region) -> Region:
    ends = [(end, not closed) for p in region.pieces for end, closed in ((p.low, p.low_closed), (p.high, p.high_closed))]
    ends = [(-_INFINITY, False), *ends, (_INFINITY, False)]
    return region_of([Interval(*low, *high) for low, high in zip(ends[::2], ends[1::2], strict=True)])


def intersection(regions: Sequence[Region]) -> Region:
    return complement(union([complement(region) for region in regions]))
