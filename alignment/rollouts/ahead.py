"""Rollouts that are drawn ahead: the sampler works in a process of its own while the trainer is busy with earlier ones.

Which weights sample which rollout is a rule, not a matter of who was faster (`version_for`), so a run with stale rollouts
repeats itself and is resumed as exactly as any other. By the same rule at most --max_staleness rollouts wait for the
trainer, and as many versions of the weights for the sampler: each side waits for the other where it must.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil
import torch

from alignment.args import RLArgs
from alignment.core.rollout import SampledStep
from alignment.core.tokens import pad_token_id
from alignment.policy.loading import load_config, load_tokenizer, make_deterministic, roles_of, sampler_kind
from alignment.policy.reference_client import OwnReferenceServer, RemoteReference
from alignment.rollouts.batches import make_rollout
from alignment.rollouts.collect import training_source
from alignment.sampling.sampler import make_rollout_sampler
from alignment.sampling.weight_transfer import received_tensors, send_tensors
from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import GRACE_SECONDS, POLL_SECONDS, START_SECONDS, ChildProcess


def version_for(step: int, args: RLArgs) -> int:
    """The version of the weights that samples a step's rollout: the oldest that --max_staleness lets be, of those that
    the sampler gets (each --sync_every steps). Version v is what v steps have made."""
    every = args.sync_every
    return max(0, -(-(step - 1 - args.staleness) // every) * every)


class AsyncRollouts:
    """The rollouts after step `done`, sampled ahead in a process that starts with the weights of the folder `base`.

    `drawn` are those that the checkpoint of that step has already. Raises `RunStopped`, or what the sampler's process raised,
    where that fails, dies, or gives no rollout in the time that its engine has for it (--sampler_timeout a request, twice).
    """

    def __init__(
        self,
        args: RLArgs,
        base: str,
        done: int,
        drawn: Sequence[SampledStep],
        dtype: torch.dtype,
        reference: RemoteReference | OwnReferenceServer | None = None,
    ):
        self.restarts, self.sampler = 0, None  # which is not at hand for anything else
        self._args, self._dtype = args, dtype
        self._drawn = {each.step: each for each in drawn}
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # rung by the reader; a ring that is lost costs POLL_SECONDS
        self._has_started, self._over = False, False
        self._failure: Exception | None = None
        first = done + 1
        while first in self._drawn:
            first += 1
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # --reward may name what only we can import
        served = None if reference is None else (reference.url, reference.token)
        self._child = ChildProcess("sampler's process", "alignment.rollouts.ahead:serve", {**os.environ, "PYTHONPATH": path})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        with suppress(OSError):  # a child that is dead already will be noticed
            self._child.connection.send((args, base, done, first, served))

    def next(self, step: int) -> SampledStep:
        """The rollout of a step, as soon as it is there; it is kept until the step is done (`load_weights`)."""
        start, limit = time.monotonic(), self._limit(2 + self._args.max_refills)
        while step not in self._drawn:
            if self._failure or self._over:
                raise self._lost()
            if time.monotonic() > start + limit:
                self._child.kill()
                raise RunStopped(f"the {self._child.name} gave no rollout within {limit:g} s (--sampler_timeout)")
            with suppress(queue.Empty):
                self._bell.get(timeout=POLL_SECONDS)
        return self._drawn[step]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Step `version` is done. Send these weights to the sampler's process where a rollout will want them; it takes them at
        once, whatever it is busy with."""
        lost = self._drawn.pop(version).restarts
        self.restarts += lost
        if lost:
            print("the sampler's engine was lost and started again", file=sys.stderr)
        if all(version != version_for(step, self._args) for step in self._steps_after(version)):
            return
        limit = self._limit(2)
        with self._child.time_limit(limit) as hung:
            try:
                self._child.connection.send(version)
                send_tensors(self._child.connection, named_tensors, self._dtype)
            except OSError:
                if hung.is_set():
                    raise RunStopped(f"the {self._child.name} took no weights within {limit:g} s (--sampler_timeout)") from None
                raise self._lost() from None

    def ahead(self, step: int) -> list[SampledStep]:
        """The rollouts after a step that are drawn with weights older than its own: what a checkpoint must hold for the run to
        go on as if nothing had happened. Waits for them."""
        return [self.next(later) for later in self._steps_after(step) if version_for(later, self._args) < step]

    def close(self) -> None:
        """End the sampler's process and whatever it started."""
        with suppress(OSError):
            self._child.connection.send(None)
        self._reader.join(GRACE_SECONDS)
        self._child.kill()
        self._reader.join(GRACE_SECONDS)
        self._child.close()

    def _limit(self, requests: int) -> float:
        """Seconds that so many requests to the sampler's engine may take, which may have to be started (again) first."""
        starts = not self._has_started or sampler_kind(self._args) == "vllm" or self._args.sampler_url
        return requests * self._args.sampler_timeout + (START_SECONDS if starts else 0)

    def _steps_after(self, step: int) -> range:
        """The steps whose rollouts may be drawn with the weights that `step` steps have made, or with older ones."""
        return range(step + 1, min(step + self._args.staleness + 1, self._args.num_steps) + 1)

    def _read(self) -> None:
        """Take what the child sends, at once, so that it never waits for us: in a thread, where no signal cuts a message."""
        connection = self._child.connection
        try:
            while True:
                while not connection.poll(POLL_SECONDS):
                    if self._child.has_ended():  # what it has forked may hold its end of the pipe
                        return
                failure, answer = connection.recv()
                if failure:
                    self._failure = failure
                else:
                    self._drawn[answer.step], self._has_started = answer, True
                self._bell.put(None)
        except (EOFError, OSError, pickle.UnpicklingError):
            pass
        finally:
            self._over = True
            self._bell.put(None)

    def _lost(self) -> Exception:
        self._reader.join(GRACE_SECONDS)  # its last words may be on their way
        return self._failure or RunStopped(self._child.exit_report())


