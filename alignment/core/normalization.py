"""From per-token losses to one number: masked means and sums, what weighs the same, and what the sum is divided by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def masked_mean(tensor: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean over `dim` (all axes when None) of the elements whose mask is true; NaN where the mask is empty."""
    return tensor.where(mask.bool(), 0).sum(dim) / mask.sum(dim)


def masked_normalize(
    tensor: torch.Tensor, mask: torch.Tensor, normalize_constant: float = 1.0, dim: int | None = None
) -> torch.Tensor:
    """Sum over `dim` (all axes when None) of the elements whose mask is true, divided by `normalize_constant`."""
    return tensor.where(mask.bool(), 0).sum(dim) / normalize_constant


@dataclass(frozen=True)
class Normalization:
    """One way to turn per-token losses into a scalar.

    `total(loss [batch, sequence], mask)` is the sum over a micro-batch; `denominator(response lengths, max_new_tokens)` is what
    the sum of an optimiser step's micro-batches is divided by."""

    total: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    denominator: Callable[[Sequence[int], int], float]


NORMALIZATIONS: Mapping[str, Normalization] = {
    "sequence_mean": Normalization(
        lambda loss_BT, mask_BT: masked_mean(loss_BT, mask_BT, dim=1).sum(), lambda lengths, longest: len(lengths)
    ),
    "token_mean": Normalization(masked_normalize, lambda lengths, longest: sum(lengths)),
    "constant": Normalization(masked_normalize, lambda lengths, longest: len(lengths) * longest),
}
"""--loss_normalization -> its sum and denominator."""


def loss_denominator(loss_normalization: str, response_lengths: Sequence[int], max_new_tokens: int) -> float:
    """What the summed loss of one optimiser step is divided by, counted over the whole step.

    sequence_mean: the number of sequences, each weighing the same (GRPO, arXiv:2402.03300, eq. 3). token_mean: the
    number of response tokens, each weighing the same (DAPO, arXiv:2503.14476, eq. 8). constant: sequences times the
    most tokens one may have, so that length changes no token's weight (Dr. GRPO, arXiv:2503.20783, section 3.2)."""
    return float(NORMALIZATIONS[loss_normalization].denominator(response_lengths, max_new_tokens))
