"""Scoring completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignment.records import Completion, Group, Problem, Score


def score_groups(
    problems: Sequence[Problem],
    completions: Sequence[Sequence[Completion]],
    reward_fn: Callable[[str, str], Score],
) -> list[Group]:
    """Each problem with its completions and their scores."""
    return [
        Group(problem, tuple(drawn), tuple(reward_fn(completion.text, problem.ground_truth) for completion in drawn))
        for problem, drawn in zip(problems, completions, strict=True)
    ]
