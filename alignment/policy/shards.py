"""Tensors that may be sharded over processes (torch's DTensor)."""

import torch


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, which may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the parts of all processes, where it is sharded; called on all of them."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
