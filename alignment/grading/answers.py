"""Normalised text to an answer: a quantity with its unit, words, a listing, a matrix, a region of the real line, ..."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from flint import arb

from alignment.grading.expressions import (
    GREEK,
    NAMES,
    NUMBER,
    TRIGONOMETRIC,
    NoAnswer,
    Node,
    Refused,
    fraction,
    parse_expression,
    variables,
)
from alignment.grading.text import RELATIONS, split, squeeze
from alignment.grading.units import SCALES, SYMBOLS, TAIL, number_in_words, read_unit
from alignment.grading.values import equal_values, real_value, substitute

MAX_PARTS = 20  # of a listing
MAX_CELLS = 64  # of a matrix
MAX_LEVELS = 5  # of structure inside structure


@dataclass(frozen=True)
class Words:
    """An answer in words, or a sign that is no number: ∅, ∞."""

    text: str


@dataclass(frozen=True)
class Quantity:
    """A value with its unit, "" where none was given.

    `decimals` and `digits` (significant ones) say how a decimal number was written; both are 0 for anything else.
    """

    value: Node
    unit: str = ""
    decimals: int = 0
    digits: int = 0


@dataclass(frozen=True)
class About:
    """An answer that says of itself that it is an approximation: ≈ 3.14, about 5."""

    answer: Answer


@dataclass(frozen=True)
class Labelled:
    """`label = answer`."""

    label: str
    answer: Answer


@dataclass(frozen=True)
class Listing:
    """Several answers. `kind` is the pair of brackets; "" for a bare list, "or" for alternatives in any order, "=" for
    values of several labels, ":" for a ratio, "+" for a measure in two units."""

    kind: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of cells."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Interval:
    """A piece of the real line; infinite ends are open."""

    low: arb
    low_closed: bool
    high: arb
    high_closed: bool


@dataclass(frozen=True)
class Region:
    """A union of intervals, in order and apart from each other."""

    pieces: tuple[Interval, ...]


@dataclass(frozen=True)
class Relation:
    """`left sign right` with sign one of = < ≤ ≠, where it is not a label or a region."""

    sign: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Clock:
    """A time of day: seconds since midnight; `half` is "am", "pm", "24" for an hour past twelve or below one, else ""."""

    seconds: int
    half: str


Answer = Words | Quantity | About | Labelled | Listing | Matrix | Region | Relation | Clock


# --- reading ------------------------------------------------------------------------------------------


def read(text: str, levels: int = MAX_LEVELS) -> Answer:
    """The answer that a normalised text states. Raises `Refused` where it is beyond what is read here."""
    text = _strip_clause(text.strip())
    if levels == 0 or not text:
        raise Refused("too deep, or empty")
    for reader in (
        _clock,
        _phrase,
        _in_words,
        _two_units,
        _alternatives,
        _plus_minus_pair,
        _comma_list,
        _plus_minus,
        _relation,
    ):
        answer = reader(text, levels)
        if answer is not None:
            return answer
    for reader in (_matrix, _set_operation, _bracketed, _ratio, _approximation):
        answer = reader(text, levels)
        if answer is not None:
            return answer
    return _quantity(text)


_PHRASES = {
    "∅": "no solution|no solutions|no real solution|no real solutions|there is no solution|there are no solutions|"
    "no solutions exist|no solution exists|empty set|the empty set|null set|∅|none|{}|{ }|( )",
    "dne": "dne|does not exist|doesn't exist|d.n.e",
    "infinitely many": "infinitely many|infinitely many solutions|infinite solutions|an infinite number of solutions|"
    "infinite number of solutions|infinite",
    "∞": "∞|+∞|infinity|positive infinity|+infinity",
    "-∞": "-∞|negative infinity|minus infinity|- ∞|-infinity",
}
_PHRASE = {phrase: name for name, phrases in _PHRASES.items() for phrase in phrases.split("|")}
_SENTENCE_OF_PHRASE = re.compile(
    r"(?:the|this|it|there)(?: (?!not|n't)[a-z]+){0,3}? ("
    + "|".join(p for p in _PHRASE if re.fullmatch("[a-z' ]{9,}", p))
    + ")"
)
_EVERYTHING = {
    "ℝ",
    "all real numbers",
    "all reals",
    "real numbers",
    "the real numbers",
    "all real x",
    "the set of real numbers",
}


def _phrase(text: str, levels: int) -> Answer | None:
    low = text.casefold()
    if low in _PHRASE:
        return Words(_PHRASE[low])
    if lead := _SENTENCE_OF_PHRASE.fullmatch(low):
        return Words(_PHRASE[lead[1]])
    if low in _EVERYTHING:
        return _EVERYWHERE
    return Words(words) if (words := plain_words(text)) else None


_ARTICLES = re.compile(r"\b(?:the|an?) (?=\w)")
_LETTERS = re.compile(r"[^\W\d_](?:[^\W\d_]|[' -])*")
_NO_WORD = re.compile(r"[b-df-hj-np-tv-z]{2,3}|a?b?c?d?|x?y?z?")  # ab, xy, pqr: products


def plain_words(text: str) -> str:
    """Text that is nothing but words, in one spelling; "" where it is anything else."""
    if not _LETTERS.fullmatch(text) or len(text) < 2 or not NAMES.isdisjoint(re.findall("[A-Za-z]+", text)):
        return ""
    if _NO_WORD.fullmatch(text) or not re.search(r"[^\W\d_]{2}", text) or number_in_words(text) is not None:
        return ""
    return " ".join(_ARTICLES.sub("", text.casefold().replace("-", " ").replace("'", "")).split())


_OPTION = re.compile(r"(?:(?i:option|choice|answer) )?\(?([A-Za-z])\)?[.):]?")
_OPTION_TEXT = re.compile(r"(?:(?i:option|choice) )?(?:\(([A-J])\)[:.]?|([A-J])[).:]) ?(?=\S)(.*)")


def option_letter(text: str) -> str:
    """The letter of "(A)", "A." or "option A", in lower case; "" for anything else."""
    match = _OPTION.fullmatch(text)
    return match[1].lower() if match else ""


def option_with_text(text: str) -> str:
    """The letter of one option given with its text, "(B) 12"; "" for anything else, several options among it."""
    match = _OPTION_TEXT.fullmatch(text)
    if match is None or re.search(r"\([A-J]\)|\b[A-J][).:]|\b(?:or|and|not)\b", match[3]):
        return ""
    return (match[1] or match[2]).lower()


_SENTENCE = re.compile(
    r"(?:[A-Za-z']+,? ){0,10}(?:is|are|was|were|equals|equal to|be|has|have|had|costs?|earns?|gets?|makes?|pays?|spends?|needs?|takes?|"
    r"at|there are|there were|total of|left with|saves?|sold|sells?|owes?|contains?|weighs?|measures?|travels?|walks?|runs?|reads?)"
    r"(?: (?:now|still|exactly|only|just|all|a total of|equal to))? (?=[-0-9$£€¥\\(\[{])(.*)"
)
_NO_SENTENCE = re.compile(
    r"\b(?:not|no|never|maybe|perhaps|probably|possibly|might|may|could|would|should|or|either|neither|between|about|approximately|around|"
    r"least|most|less|more|than|over|under|if|unless|wrong|incorrect|guess|think|believe|minus|plus|times|negative|except|instead|but|"
    r"cannot|isn't|aren't|wasn't|doesn't|don't|range|from|hundred|thousand|square root|half|twice|double)\b",
    re.IGNORECASE,
)


def said_in_sentence(text: str) -> str:
    """What a plain sentence says the answer is, "So there are 15 ways"; "" where it denies, hedges or offers a choice."""
    match = _SENTENCE.fullmatch(text)
    if match is None or _NO_SENTENCE.search(text):
        return ""
    return re.sub(r" (?:every|each|at|in|for|on|with|by|after|to) [A-Za-z' ]+$", "", match[1])


_WORDS_IN_SENTENCE = re.compile(r"(?:[a-z]+ ){1,5}(?:is|are|was|were) (.*)")


def words_in_sentence(words: str) -> str:
    """What a plain sentence says that something is, "The function is odd"; "" where it denies or hedges."""
    match = _WORDS_IN_SENTENCE.fullmatch(words)
    return "" if match is None or _NO_SENTENCE.search(words) else match[1]


_SAME_AGAIN = re.compile(r"(.*[^ ]) \((?:or|=|i\.e\.,?|which is|that is,?) ?(.*)\)")


def said_twice(text: str) -> tuple[str, str] | None:
    """The two forms of an answer that is given again in brackets: `1/4 (or 0.25)`."""
    match = _SAME_AGAIN.fullmatch(text)
    return (match[1], match[2]) if match else None


_SET_OF_LETTERS = re.compile(r"\(?[A-J]\)?(?:(?:, ?| ?and |, and | )?\(?[A-J]\)?){1,9}")


def option_letters(text: str) -> frozenset[str]:
    """The letters of several options, `A, C`, `AC` or `A and C`; empty for anything else."""
    letters = re.findall("[A-J]", text)
    return frozenset(letters) if _SET_OF_LETTERS.fullmatch(text) and len(set(letters)) == len(letters) else frozenset()


HATS = (r"\ihat", r"\jhat", r"\khat")


def as_vector(answer: Quantity, size: int) -> Listing:
    """The components of `2i + 3j` in unit vectors."""
    zero = dict.fromkeys(HATS, Fraction(0))
    parts = (("-", substitute(answer.value, zero | {hat: Fraction(1)}), substitute(answer.value, zero)) for hat in HATS[:size])
    return Listing("⟨⟩", tuple(map(Quantity, parts)))


_TIME = re.compile(r"(?i)([0-9]{1,2})(?::([0-9]{2}))?(?::([0-9]{2}))? ?(a\.?m\.?|p\.?m\.?|o'clock|noon|midnight)?(?: (am|pm))?")


def _clock(text: str, levels: int) -> Answer | None:
    if text.casefold() in ("noon", "midnight"):
        return Clock(12 * 3600 if text.casefold() == "noon" else 0, "pm" if text.casefold() == "noon" else "am")
    match = _TIME.fullmatch(text)
    if match is None or not (match[2] or match[4] or match[5]):
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = (match[5] or match[4] or "").lower().replace(".", "").replace("o'clock", "")
    half = {"noon": "pm", "midnight": "am"}.get(half, half)
    if hour > 24 or minute > 59 or second > 59 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + 12 * (half == "pm")
    elif hour > 12 or hour == 0:
        half = "24"
    return Clock((hour * 60 + minute) * 60 + second, half)


def _in_words(text: str, levels: int) -> Answer | None:
    value = number_in_words(text)
    return None if value is None else Quantity(value)


_CLAUSE = re.compile(
    r"(?:,| )? ?(?:(?:where|for|with|and) )?(?:(?:all|any|every|some) )?(?:integers? [a-z]|[a-z](?: is)?(?: ?∈ ?[ℤℕ]| an?(?:y|ll)? integer| integer))"
)


def _strip_clause(text: str) -> str:
    """Without a closing "k ∈ ℤ", which goes without saying beside a free parameter."""
    match = re.search(r"(?:, ?| )(?:where |for |with )", text) or re.search(r", ?(?=[a-z] ?∈)| (?=for integers?\b)", text)
    return text[: match.start()] if match and _CLAUSE.fullmatch(text[match.start() :]) else text


def _alternatives(text: str, levels: int) -> Answer | None:
    """`1 or 2`, `x = 1 and y = 2`, `1, 2, and 3`."""
    pieces = re.split(r",? (or|and) ", re.sub("^(?:either|both) ", "", text))
    if len(pieces) == 1 or not all(split(piece) for piece in pieces[::2]):
        return None
    if len(pieces) > 2 * MAX_PARTS:
        raise NoAnswer("too many alternatives")
    parts = [read(piece, levels - 1) for piece in pieces[::2]]
    inner = [part.answer if isinstance(part, Labelled) else part for part in parts]
    if all(isinstance(part, Region) for part in inner):
        return _union(inner) if pieces[1] == "or" else _intersection(inner)
    if pieces[1] == "or" and all(_is_interval(part) for part in inner) and any(part.kind != "()" for part in inner):
        return _union([as_region(part) for part in inner])
    return _collect("or", parts)


def _is_interval(answer: Answer) -> bool:
    return isinstance(answer, Listing) and answer.kind in ("()", "(]", "[)", "[]") and len(answer.parts) == 2


def _collect(kind: str, parts: Sequence[Answer]) -> Listing:
    """A listing; values of different labels are an assignment, of one label alternatives. Alternatives are spliced in."""
    labels = [part.label for part in parts if isinstance(part, Labelled)]
    if len(labels) == len(parts) > 1 and len(set(labels)) == len(labels):
        return Listing("=", tuple(parts))
    if labels and kind in ("", "or"):
        if len(set(labels)) > 1:
            raise Refused("labels that do not fit together")
        kind, parts = "or", [part.answer if isinstance(part, Labelled) else part for part in parts]
    flat: list[Answer] = []
    for part in parts:
        spliced = isinstance(part, Listing) and (part.kind == "or" or (kind == "or" and part.kind == ""))
        if spliced and kind in ("", "or", "{}"):
            kind = kind or "or"
            flat += part.parts
        else:
            flat.append(part)
    if len(flat) > MAX_PARTS:
        raise NoAnswer("too many parts")
    return Listing(kind, tuple(flat))


def _pieces(inner: str, bare: bool) -> list[str]:
    """The parts of a list. Where it spaces its commas, or has no brackets, 1,234 is one number."""
    if bare or ", " in inner:
        inner = re.sub(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])", lambda m: m[0].replace(",", ""), inner)
    return split(inner.replace(";", ","))


def _comma_list(text: str, levels: int) -> Answer | None:
    parts = _pieces(text, bare=True)
    if len(parts) < 2 or _whole_bracket(text):
        return None
    return _collect("", [read(part, levels - 1) for part in parts[: MAX_PARTS + 1]])


def _plus_minus_pair(text: str, levels: int) -> Answer | None:
    """`(1, ±2)` is two pairs; elsewhere each part of a list has its own signs."""
    return _plus_minus(text, levels) if "±" in text and text[0] == "(" and _whole_bracket(text) else None


def _plus_minus(text: str, levels: int) -> Answer | None:
    text = text if "±" in text else text.replace("∓", "±")
    count = text.count("±")
    if not count or (text[0] == "{" and _whole_bracket(text)):
        return None
    if count > 3:
        raise Refused("too many signs")
    together = "∓" in text
    choices = [("+",) * count, ("-",) * count] if together else list(itertools.product("+-", repeat=count))
    parts = []
    for signs in choices:
        chosen = text.replace("∓", "-" if signs[0] == "+" else "+")
        for sign in signs:
            chosen = chosen.replace("±", sign, 1)
        parts.append(read(chosen, levels - 1))
    return _collect("or", parts)


# --- relations ----------------------------------------------------------------------------------------

_VARIABLE = re.compile(rf"(?:[A-Za-z]|\\(?:{'|'.join(GREEK)}))(?:_\{{?\w{{1,3}}\}}?)?'*")
_LABEL = re.compile(
    rf"{_VARIABLE.pattern}(?:\^ ?(?:\{{ ?-1 ?\}}|-1))?(?: ?\([^()=]{{1,12}}\))?|(?:m ?)?\\(?:angle|overline) ?\{{?[A-Za-z]{{1,3}}\}}?|[A-Z]{{2,3}}|\|?[A-Z]{{2}}\|?|[A-Z](?: ?[∪∩∖] ?[A-Z]){{1,3}}|"
    r"[A-Za-z]{3,}(?: [A-Za-z]+){0,6}|\([a-z](?: ?, ?[a-z]){1,3}\)|[A-Za-z]+-(?:coordinate|intercept)|d[a-z]/d[a-z]|"
    r"\\frac\{d[a-z]\}\{d[a-z]\}"
)
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}


def _relation(text: str, levels: int) -> Answer | None:
    """`x = 5`, `2 + 3 = 5`, `y = 2x`, `1 < x ≤ 2`, `x ∈ [0, 1]`, `x ≈ 3.14`."""
    sides, signs = _sides(text)
    if not signs:
        return None
    if "∈" in signs:
        if len(signs) == 1 and _LABEL.fullmatch(sides[0]):
            return _with_label(sides[0], read(sides[1], levels - 1))
        raise NoAnswer("a membership that is no answer")
    if "≈" in signs:
        return _about(sides, signs, levels)
    if set(signs) == {"="}:
        return _equation(sides, levels)
    return _inequality(sides, signs)


def _sides(text: str) -> tuple[list[str], list[str]]:
    """What stands between the relation signs outside all brackets, and those signs."""
    depth, sides, signs, start = 0, [], [], 0
    for i, c in enumerate(text):
        depth += (c in "([{⟨") - (c in ")]}⟩")
        if depth == 0 and c in RELATIONS:
            sides.append(text[start:i].strip())
            signs.append(c)
            start = i + 1
    return [*sides, text[start:].strip()], signs


def _about(sides: list[str], signs: list[str], levels: int) -> Answer:
    """A sign ≈ after nothing or a label says that what follows is rounded; after a value that the value is exact."""
    if len(sides) == 2 and (not sides[0] or _is_label(sides[0])):
        return About(read(sides[1], levels - 1))
    if len(sides) == 3 and signs == ["=", "≈"] and _is_label(sides[0]):
        return _with_label(sides[0], read(sides[1], levels - 1))
    if len(sides) == 2:
        return read(sides[0], levels - 1)
    raise Refused("too many relations")


def _is_label(text: str) -> bool:
    return bool(_LABEL.fullmatch(text)) and text not in ("e", "i", r"\pi")


def _equation(sides: list[str], levels: int) -> Answer:
    if len(sides) > 6 or not all(sides):
        raise Refused("no chain of equations")
    if _is_label(sides[0]):
        return _with_label(sides[0], _chain(sides[1:], levels))
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[1]) and sides[1] not in ("e", "i"):
        return _with_label(sides[1], read(sides[0], levels - 1))
    return _chain(sides, levels)


def _with_label(label: str, answer: Answer) -> Answer:
    """The labelled answer; `(x, y) = (1, 2)` as the two that it is."""
    names = re.findall("[a-z]", label) if label[0] == "(" else []
    if isinstance(answer, Listing) and answer.kind == "()" and len(answer.parts) == len(names) == len(set(names)) > 1:
        return Listing("=", tuple(map(Labelled, names, answer.parts)))
    return Labelled(_label(label), answer)


def _label(text: str) -> str:
    """A label in one spelling: x_{1} is x_1."""
    return squeeze(re.sub(r"_\{(\w+)\}", r"_\1", text))


def _chain(sides: list[str], levels: int) -> Answer:
    """The last of several equal sides; an equation where two sides are not equal in themselves."""
    answers = [read(side, levels - 1) for side in sides]
    if len(answers) == 1:
        return answers[0]
    if not all(isinstance(answer, Quantity) for answer in answers) or len({a.unit for a in answers} - {"", "%"}) > 1:
        raise Refused("an equation of what are no quantities of one kind")
    values = [("/", answer.value, Fraction(100)) if answer.unit == "%" else answer.value for answer in answers]
    if all(equal_values(values[0], value) for value in values[1:]):
        return answers[-1]
    if len(values) == 2 and (variables(values[0]) or variables(values[1])):
        return Relation("=", values[0], values[1])
    raise NoAnswer("sides that are not equal")


def _inequality(sides: list[str], signs: list[str]) -> Answer:
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[1]) and not _VARIABLE.fullmatch(sides[0]):
        sides, signs = sides[::-1], [_FLIPPED[signs[0]]]
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[0]):
        end = _end(sides[1])
        if end is not None:
            return Labelled(_label(sides[0]), _half_line(signs[0], end))
    if len(sides) == 3 and _VARIABLE.fullmatch(sides[1]) and len(set(signs) & {"<", "≤"}) == len(set(signs)):
        ends = _end(sides[0]), _end(sides[2])
    elif len(sides) == 3 and _VARIABLE.fullmatch(sides[1]) and len(set(signs) & {">", "≥"}) == len(set(signs)):
        ends, signs = (_end(sides[2]), _end(sides[0])), [_FLIPPED[sign] for sign in signs[::-1]]
    else:
        ends = None, None
    if None not in ends:
        return Labelled(_label(sides[1]), _region([Interval(ends[0], signs[0] == "≤", ends[1], signs[1] == "≤")]))
    if len(sides) != 2:
        raise NoAnswer("a chain of inequalities")
    left, right = (parse_expression(side) for side in (sides if signs[0] in "<≤≠" else sides[::-1]))
    if region := _between_bars(signs[0], *(parse_expression(side) for side in sides)):
        return region
    if not variables(left) | variables(right):
        raise NoAnswer("a relation of numbers is true or false, which says nothing of the answer")
    return Relation(signs[0] if signs[0] in "<≤≠" else _FLIPPED[signs[0]], left, right)


def _between_bars(sign: str, left: Node, right: Node) -> Answer | None:
    """The region of |ax + b| < c and the like; None for any other inequality."""
    names = variables(left)
    if not (isinstance(left, tuple) and left[0] == "abs" and len(names) == 1 and isinstance(right, Fraction) and right > 0):
        return None
    at = [real_value(substitute(left[1], {name: Fraction(k) for name in names})) for k in range(3)]
    slope = at[1] - at[0]
    if not (at[2] - at[1] - slope).contains(0) or slope.contains(0):
        return None
    ends = sorted(((arb(c.numerator) / c.denominator - at[0]) / slope for c in (right, -right)), key=float)
    inside = _region([Interval(ends[0], sign in "≤>", ends[1], sign in "≤>")])
    return Labelled(names.pop(), inside if sign in "<≤" else _complement(inside)) if sign != "≠" else None


# --- regions of the real line ---------------------------------------------------------------------------

_INFINITY = arb.pos_inf()
_EVERYWHERE = Region((Interval(-_INFINITY, False, _INFINITY, False),))


def _end(text: str) -> arb | None:
    """A real constant or an infinity; None for anything else."""
    try:
        answer = _phrase(text, 1) or _quantity(text)
        return _edge(answer)
    except Refused:
        return None


def _edge(answer: Answer) -> arb:
    if isinstance(answer, Words) and answer.text in ("∞", "-∞"):
        return _INFINITY if answer.text == "∞" else -_INFINITY
    if isinstance(answer, Quantity) and answer.unit in ("", "degree"):
        return real_value(answer.value)
    raise Refused("no end of an interval")


def _half_line(sign: str, end: arb) -> Region:
    below = Interval(-_INFINITY, False, end, sign in "≤")
    above = Interval(end, sign in "≥", _INFINITY, False)
    return _region([below, above] if sign == "≠" else [below] if sign in "<≤" else [above])


def as_region(answer: Answer) -> Region:
    """The region that an interval or a set of numbers is. Raises `Refused` for anything else."""
    if isinstance(answer, Labelled):
        return as_region(answer.answer)
    if isinstance(answer, Region):
        return answer
    if answer == Words("∅"):
        return Region(())
    if isinstance(answer, Listing) and answer.kind == "{}":
        points = [_edge(part) for part in answer.parts]
        return _region([Interval(point, True, point, True) for point in points])
    if _is_interval(answer):
        low, high = map(_edge, answer.parts)
        return _region([Interval(low, answer.kind[0] == "[", high, answer.kind[1] == "]")])
    raise Refused("no region")


def same_point(a: arb, b: arb) -> bool:
    """Whether two ends of intervals are one."""
    if not (a.is_finite() and b.is_finite()):
        return not a.is_finite() and not b.is_finite() and (a > 0) == (b > 0)
    return (a - b).contains(0)


def _region(intervals: Sequence[Interval]) -> Region:
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


def _union(regions: Sequence[Region]) -> Region:
    return _region([piece for region in regions for piece in region.pieces])


def _complement(region: Region) -> Region:
    ends = [
        (-_INFINITY, False),
        *((e, not c) for p in region.pieces for e, c in ((p.low, p.low_closed), (p.high, p.high_closed))),
    ]
    ends.append((_INFINITY, False))
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return _region([Interval(low, low_closed, high, high_closed) for (low, low_closed), (high, high_closed) in pairs])


def _intersection(regions: Sequence[Region]) -> Region:
    return _complement(_union([_complement(region) for region in regions]))


def _set_operation(text: str, levels: int) -> Answer | None:
    """`(-∞, 1) ∪ (2, ∞)`, `ℝ ∖ {0}`."""
    for sign, operation in (("∪", _union), ("∖", None), ("∩", _intersection)):
        parts = split(text, sign)
        if len(parts) < 2:
            continue
        if len(parts) > MAX_PARTS:
            raise NoAnswer("too many parts")
        regions = [as_region(read(part, levels - 1)) for part in parts]
        return operation(regions) if operation else _intersection([regions[0], *map(_complement, regions[1:])])
    if text.startswith("ℝ-"):
        return _set_operation(text.replace("-", "∖", 1), levels)
    return None


# --- listings -----------------------------------------------------------------------------------------

_BUILDER = re.compile(r"\{ ?([a-z])(?: ?∈ ?ℝ)? ?[|:] ?(.*)\}")


def _whole_bracket(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    return text[0] in "([{⟨" and text[-1] in ")]}⟩" and bool(split(text[1:-1]))


def _bracketed(text: str, levels: int) -> Answer | None:
    if re.match(r"[A-Z]'? ?\(", text) and _whole_bracket(point := text[text.index("(") :]) and len(split(point[1:-1])) > 1:
        return Labelled(text[0], _bracketed(point, levels))  # P(2, 3)
    if not _whole_bracket(text):
        return None
    if builder := _BUILDER.fullmatch(text):
        return read(builder[2], levels - 1)
    kind = text[0] + text[-1]
    parts = _pieces(text[1:-1], bare=False)
    if len(parts) > MAX_PARTS:
        raise NoAnswer("too many parts")
    if kind == "{}" and len(parts) == 1 and re.fullmatch(r"\{[^{},]+\}", parts[0]):
        return read(parts[0], levels - 1)  # braces that only group
    if len(parts) > 1 or kind == "{}":
        return _collect(kind, [read(part, levels - 1) for part in parts])
    return read(text[1:-1], levels - 1) if kind in ("()", "[]") else None


_MATRIX = re.compile(r"\\begin ?\{([pbvBV]?matrix|smallmatrix|array)\}(?: ?\{[lcr| ]+\})?(.*)\\end ?\{\1\}")


def _matrix(text: str, levels: int) -> Answer | None:
    match = _MATRIX.fullmatch(text.strip("()[] ") if "{array}" in text or "{smallmatrix}" in text else text)
    if match is None:
        return None
    lines = [line for line in re.split(r"\\\\(?:\[[^\]]{0,8}\])?", match[2]) if line.strip()]
    rows = tuple(tuple(line.split("&")) for line in lines)
    if not rows or len({len(row) for row in rows}) > 1 or len(rows) * len(rows[0]) > MAX_CELLS:
        raise NoAnswer("no rectangle, or too large a one")
    cells = tuple(tuple(read(cell, levels - 1) for cell in row) for row in rows)
    return Quantity(_determinant(cells)) if match[1] == "vmatrix" else Matrix(cells)


def _determinant(rows: Sequence[Sequence[Answer]]) -> Node:
    """The tree of a determinant, expanded along its first row. Raises `Refused` beyond 4 x 4."""
    if len(rows) != len(rows[0]) or len(rows) > 4 or not all(isinstance(cell, Quantity) for row in rows for cell in row):
        raise Refused("no small square of quantities")
    if len(rows) == 1:
        return rows[0][0].value
    total: Node = Fraction(0)
    for j, cell in enumerate(rows[0]):
        minor = _determinant([[*row[:j], *row[j + 1 :]] for row in rows[1:]])
        total = ("-" if j % 2 else "+", total, ("*", cell.value, minor))
    return total


def _ratio(text: str, levels: int) -> Answer | None:
    parts = split(text, ":")
    if len(parts) == 1:
        parts = re.fullmatch(r"([0-9.]+) to ([0-9.]+)", text)
        parts = list(parts.groups()) if parts else []
    if not 2 <= len(parts) <= 4:
        return None
    return Listing(":", tuple(_quantity(part) for part in parts))


# --- quantities ---------------------------------------------------------------------------------------

_ABOUT = re.compile(
    r"(?i)(?:is )?(?:about|approximately|approx\.?|around|roughly|nearly|almost|≈) (.*)|(.*) \(?(?:approximately|approx\.?)\)?"
)


def _approximation(text: str, levels: int) -> Answer | None:
    match = _ABOUT.fullmatch(text)
    return About(read(match[1] or match[2], levels - 1)) if match else None


def _two_units(text: str, levels: int) -> Answer | None:
    """`5 feet 3 inches`, `2 hours and 30 minutes`, `5 dollars and 30 cents`, `5'3"`."""
    match = re.fullmatch(r"""([0-9.]+) ?([A-Za-z]+),? (?:and )?([0-9.]+) ?([A-Za-z]+)|([0-9]+) ?' ?([0-9.]+) ?(?:"|'')""", text)
    if match is None:
        return None
    first, second = (f"{match[1]} {match[2]}", f"{match[3]} {match[4]}") if match[1] else (f"{match[5]} ft", f"{match[6]} in")
    parts = tuple(map(_quantity, (first, second)))
    return Listing("+", parts) if all(part.unit for part in parts) and parts[0].unit != parts[1].unit else None


