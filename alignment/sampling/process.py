"""Engines in processes of their own, which can be stopped for certain and have device, threads and memory to themselves.

Everything crosses one pipe: requests and their answers, and weights one tensor at a time."""

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from alignment.core.records import Completion, SamplingConfig
from alignment.policy.policy import Policy
from alignment.sampling.arrival import Held
from alignment.sampling.sampler import Sampler, SamplerConfig, SamplerEngine, SamplerLost
from alignment.sampling.weight_transfer import received_tensors, send_tensors
from alignment.system.errors import UserError
from alignment.system.processes import START_SECONDS, ChildProcess
from alignment.system.registry import import_object


class EngineProcess:
    """What samplers share whose engine is a child process, which runs `entry` ("module:function", of `answer_requests`).

    Raises `UserError` where the engine cannot start, with the arguments `start`. One that breaks or dies later, or does not
    answer within `config.timeout` seconds, raises `SamplerLost` with its last words and is closed."""

    def __init__(self, name: str, entry: str, environment: Mapping[str, str], config: SamplerConfig, *start):
        self.restarts, self.policy_version, self.dtype = 0, config.policy_version, getattr(torch, config.dtype)
        self._timeout, self._busy = config.timeout, False
        self._worker = ChildProcess(f"{name} process on {config.place}", entry, environment)
        try:
            self._ask("start", *start, timeout=max(config.timeout, START_SECONDS))
        except SamplerLost as error:
            raise UserError(f"{name} could not start on {config.place} with the model {config.model_path}: {error}") from None
        self._worker.clear_log()

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights, one tensor on its way at a time: neither side holds a second copy of the model."""
        self._ask("reload", version, tensors=named_tensors)
        self.policy_version = version

    def weight_checksums(self, version: int) -> Held | None:
        """See `load_proven`."""
        return self._ask("checksums", version)

    def close(self) -> None:
        """End the worker and whatever it started. Also happens when the sampler is dropped and at exit."""
        if self._busy:  # perhaps for minutes, with an answer that nobody will read
            self._worker.kill()
        self._worker.close()

    def _ask(
        self, verb: str, *arguments, tensors: Iterable[tuple[str, torch.Tensor]] | None = None, timeout: float | None = None
    ):
        """The worker's answer to a request. After any failure the two sides are out of step, so the worker is ended."""
        worker, limit = self._worker, self._timeout if timeout is None else timeout
        if not worker.is_open:
            raise RuntimeError(f"the {worker.name} is closed")
        with worker.time_limit(limit) as hung:
            self._busy = True
            try:
                worker.connection.send((verb, arguments))
                if tensors is not None:
                    send_tensors(worker.connection, tensors, self.dtype)
                failure, answer = worker.receive()
            except (EOFError, OSError, ValueError, TypeError, pickle.UnpicklingError):
                exit_report = worker.exit_report()
                if hung.is_set():
                    exit_report = f"the {worker.name} gave no answer within {limit:g} s"
                raise SamplerLost(exit_report) from None
            except BaseException:  # Ctrl-C too
                self.close()
                raise
            finally:
                self._busy = False
        if failure:
            self.close()
            raise SamplerLost(failure)
        return answer


class SamplerProcess(EngineProcess):
    """A `Sampler` of any other engine, in a process that computes on so many `threads` where it has a CPU's."""

    def __init__(
        self, engine: SamplerEngine, threads: int, config: SamplerConfig, tokenizer=None, policy: Policy | None = None
    ):
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)  # --sampler may name what only we can import
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        start = engine.open, config, torch.are_deterministic_algorithms_enabled()
        super().__init__("sampler", f"{__name__}:serve", environment, config, *start)

    def sample(self, prompts: Sequence[str], sampling: SamplingConfig) -> list[list[Completion]]:
        """See `Sampler.sample`."""
        return self._ask("sample", list(prompts), sampling)


def answer_requests(descriptor: int, verbs: Mapping[str, Callable], advice: Callable[[Exception], str] = lambda _: "") -> None:
    """Answer requests from the pipe `descriptor` with (failure, answer), until one fails or is None. `verbs["start"]` makes the
    engine of the first request's arguments; "stop" and all others take it first, others then the pipe and their arguments."""
    connection = Connection(descriptor)
    try:
        _, arguments = connection.recv()
        engine = verbs["start"](*arguments)
        connection.send((None, None))
        for verb, arguments in iter(connection.recv, None):
            connection.send((None, verbs[verb](engine, connection, *arguments)))
        verbs["stop"](engine)
    except Exception as error:
        with suppress(OSError):  # the parent may be the one that broke off
            connection.send((f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}{advice(error)}", None))
        raise  # so that the log tells where


def serve(descriptor: int) -> None:
    """Be the process of a `SamplerProcess`."""
    answer_requests(descriptor, VERBS)


def _start(open_engine: str | Callable[..., Sampler], config: SamplerConfig, deterministic: bool) -> Sampler:
    from alignment.policy.loading import load_tokenizer, make_deterministic  # a vLLM's worker needs less of transformers

    if deterministic:
        make_deterministic()
    start = import_object("--sampler", open_engine) if isinstance(open_engine, str) else open_engine
    return start(config, load_tokenizer(config.model_path), None)


VERBS = {
    "start": _start,
    "sample": lambda sampler, _, prompts, sampling: sampler.sample(prompts, sampling),
    "reload": lambda sampler, connection, version: sampler.load_weights(received_tensors(connection), version),
    "checksums": lambda sampler, _, version: getattr(sampler, "weight_checksums", lambda version: None)(version),
    "stop": lambda sampler: sampler.close(),
}
