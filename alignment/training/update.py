"""The optimiser updates of one rollout, old and reference log-probs, and the check of its sampler
against the trainer."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from alignment.core.losses import LossInputs, loss_denominator, micro_batch_loss
from alignment.core.records import Batch, Distribution, Rollout
from alignment.model.frozen import FrozenModel
from alignment.model.packing import send
from alignment.policy.policy import MicroBatchResult, Objective, Policy
from alignment.rollouts.config import UpdateConfig, derived_seed
from alignment.system.clock import Clock, start_in_background
from alignment.system.errors import RunStopped

COMPARED = 16  # responses of an evaluation, to compare sampler and trainer on
# limit in nats a token for a sampler some steps behind; one update changes log-probs by far less
STALE_MISMATCH = 0.5


@dataclass
class UpdateResult:
    """The metrics of the updates on one rollout. `trainer_log_probs_BT` are the trainer's log-probs
    of `rows_with_gradient`, before the first update; `bad` the rows of each mini-batch that was
    skipped, for a loss or gradient that was not finite."""

    report: dict[str, float | None]
    trainer_log_probs_BT: torch.Tensor
    rows_with_gradient: list[int]
    bad: list[Sequence[int]] = field(default_factory=list)


def do_nothing() -> None:
    pass


def update(
    policy: Policy,
    rollout: Rollout,
    config: UpdateConfig,
    step: int,
    steps_old: int = 0,
    before_change: Callable[[], object] = do_nothing,
) -> UpdateResult:
    """Make all optimiser updates of one rollout. Calls `before_change` before each change of the
    weights.

    It skips the forward pass of responses without a gradient, but counts them in every denominator.
    `mismatch` (`RunStopped`) compares the first mini-batch that has one with the sampler,
    `steps_old` behind. Only `is_finite` waits for the device."""
    torch.manual_seed(derived_seed(config.seed, step))
    compared = dict.fromkeys(("sampler_mismatch", "sampler_mismatch_max"))
    informative = rows_with_gradient(rollout, config)
    # all micro-batch results, those of optimiser steps, norms, skipped rows
    computed, stepped, norms, bad = (
        [],
        [],
        [],
        [],
    )
    made = (step - 1) * config.updates_per_rollout
    rate = learning_rate(config, max(1, made))  # of the last update before; a rollout may have none
    has_gradient = set(informative)
    for mini_batch in mini_batches(rollout, config, step):
        objective = rollout_objective(rollout, mini_batch, config)
        results = list(
            policy.accumulate(
                rollout.batch, [row for row in mini_batch if row in has_gradient], objective
            )
        )
        computed += results
        norm = policy.clip_gradient(config.max_grad_norm)
        rate = learning_rate(config, made + len(norms) + len(bad) + 1)
        if is_finite(norm, results):
            # updates without a gradient have moved the weights a little, by their momentum
            if results and not stepped:
                rows, limit = (
                    [row for result in results for row in result.rows],
                    config.max_sampler_mismatch,
                )
                compared = mismatch(
                    first_log_probs(results, rollout), rows, rollout, limit, steps_old + bool(norms)
                )
            before_change()
            policy.step(rate)
            norms.append(norm)
            stepped += results
        else:
            policy.drop_gradient()
            bad.append(mini_batch)
    report = update_report(stepped, norms, rate) | {
        "rows_with_gradient": len(informative),
        "bad_updates": len(bad),
    }
    padded = rollout.batch.labels.numel() * config.epochs_per_rollout
    report |= {"update_token_share": report["update_tokens"] / padded, **compared}
    trainer_BT = (
        rollout.old_log_probs_BT
        if config.old_log_probs == "policy"
        else first_log_probs(computed, rollout)
    )
    return UpdateResult(report, trainer_BT, informative, bad)


def rows_with_gradient(rollout: Rollout, config: UpdateConfig) -> list[int]:
    """The trained rows whose loss has a gradient: all with a KL penalty, else those with a non-zero
    advantage or reward."""
    weight = config.loss.loss.weight
    if config.loss.beta or weight is None:
        return rollout.trained_rows
    weights_B1 = getattr(rollout, f"{weight}_B1")
    return [row for row in rollout.trained_rows if weights_B1[row].item() != 0]


def mini_batches(rollout: Rollout, config: UpdateConfig, step: int) -> list[list[int]]:
    """The rows of each optimiser update: every epoch shuffles the groups and cuts them into
    mini-batches."""
    size, parts = config.train_mini_batch_size or len(rollout.lengths), []
    for epoch in range(config.epochs_per_rollout):
        order = shuffled_groups(
            rollout.trained_rows,
            config.advantage.group_size,
            f"update {config.data_seed} {step} {epoch}",
        )
        parts += [order[start : start + size] for start in range(0, len(order), size)]
    return parts


def shuffled_groups(rows: Sequence[int], group_size: int, seed: str) -> list[int]:
    """Shuffle whole groups, not rows: a mini-batch computes the prompt of a whole group once."""
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row // group_size)]
    return [row for group in random.Random(seed).sample(groups, len(groups)) for row in group]


def rollout_objective(
    rollout: Rollout, mini_batch: Sequence[int], config: UpdateConfig
) -> Objective:
    """The objective of one optimiser update: any micro-batch's loss, divided by the denominator of
    the whole `mini_batch`."""
    lengths = rollout.lengths
    denominator = loss_denominator(
        config.loss.loss_normalization, [lengths[row] for row in mini_batch], config.max_new_tokens
    )
    return Objective(partial(rollout_loss, rollout, config, denominator), config.distribution)


def rollout_loss(
    rollout: Rollout,
    config: UpdateConfig,
    denominator: float,
    rows: Sequence[int],
    log_probs_bt: torch.Tensor,
    mask_bt: torch.Tensor,
):
    """The loss of some rows of a rollout, divided by `denominator`, and what it reports, on the
    device of `log_probs_bt`."""

    def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return (
            None
            if tensor is None
            else send(tensor[rows, : log_probs_bt.shape[1]], log_probs_bt.device)
        )

    rewards_b1, advantages_b1, old_bt = map(
        take, (rollout.raw_rewards_B1, rollout.advantages_B1, rollout.old_log_probs_BT)
    )
    # one update: the old policy is the current
    old_bt = log_probs_bt.detach() if old_bt is None else old_bt
    others = map(take, (rollout.reference_log_probs_BT, rollout.sampler_log_probs_BT))
    inputs = LossInputs(
        config.loss, log_probs_bt, mask_bt, rewards_b1, advantages_b1, old_bt, *others
    )
    return micro_batch_loss(inputs, denominator)


def is_finite(norm: torch.Tensor, results: Sequence[MicroBatchResult]) -> bool:
    """Whether a mini-batch's gradient norm and the losses of its micro-batches are finite."""
    losses = sum(
        (result.sums["loss"].to(norm.device) for result in results), start=torch.zeros_like(norm)
    )
    return bool((torch.isfinite(norm) & torch.isfinite(losses)).item())


