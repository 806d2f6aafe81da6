"""The stages of grading, cheapest first: whether an answer equals a ground truth, and which stage
decided it (docs/grading.md).

The last one is the library math-verify, for notation that our own grammar does not read. It parses
LaTeX and lets sympy compute, for any time and in any memory: it runs in workers that limit both.
"""

import itertools
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

from alignment.rewards.grading import patterns
from alignment.rewards.grading.boxes import READ_CHARS, stated
from alignment.rewards.grading.compare import Comparison
from alignment.rewards.grading.expressions import CAPITALS, FUNCTIONS, GREEK
from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.reading import is_label
from alignment.rewards.grading.text import (
    RELATIONS,
    normalise,
    split,
    split_with_signs,
    squeeze,
)
from alignment.system.limited_workers import CallFailed, LimitedWorkers

MAX_CHARS = 1000  # of an answer; a longer one is wrong
CACHE_SIZE = 100_000  # results that each cache keeps

# What math-verify gets, and its limits.
FOREIGN_CHARS = 200  # of a text
FOREIGN_SIDES = 3  # of a chain of equal values
MAX_POWERS = 6  # in a text
MAX_EXPONENT = 10_000  # the product of all exponents in a text
# Calls of Python functions for one pair; a second has about two million of them.
CALLS = 3_000_000
SECONDS = 15.0  # of CPU time, a guard against computations in C that make no such calls

WORKERS = LimitedWorkers(("math_verify", __name__))  # This process's workers for all of grading.

FAILURES = ("undecided", "work", "time-out", "memory", "died", "error")
"""Stages of a grading that did not decide: the reward is 0, and the run counts and reports it.
"undecided" are numbers too large to be compared; "work" is a limit in steps, which a pair meets
always or never; "time-out" is a guard against what hangs."""


class Verdict(NamedTuple):
    """Whether the answer is right, and the stage that decided.

    The stage is one of the cascade's, "bounds" (empty or too long), "unread" (no stage could read
    both texts), or one of `FAILURES` ("error" is a defect of the grader).
    """

    equal: bool
    stage: str


def grade(answer: str, ground_truth: str, fast: bool = False) -> bool:
    """Whether `answer` equals `ground_truth`.

    Never raises; what is unread is wrong. `fast` leaves out the last two stages, "symbolic" and
    "math-verify".
    """
    return grade_detail(answer, ground_truth, fast).equal


def grade_detail(answer: str, ground_truth: str, fast: bool = False) -> Verdict:
    """The verdict with the stage that decided it.

    Verdicts are cached, except those of failed gradings.
    """
    if max(len(answer), len(ground_truth)) > MAX_CHARS:
        return Verdict(False, "bounds")
    verdict = _decide(answer, ground_truth, fast)
    if fast or verdict.stage not in ("symbolic", "unread"):
        return verdict
    # A task with such a pair will have others that only math-verify reads. Its workers start now,
    # also where this pair does not need them.
    WORKERS.warm_up()
    if verdict.stage == "symbolic":
        return verdict
    try:
        return _ask_math_verify_cached(normalise_answer(answer), normalise_answer(ground_truth))
    except CallFailed as failure:
        return Verdict(False, str(failure))


@lru_cache(maxsize=CACHE_SIZE)
def _decide(answer: str, truth: str, fast: bool) -> Verdict:
    """The stages that run in this process, which are bounded by construction."""
    stated_answer = stated(answer).strip()
    stated_truth = stated(truth).strip()
    if not stated_answer or not stated_truth:
        return Verdict(False, "bounds")
    if stated_answer == stated_truth:
        return Verdict(True, "literal")
    normalised_answer = normalise_answer(stated_answer)
    normalised_truth = normalise_answer(stated_truth)
    if max(len(normalised_answer), len(normalised_truth)) > READ_CHARS:
        if squeeze(normalised_answer) == squeeze(normalised_truth):
            return Verdict(True, "normalised")
        return Verdict(False, "bounds")
    comparison = Comparison(fast)
    try:
        equal = comparison.compare_texts(normalised_answer, normalised_truth)
    except Exception:
        # No text is known to come here, but a defect of the grader must not end a run of days.
        return Verdict(False, "error")
    if equal is None:
        return Verdict(False, "undecided" if comparison.undecided else "unread")
    return Verdict(equal, comparison.stage)


