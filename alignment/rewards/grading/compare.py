"""The comparison of an answer with the ground truth, which sets the precision, by the conventions
of a careful teacher.

Comparisons are three-valued: True, False, or None where nothing can decide.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from alignment.rewards.grading import answers, patterns, quantities
from alignment.rewards.grading.answers import (
    About,
    Answer,
    Clock,
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
from alignment.rewards.grading.clauses import values_in_clauses
from alignment.rewards.grading.expressions import (
    TRIGONOMETRIC,
    NoAnswer,
    Node,
    Refused,
    is_rational,
    subtrees,
    variables,
)
from alignment.rewards.grading.measures import conversion, total
from alignment.rewards.grading.progressions import progressions, same_progressions
from alignment.rewards.grading.reading import read
from alignment.rewards.grading.text import squeeze
from alignment.rewards.grading.values import (
    equal_values,
    is_beyond_bounds,
    proportional,
    real_value,
    rounds_to,
    substitute,
    terminates,
    whole_number,
)

STAGES = ("literal", "normalised", "rational", "structured", "symbolic", "math-verify")

# A decimal number with this many decimals may be rounded: with two significant digits, from a value
# without an end (0.67 from 2/3); with three, also from a longer decimal number (3.14 from 3.1416,
# but not 0.18 from 0.184).
_ROUNDED_DECIMALS = 2
_ROUNDED_DIGITS = 2
_SHORTENED_DIGITS = 3
_ROUND_NUMBER = 25  # a truth with a smaller denominator, such as 0.25 or 2.50, counts as exact

_PERCENT = Fraction(1, 100)
_DEGREE: Node = ("/", r"\pi", Fraction(180))
_HALF_DAY = 12 * 60 * 60  # in seconds
_UNIT_VECTORS = (r"\ihat", r"\jhat", r"\khat")


@dataclass
class Comparison:
    """Compares normalised texts; `stage` becomes the last stage that a comparison needed.

    `fast` omits the symbolic stage.
    """

    fast: bool = False
    stage: str = "normalised"
    undecided: bool = False
    """Whether two numbers of the texts could not be compared, because of their size."""

    def compare_texts(self, answer: str, truth: str, extracted: bool = False) -> bool | None:
        """Whether two normalised texts state the same answer; None if `read` refuses one.

        `extracted`: the answer is a part of a sentence, which is not taken apart once more.
        """
        if not answer or not truth:
            return False
        if quantities.substances_differ(answer, truth):
            return False
        same_digits = "..." in answer and answer.replace(" ", "") == truth.replace(" ", "")
        if same_digits or squeeze(answer) == squeeze(truth):
            return True
        if quantities.same_options(answer, truth):
            return True
        answer_words = quantities.plain_words(answer)
        truth_words = quantities.plain_words(truth)
        if answer_words and truth_words:
            predicate = quantities.words_in_sentence(answer_words)
            if truth_words in (answer_words, predicate):
                return True
        # Words that are read as nothing else differ from any other answer.
        unread = False if answer_words or truth_words else None
        try:
            truth_read = read(truth)
        except NoAnswer:
            return False
        except Refused:
            return unread
        try:
            answer_read = read(answer)
            equal = self.compare_answers(answer_read, truth_read)
            has_words = _has_clause(answer_read) or patterns.WORDS_AFTER_SIGN.search(answer)
            if not equal and not extracted and has_words:
                return self._compare_clauses(answer, truth, truth_read)
            # Both are read, so that math-verify is not needed: what is not decided is unequal,
            # and said where only the size of numbers prevents it.
            return equal or (None if self.undecided and equal is None else False)
        except NoAnswer:
            return False
        except Refused:
            if extracted:
                return unread
        if inner := quantities.answer_in_sentence(answer):
            equal = self.compare_texts(inner, truth, extracted=True)
            if equal:
                return True
            unread = unread if equal is None else equal
        if forms := quantities.two_forms(answer):
            agree = self.compare_texts(*forms, extracted=True)
            return agree and self.compare_texts(forms[0], truth, extracted=True)
        if self._compare_clauses(answer, truth, truth_read):
            return True
        return unread

    def _compare_clauses(self, answer: str, truth: str, truth_read: Answer) -> bool:
        """Whether every value that the clauses of a sentence state is the truth, and every rounded
        one that of the first."""
        values = values_in_clauses(answer)
        truth_value = answers.unlabelled(truth_read)
        is_bare = isinstance(truth_value, Quantity) and not truth_value.unit
        if not values or (not is_bare and any(value.has_noun for value in values)):
            return False
        exact = values[0].text
        for value in values:
            if value.is_rounded:
                agrees = self.compare_texts(exact, value.text, extracted=True)
            else:
                agrees = self.compare_texts(value.text, truth, extracted=True)
            if not agrees:
                return False
        return True

    def compare_answers(self, answer: Answer, truth: Answer) -> bool | None:
        """Whether an answer equals the truth; None where that cannot be decided."""
        if isinstance(answer, Family) or isinstance(truth, Family):
            return self._compare_families(answer, truth)
        if isinstance(answer, Labelled) or isinstance(truth, Labelled):
            return self._compare_labelled(answer, truth)
        if isinstance(answer, About) or isinstance(truth, About):
            return self._compare_approximations(answer, truth)
        if isinstance(answer, Quantity) and isinstance(truth, Quantity):
            return self._compare_quantities(answer, truth)
        if isinstance(answer, Words) and isinstance(truth, Words):
            return answer.text == truth.text
        self._reach("structured")
        if isinstance(answer, Words) and isinstance(truth, Quantity):
            return self._is_product_of_letters(answer, truth)
        if isinstance(answer, Quantity) and isinstance(truth, Words):
            return self._is_product_of_letters(truth, answer)
        if isinstance(answer, Clock) and isinstance(truth, Clock):
            return _same_time(answer, truth)
        if isinstance(answer, Relation) and isinstance(truth, Relation):
            return self._compare_relations(answer, truth)
        if isinstance(answer, Relation) and isinstance(truth, Quantity) and _states_value(answer):
            return self._compare_quantities(Quantity(answer.right, answer.unit), truth)
        if isinstance(answer, Region) or isinstance(truth, Region):
            return _same_region(answer, truth)
        if isinstance(answer, Listing | Matrix) or isinstance(truth, Listing | Matrix):
            return self._compare_structures(answer, truth)
        return False

    def compare_values(self, a: Node, b: Node) -> bool | None:
        """Whether two trees have equal values.

        The comparison is exact where both are rational, else by evaluation at points.
        """
        if is_rational(a) and is_rational(b):
            self._reach("rational")
            return self._note_bounds(a, b, equal_values(a, b))
        self._reach("symbolic")
        if "i" in subtrees(b):
            # Code writes the imaginary unit as I or j.
            spellings = {"I", "j"} - variables(b)
            a = substitute(a, dict.fromkeys(spellings, "i"))
        return None if self.fast else self._note_bounds(a, b, equal_values(a, b))

    def _note_bounds(self, a: Node, b: Node, equal: bool | None) -> bool | None:
        """The verdict; `undecided` is set where the size of two numbers prevented one."""
        if equal is None and is_beyond_bounds(a, b):
            self.undecided = True
        return equal

    def _reach(self, stage: str) -> None:
        self.stage = max(self.stage, stage, key=STAGES.index)

    def _rounds_to(self, value: Node, truth: Quantity) -> bool:
        """Whether a value is within half a unit of the last place of a decimal number."""
        is_exact = is_rational(value)
        stage = "rational" if is_exact else "symbolic"
        self._reach(stage)
        if self.fast and not is_exact:
            return False
        with suppress(Refused):
            return rounds_to(value, truth.value, truth.decimals)
        return False

    def _is_product_of_letters(self, words: Words, quantity: Quantity) -> bool:
        """Whether a word such as vT is the product of the letters in an expression, v * T."""
        letters = words.written
        names = {name for name in subtrees(quantity.value) if isinstance(name, str)}
        is_of_letters = 2 <= len(letters) <= 4 and names and set(letters) == names
        if not is_of_letters or quantity.unit:
            return False
        product: Node = letters[0]
        for letter in letters[1:]:
            product = ("*", product, letter)
        return self.compare_values(product, quantity.value) is True

    def _compare_families(self, answer: Answer, truth: Answer) -> bool | None:
        """One side at least has an integer parameter, such as k in π/4 + kπ.

        Two sets of progressions are compared by their numbers, if the truth says that its parameter
        is an integer. The answer may leave that out.
        """
        inner_answer = answer.answer if isinstance(answer, Family) else answer
        inner_truth = truth.answer if isinstance(truth, Family) else truth
        equal = self.compare_answers(inner_answer, inner_truth)
        families = [side for side in (answer, truth) if isinstance(side, Family)]
        if len({family.is_integer for family in families}) > 1:
            return False
        if not families[0].is_integer and (_is_of_classes(answer) or _is_of_classes(truth)):
            return False
        if equal or self.fast or not families[0].is_integer:
            return equal
        if _labels_differ(inner_answer, inner_truth):
            return equal
        parameter = _only_name(inner_answer)
        if isinstance(answer, Family):
            parameter = answer.parameter
        if isinstance(truth, Family) and answers.is_interval(answers.unlabelled(inner_truth)):
            return self._compare_periodic_intervals(Family(inner_answer, parameter), truth)
        answer_numbers = progressions(inner_answer, parameter)
        # A truth without a parameter may be a class of numbers, such as 3 modulo 7.
        truth_parameter = truth.parameter if isinstance(truth, Family) else ""
        truth_numbers = progressions(inner_truth, truth_parameter)
        if not answer_numbers or not truth_numbers:
            return equal
        self._reach("symbolic")
        return same_progressions(answer_numbers, truth_numbers)

    def _compare_periodic_intervals(self, answer: Family, truth: Family) -> bool | None:
        """Whether two families of intervals hold the same: of one width, from the same numbers."""
        interval = answers.unlabelled(answer.answer)
        true_interval = answers.unlabelled(truth.answer)
        if not answers.is_interval(interval) or not answers.is_interval(true_interval):
            return False
        if not are_quantities(interval.parts) or not are_quantities(true_interval.parts):
            return False
        low, high = interval.parts
        true_low, true_high = true_interval.parts
        width = ("-", high.value, low.value)
        true_width = ("-", true_high.value, true_low.value)
        if interval.kind != true_interval.kind or not self.compare_values(width, true_width):
            return False
        return self._compare_families(answer._replace(answer=low), truth._replace(answer=true_low))

    # --- labels and approximations ----------------------------------------------------------------

    def _compare_labelled(self, answer: Answer, truth: Answer) -> bool | None:
        """One side at least is labelled; the other may lack the label, or be an equation."""
        if isinstance(answer, Labelled) and isinstance(truth, Relation):
            return self._compare_relations(_as_relation(answer), truth)
        if isinstance(truth, Labelled) and isinstance(answer, Relation):
            # The truth must be a formula, y = 2x + 1, and not a solution, x = 5.
            is_formula = isinstance(truth.answer, Quantity) and variables(truth.answer.value)
            return bool(is_formula) and self._compare_relations(answer, _as_relation(truth))
        labels = {side.label for side in (answer, truth) if isinstance(side, Labelled)}
        # Labels in words may differ: "the answer", "total cost".
        if len(labels) > 1 and not any(map(_is_word, labels)):
            return False
        equal = self.compare_answers(answers.unlabelled(answer), answers.unlabelled(truth))
        if equal or self.fast or not _is_of_classes(truth):
            return equal
        # x ≡ 2 (mod 5) is x = 5k + 2, and x ≡ 2, 7 (mod 10).
        parameter = _only_name(answer)
        numbers = () if parameter in labels else progressions(answer, parameter)
        return bool(numbers) and same_progressions(numbers, progressions(truth, ""))

    def _compare_approximations(self, answer: Answer, truth: Answer) -> bool | None:
        """One side at least is marked as an approximation.

        An approximate answer is right only where the truth may be one as well.
        """
        truth_is_rounded = isinstance(truth, About)
        answer = _without_about(answer)
        truth = _without_about(truth)
        if not (isinstance(answer, Quantity) and isinstance(truth, Quantity)):
            return truth_is_rounded and self.compare_answers(answer, truth)
        if not truth_is_rounded:
            return truth.decimals > 0 and self._compare_quantities(answer, truth)
        if self._compare_quantities(answer, truth):
            return True
        return _units_agree(answer, truth) and self._rounds_to(answer.value, truth)

    # --- quantities and relations -----------------------------------------------------------------

    def _compare_quantities(self, answer: Quantity, truth: Quantity) -> bool | None:
        """Whether two quantities are equal: exactly equal values, of units that agree.

        A unit may be missing on one side but must not differ. 50% is 50% and 0.5, and also 50: the
        sign may be missing on one side, the factor may not. An angle in degrees equals its value in
        radians. A ground truth such as 3.14 may be rounded: a value with more digits, or without an
        end, that rounds to it is right.
        """
        if not _units_agree(answer, truth):
            if answer.unit and truth.unit and (factor := conversion(answer.unit, truth.unit)):
                return self.compare_values(("*", answer.value, factor), truth.value)
            if {answer.unit, truth.unit} == {"degree", "radian"}:
                return self._compare_in_unit("degree", _DEGREE, answer, truth)
            return self._is_symbol_for_unit(answer, truth)
        if answers.modulus(answer):
            return _same_residue(answer, truth)
        equal = self.compare_values(answer.value, truth.value)
        units = (answer.unit, truth.unit)
        if equal and set(units) == {"", "%"} and _is_below_one(truth.value):
            return False  # 0.25 may be 25 %, so no sign is missing
        if equal:
            return True
        if answer.unit == truth.unit:
            return self._is_more_exact(answer, truth) or equal
        if "%" in units:
            if truth.unit == "%" and answer.unit == "":
                percent = answer._replace(value=("/", answer.value, _PERCENT))
                if self._is_more_exact(percent, truth):
                    return True
            return self._compare_in_unit("%", _PERCENT, answer, truth)
        if "degree" in units and _has_radians(("+", answer.value, truth.value)):
            return self._compare_in_unit("degree", _DEGREE, answer, truth)
        if self._is_symbol_for_unit(answer, truth) or self._is_more_exact(answer, truth):
            return True
        return equal

    def _compare_in_unit(
        self, unit: str, factor: Node, answer: Quantity, truth: Quantity
    ) -> bool | None:
        """Whether the values are equal after those in `unit` are multiplied by its factor."""

        def convert(quantity: Quantity) -> Node:
            if quantity.unit == unit:
                return ("*", quantity.value, factor)
            return quantity.value

        return self.compare_values(convert(answer), convert(truth))

    def _is_more_exact(self, answer: Quantity, truth: Quantity) -> bool:
        """Whether the answer is the more exact value of a truth that may be rounded."""
        if truth.decimals < _ROUNDED_DECIMALS or truth.digits < _ROUNDED_DIGITS:
            return False
        is_endless = not isinstance(answer.value, Fraction) and not terminates(answer.value)
        is_longer = answer.decimals > truth.decimals and truth.digits >= _SHORTENED_DIGITS
        if not (is_endless or is_longer):
            return False
        if isinstance(truth.value, Fraction) and truth.value.denominator < _ROUND_NUMBER:
            return False
        return self._rounds_to(answer.value, truth)

    def _is_symbol_for_unit(self, answer: Quantity, truth: Quantity) -> bool:
        """Whether 5m, which is read as algebra, means the 5 metres of the other side."""
        for algebra, measure in ((answer, truth), (truth, answer)):
            match algebra.value:
                case ("*", Fraction() as number, str(symbol)) if (
                    symbol in quantities.SYMBOLS and not algebra.unit
                ):
                    factor = conversion(quantities.read_unit(symbol), measure.unit)
                    if not factor:
                        return False
                    return self.compare_values(number * factor, measure.value) is True
        return False

    def _compare_relations(self, answer: Relation | None, truth: Relation | None) -> bool | None:
        """Whether one is the other multiplied by a constant, and for < and ≤ by a positive one."""
        if answer is None or truth is None or answer.sign != truth.sign:
            return False
        self._reach("symbolic")
        if self.fast:
            return None
        answer_difference = ("-", answer.left, answer.right)
        truth_difference = ("-", truth.left, truth.right)
        return proportional(answer_difference, truth_difference, positive=answer.sign in "<≤")

    # --- listings and matrices --------------------------------------------------------------------

    def _compare_structures(self, answer: Answer, truth: Answer) -> bool | None:
        """One side at least is a listing or a matrix."""
        if isinstance(answer, Quantity) and _has_unit_vectors(answer):
            vector = _as_vector(answer, _vector_size(truth))
            return vector is not None and self._compare_structures(vector, truth)
        if isinstance(truth, Quantity) and _has_unit_vectors(truth):
            vector = _as_vector(truth, _vector_size(answer))
            return vector is not None and self._compare_structures(answer, vector)
        if isinstance(answer, Matrix) or isinstance(truth, Matrix):
            return self._compare_matrices(answer, truth)
        answer_sum = _as_sum(answer)
        truth_sum = _as_sum(truth)
        if isinstance(answer_sum, Quantity) and isinstance(truth_sum, Quantity):
            # 5 feet 6 inches are 66 inches, and not 66: both carry units.
            has_units = bool(answer_sum.unit and truth_sum.unit)
            return has_units and self._compare_quantities(answer_sum, truth_sum)
        if isinstance(answer, Listing) and isinstance(truth, Listing):
            answer_counts = _counts(answer)
            truth_counts = _counts(truth)
            if answer_counts and truth_counts and self._same_counts(answer_counts, truth_counts):
                return True
        if isinstance(answer, Listing) and isinstance(truth, Listing):
            return self._compare_listings(answer, truth)
        if isinstance(answer, Listing):
            if answer.kind == "or" and isinstance(truth, Quantity):
                # `1/2 or 0.5` is 1/2, but a list of guesses is not one answer.
                is_one_value = self._is_one_value(answer.parts)
                return is_one_value and self.compare_answers(answer.parts[0], truth)
            if member := _only_member(answer):
                return self.compare_answers(member, truth)
            return self._compare_ratio_with_number(answer, truth)
        if isinstance(truth, Listing):
            if member := _only_member(truth):
                return self.compare_answers(answer, member)
            return self._compare_ratio_with_number(truth, answer)
        return False

    def _same_counts(self, answer: "_Counts", truth: "_Counts") -> bool:
        """Whether as many of each are counted: 10 chickens and 20 rabbits, in any order."""
        if len(answer) != len(truth):
            return False
        for noun, value in truth.items():
            same = [other for other in answer if quantities.same_unit(other, noun)]
            if len(same) != 1 or self.compare_values(answer[same[0]], value) is not True:
                return False
        return True

    def _compare_ratio_with_number(self, listing: Listing, number: Answer) -> bool | None:
        """Whether 3:4 is 3/4."""
        if not (isinstance(number, Quantity) and not number.unit):
            return False
        if listing.kind != ":" or len(listing.parts) != 2 or not are_quantities(listing.parts):
            return False
        top, bottom = listing.parts
        return self.compare_values(("/", top.value, bottom.value), number.value)

    def _is_one_value(self, parts: Sequence[Answer]) -> bool:
        """Whether all parts are the same quantity in different forms, as 60 seconds and 1 minute
        are."""
        if not are_quantities(parts):
            return False
        first, *others = parts
        for part in others:
            has_units = bool(part.unit) == bool(first.unit)
            if not has_units or self._compare_quantities(part, first) is not True:
                return False
        return True

    def _compare_listings(self, answer: Listing, truth: Listing) -> bool | None:
        kinds = {answer.kind, truth.kind}
        if kinds == {":"}:
            return self._compare_ratios(answer.parts, truth.parts)
        if "=" in kinds:
            return self._compare_assignments(answer, truth)
        # A longer list without brackets may be an arrangement.
        may_be_arrangement = kinds == {""} and len(truth.parts) > 2
        if kinds <= {"{}", "or", ""} and not may_be_arrangement:
            return self._compare_in_any_order(answer.parts, truth.parts)
        same_kind = len(kinds) == 1 or kinds == {"⟨⟩", "()"}
        return same_kind and self._compare_in_order(answer.parts, truth.parts)

    def _compare_ratios(self, answer: Sequence[Answer], truth: Sequence[Answer]) -> bool | None:
        """a : b : ... is c : d : ... where b c = d a, and so on."""
        if len(answer) != len(truth) or not are_quantities(answer) or not are_quantities(truth):
            return False
        first_answer, *answer_rest = (part.value for part in answer)
        first_truth, *truth_rest = (part.value for part in truth)
        return _all(
            self.compare_values(("*", a, first_truth), ("*", t, first_answer))
            for a, t in zip(answer_rest, truth_rest, strict=True)
        )

    def _compare_assignments(self, answer: Listing, truth: Listing) -> bool | None:
        """`x = 1, y = 2` is itself in any order, and (1, 2), the values in the order of the
        names."""
        if answer.kind == truth.kind:
            return self._compare_labelled_parts(_labelled_parts(answer), _labelled_parts(truth))
        labelled, other = (answer, truth) if answer.kind == "=" else (truth, answer)
        stems = {part.label.partition("_")[0] for part in _labelled_parts(labelled)}
        if len(stems) == 1 and other.kind in ("{}", "or", ""):
            return self._compare_in_any_order(answer.parts, truth.parts)
        if other.kind not in ("()", ""):
            return False
        ordered = sorted(_labelled_parts(labelled), key=lambda part: part.label)
        if labelled is answer:
            return self._compare_in_order(ordered, truth.parts)
        return self._compare_in_order(answer.parts, ordered)

    def _compare_labelled_parts(
        self, answer: Sequence[Labelled], truth: Sequence[Labelled]
    ) -> bool | None:
        """Whether every label has the same value; x_1, x_2, ... only number the values."""
        values = {part.label: part.answer for part in answer}
        if len(answer) != len(truth) or values.keys() != {part.label for part in truth}:
            return False
        if all(part.label.startswith("x_") for part in truth):
            truths = [part.answer for part in truth]
            return self._compare_in_any_order(list(values.values()), truths)
        return _all(self.compare_answers(values[part.label], part.answer) for part in truth)

    def _compare_matrices(self, answer: Answer, truth: Answer) -> bool | None:
        """Cell by cell; a vector also as a tuple, a matrix also as a list of lists."""
        answer_rows = _rows(answer)
        truth_rows = _rows(truth)
        if answer_rows is None or truth_rows is None:
            return False
        if not (isinstance(answer, Matrix) and isinstance(truth, Matrix)):
            answer_rows = _as_row(answer_rows)
            truth_rows = _as_row(truth_rows)
        if [len(row) for row in answer_rows] != [len(row) for row in truth_rows]:
            return False
        return _all(map(self._compare_in_order, answer_rows, truth_rows))

    def _compare_in_order(self, answer: Sequence[Answer], truth: Sequence[Answer]) -> bool | None:
        return len(answer) == len(truth) and _all(map(self.compare_answers, answer, truth))

    def _compare_in_any_order(
        self, answer: Sequence[Answer], truth: Sequence[Answer]
    ) -> bool | None:
        if len(answer) != len(truth):
            return False
        if len(answer) > 4 and any(map(_is_unordered, (*answer, *truth))):
            return None  # matching a set of sets takes a power of their sizes
        unmatched = list(truth)
        for part in answer:
            index = self._first_equal(part, unmatched)
            if index is None:
                return False
            del unmatched[index]
        return True

    def _first_equal(self, part: Answer, truths: Sequence[Answer]) -> int | None:
        """The index of the first truth that an answer equals."""
        for index, truth in enumerate(truths):
            if self.compare_answers(part, truth):
                return index
        return None


# --- three-valued logic ---------------------------------------------------------------------------


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """False if any verdict is, else None if any is; stops at the first that is False."""
    result: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        result = result and verdict
    return result


# --- labels, approximations and relations ---------------------------------------------------------


def _is_word(label: str) -> bool:
    return len(label) > 2 and label[:3].isalpha()


def _without_about(answer: Answer) -> Answer:
    return answer.answer if isinstance(answer, About) else answer


# The functions of an angle, a vector or a complex number that have a name of their own.
_NAMED_FUNCTIONS = (*TRIGONOMETRIC, "abs")


def _has_clause(answer: Answer) -> bool:
    """Whether an answer is a value and words after a comma, as `12, the number of ways`, or has an
    equation, as `2x = 10, x = 5`."""
    if not isinstance(answer, Listing) or answer.kind not in ("", "or"):
        return False
    if any(isinstance(part, Relation) for part in answer.parts):
        return True
    first, *others = answer.parts
    return not isinstance(first, Words) and any(isinstance(part, Words) for part in others)


def _states_value(equation: Relation) -> bool:
    """Whether an equation says what its left side is, as m + n = 113, AB^2 = 25 and |z| = 5 do.

    An equation in one unknown, such as 2x = 10 or x^2 - 5x = -6, is to be solved: its right side is
    no answer. Of one name, other than the unknown x, only a power, a function of an angle, or an
    absolute value is a quantity of its own.
    """
    if equation.sign != "=" or variables(equation.right):
        return False
    names = variables(equation.left) - {"f", "g", "h"}  # functions: f(1) + f(2) = 7
    if len(names) != 1:
        return len(variables(equation.left)) > 0
    if names == {"x"}:
        return False
    match equation.left:
        case ("^", base, Fraction() as exponent):
            return exponent.denominator == 1 and (isinstance(base, str) or _is_named(base))
    return _is_named(equation.left)


def _is_named(node: Node) -> bool:
    return isinstance(node, tuple) and node[0] in _NAMED_FUNCTIONS


def _is_of_classes(answer: Answer) -> bool:
    """Whether an answer is a class of numbers, such as 3 modulo 7, or a list of classes."""
    answer = answers.unlabelled(answer)
    parts = answer.parts if isinstance(answer, Listing) else (answer,)
    return all(isinstance(part, Quantity) and answers.is_class(part) for part in parts)


def _labels_differ(answer: Answer, truth: Answer) -> bool:
    if isinstance(answer, Labelled) and isinstance(truth, Labelled):
        return answer.label != truth.label
    return False


def _only_name(answer: Answer) -> str:
    """The one variable of an answer; "" where it has none or several."""
    answer = answers.unlabelled(answer)
    parts = answer.parts if isinstance(answer, Listing) else (answer,)
    names: set[str] = set()
    for part in map(answers.unlabelled, parts):
        if isinstance(part, Quantity):
            names |= variables(part.value)
    return names.pop() if len(names) == 1 else ""


def _as_relation(answer: Labelled) -> Relation | None:
    """`y = 2x + 1` as an equation of its two sides."""
    if isinstance(answer.answer, Quantity) and len(answer.label) == 1:
        return Relation("=", answer.label, answer.answer.value)
    return None


# --- units, times and regions ---------------------------------------------------------------------


def _units_agree(answer: Quantity, truth: Quantity) -> bool:
    """Whether the units are the same, or one is missing.

    A remainder modulo n equals a number only if the truth has that unit. The solutions of a
    congruence are numbers of a class, which no single number states.
    """
    moduli = (answers.modulus(answer), answers.modulus(truth))
    if any(moduli):
        return moduli[0] == moduli[1] or not (moduli[0] or answers.is_class(truth))
    return not answer.unit or not truth.unit or quantities.same_unit(answer.unit, truth.unit)


def _same_residue(answer: Quantity, truth: Quantity) -> bool:
    """Whether two numbers differ by a multiple of the modulus that both have as their unit."""
    with suppress(Refused):
        difference = whole_number(("-", answer.value, truth.value))
        return difference % answers.modulus(answer) == 0
    return False


def _has_radians(value: Node) -> bool:
    """Whether a tree has π or an arc function, whose values are in radians."""
    for tree in subtrees(value):
        operation = tree[0] if isinstance(tree, tuple) else tree
        if operation == r"\pi" or str(operation).startswith("arc"):
            return True
    return False


def _is_below_one(value: Node) -> bool:
    with suppress(Refused):
        return bool(0 < abs(real_value(value)) < 1)
    return False


def _same_time(answer: Clock, truth: Clock) -> bool:
    """The same time of day; without am or pm the same position on the dial, unless the other counts
    to 24."""
    if answer.half == truth.half or (answer.half and truth.half):
        return answer.seconds == truth.seconds
    if "24" in (answer.half, truth.half):
        return False
    return answer.seconds % _HALF_DAY == truth.seconds % _HALF_DAY


def _same_region(answer: Answer, truth: Answer) -> bool:
    with suppress(Refused):
        return answers.as_region(answer) == answers.as_region(truth)
    return False


# --- structures -----------------------------------------------------------------------------------

_Rows = Sequence[Sequence[Answer]]
_Counts = dict[str, Node]  # noun or unit -> how many of it


def _as_sum(answer: Answer) -> Answer:
    """The sum of `5 feet 6 inches`; any other answer as it is."""
    if isinstance(answer, Listing):
        return total(answer) or answer
    return answer


def _counts(listing: Listing) -> _Counts:
    """How many of what a listing counts: `10 chickens and 20 rabbits`, `chickens: 10, rabbits: 20`.

    {} where a part has no noun, or two parts have the same.
    """
    counts: _Counts = {}
    for part in listing.parts:
        value = answers.unlabelled(part)
        if not isinstance(value, Quantity):
            return {}
        noun = value.unit
        if isinstance(part, Labelled):
            if noun or not _is_word(part.label):
                return {}
            noun = quantities.read_unit(part.label) or part.label.lower()
        if not noun or noun in counts:
            return {}
        counts[noun] = value.value
    return counts if listing.kind in ("", "or", "+", "=") else {}


def _labelled_parts(listing: Listing) -> list[Labelled]:
    """The parts of a listing of the kind "=", which are all labelled."""
    return [part for part in listing.parts if isinstance(part, Labelled)]


def _only_member(listing: Listing) -> Quantity | None:
    """The 5 of {5}; None for other listings: {∅} is not ∅."""
    if listing.kind != "{}" or len(listing.parts) != 1:
        return None
    member = listing.parts[0]
    return member if isinstance(member, Quantity) else None


def _is_unordered(answer: Answer) -> bool:
    return isinstance(answer, Listing) and answer.kind in ("{}", "or")


def _rows(answer: Answer) -> _Rows | None:
    """The rows of a matrix, of a list of lists, or of a vector written as a tuple."""
    if isinstance(answer, Matrix):
        return answer.rows
    if not isinstance(answer, Listing) or answer.kind not in ("()", "[]", "⟨⟩", "{}"):
        return None
    rows = [part for part in answer.parts if isinstance(part, Listing)]
    if not rows:
        return None if answer.kind == "{}" else (answer.parts,)
    shapes = {(row.kind, len(row.parts)) for row in rows}
    if len(rows) != len(answer.parts) or len(shapes) != 1:
        return None
    return [row.parts for row in rows]


def _as_row(rows: _Rows) -> _Rows:
    """A column as a row; other rows as they are."""
    if len(rows) == 1 or len(rows[0]) > 1:
        return rows
    return list(zip(*rows, strict=True))


def _has_unit_vectors(quantity: Quantity) -> bool:
    return not variables(quantity.value).isdisjoint(_UNIT_VECTORS)


def _vector_size(answer: Answer) -> int:
    """The number of components that a vector must have to equal an answer; 0 if none can."""
    if isinstance(answer, Listing):
        return len(answer.parts)
    if isinstance(answer, Matrix):
        return max(len(answer.rows), len(answer.rows[0]))
    return 0


def _as_vector(answer: Quantity, size: int) -> Listing | None:
    """The components of `2i + 3j` in two or three unit vectors; None for other sizes."""
    if size not in (2, 3):
        return None
    zero: dict[str, Node] = dict.fromkeys(_UNIT_VECTORS, Fraction(0))
    origin = substitute(answer.value, zero)
    components = []
    for unit_vector in _UNIT_VECTORS[:size]:
        end = substitute(answer.value, zero | {unit_vector: Fraction(1)})
        components.append(Quantity(("-", end, origin)))
    return Listing("⟨⟩", tuple(components))
