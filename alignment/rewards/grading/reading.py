"""The parser of answers: from normalised text to one of the types of `answers.py`.

`read` tries the functions of `_READERS`, at the end of this file, in order. Each is for one kind of
answer, which its docstring shows by examples. It returns None for a text of another kind, and
raises `Refused` for a text of its kind that it cannot read. Readers call `read` for the parts of an
answer, with `levels` one less: so it bounds how deep answers are nested.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

from alignment.rewards.grading import answers, bounds, patterns, quantities
from alignment.rewards.grading.answers import (
    About,
    Answer,
    Family,
    Labelled,
    Listing,
    Matrix,
    Quantity,
    Region,
    Relation,
    Words,
    are_quantities,
)
from alignment.rewards.grading.expressions import (
    FUNCTIONS,
    NoAnswer,
    Node,
    Refused,
    parse_expression,
    variables,
)
from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.quantities import (
    plain_words,
    qualified,
    qualified_in_chinese,
    read_quantity,
    take_clause,
)
from alignment.rewards.grading.text import RELATIONS, split, split_with_signs, squeeze
from alignment.rewards.grading.values import equal_values, rounds_to, substitute, whole_number

MAX_PARTS = 20  # of a listing
MAX_CELLS = 64  # of a matrix
MAX_LEVELS = 5  # of nested answers
MAX_SIDES = 6  # of a chain of equations, a = b = c


def read(text: str, levels: int = MAX_LEVELS) -> Answer:
    """The answer that a normalised text states. Raises `Refused` if it cannot be read."""
    clause = take_clause(text.strip())
    if levels == 0 or not clause.formula:
        raise Refused("too deep, or empty")
    for reader in _READERS:
        answer = reader(clause.formula, levels)
        if answer:
            if clause.parameter:
                return Family(answer, clause.parameter, clause.is_integer)
            return answer
    raise Refused("no kind of answer")


# --- phrases and alternatives ---------------------------------------------------------------------


def _answers_of_phrases() -> dict[str, Answer]:
    """The answers that fixed phrases state, by phrase: one `Words` for all spellings."""
    phrases: dict[str, Answer] = {}
    for name, spellings in TABLES["phrases"].items():
        phrases |= dict.fromkeys(spellings, Words(name))
    return phrases


_PHRASES = _answers_of_phrases()
_LONG_PHRASES = "|".join(phrase for phrase in _PHRASES if re.fullmatch("[a-z' ]{9,}", phrase))
# A sentence that ends in a phrase, such as "the equation has no real solution". Group: the phrase.
_SENTENCE_OF_PHRASE = re.compile(
    rf"(?:the|this|it|there)(?: (?!not|n't)[a-z]+){{0,3}}? ({_LONG_PHRASES})"
)
# Added after: "all real numbers" and the like are no phrases that end such a sentence.
_PHRASES |= dict.fromkeys(TABLES["everything"], answers.EVERYWHERE)


def _phrase(text: str, levels: int) -> Answer | None:
    """`no solution`, `the limit does not exist`, and other answers in words: `blue`."""
    lower_case = text.casefold()
    if lower_case in _PHRASES:
        return _PHRASES[lower_case]
    sentence = _SENTENCE_OF_PHRASE.fullmatch(lower_case)
    if sentence and not qualified(lower_case[: sentence.start(1)]):
        return _PHRASES[sentence[1]]
    words = plain_words(text)
    if not words:
        return None
    return Words(words, text if text.isascii() and text.isalpha() else "")


def _bounds_in_words(text: str, levels: int) -> Answer | None:
    """`between 2 and 5 inclusive`, `x is at least 3`."""
    return bounds.read_bounds(text, _interval_end)


def _solutions(text: str, levels: int) -> Answer | None:
    """`x = 1 and y = 2; x = 3 and y = 4`: pairs of values, with a semicolon between them."""
    pieces = split(text, ";")
    if not 2 <= len(pieces) <= MAX_PARTS or not all(map(patterns.ASSIGNMENTS.match, pieces)):
        return None
    return _collect("or", [read(piece, levels - 1) for piece in pieces])


def _alternatives(text: str, levels: int) -> Answer | None:
    """`1 or 2`, `x = 1 and y = 2`, `1, 2, and 3`."""
    text = re.sub("^(?:either|both) ", "", text)
    # Texts, and between each two the word "or" or "and".
    pieces = re.split(r",? (or|and) ", text)
    texts = pieces[::2]
    # `split` finds nothing in a text whose brackets do not match: then a conjunction stands inside
    # brackets, which another reader takes apart first.
    if len(pieces) == 1 or not all(map(split, texts)):
        return None
    if len(pieces) > 2 * MAX_PARTS:
        raise NoAnswer("too many alternatives")
    parts = [read(piece, levels - 1) for piece in texts]
    is_union = pieces[1] == "or"
    unlabelled_parts = [answers.unlabelled(part) for part in parts]
    regions = [part for part in unlabelled_parts if isinstance(part, Region)]
    if len(regions) == len(parts):
        # `x < 1 or x > 2` is a union, `x > 1 and x < 2` an intersection.
        return answers.combine(any if is_union else all, regions)
    if is_union and _are_intervals(unlabelled_parts):
        return answers.combine(any, map(answers.as_region, unlabelled_parts))
    return _collect("or", parts)


def _are_intervals(parts: Sequence[Answer]) -> bool:
    """Whether all parts may be intervals, and not all are in round brackets, as points are."""
    intervals = [part for part in parts if answers.is_interval(part)]
    return len(intervals) == len(parts) and any(part.kind != "()" for part in intervals)


def _congruence(text: str, levels: int) -> Answer | None:
    """`x ≡ 3 (mod 7)`, `x ≡ 1, 3 (mod 8)`, `10 ≡ 3 (mod 7)`: numbers with the modulus as their
    unit."""
    match = patterns.CONGRUENCE.fullmatch(text)
    if match is None:
        return None
    modulus = int(match[3])
    if not modulus:
        raise NoAnswer("a congruence modulo zero")
    residues = read(match[2], levels - 1)
    if is_label(match[1]):
        return Labelled(_spell_label(match[1]), _with_modulus(residues, f"≡ mod {modulus}"))
    number = parse_expression(match[1])
    if variables(number) or not isinstance(residues, Quantity):
        raise Refused("a congruence that is not solved")
    if whole_number(("-", number, residues.value)) % modulus:
        raise NoAnswer("numbers that are not congruent")
    return _with_modulus(residues, f"mod {modulus}")


def _with_modulus(answer: Answer, unit: str) -> Answer:
    if isinstance(answer, Quantity) and not answer.unit:
        return answer._replace(unit=unit)
    if isinstance(answer, Listing) and answer.kind in ("", "or"):
        parts = tuple(_with_modulus(part, unit) for part in answer.parts)
        return Listing("or", parts)
    raise Refused("residues that are no numbers")


def _colon_labels(text: str, levels: int) -> Answer | None:
    """`cows: 12, pigs: 7`, read as `cows = 12, pigs = 7`."""
    if patterns.COLON_LABELS.fullmatch(text) is None:
        return None
    return read(text.replace(": ", " = "), levels - 1)


# Words that name nothing whose number would follow: "first 3, then 5".
_NO_NAMES = frozenset(
    (TABLES["ordinals"] + TABLES["function_words"] + TABLES["turning_words"] + TABLES["cardinals"])
    .replace("\n", " ")
    .split()
) | {"then", "next", "last", "step", "part", "case", "option", "choice"}


def _named_numbers(text: str, levels: int) -> Answer | None:
    """`cows 12, pigs 7`, `Ann has 5 and Tom has 3`, read as `Ann = 5, Tom = 3`."""
    pieces = re.split(r"[,;] and |[,;] | and ", text)
    matches = list(map(patterns.NAMED_NUMBER.fullmatch, pieces))
    if not 2 <= len(pieces) <= MAX_PARTS or not all(matches):
        return None
    equations = []
    for match in filter(None, matches):
        name = match["name"] or match["chinese"]
        words = name.lower().split()
        if not is_label(name) or not _NO_NAMES.isdisjoint(words) or qualified_in_chinese(name):
            return None
        equations.append(f"{name} = {match['value']}")
    return read(", ".join(equations), levels - 1)


# --- listings -------------------------------------------------------------------------------------


def _collect(kind: str, parts: Sequence[Answer]) -> Answer:
    """A `Listing` of the parts; a family of listings where each part has the same parameter."""
    families = [part for part in parts if isinstance(part, Family)]
    parameters = {(family.parameter, family.is_integer) for family in families}
    if len(families) == len(parts) and len(parameters) == 1:
        listing = _collect_parts(kind, [family.answer for family in families])
        return Family(listing, *parameters.pop())
    return _collect_parts(kind, parts)


def _collect_parts(kind: str, parts: Sequence[Answer]) -> Listing:
    """A `Listing` of the parts, with nested alternatives flattened. `kind` is that of the listing,
    unless the parts have labels.

    Parts that all have labels, each another, are of kind "=": `x = 1, y = 2`. With one label, as in
    `x = 1, x = 2` or `x = 1, 2`, they are alternatives, of kind "or".
    """
    labels = [part.label for part in parts if isinstance(part, Labelled)]
    all_differ = len(set(labels)) == len(labels)
    if len(labels) == len(parts) > 1 and all_differ:
        return Listing("=", tuple(parts))
    if labels and kind in ("", "or"):
        if len(set(labels)) > 1:
            raise Refused("labels that do not fit together")
        kind = "or"
        parts = [answers.unlabelled(part) for part in parts]
    flat: list[Answer] = []
    for part in parts:
        if isinstance(part, Listing) and _is_flattened(part.kind, kind):
            kind = kind or "or"
            flat += part.parts
        else:
            flat.append(part)
    if len(flat) > MAX_PARTS:
        raise NoAnswer("too many parts")
    return Listing(kind, tuple(flat))


def _is_flattened(inner: str, outer: str) -> bool:
    """Whether the parts of a listing of kind `inner` become parts of the listing of kind `outer`
    that contains it."""
    if outer not in ("", "or", "{}"):
        return False
    return inner == "or" or (inner == "" and outer == "or")


# 1,234,567 in a list.
_GROUPED_DIGITS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])")


def _pieces(inner: str, bare: bool) -> list[str]:
    """The texts of the parts of a list, from the text inside its brackets. `bare` means that it has
    none.

    In a bare list, and in one with spaces after its commas, 1,234 is one number. In (1,234) it is
    two.
    """
    if bare or ", " in inner:
        inner = _GROUPED_DIGITS.sub(lambda match: match[0].replace(",", ""), inner)
    return split(inner.replace(";", ","))


def _read_part(text: str, levels: int) -> Answer:
    """The answer that a part of a list states.

    A part that begins with a zero and a digit is kept as words, not read as a number: 3,05 is a
    decimal comma, and not the list 3, 5.
    """
    if re.match("0[0-9]", text):
        return Words(squeeze(text))
    return read(text, levels)


def _comma_list(text: str, levels: int) -> Answer | None:
    """`1, 2, 3`."""
    parts = _pieces(text, bare=True)
    if len(parts) < 2 or _is_bracketed(text):
        return None
    # `1, ±2` is a list in which the sign belongs to one part, so this reader comes before
    # `_plus_minus`; `(1, ±2)` is two pairs. One part too many is enough for `_collect` to refuse.
    return _collect("", [_read_part(part, levels - 1) for part in parts[: MAX_PARTS + 1]])


def _plus_minus(text: str, levels: int) -> Answer | None:
    """`1 ± 2`, which is the alternatives 1 + 2 and 1 - 2.

    Several signs ± are independent, so that all combinations are alternatives. With a sign ∓ there
    are two: all ± are + and all ∓ are -, or the opposite.
    """
    if "±" not in text:
        text = text.replace("∓", "±")
    count = text.count("±")
    if not count or (text[0] == "{" and _is_bracketed(text)):
        return None
    if count > 3:
        raise Refused("too many signs")
    if "∓" in text:
        choices = [("+",) * count, ("-",) * count]
    else:
        choices = list(itertools.product("+-", repeat=count))
    parts = []
    for signs in choices:
        opposite = "-" if signs[0] == "+" else "+"
        chosen, *pieces = text.replace("∓", opposite).split("±")
        for sign, piece in zip(signs, pieces, strict=True):
            chosen += sign + piece
        parts.append(read(chosen, levels - 1))
    return _collect("or", parts)


# --- relations ------------------------------------------------------------------------------------

_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}


def _relation(text: str, levels: int) -> Answer | None:
    """`x = 5`, `2 + 3 = 5`, `y = 2x`, `1 < x ≤ 2`, `x ∈ [0, 1]`, `x ≈ 3.14`."""
    sides, signs = split_with_signs(text, RELATIONS)
    if not signs:
        return None
    if "∉" in signs:
        if len(signs) == 1 and patterns.VARIABLE.fullmatch(sides[0]):
            excluded = answers.as_region(read(sides[1], levels - 1))
            return _with_label(sides[0], answers.complement(excluded))
        raise NoAnswer("a membership that is no answer")
    if "∈" in signs:
        if len(signs) == 1 and patterns.LABEL.fullmatch(sides[0]):
            return _with_label(sides[0], read(sides[1], levels - 1))
        raise NoAnswer("a membership that is no answer")
    if "≡" in signs:
        return None  # `_congruence` read what it could
    if "≈" in signs:
        return _about(sides, signs, levels)
    if set(signs) == {"="}:
        return _equation(sides, levels)
    return _inequality(sides, signs)


def _about(sides: list[str], signs: list[str], levels: int) -> Answer:
    """`≈ 3.14` and `x ≈ 3.14` state a rounded value; `π ≈ 3.14` states the exact value π."""
    if len(sides) == 2 and (not sides[0] or is_label(sides[0])):
        return About(read(sides[1], levels - 1))
    if len(sides) == 3 and signs == ["=", "≈"] and is_label(sides[0]):
        return _with_label(sides[0], _about(sides[1:], ["≈"], levels))
    if len(sides) != 2:
        raise Refused("too many relations")
    exact, rounded = (read(side, levels - 1) for side in sides)
    if not (isinstance(exact, Quantity) and isinstance(rounded, Quantity)):
        raise NoAnswer("an approximation of something that is no quantity")
    if not rounds_to(exact.value, rounded.value, rounded.decimals):
        raise NoAnswer("an approximation that is far off")
    return exact


def is_label(text: str) -> bool:
    """Whether a text can be the left side of `label = answer`: a symbol, f(x), or words without
    the name of a function, such as sin, and without a negation."""
    if not patterns.LABEL.fullmatch(text) or text in ("e", "i", r"\pi"):
        return False
    if re.match(r"[xyz] ?\([0-9]", text):
        return False  # x(2 + 3) is a product
    names = re.findall("[A-Za-z]+", text)
    is_of_angle = r"\angle" in text
    return not qualified(text) and (is_of_angle or set(names).isdisjoint(FUNCTIONS))


def _equation(sides: list[str], levels: int) -> Answer:
    """`x = 5`, `5 = x`, `x = 2 + 3 = 5`, `2 + 3 = 5`, `x + y = 5`, from the texts of the sides."""
    if len(sides) > MAX_SIDES or not all(sides):
        raise Refused("no chain of equations")
    if is_label(sides[0]):
        return _with_label(sides[0], _chain(sides[1:], levels, is_labelled=True))
    if len(sides) == 2 and patterns.VARIABLE.fullmatch(sides[1]) and sides[1] not in ("e", "i"):
        return _with_label(sides[1], read(sides[0], levels - 1))
    return _chain(sides, levels)


def _with_label(label: str, answer: Answer) -> Answer:
    """The answer with its label. `(x, y) = (1, 2)` becomes `x = 1, y = 2`."""
    if label[0] != "(" or "," not in label:
        return Labelled(_spell_label(label), answer)
    names = re.findall("[a-z]", label)
    if (
        isinstance(answer, Listing)
        and answer.kind == "()"
        and len(answer.parts) == len(names) == len(set(names)) > 1
    ):
        return Listing("=", tuple(map(Labelled, names, answer.parts)))
    raise NoAnswer("a pair that is no pair")


def _spell_label(text: str) -> str:
    """A label in one spelling: x_{1} is x_1, Length is length."""
    if re.fullmatch("[A-Z][a-z]{2,}(?: [a-z]+)*", text):
        text = text.lower()
    return squeeze(re.sub(r"_\{(\w+)\}", r"_\1", text))


def _chain(sides: list[str], levels: int, is_labelled: bool = False) -> Answer:
    """What a chain of equations states: its last side, as in 2 + 3 = 5.

    Every number before it must equal the last side. A formula of names, as in A = πr^2 = 25π, is
    not decided. If the first side is one, and no label stands before it, the chain says what that
    is: m + n = 2 + 3 = 5 is m + n = 5. So is a chain of two sides that differ, if either has a
    variable: 6 = 2x + 2y.
    """
    answer = read(sides[-1], levels - 1)
    if len(sides) == 1:
        return answer
    parts = [_read_member(side, levels - 1) for side in sides[:-1]]
    members = [part for part in parts if part is not None]
    if not isinstance(answer, Quantity):
        raise Refused("an equation whose sides are not quantities")
    if len({part.unit for part in (*members, answer)} - {"", "%"}) > 1:
        raise Refused("an equation whose sides are not of one kind")
    last = _value_without_percent(answer)
    values = [_value_without_percent(part) for part in members]
    unequal = [value for value in values if not equal_values(value, last)]
    if not unequal:
        return answer
    if len(sides) == 2 and variables(last):
        if not variables(unequal[0]):
            return Relation("=", last, unequal[0], members[0].unit)  # 15 = a + b
        return Relation("=", unequal[0], last, answer.unit)
    if variables(last) or not all(map(variables, unequal)):
        raise NoAnswer("sides that are not equal")
    if unequal[0] is values[0] and parts[0] is not None and not is_labelled:
        return Relation("=", values[0], last, answer.unit)
    return answer


def _read_member(text: str, levels: int) -> Quantity | None:
    """A side of a chain before its last. None for a formula in words, such as rate * time, and for
    a sum with dots."""
    if patterns.FORMULA_OF_WORDS.fullmatch(text) and not qualified(text):
        return None
    if patterns.SERIES.fullmatch(text):
        return None
    answer = read(text, levels)
    if isinstance(answer, Words) and 2 <= len(answer.written) <= 4:
        return Quantity(parse_expression(" ".join(answer.written)))
    if not isinstance(answer, Quantity):
        raise Refused("an equation whose sides are not quantities")
    return answer


def _value_without_percent(quantity: Quantity) -> Node:
    """The value of a quantity; 5 % is 5/100."""
    if quantity.unit == "%":
        return ("/", quantity.value, Fraction(100))
    return quantity.value


def _inequality(sides: list[str], signs: list[str]) -> Answer:
    """`x > 3`, `1 < x ≤ 2` and `|x| < 2` as a labelled region, all others as a relation."""
    if _is_backwards(sides, signs):
        sides = sides[::-1]
        signs = [_FLIPPED[sign] for sign in reversed(signs)]
    if len(sides) == 2 and patterns.VARIABLE.fullmatch(sides[0]):
        end = _interval_end(sides[1])
        if end is not None:
            return Labelled(_spell_label(sides[0]), answers.half_line(signs[0], end))
    if len(sides) == 3 and set(signs) <= {"<", "≤"} and patterns.VARIABLE.fullmatch(sides[1]):
        low = _interval_end(sides[0])
        high = _interval_end(sides[2])
        if low is not None and high is not None:
            region = answers.interval(low, signs[0] == "≤", high, signs[1] == "≤")
            return Labelled(_spell_label(sides[1]), region)
    if len(sides) != 2:
        raise NoAnswer("a chain of inequalities")
    sign = signs[0]
    left, right = map(parse_expression, sides)
    if region := _between_bars(sign, left, right):
        return region
    if not variables(left) | variables(right):
        raise NoAnswer("a relation of numbers is true or false, which says nothing of the answer")
    if sign in "<≤≠":
        return Relation(sign, left, right)
    return Relation(_FLIPPED[sign], right, left)


def _is_backwards(sides: list[str], signs: list[str]) -> bool:
    """Whether an inequality is better read from right to left: `3 < x`, whose variable is on the
    right, or `2 ≥ x > 1`, which begins with the largest side."""
    if len(sides) != 2:
        return set(signs) <= {">", "≥"}
    left_is_variable = patterns.VARIABLE.fullmatch(sides[0]) is not None
    right_is_variable = patterns.VARIABLE.fullmatch(sides[1]) is not None
    return right_is_variable and not left_is_variable


def _between_bars(sign: str, left: Node, right: Node) -> Answer | None:
    """The region of x where |ax + b| < c, or another sign; None for any other inequality."""
    names = variables(left)
    if not (isinstance(left, tuple) and left[0] == "abs" and len(names) == 1):
        return None
    if not (isinstance(right, Fraction) and right > 0):
        return None
    name = names.pop()
    # The text between the bars is ax + b if its values at 0, 1 and 2 are on a line: then b is the
    # first, and a their difference.
    at_0 = substitute(left[1], {name: Fraction(0)})
    at_1 = substitute(left[1], {name: Fraction(1)})
    at_2 = substitute(left[1], {name: Fraction(2)})
    slope = ("-", at_1, at_0)
    is_linear = equal_values(("-", at_2, at_1), slope)
    if not is_linear or equal_values(slope, Fraction(0)) is not False:
        return None
    # The ends are where ax + b is c or -c: x = (±c - b) / a.
    ends = [("/", ("-", end, at_0), slope) for end in (right, -right)]
    low, high = sorted(answers.edge(Quantity(end)) for end in ends)
    if sign == "≠":
        return None
    # |ax + b| > c is everything but the closed interval.
    is_closed = sign in "≤>"
    inside = answers.interval(low, is_closed, high, is_closed)
    region = inside if sign in "<≤" else answers.complement(inside)
    return Labelled(name, region)


def _interval_end(text: str) -> Decimal | None:
    """The number at an end of an interval, a real constant or an infinity; None for any other
    text."""
    with suppress(Refused):
        return answers.edge(_phrase(text, 1) or read_quantity(text))
    return None


# --- sets and brackets ----------------------------------------------------------------------------


def _is_in_first_only(membership: list[bool]) -> bool:
    return membership[0] and not any(membership[1:])


_SET_OPERATIONS: dict[str, Callable[[list[bool]], bool]] = {
    "∪": any,
    "∖": _is_in_first_only,
    "∩": all,
}


def _set_operation(text: str, levels: int) -> Answer | None:
    """`(-∞, 1) ∪ (2, ∞)`, `ℝ ∖ {0}`."""
    for sign, operation in _SET_OPERATIONS.items():
        parts = split(text, sign)
        if len(parts) > MAX_PARTS:
            raise NoAnswer("too many parts")
        if len(parts) > 1:
            regions = [answers.as_region(read(part, levels - 1)) for part in parts]
            return answers.combine(operation, regions)
    if text.startswith("ℝ-"):
        return _set_operation(text.replace("-", "∖", 1), levels)
    return None


def _is_bracketed(text: str) -> bool:
    """Whether a text's first character is a bracket that its last one closes."""
    return text[0] in "([{⟨" and text[-1] in ")]}⟩" and bool(split(text[1:-1]))