@lru_cache(maxsize=CACHE_SIZE)
def normalise_answer(text: str) -> str:
    """The answer that a text states, in one spelling."""
    return normalise(stated(text))


def grade_many(
    answers: Sequence[str], ground_truths: Sequence[str], fast: bool = False
) -> list[Verdict]:
    """The verdict on each pair, in order. Raises ValueError where the two lengths differ."""
    pairs = zip(answers, ground_truths, strict=True)
    # Each thread may wait for a worker that runs math-verify.
    with ThreadPoolExecutor(WORKERS.size) as threads:
        return list(threads.map(lambda pair: grade_detail(pair[0], pair[1], fast), pairs))


# --- math-verify ----------------------------------------------------------------------------------

_OTHER_COMMANDS = "frac sqrt pi sum prod int lim binom begin end overline log ln degree angle"
_KNOWN_COMMANDS = {*GREEK, *CAPITALS, *FUNCTIONS, *_OTHER_COMMANDS.split()}


def _commands_of_signs() -> dict[int, str]:
    r"""The usual LaTeX command of each sign, for `str.translate`: ≤ is \le."""
    commands = {}
    for sign in "≤≥≠∪∩∖∞±∈→*":
        usual_command = TABLES["signs"][sign].split()[0]
        commands[sign] = rf"\{usual_command} "
    return str.maketrans(commands)


_TO_LATEX = _commands_of_signs()


def ask_math_verify(answer: str, truth: str) -> Verdict:
    """math-verify's verdict on two normalised texts, or "unread" for texts that it does not get.

    It gets a single expression at a time, never a list or a relation. Of a chain such as a = b = c
    every side must equal every side of the other text. Raises `CallFailed`.
    """
    answer_sides = _sides(answer)
    truth_sides = _sides(truth)
    if not answer_sides or not truth_sides:
        return Verdict(False, "unread")
    if len(answer_sides) == len(truth_sides) == 1:
        return _ask_about_expressions(answer_sides[0], truth_sides[0])
    for answer_side, truth_side in itertools.product(answer_sides, truth_sides):
        verdict = _decide(answer_side, truth_side, False)
        if verdict.stage == "unread":
            verdict = _ask_about_expressions(answer_side, truth_side)
        if not verdict.equal:
            return verdict
    return Verdict(True, "math-verify")


@lru_cache(maxsize=CACHE_SIZE)
def _ask_math_verify_cached(answer: str, truth: str) -> Verdict:
    """`ask_math_verify`, with a cache. A failure raises, so it is not cached."""
    return ask_math_verify(answer, truth)


def _sides(text: str) -> list[str]:
    """The sides of a normalised text that is an expression or a chain of equations: 5 for "x = 5",
    where x is a label; 1/2 and 2/4 for "1/2 = 2/4".

    [] for a list, another relation, or a long chain.
    """
    sides, signs = split_with_signs(text, RELATIONS)
    if set(signs) - {"="} or not all(sides) or len(split(text, ",;")) != 1:
        return []
    if len(sides) > 1 and is_label(sides[0]):
        sides = sides[1:]
    return sides if len(sides) <= FOREIGN_SIDES else []


def _ask_about_expressions(answer: str, truth: str) -> Verdict:
    """math-verify's verdict on two single expressions.

    Raises `CallFailed`, except where the texts take too much work. They would do so again, so that
    is a verdict.
    """
    if not patterns.FOREIGN.search(f"{answer} {truth}"):
        return Verdict(False, "unread")
    if not (_is_harmless(answer) and _is_harmless(truth)):
        return Verdict(False, "unread")
    pair = (answer.translate(_TO_LATEX), truth.translate(_TO_LATEX))
    try:
        equal, _ = WORKERS.submit(f"{__name__}:math_verify_reading", pair, SECONDS, CALLS).result()
    except CallFailed as failure:
        if str(failure) != "work":
            raise
        return Verdict(False, "work")
    return Verdict(equal, "math-verify")


