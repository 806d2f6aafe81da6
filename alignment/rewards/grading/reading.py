"""The parser of answers: normalised text of any structure becomes one of the types of
`answers.py`."""

import itertools
import operator
import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

from alignment.rewards.grading import answers, quantities
from alignment.rewards.grading.answers import (
    About,
    Answer,
    Labelled,
    Listing,
    Matrix,
    Quantity,
    Region,
    Relation,
    Words,
)
from alignment.rewards.grading.expressions import (
    FUNCTIONS,
    NoAnswer,
    Node,
    Refused,
    parse_expression,
    variables,
)
from alignment.rewards.grading.quantities import (
    plain_words,
    qualified,
    read_quantity,
    without_clause,
)
from alignment.rewards.grading.text import (
    PATTERNS,
    RELATIONS,
    TABLES,
    split,
    split_with_signs,
    squeeze,
)
from alignment.rewards.grading.values import equal_values, rounds_to, substitute

MAX_PARTS = 20  # of a listing
MAX_CELLS = 64  # of a matrix
MAX_LEVELS = 5  # of structure inside structure


def read(text: str, levels: int = MAX_LEVELS) -> Answer:
    """The answer that a normalised text states. Raises `Refused` for a text that it cannot read."""
    text = without_clause(text.strip())
    if levels == 0 or not text:
        raise Refused("too deep, or empty")
    # the last one reads or refuses
    return next(answer for reader in _READERS if (answer := reader(text, levels)))


_PHRASE = {phrase: Words(name) for name, phrases in TABLES["phrases"].items() for phrase in phrases}
_LONG_PHRASES = "|".join(phrase for phrase in _PHRASE if re.fullmatch("[a-z' ]{9,}", phrase))
_SENTENCE_OF_PHRASE = re.compile(
    rf"(?:the|this|it|there)(?: (?!not|n't)[a-z]+){{0,3}}? ({_LONG_PHRASES})"
)
_PHRASE |= dict.fromkeys(TABLES["everything"], answers.EVERYWHERE)


def _phrase(text: str, levels: int) -> Answer | None:
    low = text.casefold()
    if low in _PHRASE:
        return _PHRASE[low]
    if (lead := _SENTENCE_OF_PHRASE.fullmatch(low)) and not qualified(low[: lead.start(1)]):
        return _PHRASE[lead[1]]
    return Words(words) if (words := plain_words(text)) else None


def _alternatives(text: str, levels: int) -> Answer | None:
    """`1 or 2`, `x = 1 and y = 2`, `1, 2, and 3`."""
    pieces = re.split(r",? (or|and) ", re.sub("^(?:either|both) ", "", text))
    if len(pieces) == 1 or not all(split(piece) for piece in pieces[::2]):
        return None
    if len(pieces) > 2 * MAX_PARTS:
        raise NoAnswer("too many alternatives")
    parts = [read(piece, levels - 1) for piece in pieces[::2]]
    inner = list(map(answers.unlabelled, parts))
    if all(isinstance(part, Region) for part in inner):
        return answers.combine(any if pieces[1] == "or" else all, inner)
    if (
        pieces[1] == "or"
        and all(answers.is_interval(part) for part in inner)
        and any(part.kind != "()" for part in inner)
    ):
        return answers.combine(any, map(answers.as_region, inner))
    return _collect("or", parts)


def _collect(kind: str, parts: Sequence[Answer]) -> Listing:
    """A listing: values with different labels are an assignment, with one label alternatives;
    flattens nested alternatives."""
    labels = [part.label for part in parts if isinstance(part, Labelled)]
    if len(labels) == len(parts) > 1 and len(set(labels)) == len(labels):
        return Listing("=", tuple(parts))
    if labels and kind in ("", "or"):
        if len(set(labels)) > 1:
            raise Refused("labels that do not fit together")
        kind, parts = "or", list(map(answers.unlabelled, parts))
    flat: list[Answer] = []
    for part in parts:
        spliced = isinstance(part, Listing) and (
            part.kind == "or" or (kind == "or" and part.kind == "")
        )
        if spliced and kind in ("", "or", "{}"):
            kind = kind or "or"
            flat += part.parts
        else:
            flat.append(part)
    if len(flat) > MAX_PARTS:
        raise NoAnswer("too many parts")
    return Listing(kind, tuple(flat))