def _named_point(text: str, levels: int) -> Answer | None:
    """`P(2, 3)`."""
    if not re.match(r"[A-Z]'? ?\(", text):
        return None
    point = text[text.index("(") :]
    if not _is_bracketed(point) or len(split(point[1:-1])) < 2:
        return None
    coordinates = _bracketed(point, levels)
    return None if coordinates is None else Labelled(text[0], coordinates)


def _bracketed(text: str, levels: int) -> Answer | None:
    """`(1, 2)`, `[0, 1)`, `{1, 2}`, `{x | x > 3}`, and `(5)`, whose brackets mean nothing."""
    if not _is_bracketed(text):
        return None
    if builder := patterns.SET_BUILDER.fullmatch(text):
        condition = read(builder[2], levels - 1)
        if not isinstance(condition, Labelled | Relation | Region | Listing | Family):
            raise NoAnswer("a set without a condition")
        return condition
    kind = text[0] + text[-1]
    parts = _pieces(text[1:-1], bare=False)
    if len(parts) > MAX_PARTS:
        raise NoAnswer("too many parts")
    if kind == "{}" and len(parts) == 1 and re.fullmatch(r"\{[^{},]+\}", parts[0]):
        return read(parts[0], levels - 1)  # {{5}} is {5}
    if len(parts) > 1 or kind == "{}":
        return _collect(kind, [_read_part(part, levels - 1) for part in parts])
    if kind in ("()", "[]"):
        return read(text[1:-1], levels - 1)
    return None


