"""The parser of expressions in a subset of maths and LaTeX.

The text is a model's output and may be hostile. It is never evaluated as Python, nor passed to
sympy, which would compute `Integer(9)**Integer(9)**...` at once. This file bounds the size of the
expression; `values.py` bounds the size of the values that it computes.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from alignment.rewards.grading import patterns
from alignment.rewards.grading.notation import TABLES

MAX_TOKENS = 200  # in an expression; its tree has no more nodes than that
MAX_DEPTH = 30  # of nested brackets, powers and signs
MAX_DIGITS = 80  # of one number in the text


class Refused(ValueError):
    """The grader cannot read the text, or it is beyond the grader's bounds."""


class NoAnswer(Refused):
    """The grader read the text, and it states no answer: 5 = 6, or a matrix with a gap.

    What it merely cannot read, the grader passes on to math-verify; this it does not.
    """


def fraction(sign: str, number: str, exponent: str = "", period: str = "") -> Fraction:
    """The exact value of `number` * 10^`exponent`, where `number` is a decimal number.

    The digits of `period`, if given, repeat without end after those of `number`.
    """
    digits = number.replace(",", "")
    if len(digits) > MAX_DIGITS or len(exponent) > 4:
        raise Refused("too many digits")
    value = Fraction(digits.rstrip(".") or 0)
    if period:
        # 0.1(6) = 0.1 + 6 / (9 * 10^1)
        decimals = len(digits.partition(".")[2])
        nines = 10 ** len(period) - 1
        value += Fraction(int(period), nines * 10**decimals)
    if sign == "-":
        value = -value
    if exponent:
        value *= Fraction(10) ** int(exponent)
    return value


# The tree of an expression: a number, a name ("x", r"\pi"), or a tuple of an operation and its
# operands, such as ("+", "x", Fraction(1)). The negative of x is ("-", Fraction(0), x).
Node = Fraction | str | tuple

GREEK = list(TABLES["greek"])
CAPITALS = list(TABLES["greek_capitals"])
TRIGONOMETRIC = ["sin", "cos", "tan", "cot", "sec", "csc"]
_INVERSES = {
    "arcsin": "arcsin",
    "arccos": "arccos",
    "arctan": "arctan",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
}
_OTHER_FUNCTIONS = "sinh cosh tanh sqrt cbrt log lg ln exp abs floor ceil cis"
FUNCTIONS = [*TRIGONOMETRIC, *_INVERSES, *_OTHER_FUNCTIONS.split()]
PAIRED = ["gcd", "lcm", "max", "min"]  # functions of two operands
_OTHER_COMMANDS = (
    "gcd lcm max min pi frac binom degree overline lfloor rfloor lceil rceil ihat jhat khat"
)
_COMMANDS = {*GREEK, *CAPITALS, *FUNCTIONS, *_OTHER_COMMANDS.split()}

# Names that may stand without a backslash. Short ones may not: they could be products of variables.
NAMES = {*GREEK, *FUNCTIONS, "pi"} - {"eta", "nu", "xi", "mu", "chi", "lg", "tau", "rho"}
_NAME = re.compile("|".join(sorted(NAMES, key=len, reverse=True)))

CONSTANTS = {r"\pi", "e", "i"}

_TOKEN = re.compile(
    rf" ?(?:\\(?P<command>[A-Za-z]+)|(?P<name>{_NAME.pattern})|"
    rf"(?P<other>{patterns.NUMBER.pattern}|[A-Za-z]|\*\*|[-+*/^(){{}}\[\]|_!]))"
)
# The fraction of a mixed number, in tokens joined by spaces: 1 / 2, \frac { 1 } { 2 }.
_PROPER_FRACTION = re.compile(r"([0-9]+) / ([0-9]+)|\\frac { ([0-9]+) } { ([0-9]+) }(?: |$)")
_END = ""  # an extra token that marks the end
_BRACKETS = ("(", "[", "{")
# For each opening bracket the closing one, and the function that they denote, or "": "|" opens an
# absolute value.
_CLOSING: dict[str, list[str]] = TABLES["closing"]


def _tokens(text: str) -> list[str]:
    r"""Numbers, signs, letters, and names. A name gets a backslash if it has none: the tokens of
    "2sin x" are 2, \sin and x."""
    matches = list(_TOKEN.finditer(text))
    if "".join(match[0] for match in matches) != text:
        raise Refused("not an expression")
    commands = {match["command"] for match in matches if match["command"]}
    if not commands <= _COMMANDS:
        raise Refused("unknown command")
    for letters in patterns.BARE_LETTERS.findall(text):
        # Up to three letters besides names are a product of variables; more are a word.
        if len(_NAME.sub("", letters)) > 3:
            raise Refused("a word")
    if len(matches) > MAX_TOKENS:
        raise Refused("too long an expression")
    tokens = []
    for match in matches:
        name = match["command"] or match["name"]
        tokens.append(match["other"] or f"\\{name}")
    return [*tokens, _END]


