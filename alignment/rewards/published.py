r"""Parts of rewards as the authors of other code bases wrote them, where ours differ on purpose.

Each reads a whole turn: the response, behind the tag that the prompt has opened. `$` matches before
a last line break too, as it does in these authors' expressions. docs/rewards.md says what is left
different.
"""

import re

from alignment.rewards.countdown import is_right
from alignment.rewards.grading.cascade import grade

_OPEN_R1_FORMAT = re.compile(
    r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE
)
_OPEN_R1_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_OPEN_R1_STEPS = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_SIMPLE_GRPO_FORMAT = re.compile(r"<think>.*?</think>[\n ]*<answer>.*?</answer>$", re.DOTALL)
_SIMPLE_GRPO_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_UNSIGNED_NUMBER = re.compile(r"\d+\.\d+|\d+/\d+|\d+")
_GRPO_ZERO_FORMAT = re.compile(r"<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL)
_GRPO_ZERO_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_GRPO_ZERO_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_GRPO_ZERO_EXPRESSION = re.compile(r"[0-9+\-*/() ]+$")
_SOFT_FORMAT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
_STRICT_FORMAT = re.compile(
    r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?$", re.DOTALL
)


def open_r1_format(turn: str) -> float:
    """1 where a turn begins with a thought and an answer, each tag on a line of its own (Open R1,
    `format_reward`). What follows on further lines does not count."""
    return float(_OPEN_R1_FORMAT.match(turn) is not None)


def open_r1_tag_count(turn: str) -> float:
    """A quarter for each of the four tags that occurs exactly once with its line breaks (Open R1,
    `tag_count_reward`)."""
    single_tags = [tag for tag in _OPEN_R1_TAGS if turn.count(tag) == 1]
    return len(single_tags) / len(_OPEN_R1_TAGS)


def open_r1_reasoning_steps(turn: str) -> float:
    """A third for each mark of a step, 1 from three on (Open R1, `reasoning_steps_reward`): of
    numbered lines only the first of a turn, and marks of lists alone at the begin of a line."""
    return min(1.0, len(_OPEN_R1_STEPS.findall(turn)) / 3)


def simple_grpo_format(turn: str) -> float:
    """1.25 for a thought and an answer with line breaks and spaces between, and two tags of each
    kind in all; -1 otherwise (simple_GRPO, `reward_format`)."""
    open_thought, close_thought, open_answer, close_answer = map(turn.count, _SIMPLE_GRPO_TAGS)
    is_counted = open_thought + close_thought == 2 and open_answer + close_answer == 2
    if is_counted and _SIMPLE_GRPO_FORMAT.match(turn):
        return 1.25
    return -1.0


def simple_grpo_correct(turn: str, ground_truth: str) -> float:
    """1 where the last number is the answer, -1 otherwise (simple_GRPO, `reward_correct`).

    A number has no sign and no thousands: the last of "1-33" is 33, that of "1,005" is 005.
    """
    numbers = _UNSIGNED_NUMBER.findall(turn)
    is_equal = bool(numbers) and grade(numbers[-1], ground_truth)
    return 1.0 if is_equal else -1.0


def grpo_zero_format(turn: str) -> float:
    """1 for a thought, a line break and an answer; else 0.1 for a thought, and 0.5 for an answer
    (GRPO-Zero, `format_reward_function`)."""
    if _GRPO_ZERO_FORMAT.match(turn):
        return 1.0
    reward = 0.0
    if _GRPO_ZERO_THOUGHT.search(turn):
        reward += 0.1
    if _GRPO_ZERO_ANSWER.search(turn):
        reward += 0.5
    return reward


def grpo_zero_answer(turn: str, ground_truth: str) -> float:
    """1 where the first answer uses each number of Countdown once and makes the target (GRPO-Zero,
    `answer_reward_function`).

    Powers and whole quotients (`**`, `//`), which Python's own evaluation allows there, are wrong.
    """
    answer = _GRPO_ZERO_ANSWER.search(turn)
    if answer is None or not _GRPO_ZERO_EXPRESSION.match(answer[1]):
        return 0.0
    return float(is_right(answer[1], ground_truth))


def soft_format(turn: str) -> float:
    """1 where a turn begins with `<reasoning>` and an answer, with white space between (the scripts
    that train Qwen2.5-0.5B-Instruct by TRL). The reasoning may have several lines."""
    return float(_SOFT_FORMAT.match(turn) is not None)


def strict_format(turn: str) -> float:
    """1 where each tag of `<reasoning>` and the answer is on a line of its own, and nothing follows
    (the scripts that train by TRL).

    These scripts demand a line break at the end, which no response has that ends at `</answer>`:
    here it may be left out.
    """
    return float(_STRICT_FORMAT.match(turn) is not None)


def correct_in_text(turn: str, ground_truth: str) -> float:
    """1 where the text of the answer occurs anywhere (a training by TRL): a guesser that counts
    from 1 to 100 is paid."""
    return float(ground_truth in turn)
