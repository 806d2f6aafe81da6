r"""The R1-Zero reward: a strict format rule, then whether the answer equals the ground truth.

The format rule is that of the R1-Zero reward in "Understanding R1-Zero-Like Training" (Dr. GRPO, Liu et al. 2025,
arXiv:2503.20783). The grading under it is a cascade, cheapest first; each step either settles the answer or passes on:

1. the same text;
2. the same text after our normalisation (spacing, sizing, currency, units, thousands separators, LaTeX synonyms), parts
   of tuples, intervals, sets and lists compared one by one, words compared whatever their case;
3. numbers, exactly, as fractions: no tolerance, so 0.5 is 1/2 and 0.33 is not 1/3;
4. expressions: read by the parser below into a tree and evaluated at fixed rational points, exactly while everything
   stays rational and to 150 digits after that;
5. with `fast=False` only: math-verify, for notation that our parser does not read (matrices, inequalities, unions).

Model text is hostile input. It is never evaluated as Python, and steps 1 to 4 never hand it to sympy, whose
constructors compute eagerly (`Integer(9)**Integer(9)**...`): every size is bounded before anything is computed.
"""

from __future__ import annotations

import re
import signal
import threading
import unicodedata
from collections.abc import Callable, Iterator
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

MAX_CHARS = 1000  # of an answer; a longer one is wrong
MAX_TOKENS = 200  # of an expression, hence also of the nodes of its tree
MAX_DEPTH = 30  # of brackets, powers and signs inside each other
MAX_DIGITS = 80  # of one number in the text
MAX_BITS = 4000  # of a numerator or denominator on the way
MAX_PARTS = 20  # of a tuple or set


class _Refused(ValueError):
    """The text is not in the language of this grader, or beyond its bounds."""


# --- the reward -------------------------------------------------------------------------------


def r1_zero_reward_fn(response: str, ground_truth: str, fast: bool = True) -> dict[str, float]:
    """Score a response: {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0, and reward = format * answer.

    The shape is right if the response holds the literal `</think> <answer>` and `</answer>`; otherwise all are 0.0,
    however right the number.
    """
    shaped = "</think> <answer>" in response and "</answer>" in response
    answer = extract_answer(response)
    right = answer is not None and grade(answer, ground_truth, fast)
    return {"reward": float(right), "format_reward": float(shaped), "answer_reward": float(right)}


def extract_answer(response: str) -> str | None:
    r"""The text after the last `<answer>` up to the next `</answer>`, or its last \boxed{...} or \fbox{...}.

    None where the format rule fails or the last `<answer>` is never closed.
    """
    if "</think> <answer>" not in response:
        return None
    answer, end, _ = response.rpartition("<answer>")[2].partition("</answer>")
    return _unbox(answer).strip() if end else None


def grade(answer: str, ground_truth: str, fast: bool = True) -> bool:
    """Whether `answer` equals `ground_truth`. Never raises; text that cannot be understood is wrong."""
    answer, truth = _unbox(answer).strip(), _unbox(ground_truth).strip()
    if not answer or not truth or max(len(answer), len(truth)) > MAX_CHARS:
        return False
    if answer == truth:
        return True
    answer, truth = _normalise(answer), _normalise(truth)
    same = _same(answer, truth)
    if same is None and not fast and _BEYOND.search(answer + truth):
        return _witness(answer, truth)
    return same is True


