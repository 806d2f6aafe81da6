"""Rollouts that are sampled ahead: the sampler works in a process of its own while the trainer is busy with earlier ones.

Which weights sample which rollout is a rule (`Schedule`), not a matter of who was faster, so a run with stale rollouts repeats
itself and resumes as exactly as any other. By the same rule at most `max_staleness` rollouts wait for the trainer, and as many
versions of the weights for the sampler: each side waits for the other where it must.
"""

import dataclasses
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil
import torch

from alignment.core.records import SampledStep
from alignment.core.tokens import pad_token_id
from alignment.policy.loading import load_config, load_tokenizer, make_deterministic
from alignment.policy.policy import Policy
from alignment.policy.reference_client import RemoteReference
from alignment.rollouts.batches import collate_groups
from alignment.rollouts.config import RolloutConfig, Schedule
from alignment.rollouts.source import open_source
from alignment.rollouts.sync import check_staleness
from alignment.sampling.arrival import compare, load_proven, tensor_checksum, with_checksums
from alignment.sampling.restarts import open_sampler
from alignment.sampling.sampler import SamplerConfig, find_engine
from alignment.sampling.weight_transfer import received_tensors, send_tensors
from alignment.system.clock import Clock, run_in_background
from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import GRACE_SECONDS, POLL_SECONDS, START_SECONDS, ChildProcess
from alignment.system.signals import defer_signals


@dataclass(frozen=True)
class AheadConfig:
    """What the sampler's process is started with."""

    rollouts: RolloutConfig
    schedule: Schedule
    engine: str
    sampler: SamplerConfig  # With the weights of the folder that the run begins or resumes from.
    micro_batch_tokens: int  # By which the reference model cuts what is uploaded to it.
    reference: tuple[str, str] | None = None
    """Address and token of the reference model, which gets each rollout as soon as it is sampled."""
    deterministic: bool = False


class AheadRollouts:
    """`Rollouts` that a process of its own samples ahead, from the step after `config.sampler.policy_version` on. `sampled` are
    rollouts that the checkpoint holds already. Raises `RunStopped`, or what the process raised, where the process fails, dies,
    or gives no rollout in the time that its engine has for it (--sampler_timeout a request, twice)."""

    def __init__(self, config: AheadConfig, sampled: Sequence[SampledStep], clock: Clock):
        self.clock, self.restarts = clock, 0
        self._config, self._schedule = config, config.schedule
        self._sampled = {rollout.step: rollout for rollout in sampled}
        self._has_arrived, self._has_started = threading.Event(), False
        self._failure: Exception | None = None
        first = next(step for step in itertools.count(config.sampler.policy_version + 1) if step not in self._sampled)
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # --reward may name what only we can import
        self._child = ChildProcess("sampler's process", "alignment.rollouts.ahead:serve", {**os.environ, "PYTHONPATH": path})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with suppress(OSError):  # `next` notices a child that is dead already
            self._child.connection.send((config, first))

    def next(self, step: int) -> SampledStep:
        """See `Rollouts.next`. The rollout is kept until its step is done (`syncing`)."""
        sampled = self._wait_for(step)
        check_staleness(sampled, self._schedule.max_staleness)
        self.clock.seconds |= {"wait": self.clock.elapsed()}
        return dataclasses.replace(sampled, report=sampled.report | {"staleness": step - 1 - sampled.policy_version})

    def _wait_for(self, step: int) -> SampledStep:
        start, limit = time.monotonic(), self._limit(2 + self._config.rollouts.max_refills)
        while step not in self._sampled:
            if self._failure or not self._reader.is_alive():
                raise self._lost()
            if time.monotonic() > start + limit:
                self._child.kill()
                raise RunStopped(f"the {self._child.name} gave no rollout within {limit:g} s (--sampler_timeout)")
            self._has_arrived.wait(POLL_SECONDS)
            self._has_arrived.clear()
        return self._sampled[step]

    @contextmanager
    def syncing(self, policy: Policy, step: int) -> Iterator[None]:
        """See `Rollouts.syncing`. The process takes the weights at once, whatever it is busy with."""
        defer_signals()
        with run_in_background(lambda: self._send_weights(policy, step), self.clock("sync")):
            yield

    def _send_weights(self, policy: Policy, version: int) -> None:
        """Send the weights where a later step will be sampled with them."""
        lost = self._sampled.pop(version).restarts
        self.restarts += lost
        if lost:
            print("the sampler's engine was lost and started again", file=sys.stderr)
        if all(version != self._schedule.version_for(step) for step in self._schedule.steps_after(version)):
            return
        limit, dtype = self._limit(2), getattr(torch, self._config.sampler.dtype)
        with self._child.time_limit(limit) as hung:
            try:
                self._child.connection.send(version)
                sent: dict[str, int] = {}
                send_tensors(self._child.connection, with_checksums(policy.weights(), dtype, version, sent), dtype)
                self._child.connection.send(sent)
            except OSError:
                if hung.is_set():
                    raise RunStopped(f"the {self._child.name} took no weights within {limit:g} s (--sampler_timeout)") from None
                raise self._lost() from None

    def sampled_ahead(self, step: int) -> Sequence[SampledStep]:
        """See `Rollouts.sampled_ahead`: what a checkpoint must hold. Waits for the rollouts that are under way."""
        later_steps = self._schedule.steps_after(step)
        return [self._wait_for(later) for later in later_steps if self._schedule.version_for(later) < step]

    def close(self) -> None:
        """End the sampler's process and whatever it started."""
        with suppress(OSError):
            self._child.connection.send(None)
        self._reader.join(GRACE_SECONDS)
        self._child.kill()
        self._reader.join(GRACE_SECONDS)
        self._child.close()

    def _limit(self, requests: int) -> float:
        """Seconds that so many requests to the engine may take, which may have to start (again) first."""
        starts = not self._has_started or find_engine(self._config.engine).can_be_lost
        return requests * self._config.sampler.timeout + (START_SECONDS if starts else 0)

    def _read(self) -> None:
        """Take what the child sends at once, so that it never waits for us: in a thread, where no signal cuts a message."""
        try:
            while True:
                self._failure, answer = self._child.receive()  # of which one is None
                if answer:
                    self._sampled[answer.step], self._has_started = answer, True
                self._has_arrived.set()
        except (EOFError, OSError):
            pass
        except Exception as error:  # such as that of an exception of the user's own, which did not survive the pipe
            reason = f"{type(error).__name__}: {error}"
            self._failure = RunStopped(f"what the {self._child.name} sent cannot be read ({reason})")
        self._has_arrived.set()

    def _lost(self) -> Exception:
        self._reader.join(GRACE_SECONDS)  # its last message may be on its way
        return self._failure or RunStopped(self._child.exit_report())


