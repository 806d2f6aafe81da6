r"""The R1-Zero rewards and the grading under them: is this final answer equal to the ground truth?

The grading is a cascade, cheapest first; each stage either settles the answer or passes on:

1. literal: the same text;
2. normalised: the same text in one spelling (spacing, sizing, LaTeX synonyms), the same words whatever their case;
3. rational: numbers with units, exactly, as fractions: 0.5 is 1/2 and 0.33 is not 1/3;
4. structured: tuples, sets, intervals, unions, matrices, solutions, part by part;
5. symbolic: expressions, read into a tree of our own and evaluated at random rational points (`grading/values.py`);
6. math-verify: for notation that our grammar does not read, in a process that is killed when it takes too long.

Model text is hostile input: it is never evaluated as Python, and every size is bounded before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from alignment.grading.answers import About, Answer, Labelled, Listing, Quantity, Relation
from alignment.grading.compare import Comparison
from alignment.grading.expressions import Node, Refused
from alignment.grading.reading import read
from alignment.grading.sentences import said_in_sentence
from alignment.grading.text import last_box, normalise, squeeze, unbox

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
    from alignment.grading import workers  # here, because they are needed for few answers

    workers.pool().warm_up()  # where there are expressions, there will be some that only math-verify reads
    try:
        return _witnessed(answer, ground_truth) if verdict.stage == "unread" else verdict
    except workers.Failed as failure:
        return Verdict(False, str(failure))


@lru_cache(maxsize=CACHED)
def _witnessed(answer: str, truth: str) -> Verdict:
    """The last stage. Raises `workers.Failed`, so that a failure is not cached."""
    from alignment.grading import workers

    verdict = Verdict(*workers.witness(_normalised(answer), _normalised(truth)))
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
    from alignment.grading.workers import decide_many, pool

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


# --- the rewards --------------------------------------------------------------------------------------


def r1_zero_reward_fn(response: str, ground_truth: str, fast: bool = False) -> dict[str, float]:
    """Score a response: {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0, and reward = format * answer.

    The format rule is that of the R1-Zero reward in "Understanding R1-Zero-Like Training" (Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783): the shape is right if the response holds the literal `</think> <answer>` and `</answer>`; otherwise
    all are 0.0, however right the number. A grading that failed (see `FAILURES`) adds "grading_failed": 1.0.
    """
    shaped = "</think> <answer>" in response and "</answer>" in response
    answer = extract_answer(response)
    return _score(shaped, None if answer is None else grade_detail(answer, ground_truth, fast))


def r1_zero_strict_reward_fn(response: str, ground_truth: str, fast: bool = False) -> dict[str, float]:
    r"""As `r1_zero_reward_fn`, for a response that gives exactly one final answer; never more than that reward.

    The thinking ends at `</think>`, of which there must be exactly one, and is not looked at; `<think>` may open it once more.
    Then come ` <answer>...</answer>` blocks with nothing but white space between and after them; they must be closed, must
    not nest and hold no other tag. The last block counts, as a whole: a \boxed in it does not hide what stands around it.
    Where the ground truth is a number, an answer that is still to be worked out (48/2 + 48) is wrong.
    """
    answer = strict_answer(response)
    if answer is None:
        return _score(False, None)
    loose = grade_detail(extract_answer(response) or "", ground_truth, fast)
    if not loose.equal or not worked_out(answer, ground_truth):
        return _score(True, loose if loose.stage in FAILURES else Verdict(False, loose.stage))
    return _score(True, grade_detail(answer, ground_truth, fast))


def _score(shaped: bool, verdict: Verdict | None) -> dict[str, float]:
    right = float(verdict is not None and verdict.equal)
    score = {"reward": right * shaped, "format_reward": float(shaped), "answer_reward": right}
    return score | {"grading_failed": 1.0} if verdict is not None and verdict.stage in FAILURES else score


def extract_answer(response: str) -> str | None:
    r"""The text after the last `<answer>` up to the next `</answer>`, or its last \boxed{...} or \fbox{...}.

    None where the format rule fails or the last `<answer>` is never closed.
    """
    if "</think> <answer>" not in response:
        return None
    answer, end, _ = response.rpartition("<answer>")[2].partition("</answer>")
    return unbox(answer).strip() if end else None


_SHOWN = re.compile(r" (?:<answer>(?P<last>(?:(?!</?(?i:answer|think)>).)*)</answer>\s*)+", re.DOTALL)


def strict_answer(response: str) -> str | None:
    r"""The text of the last answer block, its boxes opened in place; None where the strict format rule fails."""
    thinking, end, shown = response.partition("</think>")
    match = _SHOWN.fullmatch(shown)
    if not end or match is None or "<think>" in thinking.removeprefix("<think>"):
        return None
    content = match["last"][: 2 * MAX_CHARS]  # what is cut off would make it wrong anyway
    while last_box(content) != ("", content, ""):
        content = " ".join(last_box(content))
    return content.strip()


def worked_out(answer: str, ground_truth: str) -> bool:
    """False for an expression still to be evaluated where the ground truth is a plain number: 48/2 + 48, or 2^10.

    A whole number has no other form than its digits, with an exponent of ten, percent sign or unit; a fraction may be any
    fraction or decimal. So may one that a sentence states.
    """
    truth = _read(ground_truth)
    if not isinstance(truth, Quantity) or not _is_fraction(truth.value):
        return True
    given = _read(answer) or _read(said_in_sentence(_normalised(answer)))
    whole = isinstance(truth.value, Fraction) and truth.value.denominator == 1 and not truth.unit == "%"
    values = [value for part in _parts(given) for value in ([part.right] if isinstance(part, Relation) else [part.value])]
    return bool(values) and all(_is_numeral(value) or (not whole and _is_fraction(value)) for value in values)


def _read(text: str) -> Answer | None:
    """The answer without its label; None where it cannot be read."""
    try:
        answer = read(_normalised(text))
    except Refused:
        return None
    return answer.answer if isinstance(answer, Labelled) else answer


def _parts(answer: Answer | None) -> list[Quantity | Relation]:
    """The quantities of an answer, whatever holds them, and relations, whose right side is the answer; [] if others are
    among them."""
    if isinstance(answer, Quantity | Relation):
        return [answer]
    if isinstance(answer, About | Labelled):
        return _parts(answer.answer)
    if isinstance(answer, Listing) and all(found := [_parts(part) for part in answer.parts]):
        return [part for parts in found for part in parts]
    return []


def _is_numeral(node: Node) -> bool:
    """A number, its negative, or a number times a power of ten."""
    if isinstance(node, tuple) and node[0] == "*":
        return _is_numeral(node[1]) and _is_power_of_ten(node[2])
    if isinstance(node, tuple) and node[0] == "^":
        return _is_power_of_ten(node)
    return isinstance(node, Fraction) or (isinstance(node, tuple) and node[:2] == ("-", Fraction(0)) and _is_numeral(node[2]))


def _is_power_of_ten(node: Node) -> bool:
    if not isinstance(node, tuple) or node[:2] != ("^", Fraction(10)):
        return False
    exponent = node[2][2] if isinstance(node[2], tuple) and node[2][:2] == ("-", Fraction(0)) else node[2]
    return isinstance(exponent, Fraction)


def _is_fraction(node: Node) -> bool:
    if isinstance(node, tuple) and node[:2] == ("-", Fraction(0)):
        return _is_fraction(node[2])
    return _is_numeral(node) or (isinstance(node, tuple) and node[0] == "/" and all(map(_is_numeral, node[1:])))