def _unbox(text: str) -> str:
    r"""The content of the last \boxed or \fbox; the text itself where there is none or its braces never close."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return text
    content = re.compile(r"\\[a-z]+\s*").match(text, start).end()
    if not text.startswith("{", content):
        return text[content:].partition("$")[0].partition("\n")[0]
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, content):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[content + 1 : brace.start()]
    return text


# --- normalisation: text to text --------------------------------------------------------------

_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_CHARACTERS = str.maketrans(
    {c: r"\frac{%d}{%d}" % Fraction(unicodedata.numeric(c)).limit_denominator(8).as_integer_ratio() for c in _VULGAR}
    | dict.fromkeys("−–—﹣－‐‑", "-")
    | dict.fromkeys("×·⋅∙", "*")
    | dict.fromkeys("\u00a0\u2002\u2003", " ")
    | dict.fromkeys("\u2009\u202f", r"\,")
    | dict.fromkeys("\u200b\ufeff", None)
    | dict.fromkeys("÷⁄∕", "/")
    | {"π": r"\pi ", "√": r"\sqrt", "∞": r"\infty ", "∪": r"\cup ", "°": " degrees", "，": ", ", "’": "'"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}"),
        (r"\\sqrt(?=[0-9])([0-9]+)", r"\\sqrt{\1}"),  # the sign √ and sloppy LaTeX cover the whole number
        (r"^\*\*(.*)\*\*$", r"\1"),  # Markdown bold
        (r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3}(?![0-9]))", ","),  # 10{,}000, 10\,000 and 10,\!000
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle)(?![A-Za-z])|(?<!\\)\\[()\[\]]", " "),
        (r"(?<!\\)\\[,;:!> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\(?:text|mathrm|textbf|mathbf|textit|textrm|mathit|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"\\(?:cdot|times)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", " degrees"),
        (r"(?<=[0-9])\s*x\s*(?=10\s*\^)", "*"),  # 1.5 x 10^3
        (r"\\([%{}])", r"\1"),
        (r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 "),  # paired: maths delimiters; a single one is currency
        (r"\\\$", "$"),
        (r"\s+", " "),
        (r"(?<![.])[.]$", ""),  # a full stop, unless it belongs to an ellipsis
    )
)


def _normalise(text: str) -> str:
    """The text in one spelling: ASCII signs, plain \\frac, no sizing, text commands opened, single spaces."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    return text.strip()


def _squeeze(text: str) -> str:
    """Without the spaces that cannot matter. Those between words, and beside commas and points, can: 1, 234; 1 2."""
    return re.sub(r" ?([^\w\s.,]) ?", r"\1", text)


# --- comparison of normalised texts -----------------------------------------------------------


def _same(answer: str, truth: str, depth: int = 2) -> bool | None:
    """Whether two normalised texts say the same; None where one of them is beyond what is read here."""
    if not answer or not truth:
        return False
    if _squeeze(answer) == _squeeze(truth):
        return True
    words_a, words_t = _words(answer), _words(truth)
    if words_a and words_a == words_t:
        return True
    if any(words and len(words) > 1 for words in (words_a, words_t)):
        return False  # never a product of letters, which commutes: "no" is not "on"
    parts_a, parts_t = _parts(answer), _parts(truth)
    if parts_a or parts_t:
        return bool(parts_a and parts_t) and _same_parts(*parts_a, *parts_t, depth)
    try:
        return _same_quantity(_quantity(answer), _quantity(truth))
    except _Refused:
        return None


def _words(text: str) -> str | None:
    """The text in lower case if it is words, or a single letter that may name an option: "(A)" is "a"."""
    match = re.fullmatch(r"\(?([^\W\d_](?:[^\W\d_]|[' -])*)\)?", text)
    if match is None or not _NAMES.isdisjoint(re.findall("[A-Za-z]+", text)):
        return None
    return match[1].casefold() if len(match[1]) == 1 or re.search(r"[^\W\d_]{2}", text) else None


def _parts(text: str) -> tuple[str, list[str]] | None:
    """A list's kind (its two brackets, "" for a bare list) and its parts; None for text with no comma of its own."""
    kind, inner = "", text
    if re.fullmatch(r"[(\[{].*[)\]}]", text) and _split(text[1:-1]):
        kind, inner = text[0] + text[-1], text[1:-1]
    if ", " in inner or not kind:  # where a list spaces its commas, or is none, 1,234 is one number
        inner = re.sub(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?!,?[0-9])", lambda m: m[0].replace(",", ""), inner)
    parts = _split(inner)
    return (kind, parts) if len(parts) > 1 else None


def _split(text: str) -> list[str]:
    """The pieces between the commas that stand outside all brackets; none if the brackets do not match up."""
    pieces, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            return []
        if c == "," and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    return [*pieces, text[start:].strip()] if depth == 0 else []


def _same_parts(kind_a: str, parts_a: list[str], kind_t: str, parts_t: list[str], depth: int) -> bool | None:
    """Part by part; a set's parts in any order. The kinds must agree: an interval [1,2] is not (1,2), nor {1,2}."""
    if kind_a != kind_t or len(parts_a) != len(parts_t):
        return False
    if len(parts_a) > MAX_PARTS or depth < (2 if kind_t == "{}" else 1):
        return None  # matching a set of sets takes a power of their sizes
    if kind_t != "{}":
        verdicts = [_same(a, t, depth - 1) for a, t in zip(parts_a, parts_t, strict=True)]
        return False if False in verdicts else None if None in verdicts else True
    left = list(parts_t)
    for part in parts_a:
        match = next((i for i, t in enumerate(left) if _same(part, t, depth - 1)), None)
        if match is None:
            return False
        del left[match]
    return True


