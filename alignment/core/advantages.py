"""Advantages: rewards minus the baseline of their group and, with --normalize_by_std, divided by a
standard deviation.

Axes: P prompts, G samples of a prompt (the group), B = P * G responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignment.core.records import Score

if TYPE_CHECKING:
    from torch import Tensor

# Functions import torch themselves: the arguments need the tables below, and must not wait for
# torch to load.


@dataclass(frozen=True)
class AdvantageConfig:
    """The settings of `group_advantages`. Each field has the name of its flag."""

    group_size: int
    baseline: str = "group_mean"
    normalize_by_std: bool = True
    std_of: str = "group"
    advantage_eps: float = 1e-6


def _group_mean(centred_PG: Tensor, number_P1: Tensor) -> Tensor:
    """r - mean(r)."""
    return centred_PG


def _leave_one_out(centred_PG: Tensor, number_P1: Tensor) -> Tensor:
    """r - (n * mean(r) - r) / (n - 1) = (r - mean(r)) * n / (n - 1)."""
    others_P1 = (number_P1 - 1).clamp(min=1)
    return centred_PG * number_P1 / others_P1


# --baseline -> rewards minus the baseline, from rewards minus their group's mean and each group's
# number of responses.
BASELINES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
}


def _group_std(squares_P1: Tensor, number_P1: Tensor, rewards: Tensor) -> Tensor:
    return (squares_P1 / (number_P1 - 1).clamp(min=1)).sqrt()


def _population_std(squares_P1: Tensor, number_P1: Tensor, rewards: Tensor) -> Tensor:
    return (squares_P1 / number_P1.clamp(min=1)).sqrt()


def _batch_std(squares_P1: Tensor, number_P1: Tensor, rewards: Tensor) -> Tensor:
    return rewards.std(correction=1).nan_to_num()


# --std_of -> the standard deviation, from (squared deviations summed by group, responses by group,
# all rewards).
DEVIATIONS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "group": _group_std,
    "group_population": _population_std,
    "batch": _batch_std,
}


def group_advantages(
    raw_rewards_B1: Tensor, config: AdvantageConfig, counted_B1: Tensor | None = None
) -> Tensor:
    """A = r - b, and with `normalize_by_std` A = (r - b) / (std + eps).

    Shapes [batch, 1] -> [batch, 1].

    `baseline`: "group_mean" (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without the
    division Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2) or "leave_one_out", the mean
    of the group's other rewards (RLOO, Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740,
    eq. 8). `std_of`: "group" (unbiased), "group_population" (divided by the group's size), or
    "batch", the unbiased deviation of all rewards (Liu et al. 2025, arXiv:2508.08221).

    Responses whose `counted_B1` is False, and a group's only counted one, have the advantage 0; the
    former enter no mean or deviation. Raises ValueError for incomplete groups and for a group size
    below 2.
    """
    import torch

    if config.group_size < 2:
        raise ValueError(
            f"a group baseline needs at least 2 samples a prompt, not {config.group_size}"
        )
    if raw_rewards_B1.shape[0] % config.group_size:
        raise ValueError(
            f"{raw_rewards_B1.shape[0]} rewards are not whole groups of {config.group_size}"
        )
    if counted_B1 is None:
        counted_B1 = torch.ones_like(raw_rewards_B1, dtype=torch.bool)
    # In float64 the mean of equal float32 rewards is exact, so that their advantages are exactly 0.
    rewards_B1 = raw_rewards_B1.double()
    rewards_PG = rewards_B1.reshape(-1, config.group_size)
    counted_PG = counted_B1.reshape(-1, config.group_size)
    number_P1 = counted_PG.sum(dim=1, keepdim=True)
    mean_P1 = rewards_PG.where(counted_PG, 0).sum(dim=1, keepdim=True) / number_P1.clamp(min=1)
    centred_PG = (rewards_PG - mean_P1).where(counted_PG, 0)
    advantages_PG = BASELINES[config.baseline](centred_PG, number_P1)
    if config.normalize_by_std:
        squares_P1 = centred_PG.square().sum(dim=1, keepdim=True)
        std = DEVIATIONS[config.std_of](squares_P1, number_P1, rewards_B1[counted_B1])
        advantages_PG = advantages_PG / (std + config.advantage_eps)
    return advantages_PG.reshape(-1, 1).to(raw_rewards_B1.dtype)


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Score],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Score every response and normalise within its group of `group_size` consecutive responses.

    Returns (advantages [batch, 1], raw_rewards [batch, 1], metadata). Raises ValueError like
    `group_advantages`.
    """
    import torch

    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    scores = [reward_fn(response, ground_truth) for response, ground_truth in pairs]
    raw_rewards_B1 = torch.tensor([[score["reward"]] for score in scores], dtype=torch.float32)
    config = AdvantageConfig(
        group_size, normalize_by_std=normalize_by_std, advantage_eps=advantage_eps
    )
    advantages_B1 = group_advantages(raw_rewards_B1, config)
    return advantages_B1, raw_rewards_B1, group_statistics(raw_rewards_B1, group_size)


def group_statistics(raw_rewards_B1: Tensor, group_size: int) -> dict[str, float]:
    """Mean, std and extremes of the rewards, and the share of groups whose rewards are all equal,
    under TRL's name for it."""
    rewards_PG = raw_rewards_B1.reshape(-1, group_size)
    equal_P = (rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).float()
    statistics = {
        "reward_mean": rewards_PG.mean(),
        "reward_std": rewards_PG.std(correction=0),
        "reward_max": rewards_PG.max(),
        "reward_min": rewards_PG.min(),
        "frac_reward_zero_std": equal_P.mean(),
    }
    return {name: value.item() for name, value in statistics.items()}


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, added to the reward (Yu et al. 2025, arXiv:2503.14476, eq.
    13).

    It is 0 up to max_new_tokens - buffer tokens, then falls linearly to -1 at max_new_tokens. A
    buffer of 0 turns it off.
    """
    if buffer == 0:
        return 0.0
    excess = max(0, length - (max_new_tokens - buffer))
    return -excess / buffer
