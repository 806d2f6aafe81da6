"""The values of expression trees, and whether two trees have equal values.

Values are exact fractions as long as everything is rational, and otherwise balls: FLINT's real and
complex numbers with a rigorous bound on their error (Johansson 2017, "Arb: efficient
arbitrary-precision midpoint-radius interval arithmetic", IEEE Trans. Comput. 66(8)). A ball that
excludes zero proves a difference. Every size is bounded before it is computed.
"""

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import flint
from flint import acb, arb, fmpq, fmpz

from alignment.rewards.grading.expressions import (
    TRIGONOMETRIC,
    Node,
    Refused,
    is_rational,
    subtrees,
    variables,
)

MAX_BITS = 4000  # of an exact numerator or denominator in any intermediate value
# Bits of balls. All threads of the process share this setting: it is set once and never changed.
flint.ctx.prec = 1024

NEAR_POINTS = 12  # at most, of numbers below 4, at which expressions with variables are compared
FAR_POINTS = 400  # at most, further out and around the constants, where the near ones leave it open
ENOUGH = 3  # points at which both sides are defined and agree
AGREED = 5  # points after which no more are tried
LANDMARKS = 8  # at most, constants around which far points are chosen; quotients of half are added
_SIZES = [Fraction(2) ** k for k in (-7, -3, 3, 5, 8, 12, 18)]  # of far points
_LARGEST_LANDMARK = Fraction(2) ** 256
_LANDMARK_DIGITS = 30
MAX_GAMMAS = 8  # a factorial or binomial of a number that is not whole takes milliseconds

# A difference below this, between values below _LARGE, counts as rounding.
_NEGLIGIBLE = arb(2) ** -250
_LARGE = arb(2) ** 50

_POWER_OF_TEN = 10**MAX_BITS

_Value = fmpq | arb | acb


def equal_values(a: Node, b: Node) -> bool | None:
    """Whether two trees have equal values; None where that cannot be decided.

    That is where they are undefined or out of bounds. Constants are compared once, expressions with
    variables at random rational points (Schwartz 1980, J. ACM 27(4); Zippel 1979), also negative
    ones, at which both are defined: distinct rational functions agree at a generic point by
    accident only, and the real branches of |x|, roots and logarithms differ in sign. Points further
    out follow where too few of the first ones are in the domain, as for sqrt(x - 9), and where a
    branch may end far out, as for |x - 9|, which is 9 - x up to there.
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
        return _equal_at(a, b, {}, field)

    agreed = 0
    for point in _points(names, seed=repr((a, b))):
        verdict = _equal_at(a, b, point, field)
        if verdict is False:
            return False
        if verdict:
            agreed += 1
        if agreed == AGREED:
            break

    has_branches = _has_branches(a) or _has_branches(b)
    if agreed == AGREED and not has_branches:
        return True
    landmarks = _landmarks(a, b)
    most_branches = 0
    if has_branches:
        # At the landmarks, floors step. Many a pair agrees there and nowhere else, so they prove
        # differences alone.
        for point in _points_at(landmarks, names):
            if _equal_at(a, b, point, field) is False:
                return False
        # Far points begin with one of every size, between all landmarks, and beyond the outermost.
        most_branches = 2 * len(_SIZES) + len(landmarks) + 1

    most_points = FAR_POINTS
    if gammas:
        most_points = NEAR_POINTS
    far_points = itertools.islice(_far_points(names, landmarks, seed=repr((b, a))), most_points)
    for k, point in enumerate(far_points):
        if agreed >= AGREED and k >= most_branches:
            break
        verdict = _equal_at(a, b, point, field)
        if verdict is False:
            return False
        if verdict:
            agreed += 1
    if agreed >= ENOUGH:
        return True
    return None


def _count_gammas(node: Node) -> int:
    """The number of factorials and binomials with a variable in them."""
    count = 0
    for tree in subtrees(node):
        if isinstance(tree, tuple) and tree[0] in ("!", "binom") and variables(tree):
            count += 1
    return count


def _has_branches(node: Node) -> bool:
    """Whether a tree is made of different analytic pieces on the two sides of some place, which may
    be anywhere."""
    for tree in subtrees(node):
        if not isinstance(tree, tuple) or not variables(tree):
            continue
        if tree[0] in ("abs", "floor", "ceil", "arcsin", "arccos", "arctan"):
            return True
        if tree[0] == "^" and not (isinstance(tree[2], Fraction) and tree[2].denominator == 1):
            return True
    return False


def real_value(node: Node) -> arb:
    """The value of a constant tree. Raises `Refused` where it is not a real number within
    bounds."""
    if variables(node) or "i" in subtrees(node):
        raise Refused("not a real constant")
    value = _evaluate(node, {}, arb)
    if value is None or isinstance(value, acb):
        raise Refused("undefined")
    return arb(value)


def rounded_value(node: Node) -> Decimal:
    """`real_value` to 200 digits, which equal values share.

    More digits may be lost where large numbers cancel. Raises `Refused` also where the value is not
    known to 210 digits, or is beyond the exponents of decimal numbers.
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
    """Whether a rational value has a last decimal; true where it is beyond the bounds."""
    if not is_rational(node):
        return False
    with suppress(Refused, ArithmeticError):
        value = _value(node, {}, arb)
        # A fraction in lowest terms ends if 2 and 5 are its denominator's only prime factors.
        return isinstance(value, fmpq) and _POWER_OF_TEN % int(value.denominator) == 0
    return True