_CURRENCY = {"$": "dollar", "£": "£", "€": "euro", "¥": "yen", "₹": "rupee"}
_MONEY = re.compile(r"([-+]?) ?(?:US|USD|CA|AU|C|A)?([$£€¥₹]) ?(?=[-0-9.\\])([^$£€¥₹]*)|([^$£€¥₹]*[0-9]) ?([$£€¥₹])")
_MONEY_CODE = re.compile(r"(USD|EUR|GBP|INR|Rs\.?) ?([0-9].*)")
_PERCENT = re.compile(r"([-+]?[^%+*-]*[0-9)}]) ?(?:%|percent(?:age points?)?|per cent|pct)(?: [a-z ]{1,30})?")
_AMOUNT = re.compile(r"(.*?(?:[0-9)}\]]|\\pi|[0-9 ]pi))( ?)((?:\\degree|\\Omega|\\mu |[A-Za-zµΩ°¢£$Å\u4e00-\u9fff]).*)")
_SCALED = re.compile(rf"(.*(?:{NUMBER})) ?({'|'.join(SCALES)})s?(?: ([A-Za-z].*))?")
_SCALAR = re.compile(rf"([-+]?) ?({NUMBER})(?: ?[eE] ?([-+]?[0-9]{{1,3}})| ?(?:st|nd|rd|th))?")
_ENDLESS = re.compile(r"([-+]?)([0-9]*)\.([0-9]{1,60}) ?\.\.\.")
_BASE = re.compile(
    r"\(? ?([0-9A-Fa-fG-Z][0-9A-Fa-fG-Z ]{0,60}?) ?\)? ?(?:_ ?\{? ?\(?(?:base ?)?([0-9]{1,2}|[a-z]+)\)? ?\}?| \(?base[ -]([0-9]{1,2}|[a-z]+)\)?)"
    r"(?: \(?base (?:\2)\)?)?|0([xXbo])([0-9A-Fa-f]{1,60})"
)
_MINUTES = re.compile(r"""([0-9]+) ?\\degree ?([0-9.]+) ?'(?: ?([0-9.]+) ?(?:"|''))?""")
_MODULO = re.compile(r"(.*[0-9]) ?\\?\(?(?:\\pmod|\\bmod|\\mod|mod) ?\{? ?([0-9]+) ?\}?\)?")


