"""The optimiser updates of one rollout, old and reference log-probs, and the check of its sampler
against the trainer."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from alignment.core.advantages import distillation_advantages
from alignment.core.losses import LossInputs, loss_denominator, micro_batch_loss
from alignment.core.records import Batch, Distribution, Rollout
from alignment.core.schedules import LearningRate, last_reset
from alignment.core.selection import SELECTIONS
from alignment.model.frozen import FrozenModel
from alignment.model.packing import send
from alignment.policy.policy import MicroBatchResult, Objective, Policy
from alignment.rollouts.config import UpdateConfig, derived_seed
from alignment.system.clock import Clock, start_in_background
from alignment.system.errors import RunStopped
from alignment.training.invariants import (
    LEAST_MOVING_RATE,
    clip_warning,
    equal_answers_warning,
    first_kl_warning,
    ratio_warnings,
    sampled_entropy_warning,
    take_step,
)
from alignment.training.preparation import entropy_report, has_entropy_bonus, prepare_update
from alignment.training.results import computed_tokens, reported_sums

COMPARED = 16  # About as many responses of an evaluation are compared between sampler and trainer.
# The least limit on the mismatch, in nats a token, of a sampler some steps behind the trainer. One
# update changes log-probs by far less.
STALE_MISMATCH = 0.5
# In so many steps of a run the norms of clipped gradients are measured, and the length of the first
# update: both take a pass over the weights.
TESTED_STEPS = 3


@dataclass
class UpdateResult:
    """The metrics of the updates on one rollout.

    `trainer_log_probs_BT` holds the trainer's log-probs of `rows_with_gradient`. `bad` holds the
    rows of each mini-batch that was skipped because its loss or gradient was not finite."""

    report: dict[str, float | None]
    trainer_log_probs_BT: torch.Tensor
    rows_with_gradient: list[int]
    config: UpdateConfig
    """That of the next rollout, whose entropy coefficient --entropy_target may have changed."""
    bad: list[Sequence[int]] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)
    """Of broken invariants: name -> message."""


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
    """Make all optimiser updates of one rollout, which weights `steps_old` steps behind sampled.
    Calls `before_change` before each change of the weights.

    Responses without a gradient get no forward pass, but count in every denominator. The first
    mini-batch that gets one is compared with the sampler before its update (`mismatch`, which may
    raise `RunStopped`). In the loop, only `is_finite` and that comparison wait for the device."""
    torch.manual_seed(derived_seed(config.seed, step))
    informative = rows_with_gradient(rollout, config)
    has_gradient = set(informative)
    computed: list[list[MicroBatchResult]] = []  # Of each mini-batch.
    stepped: list[MicroBatchResult] = []  # Of the mini-batches that were not skipped as bad.
    norms: list[torch.Tensor] = []
    clipped_norms: list[torch.Tensor] = []
    bad: list[Sequence[int]] = []
    broken: dict[str, str] = {}
    comparison: dict[str, float | None] = {"sampler_mismatch": None, "sampler_mismatch_max": None}
    previous_updates = (step - 1) * config.updates_per_rollout
    # A rollout without any mini-batch reports the rate of the last update before it.
    rate = learning_rate(config, max(1, previous_updates))
    coefficient = config.loss.entropy_coefficient
    for number, mini_batch in enumerate(mini_batches(rollout, config, step), previous_updates + 1):
        rate = learning_rate(config, number)
        prepared = prepare_update(policy, rollout, mini_batch, config, number)
        config = prepared.next_config
        coefficient = prepared.config.loss.entropy_coefficient
        rows = [row for row in mini_batch if row in has_gradient]
        objective = rollout_objective(prepared.rollout, mini_batch, prepared.config)
        results = list(policy.accumulate(rollout.batch, rows, objective))
        norm = policy.clip_gradient(config.norm_limit)
        computed.append(results)
        if not is_finite(norm, results):
            policy.drop_gradient()
            bad.append(mini_batch)
            continue
        if step <= TESTED_STEPS:
            clipped_norms.append(policy.clip_gradient(math.inf))  # It changes nothing.
        if results and not stepped and config.train_on == "samples":
            # Momentum has moved the weights in updates before it, so that they count as stale.
            behind = steps_old + bool(norms)
            comparison |= compare_with_sampler(policy, results, rollout, config, behind)
        before_change()
        broken |= take_step(policy, rate, norm, step <= TESTED_STEPS and not norms)
        norms.append(norm)
        stepped += results
    report = update_report(stepped, norms, rate)
    report |= {"rows_with_gradient": len(informative), "bad_updates": len(bad)}
    report["update_token_share"] = computed_share(stepped, rollout, config)
    report |= comparison | entropy_report(config, coefficient) | teacher_report(rollout)
    trainer_BT = trainer_log_probs(computed, rollout, config)
    broken |= broken_invariants(rollout, config, policy.dtype, computed, norms, clipped_norms)
    broken |= first_warnings(rollout, config, policy.dtype, computed, step, steps_old)
    return UpdateResult(report, trainer_BT, informative, config, bad, broken)


def trainer_log_probs(
    computed: Sequence[Sequence[MicroBatchResult]], rollout: Rollout, config: UpdateConfig
) -> torch.Tensor:
    """The trainer's log-probs [B, T] before the updates, as far as it knows them: passes of later
    mini-batches saw changed weights."""
    if config.old_log_probs == "policy" and rollout.old_log_probs_BT is not None:
        return rollout.old_log_probs_BT
    return first_log_probs(list(itertools.chain.from_iterable(computed)), rollout)


def broken_invariants(
    rollout: Rollout,
    config: UpdateConfig,
    dtype: torch.dtype,
    computed: Sequence[Sequence[MicroBatchResult]],
    norms: Sequence[torch.Tensor],
    clipped_norms: Sequence[torch.Tensor],
) -> dict[str, str]:
    """The warnings of the updates of one rollout, of which `computed` are each mini-batch's
    results, `norms` and `clipped_norms` those of gradients before and after they were clipped."""
    is_fast = config.learning_rate / max(1, config.warmup_steps) >= LEAST_MOVING_RATE
    has_moved = is_fast and any(norm > 0 for norm in norms[:-1])
    return {
        **equal_answers_warning(rollout, config.advantage.group_size),
        **clip_warning(clipped_norms, config.norm_limit),
        **ratio_warnings(computed, config, dtype, has_moved),
    }


def computed_share(
    results: Sequence[MicroBatchResult], rollout: Rollout, config: UpdateConfig
) -> float:
    """The computed tokens, as a share of those of all epochs' padded batches."""
    padded_tokens = rollout.batch.labels.numel() * config.epochs_per_rollout
    return computed_tokens(results) / padded_tokens


