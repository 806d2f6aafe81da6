"""Detects a sampler with stale or wrong weights: compares its log-probs with the trainer's."""

from collections.abc import Sequence

import torch

from alignment.core.records import Distribution, Rollout
from alignment.policy.policy import Policy
from alignment.system.errors import RunStopped

COMPARED = 16  # responses of an evaluation, to compare sampler and trainer on
STALE_MISMATCH = 0.5  # limit in nats a token for a sampler some steps behind; one update changes log-probs by far less

RowLogProbs = Sequence[tuple[Sequence[int], torch.Tensor]]
"""Row numbers of a rollout, and the trainer's log-probs [b, t] of these rows."""


def sampler_mismatch(policy: Policy, rollout: Rollout, distribution: Distribution, limit: float) -> dict[str, float]:
    """`mismatch` on `COMPARED` responses spread over a rollout, by a forward pass of the policy."""
    number = len(rollout.lengths)
    rows = list(range(0, number, number // COMPARED + 1))  # no whole number of groups, so that each sample number gets its turn
    log_probs_BT = policy.log_probs(rollout.batch, distribution, rows)
    return mismatch([(rows, log_probs_BT[rows])], rollout, limit)


def mismatch(trainer: RowLogProbs, rollout: Rollout, limit: float, steps_old: int = 0) -> dict[str, float]:
    """Mean and largest difference, in nats a token, between the sampler's log-probs and the trainer's.

    Both are taken under the distribution that was sampled from, before the weights change. Raises `RunStopped` where the mean
    exceeds `limit` (--max_sampler_mismatch): the gradient would be of another policy than the one that was sampled. A sampler
    whose weights are `steps_old` steps old may differ by up to `STALE_MISMATCH`, because these steps changed the log-probs."""
    differences = []
    for rows, trainer_bt in trainer:
        width = trainer_bt.shape[1]
        mask = rollout.batch.response_mask[rows, :width]
        differences.append((trainer_bt.cpu() - rollout.sampler_log_probs_BT[rows, :width])[mask].abs())
    difference = torch.cat(differences)
    mean, largest = difference.mean().item(), difference.max().item()
    bound = max(limit, STALE_MISMATCH) if steps_old else limit
    if not mean <= bound:
        allowed = f"the {bound} that stale weights may be" if steps_old else f"--max_sampler_mismatch {bound}"
        raise RunStopped(
            f"the sampler's log-probs are {mean:.4g} nats a token from the trainer's (largest {largest:.4g}), more than"
            f" {allowed}. Likely causes: weights that did not reach the sampler, a prefix cache that outlived them, another"
            " dtype (see --dtype), or other temperature or top-p handling"
            f"{', or a --learning_rate too high for --max_staleness' * (steps_old > 0)}. Nothing was trained on these samples"
        )
    return {"sampler_mismatch": mean, "sampler_mismatch_max": largest}
