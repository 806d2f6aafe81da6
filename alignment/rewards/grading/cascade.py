"""TODO."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from alignment.rewards.grading.compare import Comparison
from alignment.rewards.grading.text import normalise, squeeze, unbox

MAX_CHARS = 1000  # of an answer; a longer one is wrong
READ_CHARS = 400  # beyond which a text is compared as it stands, for reading takes the square of its length
CACHED = 100_000  # verdicts kept
SPREAD = 512  # pairs from which on grading in other processes is faster than here

FAILURES = ("time-out", "memory", "died", "error")
"""Outcomes of a grading that did not end well: counted apart, never in silence, and the reward is 0."""


@dataclass(frozen=True)
class Verdict:
    """Whether the answer is right, and what decided: a stage of the cascade, "bounds" (empty or too long), "unread" (no
    stage could read both texts), or one of `FAILURES` ("error" is a defect of the grader's own)."""

    equal: bool
    stage: str


def grade(answer: str, ground_truth: str, fast: bool = False) -> bool:
    """Whether `answer` equals `ground_truth`. Never raises; text that cannot be understood is wrong.

    `fast` stops before the last two stages.
    """
    return grade_detail(answer, ground_truth, fast).equal


def grade_detail(answer: str, ground_truth: str, fast: bool = False) -> Verdict:
    """The verdict with the stage that decided it. Verdicts are cached, those of failed gradings excepted."""
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
        # No text is known to come here; but a defect in reading one answer must not end a run of days.
        return Verdict(False, "error")
    return Verdict(bool(equal), "unread" if equal is None else comparison.stage)


_DECIMAL = re.compile(r"([-+]?)\$?([0-9]{1,80}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20})(?:\.([0-9]{1,60}))?\.?")


def _plain_numbers(answer: str, truth: str) -> bool | None:
    """Whether a decimal number is the whole number that the truth is, the most frequent question of all; None for others."""
    whole, decimal = _DECIMAL.fullmatch(truth), _DECIMAL.fullmatch(answer)
    if whole is None or whole[3] or decimal is None:
        return None
    wanted, given = (int(match[1] + match[2].replace(",", "")) for match in (whole, decimal))
    return wanted == given and not (decimal[3] or "").strip("0")


@lru_cache(maxsize=CACHED)
def _normalised(text: str) -> str:
    return normalise(unbox(text))


def grade_many(answers: Sequence[str], ground_truths: Sequence[str], fast: bool = False) -> list[Verdict]:
    """The verdict on each pair, in order; what is large enough for it is spread over worker processes, one a core.

    Raises ValueError where the two lengths differ.
    """
    from alignment.rewards.grading.workers import decide_many, pool

    pairs = list(zip(answers, ground_truths, strict=True))
    asked = [pair for pair in dict.fromkeys(pairs) if max(map(len, pair)) <= MAX_CHARS]
    if len(asked) >= SPREAD:
        verdicts = dict(zip(asked, (Verdict(*outcome) for outcome in decide_many(asked, fast)), strict=True))
    else:
        verdicts = {pair: _decide(*pair, fast) for pair in asked}
    unread = [] if fast else [pair for pair, verdict in verdicts.items() if verdict.stage == "unread"]
    if unread:
        with ThreadPoolExecutor(pool().size) as threads:  # each of which waits for a worker
            verdicts |= dict(zip(unread, threads.map(lambda pair: grade_detail(*pair), unread), strict=True))
    return [verdicts.get(pair, Verdict(False, "bounds")) for pair in pairs]