class _Quantity(NamedTuple):
    """`label = value unit`; an empty label or unit was not given."""

    label: str
    value: _Node
    unit: str


def _same_quantity(answer: _Quantity, truth: _Quantity) -> bool:
    """Equal values; labels and units may be absent on one side but must not differ.

    50% is 50% and 0.5, and also 50: a sign on one side alone may be left out, not the factor.
    """
    if answer.label and truth.label and answer.label != truth.label:
        return False
    if answer.unit and truth.unit and answer.unit != truth.unit:
        return False
    if _equal(answer.value, truth.value):
        return True
    if (answer.unit == "%") == (truth.unit == "%"):
        return False
    share, other = (answer, truth) if answer.unit else (truth, answer)
    return _equal(("/", share.value, Fraction(100)), other.value)


_LABEL = re.compile(r"((?:[A-Za-z]|\\[a-z]+)(?:\([A-Za-z]\))?) ?= ?([^=<>]+)")
_CURRENCY = {"$": " dollars", "£": " pounds", "€": " euros"}
_MONEY = re.compile(r"([-+]?) ?([$£€]) ?(?=[-0-9.\\])(.*)|(.*[0-9]) ?([$£€])")
_PERCENT = re.compile(r"([-+]?[^-+*]*[0-9)}]) ?(?:%|percent|per cent)")
_MEASURE = re.compile(
    r"(.*?[0-9)}])( ?)((?:square |sq\.? |cubic )?[A-Za-z]+)(?: ?\^ ?\{?([23])\}?)?"  # amount, gap, name, power
    r"(?: ?(?:/|per\b|an?\b|each\b) ?([A-Za-z]+))?"
)
_NUMBER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_SCALAR = re.compile(rf"([-+]?) ?({_NUMBER})(?:[eE]([-+]?[0-9]{{1,3}}))?")


def _quantity(text: str) -> _Quantity:
    """Take label, currency, percent sign and unit off, read the rest as a number or an expression."""
    label, unit = "", ""
    if match := _LABEL.fullmatch(text):
        label, text = match[1], match[2]
    if match := _MONEY.fullmatch(text):  # $18 per day is 18 dollars per day
        amount = match[1] + match[3] if match[2] else match[4]
        text = re.sub(r"(?<=[0-9}])(?= (?:per|an?|each)\b|$)", _CURRENCY[match[2] or match[5]], amount, count=1)
    if match := _PERCENT.fullmatch(text):
        unit, text = "%", match[1]
    elif (match := _MEASURE.fullmatch(text)) and (unit := _unit(*match.groups())):
        text = match[1]
    scalar = _SCALAR.fullmatch(text)
    return _Quantity(label, _fraction(*scalar.groups("")) if scalar else _parse(text), unit)


def _fraction(sign: str, number: str, exponent: str = "") -> Fraction:
    digits = number.replace(",", "")
    if len(digits) > MAX_DIGITS:
        raise _Refused("too many digits")
    return Fraction(sign + digits.rstrip(".")) * Fraction(10) ** int(exponent or 0)


# Each unit's names; longer ones have a plural in -s too. Numbers decide first, so a missing name costs little.
_UNITS = """
mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, inch inches in, foot feet
ft, yard yd, mile mi, mg milligram, g gram, kg kilogram kilo, ounce oz, pound lb lbs, ton tonne, ml milliliter
millilitre, l L liter litre, cup, pint pt, quart qt, gallon gal, s second sec, minute min, h hour hr hrs, day, week
wk, month, year yr yrs, mph, dollar buck usd USD, cent, euro, degree deg, radian rad, unit, person people, child
children, man men, woman women
"""
_UNIT_NAMES = {
    name + plural: group.split()[0]
    for group in _UNITS.split(",")
    for name in group.split()
    for plural in ("", "s")[: 1 + (len(name) > 2)]  # "ms" is no plural of m
}
# Words in -s that change the number before them, so that no unit is taken off: 5 dozens is not 5. -ths are fractions.
_NOT_UNITS = re.compile(
    "tens|dozens|scores|pairs|couples|(?:hundred|thousand|million|billion|trillion)s|halves|thirds|quarters|[a-z]*ths|"
    "[a-z]*ss|ones|twos|threes|fours|fives|plus|minus|percents|sins|logs|this|thus|squares|cubes|versus|always|perhaps"
)


