"""Units of one dimension: what a unit is of another one, and sums of quantities such as 5 feet 6
inches. Factors are exact, by the table `measures` of `notation.toml`."""

import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from alignment.rewards.grading.answers import Listing, Quantity, are_quantities
from alignment.rewards.grading.expressions import Node
from alignment.rewards.grading.notation import TABLES

_FACTOR = re.compile(r"([^*/^]+)(?:\^(-?[0-9]+))?")


class _Measure(NamedTuple):
    """A unit as a factor of a product of basic units' powers."""

    factor: Fraction
    dimension: tuple[tuple[str, int], ...]


def conversion(unit: str, other: str) -> Fraction | None:
    """How many of `other` one `unit` is: 1000 for km and m. None for units of two dimensions, and
    for nouns that are no units of measure."""
    measure = _measure(unit)
    other_measure = _measure(other)
    if measure.dimension != other_measure.dimension:
        return None
    return measure.factor / other_measure.factor


def total(listing: Listing) -> Quantity | None:
    """The sum of quantities of one dimension, in the first one's unit: 5.5 feet of 5 feet 6 inches.
    None for other listings."""
    if listing.kind != "+" or not are_quantities(listing.parts):
        return None
    first, *others = listing.parts
    value: Node = first.value
    for part in others:
        factor = conversion(part.unit, first.unit)
        if factor is None:
            return None
        value = ("+", value, ("*", part.value, factor))
    return Quantity(value, first.unit)


def _measure(unit: str) -> _Measure:
    """The measure of a canonical unit, such as "km/h" or "cm^2". A unit without a factor is basic.

    Units have one slash at most; all after it stands below.
    """
    factor = Fraction(1)
    powers: Counter[str] = Counter()
    top, _, bottom = unit.partition("/")
    for side, sign in ((top, 1), (bottom, -1)):
        for match in _FACTOR.finditer(side):
            power = sign * int(match[2] or 1)
            part = _MEASURES.get(match[1], _Measure(Fraction(1), ((match[1], 1),)))
            factor *= part.factor**power
            for name, exponent in part.dimension:
                powers[name] += exponent * power
    dimension = sorted((name, power) for name, power in powers.items() if power)
    return _Measure(factor, tuple(dimension))


def _read_measures() -> dict[str, _Measure]:
    """The table `measures`: "1/1000 m^3" is a factor and a basic unit with its power."""
    measures = {}
    for unit, text in TABLES["measures"].items():
        factor, basic = text.split(" ")
        name, _, power = basic.partition("^")
        measures[unit] = _Measure(Fraction(factor), ((name, int(power or 1)),))
    return measures


_MEASURES = _read_measures()
