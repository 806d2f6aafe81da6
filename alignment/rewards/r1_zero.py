"""The R1-Zero rewards: the format of a response, and whether its answer is the ground truth.

A response is hostile input: it is never evaluated as Python, and the sizes of texts and numbers are
bounded before anything is computed with them.
"""

import re
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
    grade_detail,
    normalise_answer,
)
from alignment.rewards.grading.clauses import values_in_clauses
from alignment.rewards.grading.expressions import Node, Refused
from alignment.rewards.grading.quantities import answer_in_sentence
from alignment.rewards.grading.reading import read

# Between the two tags the published rule requires one space, the strict rule any white space or
# none.
_BEFORE_ANSWER = re.compile(r"</think>\s*<answer>")
# The strict rule allows this after `</think>`: one answer block that contains no other tag. Several
# blocks would be several guesses, of which the last is paid.
_ANSWER_BLOCK = re.compile(
    r"""
    [ ]
    <answer> (?P<answer> (?: (?! </?(?i:answer|think)> ) . )* ) </answer>
    \s*
    """,
    re.VERBOSE | re.DOTALL,
)


def r1_zero_reward_fn(response: str, ground_truth: str, fast: bool = False) -> dict[str, float]:
    r"""Score a response: {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0.

    reward = format_reward * answer_reward. The format rule is that of the R1-Zero reward in
    "Understanding R1-Zero-Like Training" (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783): the format
    is right if the response contains the literal `</think> <answer>` and `</answer>`; otherwise all
    three are 0.0. The answer is the text after the last `<answer>`; if that contains \boxed, the
    answer is what the boxes hold. Of several boxes the published rule takes the last, this one all.
    `fast` leaves out the slow stages of grading. A grading that fails, for instance because it runs
    out of time, adds "grading_failed": 1.0.
    """
    well_formed = "</think> <answer>" in response and "</answer>" in response
    answer = _last_answer(response)
    if answer is None:
        return _score(well_formed, None)
    return _score(well_formed, grade_detail(answer, ground_truth, fast))


def r1_zero_strict_reward_fn(
    response: str, ground_truth: str, fast: bool = False
) -> dict[str, float]:
    r"""Score a response as `r1_zero_reward_fn` does, but accept only one final answer, worked out.

    The format is right if exactly one `</think>` ends the thinking, and nothing follows it but one
    `<answer>...</answer>` block, with any white space before and after it, or none. The block is
    closed and contains no other tag. The thinking may begin with one `<think>`, which repeats that
    of the prompt. The block is graded as a whole, with the text around a \boxed in it. If the
    ground truth is a number, an expression that is still to be evaluated (48/2 + 48) is wrong.
    """
    answer = strict_answer(response)
    if answer is None:
        return _score(False, None)
    # An answer that is wrong by `r1_zero_reward_fn` is wrong by the strict rule too.
    last_answer = _last_answer(_with_one_space(response)) or ""
    verdict = grade_detail(last_answer, ground_truth, fast)
    if not verdict.equal or not is_worked_out(answer, ground_truth):
        return _score(True, Verdict(False, verdict.stage))
    return _score(True, grade_detail(answer, ground_truth, fast))


def _score(well_formed: bool, verdict: Verdict | None) -> dict[str, float]:
    """The scores of a response; `verdict` is None if it has no answer."""
    answer_reward = float(verdict is not None and verdict.equal)
    format_reward = float(well_formed)
    score = {
        "reward": format_reward * answer_reward,
        "format_reward": format_reward,
        "answer_reward": answer_reward,
    }
    if verdict is not None and verdict.stage in FAILURES:
        score["grading_failed"] = 1.0
    return score


def extract_answer(response: str) -> str | None:
    r"""The text between the last `<answer>` and the `</answer>` after it, or, where it contains
    \boxed or \fbox, what these hold. None if the format is wrong.
    """
    answer = _last_answer(response)
    return None if answer is None else boxed_answer(answer).strip()