def first_warnings(
    rollout: Rollout,
    config: UpdateConfig,
    dtype: torch.dtype,
    computed: Sequence[Sequence[MicroBatchResult]],
    step: int,
    steps_old: int,
) -> dict[str, str]:
    """The warnings of a rollout's first mini-batch, which the policy computes with the weights
    before the update."""
    broken = first_kl_warning(computed, config, dtype, step)
    # Neither may the rows have been chosen by their rewards, nor the sampler's weights be others.
    are_all = trains_every_row(config) and bool(rollout.counted_B1.all())
    # With --log_probs_of full the entropy is not of what top-p and top-k leave to the sampler.
    is_sampled = config.train_on == "samples" and config.loss_distribution == config.distribution
    if are_all and is_sampled and not config.max_refills and not steps_old:
        broken |= sampled_entropy_warning(computed, rollout)
    return broken


def trains_every_row(config: UpdateConfig) -> bool:
    """Whether each trained row has a gradient, whatever its reward: by a KL penalty, a teacher, an
    entropy bonus, or a selection that gives it one."""
    selection = SELECTIONS.get(config.loss.token_selection)
    selection_adds = selection is not None and selection.adds_gradient
    is_penalised = config.loss.beta or selection_adds or has_entropy_bonus(config)
    return bool(is_penalised or config.teacher)


