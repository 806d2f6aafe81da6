"""The values of expression trees, and whether two trees have equal values.

A value is an exact fraction (`fmpq`) as long as everything is rational, and otherwise a ball: a
real (`arb`) or complex (`acb`) number of FLINT with a rigorous bound on its error (Johansson 2017,
"Arb: efficient arbitrary-precision midpoint-radius interval arithmetic", IEEE Trans. Comput.
66(8)). If the difference of two balls excludes zero, their values differ for certain. An argument
`field` is `arb` or `acb`, the type of all balls in a computation. The size of a number is bounded
before the number is computed.
"""

import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import flint
from flint import acb, arb, fmpq, fmpz

from alignment.rewards.grading.expressions import (
    PAIRED,
    TRIGONOMETRIC,
    Node,
    Refused,
    is_rational,
    subtrees,
    variables,
)
from alignment.rewards.grading.residues import equal_residues

MAX_BITS = 4000  # of an exact numerator or denominator in any intermediate value
# Bits of a ball's number. All threads of the process share this setting, so it is never changed.
flint.ctx.prec = 1024

# Expressions with variables are compared at points, each of which gives every variable a number.
NEAR_POINTS = 12  # Near points, whose numbers are below 4, come first.
FAR_POINTS = 400  # So many far points at most follow, if the near ones do not decide.
MIN_AGREED = 3  # Two expressions are equal if they agree at so many points at least.
ENOUGH_AGREED = 5  # When they agree at so many, no more points are tried.
_SIZES = [Fraction(2) ** k for k in (-7, -3, 3, 5, 8, 12, 18)]  # of the numbers of far points

# Landmarks are the constants in the two expressions, and their quotients. Branches often end at
# them, as those of |x - 9| do at 9, so far points lie around and between them.
MAX_LANDMARKS = 8  # So many of the largest constants are used, and quotients of half of these.
_LARGEST_LANDMARK = Fraction(2) ** 256
_LANDMARK_DIGITS = 30  # of landmarks that are not rational

# A factorial or binomial of a number that is not whole is computed by the gamma function, which
# takes milliseconds. More of them than this in one comparison are not computed.
MAX_GAMMAS = 8

# A difference below `_NEGLIGIBLE` times the larger value counts as rounding. Values below
# `_NEGLIGIBLE` count as this size, and those above `_LARGE` as that.
_NEGLIGIBLE = arb(2) ** -250
_LARGE = arb(2) ** 50

# Divisible by every number of at most MAX_BITS bits that has no prime factors but 2 and 5.
_POWER_OF_TEN = 10**MAX_BITS

_Value = fmpq | arb | acb


class TooLarge(Refused):
    """A number is beyond the bounds of what is computed."""


def equal_values(a: Node, b: Node) -> bool | None:
    """Whether two trees have equal values. None if this cannot be decided, because they are
    undefined or beyond the bounds.

    Constants are compared once. Expressions with variables are compared at random rational points
    where both are defined (Schwartz 1980, J. ACM 27(4); Zippel 1979): different rational functions
    agree at a generic point by accident only. Some points are negative, because |x|, roots and
    logarithms have another branch there. Far points follow in two cases: if too few near points
    were in the domain, as for sqrt(x - 9), and if a branch may end far out, as for |x - 9|, which
    is 9 - x below 9.
    """
    pair = ("=", a, b)
    gammas = _count_gammas(pair)
    if gammas > MAX_GAMMAS:
        return None
    names = sorted(variables(pair))
    field = arb
    if "i" in subtrees(pair):
        field = acb
    if not names:
        verdict = _equal_at(a, b, {}, field)
        return _equal_beyond_bounds(a, b, field) if verdict is None else verdict

    agreed = 0
    for point in _points(names, seed=repr((a, b))):
        verdict = _equal_at(a, b, point, field)
        if verdict is False:
            return False
        if verdict:
            agreed += 1
        if agreed == ENOUGH_AGREED:
            break

    has_branches = _has_branches(a) or _has_branches(b)
    if agreed == ENOUGH_AGREED and not has_branches:
        return True
    max_points = NEAR_POINTS if gammas else FAR_POINTS
    verdict = _equal_far_out(a, b, agreed, field, max_points)
    if verdict is None and not gammas:
        # One point where they differ, however large they are there, proves that they do.
        point = next(_points(names, seed=repr((a, b))))
        if _equal_beyond_bounds(substitute(a, point), substitute(b, point), field) is False:
            return False
        return equal_residues(a, b, whole_number)
    return verdict