# --- matrices and cases ---------------------------------------------------------------------------

# The end of a row, alone or with the space below it: `\\`, `\\[2pt]`.
_LINE_BREAK = re.compile(r"\\\\(?:\[[^\]]{0,8}\])?")


def _matrix(text: str, levels: int) -> Answer | None:
    r"""`\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}`; a vmatrix or \det is its determinant."""
    if "{array}" in text or "{smallmatrix}" in text:
        text = text.strip("()[] ")
    is_determinant = text.startswith(r"\det")
    match = patterns.MATRIX.fullmatch(text.removeprefix(r"\det").strip())
    if match is None:
        return None
    lines = [line for line in _LINE_BREAK.split(match[2]) if line.strip()]
    rows = [line.split("&") for line in lines]
    if not _is_rectangle(rows) or len(rows) * len(rows[0]) > MAX_CELLS:
        raise NoAnswer("no rectangle, or too large a one")
    cells = tuple(_read_all(row, levels - 1) for row in rows)
    if match[1] == "vmatrix" or is_determinant:
        return Quantity(_determinant(cells))
    return Matrix(cells)


def _is_rectangle(rows: Sequence[Sequence[str]]) -> bool:
    return len({len(row) for row in rows}) == 1


def _read_all(texts: Sequence[str], levels: int) -> tuple[Answer, ...]:
    return tuple(read(text, levels) for text in texts)


