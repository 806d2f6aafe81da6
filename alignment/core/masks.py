"""Means and sums over the true positions of a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def masked_mean(tensor: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean over `dim` (all axes when None) of the elements whose mask is true; NaN where the mask is empty."""
    kept = tensor.where(mask.bool(), 0)
    return kept.sum() / mask.sum() if dim is None else kept.sum(dim) / mask.sum(dim)


def masked_normalize(
    tensor: torch.Tensor, mask: torch.Tensor, normalize_constant: float = 1.0, dim: int | None = None
) -> torch.Tensor:
    """Sum over `dim` (all axes when None) of the elements whose mask is true, divided by `normalize_constant`."""
    kept = tensor.where(mask.bool(), 0)
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant
