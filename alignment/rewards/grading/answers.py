"""The kinds of answers: a quantity with its unit, words, a listing, a matrix, a region of the real line, ..."""

from dataclasses import dataclass

from flint import arb

from alignment.rewards.grading.expressions import Node


@dataclass(frozen=True)
class Words:
    """An answer in words, or a sign that is no number: ∅, ∞."""

    text: str


@dataclass(frozen=True)
class Quantity:
    """A value with its unit, "" where none was given. `decimals` and `digits` (significant ones) say how a decimal number was
    written; both are 0 for anything else."""

    value: Node
    unit: str = ""
    decimals: int = 0
    digits: int = 0


@dataclass(frozen=True)
class About:
    """An answer marked as an approximation: ≈ 3.14, about 5."""

    answer: "Answer"


@dataclass(frozen=True)
class Labelled:
    """`label = answer`."""

    label: str
    answer: "Answer"


@dataclass(frozen=True)
class Listing:
    """Several answers. `kind` is the pair of brackets; "" for a bare list, "or" for alternatives in any order, "=" for
    values of several labels, ":" for a ratio, "+" for a measure in two units."""

    kind: str
    parts: tuple["Answer", ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of cells."""

    rows: tuple[tuple["Answer", ...], ...]


Cut = tuple[arb, bool]
"""A place between the real numbers: before the point, or with True after it."""


@dataclass(frozen=True)
class Region:
    """A union of intervals. Its cuts are in order; it begins at the first, ends at the second, begins at the third, ..."""

    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Relation:
    """`left sign right`, with sign one of = < ≤ ≠, that is neither labelled nor a region."""

    sign: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Clock:
    """A time of day: seconds since midnight; `half` is "am", "pm", "24" for an hour past twelve or below one, else ""."""

    seconds: int
    half: str


Answer = Words | Quantity | About | Labelled | Listing | Matrix | Region | Relation | Clock


def unlabelled(answer: Answer) -> Answer:
    return answer.answer if isinstance(answer, Labelled) else answer
