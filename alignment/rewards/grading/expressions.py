"""The parser of expressions in a subset of maths and LaTeX. The text is hostile: it is never
evaluated as Python nor handed to sympy, which computes eagerly (`Integer(9)**Integer(9)**...`). Its
size is bounded here, that of its values in `values.py`."""

import re
from collections.abc import Callable
from fractions import Fraction

from alignment.rewards.grading.text import PATTERNS, TABLES

MAX_TOKENS = 200  # of an expression, hence also of the nodes of its tree
MAX_DEPTH = 30  # of brackets, powers and signs inside each other
MAX_DIGITS = 80  # of one number in the text


class Refused(ValueError):
    """The grader cannot read the text, or it is beyond the grader's bounds."""


class NoAnswer(Refused):
    """The grader read the text and it is no answer, like 5 = 6 or a matrix with a gap, so
    math-verify is not needed."""


def fraction(sign: str, number: str, exponent: str = "", period: str = "") -> Fraction:
    """The value of a decimal number with a power of ten, or of one whose last digits `period`
    repeat without end."""
    digits = number.replace(",", "")
    if len(digits) > MAX_DIGITS or len(exponent) > 4:
        raise Refused("too many digits")
    value = Fraction(digits.rstrip(".") or 0)
    if period:
        value += Fraction(
            int(period), (10 ** len(period) - 1) * 10 ** len(digits.partition(".")[2])
        )
    value = -value if sign == "-" else value
    return value * Fraction(10) ** int(exponent) if exponent else value


# a number, a name (a command with its backslash), or an operation with its operands
Node = Fraction | str | tuple

GREEK, CAPITALS = list(TABLES["greek"]), list(TABLES["greek_capitals"])
TRIGONOMETRIC = ["sin", "cos", "tan", "cot", "sec", "csc"]
_INVERSES = {
    f"{prefix}{name}": f"arc{name}" for prefix in ("arc", "a") for name in ("sin", "cos", "tan")
}
FUNCTIONS = [
    *TRIGONOMETRIC,
    *_INVERSES,
    *["sinh", "cosh", "tanh", "sqrt", "cbrt", "log", "lg", "ln", "exp", "abs", "floor", "ceil"],
]
_COMMANDS = {
    *GREEK,
    *CAPITALS,
    *FUNCTIONS,
    *[
        "pi",
        "frac",
        "binom",
        "degree",
        "overline",
        "lfloor",
        "rfloor",
        "lceil",
        "rceil",
        "ihat",
        "jhat",
        "khat",
    ],
}
# that need no backslash
NAMES = {*GREEK, *FUNCTIONS, "pi"} - {
    "eta",
    "nu",
    "xi",
    "mu",
    "chi",
    "lg",
    "tau",
    "rho",
}
_NAME = re.compile("|".join(sorted(NAMES, key=len, reverse=True)))
_TOKEN = re.compile(
    rf" ?(?:\\(?P<command>[A-Za-z]+)|(?P<name>{_NAME.pattern})|"
    rf"(?P<other>{PATTERNS.number.pattern}|[A-Za-z]|\*\*|[-+*/^(){{}}\[\]|_!]))"
)
_BRACKETS = ("(", "[", "{")
_CLOSING = TABLES["closing"]


def _tokens(text: str) -> list[str]:
    r"""Numbers, signs, letters, and names with a backslash, whether they had one or not: "2sin x"
    is 2 \sin x."""
    matches = list(_TOKEN.finditer(text))
    if "".join(match[0] for match in matches) != text:
        raise Refused("not an expression")
    if {match["command"] for match in matches} - _COMMANDS - {None}:
        raise Refused("unknown command")
    # four that are in no name
    if any(len(_NAME.sub("", letters)) > 3 for letters in PATTERNS.bare_letters.findall(text)):
        raise Refused("a word")
    if len(matches) > MAX_TOKENS:
        raise Refused("too long an expression")
    return [*(match["other"] or f"\\{match['command'] or match['name']}" for match in matches), ""]


def parse_expression(text: str) -> Node:
    """The tree of an expression. Raises `Refused` for anything else."""
    parser = _Parser(_tokens(text))
    node = parser.sum()
    parser.expect("")
    return node


def subtrees(node: Node) -> list[Node]:
    """The tree and every tree in it."""
    return (
        [node, *(subtree for part in node[1:] for subtree in subtrees(part))]
        if isinstance(node, tuple)
        else [node]
    )


def variables(node: Node) -> set[str]:
    """The names of a tree, constants excluded."""
    return {name for name in subtrees(node) if isinstance(name, str)} - {r"\pi", "e", "i"}


def is_rational(node: Node) -> bool:
    """Whether the tree is numbers and the four operations only, so that its value is one exact
    fraction."""
    match node:
        case ("^", base, exponent):
            return (
                isinstance(exponent, Fraction) and exponent.denominator == 1 and is_rational(base)
            )
        case ("+" | "-" | "*" | "/", left, right):
            return is_rational(left) and is_rational(right)
    return isinstance(node, Fraction)