def _quantity(text: str) -> Answer:
    """Take currency, percent sign and unit off, and read the rest as a number or an expression."""
    text, unit = TAIL.sub("", text), ""
    if match := _BASE.fullmatch(text):
        return Quantity(
            _in_base(match[1], match[2] or match[3]) if match[1] else _in_base(match[5], _PREFIXES[match[4].lower()])
        )
    if match := _MINUTES.fullmatch(text):
        degrees, minutes, seconds = (fraction("", part or "0") for part in match.groups())
        return Quantity(degrees + minutes / 60 + seconds / 3600, "degree")
    if match := _ENDLESS.fullmatch(text):
        return _endless(match[1], match[2], match[3])
    if match := _MODULO.fullmatch(text):
        return Quantity(parse_expression(match[1]), f"mod {int(match[2])}")
    if match := _MONEY_CODE.fullmatch(text):
        text = f"{match[2]} {match[1].rstrip('.')}"
    if match := _MONEY.fullmatch(text):  # $18 per day is 18 dollars per day
        sign, text, currency = match[1] or "", match[3] or match[4], match[2] or match[5]
        amount, rest = re.fullmatch(
            r"([-+]? ?[0-9.,]*(?: ?(?:hundred|thousand|million|billion|trillion)\b)?)(.*)", text
        ).groups()
        unit, (text, per) = (
            _CURRENCY[currency],
            (sign + amount, rest) if not re.match(r"[\\^*(+-]|/ ?[^a-z]", rest.strip()) else (sign + text, ""),
        )
        if per.strip():
            per_unit = read_unit(f"{unit} {per.strip()}") or read_unit(per)
            if not per_unit:
                raise Refused("not an amount of money")
            unit = per_unit if per_unit.startswith(unit) or per_unit != "cent" else ""
    if match := _PERCENT.fullmatch(text):
        return Quantity(_number(match[1]).value, "%")
    if match := _SCALED.fullmatch(text):
        unit = unit or (read_unit(match[3]) if match[3] else "")
        if match[3] and not unit:
            raise Refused("not a unit")
        number = _number(match[1]).value
        if not isinstance(number, Fraction):
            raise Refused("an expression before a word")
        return Quantity(number * SCALES[match[2]], unit)
    if not unit and (match := _AMOUNT.fullmatch(text)) and (found := _unit_after(*match.groups())):
        text, unit = match[1], found
    number = _number(text)
    return Quantity(number.value, unit, number.decimals, number.digits)


