"""One step's rollout after another: sampled between the updates, by a sampler with each step's weights (`SyncRollouts`), or
ahead, by a thread that samples and scores while the trainer is busy with earlier ones (`AheadRollouts`).

Which weights sample which rollout is a rule (`Schedule`), not a matter of speed, so a run with stale rollouts repeats itself
and resumes as exactly as any other. At most `max_staleness` rollouts, and versions of the weights, wait for the other side."""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from alignment.core.records import SampledStep
from alignment.policy.policy import Policy
from alignment.rollouts.config import Schedule, derived_seed
from alignment.rollouts.source import RolloutSource
from alignment.sampling.arrival import load_proven
from alignment.sampling.pool import SamplerPool
from alignment.sampling.sampler import Sampler
from alignment.system.clock import Clock, run_in_background
from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import GRACE_SECONDS
from alignment.system.signals import defer_signals


class SyncRollouts:
    """One step's groups after another, of a sampler in this process, or of one that this process waits for."""

    def __init__(self, source: RolloutSource, sampler: Sampler, clock: Clock):
        self.source, self.sampler, self.clock = source, sampler, clock

    def next(self, step: int) -> SampledStep:
        """The sampled and scored groups of a step."""
        torch.manual_seed(derived_seed(self.source.config.seed, step))  # for samplers and rewards of a user's own
        sampled = self.source.sample_step(step, self.sampler)
        check_staleness(sampled, 0)
        self.clock.seconds |= sampled.seconds
        return sampled

    @contextmanager
    def syncing(self, policy: Policy, step: int) -> Iterator[None]:
        """Give the sampler the weights that `step` steps have made while the block runs, and wait for it after. Defers signals
        from here on: the step is made, but not yet logged."""
        defer_signals()
        with run_in_background(lambda: self._give_weights(policy, step), self.clock("sync")):
            yield

    def _give_weights(self, policy: Policy, version: int) -> None:
        load_proven(self.sampler, policy.weights(), version)

    def sampled_ahead(self, step: int) -> Sequence[SampledStep]:
        """The rollouts of later steps that are sampled already, with weights older than those of `step`."""
        return []


def check_staleness(sampled: SampledStep, most: int) -> None:
    """Raise RuntimeError for a rollout whose weights are more than `most` steps behind, or ahead."""
    if not 0 <= sampled.step - 1 - sampled.policy_version <= most:
        raise RuntimeError(f"step {sampled.step} got a rollout by version {sampled.policy_version}; --max_staleness is {most}")


class AheadRollouts(SyncRollouts):
    """Rollouts that a thread takes from `source`, from the step after the version of `sampler`'s weights on. The sampler's
    engines are in other processes, where they are ended while they draw. `sampled` are rollouts that the checkpoint holds
    already; `on_sampled` is called with each new one. An error of the thread is raised where its rollout is waited for."""

    def __init__(
        self, source: RolloutSource, sampler: SamplerPool, schedule: Schedule, clock: Clock,
        sampled: Sequence[SampledStep] = (), on_sampled: Callable[[SampledStep], None] = lambda sampled: None,
    ):  # fmt: skip
        super().__init__(source, sampler, clock)
        self._schedule, self._on_sampled = schedule, on_sampled
        self._steps = range(sampler.policy_version + 1 + len(sampled), schedule.num_steps + 1)
        steps = (*(rollout.step for rollout in sampled), *self._steps)
        self._sampled: dict[int, Future[SampledStep]] = {step: Future() for step in steps}
        for rollout in sampled:
            self._sampled[rollout.step].set_result(rollout)
        # Each version that the sampler gets: a copy of the weights in the host's memory.
        self._weights: dict[int, Future] = {schedule.version_for(step): Future() for step in self._steps}
        self._thread = threading.Thread(target=self._sample_ahead, daemon=True)
        self._thread.start()

    def next(self, step: int) -> SampledStep:
        """See `SyncRollouts.next`. The rollout is kept until its step is done (`syncing`)."""
        sampled = self._sampled[step].result()
        check_staleness(sampled, self._schedule.max_staleness)
        self.clock.seconds |= {"wait": self.clock.elapsed()}
        return dataclasses.replace(sampled, report=sampled.report | {"staleness": step - 1 - sampled.policy_version})

    def _give_weights(self, policy: Policy, version: int) -> None:
        """Copy the weights where a later step will be sampled with them: at once, whatever the sampler is busy with."""
        del self._sampled[version]
        if version in self._weights:
            dtype = self.sampler.dtype
            copies = [(name, tensor.detach().to(dtype).to("cpu", copy=True)) for name, tensor in policy.weights()]
            self._weights[version].set_result(copies)

    def sampled_ahead(self, step: int) -> Sequence[SampledStep]:
        """See `SyncRollouts.sampled_ahead`: what a checkpoint must hold. Waits for the rollouts that are under way."""
        later_steps = range(step + 1, self._steps.stop)
        return [self._sampled[later].result() for later in later_steps if self._schedule.version_for(later) < step]

    def close(self) -> None:
        """End the engines, and with them the thread."""
        for version in list(self._weights.values()):
            version.cancel()
        self.sampler.close()
        self._thread.join(GRACE_SECONDS)

    def _sample_ahead(self) -> None:
        """Sample rollout after rollout, each with its version of the weights. The first error is that of all later ones."""
        for step in self._steps:
            try:
                if self.sampler.policy_version < (version := self._schedule.version_for(step)):
                    load_proven(self.sampler, self._weights[version].result(), version)
                    del self._weights[version]
                sampled = self.source.sample_step(step, self.sampler)
                self._on_sampled(sampled)
                self._sampled[step].set_result(sampled)
            except Exception as error:
                reason = f"sampling ahead failed: {type(error).__name__}: {error}"
                stop = error if isinstance(error, UserError) else RunStopped(reason)
                for later in range(step, self._steps.stop):
                    self._sampled[later].set_exception(stop)
                return