def _unit(amount: str, gap: str, name: str, power: str | None, per: str | None) -> str:
    """One name for a unit, as "cm^2" or "dollar/hour"; "" where the words are none.

    A unit is one of the list above or, after a space, any plural noun ("18 eggs"). One letter needs the space, as 5m
    is algebra, and so is anything after a variable: 2x + 3 h.
    """
    *shape, word = name.split()
    known = _UNIT_NAMES.get(word) or _UNIT_NAMES.get(word.lower() if len(word) > 1 else "")
    plural = gap and re.fullmatch("[a-z]{3,}s", word.lower()) and not _NOT_UNITS.fullmatch(word.lower())
    if not (known or plural) or not (gap or len(word) > 1) or re.search(r"(?<![\\A-Za-z])[A-Za-z]", amount):
        return ""
    power = power or ("" if not shape else "3" if shape == ["cubic"] else "2")
    over = _UNIT_NAMES.get(per or "", per or "")
    return (known or word.lower()) + (f"^{power}" if power else "") + (f"/{over}" if over else "")


# --- the parser: normalised text to a tree ----------------------------------------------------

# A number, the name of a variable, or an operation and its operands.
_Node = Fraction | str | tuple

_GREEK = "alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi varphi psi omega".split()
_FUNCTIONS = "sqrt sin cos tan log ln exp abs".split()
_NAMES = {*_GREEK, *_FUNCTIONS, "pi", "frac"}
_LONGEST_FIRST = sorted(_NAMES - {"frac"}, key=len, reverse=True)
_TOKEN = re.compile(rf" ?(?:({_NUMBER})|\\([A-Za-z]+)|([A-Za-z]+)|(\*\*|[-+*/^(){{}}\[\]|_]))")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def _tokens(text: str) -> list[str]:
    r"""Numbers, signs, letters, and names with a backslash, whether they had one or not: "2sin x" is 2 \sin x."""
    tokens: list[str] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) > MAX_TOKENS:
            raise _Refused("not an expression, or too long a one")
        at = match.end()
        number, command, word, sign = match.groups()
        if command and command not in _NAMES:
            raise _Refused("unknown command")
        tokens += _letters(word) if word else [f"\\{command}" if command else number or sign]
    return [*tokens, ""]


def _letters(word: str) -> Iterator[str]:
    """Known names and single variables in a run of letters. Four unknown letters are a word, hence no expression."""
    unknown = 0
    while word:
        name = next((name for name in _LONGEST_FIRST if word.startswith(name)), "")
        unknown += not name
        if unknown > 3:
            raise _Refused("a word")
        yield f"\\{name}" if name else word[0]
        word = word[len(name) or 1 :]


