"""What the micro-batches of an update reported, as numbers."""

from collections.abc import Sequence

import torch

from alignment.policy.policy import MicroBatchResult


def computed_tokens(results: Sequence[MicroBatchResult]) -> int:
    """Tokens that the forward passes of some micro-batches computed; a prompt that rows share
    counts once."""
    return sum(int(result.sums["tokens"]) for result in results)


def reported_sums(results: Sequence[MicroBatchResult], name: str) -> list[float]:
    """What each micro-batch's loss reported under `name`, as numbers on the CPU."""
    return [torch.as_tensor(result.sums[name]).item() for result in results]