def serve(descriptor: int) -> None:
    """Sample rollout after rollout, each with its version of the weights, and send it through the pipe `descriptor`."""
    connection = Connection(descriptor)
    try:
        config, first = connection.recv()
        arriving: queue.SimpleQueue = queue.SimpleQueue()  # by the schedule no more than max_staleness versions
        threading.Thread(target=_receive_weights, args=(connection, arriving), daemon=True).start()
        for sampled in _sample_ahead(config, first, arriving):
            connection.send((None, sampled))
        threading.Event().wait()  # until the trainer ends this process: it may still ask whether it is alive
    except (UserError, RunStopped) as error:
        connection.send((error, None))
    except Exception as error:
        traceback.print_exc()
        connection.send((RunStopped(f"the sampler's process failed: {type(error).__name__}: {error}"), None))
    end()


def _receive_weights(connection: Connection, arriving: queue.SimpleQueue) -> None:
    """Take the weights that arrive while a rollout is sampled; end the process when told to."""
    with suppress(EOFError, OSError):
        for version in iter(connection.recv, None):
            arriving.put((version, list(received_tensors(connection)), connection.recv()))
    end()


def end() -> None:
    """End this process with all that it has started, waiting for nobody."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(0)


def _sample_ahead(config: AheadConfig, first: int, arriving: queue.SimpleQueue) -> Iterator[SampledStep]:
    """The rollouts from step `first` on; each is uploaded to the reference model, if there is one."""
    if config.deterministic:
        make_deterministic()
    tokenizer = load_tokenizer(config.sampler.model_path)
    source = open_source(config.rollouts, tokenizer)
    reference = None  # gets each rollout early, which only saves time: the trainer sees to its faults
    if config.reference is not None:
        with suppress(UserError):
            vocabulary = load_config(config.sampler.model_path).vocab_size
            reference = RemoteReference(*config.reference, vocabulary, config.sampler.timeout)
    present: list[tuple[str, torch.Tensor]] = []  # the weights that a new engine gets where the first is lost
    sampler = open_sampler(find_engine(config.engine), config.sampler, tokenizer, weights=lambda: present)
    for step in range(first, config.schedule.num_steps + 1):
        restarts = sampler.restarts
        while sampler.policy_version < config.schedule.version_for(step):
            version, present[:], sent = arriving.get()
            arrived = {name: ([name], tensor_checksum(tensor, version, tensor.dtype)) for name, tensor in present}
            compare(sent, arrived, version)
            load_proven(sampler, present, version)
        sampled = dataclasses.replace(source.sample_step(step, sampler), restarts=sampler.restarts - restarts)
        if reference is not None:
            batch = collate_groups(sampled.groups, config.rollouts, pad_token_id(tokenizer)).batch
            with suppress(RunStopped):  # then the trainer asks for it, and sees for itself
                distribution = config.rollouts.sampling.distribution
                reference.upload(f"step-{step}", batch, distribution, config.micro_batch_tokens)
        yield sampled
