"""Are numbers that must have the precision of float32 rounded to 16 bits?"""

from collections.abc import Iterable

import torch

# Nearer to 0 a log-prob has few digits: it is a multiple of the rounding of 1.
LEAST_LOG_PROB = 1e-2
LEAST_NUMBERS = 20  # of fewer nothing is said
# Of the share of numbers without a digit beyond those of 16 bits. By chance it is 2^-13 at most.
MOST_ROUNDED = 0.5


def rounded_share(tensors: Iterable[torch.Tensor], least: float = 0.0) -> float:
    """The share of the numbers larger than `least` that bfloat16 or float16 holds exactly; 0 of few
    numbers."""
    numbers = 0
    rounded = 0
    for tensor in tensors:
        values = tensor.detach().float().flatten()
        values = values[values.abs() > least]
        is_held = (values == values.bfloat16().float()) | (values == values.half().float())
        numbers += len(values)
        rounded += int(is_held.sum())
    if numbers < LEAST_NUMBERS:
        return 0.0
    return rounded / numbers