def _unit_after(amount: str, gap: str, words: str) -> str:
    """The unit that follows an amount. One letter needs a space before it, as 5m is algebra, and so does a noun; nothing
    is a unit after a variable: 2x + 3 h."""
    if words.startswith("\\degree") and any(f"\\{name}" in amount for name in TRIGONOMETRIC):
        return ""  # the degrees of \sin 30°
    if re.search(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]*\{)", re.sub(r"\\[A-Za-z]+|\bpi\b|sqrt", "", amount)) or (
        not gap and words in SYMBOLS and words.isascii()
    ):
        return ""
    unit = read_unit(words)
    glued = not gap and words[0].isascii() and not words.startswith("\\")
    return "" if glued and (" " in unit or len(words) == 1 or re.fullmatch("[a-z]{3,}s", unit)) else unit


def _number(text: str) -> Quantity:
    scalar = _SCALAR.fullmatch(text)
    if scalar is None:
        return Quantity(parse_expression(text))
    sign, number, exponent = scalar.groups("")
    decimals = 0 if exponent else len(number.partition(".")[2])
    digits = len(number.replace(",", "").replace(".", "").lstrip("0"))
    return Quantity(fraction(sign, number, exponent), "", decimals, digits if decimals else 0)


def _endless(sign: str, whole: str, digits: str) -> Answer:
    """`0.1666...`: three like digits or two like blocks at the end repeat for ever; else the digits are cut off."""
    for period in range(1, len(digits) // 2 + 1):
        block = digits[-period:]
        if digits.endswith(block * (3 if period == 1 else 2)):
            kept = digits[:-period]
            tail = Fraction(int(block), (10**period - 1) * 10 ** len(kept))
            value = Fraction(f"{whole or '0'}.{kept or '0'}") + tail
            return Quantity(-value if sign == "-" else value)
    return About(_number(f"{sign}{whole}.{digits}"))


_BASE_WORDS = dict(
    zip("two three four five six seven eight nine ten twelve sixteen".split(), (*range(2, 11), 12, 16), strict=True)
)


_PREFIXES = {"x": "16", "b": "2", "o": "8"}


def _in_base(digits: str, base: str) -> Node:
    digits = digits.replace(" ", "")
    radix = int(base) if base.isdigit() else _BASE_WORDS.get(base, 0)
    variable = (digits.isalpha() and (len(digits) == 1 or radix < 11)) or (digits != digits.upper() and radix != 16)
    if not 2 <= radix <= 36 or variable:
        return parse_expression(f"{digits}_{{{base}}}")
    try:
        return Fraction(int(digits, radix))
    except ValueError:
        raise Refused(f"{digits} has a digit that base {radix} has not") from None
