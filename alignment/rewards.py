"""Reward functions by name, and scoring completions with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from alignment.drgrpo_grader import r1_zero_reward_fn, r1_zero_strict_reward_fn
from alignment.records import Completion, Group, Problem, Score

RewardFn = Callable[[str, str], Score]

RULES: Mapping[str, RewardFn] = {"r1_zero": r1_zero_reward_fn, "r1_zero_strict": r1_zero_strict_reward_fn}


def random_reward_fn(response: str, ground_truth: str) -> Score:
    """A coin for each response to each problem, thrown by a hash, so that a run can be repeated.

    The same response to the same problem always gets the same coin, so with few enough problems the coins could be learnt.
    """
    coin = hashlib.sha256(f"{ground_truth}\0{response}".encode("utf-8", "surrogatepass")).digest()[0] & 1
    return {**r1_zero_reward_fn(response, ground_truth), "reward": float(coin)}


def format_only_reward_fn(response: str, ground_truth: str) -> Score:
    """The format's part of r1_zero, whatever the answer."""
    score = r1_zero_reward_fn(response, ground_truth)
    return {**score, "reward": score["format_reward"]}


def inverted_reward_fn(response: str, ground_truth: str) -> Score:
    """1 for a well-formed wrong answer."""
    score = r1_zero_reward_fn(response, ground_truth)
    return {**score, "reward": score["format_reward"] * (1 - score["answer_reward"])}


REWARDS: Mapping[str, RewardFn] = {
    **RULES,
    "random": random_reward_fn,
    "format_only": format_only_reward_fn,
    "inverted": inverted_reward_fn,
}

GRADERS_AT_WORK = 8  # threads, each of which may wait for a worker process that asks math-verify


def evaluation_reward(name: str) -> RewardFn:
    """The rule that a run trained on `name` is evaluated by: its own, and r1_zero for a negative control."""
    return RULES.get(name, r1_zero_reward_fn)


def score_groups(problems: Sequence[Problem], completions: Sequence[Sequence[Completion]], reward_fn: RewardFn) -> list[Group]:
    """Each problem with its completions and their scores."""
    texts = [
        (completion.text, problem.ground_truth)
        for problem, drawn in zip(problems, completions, strict=True)
        for completion in drawn
    ]
    threads = ThreadPoolExecutor(GRADERS_AT_WORK)
    try:
        scores = threads.map(lambda pair: reward_fn(*pair), texts)
        return [
            Group(problem, tuple(drawn), tuple(next(scores) for _ in drawn))
            for problem, drawn in zip(problems, completions, strict=True)
        ]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # whoever is interrupted does not wait for the rest


def grading_report(groups: Sequence[Group]) -> dict[str, float]:
    """The mean reward under each rule, so that what the rule itself decides can be seen, and how many gradings failed.

    Verdicts are cached, so this costs little beside the scoring before it.
    """
    pairs = [(completion.text, group.problem.ground_truth) for group in groups for completion in group.completions]
    means = {f"reward_{name}": sum(fn(*pair)["reward"] for pair in pairs) / len(pairs) for name, fn in RULES.items()}
    failed = sum("grading_failed" in score for group in groups for score in group.scores)
    return {**means, "grading_failed": failed}
