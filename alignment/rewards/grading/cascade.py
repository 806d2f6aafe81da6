"""The stages of grading, cheapest first: whether an answer equals a ground truth, and which stage decided it. docs/grading.md
lists them."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

from alignment.rewards.grading.ask_math_verify import WORKERS, ask_math_verify
from alignment.rewards.grading.compare import Comparison
from alignment.rewards.grading.text import normalise, squeeze, unbox
from alignment.system.limited_workers import CallFailed

MAX_CHARS = 1000  # of an answer; a longer one is wrong
READ_CHARS = 400  # beyond which a text is compared as it stands, for reading takes the square of its length
CACHED = 100_000  # verdicts kept
SPREAD = 512  # the number of pairs from which grading in other processes is faster than here
CHUNK_SECONDS = 60.0  # of CPU time for a chunk of pairs, each of which takes a few milliseconds at most

FAILURES = ("time-out", "memory", "died", "error")
"""Stages of a failed grading: the reward is 0, and the run counts and reports it."""


class Verdict(NamedTuple):
    """Whether the answer is right, and the stage that decided: one of the cascade's, "bounds" (empty or too long), "unread"
    (no stage could read both texts), or one of `FAILURES` ("error" is a defect of the grader)."""

    equal: bool
    stage: str


def grade(answer: str, ground_truth: str, fast: bool = False) -> bool:
    """Whether `answer` equals `ground_truth`. Never raises; an answer that cannot be read is wrong. `fast` stops before the
    last two stages."""
    return grade_detail(answer, ground_truth, fast).equal


def grade_detail(answer: str, ground_truth: str, fast: bool = False) -> Verdict:
    """The verdict with the stage that decided it. Verdicts are cached, except those of failed gradings."""
    if max(len(answer), len(ground_truth)) > MAX_CHARS:
        return Verdict(False, "bounds")
    verdict = _decide(answer, ground_truth, fast)
    if fast or verdict.stage not in ("symbolic", "unread"):
        return verdict
    WORKERS.warm_up()  # a task with expressions in its answers will have some that only math-verify reads
    try:
        return _math_verify_verdict(answer, ground_truth) if verdict.stage == "unread" else verdict
    except CallFailed as failure:
        return Verdict(False, str(failure))


@lru_cache(maxsize=CACHED)
def _math_verify_verdict(answer: str, truth: str) -> Verdict:
    """The verdict of the last stage. Raises `CallFailed`, so that a failure is not cached."""
    return Verdict(*ask_math_verify(_normalised(answer), _normalised(truth)))


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
    """The verdict on each pair, in order. `SPREAD` distinct pairs or more are spread over worker processes, one a core. Raises
    ValueError where the two lengths differ."""
    pairs = list(zip(answers, ground_truths, strict=True))
    distinct = [pair for pair in dict.fromkeys(pairs) if max(map(len, pair)) <= MAX_CHARS]
    verdicts = dict(zip(distinct, decide_many(distinct, fast), strict=True)) if len(distinct) >= SPREAD else {}
    left = [pair for pair in distinct if pair not in verdicts or (verdicts[pair].stage == "unread" and not fast)]
    with ThreadPoolExecutor(WORKERS.size) as threads:  # each thread may wait for a worker that runs math-verify
        verdicts |= dict(zip(left, threads.map(lambda pair: grade_detail(*pair, fast), left), strict=True))
    return [verdicts.get(pair, Verdict(False, "bounds")) for pair in pairs]


def decide_many(pairs: Sequence[tuple[str, str]], fast: bool) -> list[Verdict]:
    """The verdicts of all stages but math-verify on each pair, in order, computed by the workers. Where one of them fails, the
    pairs of its chunk are graded one by one to find the one that is to blame."""
    size = max(64, -(-len(pairs) // (4 * WORKERS.size)))
    chunks = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    replies = [WORKERS.submit(f"{__name__}:decide_pairs", (chunk, fast), CHUNK_SECONDS) for chunk in chunks]
    verdicts: list[Verdict] = []
    for chunk, reply in zip(chunks, replies, strict=True):
        try:
            verdicts += [Verdict(*verdict) for verdict in reply.result()]
        except CallFailed as failure:
            one_by_one = (verdict for pair in chunk for verdict in decide_many([pair], fast))
            verdicts += [Verdict(False, str(failure))] if len(chunk) == 1 else one_by_one
    return verdicts


def decide_pairs(pairs: Sequence[tuple[str, str]], fast: bool) -> list[Verdict]:
    """The verdict on each pair; `decide_many` calls it in a worker."""
    return [_decide(*pair, fast) for pair in pairs]
