"""One step's responses: as they were sampled, and as the batch that updates are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alignment.core.records import Batch, Group

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SampledStep:
    """The groups of one step, the version of the weights that sampled them, what is logged of them, and seconds by phase."""

    step: int
    policy_version: int
    groups: list[Group]
    report: dict[str, float]
    seconds: dict[str, float]
    restarts: int = 0
    """Engines that were lost since the step before, where the sampler runs in another process and nobody else counts them."""


@dataclass(frozen=True)
class Rollout:
    """One step's B responses, ready to train on: a padded batch, and one number or one row of numbers for each response.

    `raw_rewards_B1` include the penalty of overlong responses. `counted_B1` (bool) is false for responses that enter neither
    baselines nor updates.
    """

    batch: Batch
    raw_rewards_B1: torch.Tensor
    counted_B1: torch.Tensor
    sampler_log_probs_BT: torch.Tensor
    advantages_B1: torch.Tensor | None = None
    old_log_probs_BT: torch.Tensor | None = None
    reference_log_probs_BT: torch.Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each row."""
        return self.batch.response_mask.sum(dim=1).tolist()

    @property
    def trained_rows(self) -> list[int]:
        """The rows that updates are made from."""
        return self.counted_B1.squeeze(1).nonzero().squeeze(1).tolist()

    def response_values(self, values_BT: torch.Tensor, rows: Iterable[int]) -> Iterable[list[float]]:
        """Each row's values at its response tokens; none for rows that are not among `rows`."""
        chosen = set(rows)
        masked = enumerate(zip(values_BT, self.batch.response_mask, strict=True))
        return (values[mask].tolist() if row in chosen else [] for row, (values, mask) in masked)
