"""Reward functions that are parts of a sum: what they look at is the response as the model was asked to continue it."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from alignment.core.records import Problem, Score
from alignment.rewards.grading.cascade import grade

Part = Callable[[Sequence[Problem], Sequence[str], Sequence[Score]], list[float]]
"""(problems, responses, their scores by the task's rule), one each a completion -> its rewards."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
STEPS = re.compile(r"Step \d+:|^\s*\d+\.\s|^\s*[-*]\s|\b(?:First|Second|Third|Next|Then|Finally),", re.MULTILINE)
WHOLE = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+|/\d+)?")


def whole_turn(problem: Problem, response: str) -> str:
    """The response with the opening tag that the prompt may have written for it."""
    return f"<think>{response}" if problem.prompt.rstrip().endswith("<think>") else response


def tag_count(turn: str) -> float:
    """A quarter for each of the four tags that is written exactly once."""
    return sum(turn.count(tag) == 1 for tag in TAGS) / len(TAGS)


def reasoning_steps(turn: str) -> float:
    """A third for each mark of a step (a number, a dash, "First," and the like), 1 from three on."""
    return min(1.0, len(STEPS.findall(turn)) / 3)


def signed_format(turn: str) -> float:
    """1.25 for one thought and one answer in their tags and nothing else, -1 otherwise."""
    return 1.25 if WHOLE.fullmatch(turn) else -1.0


def signed_accuracy(response: str, ground_truth: str) -> float:
    """1 where the last number of the response is the answer, -1 otherwise."""
    numbers = NUMBER.findall(response)
    return 1.0 if numbers and grade(numbers[-1], ground_truth) else -1.0


def language_consistency(problem: Problem, response: str) -> float:
    """Share of the response's words in the question's script (DeepSeek-AI 2025, arXiv:2501.12948, section 2.3.2), or where that
    has no words in the prompt's; 1 for a response without words.

    A language is told by its script: words of Latin, Cyrillic and so on, single characters of Chinese, tags and LaTeX
    commands left out.
    """
    asked, said = _scripts(problem.question) or _scripts(problem.prompt), _scripts(response)
    if not asked or not said:
        return 1.0
    return said[asked.most_common(1)[0][0]] / said.total()


def _scripts(text: str) -> Counter[str]:
    words = re.findall(r"[^\W\d_]+", re.sub(r"</?\w+>|\\[A-Za-z]+", " ", text))
    scripts: Counter[str] = Counter()
    for word in words:
        letters = [unicodedata.name(letter, "OTHER").split()[0] for letter in word]
        ideographs = [script for script in letters if script in ("CJK", "HIRAGANA", "KATAKANA")]
        scripts.update(ideographs or letters[:1])
    if scripts["HIRAGANA"] or scripts["KATAKANA"]:  # Japanese, whatever the share of each
        japanese = sum(scripts.pop(script, 0) for script in ("CJK", "HIRAGANA", "KATAKANA"))
        scripts["JAPANESE"] = japanese
    return +scripts


def _of_turn(function: Callable[[str], float]) -> Part:
    return lambda problems, texts, scores: [
        function(whole_turn(problem, text)) for problem, text in zip(problems, texts, strict=True)
    ]


PARTS: Mapping[str, Part] = {
    "format": lambda problems, texts, scores: [score["format_reward"] for score in scores],
    "accuracy": lambda problems, texts, scores: [score["answer_reward"] for score in scores],
    "tag_count": _of_turn(tag_count),
    "reasoning_steps": _of_turn(reasoning_steps),
    "signed_format": _of_turn(signed_format),
    "signed_accuracy": lambda problems, texts, scores: [
        signed_accuracy(text, problem.ground_truth) for problem, text in zip(problems, texts, strict=True)
    ],
    "language_consistency": lambda problems, texts, scores: [
        language_consistency(problem, text) for problem, text in zip(problems, texts, strict=True)
    ],
}