def _cases(text: str, levels: int) -> Answer | None:
    r"""`f(x) = \begin{cases} 1 & x > 0 \\ 2 & x ≤ 0 \end{cases}`: a set of pairs of a value and its
    condition. Rows without conditions are a system of equations."""
    match = patterns.CASES.fullmatch(text)
    if match is None:
        return None
    lines = [line for line in match[2].split("\\\\") if line.strip()]
    rows = [_cells_of_case(line) for line in lines]
    if len(rows) > MAX_PARTS or not _is_rectangle(rows):
        raise NoAnswer("rows that are no cases, or too many")
    if len(rows[0]) == 1:
        return _collect("or", [read(row[0], levels - 1) for row in rows])
    pairs = [Listing("()", _read_all(row, levels - 1)) for row in rows]
    answer = Listing("{}", tuple(pairs))
    return _with_label(match[1].strip(), answer) if match[1] else answer


def _cells_of_case(line: str) -> list[str]:
    """The cells of a row of cases, without an "if" before or a comma after a cell."""
    matches = map(patterns.CONDITION.fullmatch, line.split("&"))
    return [match[1] for match in matches if match]


def _determinant(rows: Sequence[Sequence[Answer]]) -> Node:
    """The tree of a determinant, expanded along its first row. Raises `Refused` beyond 4 x 4."""
    values = [_values_of_row(row) for row in rows]
    if len(rows) != len(rows[0]) or len(rows) > 4:
        raise Refused("no small square of quantities")
    return _expand_determinant(values)


