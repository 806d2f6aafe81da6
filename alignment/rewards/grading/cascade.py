"""The stages of grading, cheapest first: whether an answer equals a ground truth, and which stage
decided it (docs/grading.md). The last one is the library math-verify, for notation that our own
grammar does not read. It parses LaTeX and lets sympy compute, for any time and in any memory: it
runs in workers that limit both."""

import itertools
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

from alignment.rewards.grading.boxes import READ_CHARS, stated
from alignment.rewards.grading.compare import Comparison
from alignment.rewards.grading.expressions import CAPITALS, FUNCTIONS, GREEK
from alignment.rewards.grading.reading import is_label
from alignment.rewards.grading.text import (
    PATTERNS,
    RELATIONS,
    TABLES,
    normalise,
    split,
    split_with_signs,
    squeeze,
)
from alignment.system.limited_workers import CallFailed, LimitedWorkers

MAX_CHARS = 1000  # of an answer; a longer one is wrong
CACHED = 100_000  # verdicts kept
ASKED_CHARS = 200  # of a text that math-verify gets
MAX_EXPONENT = 10_000  # the product of all exponents in such a text
ASKED_SIDES = 3  # of a chain of equal values that math-verify gets
# of Python functions for one pair that math-verify gets; a second has about two million of them
CALLS = 3_000_000
SECONDS = 15.0  # of CPU time, a guard against computations in C that make no such calls

WORKERS = LimitedWorkers(("math_verify", __name__))  # This process's workers for all of grading.

FAILURES = ("work", "time-out", "memory", "died", "error")
"""Stages of a grading that did not decide: the reward is 0, and the run counts and reports it.
"work" is a limit in steps, which a pair meets always or never; "time-out" is a guard against what
hangs."""


class Verdict(NamedTuple):
    """Whether the answer is right, and the stage that decided: one of the cascade's, "bounds"
    (empty or too long), "unread" (no stage could read both texts), or one of `FAILURES` ("error" is
    a defect of the grader)."""

    equal: bool
    stage: str


def grade(answer: str, ground_truth: str, fast: bool = False) -> bool:
    """Whether `answer` equals `ground_truth`. Never raises; what is unread is wrong. `fast` leaves
    out the last two stages."""
    return grade_detail(answer, ground_truth, fast).equal


def grade_detail(answer: str, ground_truth: str, fast: bool = False) -> Verdict:
    """The verdict with the stage that decided it. Verdicts are cached, except those of failed
    gradings."""
    if max(len(answer), len(ground_truth)) > MAX_CHARS:
        return Verdict(False, "bounds")
    verdict = _decide(answer, ground_truth, fast)
    if fast or verdict.stage not in ("symbolic", "unread"):
        return verdict
    # a task with expressions in its answers will have some that only math-verify reads
    WORKERS.warm_up()
    try:
        return (
            _ask_once(_normalised(answer), _normalised(ground_truth))
            if verdict.stage == "unread"
            else verdict
        )
    except CallFailed as failure:
        return Verdict(False, str(failure))


@lru_cache(maxsize=CACHED)
def _decide(answer: str, truth: str, fast: bool) -> Verdict:
    """The stages that run in this process, which are bounded by construction."""
    answer, truth = stated(answer).strip(), stated(truth).strip()
    if not answer or not truth:
        return Verdict(False, "bounds")
    if answer == truth:
        return Verdict(True, "literal")
    answer, truth = _normalised(answer), _normalised(truth)
    if max(len(answer), len(truth)) > READ_CHARS:
        return (
            Verdict(True, "normalised")
            if squeeze(answer) == squeeze(truth)
            else Verdict(False, "bounds")
        )
    comparison = Comparison(fast)
    try:
        equal = comparison.texts(answer, truth)
    except Exception:
        # no text is known to come here, but a defect of the grader must not end a run of days
        return Verdict(False, "error")
    return Verdict(bool(equal), "unread" if equal is None else comparison.stage)


@lru_cache(maxsize=CACHED)
def _normalised(text: str) -> str:
    return normalise(stated(text))


def grade_many(
    answers: Sequence[str], ground_truths: Sequence[str], fast: bool = False
) -> list[Verdict]:
    """The verdict on each pair, in order. Raises ValueError where the two lengths differ."""
    with ThreadPoolExecutor(
        WORKERS.size
    ) as threads:  # each thread may wait for a worker that runs math-verify
        return list(
            threads.map(
                lambda pair: grade_detail(*pair, fast), zip(answers, ground_truths, strict=True)
            )
        )


_KNOWN = {
    *GREEK,
    *CAPITALS,
    *FUNCTIONS,
    *[
        "frac",
        "sqrt",
        "pi",
        "sum",
        "prod",
        "int",
        "lim",
        "binom",
        "begin",
        "end",
        "overline",
        "log",
        "ln",
        "degree",
        "angle",
    ],
}
_TO_LATEX = str.maketrans(
    {sign: rf"\{TABLES['signs'][sign].split()[0]} " for sign in "≤≥≠∪∩∖∞±∈→*"}
)


