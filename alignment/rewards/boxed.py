r"""Rules for answers in a box: `boxed` grades the last \boxed{...}, `flexible` takes the last
number where there is no box.

A response is hostile input: every scan below takes time in proportion to its length, and the grader
bounds the answer that it reads.
"""

import re

from alignment.core.records import Score
from alignment.rewards.grading.boxes import find_boxes
from alignment.rewards.grading.cascade import FAILURES, Verdict, grade_detail

_THOUGHT_TAG = re.compile(r"</?think>")
# At most three digits follow a comma, so that the comma of a sentence is none of the number's. A
# minus sign may be Unicode's, too.
_NUMBER = re.compile(r"[-\u2212]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+|/[0-9]+)?")


def boxed_reward_fn(response: str, ground_truth: str) -> Score:
    r"""Score a response: {"reward", "format_reward", "answer_reward"}, each 0.0 or 1.0.

    The answer is the content of the last \boxed{...} (or \fbox{...}) outside of thoughts, as
    Qwen2.5-Math and DeepSeek-R1 are evaluated (Yang et al. 2024, arXiv:2409.12122; DeepSeek-AI
    2025, arXiv:2501.12948). The format is right where there is such a box, and the reward is that
    of the answer. A response whose thought, or whose last box, never closes has no answer. A
    grading that fails adds "grading_failed": 1.0.
    """
    return _score(boxed_final_answer(response), ground_truth)


def flexible_reward_fn(response: str, ground_truth: str) -> Score:
    """Score a response by what it ends with, whatever format it was asked for.

    The answer is that of `boxed_reward_fn` where there is one, else the last number of the
    response, as the filter flexible-extract of lm-evaluation-harness takes it. Where a thought
    never closes, the whole response counts. For evaluations: a list of guesses is paid for its
    last.
    """
    return _score(flexible_answer(response), ground_truth)


def _score(answer: str | None, ground_truth: str) -> Score:
    """The scores of an answer; None: the response has none."""
    verdict = Verdict(False, "bounds")
    if answer is not None:
        verdict = grade_detail(answer, ground_truth)
    reward = float(verdict.equal)
    score = {
        "reward": reward,
        "format_reward": float(answer is not None),
        "answer_reward": reward,
    }
    if verdict.stage in FAILURES:
        score["grading_failed"] = 1.0
    return score


def boxed_final_answer(response: str) -> str | None:
    """The content of the last box outside of thoughts; None where there is none or it is empty."""
    text = outside_thoughts(response)
    if text is None:
        return None
    contents = find_boxes(text).contents
    if not contents:
        return None
    return contents[-1] or None


def flexible_answer(response: str) -> str | None:
    """The last box's content, or else the last number, outside of closed thoughts; None for
    neither."""
    boxed = boxed_final_answer(response)
    if boxed is not None:
        return boxed
    text = outside_thoughts(response)
    if text is None:
        text = response
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def outside_thoughts(response: str) -> str | None:
    """The response without its <think>...</think>; None where a thought never closes.

    A </think> without an opening tag closes a thought that the prompt opened, so all before it is
    thought.
    """
    parts = []
    end_of_thought = 0
    is_thinking = False
    for tag in _THOUGHT_TAG.finditer(response):
        if tag[0] == "<think>":
            if not is_thinking:
                parts.append(response[end_of_thought : tag.start()])
            is_thinking = True
            continue
        if not is_thinking:
            parts.clear()
        is_thinking = False
        end_of_thought = tag.end()
    if is_thinking:
        return None
    return "".join(parts) + response[end_of_thought:]
