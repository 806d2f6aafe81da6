"""Expressions in a subset of maths and LaTeX: text to a tree, and whether two trees have equal values.

The text is hostile. It is read by a grammar of our own, never evaluated as Python and never handed to sympy, whose
constructors compute eagerly (`Integer(9)**Integer(9)**...`): every size is bounded before anything is computed. Values
are exact while everything stays rational, and to 150 digits after that.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from decimal import Context, Decimal, localcontext
from fractions import Fraction

MAX_TOKENS = 200  # of an expression, hence also of the nodes of its tree
MAX_DEPTH = 30  # of brackets, powers and signs inside each other
MAX_DIGITS = 80  # of one number in the text
MAX_BITS = 4000  # of a numerator or denominator on the way

NUMBER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"


class Refused(ValueError):
    """The text is not in the language of this grader, or beyond its bounds."""


def fraction(sign: str, number: str, exponent: str = "") -> Fraction:
    digits = number.replace(",", "")
    if len(digits) > MAX_DIGITS:
        raise Refused("too many digits")
    return Fraction(sign + digits.rstrip(".")) * Fraction(10) ** int(exponent or 0)


# --- the parser: normalised text to a tree ----------------------------------------------------

# A number, the name of a variable, or an operation and its operands.
Node = Fraction | str | tuple

GREEK = "alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi psi omega".split()
_FUNCTIONS = "sqrt sin cos tan log ln exp abs".split()
NAMES = {*GREEK, *_FUNCTIONS, "pi", "frac"}
_LONGEST_FIRST = sorted(NAMES - {"frac"}, key=len, reverse=True)
_TOKEN = re.compile(rf" ?(?:({NUMBER})|\\([A-Za-z]+)|([A-Za-z]+)|(\*\*|[-+*/^(){{}}\[\]|_]))")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _tokens(text: str) -> list[str]:
    r"""Numbers, signs, letters, and names with a backslash, whether they had one or not: "2sin x" is 2 \sin x."""
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) > MAX_TOKENS:
            raise Refused("not an expression, or too long a one")
        at = match.end()
        number, command, word, sign = match.groups()
        if command and command not in NAMES:
            raise Refused("unknown command")
        tokens += _letters(word) if word else [f"\\{command}" if command else number or sign]
    return [*tokens, ""]


def _letters(word: str) -> Iterator[str]:
    """Known names and single variables in a run of letters. Four unknown letters are a word, hence no expression."""
    unknown = 0
    while word:
        name = next((name for name in _LONGEST_FIRST if word.startswith(name)), "")
        unknown += not name
        if unknown > 3:
            raise Refused("a word")
        yield f"\\{name}" if name else word[0]
        word = word[len(name) or 1 :]


def parse_expression(text: str) -> Node:
    """The tree of an expression. Raises `Refused` for anything else."""
    parser = _Parser(_tokens(text))
    node = parser.sum()
    parser.expect("")
    return node


class _Parser:
    """Recursive descent over tokens: sum > product > implicit product > sign > power > atom."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth, self.bars = tokens, 0, 0, 0

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, *wanted: str) -> str:
        """The next token if it is one of the wanted, else "" and nothing is taken."""
        found = self.next if self.next in wanted else ""
        self.at += bool(found)
        return found

    def expect(self, token: str) -> None:
        if self.next != token:
            raise Refused(f"expected {token!r}")
        self.at += 1

    def nested(self, rule: Callable[[], Node]) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("too deep")
        node = rule()
        self.depth -= 1
        return node

    def sum(self) -> Node:
        node = self.product()
        while sign := self.take("+", "-"):
            node = (sign, node, self.product())
        return node

    def product(self) -> Node:
        node = self.signed()
        while True:
            if sign := self.take("*", "/"):
                node = (sign, node, self.signed())
            elif self.starts_factor():
                node = ("*", node, self.power())
            else:
                return node

    def starts_factor(self) -> bool:
        """Whether an unsigned factor follows. A number does not count: `1 2`, `x 2` and `1{2}` are no products."""
        token = self.next
        return token[:1].isalpha() or token[:1] == "\\" or token in ("(", "[") or (token == "|" and not self.bars)

    def signed(self) -> Node:
        if sign := self.take("+", "-"):
            return (sign, Fraction(0), self.nested(self.signed))
        return self.power()

    def power(self) -> Node:
        node = self.atom()
        return ("^", node, self.nested(self.signed)) if self.take("^", "**") else node

    def atom(self) -> Node:
        if self.next in _CLOSING:
            return self.group()
        self.at += 1
        token = self.tokens[self.at - 1]
        if token == "|":
            self.bars += 1
            node = ("abs", self.nested(self.sum))
            self.bars -= 1
            self.expect("|")
            return node
        if token[:1].isdigit() or token[:1] == ".":
            return self.mixed(fraction("", token))
        if token == r"\frac":
            return ("/", self.argument(), self.argument())
        if token[1:] in _FUNCTIONS:
            return self.function(token[1:])
        if token.isalpha() or token[:1] == "\\":
            return token
        raise Refused("expected a number or a variable")

    def group(self) -> Node:
        bars, self.bars = self.bars, 0
        closing = _CLOSING[self.take(*_CLOSING)]
        node = self.nested(self.sum)
        self.expect(closing)
        self.bars = bars
        return node

    def argument(self) -> Node:
        r"""What \frac, \sqrt and a log's base take: a bracket, or one digit, letter or \pi."""
        if self.next in _CLOSING:
            return self.group()
        if not (self.next == r"\pi" or (len(self.next) == 1 and self.next.isalnum())):
            raise Refused("expected an argument")
        self.at += 1
        token = self.tokens[self.at - 1]
        return Fraction(token) if token.isdigit() else token

    def mixed(self, whole: Fraction) -> Node:
        r"""`3 1/2` and `3\frac{1}{2}`: a whole number and a proper fraction side by side are added, not multiplied."""
        shape = re.compile(r"([0-9]+) / ([0-9]+)|\\frac { ([0-9]+) } { ([0-9]+) }(?: |$)")
        match = shape.match(" ".join(self.tokens[self.at : self.at + 7]))
        if match is None or whole.denominator != 1:
            return whole
        top, bottom = (Fraction(part) for part in match.groups() if part)
        if top >= bottom:
            raise Refused("neither a mixed number nor clearly a product")
        self.at += 3 if match[1] else 7
        return whole + top / bottom

    def function(self, name: str) -> Node:
        r"""\sqrt[n]{x}, \log_b x (base 10 if not given), \sin^2 x, of a bracket or an implicit product: \sin 2x."""
        if name == "sqrt":
            root: Node = Fraction(2)
            if self.next == "[":
                root = self.group()
            return ("^", self.argument(), ("/", Fraction(1), root))
        base = self.argument() if name == "log" and self.take("_") else Fraction(10)
        exponent = self.argument() if self.take("^") else Fraction(1)
        if exponent == ("-", Fraction(0), Fraction(1)):
            raise Refused("an inverse function or a reciprocal")
        operand = self.group() if self.next in _CLOSING else self.nested(self.bare_operand)
        node = ("/", ("ln", operand), ("ln", base)) if name == "log" else (name, operand)
        return node if exponent == 1 else ("^", node, exponent)

    def bare_operand(self) -> Node:
        node = self.power()
        while self.starts_factor() and self.next[1:] not in _FUNCTIONS and self.next not in _CLOSING:
            node = ("*", node, self.power())
        return node


