r"""The published grading rule, "the reference rule", with which audits and benchmarks compare ours.

It measures nothing by itself: `benchmarks.grader` and `benchmarks.audit_grader` ask it. It is the
rule under the R1-Zero reward of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): right if either the
string normalisation of MATH (Hendrycks et al. 2021, arXiv:2103.03874) or the
normalise-split-simplify rule of PRM800K (Lightman et al. 2023, arXiv:2305.20050) says so. This is a
new implementation from those descriptions. Theirs ends in sympy's `parse_expr`, which runs text as
Python; here our own parser evaluates the difference of two expressions, so verdicts can differ on
text that only one reads.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress

from pylatexenc.latex2text import LatexNodes2Text

from alignment.rewards.grading.expressions import Refused, parse_expression
from alignment.rewards.grading.values import equal_values

MAX_CHARS = 1000

# The published normal form of MATH (Hendrycks et al. 2021): spacing, sizing, degrees, dollars and a
# trailing unit are removed, fractions get braces.
_MATH_SPELLING = [
    (r"\n", ""),
    (r"\\!", ""),
    (r"\\\\", r"\\"),
    (r"\A\\text\{\s*(.*?)\s*\}\Z", r"\1"),
    (r"\\[td]frac", r"\\frac"),
    (r"\\left", ""),
    (r"\\right", ""),
    (r"\^\{\\circ\}", ""),
    (r"\^\\circ", ""),
    (r"\\\$", ""),
    (r"\\%", ""),
    ("%", ""),
    (r"\\text\{ (?s:.*)", ""),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
    (r"\A[^=]{0,2}=", ""),
    (r"\\sqrt(?!\{)(\w)", r"\\sqrt{\1}"),
    (" ", ""),
    (r"\\frac([0-9A-Za-z])([0-9A-Za-z])", r"\\frac{\1}{\2}"),
    (r"\\frac([0-9A-Za-z])\{", r"\\frac{\1}{"),
    (r"\A0\.5\Z", r"\\frac{1}{2}"),
    ("^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}"),
]

_REMOVED_UNITS = (
    "degree",
    "cm",
    "centimeter",
    "meter",
    "mile",
    "second",
    "minute",
    "hour",
    "day",
    "week",
    "month",
    "year",
    "foot",
    "feet",
    "inch",
    "yard",
)
# That of PRM800K (Lightman et al. 2023), before LaTeX is written out as plain text: units, currency
# and percent signs go.
_PRM800K_SPELLING = [
    (r"\A\\text\{(.+?)\}\Z", r"\1"),
    (r"\\%", ""),
    (r"\\\$", ""),
    (r"\$", ""),
    ("%", ""),
    (" or ", " , "),
    (" and ", " , "),
    ("million", "*10^6"),
    ("billion", "*10^9"),
    ("trillion", "*10^12"),
    *((rf"{unit}(?:es)?s? *(?:\^[0-9]+)?", "") for unit in _REMOVED_UNITS),
    (r"\^ *\\circ", ""),
    (r"(?s)\A\{(.*)\}\Z", r"\1"),
    (r",\\!", ""),
]

_Rules = list[tuple[str, str]]

_PLAIN_SIGNS = str.maketrans({"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"})
# it warns of every answer that is incomplete LaTeX
logging.getLogger("pylatexenc").setLevel(logging.ERROR)


def reference_verdict(answer: str, truth: str) -> tuple[bool, str]:
    """Whether the published rule accepts the answer, and which of its two parts decided. Never
    raises."""
    if max(len(answer), len(truth)) > MAX_CHARS:
        return False, "too long"
    answer = _unbox(answer)
    truth = _unbox(truth)
    spelled_answer = _rewrite(answer.strip(), _MATH_SPELLING)
    if spelled_answer == _rewrite(truth.strip(), _MATH_SPELLING):
        return True, "MATH: the same text"
    if _is_prm800k_equal(answer, truth):
        return True, "PRM800K: the same text or value"
    return False, "neither part"


def _unbox(text: str) -> str:
    r"""The content of the last \boxed or \fbox; the text itself without a box, or if its braces
    never close."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return text
    command = re.compile(r"\\[a-z]+\s*").match(text, start)
    if command is None:
        return text
    content = command.end()
    # without braces, it is the rest of the line or of the formula
    if not text.startswith("{", content):
        return text[content:].partition("$")[0].partition("\n")[0]
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, content):
        # the pattern also finds \{ and \}, which are no braces
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return text[content + 1 : brace.start()]
    return text


def _rewrite(text: str, rules: _Rules) -> str:
    """The text after regular expressions have replaced what they match, in order."""
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


def _is_prm800k_equal(answer: str, truth: str) -> bool:
    """Whether they are equal in PRM800K's normal form, or part by part of a tuple in the same
    brackets."""
    answer = _spell_as_prm800k(answer)
    truth = _spell_as_prm800k(truth)
    if answer == truth:
        return True
    if not answer:
        return False
    parts = _split_tuple(answer)
    true_parts = _split_tuple(truth)
    if len(parts) != len(true_parts):
        return False
    if len(true_parts) > 1 and (truth[0], truth[-1]) != (answer[0], answer[-1]):
        return False
    pairs = zip(parts, true_parts, strict=True)
    return all(_is_equal_part(part, true_part) for part, true_part in pairs)


def _is_equal_part(answer: str, truth: str) -> bool:
    """Whether parts are equal: a fraction must be the same one, reduced as the truth is; a whole
    number must be one; the rest is simplified."""
    fraction = r"-?[0-9]+\.?/0*[1-9][0-9]*\.?"
    if re.fullmatch(fraction, answer) and re.fullmatch(fraction, truth):
        return answer == truth
    if _is_whole(answer) != _is_whole(truth):
        return False
    # The published rule simplifies only expressions with few letters, and powers of one digit
    # without brackets.
    difference = f"({truth})-({answer})"
    without_names = difference.replace("sqrt", "").replace("frac", "")
    letters = {character for character in without_names if character.isalpha()}
    if len(letters) > 2 or re.search(r"\^[({]|\^[0-9]+\^|\^[0-9][0-9]", difference):
        return False
    with suppress(Refused):
        return equal_values(parse_expression(answer), parse_expression(truth)) is True
    return False


def _is_whole(text: str) -> bool:
    """Whether the text is a whole number."""
    with suppress(ValueError, OverflowError):
        number = float(text.replace(",", ""))
        return abs(number - round(number)) <= 1e-7
    return False


def _split_tuple(text: str) -> list[str]:
    """The parts of a tuple or an interval, whose brackets have none inside; else the text alone."""
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)  # 1,234 is one number
    has_brackets = len(text) > 2 and text[0] in "([" and text[-1] in ")]"
    if not has_brackets or re.search(r"[()\[\]]", text[1:-1]):
        return [text]
    return [part.strip() for part in text[1:-1].split(",")]


def _spell_as_prm800k(text: str) -> str:
    """The text in lower case, without units, currency and percent signs, its LaTeX written out as
    plain text, and without spaces."""
    text = _rewrite(text, _PRM800K_SPELLING)
    if _is_whole(text):
        text = str(round(float(text.replace(",", ""))))
    if "\\" in text:
        text = re.sub(r"\\[td]frac", r"\\frac", text).replace("\\frac", " \\frac")
        with suppress(Exception):  # pylatexenc's own errors, and those that hostile nesting causes
            text = LatexNodes2Text().latex_to_text(text).translate(_PLAIN_SIGNS).strip()
    text = re.sub("- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text).replace(" ", "")
    return re.sub("[{}]", "", text).lower()
