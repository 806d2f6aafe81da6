"""The R1-Zero rewards: the format of a response, and whether its answer is the ground truth.

Model text is hostile input: it is never evaluated as Python, and every size is bounded before
anything is computed.
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
from alignment.rewards.grading.expressions import Node, Refused
from alignment.rewards.grading.quantities import answer_in_sentence
from alignment.rewards.grading.reading import read

# The published rule wants one space here, the strict rule any white space.
_BEFORE_ANSWER = re.compile(r"</think>\s+<answer>")
# What follows the thinking by the strict rule: answer blocks without other tags. Group: the last.
_ANSWER_BLOCKS = re.compile(
    r"""
    [ ]
    (?:
        <answer> (?P<last> (?: (?! </?(?i:answer|think)> ) . )* ) </answer>
        \s*
    )+
    """,
    re.VERBOSE | re.DOTALL,
)


def r1_zero_reward_fn(response: str, ground_truth: str, fast: bool = False) -> dict[str, float]:
    r"""Score a response: {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0.

    reward = format * answer. The format rule is that of the R1-Zero reward in "Understanding
    R1-Zero-Like Training" (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783): the format is right if the
    response contains the literal `</think> <answer>` and `</answer>`; otherwise all three are 0.0.
    The answer is the text after the last `<answer>`, or what its \boxed states: where there are
    several boxes, all of them, while the published rule takes the last. A failed grading (see
    `FAILURES`) adds "grading_failed": 1.0.
    """
    well_formed = "</think> <answer>" in response and "</answer>" in response
    answer = _last_answer(response)
    if answer is None:
        return _score(well_formed, None)
    return _score(well_formed, grade_detail(answer, ground_truth, fast))


def r1_zero_strict_reward_fn(
    response: str, ground_truth: str, fast: bool = False
) -> dict[str, float]:
    r"""Score a response as `r1_zero_reward_fn` does, but only one that gives exactly one final
    answer.

    Exactly one `</think>` ends the thinking, which is not read; `<think>` may open it once more.
    Then come, after white space, `<answer>...</answer>` blocks with only white space between and
    after them; each is closed and contains no other tag. The last block counts as a whole, also the
    text around a \boxed in it. If the ground truth is a number, an answer that is still to be
    evaluated (48/2 + 48) is wrong.
    """
    response = _BEFORE_ANSWER.sub("</think> <answer>", response)
    answer = strict_answer(response)
    if answer is None:
        return _score(False, None)
    loose = grade_detail(_last_answer(response) or "", ground_truth, fast)
    if not loose.equal or not worked_out(answer, ground_truth):
        return _score(True, Verdict(False, loose.stage))
    return _score(True, grade_detail(answer, ground_truth, fast))


def _score(well_formed: bool, verdict: Verdict | None) -> dict[str, float]:
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
    r"""The text from the last `<answer>` to its `</answer>`, or what its \boxed or \fbox hold.

    None if the format is wrong.
    """
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
    match = _ANSWER_BLOCKS.fullmatch(shown)
    if not end or match is None or "<think>" in thinking.removeprefix("<think>"):
        return None
    content = match["last"][: 2 * MAX_CHARS]  # a longer answer is wrong anyway
    return find_boxes(content).opened.strip()


def worked_out(answer: str, ground_truth: str) -> bool:
    """False for an expression still to be evaluated, 48/2 + 48 or 2^10, where the ground truth is a
    plain number.

    A whole number must be digits, with a power of ten, percent sign or unit; a fraction any
    fraction or decimal; also in a sentence.
    """
    truth = _read(ground_truth)
    if not isinstance(truth, Quantity) or not _is_numeral(truth.value, fractions=True):
        return True
    is_whole = isinstance(truth.value, Fraction) and truth.value.denominator == 1
    fractions = not is_whole or truth.unit == "%"
    read_answer = _read(answer)
    if read_answer is None:
        read_answer = _read(answer_in_sentence(normalise_answer(answer)))
    values = _values(read_answer)
    return bool(values) and all(_is_numeral(value, fractions) for value in values)


def _read(text: str) -> Answer | None:
    """The answer without its label; None where it cannot be read."""
    with suppress(Refused):
        return unlabelled(read(normalise_answer(text)))
    return None


def _values(answer: Answer | None) -> list[Node]:
    """The values of an answer's quantities, at any depth, and the right sides of its relations.

    [] if it has anything else.
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


def _is_numeral(node: Node, fractions: bool) -> bool:
    """Whether a tree is a number, its negative, or a number times a power of ten.

    Where `fractions` count, also a ratio of two of these.
    """
    match node:
        case ("-", 0, operand):
            return _is_numeral(operand, fractions)
        case ("/", top, bottom):
            return fractions and _is_numeral(top, False) and _is_numeral(bottom, False)
        case ("*", factor, ("^", 10, exponent)):
            return _is_numeral(factor, False) and _is_exponent(exponent)
        case ("^", 10, exponent):
            return _is_exponent(exponent)
    return isinstance(node, Fraction)


def _is_exponent(node: Node) -> bool:
    """Whether a tree is a number or its negative."""
    match node:
        case ("-", 0, operand):
            return isinstance(operand, Fraction)
    return isinstance(node, Fraction)