def _last_answer(response: str) -> str | None:
    """The text between the last `<answer>` and the `</answer>` after it; None if the format is
    wrong."""
    if "</think> <answer>" not in response:
        return None
    answer, end, _ = response.rpartition("<answer>")[2].partition("</answer>")
    return answer.strip() if end else None


def strict_answer(response: str) -> str | None:
    r"""The text of the one answer block, with the content of each \boxed{...} in its place. None
    if the format is wrong by the rule of `r1_zero_strict_reward_fn`."""
    thinking, end, after_thinking = _with_one_space(response).partition("</think>")
    match = _ANSWER_BLOCK.fullmatch(after_thinking)
    if not end or match is None or "<think>" in thinking.removeprefix("<think>"):
        return None
    # Twice `MAX_CHARS` are read and no more: answers over `MAX_CHARS` are wrong.
    content = match["answer"][: 2 * MAX_CHARS]
    return find_boxes(content).opened.strip()


def _with_one_space(response: str) -> str:
    """The response with the one space of the published rule between `</think>` and `<answer>`."""
    return _BEFORE_ANSWER.sub("</think> <answer>", response)


def is_worked_out(answer: str, ground_truth: str) -> bool:
    """Whether an answer, which may be a sentence, gives a number where the ground truth is one.

    It is false for an expression still to be evaluated, such as 48/2 + 48 or 2^10. If the ground
    truth is a whole number, the answer must be a whole or decimal number, which may have a power of
    ten, a percent sign or a unit. If the truth is a fraction or a percentage, the answer may be a
    fraction too. Where the truth is no number, every answer is worked out.
    """
    truth = _read(ground_truth)
    if not isinstance(truth, Quantity) or not _is_numeral(truth.value, allow_fractions=True):
        return True
    is_whole = isinstance(truth.value, Fraction) and truth.value.denominator == 1
    allow_fractions = not is_whole or truth.unit == "%"
    read_answer = _read(answer)
    if read_answer is None:
        read_answer = _read(answer_in_sentence(normalise_answer(answer)))
    values = _values(read_answer)
    if not values:
        for stated in values_in_clauses(normalise_answer(answer)):
            values += _values(_read(stated.text))
    return bool(values) and all(_is_numeral(value, allow_fractions) for value in values)


def _read(text: str) -> Answer | None:
    """The answer that a text gives, without the label of `label = answer`; None where the grader
    cannot read the text."""
    with suppress(Refused):
        return unlabelled(read(normalise_answer(text)))
    return None


def _values(answer: Answer | None) -> list[Node]:
    """The value of each quantity in an answer, and the right side of each relation in it.

    Labels, approximations and lists are searched at any depth. [] if the answer contains anything
    else, such as words or a matrix.
    """
    if isinstance(answer, Quantity):
        return [answer.value]
    if isinstance(answer, Relation):
        return [answer.right]
    if isinstance(answer, About | Labelled):
        return _values(answer.answer)
    values: list[Node] = []
    if isinstance(answer, Listing):
        for part in answer.parts:
            values_of_part = _values(part)
            if not values_of_part:
                return []
            values += values_of_part
    return values


def _is_numeral(node: Node, allow_fractions: bool) -> bool:
    """Whether an expression tree is a number, its negative, or a number times a power of ten; or,
    with `allow_fractions`, a ratio of two of these."""
    match node:
        case ("-", 0, operand):  # The tree of -x is that of 0 - x.
            return _is_numeral(operand, allow_fractions)
        case ("/", top, bottom):
            return allow_fractions and _is_numeral(top, False) and _is_numeral(bottom, False)
        case ("*", factor, ("^", 10, exponent)):
            return _is_numeral(factor, False) and _is_exponent(exponent)
        case ("^", 10, exponent):
            return _is_exponent(exponent)
    return isinstance(node, Fraction)


def _is_exponent(node: Node) -> bool:
    """Whether an expression tree is a number or its negative."""
    match node:
        case ("-", 0, operand):
            return isinstance(operand, Fraction)
    return isinstance(node, Fraction)