def learning_rate(config: UpdateConfig, update_number: int) -> float:
    """Linear warm-up over `warmup_steps` updates, then constant. `update_number` starts at 1."""
    return config.learning_rate * min(1.0, update_number / max(1, config.warmup_steps))


def first_log_probs(computed: Sequence[MicroBatchResult], rollout: Rollout) -> torch.Tensor:
    """Log-probs [B, T] on the CPU, of each row's first forward pass; 0 for rows without one."""
    log_probs_BT = torch.zeros(rollout.batch.labels.shape)
    for result in reversed(computed):
        log_probs_BT[result.rows, : result.log_probs.shape[1]] = result.log_probs.cpu()
    return log_probs_BT


_MEANS = {
    "entropy": "entropy_sum",
    "sampling_entropy": "sampling_entropy_sum",
    "clip_fraction": "clipped_tokens",
}
_MEANS |= {
    "ratio_mean": "ratio_sum",
    "ratio_max": "ratio_max",
    "kl": "kl_sum",
    "correction_mean": "weight_sum",
}
"""Metric -> sum (of "ratio_max": maximum) over response tokens, if the loss reports it."""


def update_report(
    results: Sequence[MicroBatchResult], norms: Sequence[torch.Tensor], rate: float
) -> dict[str, float | None]:
    """The metrics: the loss averaged over updates; entropies, ratio and clip fraction averaged over
    response tokens with a gradient. "entropy" is of the tempered distribution, "sampling_entropy"
    of what top-k and top-p leave of it. Metrics are None without an update or without such a token.
    "update_tokens", and those of the "largest_micro_batch", count a shared prompt once."""
    totals = [result.sums for result in results]
    report = dict.fromkeys(("loss", "entropy", "sampling_entropy", "grad_norm"))
    report |= {
        "learning_rate": rate,
        "updates": len(norms),
        "update_tokens": sum(sums["tokens"] for sums in totals),
    }
    report["largest_micro_batch"] = max((sums["tokens"] for sums in totals), default=0)
    if norms:
        report["loss"] = sum(sums["loss"].item() for sums in totals) / len(norms)
        report["grad_norm"] = sum(norm.item() for norm in norms) / len(norms)
    if totals:
        tokens = sum(sums["response_tokens"].item() for sums in totals)
        values = {
            name: [sums[key].item() for sums in totals]
            for name, key in _MEANS.items()
            if key in totals[0]
        }
        report |= {
            name: max(several) if name == "ratio_max" else sum(several) / tokens
            for name, several in values.items()
        }
    return report