def parse_expression(text: str) -> Node:
    """The tree of an expression. Raises `Refused` for anything else."""
    parser = _Parser(_tokens(text))
    node = parser.sum()
    parser.expect(_END)
    return node


def subtrees(node: Node) -> list[Node]:
    """The tree and every tree in it, parents first."""
    trees = [node]
    if isinstance(node, tuple):
        for part in node[1:]:
            trees += subtrees(part)
    return trees


def variables(node: Node) -> set[str]:
    """The names in a tree that are not constants."""
    return {name for name in subtrees(node) if isinstance(name, str)} - CONSTANTS


def is_rational(node: Node) -> bool:
    """Whether the tree has only numbers, the four operations, and powers with whole exponents.

    Its value is then an exact fraction.
    """
    match node:
        case ("^", base, exponent):
            is_whole = isinstance(exponent, Fraction) and exponent.denominator == 1
            return is_whole and is_rational(base)
        case ("+" | "-" | "*" | "/", left, right):
            return is_rational(left) and is_rational(right)
    return isinstance(node, Fraction)


class _Parser:
    """A parser by recursive descent, with one method for each rule of the grammar. From the loosest
    binding to the tightest: sum, product (also without a sign), signed, power, postfix, atom."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        # Between | and |, where the next | closes and begins no factor.
        self.inside_bars = False

    @property
    def next(self) -> str:
        return self.tokens[self.position]

    @property
    def previous(self) -> str:
        return self.tokens[self.position - 1]

    def take(self, *tokens: str) -> str:
        """The next token, taken, if it is one of `tokens`; else "", and nothing is taken."""
        if self.next in tokens:
            return self.advance()
        return ""

    def expect(self, token: str) -> None:
        if self.advance() != token:
            raise Refused(f"expected {token!r}")

    def nested(self, rule: Callable[[], Node]) -> Node:
        """The node that a rule reads one level deeper. Raises `Refused` beyond MAX_DEPTH."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("too deep")
        node = rule()
        self.depth -= 1
        return node

    def advance(self) -> str:
        """The next token, taken."""
        self.position += 1
        return self.tokens[self.position - 1]

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
            elif self.starts_factor() or self.starts_number_after_factorial():
                node = ("*", node, self.power())
            else:
                return node

    def starts_factor(self) -> bool:
        """Whether the next token begins a factor of a product without a sign, as x in `2x`.

        A number does not: `1 2`, `x 2` and `1{2}` are not products.
        """
        token = self.next
        if token in (r"\rfloor", r"\rceil", r"\degree"):
            return False
        return (
            token[:1].isalpha()
            or token[:1] == "\\"
            or token in ("(", "[")
            or (token == "|" and not self.inside_bars)
        )

    def starts_number_after_factorial(self) -> bool:
        """Whether the next token is a number after a factorial, as 7 in 3!7!."""
        return self.previous == "!" and self.next[:1].isdigit()

    def signed(self) -> Node:
        if sign := self.take("+", "-"):
            return (sign, Fraction(0), self.nested(self.signed))
        return self.power()

    def power(self) -> Node:
        node = self.postfix()
        if self.take("^", "**"):
            return ("^", node, self.nested(self.signed))
        return node

    def postfix(self) -> Node:
        """An atom with its factorial or degree sign: 5!, 6!!, 30\\degree."""
        node = self.atom()
        if self.take("!"):
            operation = "!!" if self.take("!") else "!"
            node = (operation, node)
            if self.next == "!":
                raise Refused("a triple factorial")
        if self.take(r"\degree"):
            node = ("/", ("*", node, r"\pi"), Fraction(180))
        return node

    def atom(self) -> Node:
        if self.next in _CLOSING:
            return self.group()
        token = self.advance()
        if token[:1].isdigit() or token[:1] == ".":
            return self.mixed(self.repeating(token))
        if token == r"\frac":
            return ("/", self.argument(), self.argument())
        if token == r"\binom":
            return ("binom", self.argument(), self.argument())
        if token[1:] in PAIRED:
            return (token[1:], self.argument(), self.argument())
        if token[1:] in FUNCTIONS:
            return self.function(token[1:])
        if token.isalpha() or (token[:1] == "\\" and token != r"\overline"):
            return self.subscripted(token)
        raise Refused("expected a number or a variable")

    def subscripted(self, name: str) -> str:
        """A variable with its subscript, x_1 or a_{12}, as one name."""
        if name in CONSTANTS or not self.take("_"):
            return name
        if self.take("{"):
            subscript = ""
            while self.next.isalnum():
                subscript += self.advance()
            self.require_subscript(subscript)
            self.expect("}")
        else:
            subscript = self.advance()
            self.require_subscript(subscript)
        return f"{name}_{subscript}"

    def require_subscript(self, text: str) -> None:
        if not text.isalnum() or len(text) > 4:
            raise Refused("not a subscript")

    def repeating(self, token: str) -> Fraction:
        r"""The value of a number. Digits that follow it in \overline{...} repeat without end:
        0.1\overline{6} is 1/6."""
        if not self.take(r"\overline"):
            return fraction("", token)
        self.expect("{")
        digits = self.advance()
        if "." not in token or not digits.isdigit() or len(digits) > 20:
            raise Refused("nothing that repeats")
        self.expect("}")
        return fraction("", token, period=digits)

    def group(self) -> Node:
        """An expression in brackets of any kind in _CLOSING: (x), |x|, \\lfloor x \\rfloor."""
        opening = self.advance()
        closing, function = _CLOSING[opening]
        outer = self.inside_bars
        self.inside_bars = opening == "|"
        node = self.nested(self.sum)
        self.expect(closing)
        self.inside_bars = outer
        if function:
            return (function, node)
        return node

    def argument(self) -> Node:
        r"""What follows \frac, \sqrt, or the _ or ^ of a function: an expression in brackets, or
        without them one digit, one letter, \pi or a root."""
        if self.next in _BRACKETS:
            return self.group()
        if self.next in (r"\sqrt", r"\pi"):
            return self.nested(self.atom)
        if not (len(self.next) == 1 and self.next.isalnum()):
            raise Refused("expected an argument")
        token = self.advance()
        if token.isdigit():
            return Fraction(token)
        return token

    def mixed(self, whole: Fraction) -> Node:
        r"""The value of a mixed number, `3 1/2` or `3\frac{1}{2}`, whose whole part is read; the
        whole part if no fraction follows."""
        if whole.denominator != 1:
            return whole
        # \frac { 1 } { 2 } is 7 tokens.
        tokens = self.tokens[self.position : self.position + 7]
        match = _PROPER_FRACTION.match(" ".join(tokens))
        if match is None:
            return whole
        top, bottom = (Fraction(part) for part in match.groups() if part)
        if top >= bottom:
            raise Refused("neither a mixed number nor clearly a product")
        self.position += len(match[0].split())
        return whole + top / bottom

    def function(self, name: str) -> Node:
        r"""A function with its operand, whose name is read already: \sqrt[n]{x}, \log_b x (base 10
        if not given), \sin^2 x. The operand is in brackets, or a product without signs: \sin 2x."""
        if name in ("sqrt", "cbrt"):
            return self.root(name)
        base: Node = Fraction(10)
        if name == "log" and self.take("_"):
            base = self.argument()
        exponent: Node = Fraction(1)
        if self.take("^"):
            exponent = self.argument()
        # \sin^{-1} x is \arcsin x.
        if exponent == ("-", Fraction(0), Fraction(1)):
            if f"arc{name}" not in _INVERSES.values():
                raise Refused("an inverse function or a reciprocal")
            name = f"arc{name}"
            exponent = Fraction(1)
        in_brackets = self.next in _BRACKETS
        operand = self.group() if in_brackets else self.nested(self.bare_operand)
        node: Node = (_INVERSES.get(name, name), operand)
        if name == "cis":
            node = ("+", ("cos", operand), ("*", "i", ("sin", operand)))
        if name in ("log", "lg"):
            node = ("/", ("ln", operand), ("ln", base))
        if exponent == 1:
            return node
        return ("^", node, exponent)

    def root(self, name: str) -> Node:
        r"""\sqrt x, \sqrt[n]{x} or \cbrt x as a power of x."""
        if self.next == "[":
            degree = self.group()
        elif name == "sqrt":
            degree = Fraction(2)
        else:
            degree = Fraction(3)
        return ("^", self.argument(), ("/", Fraction(1), degree))

    def bare_operand(self) -> Node:
        r"""A function's operand without brackets. It ends before the next function or bracket: in
        \sin 2x \cos y it is 2x."""
        node = self.power()
        while (
            self.starts_factor() and self.next[1:] not in FUNCTIONS and self.next not in _BRACKETS
        ):
            node = ("*", node, self.power())
        return node
