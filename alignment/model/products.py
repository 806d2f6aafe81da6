"""Matrix products with weights that are trained in fp32: their type, casts that outlive a pass, and
gradients that are added up in fp32 within the product."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class GradientBlock:
    """What passes share whose gradients are added up while weights stay as they are."""

    casts: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """Weight -> the same in the type of products."""


_blocks: list[GradientBlock] = []
"""The block that is open, if one is. One thread at a time reads it: see `use_fused_kernels`."""


@contextlib.contextmanager
def one_gradient() -> Iterator[None]:
    """A block of passes forward and backward whose gradients are added up. Each trained weight is
    cast once in it, by autocast and by `cast_weight`, and `weight_gradient` may add to `.grad`.
    Weights must not change in it, each pass that autocast casts for must keep a gradient, and only
    `.backward()` may take gradients."""
    torch.autocast_increment_nesting()
    _blocks.append(GradientBlock())
    try:
        yield
    finally:
        _blocks.pop()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def dtype_of_products(weight: torch.Tensor) -> torch.dtype:
    """The type of matrix products with a weight: autocast's, or its own."""
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight in the type of products, without its history; within `one_gradient` cast once."""
    if weight.dtype == dtype:
        return weight
    if not _blocks:
        return weight.to(dtype)
    casts = _blocks[-1].casts
    if weight not in casts:
        casts[weight] = weight.detach().to(dtype)
    return casts[weight]


def fp32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrix product in fp32: 16 bits would move a logit of 20 by up to 0.06. A CPU has no such
    kernel, and rounds."""
    if left.is_cuda and left.itemsize == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def added_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`total`, to which a matrix product has been added in place; the product, in `dtype`, where
    there is no total yet."""
    adds_in_product = left.is_cuda and left.itemsize == 2 and dtype == torch.float32
    if total is None:
        return fp32_product(left, right) if adds_in_product else (left @ right).to(dtype)
    if total.dtype == left.dtype:
        return total.addmm_(left, right)  # without a second [V, H]
    if adds_in_product:
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    return total.add_(left @ right)


def gradient_to_add_to(weight: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a weight, within `one_gradient`, where there is one and products may be added
    to it."""
    if _blocks and weight.is_leaf:
        return weight.grad
    return None


def weight_gradient(
    weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor | None:
    """The product of `left` and `right`, which is a gradient by the weight, for autograd to add to
    the weight's; None where it has been added already, within `one_gradient`."""
    total = gradient_to_add_to(weight)
    product = added_product(total, left, right, weight.dtype)
    return product if total is None else None