def _values_of_row(row: Sequence[Answer]) -> list[Node]:
    if not are_quantities(row):
        raise Refused("no small square of quantities")
    return [cell.value for cell in row]


def _expand_determinant(rows: list[list[Node]]) -> Node:
    """The sum over j of (-1)^j a_0j det(M_0j), where M_0j lacks row 0 and column j."""
    if len(rows) == 1:
        return rows[0][0]
    total: Node = Fraction(0)
    for j, value in enumerate(rows[0]):
        minor = [[*row[:j], *row[j + 1 :]] for row in rows[1:]]
        sign = "-" if j % 2 else "+"
        total = (sign, total, ("*", value, _expand_determinant(minor)))
    return total


def _approximation(text: str, levels: int) -> Answer | None:
    """`about 5`."""
    match = patterns.ABOUT.fullmatch(text)
    if match is None:
        return None
    return About(read(match[1] or match[2], levels - 1))


# In order: several readers may be able to read a text, and the first of them decides.
_READERS: tuple[Callable[[str, int], Answer | None], ...] = (
    _cases,
    quantities.read_date,
    quantities.read_clock,
    quantities.read_rank,
    quantities.read_share,
    quantities.read_several_units,
    _phrase,
    quantities.quantity_in_words,
    quantities.read_two_units,
    _colon_labels,
    _named_numbers,
    _congruence,
    _bounds_in_words,
    _solutions,
    _alternatives,
    _comma_list,
    _plus_minus,
    _relation,
    _matrix,
    _set_operation,
    _named_point,
    _bracketed,
    quantities.read_ratio,
    _approximation,
    read_quantity,
)
