"""Does a warm start take the steps of maximum likelihood: the mean negative log-likelihood of a
batch's response tokens, clipped, by the optimiser and the schedule, over every worked solution once
an epoch? The product's own loop runs, and the papers' (whole_update.py) in float64 beside it."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from alignment.core.records import Batch
from alignment.core.tokens import Row
from alignment.policy.policy import Policy
from alignment.training.sft import Example, SFTConfig, SFTData, batches, fine_tune
from alignment.verification.papers import PaperSlopes
from alignment.verification.reported import Tolerance
from alignment.verification.whole_update import (
    Learner,
    PlainModel,
    PlainResponse,
    TrainedState,
    add_row_gradient,
    clipped,
    make_learner,
    norm_of,
    scheduled_rate,
)

BATCH = 4
EXAMPLES = 10  # Their number is no multiple of a batch's.
STEPS = 4  # The last of them is of the second epoch.
RESUMED_AT = 1
VALIDATED = 3
SHUFFLED = 32


@dataclass(frozen=True)
class WarmStart:
    """Some worked solutions, and how a warm start is trained on them."""

    examples: Sequence[Example]
    pad_id: int
    config: SFTConfig


class RecordingPolicy:
    """A policy that notes each batch that it computes."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.batches: list[Batch] = []

    def accumulate(self, batch: Batch, rows: Sequence[int], objective: Any) -> Iterator:
        self.batches.append(batch)
        return self.policy.accumulate(batch, rows, objective)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


def supervised_config(config: SFTConfig, limit_of_norm: float, rate: float) -> SFTConfig:
    """A warm start's configuration, of few steps on small batches, in which all takes effect."""
    if config.max_grad_norm:
        limit_of_norm = min(config.max_grad_norm, limit_of_norm)
    return replace(
        config,
        num_steps=STEPS,
        batch_size=BATCH,
        learning_rate=rate,
        warmup_steps=min(config.warmup_steps, 2),
        max_grad_norm=limit_of_norm,
        eval_interval=STEPS,
    )


class IdlePolicy(RecordingPolicy):
    """A policy that computes nothing, and notes each batch that it should."""

    def accumulate(self, batch: Batch, rows: Sequence[int], objective: Any) -> Iterator:
        self.batches.append(batch)
        return iter(())

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        return torch.zeros(())

    def step(self, learning_rate: float) -> None:
        pass

    def log_probs(self, batch: Batch, *settings: Any) -> torch.Tensor:
        return torch.zeros(batch.labels.shape)


@dataclass(frozen=True)
class FineTuned:
    """What a warm start's loop has done: the (prompt, response) rows of the batches of its steps,
    those of one that is resumed after `RESUMED_AT` steps, and the records of its steps."""

    batches: list[list[Row]]
    resumed: list[list[Row]]
    records: list[dict[str, Any]]
    validation: list[Row]


def fine_tuned(policy: Policy, warm_start: WarmStart, config: SFTConfig) -> FineTuned:
    """Run the warm start's loop."""
    recording = RecordingPolicy(policy)
    idle = IdlePolicy(policy)
    shown = warm_start.examples
    data = SFTData(shown[:EXAMPLES], shown[-VALIDATED:], warm_start.pad_id)
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any], message: str) -> None:
        records.append(record)

    fine_tune(cast(Policy, recording), data, config, keep)
    fine_tune(cast(Policy, idle), data, config, lambda record, message: None, RESUMED_AT)
    return FineTuned(
        [rows_of(batch) for batch in recording.batches],
        [rows_of(batch) for batch in idle.batches],
        records,
        [(tuple(prompt), tuple(response)) for prompt, response in data.validation],
    )


def rows_of(batch: Batch) -> list[Row]:
    """The rows of a batch, whose responses are the labels in its mask."""
    rows = []
    for ids, labels, mask in zip(batch.input_ids, batch.labels, batch.response_mask, strict=True):
        first = int(mask.int().argmax())
        rows.append((tuple(ids[: first + 1].tolist()), tuple(labels[mask].tolist())))
    return rows


