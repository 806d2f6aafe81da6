"""Does a policy solve its training problems far better than held-out ones before RL begins? Then it
knows them by heart, and RL has little to teach."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignment.core.power import wilson_interval

FAR = 0.1  # difference of accuracies that the lower end of the interval must exceed


@dataclass(frozen=True)
class Solved:
    """The mean reward on some questions, from 0 to 1."""

    accuracy: float
    questions: int


def least_difference(trained: Solved, held_out: Solved) -> float:
    """The lower end of the 95 % interval of the difference of two accuracies on different
    questions: d - sqrt((p - l)^2 + (u - q)^2), with Wilson's lower end l of the first and upper end
    u of the second (Newcombe 1998, Statistics in Medicine 17:873, method 10). A question counts
    once, however often it was sampled: a mean of samples varies no more than one of them does."""
    low, _ = wilson_interval(trained.accuracy, trained.questions)
    _, high = wilson_interval(held_out.accuracy, held_out.questions)
    difference = trained.accuracy - held_out.accuracy
    return difference - math.hypot(trained.accuracy - low, high - held_out.accuracy)


def by_heart_warning(trained: Solved, held_out: Solved) -> str:
    """Why RL may ask what the policy knows by heart; "" where the least difference is at most
    `FAR`."""
    least = least_difference(trained, held_out)
    if least <= FAR:
        return ""
    return (
        f"before the first update the policy solves {trained.accuracy:.0%} of {trained.questions}"
        f" training problems and {held_out.accuracy:.0%} of {held_out.questions} held-out ones, at"
        f" least {least:.0%} more (95 % interval): it knows them by heart, or held-out ones are"
        " harder. --sft_share keeps RL's problems from SFT"
    )


def solved_at_start(
    step: Mapping[str, Any], evaluation: Mapping[str, Any], reward: str, group_size: int
) -> tuple[Solved, Solved] | None:
    """What a run solved of its training problems in its first step, and of held-out ones before, by
    the rule that both records have. None where refills chose the problems by how they were solved,
    and --reward `reward`, which is known of all, is not that rule."""
    rules = [key for key in evaluation if key.startswith("reward_") and key in step]
    if not rules:
        return None
    held_out = Solved(evaluation[rules[0]], evaluation["problems"])
    if "prompts_sampled" not in step:
        return Solved(step[rules[0]], step["responses"] // group_size), held_out
    if reward != rules[0].removeprefix("reward_"):
        return None
    return Solved(step["reward_sampled"], step["prompts_sampled"]), held_out
