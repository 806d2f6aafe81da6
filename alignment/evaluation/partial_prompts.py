"""Has a model read the test questions before? It is given the beginning of each, and continues.

A model that continues a question word for word has most likely read it: with the first 60 % of each
question of MATH-500, Qwen2.5-Math-7B does so for more than half, and Llama3.1-8B for 4 % (Wu et al.
2025, arXiv:2507.10532, section 1). Few continued ones show nothing: a model may know a question
without its words.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.core.records import Problem, Score
from alignment.system.files import write_json

FILE = "partial_prompts.json"  # read by the report of a sweep
LEAST_WORDS = 5  # of the rest of a question: fewer are guessed


def partial_problems(problems: Sequence[Problem], share: float) -> list[Problem]:
    """The problems of which the prompt is the first `share` of the question's words, and the ground
    truth all others; without those whose rest has fewer than `LEAST_WORDS`."""
    partial = []
    for problem in problems:
        words = problem.question.split()
        given = round(share * len(words))
        if given and len(words) - given >= LEAST_WORDS:
            partial.append(
                dataclasses.replace(
                    problem,
                    prompt=" ".join(words[:given]),
                    ground_truth=" ".join(words[given:]),
                    turns=(),
                )
            )
    return partial


def continues_question(response: str, rest: str) -> Score:
    """A reward of 1 where the response's first words are the rest of a question, word for word."""
    words = rest.split()
    is_continued = float(response.split()[: len(words)] == words)
    return {"reward": is_continued, "format_reward": 1.0, "answer_reward": is_continued}


def write_partial_prompts(
    folder: Path, rows: Sequence[Mapping[str, Any]], share: float
) -> list[str]:
    """Write partial_prompts.json to `folder`, and return a line on each evaluation."""
    write_json(folder / FILE, {"share": share, "evaluations": list(rows)})
    return [partial_words(row, share) for row in rows]


def partial_words(row: Mapping[str, Any], share: float) -> str:
    """What a model continued, in words: "m continued 3.0 % (0.010 .. 0.085) of 100 questions"."""
    low, high = row["avg_all_rewards_ci"]
    return (
        f"{row['model']} continued the first {share:.0%} of {row['problems']} questions of"
        f" {row['task']} word for word in {row['avg_all_rewards']:.3f} ({low:.3f} .. {high:.3f})"
    )