def _equal_beyond_bounds(a: Node, b: Node, field: type) -> bool | None:
    """Whether two constants are equal, of which one has an intermediate value beyond `MAX_BITS`.

    Balls and sizes prove that they differ. Residues decide the rest, for balls of large numbers
    that differ by little overlap: those of 2^5000 and 2^5000 + 1.
    """
    if _equal_at(a, b, {}, field, rounds=True) is False or _huge_and_other(a, b):
        return False
    return equal_residues(a, b, whole_number)


def whole_number(node: Node) -> int:
    """The exact value of a constant that is a whole number. Raises `Refused` for any other."""
    is_real = not variables(node) and "i" not in subtrees(node)
    value = _evaluate(node, {}, arb) if is_real else None
    if not isinstance(value, fmpq) or value.denominator != 1:
        raise Refused("no whole number, or too large a one")
    return int(value.numerator)


def is_beyond_bounds(a: Node, b: Node) -> bool:
    """Whether two trees, which `equal_values` could not compare, have values that are only too
    large or too close for it; false where one of them is undefined, as 1/0 is."""
    names = sorted(variables(("=", a, b)))
    field = arb
    if "i" in subtrees(("=", a, b)):
        field = acb
    point = next(_points(names, seed=repr((a, b)))) if names else {}
    is_too_large = not names
    for node in (a, b):
        try:
            _value(node, point, field, rounds=not names)
        except TooLarge:
            is_too_large = True
        except (Refused, ArithmeticError, OverflowError):
            return False
    return is_too_large


def _equal_far_out(a: Node, b: Node, agreed: int, field: type, max_points: int) -> bool | None:
    """Whether two trees are equal at landmarks and at most `max_points` far points, after near ones
    at which `agreed` values were; None if too few are defined."""
    names = sorted(variables(("=", a, b)))
    landmarks = _landmarks(a, b)
    required_points = 0
    if _has_branches(a) or _has_branches(b):
        # The steps of floors are often at landmarks, so a difference may show there alone. But
        # agreement proves nothing: many different expressions agree at landmarks and nowhere else.
        for point in _points_at(landmarks, names):
            if _equal_at(a, b, point, field) is False:
                return False
        # Every branch must be met, however many points agree. With one variable, the first far
        # points do this: one of every size and sign, one between any two neighbouring landmarks,
        # and one beyond either end.
        required_points = 2 * len(_SIZES) + len(landmarks) + 1

    far_points = itertools.islice(_far_points(names, landmarks, seed=repr((b, a))), max_points)
    for k, point in enumerate(far_points):
        if agreed >= ENOUGH_AGREED and k >= required_points:
            break
        verdict = _equal_at(a, b, point, field)
        if verdict is False:
            return False
        if verdict:
            agreed += 1
    if agreed >= MIN_AGREED:
        return True
    return None


def _count_gammas(node: Node) -> int:
    """The number of factorials and binomials with a variable in them, which the gamma function
    computes."""
    count = 0
    for tree in subtrees(node):
        if isinstance(tree, tuple) and tree[0] in ("!", "binom") and variables(tree):
            count += 1
    return count


def _has_branches(node: Node) -> bool:
    """Whether a tree may be one analytic function on one side of some point, and another one on the
    other side, as |x - 9| is at 9."""
    for tree in subtrees(node):
        if not isinstance(tree, tuple) or not variables(tree):
            continue
        if tree[0] in (*PAIRED, "abs", "floor", "ceil", "arcsin", "arccos", "arctan"):
            return True
        if tree[0] == "^" and not (isinstance(tree[2], Fraction) and tree[2].denominator == 1):
            return True
    return False


def real_value(node: Node) -> arb:
    """The value of a tree without variables. Raises `Refused` if this is not a real number within
    the bounds."""
    if variables(node) or "i" in subtrees(node):
        raise Refused("not a real constant")
    value = _evaluate(node, {}, arb)
    if value is None or isinstance(value, acb):
        raise Refused("undefined")
    return arb(value)


