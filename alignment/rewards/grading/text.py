r"""Spelling and splitting: answers get ASCII digits and letters, plain \frac, one sign for each
relation, and no sizing; then they are taken apart at signs outside brackets.
"""

import itertools
import re
import unicodedata

from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.rewrites import REWRITES

RELATIONS = "=<>≤≥≠≈∈"

# Between numbers on lines, or in columns, of their own.
_LINES = re.compile(r"(?<=[0-9])[ ,;]*[\t\r\n]\s*(?=[-+−]?[0-9])")

_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ₀₁₂₃₄₅₆₇₈₉", "0123456789-+nx0123456789")

_FULL_WIDTH = range(0xFF01, 0xFF5F)
_MATHEMATICAL_LETTERS = range(0x1D400, 0x1D800)
_FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"


def _plain_characters() -> dict[int, str]:
    """The replacement of every character that has one, for `str.translate`."""
    replacements: dict[str, str] = {}
    for code in (*_FULL_WIDTH, *_MATHEMATICAL_LETTERS):
        replacements[chr(code)] = unicodedata.normalize("NFKC", chr(code))
    for character in _FRACTIONS:
        top, bottom = unicodedata.normalize("NFKC", character).split("⁄")
        replacements[character] = rf"\frac{{{top}}}{{{bottom}}}"
    for name, characters in (TABLES["greek"] | TABLES["greek_capitals"]).items():
        replacements |= dict.fromkeys(characters, rf"\{name} ")
    for replacement, characters in TABLES["characters"].items():
        replacements |= dict.fromkeys(characters, replacement)
    return str.maketrans(replacements)


_CHARACTERS = _plain_characters()


def normalise(text: str) -> str:
    """The text in one spelling.

    The time is linear in its length, except for the squares of short runs.
    """
    text = _LINES.sub(", ", text).translate(_CHARACTERS)
    text = _SUPERSCRIPTS.sub(r"^{\g<0>}", text)
    text = _SUBSCRIPTS.sub(r"_{\g<0>}", text)
    text = text.translate(_SCRIPTS)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text.strip())
    return text.strip()


def squeeze(text: str) -> str:
    """The text without spaces that carry no meaning.

    Those between words and beside commas and points do: 1, 234; 1 2.
    """
    return re.sub(r" ?([^\w\s.,]) ?", r"\1", text)


def split(text: str, separators: str = ",") -> list[str]:
    """The pieces between separators outside brackets; [] if brackets do not match.

    Any closing bracket closes any opening one: intervals may be half-open.
    """
    depths = _depths(text)
    if not min(depths) == depths[-1] == 0:
        return []
    pieces, _ = split_with_signs(text, separators)
    return pieces


def split_with_signs(text: str, separators: str) -> tuple[list[str], list[str]]:
    """The pieces between the separators outside all brackets, and those separators.

    Brackets need not match.
    """
    depths_after = _depths(text)[1:]
    cuts = [i for i, depth in enumerate(depths_after) if depth == 0 and text[i] in separators]
    edges = [-1, *cuts, len(text)]
    pieces = [text[start + 1 : end].strip() for start, end in itertools.pairwise(edges)]
    return pieces, [text[cut] for cut in cuts]


_DEPTH_STEPS = dict.fromkeys("([{⟨", 1) | dict.fromkeys(")]}⟩", -1)


def _depths(text: str) -> list[int]:
    """The number of open brackets before the text and after each of its characters."""
    steps = (_DEPTH_STEPS.get(character, 0) for character in text)
    return list(itertools.accumulate(steps, initial=0))
