"""The comparison of an answer with the ground truth, which sets the precision, by the conventions
of a careful teacher."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from alignment.rewards.grading import answers, quantities
from alignment.rewards.grading.answers import (
    About,
    Answer,
    Clock,
    Labelled,
    Listing,
    Matrix,
    Quantity,
    Region,
    Relation,
    Words,
)
from alignment.rewards.grading.expressions import (
    NoAnswer,
    Node,
    Refused,
    is_rational,
    subtrees,
    variables,
)
from alignment.rewards.grading.reading import read
from alignment.rewards.grading.text import squeeze
from alignment.rewards.grading.values import (
    equal_values,
    proportional,
    real_value,
    rounds_to,
    substitute,
    terminates,
)

STAGES = ("literal", "normalised", "rational", "structured", "symbolic", "math-verify")

# A decimal number with this many decimals may be rounded: with two significant digits, from a value
# without an end (0.67 from 2/3); with three, also from a longer decimal number (3.14 from 3.1416,
# but not 0.18 from 0.184).
_ROUNDED_DECIMALS, _ROUNDED_DIGITS, _SHORTENED_DIGITS = 2, 2, 3
_ROUND_NUMBER = 25  # a truth with a smaller denominator, such as 0.25 or 2.50, counts as exact

_HATS = (r"\ihat", r"\jhat", r"\khat")


@dataclass
class Comparison:
    """Compares normalised texts; `stage` becomes the last stage that a comparison needed. `fast`
    omits the symbolic stage."""

    fast: bool = False
    stage: str = "normalised"

    def texts(self, answer: str, truth: str, extracted: bool = False) -> bool | None:
        """Whether two normalised texts state the same answer; None if `read` refuses one.
        `extracted`: from a sentence."""
        if not answer or not truth:
            return False
        same_digits = "..." in answer and answer.replace(" ", "") == truth.replace(" ", "")
        if (
            squeeze(answer) == squeeze(truth)
            or same_digits
            or quantities.same_options(answer, truth)
        ):
            return True
        words_a, words_t = quantities.plain_words(answer), quantities.plain_words(truth)
        if words_a and words_t and words_t in (words_a, quantities.words_in_sentence(words_a)):
            return True
        truth_read = None
        try:
            truth_read = read(truth)
            # both are read, so math-verify is not needed
            return self.answers(read(answer), truth_read) or False
        except NoAnswer:
            return False
        except Refused:
            if truth_read and not extracted and (inner := quantities.answer_in_sentence(answer)):
                return self.texts(inner, truth, extracted=True)
            if truth_read and not extracted and (forms := quantities.two_forms(answer)):
                return self.texts(*forms, extracted=True) and self.texts(
                    forms[0], truth, extracted=True
                )
            return False if words_a or words_t else None

    def answers(self, a: Answer, t: Answer) -> bool | None:
        """Whether answer `a` equals the truth `t`; None where that cannot be decided."""
        if isinstance(a, Labelled) and isinstance(t, Relation):
            return self._relations(_as_relation(a), t)
        if isinstance(t, Labelled) and isinstance(a, Relation):
            # y = 2x + 1, not a solution, x = 5
            formula = isinstance(t.answer, Quantity) and variables(t.answer.value)
            return bool(formula) and self._relations(a, _as_relation(t))
        if isinstance(a, Labelled) or isinstance(t, Labelled):
            labels = {x.label for x in (a, t) if isinstance(x, Labelled)}
            # or one is in words
            agree = len(labels) == 1 or any(
                len(label) > 2 and label[:3].isalpha() for label in labels
            )
            return agree and self.answers(answers.unlabelled(a), answers.unlabelled(t))
        approximate = isinstance(a, About), isinstance(t, About)
        a, t = (x.answer if isinstance(x, About) else x for x in (a, t))
        numbers = isinstance(a, Quantity) and isinstance(t, Quantity)
        if approximate == (True, False) and not (numbers and t.decimals > 0):
            return False  # an approximation is right only where the truth may be one as well
        if any(approximate) and not numbers:
            return self.answers(a, t)
        if numbers:
            equal = self._quantities(a, t)
            exact = equal or not approximate[1]
            return (
                equal
                if exact
                else _units_agree(a, t) and self._rounds_to(a.value, t.value, t.decimals)
            )
        if isinstance(a, Words) and isinstance(t, Words):
            return a.text == t.text
        self._reaches("structured")
        if isinstance(a, Clock) and isinstance(t, Clock):
            return _same_time(a, t)
        if isinstance(a, Relation) and isinstance(t, Relation):
            return self._relations(a, t)
        if isinstance(a, Relation) and isinstance(t, Quantity) and _names_a_sum(a):
            return self._quantities(Quantity(a.right), t)  # m + n = 113
        if isinstance(a, Region) or isinstance(t, Region):
            return _same_region(a, t)
        if isinstance(a, Listing | Matrix) or isinstance(t, Listing | Matrix):
            return self._structures(a, t)
        return False

    def _reaches(self, stage: str) -> None:
        self.stage = max(self.stage, stage, key=STAGES.index)

    def _rounds_to(self, value: Node, truth: Node, decimals: int) -> bool:
        """Whether a value is within half a unit of the last place of a decimal number."""
        self._reaches("rational" if is_rational(value) else "symbolic")
        with suppress(Refused):
            return (is_rational(value) or not self.fast) and rounds_to(value, truth, decimals)
        return False

    def values(self, a: Node, t: Node) -> bool | None:
        """Whether two trees have equal values: exactly where both are rational, else by evaluation
        at points."""
        if is_rational(a) and is_rational(t):
            self._reaches("rational")
            return equal_values(a, t) is True
        self._reaches("symbolic")
        if "i" in subtrees(t):  # as code writes the imaginary unit
            a = substitute(a, dict.fromkeys({*"Ij"} - variables(t), "i"))
        return None if self.fast else equal_values(a, t)

    def _quantities(self, a: Quantity, t: Quantity) -> bool | None:
        """Exactly equal values; a unit may be missing on one side but must not differ. 50% is 50%
        and 0.5, and also 50: the sign may be missing on one side, the factor may not. An angle in
        degrees equals its value in radians. A ground truth such as 3.14 may be rounded: a value
        with more digits, or without an end, that rounds to it is right."""
        if not _units_agree(a, t):
            return self._symbol_as_unit(a, t)
        equal = self.values(a.value, t.value)
        if equal and {a.unit, t.unit} == {"", "%"} and _below_one(t.value):
            return False  # 0.25 may be 25 %, so no sign is missing
        if equal or a.unit == t.unit:
            return equal or self._more_exact(a, t) or equal
        for unit, factor in (("%", Fraction(1, 100)), ("degree", ("/", r"\pi", Fraction(180)))):
            if unit in (a.unit, t.unit) and (
                unit == "%" or r"\pi" in subtrees(("+", a.value, t.value))
            ):
                return self.values(
                    *(("*", q.value, factor) if q.unit == unit else q.value for q in (a, t))
                )
        return self._symbol_as_unit(a, t) or self._more_exact(a, t) or equal

    def _more_exact(self, a: Quantity, t: Quantity) -> bool:
        """Whether the answer is the more exact value of a truth that may be rounded."""
        endless = not isinstance(a.value, Fraction) and not terminates(a.value)
        longer = a.decimals > t.decimals and t.digits >= _SHORTENED_DIGITS
        rounded = (
            t.decimals >= _ROUNDED_DECIMALS and t.digits >= _ROUNDED_DIGITS and (endless or longer)
        )
        round_number = isinstance(t.value, Fraction) and t.value.denominator < _ROUND_NUMBER
        return rounded and not round_number and self._rounds_to(a.value, t.value, t.decimals)

    def _symbol_as_unit(self, a: Quantity, t: Quantity) -> bool:
        """Whether 5m, which is read as algebra, means the 5 metres of the other side."""
        for one, other in ((a, t), (t, a)):
            match one.value:
                case ("*", Fraction() as number, str(symbol)) if (
                    symbol in quantities.SYMBOLS and not one.unit
                ):
                    return (
                        quantities.read_unit(symbol) == other.unit
                        and self.values(number, other.value) is True
                    )
        return False

    def _relations(self, a: Relation | None, t: Relation | None) -> bool | None:
        """Whether one is the other multiplied by a constant, and for < and ≤ by a positive one."""
        if a is None or t is None or a.sign != t.sign:
            return False
        self._reaches("symbolic")
        if self.fast:
            return None
        return proportional(("-", a.left, a.right), ("-", t.left, t.right), positive=a.sign in "<≤")

    def _structures(self, a: Answer, t: Answer) -> bool | None:
        for one, other in ((a, t), (t, a)):
            if isinstance(one, Quantity) and not variables(one.value).isdisjoint(_HATS):
                size = (
                    len(other.parts)
                    if isinstance(other, Listing)
                    else max(map(len, (other.rows, other.rows[0])))
                )
                return size in (2, 3) and self._structures(
                    *(_as_vector(x, size) if x is one else x for x in (a, t))
                )
        if isinstance(a, Matrix) or isinstance(t, Matrix):
            return self._matrices(a, t)
        kind_a, kind_t = (x.kind if isinstance(x, Listing) else None for x in (a, t))
        if kind_a is None or kind_t is None:
            return self._single(a, t)
        if kind_a == kind_t == ":":
            (a_1, *rest_a), (t_1, *rest_t) = ([part.value for part in x.parts] for x in (a, t))
            products = (
                (("*", x, t_1), ("*", y, a_1)) for x, y in zip(rest_a, rest_t, strict=False)
            )
            return len(rest_a) == len(rest_t) and _all(self.values(*pair) for pair in products)
        if kind_a == "=" or kind_t == "=":
            return self._assignments(a, t)
        if {kind_a, kind_t} <= {"{}", "or", ""} and not (
            kind_a == kind_t == "" and len(t.parts) > 2
        ):
            # but a longer bare list may be an arrangement
            return self._in_any_order(a.parts, t.parts)
        return (kind_a == kind_t or {kind_a, kind_t} == {"⟨⟩", "()"}) and self._in_order(
            a.parts, t.parts
        )

    def _single(self, a: Answer, t: Answer) -> bool | None:
        """One of the two is a listing: {5} is 5, 3:4 is 3/4, `1/2 or 0.5` is 1/2, but a list of
        guesses is not one answer."""
        listing, other = (a, t) if isinstance(a, Listing) else (t, a)
        if listing is a and listing.kind == "or" and isinstance(t, Quantity):
            return self._is_one_value(listing.parts) and self.answers(listing.parts[0], t)
        if listing.kind == "{}" and len(listing.parts) == 1:
            a, t = (x.parts[0] if x is listing else x for x in (a, t))
            return isinstance(listing.parts[0], Quantity) and self.answers(a, t)  # but {∅} is not ∅
        if (
            listing.kind == ":"
            and len(listing.parts) == 2
            and isinstance(other, Quantity)
            and not other.unit
        ):
            return self.values(("/", listing.parts[0].value, listing.parts[1].value), other.value)
        return False

    def _is_one_value(self, parts: Sequence[Answer]) -> bool:
        """Whether all parts are the same quantity in different forms."""
        first = parts[0]
        if not all(isinstance(part, Quantity) and part.unit == first.unit for part in parts):
            return False
        return all(self.values(part.value, first.value) is True for part in parts[1:])

    def _assignments(self, a: Listing, t: Listing) -> bool | None:
        """`x = 1, y = 2` is itself in any order, and (1, 2), the values in the order of the
        names."""
        if a.kind == t.kind:
            if {part.label for part in a.parts} != {part.label for part in t.parts} or len(
                a.parts
            ) != len(t.parts):
                return False
            given = {part.label: part.answer for part in a.parts}
            in_order = _all(self.answers(given[part.label], part.answer) for part in t.parts)
            # x_1 and x_2 number the solutions
            numbered = all(part.label.startswith("x_") for part in t.parts)
            return (
                self._in_any_order([*given.values()], [part.answer for part in t.parts])
                if numbered
                else in_order
            )
        labelled, other = (a, t) if a.kind == "=" else (t, a)
        if len({part.label.partition("_")[0] for part in labelled.parts}) == 1 and other.kind in (
            "{}",
            "or",
            "",
        ):
            return self._in_any_order(a.parts, t.parts)
        ordered = sorted(labelled.parts, key=lambda part: part.label)
        return other.kind in ("()", "") and self._in_order(
            *(ordered if x is labelled else x.parts for x in (a, t))
        )

    def _matrices(self, a: Answer, t: Answer) -> bool | None:
        """Cell by cell; a vector also as a tuple, a matrix also as a list of lists."""
        rows_a, rows_t = _rows(a), _rows(t)
        if rows_a is None or rows_t is None:
            return False
        if not (isinstance(a, Matrix) and isinstance(t, Matrix)):
            rows_a, rows_t = (
                rows if len(rows) == 1 or len(rows[0]) > 1 else [*zip(*rows, strict=True)]
                for rows in (rows_a, rows_t)
            )
        return [*map(len, rows_a)] == [*map(len, rows_t)] and _all(
            map(self._in_order, rows_a, rows_t)
        )

    def _in_order(self, a: Sequence[Answer], t: Sequence[Answer]) -> bool | None:
        return len(a) == len(t) and _all(map(self.answers, a, t))

    def _in_any_order(self, a: Sequence[Answer], t: Sequence[Answer]) -> bool | None:
        if len(a) != len(t):
            return False
        if (
            any(isinstance(part, Listing) and part.kind in ("{}", "or") for part in (*a, *t))
            and len(a) > 4
        ):
            return None  # matching a set of sets takes a power of their sizes
        left = list(t)
        for part in a:
            match = next((i for i, truth in enumerate(left) if self.answers(part, truth)), None)
            if match is None:
                return False
            del left[match]
        return True


def _names_a_sum(equation: Relation) -> bool:
    """Whether the left side adds different variables up and the right one is their sum."""
    terms = subtrees(equation.left)
    names = [term for term in terms if isinstance(term, str)]
    plain = all(
        isinstance(term, str) or isinstance(term, tuple) and term[0] == "+" for term in terms
    )
    return (
        equation.sign == "="
        and plain
        and len(set(names)) == len(names) > 1
        and is_rational(equation.right)
    )


def _as_relation(answer: Labelled) -> Relation | None:
    """`y = 2x + 1` as an equation of its two sides."""
    equation = isinstance(answer.answer, Quantity) and len(answer.label) == 1
    return Relation("=", answer.label, answer.answer.value) if equation else None


def _all(verdicts) -> bool | None:
    """Three-valued: false if any is, else unknown if any is; stops at the first that is false."""
    result: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        result = result and verdict
    return result


def _units_agree(a: Quantity, t: Quantity) -> bool:
    """The same unit, or one is missing; but a remainder modulo n equals a number only if the truth
    has that unit."""
    if a.unit.startswith("mod ") and a.unit != t.unit:
        return False
    return not a.unit or not t.unit or quantities.same_unit(a.unit, t.unit)


def _below_one(value: Node) -> bool:
    with suppress(Refused):
        return bool(0 < abs(real_value(value)) < 1)
    return False


def _same_time(a: Clock, t: Clock) -> bool:
    """The same time of day; without am or pm the same position on the dial, unless the other counts
    to 24."""
    if a.half == t.half or (a.half and t.half):
        return a.seconds == t.seconds
    return "24" not in (a.half, t.half) and a.seconds % 43200 == t.seconds % 43200


def _same_region(a: Answer, t: Answer) -> bool:
    with suppress(Refused):
        return answers.as_region(a) == answers.as_region(t)
    return False


def _rows(answer: Answer) -> tuple[tuple[Answer, ...], ...] | None:
    """The rows of a matrix, of a list of lists, or of a vector written as a tuple."""
    if isinstance(answer, Matrix):
        return answer.rows
    if not isinstance(answer, Listing) or answer.kind not in ("()", "[]", "⟨⟩", "{}"):
        return None
    nested = [isinstance(part, Listing) for part in answer.parts]
    if all(nested) and len({(part.kind, len(part.parts)) for part in answer.parts}) == 1:
        return tuple(part.parts for part in answer.parts)
    return None if any(nested) or answer.kind == "{}" else (answer.parts,)


def _as_vector(answer: Quantity, size: int) -> Listing:
    """The components of `2i + 3j` in unit vectors."""
    zero = dict.fromkeys(_HATS, Fraction(0))
    parts = (
        ("-", substitute(answer.value, zero | {hat: Fraction(1)}), substitute(answer.value, zero))
        for hat in _HATS[:size]
    )
    return Listing("⟨⟩", tuple(map(Quantity, parts)))
