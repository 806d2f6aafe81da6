"""Negative controls: rewards that have nothing to teach about answers. Evaluations are by the task's own rule."""

import hashlib
from collections.abc import Callable, Mapping

from alignment.core.records import Score

Rule = Callable[[str, str], Score]


def random_reward(rule: Rule, response: str, ground_truth: str) -> float:
    """0 or 1, as a hash of the response and the ground truth decides, so that a run can be repeated. The same response to the
    same problem always gets the same reward, so with few enough problems it could be learnt."""
    return float(hashlib.sha256(f"{ground_truth}\0{response}".encode("utf-8", "surrogatepass")).digest()[0] & 1)


def format_only_reward(rule: Rule, response: str, ground_truth: str) -> float:
    """The rule's reward for the format, whatever the answer."""
    return rule(response, ground_truth)["format_reward"]


def inverted_reward(rule: Rule, response: str, ground_truth: str) -> float:
    """1 for a well-formed wrong answer."""
    score = rule(response, ground_truth)
    return score["format_reward"] * (1 - score["answer_reward"])


CONTROLS: Mapping[str, Callable[[Rule, str, str], float]] = {
    "random": random_reward,
    "format_only": format_only_reward,
    "inverted": inverted_reward,
}