# --- evaluation: exact where it can be, else to 150 digits ------------------------------------

_DIGITS = Context(prec=150)  # well beyond MAX_DIGITS: no decimal written out passes for an irrational number
_ZERO = Decimal("1e-100")  # below it an inexact number is rounding; sizes are kept within _RANGE so that this is safe
_RANGE = (Decimal("1e-40"), Decimal("1e40"))
_PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
    "32823066470938446095505822317253594081284811174502841"
)
_CONSTANTS = {r"\pi": _PI, "e": _DIGITS.exp(Decimal(1))}
_Value = Fraction | Decimal


def equal_values(a: Node, b: Node) -> bool:
    """Whether two trees have equal values: at each of six points the same, or both undefined, and two or more defined.

    Distinct rational functions agree at a generic point by accident only, and real branches (|x|, sqrt, logarithms)
    show their differences at points of either sign.
    """
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    names = sorted(_variables(a) | _variables(b))
    defined = 0
    for point in _points(names, seed=repr((a, b))) if names else ({},):
        at_a, at_b = _evaluate(a, point), _evaluate(b, point)
        if at_a is None and at_b is None:
            continue
        if at_a is None or at_b is None or not _close(at_a, at_b):
            return False
        defined += 1
    return defined >= min(2, 1 + len(names))


