r"""Spelling: answers are rewritten with ASCII digits and letters, plain \frac, one sign for each relation, no sizing."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from alignment.rewards.grading.tables import TABLES

RELATIONS = "=<>≤≥≠≈∈"
_SIGN_OF = {name: sign for sign, names in TABLES["signs"].items() for name in names.split()}
_WIDE = [chr(c) for span in ((0xFF01, 0xFF5F), (0x1D400, 0x1D800)) for c in range(*span)]
_VULGAR = {c: Fraction(unicodedata.numeric(c)).limit_denominator(8) for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_GREEK = TABLES["greek"] | TABLES["greek_capitals"]
_CHARACTERS = str.maketrans(
    {c: unicodedata.normalize("NFKC", c) for c in _WIDE}
    | {c: rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for c, value in _VULGAR.items()}
    | {c: rf"\{name} " for name, characters in _GREEK.items() for c in characters}
    | {c: replacement for replacement, characters in TABLES["characters"].items() for c in characters}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ", "0123456789-+nx")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_LEAD = (
    r"(?i)^(?:#### ?|= ?)?(?:(?:so|thus|therefore|hence|and|at),? )?(?:(?:the |my |our |your )?(?:(?:final|correct|exact) )?"
    r"(?:answers?|solutions?|roots?|results?|values?)(?: (?:is|are):?|:| ?=) ?){0,2}"
)

_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}"),
        (r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}"),
        (r"([0-9])[\u0304\u0305]", r"\\overline{\1}"),
        (r"\\(?:bar|dot)\s*\{?([0-9]+)\}?", r"\\overline{\1}"),
        (r"\}(?<=\\overline\{[0-9]\})\\overline\{(?=[0-9]\})", ""),  # one bar over each of two digits
        (r"^\\(?:text|mbox)\s*\{\s*\$([^$]*)\$\s*\}$", r"\1"),
        (r"\\sqrt(?=[0-9])([0-9]+)", r"\\sqrt{\1}"),  # the sign √ and sloppy LaTeX cover the whole number
        (r"^\*\*(.*)\*\*$|^\*\*([^*]*[A-Za-z][^*]*)\*\*", r"\1\2 "),  # Markdown bold
        (r"^__(.*)__$", r"\1"),
        (r"(?<=[0-9])(?:\{,\}|,?(?:\\[,!])+)(?=[0-9]{3}(?![0-9]))", ","),  # 10{,}000, 10\,000 and 10,\!000
        (rf"\\(?:{'|'.join(TABLES['sizing_commands'].split())})(?![A-Za-z])\.?|(?<!\\)\\[()\[\]]", " "),
        (r"\\(?:therefore|because)(?![A-Za-z])|(?i:\.? ?I hope (?:it|this) is correct\.?)\s*$", " "),
        (r"(?<![A-Za-z\\])(?:np|numpy|math|sp|sympy)\.(?=[A-Za-z])", ""),  # written as code
        (r"^(?:Matrix|array)\((\[.*\])\)$", r"\1"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r" \\pi "),
        (r"(?:the )?square root of ([0-9]+)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(?:oo|[Ii]nf(?:inity)?)(?![A-Za-z])", r" \\infty "),
        (r"(?<!\\)\\[,;:!> ]|\\q?quad(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}", " "),
        (r"^\s*~(?=[^~]*$)", "≈"),
        (r"\\(?:mathbb|mathbf|mathrm|Bbb)\s*\{?([RZNQC])\}?(?![a-z])", lambda m: "ℝℤℕℚℂ"["RZNQC".index(m[1])]),
        (r"\\(?:mathbf|boldsymbol|hat|vec|bm|mathrm\{\\mathbf)\s*\{? ?\\?([ijk])(?:math)? ?\}?(?![A-Za-z(])", r" \\\1hat "),
        (rf"\\(?:{'|'.join(TABLES['opened_commands'].split())})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (r"\\(?:text)?color\{[a-z]+\}|\\[hv]?phantom\{[^{}]{0,2}\}", " "),
        (r"\\(?:arc)?(?:land|wedge)(?![A-Za-z])", " and "),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])C\(([0-9]+), ?([0-9]+)\)", r"\\binom{\1}{\2}"),
        (r"(?<![\w.])([0-9]*\.[0-9]*)\(([0-9]{1,20})\)", r"\1\\overline{\2}"),  # 0.1(6)
        (r"(?<=[0-9])\s*:\s*(?=[0-9])", ":"),
        (r"(?<=[(\[,])\s*\+\s*(?=\\infty)|^\+\s*(?=\\infty)", " "),
        (r"-\s+(?=\\infty)", "-"),
        (r"\\([A-Za-z]+)", lambda m: f" {_SIGN_OF[m[1]]} " if m[1] in _SIGN_OF else m[0]),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degrees?(?![A-Za-z])", r" \\degree "),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", "*"),  # 1.5 x 10^3
        (r"(?<=[0-9]) ?\^ ?\{? ?(st|nd|rd|th) ?\}?", r"\1"),
        (r"<=|=<", "≤"),
        (r">=|=>", "≥"),
        (r"(?<=[ a-z])!=", "≠"),
        (r"\+/-|\+-(?=[0-9\\ ])", "±"),
        (r"(?<![0-9])(?<![0-9][ ,])([1-9][0-9]{0,2}(?: [0-9]{3})+)(?![ ,]?[0-9]| ?/)", lambda m: m[1].replace(" ", "")),
        (r"\\([%{}#&])", r"\1"),
        (r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 "),  # paired: maths delimiters; a single one is currency
        (r"\\\$", "$"),
        (r"[~\s]+", " "),
        (r"(?<=[)\]}]) ?U ?(?=[(\[{])", "∪"),
        (
            r"^ ?([\]\[(])([^()\[\]]*,[^()\[\]]*)([\[\])]) ?$",
            lambda m: "([("["][(".index(m[1])] + m[2] + ")])"["[])".index(m[3])],
        ),
        (r"^ ?<([^<>]*,[^<>]*)> ?$", r"⟨\1⟩"),
        (_LEAD, ""),
        (r'^ ?(["`])(.*)\1 ?$', r"\2"),
        (r"(?<![.])[.]$", ""),  # a full stop, unless it belongs to an ellipsis
    )
)


def normalise(text: str) -> str:
    """The text in one spelling. The time is linear in its length, except for the squares of short runs."""
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    return text.strip()


def squeeze(text: str) -> str:
    """The text without spaces that carry no meaning. Those between words and beside commas and points do: 1, 234; 1 2."""
    return re.sub(r" ?([^\w\s.,]) ?", r"\1", text)


def unbox(text: str) -> str:
    r"""The content of the last \boxed or \fbox; the text itself without a box, or if its braces never close."""
    return last_box(text)[1]


def last_box(text: str) -> tuple[str, str, str]:
    r"""The text before the last \boxed or \fbox, in it, and after it; ("", text, "") without a box."""
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
    """The pieces between the separators outside all brackets; [] if the brackets do not match.

    Any closing bracket closes any opening one, as those of half-open intervals do.
    """
    pieces, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{⟨") - (c in ")]}⟩")
        if depth < 0:
            return []
        if c in separators and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    return [*pieces, text[start:].strip()] if depth == 0 else []