def ask_math_verify(answer: str, truth: str) -> Verdict:
    """math-verify's verdict on two normalised texts, or "unread" for texts that it does not get. It
    gets single expressions: of a chain, a = b = c, every side must equal every side of the other,
    and lists and other relations it gets never. Raises `CallFailed`."""
    sides, truths = _sides(answer), _sides(truth)
    if not sides or not truths:
        return Verdict(False, "unread")
    if len(sides) == len(truths) == 1:
        return _ask_of_one(sides[0], truths[0])
    for side, one_truth in itertools.product(sides, truths):
        verdict = _of_one(side, one_truth)
        if not verdict.equal:
            return verdict
    return Verdict(True, "math-verify")


def _sides(text: str) -> list[str]:
    """The equal sides of a normalised text, without a label before them; [] for a list, another
    relation, or a long chain."""
    sides, signs = split_with_signs(text, RELATIONS)
    if set(signs) - {"="} or not all(sides) or len(split(text, ",;")) != 1:
        return []
    if len(sides) > 1 and is_label(sides[0]):
        sides = sides[1:]
    return sides if len(sides) <= ASKED_SIDES else []


def _of_one(answer: str, truth: str) -> Verdict:
    """The verdict of all stages on two single expressions."""
    verdict = _decide(answer, truth, False)
    return _ask_of_one(answer, truth) if verdict.stage == "unread" else verdict


def _ask_of_one(answer: str, truth: str) -> Verdict:
    """math-verify's verdict on two single expressions. Raises `CallFailed`, but for a limit that
    they would meet again."""
    if not PATTERNS.for_math_verify.search(f"{answer} {truth}") or not (
        _harmless(answer) and _harmless(truth)
    ):
        return Verdict(False, "unread")
    pair = answer.translate(_TO_LATEX), truth.translate(_TO_LATEX)
    try:
        equal, _ = WORKERS.submit(f"{__name__}:math_verify_reading", pair, SECONDS, CALLS).result()
    except CallFailed as failure:
        if str(failure) != "work":
            raise
        return Verdict(False, "work")
    return Verdict(equal, "math-verify")


_ask_once = lru_cache(maxsize=CACHED)(ask_math_verify)  # a failure raises, so it is not cached


def _harmless(text: str) -> bool:
    """Whether a normalised text is short, complete, of known commands, and without words or large
    numbers. No equation is: math-verify reads `7 = 5` as 5, and takes unsolvable ones for equal.
    Nor is a relation of numbers: it is no answer."""
    if len(text) > ASKED_CHARS or not set(re.findall(r"\\([A-Za-z]+)", text)) <= _KNOWN:
        return False
    # Brackets match and nothing is missing: no \frac without its two parts, no sign at an end.
    ended = re.findall(r"\\begin ?\{(\w+)\}", text) == re.findall(r"\\end ?\{(\w+)\}", text)
    if not split(text) or not ended or PATTERNS.incomplete.search(text):
        return False
    bare = re.sub(r"\\(?:begin|end) ?\{[pbvB]?matrix\}", "&", text)
    signs = re.sub(r"\\[A-Za-z]+", " ", bare)
    if r"\int" in bare:
        signs = re.sub(r"d[a-z](?![A-Za-z])", " x", signs)
    powers, small = (
        len(pattern.findall(bare)) for pattern in (PATTERNS.power, PATTERNS.small_power)
    )
    if not powers == small <= 6 or PATTERNS.large.search(bare) or PATTERNS.unclear.search(signs):
        return False
    # Powers inside each other multiply their exponents, which C would compute for minutes without a
    # call that is counted.
    if math.prod(int(exponent) or 1 for exponent in PATTERNS.exponent.findall(bare)) > MAX_EXPONENT:
        return False
    equation = "=" in signs and not re.search(r"\\(?:sum|prod|int|lim)", bare)
    return not equation and bool(re.search("[A-Za-z]", signs) or not re.search("[<>≤≥≠]", bare))


def math_verify_reading(answer: str, truth: str) -> tuple[bool, str]:
    """math-verify's verdict on two texts in LaTeX, and how it read the answer. May take any time
    and memory; an error means no. Only its LaTeX extraction is safe: the one for plain expressions
    calls sympy's `parse_expr`, which is `eval`, while the LaTeX grammar gives sympy no text but
    number tokens. Its time-out by `signal.alarm` is off: the worker limits its work."""
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core.random import seed

    seed(0)  # sympy tries random points, and which it tries must not decide
    options = {
        "extraction_config": [LatexExtractionConfig()],
        "fallback_mode": "no_fallback",
        "parsing_timeout": None,
    }
    try:
        gold, target = (parse(f"${text}$", **options) for text in (truth, answer))
        # Rounding starts beyond the digits that a decimal has here, so that 0.33 is not 1/3 inside
        # a matrix either.
        equal = bool(gold and target) and verify(
            gold, target, float_rounding=15, numeric_precision=30, timeout_seconds=None
        )
        return equal, f"read as {str(target[0])[:40]}" if target else "not read"
    except MemoryError:
        raise
    except Exception as error:
        return False, type(error).__name__