def _close(a: _Value, b: _Value) -> bool:
    try:
        with localcontext(_DIGITS):
            return a == b or (not type(a) is type(b) is Fraction and abs(_real(a) - _real(b)) < _ZERO)
    except Refused:
        return False


def _variables(node: Node) -> set[str]:
    if isinstance(node, str):
        return {node} - _CONSTANTS.keys()
    return set().union(*map(_variables, node[1:])) if isinstance(node, tuple) else set()


def _points(names: list[str], seed: str) -> Iterator[dict[str, Fraction]]:
    """Six points, three of them positive, with values below and above one in turn.

    They depend on what is compared, so that no answer can be written to agree with the truth at these points alone.
    """
    rng = random.Random(seed)
    signs = ((1, 1), (1, 1), (1, 1), (-1, -1), (1, -1), (-1, 1))
    for k, sign in enumerate(signs):
        values = [Fraction(rng.randrange(101, 199), rng.randrange(201, 399)) for _ in names]
        yield {name: sign[j % 2] * values[j] ** (-1) ** (j + k) for j, name in enumerate(names)}


def _evaluate(node: Node, point: dict[str, Fraction]) -> _Value | None:
    """The value at a point; None where it is undefined among the reals or beyond the bounds."""
    try:
        with localcontext(_DIGITS):
            return _value(node, point | _CONSTANTS)
    except (Refused, ArithmeticError):
        return None


def _value(node: Node, point: dict[str, _Value]) -> _Value:
    if isinstance(node, Fraction):
        return node
    if isinstance(node, str):
        return point[node]
    operation, *operands = node
    value = _OPERATIONS[operation](*(_value(operand, point) for operand in operands))
    if isinstance(value, Decimal):
        return _real(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Refused("too large")
    return value


def _real(value: _Value) -> Decimal:
    """As a decimal, if its size leaves enough of the 150 digits to tell it from its neighbours."""
    real = value if isinstance(value, Decimal) else Decimal(value.numerator) / Decimal(value.denominator)
    if not (_RANGE[0] <= abs(real) <= _RANGE[1] or value == 0 or (real is value and abs(real) < _ZERO)):
        raise Refused("too large or too small")
    return real


def _arithmetic(operation: Callable[[_Value, _Value], _Value]) -> Callable[[_Value, _Value], _Value]:
    """The operation on two fractions as it is, and on anything else in decimals."""
    return lambda a, b: operation(a, b) if type(a) is type(b) else operation(_real(a), _real(b))


def _divide(a: _Value, b: _Value) -> _Value:
    if isinstance(b, Decimal) and abs(b) < _ZERO:
        raise Refused("division by what may be zero")
    return a / b


def _power(base: _Value, exponent: _Value) -> _Value:
    """Real powers; a negative base takes any rational exponent with an odd denominator: (-8)^(1/3) is -2."""
    if base == 0:
        if exponent <= 0:
            raise Refused("undefined")
        return Fraction(0)
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1 and isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * bits > MAX_BITS:
                raise Refused("too large")
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2:
            return _power(-base, exponent) * (-1 if exponent.numerator % 2 else 1)
    return _exponential(_real(exponent) * _logarithm(base))


def _logarithm(x: _Value) -> Decimal:
    if x <= 0:
        raise Refused("not real")
    return _real(x).ln()


def _exponential(x: _Value) -> Decimal:
    if abs(x) > 200:  # quick, and no power is so small that it passes for zero
        raise Refused("too large or too small")
    return _real(x).exp()


def _sine(x: _Value, shift: int = 0) -> Decimal:
    """sin(x + shift * pi / 2) by Taylor's series, after whole turns are taken off."""
    if abs(x) > 10_000:
        raise Refused("too large")
    angle = (_real(x) + shift * _PI / 2) % (2 * _PI)
    total = term = angle
    n = 1
    while abs(term) > Decimal("1e-160"):
        n += 2
        term = -term * angle * angle / (n * (n - 1))
        total += term
    return total


_OPERATIONS: dict[str, Callable[..., _Value]] = {
    "+": _arithmetic(lambda a, b: a + b),
    "-": _arithmetic(lambda a, b: a - b),
    "*": _arithmetic(lambda a, b: a * b),
    "/": _arithmetic(_divide),
    "^": _power,
    "abs": abs,
    "exp": _exponential,
    "ln": _logarithm,
    "sin": _sine,
    "cos": lambda x: _sine(x, 1),
    "tan": lambda x: _divide(_sine(x), _sine(x, 1)),
}
