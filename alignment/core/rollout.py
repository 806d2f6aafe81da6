"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignment.core.records import Batch, Group


@dataclass(frozen=True)
class Rollout:
    """One step's responses, ready to train on: B rows in a padded batch and a number or a row of numbers for each.
    `trained_rows` are those that updates are made from.
    """

    batch: Batch
    raw_rewards_B1: torch.Tensor
    advantages_B1: torch.Tensor | None
    sampler_log_probs_BT: torch.Tensor
    trained_rows: tuple[int, ...]
    old_log_probs_BT: torch.Tensor | None = None
    reference_log_probs_BT: torch.Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each row."""
        return self.batch.response_mask.sum(dim=1).tolist()


@dataclass(frozen=True)
class SampledStep:
    """What one step is made from: its groups, the version of the weights that sampled them, and what that took."""

    step: int
    policy_version: int
    groups: list[Group]
    report: dict[str, float]
    """What `rollout_report` says, by whoever has graded it."""
    seconds: dict[str, float]
    restarts: int = 0
    """Engines that were lost since the rollout before, where nobody else counts them."""
