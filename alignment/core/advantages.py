"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import einx
import torch

from alignment.core.records import Score

# --- advantages ---------------------------------------------------------------------------------------------------


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Score],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Score every response and normalise within its group of `group_size` neighbours.

    Returns (advantages [batch, 1], raw_rewards [batch, 1], metadata). Raises ValueError as `normalize_group_rewards`.
    """
    scores = [reward_fn(r, g) for r, g in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw_rewards_B1 = torch.tensor([[score["reward"]] for score in scores], dtype=torch.float32)
    advantages_B1 = normalize_group_rewards(raw_rewards_B1, group_size, advantage_eps, normalize_by_std)
    return advantages_B1, raw_rewards_B1, group_statistics(raw_rewards_B1, group_size)


def normalize_group_rewards(
    raw_rewards_B1: torch.Tensor,
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
    baseline: str = "group_mean",
    std_of: str = "group",
    counted_B1: torch.Tensor | None = None,
) -> torch.Tensor:
    """A = r - b, and with `normalize_by_std` A = (r - b) / (std + eps). Shapes [batch, 1] -> [batch, 1].

    `baseline`: "group_mean" (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without the division Dr. GRPO, Liu et
    al. 2025, arXiv:2503.20783, section 3.2) or "leave_one_out", the mean of the group's other rewards (RLOO, Kool et al.
    2019; Ahmadian et al. 2024, arXiv:2402.14740, eq. 8). `std_of`: "group" (unbiased), "group_population" (divided by the
    group's size), or "batch", the unbiased deviation of all rewards (Liu et al. 2025, arXiv:2508.08221).

    Responses that `counted_B1` (bool) leaves out are in no mean or deviation, and get 0; so does one that is alone in its
    group. Raises ValueError where groups are not whole, and for groups of one, whose baseline is the reward itself.
    """
    if group_size < 2:
        raise ValueError(f"a group baseline needs at least 2 samples a prompt, not {group_size}")
    if raw_rewards_B1.shape[0] % group_size:
        raise ValueError(f"{raw_rewards_B1.shape[0]} rewards are not whole groups of {group_size}")
    counted_B1 = torch.ones_like(raw_rewards_B1, dtype=torch.bool) if counted_B1 is None else counted_B1
    # In float64 equal float32 rewards have exactly their own value for a mean, and so advantages of exactly 0.
    rewards_B1 = raw_rewards_B1.double()
    rewards_PG, counted_PG = (einx.id("(p g) 1 -> p g", t, g=group_size) for t in (rewards_B1, counted_B1))
    number_P1 = counted_PG.sum(dim=1, keepdim=True)
    mean_P1 = torch.where(counted_PG, rewards_PG, 0).sum(dim=1, keepdim=True) / number_P1.clamp(min=1)
    centred_PG = torch.where(counted_PG, rewards_PG - mean_P1, 0)
    # r - (n * mean - r) / (n - 1) = (r - mean) * n / (n - 1)
    advantages_PG = {"group_mean": centred_PG, "leave_one_out": centred_PG * number_P1 / (number_P1 - 1).clamp(min=1)}[baseline]
    if normalize_by_std:
        squares_P1 = centred_PG.square().sum(dim=1, keepdim=True)
        std = {
            "group": lambda: (squares_P1 / (number_P1 - 1).clamp(min=1)).sqrt(),
            "group_population": lambda: (squares_P1 / number_P1.clamp(min=1)).sqrt(),
            "batch": lambda: rewards_B1[counted_B1].std(correction=1).nan_to_num(),
        }[std_of]()
        advantages_PG = advantages_PG / (std + advantage_eps)
    return einx.id("p g -> (p g) 1", advantages_PG).to(raw_rewards_B1.dtype)


def group_statistics(raw_rewards_B1: torch.Tensor, group_size: int) -> dict[str, float]:
    """Mean, std, extremes of the rewards, and the share of groups whose rewards are all equal (they teach nothing)."""
    rewards_PG = einx.id("(p g) 1 -> p g", raw_rewards_B1, g=group_size)
    flat_P = (rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).float()
    return {
        "reward_mean": rewards_PG.mean().item(),
        "reward_std": rewards_PG.std(correction=0).item(),
        "reward_max": rewards_PG.max().item(),
        "reward_min": rewards_PG.min().item(),
        "flat_groups": flat_P.mean().item(),
    }


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """What a response is fined for its length: 0 outside the last `buffer` tokens, in them linearly down to -1.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13); a buffer of 0 fines nothing.
    """
    return -max(0, length - (max_new_tokens - buffer)) / buffer if buffer else 0.0
