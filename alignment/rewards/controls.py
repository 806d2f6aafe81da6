"""Negative controls: rewards that have nothing to teach about answers. Evaluations are by the task's own rule."""

import hashlib
from collections.abc import Callable, Mapping

from alignment.rewards.rules import RewardFn


def random_reward(rule: RewardFn, response: str, ground_truth: str) -> float:
    """0 or 1, as a hash of the response and the ground truth decides, so that a run can be repeated. The same response to the
    same problem always gets the same reward, so with few enough problems it could be learnt."""
    return float(hashlib.sha256(f"{ground_truth}\0{response}".encode("utf-8", "surrogatepass")).digest()[0] & 1)


def inverted_reward(rule: RewardFn, response: str, ground_truth: str) -> float:
    """1 for a well-formed wrong answer."""
    score = rule(response, ground_truth)
    return score["format_reward"] * (1 - score["answer_reward"])


CONTROLS: Mapping[str, Callable[[RewardFn, str, str], float]] = {
    "random": random_reward,
    "format_only": lambda rule, response, ground_truth: rule(response, ground_truth)["format_reward"],
    "inverted": inverted_reward,
}
