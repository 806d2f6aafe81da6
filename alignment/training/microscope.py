"""Gradients of different estimators on one frozen set of rollouts, by the very code that updates
are made with."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from alignment.core.losses import LOSSES, NORMALIZATIONS
from alignment.core.records import Batch, Distribution, Rollout
from alignment.policy.policy import Objective, Policy
from alignment.rollouts.config import UpdateConfig
from alignment.rollouts.source import with_advantages
from alignment.system.errors import UserError
from alignment.system.signals import deferrable_signals
from alignment.training.preparation import prepare_update
from alignment.training.update import rollout_objective, update, with_teacher


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
    """Statistics of the whole batch's gradient G, the sum of the gradients of its P prompts."""

    norm: float
    """|G|."""
    std: float
    """Square root of the trace of G's covariance, from the spread of the P terms."""
    cosine: float
    """Mean cosine between one prompt's gradient and G, prompts without gradient left out."""
    snr: float
    """(|G|^2 - std^2) / std^2. The numerator estimates the squared norm of G's expectation without
    bias; it is negative where there is no signal."""
    effective: float
    """(sum |w|)^2 / sum w^2 of the responses' weights w: how many responses of equal weight would
    say as much."""
    silent: float
    """Share of prompts without gradient."""


def estimators(group_sizes: Sequence[int], updates: int) -> Iterator[Estimator]:
    """The estimators that are compared: losses, baselines and normalisations at the largest group
    size, then group sizes."""
    largest = max(group_sizes)
    settings = itertools.product(
        ("no_baseline", "reinforce_with_baseline"), (False, True), NORMALIZATIONS
    )
    for loss_type, normalize_by_std, normalization in settings:
        if not normalize_by_std or "normalize_by_std" in LOSSES[loss_type].arguments:
            yield Estimator(loss_type, largest, normalize_by_std, normalization)
    yield Estimator("grpo_clip", largest, True, "sequence_mean")
    if updates:
        yield Estimator("grpo_clip", largest, True, "sequence_mean", second_update=True)
        # At ratio 1 all losses with a ratio are the same, so the others are computed only after an
        # update.
        for name, loss in LOSSES.items():
            if loss.uses_ratio and name != "grpo_clip":
                yield Estimator(name, largest, True, "sequence_mean", second_update=True)
    for size in sorted(group_sizes):
        if size != largest:
            yield Estimator("grpo_clip", size, True, "sequence_mean")


def inspect(
    policy: Policy, rollout: Rollout, planned: Iterable[Estimator], config: UpdateConfig
) -> Iterator[tuple[Estimator, Statistics]]:
    """Each estimator with the statistics of its per-prompt gradients; first those before, then
    those after `policy` has made one update on the rollout. `config` is the run's own, used without
    KL penalty, teacher, entropy bonus, sampler's correction and selection of tokens."""
    plain = replace(
        config.loss,
        beta=0.0,
        sampler_correction="none",
        entropy_coefficient=0.0,
        token_selection="none",
    )
    config = replace(config, loss=plain, entropy_target=0.0, teacher="")
    for estimator in sorted(planned, key=lambda estimator: estimator.second_update):
        if estimator.second_update and rollout.old_log_probs_BT is None:
            old_BT = policy.log_probs(rollout.batch, config.loss_distribution)
            update_once(policy, rollout, config)
            rollout = replace(rollout, old_log_probs_BT=old_BT)
        yield estimator, gradient_statistics(policy, rollout, estimator, config)


def update_once(policy: Policy, rollout: Rollout, config: UpdateConfig) -> None:
    """Make one optimiser update of all responses, at the full learning rate."""
    one_update = replace(
        config,
        epochs_per_rollout=1,
        train_mini_batch_size=0,
        warmup_steps=0,
        lr_schedule="constant",
        old_log_probs="ratio_one",
        max_sampler_mismatch=math.inf,
    )
    rollout = with_all_advantages(rollout, config)
    with deferrable_signals() as defer_signals:
        update(policy, rollout, one_update, step=1, before_change=defer_signals)


