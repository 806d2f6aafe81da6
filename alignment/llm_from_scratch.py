"""Two functions of the `alignment` module of llm-from-scratch whose shapes, defaults or arguments
are not those of the functions of the same names in `alignment.grpo` and `alignment.drgrpo_grader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from alignment.core.advantages import compute_group_normalized_rewards as normalize_rewards
from alignment.core.records import Score
from alignment.rewards.grading.boxes import find_boxes

if TYPE_CHECKING:
    from torch import Tensor


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Score],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float = 1e-6,
    normalize_by_std: bool = True,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Score every response and normalise within its group of `group_size` consecutive responses.

    Returns (advantages [batch], raw_rewards [batch], metadata). The metadata has "mean_advantages"
    and the statistics of `alignment.grpo.compute_group_normalized_rewards`. Raises ValueError
    where the responses are no whole groups of at least two.
    """
    advantages_B1, raw_rewards_B1, metadata = normalize_rewards(
        reward_fn,
        rollout_responses,
        repeated_ground_truths,
        group_size,
        advantage_eps,
        normalize_by_std,
    )
    metadata = {"mean_advantages": advantages_B1.mean().item(), **metadata}
    return advantages_B1.squeeze(1), raw_rewards_B1.squeeze(1), metadata


def extract_answer(passage: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...} of a text; None where there is no box that
    closes."""
    contents = find_boxes(passage).contents
    return contents[-1] if contents else None
