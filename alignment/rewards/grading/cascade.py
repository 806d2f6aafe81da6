"""The stages of the grader in order, cheapest first: `grade`, `grade_detail` with the deciding stage, `grade_many`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from alignment.rewards.grading.compare import Comparison
from alignment.rewards.grading.text import normalise, squeeze, unbox

MAX_CHARS = 1000  # of an answer; a longer one is wrong
READ_CHARS = 400  # a longer text is not parsed, which takes the square of its length, but compared as it is
CACHED = 100_000  # verdicts in the cache
SPREAD = 512  # from this number of pairs on, worker processes are faster than this one

FAILURES = ("time-out", "memory", "died", "error")
"""Stages of a failed grading: the reward is 0, and the run counts and reports it."""


@dataclass(frozen=True)
class Verdict:
    """Whether the answer is right, and the stage that decided: one of the cascade's, "bounds" (empty or too long), "unread"
    (no stage could read both texts), or one of `FAILURES` ("error" is a defect of the grader)."""

    equal: bool
    stage: str


def grade(answer: str, ground_truth: str, fast: bool = False) -> bool:
    """Whether `answer` equals `ground_truth`. Never raises; an answer that cannot be read is wrong.

    `fast` stops before the last two stages.
    """
    return grade_detail(answer, ground_truth, fast).equal


def grade_detail(answer: str, ground_truth: str, fast: bool = False) -> Verdict:
    """The verdict with the stage that decided it. Verdicts are cached, except those of failed gradings."""
    if max(len(answer), len(ground_truth)) > MAX_CHARS:
        return Verdict(False, "bounds")
    verdict = _decide(answer, ground_truth, fast)
    if fast or verdict.stage not in ("symbolic", "unread"):
        return verdict
    from alignment.rewards.grading import workers  # here, because they are needed for few answers

    workers.pool().warm_up()  # where there are expressions, there will be some that only math-verify reads
    try:
        return _ask_math_verify(answer, ground_truth) if verdict.stage == "unread" else verdict
    except workers.Failed as failure:
        return Verdict(False, str(failure))


@lru_cache(maxsize=CACHED)
def _ask_math_verify(answer: str, truth: str) -> Verdict:
    """The last stage. Raises `workers.Failed`, so that a failure is not cached."""
    from alignment.rewards.grading import workers

    verdict = Verdict(*workers.ask_math_verify(_normalised(answer), _normalised(truth)))
    if verdict.stage in FAILURES:
        raise workers.Failed(verdict.stage)
    return verdict


@lru_cache(maxsize=CACHED)
def _decide(answer: str, truth: str, fast: bool) -> Verdict:
    """The stages that run in this process, which are bounded by construction."""
    answer, truth = unbox(answer).strip(), unbox(truth).strip()
    if not answer or not truth:
        return Verdict(False, "bounds")
    if answer == truth:
        return Verdict(True, "literal")
    if (plain := _plain_numbers(answer, truth)) is not None:
        return Verdict(plain, "rational")
    answer, truth = _normalised(answer), _normalised(truth)
    if max(len(answer), len(truth)) > READ_CHARS:
        return Verdict(True, "normalised") if squeeze(answer) == squeeze(truth) else Verdict(False, "bounds")
    comparison = Comparison(fast)
    try:
        equal = comparison.texts(answer, truth)
    except Exception:
        # No text is known to come here, but a defect of the grader must not end a run of days.
        return Verdict(False, "error")
    return Verdict(bool(equal), "unread" if equal is None else comparison.stage)


_DECIMAL = re.compile(r"([-+]?)\$?([0-9]{1,80}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20})(?:\.([0-9]{1,60}))?\.?")


def _plain_numbers(answer: str, truth: str) -> bool | None:
    """Whether a decimal number equals a whole number, the most frequent case; None for any other pair of texts."""
    whole, decimal = _DECIMAL.fullmatch(truth), _DECIMAL.fullmatch(answer)
    if whole is None or whole[3] or decimal is None:
        return None
    wanted, given = (int(match[1] + match[2].replace(",", "")) for match in (whole, decimal))
    return wanted == given and not (decimal[3] or "").strip("0")


@lru_cache(maxsize=CACHED)
def _normalised(text: str) -> str:
    return normalise(unbox(text))


def grade_many(answers: Sequence[str], ground_truths: Sequence[str], fast: bool = False) -> list[Verdict]:
    """The verdict on each pair, in order; from `SPREAD` pairs on, one worker process a core shares the work.

    Raises ValueError where the two lengths differ.
    """
    from alignment.rewards.grading.workers import decide_many, pool

    pairs = list(zip(answers, ground_truths, strict=True))
    distinct = [pair for pair in dict.fromkeys(pairs) if max(map(len, pair)) <= MAX_CHARS]
    if len(distinct) >= SPREAD:
        verdicts = dict(zip(distinct, (Verdict(*outcome) for outcome in decide_many(distinct, fast)), strict=True))
    else:
        verdicts = {pair: _decide(*pair, fast) for pair in distinct}
    unread = [] if fast else [pair for pair, verdict in verdicts.items() if verdict.stage == "unread"]
    if unread:
        with ThreadPoolExecutor(pool().size) as threads:  # each thread waits for a worker
            verdicts |= dict(zip(unread, threads.map(lambda pair: grade_detail(*pair), unread), strict=True))
    return [verdicts.get(pair, Verdict(False, "bounds")) for pair in pairs]