def sampler_mismatch(
    policy: Policy, rollout: Rollout, distribution: Distribution, limit: float
) -> dict[str, float]:
    """`mismatch` on `COMPARED` responses spread over a rollout, by a forward pass of the policy."""
    number = len(rollout.lengths)
    # no whole number of groups, so that each sample number gets its turn
    rows = list(range(0, number, number // COMPARED + 1))
    return mismatch(policy.log_probs(rollout.batch, distribution, rows), rows, rollout, limit)


def mismatch(
    trainer_BT: torch.Tensor, rows: list[int], rollout: Rollout, limit: float, steps_old: int = 0
) -> dict[str, float]:
    """Mean and largest difference, in nats a token, of the log-probs of sampler and trainer over
    some rows, under the sampled distribution and before the weights change. Raises `RunStopped`
    where the mean exceeds `limit` (--max_sampler_mismatch), or the larger of it and
    `STALE_MISMATCH` for weights some `steps_old`: the gradient would be of another policy."""
    difference = (trainer_BT - rollout.sampler_log_probs_BT)[rows][
        rollout.batch.response_mask[rows]
    ].abs()
    mean, largest = difference.mean().item(), difference.max().item()
    bound = max(limit, STALE_MISMATCH) if steps_old else limit
    if not mean <= bound:
        stale = f"the {bound} that stale weights may be without a larger --max_sampler_mismatch"
        allowed = stale if steps_old else f"--max_sampler_mismatch {bound}"
        raise RunStopped(
            f"the sampler's log-probs are {mean:.4g} nats a token from the trainer's (largest"
            f" {largest:.4g}), more than {allowed}. Likely causes: weights that did not reach the"
            " sampler, a prefix cache that outlived them, another dtype (see --dtype), or other"
            " temperature or top-p"
            f" handling{', or a --learning_rate too high for --max_staleness' * (steps_old > 0)}."
            " Nothing was trained on these samples"
        )
    return {"sampler_mismatch": mean, "sampler_mismatch_max": largest}


class References:
    """Adds old and reference log-probs to rollouts, where the loss needs them. `old_policy` has the
    weights that sampled, on a device of its own; None: the policy itself, before its first update.
    `reference(batch, distribution, micro-batch tokens)` returns the log-probs [B, T] of the model
    that training started from, in a thread if it works `in_background`."""

    def __init__(
        self,
        config: UpdateConfig,
        old_policy: FrozenModel | None,
        reference: Callable[[Batch, Distribution, int], torch.Tensor] | None,
        clock: Clock,
        in_background: bool = False,
    ):
        self.config, self.old_policy, self.reference, self.clock = (
            config,
            old_policy,
            reference,
            clock,
        )
        self.in_background = in_background
        self._answers: dict[int, Callable[[], torch.Tensor]] = {}

    def request(self, step: int, batch: Batch, micro_batch_tokens: int) -> None:
        """Have a reference that works `in_background` begin with a step's batch; any other computes
        in `annotate`."""
        if self.reference is not None and step not in self._answers:
            answer = partial(self.reference, batch, self.config.distribution, micro_batch_tokens)
            self._answers[step] = (
                start_in_background(answer).result if self.in_background else answer
            )

    def annotate(self, rollout: Rollout, policy: Policy, step: int) -> Rollout:
        """The rollout with `old_log_probs_BT` and `reference_log_probs_BT`, as far as the loss
        needs them."""
        self.request(step, rollout.batch, policy.micro_batch_tokens)
        if self.config.old_log_probs == "sampler":
            rollout = dataclasses.replace(rollout, old_log_probs_BT=rollout.sampler_log_probs_BT)
        elif self.config.old_log_probs == "policy":
            rows, distribution = rows_with_gradient(rollout, self.config), self.config.distribution
            with self.clock("old_log_probs"):
                if self.old_policy is None:
                    old_BT = policy.log_probs(rollout.batch, distribution, rows)
                else:
                    self.old_policy.load_weights(policy.weights())
                    old_BT = self.old_policy.log_probs(
                        rollout.batch, distribution, policy.micro_batch_tokens, rows
                    )
            rollout = dataclasses.replace(rollout, old_log_probs_BT=old_BT)
        if self.reference is not None:
            with self.clock("reference"):
                rollout = dataclasses.replace(
                    rollout, reference_log_probs_BT=self._answers.pop(step)()
                )
        return rollout