def rounds_to(value: Node, rounded: Node, decimals: int) -> bool:
    """Whether a constant is within half a unit of the last place of a decimal number.

    Raises `Refused` as `real_value` does.
    """
    half_unit = arb(10) ** -decimals / 2
    return bool(abs(real_value(value) - real_value(rounded)) < half_unit)


def proportional(a: Node, b: Node, positive: bool = False) -> bool:
    """Whether two trees with variables differ by a constant factor, with `positive` by a positive
    one."""
    names = sorted(variables(a) | variables(b))
    if not names:
        return False
    quotient = ("/", a, b)
    far_points = _far_points(names, _landmarks(a, b), seed=repr((b, a)))
    points = itertools.chain(
        _points(names, seed=repr((a, b))), itertools.islice(far_points, FAR_POINTS)
    )
    if "i" in subtrees(quotient):
        if positive:
            return False
        return equal_values(a, ("*", b, substitute(quotient, next(points)))) is True
    for point in points:
        factor = _evaluate(quotient, point, arb)
        if factor is None or isinstance(factor, acb):
            continue  # a side is undefined at this point
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
    """Rational points by a seed that no answer can foresee.

    Half of them are positive, a quarter negative, and values are below and above one in turn.
    """
    rng = random.Random(seed)
    for k in range(NEAR_POINTS):
        values = [Fraction(rng.randrange(101, 199), rng.randrange(201, 399)) for _ in names]
        signs = [_sign_of_point(k, rng) for _ in names]
        point = {}
        for j, name in enumerate(names):
            # Every value is below one, and its inverse above.
            exponent = (-1) ** (j + k // 2)
            point[name] = signs[j] * values[j] ** exponent
        yield point


def _sign_of_point(k: int, rng: random.Random) -> int:
    """Of every four points two are positive, one has any signs, and one is negative."""
    if k % 2 == 0:
        return 1
    if k % 4 == 1:
        return rng.choice((1, -1))
    return -1


def _points_at(landmarks: list[Fraction], names: list[str]) -> Iterator[dict[str, Fraction]]:
    """As many points as landmarks, with every variable at a different one.

    Variables share landmarks where there are fewer of these.
    """
    for k in range(len(landmarks)):
        yield {name: landmarks[(k + j) % len(landmarks)] for j, name in enumerate(names)}


def _far_points(
    names: list[str], landmarks: list[Fraction], seed: str
) -> Iterator[dict[str, Fraction]]:
    """Points without end, in rounds.

    In a round every variable takes every far value. Several variables take them in orders of their
    own, and in every second round in the same one, so that all are small, or large, at once.
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
    """A number of every size with either sign, one between any two neighbouring landmarks, one
    beyond the lowest and one beyond the highest, then numbers close to each of them."""

    def share() -> Fraction:
        return Fraction(rng.randrange(51, 449), 503)

    values = []
    for size in _SIZES:
        values += [sign * (1 + share()) * size for sign in (1, -1)]
    values += [low + share() * (high - low) for low, high in itertools.pairwise(landmarks)]
    values += [(1 + share()) * end for end in (landmarks[0], landmarks[-1])]
    for reach in (Fraction(1, 3), Fraction(1)):
        for sign in (1, -1):
            values += [landmark + sign * reach * share() for landmark in landmarks]
    return values


def _landmarks(a: Node, b: Node) -> list[Fraction]:
    """The real constants of two trees, their quotients, both with either sign, and -1, 0, 1; in
    order.

    Those that are not rational are rounded to `_LANDMARK_DIGITS` digits.
    """
    constants: list[Fraction] = []
    for constant in (*_constants(a), *_constants(b)):
        size = _size(constant)
        if size and size not in constants:
            constants.append(size)
    constants = sorted(constants, reverse=True)[:LANDMARKS]
    largest = constants[: LANDMARKS // 2]
    quotients = [top / bottom for top, bottom in itertools.permutations(largest, 2)]
    sizes = {Fraction(1), *constants, *quotients}
    opposites = {-size for size in sizes}
    return sorted({Fraction(0), *sizes, *opposites})


def _size(constant: Node) -> Fraction | None:
    """The absolute value of a tree without variables; None where it is none, or beyond
    `_LARGEST_LANDMARK`."""
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
    """The largest subtrees without a variable."""
    if not variables(node):
        return [node]
    constants = []
    if isinstance(node, tuple):
        for part in node[1:]:
            constants += _constants(part)
    return constants


def _equal_at(a: Node, b: Node, point: Mapping[str, Fraction], field: type) -> bool | None:
    """Whether two trees have equal values at a point; None where a side is undefined or its error
    too large.

    Both verdicts are proved, an equality up to 2^-250 of the values' size.
    """
    at_a = _evaluate(a, point, field)
    if at_a is None:
        return None
    at_b = _evaluate(b, point, field)
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


def _evaluate(node: Node, point: Mapping[str, Fraction], field: type) -> _Value | None:
    """The value at a point; None where it is undefined in the field or beyond the bounds."""
    try:
        return _value(node, point, field)
    except (Refused, ArithmeticError, OverflowError):
        return None


def _value(node: Node, point: Mapping[str, Fraction], field: type) -> _Value:
    if isinstance(node, str):
        if node not in point:
            return _constant(node, field)
        node = point[node]
    if isinstance(node, Fraction):
        return fmpq(node.numerator, node.denominator)
    operation, *operands = node
    values = [_value(operand, point, field) for operand in operands]
    value = _OPERATIONS[operation](field, *values)
    if isinstance(value, fmpq):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise Refused("too large")
    elif not value.is_finite():
        raise Refused("undefined")
    return value


def _constant(name: str, field: type) -> _Value:
    r"""The value of \pi, e or i."""
    if name == r"\pi":
        return field(arb.pi())
    if name == "e":
        return field(1).exp()
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
    """The real power where there is one: (-8)^(1/3) is -2.

    A negative base takes any rational exponent with an odd denominator.
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
            if abs(top) * bits > MAX_BITS:
                raise Refused("too large")
            return base ** int(top)
        if bottom > 1 and bottom % 2 and isinstance(base, fmpq | arb) and base < 0:
            sign = 1
            if top % 2:
                sign = -1
            return (field(-base) ** field(exponent)) * sign
    return field(base) ** field(exponent)


def _factorial(field: type, x: _Value) -> _Value:
    if isinstance(x, fmpq) and x.denominator == 1:
        # 4000! takes 0.1 ms, and what a binomial makes of it may be within MAX_BITS
        if not 0 <= x <= 4000:
            raise Refused("too large, or undefined")
        number = int(x.numerator)
        # The stub takes the static method for one of an instance.
        return fmpq(fmpz.fac_ui(number))  # pyright: ignore[reportArgumentType]
    if not field(x).abs_upper() < 1000:
        raise Refused("too large")
    return field(x + 1).gamma()


def _binomial(field: type, n: _Value, k: _Value) -> _Value:
    return _factorial(field, n) / (_factorial(field, k) * _factorial(field, n - k))


def _rounded(name: str, field: type, x: _Value) -> _Value:
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
    "binom": _binomial,
    "abs": lambda field, x: abs(x),
    "floor": partial(_rounded, "floor"),
    "ceil": partial(_rounded, "ceil"),
    "ln": _function("log"),
    **{name: _function(name) for name in (*TRIGONOMETRIC, "exp", "sinh", "cosh", "tanh")},
    **{f"arc{name}": _function(f"a{name}") for name in ("sin", "cos", "tan")},
}
