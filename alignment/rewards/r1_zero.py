r"""The R1-Zero rewards: the format of a response, and whether its final answer equals the ground
truth.

Model text is hostile input: it is never evaluated as Python, and every size is bounded before
anything is computed."""

from contextlib import suppress
from fractions import Fraction

from alignment.rewards.grading.answers import (
    About,
    Answer,
    Labelled,
    Listing,
    Quantity,
    Relation,
    unlabelled,
)
from alignment.rewards.grading.boxes import boxed_answer, find_boxes
from alignment.rewards.grading.cascade import (
    FAILURES,
    MAX_CHARS,
    Verdict,
    _normalised,
    grade_detail,
)
from alignment.rewards.grading.expressions import Node, Refused
from alignment.rewards.grading.quantities import answer_in_sentence
from alignment.rewards.grading.reading import read
from alignment.rewards.grading.text import PATTERNS


def r1_zero_reward_fn(response: str, ground_truth: str, fast: bool = False) -> dict[str, float]:
    r"""Score a response: {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0, and reward
    = format * answer.

    The format rule is that of the R1-Zero reward in "Understanding R1-Zero-Like Training" (Dr.
    GRPO, Liu et al. 2025, arXiv:2503.20783): the format is right if the response contains the
    literal `</think> <answer>` and `</answer>`; otherwise all three are 0.0. The answer is the text
    after the last `<answer>`, or what its \boxed states: where there are several boxes, all of
    them, while the published rule takes the last. A failed grading (see `FAILURES`) adds
    "grading_failed": 1.0."""
    well_formed = "</think> <answer>" in response and "</answer>" in response
    answer = _last_answer(response)
    return _score(well_formed, None if answer is None else grade_detail(answer, ground_truth, fast))


def r1_zero_strict_reward_fn(
    response: str, ground_truth: str, fast: bool = False
) -> dict[str, float]:
    r"""Score a response as `r1_zero_reward_fn` does, but only one that gives exactly one final
    answer.

    Exactly one `</think>` ends the thinking, which is not read; `<think>` may open it once more.
    Then come, after white space, `<answer>...</answer>` blocks with only white space between and
    after them; each is closed and contains no other tag. The last block counts as a whole, also the
    text around a \boxed in it. If the ground truth is a number, an answer that is still to be
    evaluated (48/2 + 48) is wrong."""
    # the published rule wants one space
    response = PATTERNS.before_answer.sub("</think> <answer>", response)
    if (answer := strict_answer(response)) is None:
        return _score(False, None)
    loose = grade_detail(_last_answer(response) or "", ground_truth, fast)
    if not loose.equal or not worked_out(answer, ground_truth):
        return _score(True, Verdict(False, loose.stage))
    return _score(True, grade_detail(answer, ground_truth, fast))


def _score(well_formed: bool, verdict: Verdict | None) -> dict[str, float]:
    right = float(verdict is not None and verdict.equal)
    score = {
        "reward": right * well_formed,
        "format_reward": float(well_formed),
        "answer_reward": right,
    }
    return (
        score | {"grading_failed": 1.0}
        if verdict is not None and verdict.stage in FAILURES
        else score
    )


def extract_answer(response: str) -> str | None:
    r"""The text from the last `<answer>` to its `</answer>`, or what its \boxed or \fbox hold; None
    if the format is wrong."""
    answer = _last_answer(response)
    return None if answer is None else boxed_answer(answer).strip()


def _last_answer(response: str) -> str | None:
    """The text from the last `<answer>` to its `</answer>`; None if the format is wrong."""
    if "</think> <answer>" not in response:
        return None
    answer, end, _ = response.rpartition("<answer>")[2].partition("</answer>")
    return answer.strip() if end else None


def strict_answer(response: str) -> str | None:
    r"""The text of the last answer block, with its boxes opened in place; None where the strict
    format rule fails."""
    thinking, end, shown = response.partition("</think>")
    match = PATTERNS.answer_blocks.fullmatch(shown)
    if not end or match is None or "<think>" in thinking.removeprefix("<think>"):
        return None
    content = match["last"][: 2 * MAX_CHARS]  # a longer answer is wrong anyway
    return find_boxes(content).opened.strip()


def worked_out(answer: str, ground_truth: str) -> bool:
    """False for an expression still to be evaluated, 48/2 + 48 or 2^10, where the ground truth is a
    plain number. A whole number must be digits, with a power of ten, percent sign or unit; a
    fraction any fraction or decimal; also in a sentence."""
    truth = _read(ground_truth)
    if not isinstance(truth, Quantity) or not _is_numeral(truth.value, fractions=True):
        return True
    whole = isinstance(truth.value, Fraction) and truth.value.denominator == 1 and truth.unit != "%"
    values = _values(_read(answer) or _read(answer_in_sentence(_normalised(answer))))
    return bool(values) and all(_is_numeral(value, fractions=not whole) for value in values)


def _read(text: str) -> Answer | None:
    """The answer without its label; None where it cannot be read."""
    with suppress(Refused):
        return unlabelled(read(_normalised(text)))
    return None


def _values(answer: Answer | None) -> list[Node]:
    """The values of an answer's quantities, at any depth, and the right sides of its relations; []
    if it has anything else."""
    match answer:
        case Quantity(value) | Relation(right=value):
            return [value]
        case About() | Labelled():
            return _values(answer.answer)
        case Listing(parts=parts) if all(nested := list(map(_values, parts))):
            return [value for values in nested for value in values]
    return []


def _is_numeral(node: Node, fractions: bool) -> bool:
    """A number, its negative, or a number times a power of ten; where `fractions` count, also a
    ratio of two of these."""
    match node:
        case ("-", 0, operand):
            return _is_numeral(operand, fractions)
        case ("/", top, bottom):
            return fractions and _is_numeral(top, False) and _is_numeral(bottom, False)
        case ("*", factor, ("^", 10, _) as power):
            return _is_numeral(factor, False) and _is_numeral(power, False)
        case ("^", 10, ("-", 0, exponent)) | ("^", 10, exponent):
            return isinstance(exponent, Fraction)
    return isinstance(node, Fraction)