def serve(descriptor: int) -> None:
    """The sampler's process: draw rollout after rollout, each with the version of the weights that is its due."""
    connection = Connection(descriptor)
    try:
        args, base, done, first, served = connection.recv()
        arriving: queue.SimpleQueue = queue.SimpleQueue()  # by the rule no more than --max_staleness versions
        threading.Thread(target=_receive_weights, args=(connection, arriving), daemon=True).start()
        for drawn in _draw_ahead(args, base, done, first, served, arriving):
            connection.send((None, drawn))
        threading.Event().wait()  # until we are told to end: the trainer may still want to know that all is well
    except (UserError, RunStopped) as error:
        connection.send((error, None))
    except Exception as error:
        traceback.print_exc()
        connection.send((RunStopped(f"the sampler's process failed: {type(error).__name__}: {error}"), None))
    end()


def _receive_weights(connection: Connection, arriving: queue.SimpleQueue) -> None:
    """Take the weights that come while a rollout is drawn, and end the process, with all that it started, when told to."""
    with suppress(EOFError, OSError):
        for version in iter(connection.recv, None):
            arriving.put((version, list(received_tensors(connection))))
    end()


def end() -> None:
    """End this process with all that it has started, waiting for nobody."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(0)


def _draw_ahead(
    args: RLArgs, base: str, done: int, first: int, served: tuple[str, str] | None, arriving: queue.Queue
) -> Iterator[SampledStep]:
    """The rollouts from step `first` on, by a sampler that starts with version `done` of the weights, those in `base`; each is
    uploaded to the reference model that is served at an address, with a token, if there is one."""
    make_deterministic(args)
    roles, tokenizer = roles_of(args), load_tokenizer(base)
    source = training_source(args, tokenizer)
    reference = None
    with suppress(UserError):  # the trainer sees to its reference model; to begin with it here only saves time
        reference = served and RemoteReference(*served, load_config(base).vocab_size, args.sampler_timeout)
    present: list[tuple[str, torch.Tensor]] = []  # what a new engine needs where the first is lost
    sampler = make_rollout_sampler(args, base, tokenizer, roles, lambda: present, policy_version=done)
    for step in range(first, args.num_steps + 1):
        before = sampler.restarts
        while sampler.policy_version < version_for(step, args):
            version, present[:] = arriving.get()
            sampler.load_weights(present, version)
        drawn = dataclasses.replace(source.draw(step, sampler), restarts=sampler.restarts - before)
        if reference is not None:
            rollout = make_rollout(drawn.groups, args, pad_token_id(tokenizer))
            with suppress(RunStopped):  # then the trainer will ask for it, and see for itself
                reference.upload(f"step-{step}", rollout, args)
        yield drawn
