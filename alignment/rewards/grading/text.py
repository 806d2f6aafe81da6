r"""Normalises the spelling of answers and splits them at separators outside brackets.

A normalised answer has ASCII digits and letters, \frac for all fractions, one sign for each
relation (≤ for \leq and \le), and no commands of size such as \left and \big.
"""

import itertools
import re
import unicodedata

from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.rewrites import REWRITES

RELATIONS = "=<>≤≥≠≈∈∉≡"

# The line break or tab between two numbers, with the commas around it.
_BREAK_BETWEEN_NUMBERS = re.compile(r"(?<=[0-9])[ ,;]*[\t\r\n]\s*(?=[-+−]?[0-9])")

# A Markdown heading above an answer, "## Answer", and items on lines of their own, "- cows: 12".
_HEADING = re.compile(
    r"(?i)^\s*#{1,6}\s+(?:the )?(?:final |correct )?(?:answer|solution|result)s?:?[ \t]*\n"
)
_ITEM_AFTER_LINE = re.compile(
    r"(?<=[0-9a-z])[ ,;]*\n\s*(?:[-*+]\s+)?(?=\*{0,2}[A-Za-z][A-Za-z ]*(?:\*{0,2}:|:\*{0,2})\s)"
)
_FIRST_ITEM = re.compile(r"^\s*[-*+]\s+(?=\*{0,2}[A-Za-z][A-Za-z ]*(?:\*{0,2}:|:\*{0,2})\s.*\n)")

_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ₀₁₂₃₄₅₆₇₈₉", "0123456789-+nx0123456789")

_FULL_WIDTH = range(0xFF01, 0xFF5F)
_MATHEMATICAL_LETTERS = range(0x1D400, 0x1D800)
_FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"


def _plain_characters() -> dict[int, str]:
    """Plain replacements of special characters, as a table for `str.translate`."""
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
    """The text in one spelling, so that equal answers become equal strings.

    The time is linear in the length of the text, but quadratic in the length of a run of letters,
    digits or spaces.
    """
    text = single_backslashes(text)
    text = _FIRST_ITEM.sub("", _HEADING.sub("", text))
    text = _ITEM_AFTER_LINE.sub(", ", text)
    text = _BREAK_BETWEEN_NUMBERS.sub(", ", text).translate(_CHARACTERS)
    text = _SUPERSCRIPTS.sub(r"^{\g<0>}", text)
    text = _SUBSCRIPTS.sub(r"_{\g<0>}", text)
    text = text.translate(_SCRIPTS)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text.strip())
    return text.strip()


_BACKSLASHES = re.compile(r"(\\+)([A-Za-z]+|.?)")
# Names that show that the backslashes before them begin a command, and end no line.
_FORMULA_NAMES = frozenset(TABLES["formula_names"].split())


def single_backslashes(text: str) -> str:
    r"""The text with half of its backslashes, if all of them are doubled, as in `\\frac{1}{2}`,
    which an extra round of escaping leaves. Two backslashes that end a line stay."""
    if "\\\\" not in text:
        return text
    commands = _BACKSLASHES.findall(text)
    if any(len(backslashes) % 2 for backslashes, _ in commands):
        return text
    if not any(name in _FORMULA_NAMES for _, name in commands):
        return text
    return text.replace("\\\\", "\\")


def squeeze(text: str) -> str:
    """The text without the spaces that carry no meaning.

    A space between two words carries meaning ("1 2" is not "12"), and so does one beside a comma or
    a point ("1, 234" is a list, "1,234" a number).
    """
    return re.sub(r" ?([^\w\s.,]) ?", r"\1", text)


def split(text: str, separators: str = ",") -> list[str]:
    """The pieces between the separators outside all brackets; [] if brackets are unbalanced.

    Any closing bracket closes any opening one, since intervals may be half-open: [0, 1).
    """
    depths = _depths(text)
    is_balanced = min(depths) == 0 and depths[-1] == 0
    if not is_balanced:
        return []
    pieces, _ = split_with_signs(text, separators)
    return pieces


def split_with_signs(text: str, separators: str) -> tuple[list[str], list[str]]:
    """The pieces between the separators outside all brackets, and those separators.

    Unbalanced brackets are allowed.
    """
    depths_after = _depths(text)[1:]
    cuts = [i for i, depth in enumerate(depths_after) if depth == 0 and text[i] in separators]
    edges = [-1, *cuts, len(text)]
    pieces = [text[start + 1 : end].strip() for start, end in itertools.pairwise(edges)]
    return pieces, [text[cut] for cut in cuts]


# How a bracket changes the number of open brackets.
_DEPTH_CHANGES = dict.fromkeys("([{⟨", 1) | dict.fromkeys(")]}⟩", -1)


def _depths(text: str) -> list[int]:
    """The number of open brackets before the text and after each of its characters."""
    changes = (_DEPTH_CHANGES.get(character, 0) for character in text)
    return list(itertools.accumulate(changes, initial=0))
