"""Opening a sampler: its engines draw together, in processes of their own, which can be stopped for
certain, and one that dies, hangs, or answers what cannot be completions is replaced. Requests,
answers and weights cross one pipe of each process."""

import collections
import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import torch

from alignment.core.records import SamplingConfig
from alignment.policy.policy import Policy
from alignment.sampling.arrival import HeldWeights, NamedTensors, ProvenSampler, load_proven
from alignment.sampling.opening import PolicyToCome
from alignment.sampling.sampler import (
    Completions,
    OnResponseEnd,
    Sampler,
    SamplerConfig,
    SamplerEngine,
    SamplerLost,
    Start,
    put_to_sleep,
)
from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import START_SECONDS, ChildProcess, answer_requests
from alignment.system.registry import import_object

Answer = TypeVar("Answer")


def open_sampler(
    engine: SamplerEngine,
    config: SamplerConfig,
    tokenizer,
    policy: Policy | PolicyToCome | None = None,
    in_process: bool = True,
) -> Sampler:
    """Start an engine for each of `config`'s devices, on each of its machines, or addresses. One
    alone may read the model of `policy`, whose weights it gets, in place. Without `in_process` each
    has a process, which can be ended while it draws."""
    # Imported here, as a vLLM's process needs less of transformers.
    from alignment.model.loading import load_config
    from alignment.system.device_memory import release_memory

    release_memory()  # an engine refuses to start where less than its share of the GPU is free
    configs = engine_configs(config)
    start = opener_of(engine)
    alone = in_process and len(configs) == 1
    if alone and not engine.can_be_lost:
        return start(config, tokenizer, policy)
    if not alone and (config.url or not engine.can_be_lost):
        threads = torch.get_num_threads() * len(config.machines) // len(configs)
        start = functools.partial(SamplerProcess, start, max(1, threads))
    weights = None
    if alone and policy is not None:
        weights = policy.weights
        configs = [dataclasses.replace(configs[0], policy_device=policy.devices[0])]
    starts = {}
    for number, own_config in enumerate(configs, start=1):
        name = f"engine {number} of {len(configs)} on {own_config.place}"
        starts[name] = functools.partial(start, own_config, tokenizer, None)
    vocabulary = load_config(config.model_path).vocab_size
    return SamplerPool(starts, getattr(torch, config.dtype), vocabulary, weights)


def opener_of(engine: SamplerEngine) -> Callable[..., Sampler]:
    """The function that opens an engine, imported where it is given by its name."""
    if not isinstance(engine.open, str):
        return engine.open
    opener: Any = import_object("--sampler", engine.open)
    return opener


def engine_configs(config: SamplerConfig) -> list[SamplerConfig]:
    """What each engine is started with: one for each address, or for each `tensor_parallel` devices
    of each machine."""
    if config.url:
        urls = config.url.split(",")
        return [dataclasses.replace(config, url=url, machines=(None,)) for url in urls]
    configs: list[SamplerConfig] = []
    for machine in config.machines:
        for start in range(0, len(config.devices), config.tensor_parallel):
            first, *further = config.devices[start : start + config.tensor_parallel]
            configs.append(
                dataclasses.replace(
                    config, device=first, further_devices=tuple(further), machines=(machine,)
                )
            )
    return configs