def rounded_value(node: Node) -> Decimal:
    """`real_value`, rounded to 200 digits, which are the same for trees of equal value.

    Raises `Refused` also if the value is not known to 210 digits, because large numbers cancel in
    it, or if its exponent is too large for a decimal number.
    """
    ball = real_value(node)
    size = abs(ball.mid())
    if ball.contains(0):
        if not ball.rad() < _NEGLIGIBLE:
            raise Refused("too large, too small or too uncertain")
        return Decimal(0)
    if not (ball.rad() < size * arb(10) ** -210 and abs(size.log()) < 10**15):
        raise Refused("too large, too small or too uncertain")
    return Decimal(ball.mid().str(200, radius=False))


def terminates(node: Node) -> bool:
    """Whether a tree is rational and its decimal expansion ends; true also for a rational tree
    whose value is beyond the bounds."""
    if not is_rational(node):
        return False
    with suppress(Refused, ArithmeticError):
        value = _value(node, {}, arb)
        # A fraction in lowest terms ends if 2 and 5 are its denominator's only prime factors.
        return isinstance(value, fmpq) and _POWER_OF_TEN % int(value.denominator) == 0
    return True


def rounds_to(value: Node, rounded: Node, decimals: int) -> bool:
    """Whether a constant differs from `rounded`, a number with so many decimals, by less than half
    a unit of its last decimal.

    Raises `Refused` as `real_value` does.
    """
    half_unit = arb(10) ** -decimals / 2
    return bool(abs(real_value(value) - real_value(rounded)) < half_unit)


def proportional(a: Node, b: Node, positive: bool = False) -> bool:
    """Whether two trees with variables differ by a constant factor, which must be positive if
    `positive` is set."""
    names = sorted(variables(a) | variables(b))
    if not names:
        return False
    quotient = ("/", a, b)
    far_points = _far_points(names, _landmarks(a, b), seed=repr((b, a)))
    points = itertools.chain(
        _points(names, seed=repr((a, b))), itertools.islice(far_points, FAR_POINTS)
    )
    # The quotient at one point is the factor, if there is one.
    if "i" in subtrees(quotient):
        if positive:
            return False
        return equal_values(a, ("*", b, substitute(quotient, next(points)))) is True
    for point in points:
        factor = _evaluate(quotient, point, arb)
        if factor is None or isinstance(factor, acb):
            continue  # The quotient is undefined at this point.
        if not positive:
            factor = abs(factor)
        if not factor > 0:
            return False
        return equal_values(a, ("*", b, substitute(quotient, point))) is True
    return False


def substitute(node: Node, point: Mapping[str, Node]) -> Node:
    """The tree with its variables replaced by other trees."""
    if isinstance(node, str):
        return point.get(node, node)
    if isinstance(node, tuple):
        return (node[0], *(substitute(part, point) for part in node[1:]))
    return node


def _points(names: list[str], seed: str) -> Iterator[dict[str, Fraction]]:
    """The near points, of random rational numbers. The seed is the pair of expressions, so that no
    answer can be written to agree at its own points.

    A number is between 1/4 and 1, or between 1 and 4. Half of the points have positive numbers
    only, and a quarter negative ones only.
    """
    rng = random.Random(seed)
    for k in range(NEAR_POINTS):
        values = [Fraction(rng.randrange(101, 199), rng.randrange(201, 399)) for _ in names]
        signs = [_sign_of_point(k, rng) for _ in names]
        point = {}
        for j, name in enumerate(names):
            # Every value is below one, and its inverse above. They take turns: from variable to
            # variable, and after every two points.
            exponent = (-1) ** (j + k // 2)
            point[name] = signs[j] * values[j] ** exponent
        yield point


def _sign_of_point(k: int, rng: random.Random) -> int:
    """The sign of a variable at near point `k`. Of every four points, two have positive signs, one
    has random signs, and one has negative signs."""
    if k % 2 == 0:
        return 1
    if k % 4 == 1:
        return rng.choice((1, -1))
    return -1


def _points_at(landmarks: list[Fraction], names: list[str]) -> Iterator[dict[str, Fraction]]:
    """As many points as there are landmarks. At each point every variable is at another landmark,
    if there are no more variables than landmarks.
    """
    for k in range(len(landmarks)):
        yield {name: landmarks[(k + j) % len(landmarks)] for j, name in enumerate(names)}


def _far_points(
    names: list[str], landmarks: list[Fraction], seed: str
) -> Iterator[dict[str, Fraction]]:
    """The far points, in rounds without end.

    In one round each variable takes every number of `_far_values`. In the first round and every
    second one after it, each variable takes them in a random order of its own. In the other rounds
    all variables take them in the same order, so that all are small, or large, at once.
    """
    rng = random.Random(seed)
    for round_number in itertools.count():
        columns = [_far_values(landmarks, rng) for _ in names]
        if len(names) > 1 and round_number % 2 == 0:
            for column in columns:
                rng.shuffle(column)
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))