def _parse(text: str) -> _Node:
    """The tree of an expression. Raises `_Refused` for anything else."""
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
            raise _Refused(f"expected {token!r}")
        self.at += 1

    def nested(self, rule: Callable[[], _Node]) -> _Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refused("too deep")
        node = rule()
        self.depth -= 1
        return node

    def sum(self) -> _Node:
        node = self.product()
        while sign := self.take("+", "-"):
            node = (sign, node, self.product())
        return node

    def product(self) -> _Node:
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

    def signed(self) -> _Node:
        if sign := self.take("+", "-"):
            return (sign, Fraction(0), self.nested(self.signed))
        return self.power()

    def power(self) -> _Node:
        node = self.atom()
        return ("^", node, self.nested(self.signed)) if self.take("^", "**") else node

    def atom(self) -> _Node:
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
            return self.mixed(_fraction("", token))
        if token == r"\frac":
            return ("/", self.argument(), self.argument())
        if token[1:] in _FUNCTIONS:
            return self.function(token[1:])
        if token.isalpha() or token[:1] == "\\":
            return token
        raise _Refused("expected a number or a variable")

    def group(self) -> _Node:
        bars, self.bars = self.bars, 0
        closing = _CLOSING[self.take(*_CLOSING)]
        node = self.nested(self.sum)
        self.expect(closing)
        self.bars = bars
        return node

    def argument(self) -> _Node:
        r"""What \frac, \sqrt and a log's base take: a bracket, or one digit, letter or \pi."""
        if self.next in _CLOSING:
            return self.group()
        if not (self.next == r"\pi" or (len(self.next) == 1 and self.next.isalnum())):
            raise _Refused("expected an argument")
        self.at += 1
        token = self.tokens[self.at - 1]
        return Fraction(token) if token.isdigit() else token

    def mixed(self, whole: Fraction) -> _Node:
        r"""`3 1/2` and `3\frac{1}{2}`: a whole number and a proper fraction side by side are added, not multiplied."""
        shape = re.compile(r"([0-9]+) / ([0-9]+)|\\frac { ([0-9]+) } { ([0-9]+) }(?: |$)")
        match = shape.match(" ".join(self.tokens[self.at : self.at + 7]))
        if match is None or whole.denominator != 1:
            return whole
        top, bottom = (Fraction(part) for part in match.groups() if part)
        if top >= bottom:
            raise _Refused("neither a mixed number nor clearly a product")
        self.at += 3 if match[1] else 7
        return whole + top / bottom

    def function(self, name: str) -> _Node:
        r"""\sqrt[n]{x}, \log_b x (base 10 if not given), \sin^2 x, of a bracket or an implicit product: \sin 2x."""
        if name == "sqrt":
            root: _Node = Fraction(2)
            if self.next == "[":
                root = self.group()
            return ("^", self.argument(), ("/", Fraction(1), root))
        base = self.argument() if name == "log" and self.take("_") else Fraction(10)
        exponent = self.argument() if self.take("^") else Fraction(1)
        if exponent == ("-", Fraction(0), Fraction(1)):
            raise _Refused("an inverse function or a reciprocal")
        operand = self.group() if self.next in _CLOSING else self.nested(self.bare_operand)
        node = ("/", ("ln", operand), ("ln", base)) if name == "log" else (name, operand)
        return node if exponent == 1 else ("^", node, exponent)

    def bare_operand(self) -> _Node:
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


def _equal(a: _Node, b: _Node) -> bool:
    """Whether two trees have equal values: at each of six points the same, or both undefined, and two or more defined.

    Distinct rational functions agree at a generic point by accident only, and real branches (|x|, sqrt, logarithms)
    show their differences at points of either sign.
    """
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    names = sorted(_variables(a) | _variables(b))
    defined = 0
    for point in _points(names) if names else ({},):
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
    except _Refused:
        return False


def _variables(node: _Node) -> set[str]:
    if isinstance(node, str):
        return {node} - _CONSTANTS.keys()
    return set().union(*map(_variables, node[1:])) if isinstance(node, tuple) else set()


def _points(names: list[str]) -> Iterator[dict[str, Fraction]]:
    """Six points, three of them positive, with values below and above one in turn."""
    signs = ((1, 1), (1, 1), (1, 1), (-1, -1), (1, -1), (-1, 1))
    for k, sign in enumerate(signs):
        values = [Fraction(101 + 31 * k + 17 * j, 173 + 7 * k + 29 * j) for j in range(len(names))]
        yield {name: sign[j % 2] * values[j] ** (-1) ** (j + k) for j, name in enumerate(names)}


def _evaluate(node: _Node, point: dict[str, Fraction]) -> _Value | None:
    """The value at a point; None where it is undefined among the reals or beyond the bounds."""
    try:
        with localcontext(_DIGITS):
            return _value(node, point | _CONSTANTS)
    except (_Refused, ArithmeticError):
        return None


