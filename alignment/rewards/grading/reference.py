r"""The published grading rule, with which audits and benchmarks compare ours: "the reference rule".

It is the rule under the R1-Zero reward of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), which joins the string
normalisation of MATH (Hendrycks et al. 2021, arXiv:2103.03874) with the normalise-split-simplify rule of PRM800K (Lightman
et al. 2023, arXiv:2305.20050): right if either says so. This is a new implementation from those descriptions. The published
rule ends in sympy's `parse_expr`, which runs text as Python; here our own parser evaluates the difference of two expressions,
so the verdicts can differ on text that only one of the two reads.
"""

from __future__ import annotations

import logging
import re

from pylatexenc.latex2text import LatexNodes2Text

from alignment.rewards.grading.expressions import Refused, parse_expression
from alignment.rewards.grading.text import unbox
from alignment.rewards.grading.values import equal_values

MAX_CHARS = 1000

logging.getLogger("pylatexenc").setLevel(logging.ERROR)  # it warns of every answer that is incomplete LaTeX

_UNITS = (
    "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
).split()  # those that PRM800K's rule removes


def reference_verdict(answer: str, truth: str) -> tuple[bool, str]:
    """Whether the published rule accepts the answer, and which of its two parts decided. Never raises."""
    if max(len(answer), len(truth)) > MAX_CHARS:
        return False, "too long"
    answer, truth = unbox(answer), unbox(truth)
    if _math_spelling(answer) == _math_spelling(truth):
        return True, "MATH: the same text"
    if _prm800k_equal(answer, truth):
        return True, "PRM800K: the same text or value"
    return False, "neither part"


def _math_spelling(text: str) -> str:
    """MATH's normal form: spacing, sizing, degrees, dollars and a trailing unit removed, fractions in braces."""
    text = text.strip().replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    if match := re.fullmatch(r"\\text\{(.*?)\}", text):
        text = match[1].strip()
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    for removed in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "\\%", "%"):
        text = text.replace(removed, "")
    text = text.partition("\\text{ ")[0]
    text = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", text)
    label, equals, value = text.partition("=")
    text = value if equals and len(label) <= 2 else text
    text = re.sub(r"\\sqrt(?!\{)(\w)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([0-9A-Za-z])([0-9A-Za-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([0-9A-Za-z])\{", r"\\frac{\1}{", text)
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?[0-9]+)/(-?[0-9]+)$", r"\\frac{\1}{\2}", text)


def _prm800k_equal(answer: str, truth: str) -> bool:
    """Equal in PRM800K's normal form, or part by part of a tuple in the same brackets."""
    answer, truth = _prm800k_spelling(answer), _prm800k_spelling(truth)
    if answer == truth:
        return True
    if not answer:
        return False
    parts_a, parts_t = _elements(answer), _elements(truth)
    if len(parts_t) > 1 and (truth[0], truth[-1]) != (answer[0], answer[-1]):
        return False
    return len(parts_a) == len(parts_t) and all(map(_same_element, parts_a, parts_t))


def _same_element(answer: str, truth: str) -> bool:
    """A fraction must be the same one, reduced as the truth is; a whole number must be one; the rest is simplified."""
    simple = r"-?[0-9]+\.?/0*[1-9][0-9]*\.?"
    if re.fullmatch(simple, answer) and re.fullmatch(simple, truth):
        return answer == truth
    if _is_whole(answer) != _is_whole(truth):
        return False
    # The published rule simplifies only expressions with few letters, and powers of one digit without brackets.
    both = f"({truth})-({answer})"
    letters = {c for c in both.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > 2 or re.search(r"\^[({]|\^[0-9]+\^|\^[0-9][0-9]", both):
        return False
    try:
        return equal_values(parse_expression(answer), parse_expression(truth)) is True
    except Refused:
        return False


def _is_whole(text: str) -> bool:
    try:
        return abs(float(text.replace(",", "")) - round(float(text.replace(",", "")))) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _elements(text: str) -> list[str]:
    text = _join_thousands(text)
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not re.search(r"[()\[\]]", text[1:-1]):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text]


def _join_thousands(text: str) -> str:
    return re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)


def _prm800k_spelling(text: str) -> str:
    """Lower case without units, currency and percent signs; LaTeX written out as plain text; no spaces."""
    if match := re.fullmatch(r"\\text\{(.+?)\}", text):
        text = match[1]
    for removed in ("\\%", "\\$", "$", "%"):
        text = text.replace(removed, "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for unit in _UNITS:
        text = re.sub(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = text.replace(",\\!", "")
    if _is_whole(text):
        text = str(round(float(text.replace(",", ""))))
    if "\\" in text:
        text = _as_text(text)
    text = re.sub("- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text).replace(" ", "")
    return text.replace("{", "").replace("}", "").lower()


def _as_text(latex: str) -> str:
    latex = re.sub(r"\\[td]frac", r"\\frac", latex).replace("\\frac", " \\frac")
    try:
        text = LatexNodes2Text().latex_to_text(latex)
    except Exception:  # pylatexenc's own errors, and those that hostile nesting causes
        return latex
    for sign, plain in (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*")):
        text = text.replace(sign, plain)
    return text.strip()