class SamplerPool:
    """A `Sampler` of engines that can be lost, one or several, which draw at the same time.

    `engines` maps a name to the function that makes the engine with the first weights. An engine's
    error has its name and closes the others.

    Of P prompts engine k of N draws those from number P * k // N up to the next one's first. A
    response's random numbers follow from its prompt's number: neither the number nor the speed of
    engines changes a completion, but for the rounding of what shares a batch. All engines take all
    weights, each with its proof of arrival (`load_proven`). A lost engine is replaced once a
    request by one with the same weights, of `weights` or a copy in the host's memory. Raises
    `RunStopped` if that is lost."""

    def __init__(
        self,
        engines: Mapping[str, Callable[[], Sampler]],
        dtype: torch.dtype,
        vocabulary: int,
        weights: Callable[[], NamedTensors] | None = None,
    ):
        self.dtype = dtype
        self.restarts = 0
        self._starts = engines
        self._vocabulary = vocabulary
        self._weights = weights
        self._copies: list[tuple[str, torch.Tensor]] = []
        self._version: int | None = None  # Of the weights that were sent last; None: the first.
        self._closed = False
        self._threads = ThreadPoolExecutor(len(engines))
        self._engines: dict[str, Sampler] = {}
        self._on_all_engines(self._start)

    @property
    def policy_version(self) -> int:
        """The oldest of the engines' versions: a version that some have not got is not there."""
        return min(engine.policy_version for engine in self._engines.values())

    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        """See `Sampler.sample`; an engine in another process gives all of its answer at once."""
        engines = len(self._starts)
        firsts = [len(prompts) * number // engines for number in range(engines + 1)]
        parts = dict(zip(self._starts, itertools.pairwise(firsts), strict=True))

        def draw(name: str) -> Completions:
            first, end = parts[name]
            if first == end:
                return []
            own_sampling = dataclasses.replace(sampling, first_prompt=sampling.first_prompt + first)

            def request(engine: Sampler) -> Completions:
                completions = engine.sample(prompts[first:end], own_sampling)
                return check_completions(completions, end - first, own_sampling, self._vocabulary)

            return self._request(name, request) or []

        return list(itertools.chain.from_iterable(self._on_all_engines(draw)))

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `Sampler.load_weights`. Several engines get them by the host's memory, since a policy
        may have to gather them."""
        self._version = version
        if self._weights is None:
            self._copies = []  # frees the memory of those before
            copies = []
            for name, tensor in named_tensors:
                cast = tensor.detach().to(self.dtype)
                copies.append((name, cast.cpu()))
            self._copies = copies
            named_tensors = copies
        weights = named_tensors

        def load(engine: Sampler) -> None:
            try:
                load_proven(engine, weights, version)
            except SamplerLost:
                # The other ranks of a sharded policy gather the weights with this one, and would
                # wait for the rest of them while a new engine starts.
                collections.deque(weights, maxlen=0)
                raise

        def load_or_replace(name: str) -> None:
            # A new engine starts with the new weights, so it is not asked to load them again.
            self._request(name, load, repeat=False)

        self._on_all_engines(load_or_replace)

    def sleep(self, keep_weights: bool) -> None:
        """See `sampler.put_to_sleep`."""

        def put_engine_to_sleep(name: str) -> None:
            self._request(name, lambda engine: put_to_sleep(engine, keep_weights))

        self._on_all_engines(put_engine_to_sleep)

    def close(self) -> None:
        """Close all engines, also while other threads wait for their answers."""
        self._closed = True
        with ThreadPoolExecutor(len(self._starts)) as threads:
            closed = threads.map(close_sampler, list(self._engines.values()))
        collections.deque(closed, maxlen=0)  # raises what closing one has raised
        self._threads.shutdown()

    def _start(self, name: str) -> None:
        self._engines[name] = self._starts[name]()
        if self._closed:  # since another one could not start
            self._engines[name].close()

    def _request(
        self, name: str, request: Callable[[Sampler], Answer], repeat: bool = True
    ) -> Answer | None:
        """An engine's answer to a request. Where the engine is lost, a new one takes its place,
        which is asked again with `repeat`; else there is no answer."""
        try:
            return request(self._engines[name])
        except SamplerLost as error:
            if self._closed:
                raise
            lost = error
        try:
            self._replace(name, lost)
            if repeat:
                return request(self._engines[name])
        except UserError as error:
            raise RunStopped(
                f"the sampler was lost ({lost}), and once more after it was started again: {error}"
            ) from None

    def _replace(self, name: str, lost: SamplerLost) -> None:
        """Put a new engine, with the same weights, in the place of a lost one."""
        print(f"the sampler is started again: {lost}", file=sys.stderr)
        self.restarts += 1
        self._engines[name].close()
        self._start(name)
        if self._version is not None:
            weights = self._copies if self._weights is None else self._weights()
            load_proven(self._engines[name], weights, self._version)

    def _on_all_engines(self, work: Callable[[str], Answer]) -> list[Answer]:
        """What `work` returns for each engine's name, in order. The engines work at the same time;
        one alone works in the calling thread, where a signal interrupts it."""
        if len(self._starts) == 1:
            return [work(name) for name in self._starts]
        names = {self._threads.submit(work, name): name for name in self._starts}
        name = ""
        try:
            for future in as_completed(names):
                name = names[future]
                future.result()
        except BaseException as error:
            self.close()
            if isinstance(error, UserError):
                raise type(error)(f"{name}: {error}") from None
            raise
        return [future.result() for future in names]


def close_sampler(sampler: Sampler) -> None:
    sampler.close()


def check_completions(
    completions: Completions, prompts: int, sampling: SamplingConfig, vocabulary: int
) -> Completions:
    """The completions. Raises `SamplerLost` for an answer that cannot be `sampling.n` of each of
    `prompts` prompts."""
    sizes = [len(group) for group in completions]
    if sizes != [sampling.n] * prompts:
        raise SamplerLost(f"it was asked for {prompts} x {sampling.n} completions and gave {sizes}")
    for completion in itertools.chain.from_iterable(completions):
        tokens = len(completion.token_ids)
        log_probs = len(completion.log_probs)
        if not 1 <= tokens <= sampling.max_new_tokens or log_probs != tokens:
            raise SamplerLost(
                f"a completion has {tokens} of {sampling.max_new_tokens} tokens, and {log_probs}"
                " log-probs"
            )
        if not all(0 <= token < vocabulary for token in completion.token_ids):
            raise SamplerLost(f"a completion has tokens outside the vocabulary of {vocabulary}")
        # The sum of probabilities in bfloat16 may pass 1, and its logarithm 0.
        if not all(-math.inf < log_prob <= 1e-3 for log_prob in completion.log_probs):
            raise SamplerLost("a completion has log-probs that are no logarithms of probabilities")
    return completions


class EngineProcess:
    """A sampler whose engine is a child process that runs `entry` (by `answer_requests`). Raises
    `UserError` where it cannot start with the arguments `start`. Closes one that breaks, dies or is
    silent for `config.timeout` seconds, and raises `SamplerLost`."""

    def __init__(
        self, name: str, entry: str, environment: Mapping[str, str], config: SamplerConfig, *start
    ):
        self.restarts = 0
        self.policy_version = config.policy_version
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._timeout = config.timeout
        machine = config.machines[0]
        start_process = ChildProcess if machine is None else machine.start
        self._worker = start_process(f"{name} process on {config.place}", entry, environment)
        seconds = max(config.timeout, START_SECONDS)
        try:
            config.start.wait_for_memory(self._worker)
            self._ask("start", *start, seconds=seconds, send=self._prepare)
        except SamplerLost as error:
            raise UserError(
                f"{name} could not start on {config.place} with the model {config.model_path}:"
                f" {error}"
            ) from None
        except BaseException:
            self._worker.close()
            raise
        self._worker.clear_log()

    def _prepare(self, connection: Connection) -> None:
        """What this process does while its engine starts."""

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace the weights, one tensor on its way at a time: neither side holds a second copy of
        the model."""

        def send(connection: Connection) -> None:
            send_tensors(connection, named_tensors, self.dtype)

        self._ask("reload", version, send=send)
        self.policy_version = version

    def weight_checksums(self, version: int) -> HeldWeights | None:
        return self._ask("checksums", version)

    def close(self) -> None:
        """End the worker and whatever it started. Also happens when the sampler is dropped and at
        exit."""
        self._worker.close()

    def _ask(self, verb: str, *arguments, seconds: float | None = None, **options) -> Any:
        """See `ChildProcess.ask`. The time limit is the sampler's own where none is given."""
        if seconds is None:
            seconds = self._timeout
        return self._worker.ask(seconds, verb, *arguments, **options)


class SamplerProcess(EngineProcess):
    """A `Sampler` of any other engine, which `open_engine` makes, in a process with so many
    `threads` on a CPU."""

    def __init__(
        self, open_engine: Callable[..., Sampler], threads: int, config: SamplerConfig, *unused
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        # Its process gets no object that waits in this one.
        own_config = dataclasses.replace(config, start=Start())
        deterministic = torch.are_deterministic_algorithms_enabled()
        entry = f"{__name__}:serve"
        super().__init__(
            "sampler", entry, environment, config, open_engine, own_config, deterministic
        )

    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        """See `Sampler.sample`. All completions come at once, so `on_response_end` is not
        called."""
        return self._ask("sample", list(prompts), sampling)


def send_tensors(connection: Connection, tensors: NamedTensors, dtype: torch.dtype) -> None:
    """A header and the bytes of each tensor, then None: one tensor on its way at a time."""
    for name, tensor in tensors:
        # Cast where it is, so that fewer bytes travel.
        local = tensor.detach().to(dtype).cpu().contiguous()
        connection.send((name, dtype, tuple(local.shape)))
        connection.send_bytes(local.flatten().view(torch.uint8).numpy().data)
    connection.send(None)


def received_tensors(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """What `send_tensors` sends, on the other side."""
    for name, dtype, shape in iter(connection.recv, None):
        yield name, torch.frombuffer(bytearray(connection.recv_bytes()), dtype=dtype).view(shape)


def _start(
    open_engine: Callable[..., Sampler], config: SamplerConfig, deterministic: bool
) -> Sampler:
    from alignment.model.loading import load_tokenizer, make_deterministic

    if deterministic:
        make_deterministic()
    return open_engine(config, load_tokenizer(config.model_path), None)


def _sample(
    sampler: Sampler, connection: Connection, prompts: Sequence[str], sampling: SamplingConfig
) -> Completions:
    return sampler.sample(prompts, sampling)


def _reload(sampler: Sampler, connection: Connection, version: int) -> None:
    sampler.load_weights(received_tensors(connection), version)


def _checksums(sampler: Sampler, connection: Connection, version: int) -> HeldWeights | None:
    if not hasattr(sampler, "weight_checksums"):
        return None
    return cast(ProvenSampler, sampler).weight_checksums(version)


VERBS: Mapping[str, Callable] = {
    "start": _start,
    "sample": _sample,
    "reload": _reload,
    "checksums": _checksums,
    "stop": close_sampler,
}


def serve(descriptor: int) -> None:
    """Be the process of a `SamplerProcess`."""
    answer_requests(descriptor, VERBS)