def rows_with_gradient(rollout: Rollout, config: UpdateConfig) -> list[int]:
    """The trained rows whose loss may have a gradient: those with a non-zero advantage or reward,
    whichever weighs the loss. With a KL penalty, a teacher, an entropy bonus, a selection that
    gives them one, or an unknown weight, these are all."""
    weight = config.loss.loss.weight
    if weight is None or trains_every_row(config):
        return rollout.trained_rows
    weights_B1 = getattr(rollout, f"{weight}_B1")
    return [row for row in rollout.trained_rows if weights_B1[row].item() != 0]


def mini_batches(rollout: Rollout, config: UpdateConfig, step: int) -> list[list[int]]:
    """The rows of each optimiser update: every epoch shuffles the groups and cuts them into
    mini-batches."""
    size = config.train_mini_batch_size or len(rollout.lengths)
    parts = []
    for epoch in range(config.epochs_per_rollout):
        seed = f"update {config.data_seed} {step} {epoch}"
        order = shuffled_groups(rollout.trained_rows, config.advantage.group_size, seed)
        parts += [order[start : start + size] for start in range(0, len(order), size)]
    return parts


def shuffled_groups(rows: Sequence[int], group_size: int, seed: str) -> list[int]:
    """The rows with their groups in a random order. The rows of a group stay together, so that a
    mini-batch computes their common prompt once."""
    groups = [list(group) for _, group in itertools.groupby(rows, lambda row: row // group_size)]
    shuffled = random.Random(seed).sample(groups, len(groups))
    return list(itertools.chain.from_iterable(shuffled))


def rollout_objective(
    rollout: Rollout, mini_batch: Sequence[int], config: UpdateConfig
) -> Objective:
    """The objective of one optimiser update. It divides the loss of each micro-batch by the
    denominator of the whole `mini_batch`, so that the cut into micro-batches changes no
    gradient."""
    lengths = rollout.lengths
    denominator = loss_denominator(
        config.loss.loss_normalization, [lengths[row] for row in mini_batch], config.max_new_tokens
    )
    return Objective(
        RolloutLoss(rollout, config, denominator),
        config.loss_distribution,
        differentiable_entropy=bool(config.loss.entropy_coefficient),
    )


@dataclass(frozen=True)
class RolloutLoss:
    """The loss of some rows of a rollout, divided by `denominator`, as an `Objective` calls it."""

    rollout: Rollout
    config: UpdateConfig
    denominator: float

    def __call__(
        self,
        rows: Sequence[int],
        log_probs_bt: torch.Tensor,
        mask_bt: torch.Tensor,
        entropies_bt: torch.Tensor | None = None,
    ):
        """The loss and its sums over tokens (`micro_batch_loss`), on the device of
        `log_probs_bt`."""

        def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            return send(tensor[rows, : log_probs_bt.shape[1]], log_probs_bt.device)

        rollout = self.rollout
        old_bt = take(rollout.old_log_probs_BT)
        if old_bt is None:  # The rollout gets one update, so the old policy is the current one.
            old_bt = log_probs_bt.detach()
        inputs = LossInputs(
            self.config.loss,
            log_probs_bt,
            mask_bt,
            raw_rewards=take(rollout.raw_rewards_B1),
            advantages=take(rollout.advantages),
            old_log_probs=old_bt,
            reference_log_probs=take(rollout.reference_log_probs_BT),
            sampler_log_probs=take(rollout.sampler_log_probs_BT),
            entropies=entropies_bt,
            selected=take(rollout.selected_BT),
            selected_share=rollout.selected_share,
        )
        return micro_batch_loss(inputs, self.denominator)


def is_finite(norm: torch.Tensor, results: Sequence[MicroBatchResult]) -> bool:
    """Whether a mini-batch's gradient norm and the losses of its micro-batches are finite."""
    loss = torch.zeros_like(norm)
    for result in results:
        loss = loss + torch.as_tensor(result.sums["loss"]).to(norm.device)
    return bool((torch.isfinite(norm) & torch.isfinite(loss)).item())


def learning_rate(config: UpdateConfig, update_number: int) -> float:
    """The learning rate of an update of the run, of which the first is number 1."""
    rate = LearningRate(
        config.learning_rate, config.warmup_steps, config.lr_schedule, config.num_updates
    )
    return rate.of_update(update_number)


def first_log_probs(computed: Sequence[MicroBatchResult], rollout: Rollout) -> torch.Tensor:
    """Log-probs [B, T] on the CPU, of each row's first forward pass; 0 for rows without one."""
    log_probs_BT = torch.zeros(rollout.batch.labels.shape)
    # In reverse, so that the first pass over a row overwrites those of later epochs.
    for result in reversed(computed):
        log_probs_BT[result.rows, : result.log_probs.shape[1]] = result.log_probs.cpu()
    return log_probs_BT


# Metric -> the sum over response tokens that is divided by their number to give it. A loss that
# does not report the sum has no such metric. "ratio_max" is a maximum over the tokens, not a mean.
TOKEN_METRICS = {
    "entropy": "entropy_sum",
    "sampling_entropy": "sampling_entropy_sum",
    "clip_fraction": "clipped_tokens",
    "ratio_mean": "ratio_sum",
    "ratio_max": "ratio_max",
    "kl": "kl_sum",
    "correction_mean": "weight_sum",
    "selected_fraction": "selected_tokens",
}


def update_report(
    results: Sequence[MicroBatchResult], norms: Sequence[torch.Tensor], rate: float
) -> dict[str, float | None]:
    """The metrics of some updates. Loss and gradient norm are means over updates; entropies, ratio,
    clip fraction and the like are means over the response tokens that had a forward pass.

    "entropy" is of the tempered distribution, "sampling_entropy" of what top-k and top-p leave of
    it. A mean over nothing is None or left out. "update_tokens" and "largest_micro_batch", the most
    tokens of one micro-batch, count a shared prompt once."""
    report: dict[str, float | None] = {
        "loss": None,
        "entropy": None,
        "sampling_entropy": None,
        "grad_norm": None,
        "learning_rate": rate,
        "updates": len(norms),
        "update_tokens": computed_tokens(results),
        "largest_micro_batch": max((int(result.sums["tokens"]) for result in results), default=0),
    }
    if norms:
        report["loss"] = sum(reported_sums(results, "loss")) / len(norms)
        report["grad_norm"] = sum(norm.item() for norm in norms) / len(norms)
    if results:
        tokens = sum(reported_sums(results, "response_tokens"))
        for metric, name in TOKEN_METRICS.items():
            if name not in results[0].sums:
                continue
            values = reported_sums(results, name)
            report[metric] = max(values) if metric == "ratio_max" else sum(values) / tokens
    return report


def teacher_report(rollout: Rollout) -> dict[str, float | None]:
    """With a teacher, "teacher_kl": the mean of log pi_student - log pi_teacher over the response
    tokens that are trained on, an estimate of the reverse KL divergence in nats a token."""
    if rollout.teacher_log_probs_BT is None:
        return {}
    trained_BT = rollout.batch.response_mask & rollout.counted_B1
    difference_BT = rollout.student_log_probs_BT - rollout.teacher_log_probs_BT
    if not trained_BT.any():
        return {"teacher_kl": None}
    return {"teacher_kl": difference_BT[trained_BT].mean().item()}


def sampler_mismatch(
    policy: Policy,
    rollout: Rollout,
    distribution: Distribution,
    limit: float,
    steps_old: int = 0,
) -> dict[str, float]:
    """`mismatch` on about `COMPARED` responses spread over a rollout, by a forward pass of the
    policy."""
    number = len(rollout.lengths)
    # With + 1 the stride is rarely a multiple of the group size, which would take the first
    # response of every group.
    rows = list(range(0, number, number // COMPARED + 1))
    trainer_BT = policy.log_probs(rollout.batch, distribution, rows)
    return mismatch(trainer_BT, rows, rollout, limit, steps_old)


def compare_with_sampler(
    policy: Policy,
    results: Sequence[MicroBatchResult],
    rollout: Rollout,
    config: UpdateConfig,
    steps_old: int,
) -> dict[str, float]:
    """`mismatch` before a rollout's first update, by its own forward passes, `results`; by a
    further one where the loss takes log-probs under another distribution than was sampled."""
    limit = config.max_sampler_mismatch
    if config.loss_distribution == config.distribution:
        return compare_results(results, rollout, limit, steps_old)
    return sampler_mismatch(policy, rollout, config.distribution, limit, steps_old)


def compare_results(
    results: Sequence[MicroBatchResult], rollout: Rollout, limit: float, steps_old: int
) -> dict[str, float]:
    """`mismatch` on the rows of some micro-batches, by the log-probs of their forward passes."""
    rows = list(itertools.chain.from_iterable(result.rows for result in results))
    return mismatch(first_log_probs(results, rollout), rows, rollout, limit, steps_old)


def mismatch(
    trainer_BT: torch.Tensor, rows: list[int], rollout: Rollout, limit: float, steps_old: int = 0
) -> dict[str, float]:
    """Mean and largest absolute difference, in nats a token, between the sampler's and the
    trainer's log-probs of the response tokens of some rows.

    Raises `RunStopped` where the mean exceeds `limit` (--max_sampler_mismatch), since the gradient
    would be that of another policy. Where the sampler's weights are some `steps_old`, the limit is
    at least `STALE_MISMATCH`."""
    difference_BT = (trainer_BT - rollout.sampler_log_probs_BT)[rows]
    differences = difference_BT[rollout.batch.response_mask[rows]].abs()
    mean = differences.mean().item()
    largest = differences.max().item()
    bound = max(limit, STALE_MISMATCH) if steps_old else limit
    if not mean <= bound:  # Unlike mean > bound, this is true of NaN, too.
        allowed = f"--max_sampler_mismatch {bound}"
        stale_cause = ""
        if steps_old:
            allowed = (
                f"the {bound} that stale weights may be without a larger --max_sampler_mismatch"
            )
            stale_cause = ", or a --learning_rate too high for --max_staleness"
        raise RunStopped(
            f"the sampler's log-probs are {mean:.4g} nats a token from the trainer's (largest"
            f" {largest:.4g}), more than {allowed}. Likely causes: weights that did not reach the"
            " sampler, a prefix cache that outlived them, another dtype (see --dtype), or other"
            f" temperature or top-p handling{stale_cause}."
            " Nothing was trained on these samples"
        )
    return {"sampler_mismatch": mean, "sampler_mismatch_max": largest}


@dataclass(frozen=True)
class LogProbSource:
    """A frozen model's log-probs [B, T] of the responses: `compute(batch, distribution,
    micro_batch_tokens)`. With `in_background` a thread calls it as soon as there is a batch."""

    compute: Callable[[Batch, Distribution, int], torch.Tensor]
    in_background: bool = False
    reload: Callable[[str], None] | None = None
    """Gives the model the weights of a folder; None: they never change."""


class References:
    """Adds old, reference and teacher log-probs to rollouts, where the loss needs them.

    `old_policy` is a copy of the policy on another device, which computes the old log-probs; None:
    the policy computes them itself, before its first update. `reference` is the model that training
    started from or, with --reference_reset_interval, that of the step `last_reset` unless that is
    0; `teacher` is one to distil from; None: the loss needs none."""

    def __init__(
        self,
        config: UpdateConfig,
        old_policy: FrozenModel | None,
        reference: LogProbSource | None,
        clock: Clock,
        teacher: LogProbSource | None = None,
        last_reset: int = 0,
    ):
        self.config = config
        self._last_reset = last_reset
        self.old_policy = old_policy
        self.clock = clock
        self._sources: dict[str, LogProbSource] = {}
        if reference is not None:
            self._sources["reference"] = reference
        if teacher is not None:
            self._sources["teacher"] = teacher
        self._answers: dict[tuple[str, int], Callable[[], torch.Tensor]] = {}

    def request(self, step: int, batch: Batch, micro_batch_tokens: int) -> None:
        """Have the models that work `in_background` begin with a step's batch. `annotate` computes
        the others' log-probs, and those of a reference whose reset comes before the step."""
        reset_of_step = last_reset(step - 1, self.config.reference_reset_interval)
        for name, source in self._sources.items():
            if (name, step) in self._answers:
                continue
            if name == "reference" and reset_of_step != self._last_reset:
                continue
            distribution = self.config.loss_distribution
            compute = partial(source.compute, batch, distribution, micro_batch_tokens)
            if source.in_background:
                compute = start_in_background(compute).result
            self._answers[name, step] = compute

    def annotate(self, rollout: Rollout, policy: Policy, step: int) -> Rollout:
        """The rollout with `old_log_probs_BT`, `reference_log_probs_BT`, and `teacher_log_probs_BT`
        with the advantages of tokens, as far as the loss needs them."""
        self.request(step, rollout.batch, policy.micro_batch_tokens)
        if self.config.old_log_probs == "sampler":
            rollout = dataclasses.replace(rollout, old_log_probs_BT=rollout.sampler_log_probs_BT)
        elif self.config.old_log_probs == "policy":
            with self.clock("old_log_probs"):
                old_BT = self._old_log_probs(rollout, policy)
            rollout = dataclasses.replace(rollout, old_log_probs_BT=old_BT)
        if "reference" in self._sources:
            reference_BT = self._log_probs_of("reference", step)
            rollout = dataclasses.replace(rollout, reference_log_probs_BT=reference_BT)
        if "teacher" in self._sources:
            teacher_BT = self._log_probs_of("teacher", step)
            rollout = with_teacher(rollout, teacher_BT, self.config.teacher_weight)
        return rollout

    def reset(self, step: int, checkpoint: Path) -> None:
        """Give the reference the policy's weights after a step, from the step's checkpoint.

        ProRL does so where an evaluation no longer improves, instead of after a number of steps
        (Liu et al. 2025, arXiv:2505.24864, section 2.3, "reference policy reset")."""
        reload = self._sources["reference"].reload
        assert reload is not None  # of the reference's source, where there are resets
        reload(str(checkpoint))
        self._last_reset = step

    def _log_probs_of(self, name: str, step: int) -> torch.Tensor:
        """The log-probs [B, T] that `request` has asked a model for."""
        with self.clock(name):
            return self._answers.pop((name, step))()

    def _old_log_probs(self, rollout: Rollout, policy: Policy) -> torch.Tensor:
        """Log-probs [B, T] of the policy's present weights, for rows with a gradient."""
        rows = rows_with_gradient(rollout, self.config)
        if self.old_policy is None:
            return policy.log_probs(rollout.batch, self.config.loss_distribution, rows)
        self.old_policy.load_weights(policy.weights())
        return self.old_policy.log_probs(
            rollout.batch, self.config.loss_distribution, policy.micro_batch_tokens, rows
        )


def with_teacher(rollout: Rollout, teacher_BT: torch.Tensor, weight: float) -> Rollout:
    """The rollout with a teacher's log-probs [B, T], and the advantages of tokens that follow from
    them (`distillation_advantages`); 0 outside the responses that are trained on."""
    advantages_BT = distillation_advantages(
        rollout.advantages_B1, teacher_BT, rollout.student_log_probs_BT, weight
    )
    trained_BT = rollout.batch.response_mask & rollout.counted_B1
    return dataclasses.replace(
        rollout,
        teacher_log_probs_BT=teacher_BT,
        token_advantages_BT=advantages_BT.where(trained_BT, 0),
    )