def _pieces(inner: str, bare: bool) -> list[str]:
    """The parts of a list. In a list with spaces after its commas, or without brackets, 1,234 is
    one number."""
    if bare or ", " in inner:
        inner = re.sub(
            r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])",
            lambda m: m[0].replace(",", ""),
            inner,
        )
    return split(inner.replace(";", ","))


def _part(text: str, levels: int) -> Answer:
    """What a part of a list states. Digits after a zero are no number there but a code, or what
    follows a decimal comma or a comma between groups: 3,05 is not the list 3, 5."""
    return Words(squeeze(text)) if re.match("0[0-9]", text) else read(text, levels)


def _comma_list(text: str, levels: int) -> Answer | None:
    parts = _pieces(text, bare=True)
    # each part of a bare list has its own signs ±, while `(1, ±2)` is two pairs
    if len(parts) < 2 or _whole_bracket(text):
        return None
    return _collect("", [_part(part, levels - 1) for part in parts[: MAX_PARTS + 1]])


def _plus_minus(text: str, levels: int) -> Answer | None:
    text = text if "±" in text else text.replace("∓", "±")
    count = text.count("±")
    if not count or (text[0] == "{" and _whole_bracket(text)):
        return None
    if count > 3:
        raise Refused("too many signs")
    parts = []
    for signs in (
        ["+" * count, "-" * count] if "∓" in text else itertools.product("+-", repeat=count)
    ):
        first, *pieces = text.replace("∓", "-" if signs[0] == "+" else "+").split("±")
        parts.append(read(first + "".join(map(operator.add, signs, pieces)), levels - 1))
    return _collect("or", parts)


_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}


def _relation(text: str, levels: int) -> Answer | None:
    """`x = 5`, `2 + 3 = 5`, `y = 2x`, `1 < x ≤ 2`, `x ∈ [0, 1]`, `x ≈ 3.14`."""
    sides, signs = split_with_signs(text, RELATIONS)
    if not signs:
        return None
    if "∈" in signs:
        if len(signs) == 1 and PATTERNS.label.fullmatch(sides[0]):
            return _with_label(sides[0], read(sides[1], levels - 1))
        raise NoAnswer("a membership that is no answer")
    if "≈" in signs:
        return _about(sides, signs, levels)
    return _equation(sides, levels) if set(signs) == {"="} else _inequality(sides, signs)


def _about(sides: list[str], signs: list[str], levels: int) -> Answer:
    """After nothing or a label, the sign ≈ marks a rounded value; after a value, it marks that
    value as exact."""
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
    """Whether a text can be the left side of `label = answer`: a symbol, f(x), or words that
    compute and deny nothing."""
    if (
        not PATTERNS.label.fullmatch(text)
        or text in ("e", "i", r"\pi")
        or re.match(r"[xyz] ?\([0-9]", text)
    ):
        return False
    return not qualified(text) and not set(re.findall("[A-Za-z]+", text)) & {*FUNCTIONS}


def _equation(sides: list[str], levels: int) -> Answer:
    if len(sides) > 6 or not all(sides):
        raise Refused("no chain of equations")
    if is_label(sides[0]):
        return _with_label(sides[0], _chain(sides[1:], levels))
    if len(sides) == 2 and PATTERNS.variable.fullmatch(sides[1]) and sides[1] not in ("e", "i"):
        return _with_label(sides[1], read(sides[0], levels - 1))
    return _chain(sides, levels)


def _with_label(label: str, answer: Answer) -> Answer:
    """The labelled answer; `(x, y) = (1, 2)` becomes two."""
    names = re.findall("[a-z]", label) if label[0] == "(" else []
    if (
        isinstance(answer, Listing)
        and answer.kind == "()"
        and len(answer.parts) == len(names) == len(set(names)) > 1
    ):
        return Listing("=", tuple(map(Labelled, names, answer.parts)))
    if names:
        raise NoAnswer("a pair that is no pair")
    return Labelled(_label(label), answer)


def _label(text: str) -> str:
    """A label in one spelling: x_{1} is x_1."""
    return squeeze(re.sub(r"_\{(\w+)\}", r"_\1", text))


