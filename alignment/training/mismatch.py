"""TODO."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignment.args import RLArgs
from alignment.core.rollout import Rollout
from alignment.core.tokens import take_rows
from alignment.policy.loading import (
    policy_log_probs,
)
from alignment.rollouts.collect import distribution
from alignment.system import signals
from alignment.system.errors import RunStopped
from alignment.training.update import Seen

MISMATCH_SAMPLE = 16  # completions of a rollout on which sampler and trainer are compared
STALE_MISMATCH = 0.5  # nats a token that weights some steps old may differ; far less would be a long way for one update


@torch.no_grad()
def sampler_mismatch(policy, rollout: Rollout, args: RLArgs, dtype: torch.dtype) -> dict[str, float]:
    """`mismatch` on completions spread over a rollout, by a forward pass over them."""
    number = len(rollout.lengths)
    # The step is not a whole number of groups: each sample number gets its turn.
    rows = range(0, number, number // MISMATCH_SAMPLE + 1)
    trainer_BT = policy_log_probs(policy, take_rows(rollout.batch, rows), dtype, **distribution(args))["log_probs"]
    return mismatch([(list(rows), trainer_BT)], rollout, args)


def mismatch(
    trainer: Sequence[tuple[Sequence[int], torch.Tensor]], rollout: Rollout, args: RLArgs, steps_old: int = 0
) -> dict[str, float]:
    """Mean and largest difference, in nats a token, between the sampler's log-probs and the trainer's, given as rows of the
    rollout with their log-probs.

    To be measured before the weights change, under the distribution that was sampled from. Raises `RunStopped` where the mean
    exceeds --max_sampler_mismatch: the gradient would be of another policy than the one that was sampled. Of a sampler whose
    weights are some steps old more is borne: what they have changed is in it.
    """
    differences = []
    for rows, trainer_BT in trainer:
        width = trainer_BT.shape[1]
        mask = rollout.batch.response_mask[rows, :width]
        differences.append((trainer_BT.cpu() - rollout.sampler_log_probs_BT[rows, :width])[mask].abs())
    difference = torch.cat(differences)
    mean, largest = difference.mean().item(), difference.max().item()
    limit = max(args.max_sampler_mismatch, STALE_MISMATCH) if steps_old else args.max_sampler_mismatch
    if not mean <= limit:
        allowed = f"the {limit} that stale weights may be" if steps_old else f"--max_sampler_mismatch {limit}"
        raise RunStopped(
            f"the sampler's log-probs are {mean:.4g} nats a token from the trainer's (largest {largest:.4g}), more than"
            f" {allowed}. Likely causes: weights that did not reach the sampler, a prefix cache that outlived them, another"
            " dtype (see --dtype), or other temperature or top-p handling"
            f"{', or a --learning_rate too high for --max_staleness' * (steps_old > 0)}. Nothing was trained on these samples"
        )
    return {"sampler_mismatch": mean, "sampler_mismatch_max": largest}


class SamplerMismatchCheck:
    """Compares, before a step's weights first change, what its update has computed with what its sampler said."""

    def __init__(self, rollout: Rollout, args: RLArgs, steps_old: int):
        self.rollout, self.args, self.steps_old = rollout, args, steps_old
        self.found: dict[str, float | None] = {"sampler_mismatch": None, "sampler_mismatch_max": None}
        self.passed, self.moved = False, False

    def check(self, seen: Seen) -> None:
        """Raises `RunStopped` as `mismatch`, for the first mini-batch that has a gradient: where there was one without,
        momentum has moved the weights a little. From then on a signal waits: until the step is logged, its weights are between
        two steps."""
        if not self.passed and seen:
            self.found = mismatch(seen, self.rollout, self.args, self.steps_old + self.moved)
            self.passed = True
        self.moved = True
        signals.defer_signals()