def _far_values(landmarks: list[Fraction], rng: random.Random) -> list[Fraction]:
    """Random numbers: one of every size and sign, one between any two neighbouring landmarks, one
    below the lowest and one above the highest, then four close to each landmark."""

    def proper_fraction() -> Fraction:
        """A random number between 0.1 and 0.9."""
        return Fraction(rng.randrange(51, 449), 503)

    values = []
    for size in _SIZES:
        values += [sign * (1 + proper_fraction()) * size for sign in (1, -1)]
    neighbours = itertools.pairwise(landmarks)
    values += [low + proper_fraction() * (high - low) for low, high in neighbours]
    values += [(1 + proper_fraction()) * end for end in (landmarks[0], landmarks[-1])]
    for reach in (Fraction(1, 3), Fraction(1)):
        for sign in (1, -1):
            values += [landmark + sign * reach * proper_fraction() for landmark in landmarks]
    return values


def _landmarks(a: Node, b: Node) -> list[Fraction]:
    """The sorted landmarks of two trees: the largest real constants in them, quotients of these,
    1, all of these with the opposite sign, and 0.

    A constant that is not rational is rounded to `_LANDMARK_DIGITS` digits.
    """
    constant_sizes: list[Fraction] = []
    for constant in (*_constants(a), *_constants(b)):
        size = _size(constant)
        if size and size not in constant_sizes:
            constant_sizes.append(size)
    constant_sizes = sorted(constant_sizes, reverse=True)[:MAX_LANDMARKS]
    largest = constant_sizes[: MAX_LANDMARKS // 2]
    quotients = [top / bottom for top, bottom in itertools.permutations(largest, 2)]
    sizes = {Fraction(1), *constant_sizes, *quotients}
    opposites = {-size for size in sizes}
    return sorted({Fraction(0), *sizes, *opposites})


def _size(constant: Node) -> Fraction | None:
    """The absolute value of a tree without variables; None if this is not a real number, or not
    below `_LARGEST_LANDMARK`."""
    value = _evaluate(constant, {}, arb)
    if isinstance(value, fmpq):
        size = abs(Fraction(int(value.numerator), int(value.denominator)))
    elif isinstance(value, arb):
        size = abs(Fraction(value.mid().str(_LANDMARK_DIGITS, radius=False)))
    else:
        return None
    if size >= _LARGEST_LANDMARK:
        return None
    return size


def _constants(node: Node) -> list[Node]:
    """The constants of a tree: the subtrees without a variable that are in no larger one."""
    if not variables(node):
        return [node]
    constants = []
    if isinstance(node, tuple):
        for part in node[1:]:
            constants += _constants(part)
    return constants


def _equal_at(
    a: Node, b: Node, point: Mapping[str, Fraction], field: type, rounds: bool = False
) -> bool | None:
    """Whether two trees have equal values at a point; None if one is undefined, or if the bounds on
    the errors are too large to decide. `rounds` is that of `_value`.

    False is proved. True is proved up to a difference that `_NEGLIGIBLE` allows.
    """
    at_a = _evaluate(a, point, field, rounds)
    if at_a is None:
        return None
    at_b = _evaluate(b, point, field, rounds)
    if at_b is None:
        return None
    if type(at_a) is type(at_b) is fmpq:
        return at_a == at_b
    ball_a = field(at_a)
    ball_b = field(at_b)
    difference = ball_a - ball_b
    if not difference.contains(0):
        return False
    size = max(ball_a.abs_upper(), ball_b.abs_upper(), _NEGLIGIBLE)
    if difference.abs_upper() < _NEGLIGIBLE * min(size, _LARGE):
        return True
    return None


def _evaluate(
    node: Node, point: Mapping[str, Fraction], field: type, rounds: bool = False
) -> _Value | None:
    """The value of a tree at a point; None if it is undefined in the field or beyond the bounds."""
    try:
        return _value(node, point, field, rounds)
    except (Refused, ArithmeticError, OverflowError):
        return None


def _value(node: Node, point: Mapping[str, Fraction], field: type, rounds: bool = False) -> _Value:
    """The value of a tree at a point. Raises `Refused`, ArithmeticError or OverflowError if it is
    undefined in the field, or beyond the bounds. `rounds` makes a ball of an exact number beyond
    `MAX_BITS`, instead of raising `TooLarge`."""
    if isinstance(node, str):
        if node not in point:
            return _constant(node, field)
        node = point[node]
    if isinstance(node, Fraction):
        return fmpq(node.numerator, node.denominator)
    operation, *operands = node
    values = [_value(operand, point, field, rounds) for operand in operands]
    value = _OPERATIONS[operation](field, *values)
    if isinstance(value, arb | acb) and not value.is_finite():
        # A number that is not real, such as the root of -1, is NaN.
        is_overflow = isinstance(value, arb) and not value.is_nan()
        raise TooLarge("too large") if is_overflow else Refused("undefined")
    if _is_exact(operation, values) and _has_many_bits(value):
        if not rounds:
            raise TooLarge("too large")
        return field(value)
    return value


def _is_exact(operation: str, operands: Sequence[_Value]) -> bool:
    """Whether an operation on these values has an exact fraction as its value."""
    if not all(isinstance(operand, fmpq) for operand in operands):
        return False
    if operation == "^":
        operands = operands[1:]
    elif operation not in ("!", "binom"):
        return operation in ("+", "-", "*", "/")
    return all(operand.denominator == 1 for operand in operands)  # pyright: ignore[reportAttributeAccessIssue]


def _has_many_bits(value: _Value) -> bool:
    """Whether an exact value is beyond `MAX_BITS`, which a ball in its place shows too."""
    if not isinstance(value, fmpq):
        return True
    return max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS


_HUGE_EXPONENT = arb(2) ** 64
_BELOW_HUGE = arb(2) ** 2**60


def _is_huge(node: Node) -> bool:
    """Whether a constant is for certain above `_BELOW_HUGE`, as the tower 9^9^9^9 is. False also
    where that is not seen."""
    match node:
        case ("^", base, exponent):
            value = _real_or_none(base)
            is_above_one = _is_huge(base) or (value is not None and value > 1.25)
            return is_above_one and _is_huge_exponent(exponent)
        case ("exp" | "!", operand):
            return _is_huge_exponent(operand)
        case ("*" | "+", a, b):
            return (_is_huge(a) and _is_at_least_one(b)) or (_is_huge(b) and _is_at_least_one(a))
    return False


def _is_huge_exponent(node: Node) -> bool:
    value = _real_or_none(node)
    return _is_huge(node) if value is None else bool(value > _HUGE_EXPONENT)


def _is_at_least_one(node: Node) -> bool:
    value = _real_or_none(node)
    return _is_huge(node) if value is None else bool(value >= 1)


def _real_or_none(node: Node) -> arb | None:
    value = None if "i" in subtrees(node) else _evaluate(node, {}, arb, rounds=True)
    return None if value is None or isinstance(value, acb) else arb(value)


def _huge_and_other(a: Node, b: Node) -> bool:
    """Whether one of two constants is huge, and the other one for certain is not."""
    for large, small in ((a, b), (b, a)):
        value = _real_or_none(small)
        if value is not None and abs(value) < _BELOW_HUGE and _is_huge(large):
            return True
    return False


def _constant(name: str, field: type) -> _Value:
    r"""The value of \pi, e or i."""
    if name == r"\pi":
        return field(arb.pi())
    if name == "e":
        return field(1).exp()
    if field is arb:
        raise Refused("not real")
    return acb(0, 1)


def _arithmetic(operation: Callable[[Any, Any], Any]) -> Callable[..., _Value]:
    """An operation on two values, exact where both are fractions."""

    def compute(field: type, a: _Value, b: _Value) -> _Value:
        if type(a) is type(b):
            return operation(a, b)
        return operation(field(a), field(b))

    return compute


def _function(name: str) -> Callable[..., _Value]:
    """A function of one value, by its name in FLINT."""

    def compute(field: type, x: _Value) -> _Value:
        return getattr(field(x), name)()

    return compute


def _power(field: type, base: _Value, exponent: _Value) -> _Value:
    """The real power if there is one: (-8)^(1/3) is -2.

    A negative base has a real power if the exponent is a fraction with an odd denominator: that of
    its absolute value, with a minus sign if the numerator is odd too.
    """
    if base == 0:
        if not (isinstance(exponent, fmpq) and exponent > 0):
            raise Refused("undefined")
        return fmpq(0)
    if isinstance(exponent, fmpq):
        top = exponent.numerator
        bottom = exponent.denominator
        if bottom == 1 and isinstance(base, fmpq):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(top) * bits > MAX_BITS and abs(base) != 1:
                return field(base) ** field(exponent)
            # A power of 1 or -1 repeats after two exponents.
            return base ** int(top if abs(base) != 1 else top % 2)
        if bottom > 1 and bottom % 2 and isinstance(base, fmpq | arb) and base < 0:
            sign = 1
            if top % 2:
                sign = -1
            return (field(-base) ** field(exponent)) * sign
    return field(base) ** field(exponent)


def _factorial(field: type, x: _Value) -> _Value:
    """x!, which is gamma(x + 1) if x is not whole."""
    if isinstance(x, fmpq) and x.denominator == 1:
        # 4000! has more than MAX_BITS bits, but takes 0.1 ms only, and a binomial may divide it by
        # a number of its size.
        if x < 0:
            raise Refused("undefined")
        if x > 4000:
            return (field(x) + 1).gamma()
        number = int(x.numerator)
        # The type stub wrongly declares this static method as one of an instance.
        return fmpq(fmpz.fac_ui(number))  # pyright: ignore[reportArgumentType]
    if not field(x).abs_upper() < 1000:
        raise Refused("too large")
    return field(x + 1).gamma()


def _double_factorial(field: type, x: _Value) -> _Value:
    """x!! = x (x - 2) (x - 4) ... of a whole number, which ends in 2 or 1."""
    if not (isinstance(x, fmpq) and x.denominator == 1 and 0 <= x <= 4000):
        raise Refused("too large, or undefined")
    # The type stub wrongly declares this static method as one of an instance.
    return fmpq(fmpz(_product_down(int(x.numerator))))


def _product_down(number: int) -> int:
    return math.prod(range(number, 1, -2))


def _of_whole_numbers(operation: Callable[[int, int], int]) -> Callable[..., _Value]:
    """An operation on two whole numbers."""

    def compute(field: type, a: _Value, b: _Value) -> _Value:
        for number in (a, b):
            if not isinstance(number, fmpq) or number.denominator != 1:
                raise Refused("not whole")
        return fmpq(operation(int(a.numerator), int(b.numerator)))  # pyright: ignore[reportAttributeAccessIssue]

    return compute


def _extreme(is_maximum: bool) -> Callable[..., _Value]:
    """The larger or the smaller of two real numbers, where their balls tell them apart."""

    def compute(field: type, a: _Value, b: _Value) -> _Value:
        if isinstance(a, acb) or isinstance(b, acb):
            raise Refused("not real")
        if a == b:
            return a
        is_larger = a > b
        if not is_larger and not a < b:
            raise Refused("not decided")
        return a if is_larger == is_maximum else b

    return compute


def _binomial(field: type, n: _Value, k: _Value) -> _Value:
    return _factorial(field, n) / (_factorial(field, k) * _factorial(field, n - k))


def _rounded(name: str, field: type, x: _Value) -> _Value:
    """The floor or ceiling of a real number, by its name in FLINT."""
    if field is acb and not isinstance(x, fmpq):
        raise Refused("not real")
    return type(x)(getattr(x, name)())


_OPERATIONS: dict[str, Callable[..., _Value]] = {
    "+": _arithmetic(operator.add),
    "-": _arithmetic(operator.sub),
    "*": _arithmetic(operator.mul),
    "/": _arithmetic(operator.truediv),
    "^": _power,
    "!": _factorial,
    "!!": _double_factorial,
    "gcd": _of_whole_numbers(math.gcd),
    "lcm": _of_whole_numbers(math.lcm),
    "max": _extreme(is_maximum=True),
    "min": _extreme(is_maximum=False),
    "binom": _binomial,
    "abs": lambda field, x: abs(x),
    "floor": partial(_rounded, "floor"),
    "ceil": partial(_rounded, "ceil"),
    "ln": _function("log"),
    **{name: _function(name) for name in (*TRIGONOMETRIC, "exp", "sinh", "cosh", "tanh")},
    **{f"arc{name}": _function(f"a{name}") for name in ("sin", "cos", "tan")},
}
