"""Gradients of different estimators on one frozen set of rollouts, by the very code that updates
are made with."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from alignment.core.losses import LOSSES, NORMALIZATIONS
from alignment.core.records import Rollout
from alignment.policy.policy import Policy
from alignment.rollouts.config import UpdateConfig
from alignment.rollouts.source import with_advantages
from alignment.system.errors import UserError
from alignment.system.signals import deferrable_signals
from alignment.training.update import rollout_objective, update


@dataclass(frozen=True)
class Estimator:
    """One way of making a gradient of rewarded responses."""

    loss_type: str
    group_size: int
    normalize_by_std: bool
    loss_normalization: str
    # After one update on the same rollouts, where the ratio to the old policy is no longer 1
    second_update: bool = False


@dataclass(frozen=True)
class Statistics:
    """What a set of per-prompt gradients says. All of the whole batch's gradient G, the sum over
    its P prompts.

    norm: |G|. std: square root of the trace of its covariance, from the spread of the P terms.
    cosine: mean cosine between one prompt's gradient and G, prompts without gradient left out. snr:
    (|G|^2 - std^2) / std^2, in which the first is the unbiased square of the expectation's norm;
    negative where there is no signal. effective: (sum |w|)^2 / sum w^2 of the responses' weights,
    how many equally weighted responses would say as much. silent: share of prompts without
    gradient."""

    norm: float
    std: float
    cosine: float
    snr: float
    effective: float
    silent: float


def estimators(group_sizes: Sequence[int], updates: int) -> Iterator[Estimator]:
    """The estimators that are compared: losses, baselines and normalisations at the largest group
    size, then group sizes."""
    largest = max(group_sizes)
    for loss, std, norm in itertools.product(
        ("no_baseline", "reinforce_with_baseline"), (False, True), NORMALIZATIONS
    ):
        if not std or "normalize_by_std" in LOSSES[loss].arguments:
            yield Estimator(loss, largest, std, norm)
    yield from (
        Estimator("grpo_clip", largest, True, "sequence_mean", second)
        for second in (False, True)[: updates + 1]
    )
    # At ratio 1 all losses with a ratio are the same, so the others are looked at after an update
    # only.
    others = (
        [name for name, loss in LOSSES.items() if loss.uses_ratio and name != "grpo_clip"]
        if updates
        else []
    )
    yield from (Estimator(loss, largest, True, "sequence_mean", True) for loss in others)
    yield from (
        Estimator("grpo_clip", size, True, "sequence_mean")
        for size in sorted(group_sizes)
        if size != largest
    )


def inspect(
    policy: Policy, rollout: Rollout, planned: Iterable[Estimator], config: UpdateConfig
) -> Iterator[tuple[Estimator, Statistics]]:
    """Each estimator with the statistics of its per-prompt gradients; first those before, then
    those after `policy` has made one update on the rollout. `config` is the run's own, used without
    the KL penalty and the sampler's correction."""
    config = replace(config, loss=replace(config.loss, beta=0.0, sampler_correction="none"))
    for estimator in sorted(planned, key=lambda estimator: estimator.second_update):
        if estimator.second_update and rollout.old_log_probs_BT is None:
            old_BT = policy.log_probs(rollout.batch, config.distribution)
            update_once(policy, rollout, config)
            rollout = replace(rollout, old_log_probs_BT=old_BT)
        yield estimator, gradient_statistics(policy, rollout, estimator, config)


def update_once(policy: Policy, rollout: Rollout, config: UpdateConfig) -> None:
    """Make one optimiser update of all responses, at the full learning rate."""
    one_update = {
        "epochs_per_rollout": 1,
        "train_mini_batch_size": 0,
        "warmup_steps": 0,
        "old_log_probs": "ratio_one",
    }
    config = replace(config, max_sampler_mismatch=math.inf, **one_update)
    rollout = with_advantages(rollout, config.advantage)
    with deferrable_signals() as defer_signals:
        update(policy, rollout, config, step=1, before_change=defer_signals)