class _Parser:
    """Recursive descent over tokens: sum > product > implicit product > sign > power > postfix >
    atom."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.depth, self.bars = tokens, 0, 0, False

    @property
    def next(self) -> str:
        return self.tokens[self.at]

    def take(self, *wanted: str) -> str:
        """Take and return the next token if it is one of `wanted`; else return "" and take
        nothing."""
        return self.advance() if self.next in wanted else ""

    def expect(self, token: str) -> None:
        if self.advance() != token:
            raise Refused(f"expected {token!r}")

    def nested(self, rule: Callable[[], Node]) -> Node:
        """What a rule reads, one level deeper."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("too deep")
        node = rule()
        self.depth -= 1
        return node

    def advance(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1]

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
            elif self.starts_factor() or (
                self.tokens[self.at - 1] == "!" and self.next[:1].isdigit()
            ):
                # 3!7!
                node = ("*", node, self.power())
            else:
                return node

    def starts_factor(self) -> bool:
        """Whether an unsigned factor follows. A number does not count: `1 2`, `x 2` and `1{2}` are
        no products."""
        token = self.next
        if token in (r"\rfloor", r"\rceil", r"\degree"):
            return False
        return (
            token[:1].isalpha()
            or token[:1] == "\\"
            or token in ("(", "[")
            or (token == "|" and not self.bars)
        )

    def signed(self) -> Node:
        return (
            (sign, Fraction(0), self.nested(self.signed))
            if (sign := self.take("+", "-"))
            else self.power()
        )

    def power(self) -> Node:
        node = self.postfix()
        return ("^", node, self.nested(self.signed)) if self.take("^", "**") else node

    def postfix(self) -> Node:
        """An atom with its factorial or degree sign: 5!, 30\\degree."""
        node = self.atom()
        if self.take("!"):
            node = ("!", node)
            if self.next == "!":
                raise Refused("a double factorial")
        if self.take(r"\degree"):
            node = ("/", ("*", node, r"\pi"), Fraction(180))
        return node

    def atom(self) -> Node:
        if self.next in _CLOSING:
            return self.group()
        token = self.advance()
        if token[:1].isdigit() or token[:1] == ".":
            return self.mixed(self.repeating(token))
        if token in (r"\frac", r"\binom"):
            return ("/" if token == r"\frac" else "binom", self.argument(), self.argument())
        if token[1:] in FUNCTIONS:
            return self.function(token[1:])
        if token.isalpha() or (token[:1] == "\\" and token != r"\overline"):
            return self.subscripted(token)
        raise Refused("expected a number or a variable")

    def subscripted(self, name: str) -> str:
        """A variable with its subscript, x_1 or a_{12}, as one name."""
        if name in (r"\pi", "e", "i") or not self.take("_"):
            return name
        braces = bool(self.take("{"))
        start = self.at
        while braces and self.next.isalnum():
            self.at += 1
        self.at += not braces
        subscript = "".join(self.tokens[start : self.at])
        if not subscript.isalnum() or len(subscript) > 4:
            raise Refused("not a subscript")
        if braces:
            self.expect("}")
        return f"{name}_{subscript}"

    def repeating(self, token: str) -> Fraction:
        r"""A number, the digits of whose \overline{...} repeat without end: 0.1\overline{6} is
        1/6."""
        if not self.take(r"\overline"):
            return fraction("", token)
        self.expect("{")
        digits = self.advance()
        if "." not in token or not digits.isdigit() or len(digits) > 20:
            raise Refused("nothing that repeats")
        self.expect("}")
        return fraction("", token, period=digits)

    def group(self) -> Node:
        """A bracket, or what stands between other signs that belong together."""
        opening, bars = self.advance(), self.bars
        closing, function = _CLOSING[opening]
        self.bars = opening == "|"
        node = self.nested(self.sum)
        self.expect(closing)
        self.bars = bars
        return (function, node) if function else node

    def argument(self) -> Node:
        r"""The argument of \frac, of \sqrt or of a log's base: a bracket, or one digit, letter or
        command."""
        if self.next in _BRACKETS:
            return self.group()
        if self.next in (r"\sqrt", r"\pi"):
            return self.nested(self.atom)
        if not (len(self.next) == 1 and self.next.isalnum()):
            raise Refused("expected an argument")
        token = self.advance()
        return Fraction(token) if token.isdigit() else token

    def mixed(self, whole: Fraction) -> Node:
        r"""`3 1/2` and `3\frac{1}{2}`: a whole number and a proper fraction side by side are added,
        not multiplied."""
        shape = re.compile(r"([0-9]+) / ([0-9]+)|\\frac { ([0-9]+) } { ([0-9]+) }(?: |$)")
        match = (
            shape.match(" ".join(self.tokens[self.at : self.at + 7]))
            if whole.denominator == 1
            else None
        )
        if match is None:
            return whole
        top, bottom = (Fraction(part) for part in match.groups() if part)
        if top >= bottom:
            raise Refused("neither a mixed number nor clearly a product")
        self.at += 3 if match[1] else 7
        return whole + top / bottom

    def function(self, name: str) -> Node:
        r"""\sqrt[n]{x}, \log_b x (base 10 if not given), \sin^2 x, of a bracket or an implicit
        product: \sin 2x."""
        if name in ("sqrt", "cbrt"):
            root = self.group() if self.next == "[" else Fraction(2 if name == "sqrt" else 3)
            return ("^", self.argument(), ("/", Fraction(1), root))
        base = self.argument() if name == "log" and self.take("_") else Fraction(10)
        exponent = self.argument() if self.take("^") else Fraction(1)
        if exponent == ("-", Fraction(0), Fraction(1)):
            if f"arc{name}" not in _INVERSES.values():
                raise Refused("an inverse function or a reciprocal")
            name, exponent = f"arc{name}", Fraction(1)
        operand = self.group() if self.next in _BRACKETS else self.nested(self.bare_operand)
        name = _INVERSES.get(name, name)
        node = ("/", ("ln", operand), ("ln", base)) if name in ("log", "lg") else (name, operand)
        return node if exponent == 1 else ("^", node, exponent)

    def bare_operand(self) -> Node:
        node = self.power()
        while (
            self.starts_factor() and self.next[1:] not in FUNCTIONS and self.next not in _BRACKETS
        ):
            node = ("*", node, self.power())
        return node