def arm_gradients(
    policy: Policy, arms: Mapping[str, tuple[Rollout, UpdateConfig]], updates: int
) -> dict[str, list[torch.Tensor]]:
    """For each arm, with its rewards of the same responses, the gradients [D] of its first
    `updates` (1 or 2) updates of all responses.

    Between the two `policy` makes one update as the first arm would, at the largest learning rate
    of any arm. The initial `policy` is the old policy and the reference of a KL penalty. An arm
    with a teacher has its log-probs in the rollout."""
    first_rollout, first_config = next(iter(arms.values()))
    sampled = first_config.distribution
    initial_log_probs: dict[Distribution, torch.Tensor] = {}
    for _, config in arms.values():
        distribution = replace(config, distribution=sampled).loss_distribution
        if distribution not in initial_log_probs:
            initial_log_probs[distribution] = policy.log_probs(first_rollout.batch, distribution)
    largest_rate = max(config.learning_rate for _, config in arms.values())
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in arms}
    for number in range(updates):
        if number > 0:
            initial_BT = initial_log_probs[first_config.loss_distribution]
            between = replace(first_rollout, reference_log_probs_BT=initial_BT)
            update_once(policy, between, replace(first_config, learning_rate=largest_rate))
        for name, (rollout, config) in arms.items():
            config = replace(config, distribution=sampled)
            initial_BT = initial_log_probs[config.loss_distribution]
            old_log_probs = {
                "policy": initial_BT,
                "sampler": first_rollout.sampler_log_probs_BT,
                "ratio_one": None,
            }
            annotated = replace(
                rollout,
                reference_log_probs_BT=initial_BT,
                old_log_probs_BT=old_log_probs[config.old_log_probs],
            )
            annotated = with_all_advantages(annotated, config)
            rows = annotated.trained_rows
            prepared = prepare_update(policy, annotated, rows, config, number + 1)
            objective = rollout_objective(prepared.rollout, rows, prepared.config)
            gradients[name].append(compute_gradient(policy, annotated.batch, rows, objective))
    return gradients


def with_all_advantages(rollout: Rollout, config: UpdateConfig) -> Rollout:
    """The rollout with advantages, and where it has a teacher's log-probs with those of tokens."""
    weighted = with_advantages(rollout, config.advantage)
    if rollout.teacher_log_probs_BT is None:
        return weighted
    return with_teacher(weighted, rollout.teacher_log_probs_BT, config.teacher_weight)


def compute_gradient(
    policy: Policy, batch: Batch, rows: Sequence[int], objective: Objective
) -> torch.Tensor:
    """The gradient [D] of some rows of a batch; the policy keeps none of it."""
    for _ in policy.accumulate(batch, rows, objective):
        pass  # each micro-batch adds its part
    gradient = policy.gradient()
    policy.drop_gradient()
    return gradient


def gradient_statistics(
    policy: Policy, rollout: Rollout, estimator: Estimator, config: UpdateConfig
) -> Statistics:
    """The statistics of one estimator's per-prompt gradients, over the counted responses of each of
    the run's groups."""
    advantage = replace(
        config.advantage,
        group_size=estimator.group_size,
        normalize_by_std=estimator.normalize_by_std,
    )
    loss = replace(
        config.loss,
        loss=LOSSES[estimator.loss_type],
        settings=None,
        loss_normalization=estimator.loss_normalization,
    )
    weighted = with_advantages(rollout, advantage)
    rows = weighted.trained_rows
    objective = rollout_objective(weighted, rows, replace(config, loss=loss, advantage=advantage))
    size = config.advantage.group_size  # responses of a prompt, whatever the estimator's groups
    gradients = []
    for prompt in range(len(rollout.lengths) // size):
        rows_of_prompt = [row for row in rows if row // size == prompt]
        gradients.append(compute_gradient(policy, rollout.batch, rows_of_prompt, objective))
    weights_B1 = getattr(weighted, f"{loss.loss.weight}_B1")
    return statistics(torch.stack(gradients), weights_B1[rows])


def statistics(gradients_PD: torch.Tensor, weights_B1: torch.Tensor) -> Statistics:
    """Summarise the gradients of P prompts, and the weights of their responses."""
    prompts = gradients_PD.shape[0]
    total_D = gradients_PD.sum(dim=0)
    norm = total_D.norm()
    # G is a sum of P independent terms: its covariance is P times theirs.
    variance = prompts * (gradients_PD - total_D / prompts).square().sum() / (prompts - 1)
    norms_P = gradients_PD.norm(dim=1)
    nonzero_P = norms_P > 0
    cosines = gradients_PD[nonzero_P] @ total_D / (norms_P[nonzero_P] * norm)
    effective = weights_B1.abs().sum().square() / weights_B1.square().sum()
    return Statistics(
        norm=norm.item(),
        std=variance.sqrt().item(),
        cosine=cosines.mean().item(),
        snr=((norm.square() - variance) / variance).item(),
        effective=effective.item(),
        silent=1 - nonzero_P.float().mean().item(),
    )


def refuse_too_many_gradients(flag: str, number: int, parameters: int) -> None:
    """Raise `UserError` where twice so many gradients (two an arm, or a prompt's while it is
    stacked), in float32, exceed the free memory. `flag` names what they are of."""
    bytes_of_two = 2 * 4 * parameters
    needed = number * bytes_of_two
    free = psutil.virtual_memory().available
    if needed > free:
        fault = (
            f"their gradients take {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are"
            " free"
        )
        raise UserError(f"{flag}: {fault}; take at most {max(2, free // bytes_of_two)}")
