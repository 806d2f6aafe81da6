"""The rule `think_answer`: a thought and an answer in their tags, with any white space between.

Chat models write the tags on lines of their own, or one behind the other. `r1_zero` pays for one
space between `</think>` and `<answer>` alone, as it was published.
"""

import re

from alignment.core.records import Score
from alignment.rewards.grading.cascade import FAILURES, grade_detail

# A thought, which the prompt may have opened, and an answer. Neither contains a tag of these.
_TURN = re.compile(
    r"""
    \s* (?: <(?P<opened>think|reasoning)> )?
    (?: (?! </?(?:think|reasoning|answer)> ) . )*
    </(?P<closed>think|reasoning)> \s*
    <answer> (?: (?! </?(?:think|reasoning|answer)> ) . )* </answer> \s*
    """,
    re.VERBOSE | re.DOTALL,
)


def think_answer_reward_fn(response: str, ground_truth: str) -> Score:
    """Score a response: {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0.

    The format is right where the response is a thought, `<think>...</think>` or
    `<reasoning>...</reasoning>`, and one `<answer>...</answer>`, with white space or nothing
    before, between and after them; the prompt may have opened the thought. The answer is the text
    of the last `<answer>...</answer>` outside of the thought, in a wrong format too, so that
    `format` and `accuracy` can be paid apart. reward = format_reward * answer_reward. A grading
    that fails adds "grading_failed": 1.0.
    """
    match = _TURN.fullmatch(response)
    is_formatted = match is not None and match["opened"] in (None, match["closed"])
    score = {"reward": 0.0, "format_reward": float(is_formatted), "answer_reward": 0.0}
    answer = tagged_answer(response)
    if answer is None:
        return score
    verdict = grade_detail(answer, ground_truth)
    score["answer_reward"] = float(verdict.equal)
    score["reward"] = score["format_reward"] * score["answer_reward"]
    if verdict.stage in FAILURES:
        score["grading_failed"] = 1.0
    return score


def tagged_answer(response: str) -> str | None:
    """The text of the last `<answer>...</answer>` behind the last end of a thought; None where
    there is none."""
    behind = response
    for tag in ("</think>", "</reasoning>"):
        behind = behind.rpartition(tag)[2]
    before, opened, last = behind.rpartition("<answer>")
    answer, closed, _ = last.partition("</answer>")
    if not opened or not closed:
        return None
    return answer.strip()
