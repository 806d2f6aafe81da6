"""The last stage of grading: the library math-verify, for notation that our own grammar does not read.

It reads LaTeX with a grammar and then lets sympy compute, for any time and in any memory: it runs in workers that limit both.
"""

import re
from collections.abc import Sequence
from concurrent.futures import Future

from alignment.rewards.grading.expressions import CAPITALS, FUNCTIONS, GREEK
from alignment.rewards.grading.text import TABLES, split
from alignment.system.limited_workers import CallFailed, LimitedWorkers

MAX_CHARS = 200
MAX_CHARS_OF_AUDITS = 1000
SECONDS = 1.5  # of CPU time for one pair

Outcome = tuple[bool, str]

WORKERS = LimitedWorkers(("math_verify", "alignment.rewards.grading.cascade"))  # This process's workers for all of grading.

_KNOWN = {*GREEK, *CAPITALS, *FUNCTIONS, *"frac sqrt pi sum prod int lim binom begin end overline log ln degree angle".split()}
_NOTATION = re.compile(r"\\(?:begin|sum|prod|int|lim)(?![A-Za-z])")  # our own grammar reads these in some places only, or never
_MISSING = re.compile(
    r"\{ ?\}|[-+*/^_=<≤∪∩∖] ?$|^ ?[*/^_=<>≤≥∪∩∖]|"
    r"\\(?:frac|binom)(?! ?(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\} ?){2})|\\(?:sqrt|sum|prod|int|lim|begin)(?! ?[\[{_A-Za-z0-9])"
)
_TO_LATEX = str.maketrans({sign: rf"\{TABLES['signs'][sign].split()[0]} " for sign in "≤≥≠∪∩∖∞±∈→*"})


def ask_math_verify(answer: str, truth: str) -> Outcome:
    """math-verify's verdict on two normalised texts and "math-verify", or "unread" for texts that it does not get. Raises
    `CallFailed`."""
    # Only where one of the texts has notation that math-verify alone reads, and both are harmless.
    if not _NOTATION.search(f"{answer} {truth}") or not (_harmless(answer) and _harmless(truth)):
        return False, "unread"
    return _submit(answer.translate(_TO_LATEX), truth.translate(_TO_LATEX)).result()[0], "math-verify"


def _submit(answer: str, truth: str) -> Future:
    return WORKERS.submit(f"{__name__}:math_verify_reading", (answer, truth), SECONDS)


def math_verify_many(pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
    """math-verify's verdict on each unchanged (answer, truth) and its reading of the answer; for audits."""
    replies = [_submit(*pair) if max(map(len, pair)) <= MAX_CHARS_OF_AUDITS else None for pair in pairs]
    return list(map(_outcome, replies))


def _outcome(reply: Future | None) -> Outcome:
    if reply is None:
        return False, "too long to ask"
    try:
        return tuple(reply.result())
    except CallFailed as failure:
        return False, str(failure)


def _harmless(text: str) -> bool:
    """Whether a normalised text is short, complete, made of known commands, and without words or large numbers. An equation is
    not harmless: math-verify reads `7 = 5` as 5, and takes unsolvable equations for equal. Nor is a relation of numbers, which
    is true or false and states no answer."""
    if len(text) > MAX_CHARS or not set(re.findall(r"\\([A-Za-z]+)", text)) <= _KNOWN or not _whole(text):
        return False
    bare = re.sub(r"\\(?:begin|end) ?\{[pbvB]?matrix\}", "&", text)
    signs = re.sub(r"\\[A-Za-z]+", " ", bare)
    if r"\int" in bare:
        signs = re.sub(r"d[a-z](?![A-Za-z])", " x", signs)
    relation = re.search("[<>≤≥≠]", bare)
    # No number or power so large that computing it takes long, and no two digits after a \frac, which it misreads.
    powers = len(re.findall(r"\^|\*\*", bare))
    if powers != len(re.findall(r"\^ ?(?:[\w∞]|\{ ?-? ?[\w∞]{1,2} ?\})(?! ?[\^*!])", bare)) or powers > 6:
        return False
    if re.search(r"[0-9]{7}|\\frac ?[0-9]{2}|! ?!|[0-9]{3} ?!|\\binom[^}]*[0-9]{4}", bare):
        return False
    sums = re.search(r"\\(?:sum|prod|int|lim)", bare)
    if re.search(r"[A-Za-z]{2}|[0-9]{16}|[0-9] +[0-9]|[!'\"`:;$%#~?≈∅]|\.\.", signs) or ("=" in signs and not sums):
        return False
    return not (relation and not re.search("[A-Za-z]", signs))


def _whole(text: str) -> bool:
    """Whether brackets match and nothing is missing: no \\frac without its two parts, no sign at an end."""
    ended = re.findall(r"\\begin ?\{(\w+)\}", text) == re.findall(r"\\end ?\{(\w+)\}", text)
    return bool(split(text)) and ended and not _MISSING.search(text)


def math_verify_reading(answer: str, truth: str) -> tuple[bool, str]:
    """math-verify's verdict on two texts in LaTeX, and how it read the answer. May take any time and memory; an error means
    no. Only its LaTeX extraction is safe: the one for plain expressions calls sympy's `parse_expr`, which is `eval`, while the
    LaTeX grammar gives sympy no text but number tokens. Its time-out by `signal.alarm` is off: the worker has its own."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig()]
    try:
        gold, target = (
            parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None) for text in (truth, answer)
        )
        # Rounding starts beyond the digits that a decimal has here, so that 0.33 is not 1/3 inside a matrix either.
        equal = bool(gold and target) and verify(gold, target, float_rounding=15, numeric_precision=30, timeout_seconds=None)
        return equal, f"read as {str(target[0])[:40]}" if target else "not read"
    except MemoryError:
        raise
    except Exception as error:
        return False, type(error).__name__
