"""Solutions with a period: the numbers a + n p for all integers n, and unions of these.

π/4 + kπ and 5π/4 + kπ are the same numbers, and so are π/2 + kπ and ±π/2 + 2kπ.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from typing import NamedTuple

from alignment.rewards.grading.answers import (
    Answer,
    Listing,
    Quantity,
    is_class,
    modulus,
    unlabelled,
)
from alignment.rewards.grading.expressions import Node, Refused, variables
from alignment.rewards.grading.values import equal_values, real_value, substitute

MAX_OFFSETS = 24  # of a union in its common period
_DEGREE: Node = ("/", r"\pi", Fraction(180))
_MAX_RATIO = 1000  # of two periods, and of its denominator


class Progression(NamedTuple):
    """The numbers offset + n period, for all integers n. Both are constants."""

    offset: Node
    period: Node


def progressions(answer: Answer, parameter: str) -> tuple[Progression, ...]:
    """The progressions of an answer whose parts are all linear in the parameter; () for another."""
    answer = unlabelled(answer)
    parts: Sequence[Answer] = (answer,)
    if isinstance(answer, Listing):
        if answer.kind not in ("", "or", "{}"):
            return ()
        parts = answer.parts
    result = []
    for part in map(unlabelled, parts):
        progression = None
        if isinstance(part, Quantity):
            progression = _progression(part, parameter)
        if progression is None:
            return ()
        result.append(progression)
    return tuple(result)


def _progression(part: Quantity, parameter: str) -> Progression | None:
    """The progression of a quantity, which is linear in the parameter or a class of numbers; None
    for another."""
    if is_class(part):
        return Progression(part.value, Fraction(modulus(part)))
    if part.unit not in ("", "degree") or variables(part.value) != {parameter}:
        return None
    value = part.value
    if part.unit == "degree":
        value = ("*", value, _DEGREE)
    offset = substitute(value, {parameter: Fraction(0)})
    period = ("-", substitute(value, {parameter: Fraction(1)}), offset)
    line = ("+", offset, ("*", parameter, period))
    if not equal_values(value, line) or equal_values(period, Fraction(0)) is not False:
        return None
    return Progression(offset, period)


def same_progressions(a: Sequence[Progression], b: Sequence[Progression]) -> bool | None:
    """Whether two unions hold the same numbers. None where the periods have no common multiple that
    is small."""
    try:
        base = a[0].period
        ratios = [_ratio(progression.period, base) for progression in (*a, *b)]
    except Refused:
        return None
    # The least common multiple of fractions: that of the numerators, over a divisor of the
    # denominators.
    common = Fraction(
        math.lcm(*(ratio.numerator for ratio in ratios)),
        math.gcd(*(ratio.denominator for ratio in ratios)),
    )
    period = ("*", base, common)
    offsets_a = _offsets(a, ratios[: len(a)], common)
    offsets_b = _offsets(b, ratios[len(a) :], common)
    if max(len(offsets_a), len(offsets_b)) > MAX_OFFSETS:
        return None
    return _covers(offsets_a, offsets_b, period) and _covers(offsets_b, offsets_a, period)


def _ratio(period: Node, base: Node) -> Fraction:
    """The size of a period in units of another. Raises `Refused` where it is no small fraction."""
    quotient = ("abs", ("/", period, base))
    ball = real_value(quotient)
    if not ball < _MAX_RATIO:
        raise Refused("too large a ratio")
    ratio = Fraction(float(ball.mid())).limit_denominator(_MAX_RATIO)
    if not ratio or not equal_values(quotient, ratio):
        raise Refused("no ratio of small numbers")
    return ratio


def _offsets(
    union: Sequence[Progression], ratios: Sequence[Fraction], common: Fraction
) -> list[Node]:
    """The offsets of a union in the common period; no more than one beyond `MAX_OFFSETS`."""
    offsets: list[Node] = []
    for progression, ratio in zip(union, ratios, strict=True):
        for k in range(int(common / ratio)):
            offsets.append(("+", progression.offset, ("*", Fraction(k), progression.period)))
            if len(offsets) > MAX_OFFSETS:
                return offsets
    return offsets


def _covers(offsets: Sequence[Node], others: Sequence[Node], period: Node) -> bool:
    """Whether each of the other offsets is one of `offsets`, up to whole periods."""
    for other in others:
        if not any(_differ_by_periods(offset, other, period) for offset in offsets):
            return False
    return True


def _differ_by_periods(a: Node, b: Node, period: Node) -> bool:
    quotient = ("/", ("-", a, b), period)
    with suppress(Refused, ValueError, OverflowError):
        nearest = Fraction(round(float(real_value(quotient).mid())))
        return equal_values(quotient, nearest) is True
    return False
