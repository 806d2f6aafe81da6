"""Values in sentences of several clauses: `12 apples were sold`, `12, since 5 + 7 = 12`,
`m + n = 113, so the answer is 113`.

A clause of plain words after a number changes nothing of it. Every clause with a number states it
too, so `12 or 13` and `12, so 13` state two values. A clause that denies, hedges, compares or
computes makes the whole text unread.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from alignment.rewards.grading import patterns
from alignment.rewards.grading.answers import Labelled, Quantity, Relation, Words, unlabelled
from alignment.rewards.grading.expressions import NAMES, Node, Refused, variables
from alignment.rewards.grading.measures import conversion
from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.quantities import (
    answer_in_sentence,
    hedged,
    is_number_word,
    small_letters,
)
from alignment.rewards.grading.reading import read
from alignment.rewards.grading.text import split
from alignment.rewards.grading.values import equal_values, substitute

MAX_CLAUSES = 6
MAX_UNIT_WORDS = 4  # of a quantity with a unit: 12 large red balls


class StatedValue(NamedTuple):
    """The text of a value.

    `has_noun`: an unread noun follows it, as in `12 sheep were sold`. `is_rounded`: it says about
    how large the value before it is, as in `25\\pi, or about 78.5`.
    """

    text: str
    has_noun: bool = False
    is_rounded: bool = False


_CONNECTIVES = (
    r"(?:and|so|since|because|as|hence|thus|therefore|then|i\.e\.|that is|namely|meaning)"
)
# Where a clause ends: at a sign with a space, before a conjunction, and before a bracket.
_END_OF_CLAUSE = re.compile(
    rf"""
    (?<!i\.e)(?<!e\.g)[,;.:][ ](?=\S) | [ ]-[ ](?=[a-z]) | [ ](?=\([a-z])
    | [ ](?=or[ ](?:about|approximately|roughly)[ ])
    | [ ](?=(?!and\b|as[ ](?:many|much)\b){_CONNECTIVES.replace(" ", "[ ]")}[ ])
    | [ ](?=which[ ](?:is|are)[ ])
    """,
    re.VERBOSE,
)
# What leads to the value of a clause: "so", "since we have", "which is".
_LEAD = re.compile(
    rf"(?i:(?:{_CONNECTIVES},? )*(?:(?:which|this|that|it) (?:is|was|equals|gives|makes|means) )?"
    r"(?:we (?:get|have|find|obtain|know|see|conclude)(?: that)? |it follows that )?)"
)
_CONCLUSION = re.compile(
    rf"(?i:(?:{_CONNECTIVES},? )*(?:the|our|my) (?:(?:final|correct|exact) )?answer (?:is|=|:) ?)"
    "(.+)"
)
_ROUNDED_AGAIN = re.compile(
    "(?i:(?:or|which is|that is|i\\.e\\.),? )?(?:(?:about|approximately|roughly) |≈ ?)(.*[0-9].*)"
)
# The place of an extreme value: "attained at x = 2".
_PLACE = re.compile(
    "(?:which (?:is|are) )?(?:attained|achieved|reached|obtained|occurring)"
    " (?:only )?(?:at|for|when|where|if) [a-zA-Z(][^=<>≤≥]{0,12} ?= ?[^=<>≤≥]{1,30}"
)
# Groups: a quantity, another one that says for what, in what or after what the first is.
_CIRCUMSTANCE = re.compile("(.+?) (?:for|in|after|within) ([0-9].*)")
# A number or formula, and words after it.
_WITH_WORDS = re.compile(r"(.*(?:[0-9)}\]%]|\\pi|\\degree))((?: [A-Za-z][A-Za-z'-]*)+)[.]?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[.!]?")
# A clause with one of these nouns says something of the answer, and is read only in this form.
_ABOUT_ANSWER = re.compile("(?i)answers?|results?|solutions?|guess(?:es)?|options?|choices?")
_IS_THE_ANSWER = re.compile(
    r"(?i)(?:(?:so|and) )?(?:(?:this|that|it|which) )?(?:(?:is|was|are) )?(?:the|our|my) "
    r"(?:(?:final|correct|exact|right|required|desired|only) )?(?:answer|result|solution)"
    r"(?: (?:to|of|for) (?:the|this) (?:question|problem|equation|task))?[.]?"
)

# "12 students did not pass" denies nothing of the number, "12 does not work" does.
_NEGATED_VERB = re.compile(
    "^(?:did|do|have|had|could|can) not "
    r"(?!(?:work|count|fit|hold|apply|equal|satisfy|match)\b)[a-z]{3,}"
)

_DENYING = frozenset(TABLES["denying_words"].split()) | (
    frozenset(TABLES["qualifying_words"].split()) - {"from", "before", "over"}
)
# Words that may follow a number without changing it, though they are no units.
_FUNCTION_WORDS = frozenset(TABLES["function_words"].split())
_CHANGING = frozenset(TABLES["no_units"].split()) - _FUNCTION_WORDS


def values_in_clauses(text: str) -> Sequence[StatedValue]:
    """The values that the clauses of a normalised text state; () where a clause denies or hedges,
    or cannot be read.

    A last clause `so the answer is 13` replaces equations before it: `m = 5, n = 8, so the answer
    is 13`; so does one that they make true: `m = 5, n = 8, m + n = 13`.
    """
    clauses = [] if hedged(text.lower()) else _clauses(text)
    if not 1 <= len(clauses) <= MAX_CLAUSES:
        return ()
    conclusion = _CONCLUSION.fullmatch(clauses[-1])
    values = []
    for clause in clauses:
        if _is_neutral(clause) or (values and _PLACE.fullmatch(clause)):
            continue
        rounded = _ROUNDED_AGAIN.fullmatch(clause)
        if values and rounded:
            values.append(StatedValue(f"≈{rounded[1]}", is_rounded=True))
            continue
        value = _value_of_clause(clause)
        if value is None:
            return ()
        values.append(value)
    if conclusion and values and all(_is_equation(value.text) for value in values[:-1]):
        return values[-1:]
    return values[-1:] if _concludes(values) else values


def _clauses(text: str) -> list[str]:
    """The clauses of a text. A sign inside brackets ends none."""
    pieces = []
    start = 0
    for match in _END_OF_CLAUSE.finditer(text):
        if split(text[start : match.start()]):
            pieces.append(text[start : match.start()])
            start = match.end()
        if len(pieces) > MAX_CLAUSES:
            return []
    pieces.append(text[start:])
    clauses = [_without_brackets(piece.strip(" ,;:")) for piece in pieces]
    return [clause for clause in clauses if clause]


def _without_brackets(clause: str) -> str:
    """`(since 3*4 = 12)` as `since 3*4 = 12`; a text in other brackets as it is."""
    inner = clause[1:-1].strip()
    has_words = re.match("[a-z]{2}", inner) is not None
    is_bracketed = clause[:1] == "(" and clause[-1:] == ")" and bool(split(inner))
    return inner if has_words and is_bracketed else clause


def _is_neutral(clause: str) -> bool:
    """Whether a clause is plain words, which state, deny and compare nothing."""
    if _IS_THE_ANSWER.fullmatch(clause):
        return True
    if len(clause) < 2 or not _WORDS.fullmatch(clause) or _ABOUT_ANSWER.search(clause):
        return False
    lowered = _NEGATED_VERB.sub(" ", small_letters(clause))
    words = re.findall("[a-z']+", lowered)
    return not hedged(lowered) and not any(map(_is_telling, words))


def _is_telling(word: str) -> bool:
    """Whether a word denies, hedges or computes, is a number, or names a variable or a function."""
    if word in _DENYING or word in NAMES or word.endswith("n't"):
        return True
    return (len(word) < 2 and word not in ("a", "i")) or is_number_word(word)


def _value_of_clause(clause: str) -> StatedValue | None:
    """The value that a clause states, beside its words; None where that cannot be told."""
    if conclusion := _CONCLUSION.fullmatch(clause):
        clause = conclusion[1]
    lead = _LEAD.match(clause)
    text = clause[lead.end() :] if lead else clause
    if _is_value(text):
        return StatedValue(text)
    text = answer_in_sentence(text) or text
    if _is_value(text):
        return StatedValue(text)
    circumstance = _CIRCUMSTANCE.fullmatch(text)
    if circumstance and _differ_in_dimension(circumstance[1], circumstance[2]):
        return StatedValue(circumstance[1])
    with_words = _WITH_WORDS.fullmatch(text)
    if with_words is None:
        return None
    return _value_before_words(with_words[1], with_words[2].split())


def _value_before_words(number: str, words: Sequence[str]) -> StatedValue | None:
    """The quantity at the beginning of `12 red apples were sold`, with as many words as belong to
    its unit; None where the words may change it."""
    for length in range(min(MAX_UNIT_WORDS, len(words)), -1, -1):
        text = " ".join([number, *words[:length]])
        rest = words[length:]
        if not _is_value(text) or (rest and not _may_follow(rest)):
            continue
        if length:
            if _has_unit(text):
                return StatedValue(text)
            continue
        first = rest[0].lower()
        if first in _CHANGING or patterns.NUMBER_NOUN.fullmatch(first):
            return None
        return StatedValue(text, first not in _FUNCTION_WORDS)
    return None


def _may_follow(words: Sequence[str]) -> bool:
    """Whether words after a quantity change nothing of it: `were sold`, `is the answer`."""
    text = " ".join(words)
    if _ABOUT_ANSWER.search(text) and words[0] not in ("is", "was", "are"):
        return False
    return _is_neutral(text)


def _is_value(text: str) -> bool:
    with suppress(Refused):
        return not isinstance(read(text), Words)
    return False


def _differ_in_dimension(text: str, other: str) -> bool:
    """Whether two texts are quantities with units of two dimensions: `$12` and `3 apples`."""
    with suppress(Refused):
        quantity = unlabelled(read(text))
        circumstance = read(other)
        if isinstance(quantity, Quantity) and isinstance(circumstance, Quantity):
            have_units = bool(quantity.unit and circumstance.unit)
            return have_units and conversion(quantity.unit, circumstance.unit) is None
    return False


def _has_unit(text: str) -> bool:
    """Whether words after a number are its unit, and not a product of letters, as in `12 of`."""
    with suppress(Refused):
        answer = unlabelled(read(text))
        return isinstance(answer, Quantity) and bool(answer.unit)
    return False


def _concludes(values: Sequence[StatedValue]) -> bool:
    """Whether the last of several equations follows: `m = 5, n = 8, m + n = 13`, `2x = 10, x = 5`.

    All that give no value to a name must be true of the values that the others give.
    """
    try:
        equations = [read(value.text) for value in values]
    except Refused:
        return False
    given: dict[str, Node] = {}
    relations = []
    for equation in equations:
        if isinstance(equation, Relation):
            relations.append(equation)
        elif isinstance(equation, Labelled) and isinstance(equation.answer, Quantity):
            given[equation.label] = equation.answer.value
    if not relations or len(given) + len(relations) != len(equations):
        return False
    if not isinstance(equations[-1], Relation) and len(given) > 1:
        return False
    return all(_is_true(relation, given) for relation in relations)


def _is_true(relation: Relation, given: dict[str, Node]) -> bool:
    """Whether an equation holds with the values that are given for all of its names."""
    names = variables(relation.left) | variables(relation.right)
    if relation.sign != "=" or not names <= given.keys():
        return False
    sides = [substitute(side, given) for side in (relation.left, relation.right)]
    return equal_values(*sides) is True


def _is_equation(text: str) -> bool:
    with suppress(Refused):
        return isinstance(read(text), Labelled | Relation)
    return False
