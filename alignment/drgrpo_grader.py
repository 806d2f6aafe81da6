r"""The R1-Zero reward: a strict format rule, then whether the answer equals the ground truth.

The format rule is that of the R1-Zero reward in "Understanding R1-Zero-Like Training" (Dr. GRPO, Liu et al. 2025,
arXiv:2503.20783). The grading under it is a cascade, cheapest first; each step either settles the answer or passes on:

1. the same text;
2. the same text after our normalisation (spacing, sizing, currency, units, thousands separators, LaTeX synonyms), parts
   of tuples, intervals, sets and lists compared one by one, words compared whatever their case;
3. numbers, exactly, as fractions: no tolerance, so 0.5 is 1/2 and 0.33 is not 1/3;
4. expressions: read into a tree and evaluated at fixed rational points (`expressions.py`);
5. with `fast=False` only: math-verify, for notation that our parser does not read (matrices, inequalities, unions).

Model text is hostile input. It is never evaluated as Python, and every size is bounded before anything is computed.
"""

from __future__ import annotations

import re
import signal
import threading
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from alignment.expressions import GREEK, NAMES, NUMBER, Node, Refused, equal_values, fraction, parse_expression

MAX_CHARS = 1000  # of an answer; a longer one is wrong
MAX_PARTS = 20  # of a tuple or set


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
    except Refused:
        return None


def _words(text: str) -> str | None:
    """The text in lower case if it is words, or a single letter that may name an option: "(A)" is "a"."""
    match = re.fullmatch(r"\(?([^\W\d_](?:[^\W\d_]|[' -])*)\)?", text)
    if match is None or not NAMES.isdisjoint(re.findall("[A-Za-z]+", text)):
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
    value: Node
    unit: str


def _same_quantity(answer: _Quantity, truth: _Quantity) -> bool:
    """Equal values; labels and units may be absent on one side but must not differ.

    50% is 50% and 0.5, and also 50: a sign on one side alone may be left out, not the factor.
    """
    if answer.label and truth.label and answer.label != truth.label:
        return False
    if answer.unit and truth.unit and answer.unit != truth.unit:
        return False
    if equal_values(answer.value, truth.value):
        return True
    if (answer.unit == "%") == (truth.unit == "%"):
        return False
    share, other = (answer, truth) if answer.unit else (truth, answer)
    return equal_values(("/", share.value, Fraction(100)), other.value)


_LABEL = re.compile(r"((?:[A-Za-z]|\\[a-z]+)(?:\([A-Za-z]\))?) ?= ?([^=<>]+)")
_CURRENCY = {"$": " dollars", "£": " pounds", "€": " euros"}
_MONEY = re.compile(r"([-+]?) ?([$£€]) ?(?=[-0-9.\\])(.*)|(.*[0-9]) ?([$£€])")
_PERCENT = re.compile(r"([-+]?[^-+*]*[0-9)}]) ?(?:%|percent|per cent)")
_MEASURE = re.compile(
    r"(.*?[0-9)}])( ?)((?:square |sq\.? |cubic )?[A-Za-z]+)(?: ?\^ ?\{?([23])\}?)?"  # amount, gap, name, power
    r"(?: ?(?:/|per\b|an?\b|each\b) ?([A-Za-z]+))?"
)
_SCALAR = re.compile(rf"([-+]?) ?({NUMBER})(?:[eE]([-+]?[0-9]{{1,3}}))?")


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
    return _Quantity(label, fraction(*scalar.groups("")) if scalar else parse_expression(text), unit)


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
    "tens|dozens|lakhs|crores|mill(?:i|ion)?s|times|positives|negatives|inverses|[a-z]*(?:ed|ly)s|sixes|sevens|eights|nines|scores|pairs|couples|(?:hundred|thousand|million|billion|trillion)s|halves|thirds|quarters|[a-z]*ths|"
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


# --- the last witness -------------------------------------------------------------------------

# What math-verify is asked about: matrices, unions of intervals, inequalities.
_BEYOND = re.compile(r"\\(?:begin|cup|cap|le|ge|lt|gt|ne)|[<>]")
# Missing are sums, integrals, binomials and the like, which sympy would compute however large, and functions, over
# which it can take minutes.
_WITNESSED = {*GREEK, *"frac sqrt pi infty cup cap le leq ge geq lt gt ne neq".split()}


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