def arm_gradients(
    policy: Policy, arms: Mapping[str, tuple[Rollout, UpdateConfig]], updates: int
) -> dict[str, list]:
    """For each arm, with its rewards of the same responses, the gradients [D] of its first
    `updates` (1 or 2) updates of them all, between which `policy` makes one as the first arm would,
    at the largest learning rate. `policy` as it comes is the old policy and the reference of a KL
    penalty."""
    (of_first, first), *_ = arms.values()
    start_BT, found = (
        policy.log_probs(of_first.batch, first.distribution),
        {name: [] for name in arms},
    )
    old = {"policy": start_BT, "sampler": of_first.sampler_log_probs_BT, "ratio_one": None}
    fastest = replace(first, learning_rate=max(config.learning_rate for _, config in arms.values()))
    for done in range(updates):
        if done:
            update_once(policy, replace(of_first, reference_log_probs_BT=start_BT), fastest)
        for name, (rollout, config) in arms.items():
            config = replace(config, distribution=first.distribution)
            weighted = with_advantages(rollout, config.advantage)
            weighted = replace(
                weighted,
                reference_log_probs_BT=start_BT,
                old_log_probs_BT=old[config.old_log_probs],
            )
            rows = weighted.trained_rows
            list(policy.accumulate(weighted.batch, rows, rollout_objective(weighted, rows, config)))
            found[name].append(policy.gradient())
            policy.drop_gradient()
    return found


def gradient_statistics(
    policy: Policy, rollout: Rollout, estimator: Estimator, config: UpdateConfig
) -> Statistics:
    """The statistics of one estimator's per-prompt gradients, over the counted responses of each of
    the run's groups."""
    size, std = config.advantage.group_size, estimator.normalize_by_std
    advantage = replace(config.advantage, group_size=estimator.group_size, normalize_by_std=std)
    loss = replace(
        config.loss,
        loss=LOSSES[estimator.loss_type],
        loss_normalization=estimator.loss_normalization,
    )
    weighted = with_advantages(rollout, advantage)
    rows = weighted.trained_rows
    objective = rollout_objective(weighted, rows, replace(config, loss=loss, advantage=advantage))
    gradients = []
    for prompt in range(len(rollout.lengths) // size):
        list(
            policy.accumulate(
                rollout.batch, [row for row in rows if row // size == prompt], objective
            )
        )
        gradients.append(policy.gradient())
        policy.drop_gradient()
    return statistics(torch.stack(gradients), getattr(weighted, f"{loss.loss.weight}_B1")[rows])


def statistics(gradients_PD: torch.Tensor, weights_B1: torch.Tensor) -> Statistics:
    """Summarise the gradients of P prompts, and the weights of their responses."""
    prompts, total_D = gradients_PD.shape[0], gradients_PD.sum(dim=0)
    norms_P, norm = gradients_PD.norm(dim=1), total_D.norm()
    # G is a sum of P independent terms: its covariance is P times theirs.
    variance = prompts * (gradients_PD - total_D / prompts).square().sum() / (prompts - 1)
    nonzero = norms_P > 0
    cosines = gradients_PD[nonzero] @ total_D / (norms_P[nonzero] * norm)
    snr, effective = (
        (norm.square() - variance) / variance,
        weights_B1.abs().sum().square() / weights_B1.square().sum(),
    )
    numbers = (number.item() for number in (norm, variance.sqrt(), cosines.mean(), snr, effective))
    return Statistics(*numbers, silent=1 - nonzero.float().mean().item())


def refuse_too_many_gradients(flag: str, number: int, parameters: int) -> None:
    """Raise `UserError` where twice so many gradients (two an arm, or a prompt's while it is
    stacked), in float32, exceed the free memory. `flag` names what they are of."""
    needed, free = 2 * 4 * number * parameters, psutil.virtual_memory().available
    if needed > free:
        fault = (
            f"their gradients take {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are"
            " free"
        )
        raise UserError(f"{flag}: {fault}; take at most {max(2, free // (8 * parameters))}")
