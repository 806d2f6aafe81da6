"""Tensors that may be sharded over processes (torch's DTensor)."""

from typing import Any

import torch


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, which may be sharded."""
    shards: Any = tensor
    return shards.to_local() if hasattr(shards, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all processes, where it is sharded; called on all of them."""
    shards: Any = tensor
    return shards.full_tensor() if hasattr(shards, "full_tensor") else tensor