def _chain(sides: list[str], levels: int) -> Answer:
    """The last of several equal sides; an equation if two sides with variables are not
    identical."""
    read_sides = [read(side, levels - 1) for side in sides]
    if len(read_sides) == 1:
        return read_sides[0]
    if (
        not all(isinstance(answer, Quantity) for answer in read_sides)
        or len({a.unit for a in read_sides} - {"", "%"}) > 1
    ):
        raise Refused("an equation whose sides are not quantities of one kind")
    values = [
        ("/", answer.value, Fraction(100)) if answer.unit == "%" else answer.value
        for answer in read_sides
    ]
    first, *others = values
    if all(equal_values(other, others[-1]) for other in others[:-1]):
        if equal_values(first, others[-1]):
            return read_sides[-1]
        if variables(first) or (len(values) == 2 and variables(others[-1])):
            return Relation("=", first, others[-1])  # m + n = 2 + 3 = 5
    raise NoAnswer("sides that are not equal")


def _inequality(sides: list[str], signs: list[str]) -> Answer:
    backwards = set(signs) <= {">", "≥"}
    if len(sides) == 2:
        backwards = PATTERNS.variable.fullmatch(sides[1]) and not PATTERNS.variable.fullmatch(
            sides[0]
        )
    if backwards:
        sides, signs = sides[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    if (
        len(sides) == 2
        and PATTERNS.variable.fullmatch(sides[0])
        and (end := _end(sides[1])) is not None
    ):
        return Labelled(_label(sides[0]), answers.half_line(signs[0], end))
    if len(sides) == 3 and set(signs) <= {"<", "≤"} and PATTERNS.variable.fullmatch(sides[1]):
        low, high = _end(sides[0]), _end(sides[2])
        if low is not None and high is not None:
            return Labelled(
                _label(sides[1]), answers.interval(low, signs[0] == "≤", high, signs[1] == "≤")
            )
    if len(sides) != 2:
        raise NoAnswer("a chain of inequalities")
    left, right = map(parse_expression, sides)
    if region := _between_bars(signs[0], left, right):
        return region
    if not variables(left) | variables(right):
        raise NoAnswer("a relation of numbers is true or false, which says nothing of the answer")
    return (
        Relation(signs[0], left, right)
        if signs[0] in "<≤≠"
        else Relation(_FLIPPED[signs[0]], right, left)
    )


def _between_bars(sign: str, left: Node, right: Node) -> Answer | None:
    """The region of |ax + b| < c and the like; None for any other inequality."""
    names = variables(left)
    if not (
        isinstance(left, tuple)
        and left[0] == "abs"
        and len(names) == 1
        and isinstance(right, Fraction)
        and right > 0
    ):
        return None
    at = [substitute(left[1], {name: Fraction(k) for name in names}) for k in range(3)]
    slope = ("-", at[1], at[0])
    if (
        not equal_values(("-", at[2], at[1]), slope)
        or equal_values(slope, Fraction(0)) is not False
    ):
        return None
    low, high = sorted(
        answers.edge(Quantity(("/", ("-", end, at[0]), slope))) for end in (right, -right)
    )
    inside = answers.interval(low, sign in "≤>", high, sign in "≤>")
    return (
        Labelled(names.pop(), inside if sign in "<≤" else answers.complement(inside))
        if sign != "≠"
        else None
    )


def _end(text: str) -> Decimal | None:
    """A real constant or an infinity; None for anything else."""
    with suppress(Refused):
        return answers.edge(_phrase(text, 1) or read_quantity(text))
    return None


def _set_operation(text: str, levels: int) -> Answer | None:
    """`(-∞, 1) ∪ (2, ∞)`, `ℝ ∖ {0}`."""
    for sign, operation in (
        ("∪", any),
        ("∖", lambda inside: inside[0] and not any(inside[1:])),
        ("∩", all),
    ):
        parts = split(text, sign)
        if len(parts) > MAX_PARTS:
            raise NoAnswer("too many parts")
        if len(parts) > 1:
            return answers.combine(
                operation, [answers.as_region(read(part, levels - 1)) for part in parts]
            )
    return _set_operation(text.replace("-", "∖", 1), levels) if text.startswith("ℝ-") else None


def _whole_bracket(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    return text[0] in "([{⟨" and text[-1] in ")]}⟩" and bool(split(text[1:-1]))


def _bracketed(text: str, levels: int) -> Answer | None:
    if (
        re.match(r"[A-Z]'? ?\(", text)
        and _whole_bracket(point := text[text.index("(") :])
        and len(split(point[1:-1])) > 1
    ):
        return Labelled(text[0], _bracketed(point, levels))  # P(2, 3)
    if not _whole_bracket(text):
        return None
    if builder := PATTERNS.set_builder.fullmatch(text):
        condition = read(builder[2], levels - 1)
        if not isinstance(condition, Labelled | Relation | Region | Listing):
            raise NoAnswer("a set without a condition")
        return condition
    kind = text[0] + text[-1]
    parts = _pieces(text[1:-1], bare=False)
    if len(parts) > MAX_PARTS:
        raise NoAnswer("too many parts")
    if kind == "{}" and len(parts) == 1 and re.fullmatch(r"\{[^{},]+\}", parts[0]):
        return read(parts[0], levels - 1)  # braces that only group
    if len(parts) > 1 or kind == "{}":
        return _collect(kind, [_part(part, levels - 1) for part in parts])
    return read(text[1:-1], levels - 1) if kind in ("()", "[]") else None


def _matrix(text: str, levels: int) -> Answer | None:
    match = PATTERNS.matrix.fullmatch(
        text.strip("()[] ") if "{array}" in text or "{smallmatrix}" in text else text
    )
    if match is None:
        return None
    lines = [line for line in re.split(r"\\\\(?:\[[^\]]{0,8}\])?", match[2]) if line.strip()]
    rows = tuple(tuple(line.split("&")) for line in lines)
    if not rows or len({len(row) for row in rows}) > 1 or len(rows) * len(rows[0]) > MAX_CELLS:
        raise NoAnswer("no rectangle, or too large a one")
    cells = tuple(tuple(read(cell, levels - 1) for cell in row) for row in rows)
    return Quantity(_determinant(cells)) if match[1] == "vmatrix" else Matrix(cells)


def _cases(text: str, levels: int) -> Answer | None:
    """Values with their conditions, in any order; without conditions, a system of equations."""
    if (match := PATTERNS.cases.fullmatch(text)) is None:
        return None
    lines = [line.split("&") for line in match[2].split("\\\\") if line.strip()]
    rows = [[PATTERNS.condition.fullmatch(cell)[1] for cell in line] for line in lines]
    if not 1 <= len(rows) <= MAX_PARTS or len({len(row) for row in rows}) > 1:
        raise NoAnswer("rows that are no cases, or too many")
    if len(rows[0]) == 1:
        return _collect("or", [read(row[0], levels - 1) for row in rows])
    pieces = Listing(
        "{}", tuple(Listing("()", tuple(read(cell, levels - 1) for cell in row)) for row in rows)
    )
    return _with_label(match[1].strip(), pieces) if match[1] else pieces


def _determinant(rows: Sequence[Sequence[Answer]]) -> Node:
    """The tree of a determinant, expanded along its first row. Raises `Refused` beyond 4 x 4."""
    if (
        len(rows) != len(rows[0])
        or len(rows) > 4
        or not all(isinstance(cell, Quantity) for row in rows for cell in row)
    ):
        raise Refused("no small square of quantities")
    if len(rows) == 1:
        return rows[0][0].value
    total: Node = Fraction(0)
    for j, cell in enumerate(rows[0]):
        minor = _determinant([[*row[:j], *row[j + 1 :]] for row in rows[1:]])
        total = ("-" if j % 2 else "+", total, ("*", cell.value, minor))
    return total


def _approximation(text: str, levels: int) -> Answer | None:
    match = PATTERNS.about.fullmatch(text)
    return About(read(match[1] or match[2], levels - 1)) if match else None


_READERS = (
    _cases,
    quantities.read_clock,
    _phrase,
    quantities.quantity_in_words,
    quantities.read_two_units,
    _alternatives,
    _comma_list,
    _plus_minus,
    _relation,
    _matrix,
    _set_operation,
    _bracketed,
    quantities.read_ratio,
    _approximation,
    read_quantity,
)
