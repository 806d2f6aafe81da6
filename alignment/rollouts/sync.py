"""Rollouts that are sampled between the updates, by a sampler that has each step's weights."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from alignment.core.records import SampledStep
from alignment.policy.policy import Policy
from alignment.rollouts.config import derived_seed
from alignment.rollouts.source import RolloutSource
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import Sampler
from alignment.system.clock import Clock, run_in_background
from alignment.system.signals import defer_signals


class Rollouts(Protocol):
    """One step's groups after another, and the sampler's share of new weights."""

    def next(self, step: int) -> SampledStep:
        """The sampled and scored groups of a step."""

    @contextmanager
    def syncing(self, policy: Policy, step: int) -> Iterator[None]:
        """Give the sampler the weights that `step` steps have made while the block runs, and wait for it after the block.
        Signals are deferred from here on: the step is made, but not yet logged."""

    def sampled_ahead(self, step: int) -> Sequence[SampledStep]:
        """The rollouts of later steps that are sampled already, with weights older than those of `step`."""


class SyncRollouts:
    """`Rollouts` of a sampler in this process, or of one that this process waits for."""

    def __init__(self, source: RolloutSource, sampler: Sampler, clock: Clock):
        self.source, self.sampler, self.clock = source, sampler, clock

    def next(self, step: int) -> SampledStep:
        torch.manual_seed(derived_seed(self.source.config.seed, step))  # for samplers and rewards of a user's own
        sampled = self.source.sample_step(step, self.sampler)
        check_staleness(sampled, 0)
        self.clock.seconds |= sampled.seconds
        return sampled

    @contextmanager
    def syncing(self, policy: Policy, step: int) -> Iterator[None]:
        defer_signals()
        with run_in_background(functools.partial(load_proven, self.sampler, policy.weights(), step), self.clock("sync")):
            yield

    def sampled_ahead(self, step: int) -> Sequence[SampledStep]:
        """None: nothing is sampled before its step."""
        return []


def check_staleness(sampled: SampledStep, most: int) -> None:
    """Raise RuntimeError for a rollout whose weights are more than `most` steps behind, or ahead."""
    if not 0 <= sampled.step - 1 - sampled.policy_version <= most:
        raise RuntimeError(f"step {sampled.step} got a rollout by version {sampled.policy_version}; --max_staleness is {most}")
