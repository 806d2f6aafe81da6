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
from alignment.rewards.grading.expressions import Node, Refused, subtrees, variables
from alignment.rewards.grading.values import equal_values, real_value, substitute, whole_number

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
        found: Sequence[Progression] = ()
        if isinstance(part, Quantity):
            progression = _progression(part, parameter)
            found = (progression,) if progression else _by_parity(part, parameter)
        if not found:
            return ()
        result += found
    return tuple(result)


def _by_parity(part: Quantity, parameter: str) -> Sequence[Progression]:
    """The two progressions of (-1)^k a + b k, of even and of odd k; () for a quantity without a
    power of -1."""
    result = []
    for parity in (0, 1):
        with suppress(Refused):
            value = _without_signs(part.value, parameter, parity)
            half = ("+", ("*", Fraction(2), parameter), Fraction(parity))
            value = substitute(value, {parameter: half})
            progression = _progression(part._replace(value=value), parameter)
            if progression:
                result.append(progression)
    return result if len(result) == 2 and _has_sign(part.value) else ()


_NEGATIVE_ONE = (Fraction(-1), ("-", Fraction(0), Fraction(1)))


def _has_sign(value: Node) -> bool:
    """Whether a tree has a power of -1."""
    trees = [tree for tree in subtrees(value) if isinstance(tree, tuple)]
    return any(tree[0] == "^" and tree[1] in _NEGATIVE_ONE for tree in trees)


def _without_signs(value: Node, parameter: str, parity: int) -> Node:
    """The tree with 1 or -1 for each power of -1, where the parameter is even or odd. Raises
    `Refused` where its exponent is not linear with whole coefficients."""
    if not isinstance(value, tuple):
        return value
    operation, *operands = value
    if operation == "^" and operands[0] in _NEGATIVE_ONE and parameter in subtrees(operands[1]):
        exponent = operands[1]
        at_0 = substitute(exponent, {parameter: Fraction(0)})
        slope = ("-", substitute(exponent, {parameter: Fraction(1)}), at_0)
        if not equal_values(exponent, ("+", at_0, ("*", slope, parameter))):
            raise Refused("an exponent that is not linear")
        power = whole_number(at_0) + parity * whole_number(slope)
        return Fraction(-1 if power % 2 else 1)
    return (operation, *(_without_signs(part, parameter, parity) for part in operands))


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