def _is_harmless(text: str) -> bool:
    """Whether a normalised text is short, complete, of known commands, and without words or large
    numbers.

    An equation is not harmless, unless it stands under a sum, product, integral or limit:
    math-verify reads `7 = 5` as 5, and takes two equations without a solution for equal. A relation
    of numbers is not, since it is no answer.
    """
    commands = set(re.findall(r"\\([A-Za-z]+)", text))
    if len(text) > FOREIGN_CHARS or not commands <= _KNOWN_COMMANDS:
        return False
    if not _is_complete(text):
        return False
    formula = re.sub(r"\\(?:begin|end) ?\{[pbvB]?matrix\}", "&", text)
    if not _is_bounded(formula):
        return False
    without_commands = re.sub(r"\\[A-Za-z]+", " ", formula)
    if r"\int" in formula:
        # A differential such as dx would look like a word.
        without_commands = re.sub(r"d[a-z](?![A-Za-z])", " x", without_commands)
    if patterns.UNCLEAR.search(without_commands):
        return False
    has_bounds = re.search(r"\\(?:sum|prod|int|lim)", formula) is not None
    if "=" in without_commands and not has_bounds:
        return False
    has_variable = re.search("[A-Za-z]", without_commands) is not None
    return has_variable or not re.search("[<>≤≥≠]", formula)


def _is_complete(text: str) -> bool:
    r"""Whether brackets match and nothing is missing: no \frac without its two parts, no sign at an
    end."""
    begun = re.findall(r"\\begin ?\{(\w+)\}", text)
    ended = re.findall(r"\\end ?\{(\w+)\}", text)
    brackets_match = bool(split(text))  # `split` returns [] where they do not.
    return brackets_match and begun == ended and not patterns.INCOMPLETE.search(text)


def _is_bounded(formula: str) -> bool:
    """Whether numbers and powers are so small that computing with them takes almost no time."""
    powers = len(patterns.POWER.findall(formula))
    small_powers = len(patterns.SMALL_POWER.findall(formula))
    if powers != small_powers or powers > MAX_POWERS or patterns.LARGE.search(formula):
        return False
    # Powers inside each other multiply their exponents. Code in C would compute such a number for
    # minutes, without one of the calls of Python functions that the limit counts.
    exponents = [int(exponent) or 1 for exponent in patterns.EXPONENT.findall(formula)]
    return math.prod(exponents) <= MAX_EXPONENT


def math_verify_reading(answer: str, truth: str) -> tuple[bool, str]:
    """math-verify's verdict on two texts in LaTeX, and how it read the answer.

    May take any time and memory; an error means no. Its time-out by `signal.alarm` is off: the
    worker limits its work. Of math-verify's extractions it uses LaTeX's alone, which is safe: the
    LaTeX grammar gives sympy no text but number tokens. The extraction of plain expressions calls
    sympy's `parse_expr`, which is `eval`.
    """
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy.core.random import seed

    seed(0)  # sympy tries random points, and which it tries must not decide
    options = {
        "extraction_config": [LatexExtractionConfig()],
        "fallback_mode": "no_fallback",
        "parsing_timeout": None,
    }
    try:
        gold = parse(f"${truth}$", **options)
        target = parse(f"${answer}$", **options)
        if not target:
            return False, "not read"
        # Rounding starts beyond the digits that a decimal has here, so that 0.33 is not 1/3 inside
        # a matrix either.
        equal = bool(gold) and verify(
            gold, target, float_rounding=15, numeric_precision=30, timeout_seconds=None
        )
        return equal, f"read as {str(target[0])[:40]}"
    except MemoryError:
        raise
    except Exception as error:
        return False, type(error).__name__
