"""Engines in processes of their own, which can be stopped for certain and have device, threads and memory to themselves.
Requests, answers, and weights, one tensor at a time, cross one pipe."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

import torch

from alignment.core.records import Completion, SamplingConfig
from alignment.policy.policy import Policy
from alignment.sampling.arrival import Held
from alignment.sampling.sampler import Sampler, SamplerConfig, SamplerEngine, SamplerLost
from alignment.system.errors import UserError
from alignment.system.processes import START_SECONDS, ChildProcess, answer_requests
from alignment.system.registry import import_object


class EngineProcess:
    """A sampler whose engine is a child process that runs `entry` ("module:function", of `answer_requests`). Raises `UserError`
    where it cannot start with the arguments `start`. One that later breaks, dies or gives no answer within `config.timeout`
    seconds is closed, and raises `SamplerLost` with its last words."""

    def __init__(self, name: str, entry: str, environment: Mapping[str, str], config: SamplerConfig, *start):
        self.restarts, self.policy_version, self.dtype = 0, config.policy_version, getattr(torch, config.dtype)
        self._timeout = config.timeout
        start_process = config.machines[0].start if config.machines[0] else ChildProcess
        self._worker = start_process(f"{name} process on {config.place}", entry, environment)
        try:
            self._ask("start", *start, seconds=max(config.timeout, START_SECONDS), send=self._prepare)
        except SamplerLost as error:
            raise UserError(f"{name} could not start on {config.place} with the model {config.model_path}: {error}") from None
        self._worker.clear_log()

    def _prepare(self, connection: Connection) -> None:
        """What this process does while its engine starts."""

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the weights, one tensor on its way at a time: neither side holds a second copy of the model."""
        self._ask("reload", version, send=lambda connection: send_tensors(connection, named_tensors, self.dtype))
        self.policy_version = version

    def weight_checksums(self, version: int) -> Held | None:
        """See `load_proven`."""
        return self._ask("checksums", version)

    def close(self) -> None:
        """End the worker and whatever it started. Also happens when the sampler is dropped and at exit."""
        self._worker.close()

    def _ask(self, verb: str, *arguments, **options):
        return self._worker.ask(options.pop("seconds", self._timeout), verb, *arguments, **options)


class SamplerProcess(EngineProcess):
    """A `Sampler` of any other engine, in a process with so many `threads` on a CPU."""

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


def send_tensors(connection: Connection, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """A header and the bytes of each tensor, then None: one tensor on its way at a time."""
    for name, tensor in tensors:
        local = tensor.detach().to(dtype).cpu().contiguous()  # cast where it is, so that fewer bytes travel
        connection.send((name, dtype, tuple(local.shape)))
        connection.send_bytes(memoryview(local.flatten().view(torch.uint8).numpy()))
    connection.send(None)


def received_tensors(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """What `send_tensors` sends, on the other side."""
    for name, dtype, shape in iter(connection.recv, None):
        yield name, torch.frombuffer(bytearray(connection.recv_bytes()), dtype=dtype).view(shape)


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
