r"""Spelling: answers are rewritten with ASCII digits and letters, plain \frac, one sign for each
relation, no sizing. `TABLES` holds the tables of `notation.toml`, `PATTERNS` the regular
expressions of `patterns.toml`, as attributes.
"""

import itertools
import re
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace


def _read(name):
    return tomllib.loads(Path(__file__).with_name(name).read_text("utf-8"))


TABLES, _PATTERNS = _read("notation.toml"), _read("patterns.toml")
RELATIONS = "=<>≤≥≠≈∈"
_SIGN_OF = {name: sign for sign, names in TABLES["signs"].items() for name in names.split()}
_CHARACTERS = str.maketrans(
    {
        c: unicodedata.normalize("NFKC", c)
        for c in map(chr, (*range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800)))
    }
    | {
        c: r"\frac{{{}}}{{{}}}".format(*tuple(unicodedata.normalize("NFKC", c).split("⁄")))
        for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    }
    | {
        c: rf"\{name} "
        for name, characters in (TABLES["greek"] | TABLES["greek_capitals"]).items()
        for c in characters
    }
    | {
        c: replacement
        for replacement, characters in TABLES["characters"].items()
        for c in characters
    }
)
# between numbers on lines, or in columns, of their own
_LINES = re.compile(r"(?<=[0-9])[ ,;]*[\t\r\n]\s*(?=[-+−]?[0-9])")
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ₀₁₂₃₄₅₆₇₈₉", "0123456789-+nx0123456789")

_REPLACEMENTS: dict[str, Callable[[re.Match[str]], str]] = {
    "SIGN": lambda match: f" {_SIGN_OF[match[1]]} " if match[1] in _SIGN_OF else match[0],
    "JOINED": lambda match: match[0].replace(" ", ""),
}
_REWRITES = [
    (re.compile(pattern), _REPLACEMENTS.get(text, text)) for pattern, text in TABLES["rewrites"]
]

# Each pattern by name, with those that it names filled in.
_WHOLE = {
    "verbs": "|".join(TABLES["verbs"].split()),
    **{name: "|".join(TABLES[name]) for name in ("scales", "greek")},
}
for _name, _parts in _PATTERNS.items():
    _WHOLE[_name] = re.sub(r"\(\?&(\w+)\)", lambda named: _WHOLE[named[1]], "".join(_parts))
PATTERNS = SimpleNamespace(**{name: re.compile(pattern) for name, pattern in _WHOLE.items()})


def normalise(text: str) -> str:
    """The text in one spelling. The time is linear in its length, except for the squares of short
    runs."""
    text = _LINES.sub(", ", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ]+", r"^{\g<0>}", text.translate(_CHARACTERS))
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", r"_{\g<0>}", text).translate(_SCRIPTS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    return text.strip()


def squeeze(text: str) -> str:
    """The text without spaces that carry no meaning. Those between words and beside commas and
    points do: 1, 234; 1 2."""
    return re.sub(r" ?([^\w\s.,]) ?", r"\1", text)


def unbox(text: str) -> str:
    r"""The content of the last \boxed or \fbox; the text itself without a box, or if its braces
    never close."""
    return last_box(text)[1]


def last_box(text: str) -> tuple[str, str, str]:
    r"""The text before the last \boxed or \fbox, in it, and after it; ("", text, "") without a
    box."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return "", text, ""
    content = re.compile(r"\\[a-z]+\s*").match(text, start).end()
    if not text.startswith("{", content):
        inner = text[content:].partition("$")[0].partition("\n")[0]
        return text[:start], inner, text[content + len(inner) :]
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, content):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[:start], text[content + 1 : brace.start()], text[brace.end() :]
    return "", text, ""


def split(text: str, separators: str = ",") -> list[str]:
    """The pieces between separators outside brackets; [] if those do not match. Any closes any:
    intervals may be half-open."""
    depths = _depths(text)
    return split_with_signs(text, separators)[0] if min(depths) == depths[-1] == 0 else []


def split_with_signs(text: str, separators: str) -> tuple[list[str], list[str]]:
    """The pieces between the separators outside all brackets, also if the brackets do not match,
    and those separators."""
    cuts = [i for i, depth in enumerate(_depths(text)[1:]) if depth == 0 and text[i] in separators]
    return [text[i + 1 : j].strip() for i, j in itertools.pairwise([-1, *cuts, len(text)])], [
        text[i] for i in cuts
    ]


def _depths(text: str) -> list[int]:
    """The number of open brackets before the text and after each of its characters."""
    return list(itertools.accumulate(((c in "([{⟨") - (c in ")]}⟩") for c in text), initial=0))