def faults_of_batches(done: FineTuned, warm_start: WarmStart, config: SFTConfig) -> list[str]:
    """What is wrong with the batches: each epoch takes each example once, in batches of one size
    but for the last; in the order of the file with --curriculum, else in an order by chance; and a
    resumed warm start takes those that are left."""
    taken = done.batches
    examples = warm_start.examples
    faults = []
    if done.resumed != taken[RESUMED_AT:]:
        faults.append("other batches after a resume")
    expected = sorted(examples[:EXAMPLES])
    in_epoch = math.ceil(EXAMPLES / config.batch_size)
    first_epoch = list(itertools.chain.from_iterable(taken[:in_epoch]))
    if sorted(first_epoch) != expected:
        faults.append("the first epoch does not take each solution once")
    if any(len(rows) != config.batch_size for rows in taken[: in_epoch - 1]):
        faults.append("batches of other sizes")
    if config.curriculum and first_epoch != list(examples[:EXAMPLES]):
        faults.append("another order than the curriculum's")
    for has_curriculum in (False, True):
        if has_fixed_order(replace(config, curriculum=has_curriculum)) != has_curriculum:
            faults.append(f"an order by chance or not with --curriculum {has_curriculum}")
    return faults


def has_fixed_order(config: SFTConfig) -> bool:
    """Whether one of two epochs of many solutions has the order of the file, or of the other."""
    numbered: list[Example] = [((number,), (number,)) for number in range(SHUFFLED)]
    size = math.ceil(SHUFFLED / config.batch_size)
    order = list(itertools.islice(batches(numbered, config), 2 * size))
    epochs = [list(itertools.chain.from_iterable(order[:size]))]
    epochs.append(list(itertools.chain.from_iterable(order[size:])))
    return epochs[0] == epochs[1] or numbered in epochs


@dataclass(frozen=True)
class Fitted:
    """The state after a warm start's steps, by the papers, and what is reported of each step."""

    state: TrainedState
    records: list[dict[str, float]]


def fit(
    model: PlainModel, start: TrainedState, done: FineTuned, flags: Mapping[str, Any]
) -> Fitted:
    """What the papers make of a step on each of a warm start's batches."""
    learner = make_learner(model, start, flags)
    records = []
    for step, rows in enumerate(done.batches, start=1):
        records.append(take_supervised_step(learner, rows, step))
    if records:
        records[-1]["validation_loss"] = mean_surprise(learner, done.validation)
    return Fitted(TrainedState(learner.weights, learner.moments, learner.steps), records)


def other_figures(done: FineTuned, fitted: Fitted, tolerance: Tolerance) -> list[str]:
    """The names of what is reported of a warm start's steps that is not the papers'."""
    faults = []
    for record, expected in zip(done.records, fitted.records, strict=True):
        for name, value in expected.items():
            if not tolerance.allows(record.get(name), value):
                faults.append(f"{name} of step {record['step']}")
    return faults


def plain_response(prompt: Sequence[int], response: Sequence[int]) -> PlainResponse:
    """A worked solution as a response."""
    zeros = (0.0,) * len(response)
    return PlainResponse(tuple(prompt), tuple(response), 0.0, True, zeros)


def mean_surprise(learner: Learner, rows: Sequence[Row]) -> float:
    """The mean of -log p over the response tokens of some rows."""
    total = 0.0
    tokens = 0
    for prompt, response in rows:
        with torch.no_grad():
            values = learner.model.token_values(
                learner.whole_weights, plain_response(prompt, response), learner.setting
            )
        total -= values.log_probs.sum().item()
        tokens += len(response)
    return total / tokens


def take_supervised_step(learner: Learner, rows: Sequence[Row], step: int) -> dict[str, float]:
    """One step on a batch: each response token's log-prob has the slope -1 / tokens of the batch's
    responses. Returns what is reported of the step."""
    flags = learner.setting
    loss = 0.0
    leaves = {name: tensor.requires_grad_() for name, tensor in learner.weights.items()}
    gradient = {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    tokens = sum(len(response) for _, response in rows)
    for prompt, response in rows:
        weights = learner.model.weights_of(leaves, flags)
        values = learner.model.token_values(weights, plain_response(prompt, response), flags)
        loss -= values.log_probs.detach().sum().item() / tokens
        slopes = PaperSlopes([-1 / tokens] * len(response), [0.0] * len(response))
        add_row_gradient(gradient, leaves, values, slopes)
    learner.weights = {name: tensor.detach() for name, tensor in leaves.items()}
    rate = scheduled_rate(
        flags["learning_rate"], flags["warmup_steps"], flags["lr_schedule"], step, STEPS
    )
    learner.take_step(clipped(gradient, flags["max_grad_norm"]), rate)
    return {"loss": loss, "grad_norm": norm_of(gradient), "learning_rate": rate}