def _value(node: _Node, point: dict[str, _Value]) -> _Value:
    if isinstance(node, Fraction):
        return node
    if isinstance(node, str):
        return point[node]
    operation, *operands = node
    value = _OPERATIONS[operation](*(_value(operand, point) for operand in operands))
    if isinstance(value, Decimal):
        return _real(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _Refused("too large")
    return value


def _real(value: _Value) -> Decimal:
    """As a decimal, if its size leaves enough of the 150 digits to tell it from its neighbours."""
    real = value if isinstance(value, Decimal) else Decimal(value.numerator) / Decimal(value.denominator)
    if not (_RANGE[0] <= abs(real) <= _RANGE[1] or value == 0 or (real is value and abs(real) < _ZERO)):
        raise _Refused("too large or too small")
    return real


def _arithmetic(operation: Callable[[_Value, _Value], _Value]) -> Callable[[_Value, _Value], _Value]:
    """The operation on two fractions as it is, and on anything else in decimals."""
    return lambda a, b: operation(a, b) if type(a) is type(b) else operation(_real(a), _real(b))


def _divide(a: _Value, b: _Value) -> _Value:
    if isinstance(b, Decimal) and abs(b) < _ZERO:
        raise _Refused("division by what may be zero")
    return a / b


def _power(base: _Value, exponent: _Value) -> _Value:
    """Real powers; a negative base takes any rational exponent with an odd denominator: (-8)^(1/3) is -2."""
    if base == 0:
        if exponent <= 0:
            raise _Refused("undefined")
        return Fraction(0)
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1 and isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent) * bits > MAX_BITS:
                raise _Refused("too large")
            return base**exponent.numerator
        if base < 0 and exponent.denominator % 2:
            return _power(-base, exponent) * (-1 if exponent.numerator % 2 else 1)
    return _exponential(_real(exponent) * _logarithm(base))


def _logarithm(x: _Value) -> Decimal:
    if x <= 0:
        raise _Refused("not real")
    return _real(x).ln()


def _exponential(x: _Value) -> Decimal:
    if abs(x) > 200:  # quick, and no power is so small that it passes for zero
        raise _Refused("too large or too small")
    return _real(x).exp()


def _sine(x: _Value, shift: int = 0) -> Decimal:
    """sin(x + shift * pi / 2) by Taylor's series, after whole turns are taken off."""
    if abs(x) > 10_000:
        raise _Refused("too large")
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


# --- the last witness -------------------------------------------------------------------------

# What math-verify is asked about: matrices, unions of intervals, inequalities.
_BEYOND = re.compile(r"\\(?:begin|cup|cap|le|ge|lt|gt|ne)|[<>]")
# Missing are sums, integrals, binomials and the like, which sympy would compute however large, and functions, over
# which it can take minutes.
_WITNESSED = {*_GREEK, *"frac sqrt pi infty cup cap le leq ge geq lt gt ne neq".split()}


def _witness(answer: str, truth: str) -> bool:
    """math-verify's verdict on two short normalised texts; False for what is outside the bounds or fails.

    Only its LaTeX extraction is used: the one for plain expressions hands text to sympy's `parse_expr`, which is
    `eval`. The LaTeX grammar gives sympy nothing but its own number tokens as text. Its clock is `signal.alarm`, which
    works in the main thread only and would cancel a timer that the caller has running; elsewhere the bounds on the
    text, and the caller's own time limit, hold.
    """
    if not (_witnessable(answer) and _witnessable(truth)):
        return False
    # Imported here because it takes seconds that the fast path need not spend.
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException  # derives from BaseException

    free = threading.current_thread() is threading.main_thread() and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    seconds = 2 if free else None
    config = [LatexExtractionConfig()]
    try:
        gold, target = (
            parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=seconds) for text in (truth, answer)
        )
        # Rounding only beyond what a decimal can hold here: 0.33 is no more 1/3 inside a matrix than outside.
        return verify(gold, target, float_rounding=15, numeric_precision=30, timeout_seconds=seconds)
    except (Exception, TimeoutException):
        return False


def _witnessable(text: str) -> bool:
    """Short, of known commands and signs without words, and with exponents of one digit or letter, four at most."""
    bare = re.sub(r"\\(?:begin|end) ?\{[pbv]?matrix\}", "", text)
    signs = re.sub(r"\\[A-Za-z]+", " ", bare)
    if len(text) > 120 or not set(re.findall(r"\\([A-Za-z]+)", bare)) <= _WITNESSED:
        return False
    if re.search(r"[A-Za-z]{2}|[0-9]{16}|[0-9] +[0-9]|[^ -~]|[=!'\"`:;$%#~]", signs):
        return False  # an equation too: of `7 = 5` math-verify would see the 5, and it takes unsolvable ones for equal
    if re.search("[<>]|\\\\[lgn][et]", bare) and not re.search("[A-Za-z]", signs):
        return False  # a relation of numbers is true or false, which says nothing of the answer
    powers = len(re.findall(r"\^|\*\*", bare))
    return powers <= 4 and powers == len(re.findall(r"(?:\^|\*\*) ?(?:\w|\{ ?-? ?\w ?\})(?! ?[\^*0-9.])", bare))
