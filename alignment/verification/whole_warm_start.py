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
from alignment.verification.whole_update import (
    Learner,
    PlainModel,
    PlainResponse,
    TrainedState,
    add_row_gradient,
    clipped,
    make_learner,
    scheduled_rate,
)

BATCH = 4
EXAMPLES = 10  # Their number is no multiple of a batch's.
STEPS = 4  # The last of them is of the second epoch.
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


def fine_tuned_batches(
    policy: Policy, examples: Sequence[Example], pad_id: int, config: SFTConfig
) -> list[list[Row]]:
    """Run the warm start's loop. Returns the (prompt, response) rows of the batches that its steps
    have computed."""
    recording = RecordingPolicy(policy)
    data = SFTData(examples[:EXAMPLES], examples[:1], pad_id)
    fine_tune(cast(Policy, recording), data, config, lambda record, message: None)
    return [rows_of(batch) for batch in recording.batches]


def rows_of(batch: Batch) -> list[Row]:
    """The rows of a batch, whose responses are the labels in its mask."""
    rows = []
    for ids, labels, mask in zip(batch.input_ids, batch.labels, batch.response_mask, strict=True):
        first = int(mask.int().argmax())
        rows.append((tuple(ids[: first + 1].tolist()), tuple(labels[mask].tolist())))
    return rows


def faults_of_batches(
    taken: Sequence[Sequence[Row]], examples: Sequence[Example], config: SFTConfig
) -> list[str]:
    """What is wrong with the batches: each epoch takes each example once, in batches of one size
    but for the last; in the order of the file with --curriculum, else in an order by chance."""
    faults = []
    expected = sorted(examples[:EXAMPLES])
    in_epoch = math.ceil(EXAMPLES / config.batch_size)
    first_epoch = list(itertools.chain.from_iterable(taken[:in_epoch]))
    if sorted(first_epoch) != expected:
        faults.append("the first epoch does not take each solution once")
    if any(len(rows) != config.batch_size for rows in taken[: in_epoch - 1]):
        faults.append("batches of other sizes")
    if config.curriculum and first_epoch != list(examples[:EXAMPLES]):
        faults.append("another order than the curriculum's")
    numbered: list[Example] = [((number,), (number,)) for number in range(SHUFFLED)]
    size = math.ceil(SHUFFLED / config.batch_size)
    order = list(itertools.islice(batches(numbered, config), 2 * size))
    epochs = [list(itertools.chain.from_iterable(order[:size]))]
    epochs.append(list(itertools.chain.from_iterable(order[size:])))
    is_fixed = epochs[0] == epochs[1] or numbered in epochs
    if is_fixed != config.curriculum:
        faults.append("epochs whose order is not by chance")
    return faults


def fit(
    model: PlainModel,
    start: TrainedState,
    taken: Sequence[Sequence[Row]],
    flags: Mapping[str, Any],
) -> TrainedState:
    """The state after a step on each of these batches, by the papers."""
    learner = make_learner(model, start, flags)
    for step, rows in enumerate(taken, start=1):
        take_supervised_step(learner, rows, step)
    return TrainedState(learner.weights, learner.moments, learner.steps)


def take_supervised_step(learner: Learner, rows: Sequence[Row], step: int) -> None:
    """One step on a batch: each response token's log-prob has the slope -1 / tokens of the batch's
    responses."""
    flags = learner.setting
    leaves = {name: tensor.requires_grad_() for name, tensor in learner.weights.items()}
    gradient = {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    tokens = sum(len(response) for _, response in rows)
    for prompt, response in rows:
        weights = learner.model.weights_of(leaves, flags)
        zeros = [0.0] * len(response)
        plain = PlainResponse(prompt, response, 0.0, True, tuple(zeros))
        values = learner.model.token_values(weights, plain, flags)
        slopes = PaperSlopes([-1 / tokens] * len(response), zeros)
        add_row_gradient(gradient, leaves, values, slopes)
    learner.weights = {name: tensor.detach() for name, tensor in leaves.items()}
    rate = scheduled_rate(
        flags["learning_rate"], flags["warmup_steps"], flags["lr_schedule"], step, STEPS
    )
    learner.take_step(clipped(gradient, flags["max_grad_norm"]), rate)
