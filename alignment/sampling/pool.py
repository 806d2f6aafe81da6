"""Opening a sampler: its engines draw together, in processes of their own, which can be stopped for
certain, and one that dies, hangs, or answers what cannot be completions is replaced. Requests,
answers and weights cross one pipe of each process."""

import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection

import torch

from alignment.core.records import SamplingConfig
from alignment.policy.policy import Policy
from alignment.sampling.arrival import HeldWeights, NamedTensors, load_proven
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


def open_sampler(
    engine: SamplerEngine,
    config: SamplerConfig,
    tokenizer,
    policy: Policy | None = None,
    in_process: bool = True,
) -> Sampler:
    """Start an engine for each of `config`'s devices, on each of its machines, or addresses. One
    alone may read the model of `policy`, whose weights it gets, in place. Without `in_process` each
    has a process, which can be ended while it draws."""
    # here, as a vLLM's process needs less of transformers
    from alignment.policy.loading import (
        load_config,
    )
    from alignment.policy.memory import release_memory

    release_memory()  # an engine refuses to start where less than its share of the GPU is free
    configs = engine_configs(config)
    start = import_object("--sampler", engine.open) if isinstance(engine.open, str) else engine.open
    alone = in_process and len(configs) == 1
    if alone and not engine.can_be_lost:
        return start(config, tokenizer, policy)
    if not alone and (config.url or not engine.can_be_lost):
        threads = torch.get_num_threads() * len(config.machines) // len(configs)
        start = functools.partial(SamplerProcess, start, max(1, threads))
    names = (
        f"engine {number} of {len(configs)} on {one.place}"
        for number, one in enumerate(configs, start=1)
    )
    weights = None if policy is None or not alone else policy.weights
    if weights:
        configs = [dataclasses.replace(configs[0], policy_device=policy.devices[0])]
    starts = (functools.partial(start, one, tokenizer, None) for one in configs)
    vocabulary = load_config(config.model_path).vocab_size
    return SamplerPool(
        dict(zip(names, starts, strict=True)), getattr(torch, config.dtype), vocabulary, weights
    )


def engine_configs(config: SamplerConfig) -> list[SamplerConfig]:
    """What each engine is started with: one for each address, or for each `tensor_parallel` devices
    of each machine."""
    if config.url:
        return [
            dataclasses.replace(config, url=url, machines=(None,)) for url in config.url.split(",")
        ]
    groups = zip(*[iter(config.devices)] * config.tensor_parallel, strict=True)
    engines = [
        dataclasses.replace(config, device=first, further_devices=tuple(rest))
        for first, *rest in groups
    ]
    return [
        dataclasses.replace(engine, machines=(machine,))
        for machine in config.machines
        for engine in engines
    ]


class SamplerPool:
    """A `Sampler` of engines that can be lost, one or several, which draw at the same time;
    `engines`: name -> function that makes it with the first weights. An engine's error has its name
    and closes the others.

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
        weights=None,
    ):
        self._starts, self.dtype, self._vocabulary, self._weights = (
            engines,
            dtype,
            vocabulary,
            weights,
        )
        self.restarts, self._version, self._closed = 0, None, False
        self._copies: list[tuple[str, torch.Tensor]] = []
        self._threads = ThreadPoolExecutor(len(engines))
        self._engines: dict[str, Sampler] = {}
        self._at_once(self._start)

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
        firsts = [
            len(prompts) * number // len(self._starts) for number in range(len(self._starts) + 1)
        ]
        places = dict(zip(self._starts, itertools.pairwise(firsts), strict=True))

        def draw(name: str) -> Completions:
            first, end = places[name]
            own, numbered = (
                prompts[first:end],
                dataclasses.replace(sampling, first_prompt=sampling.first_prompt + first),
            )

            def request(engine):
                return check_completions(
                    engine.sample(own, numbered), len(own), numbered, self._vocabulary
                )

            return self._ask(name, request) if own else []

        return [group for groups in self._at_once(draw) for group in groups]

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `Sampler.load_weights`. Several engines get them by the host's memory, since a policy
        may have to gather them."""
        self._version = version
        if self._weights is None:
            self._copies = []  # frees the memory of those before
            self._copies = [
                (name, tensor.detach().to(self.dtype).cpu()) for name, tensor in named_tensors
            ]
            named_tensors = self._copies
        self._at_once(
            lambda name: self._ask(
                name, lambda engine: load_proven(engine, named_tensors, version), repeat=False
            )
        )

    def sleep(self, keep_weights: bool) -> None:
        """See `sampler.put_to_sleep`."""
        self._at_once(
            lambda name: self._ask(name, lambda engine: put_to_sleep(engine, keep_weights))
        )

    def close(self) -> None:
        """Close all engines, also while other threads wait for their answers."""
        self._closed = True
        with ThreadPoolExecutor(len(self._starts)) as threads:
            list(threads.map(lambda engine: engine.close(), list(self._engines.values())))
        self._threads.shutdown()

    def _start(self, name: str) -> None:
        self._engines[name] = self._starts[name]()
        if self._closed:  # since another one could not start
            self._engines[name].close()

    def _ask(self, name: str, request: Callable[[Sampler], object], repeat: bool = True):
        """An engine's answer to a request, which a new engine is asked again, with `repeat`, where
        the first is lost."""
        try:
            return request(self._engines[name])
        except SamplerLost as error:
            if self._closed:
                raise
            lost = error
        print(f"the sampler is started again: {lost}", file=sys.stderr)
        self.restarts += 1
        self._engines[name].close()
        try:
            self._start(name)
            if self._version is not None:
                load_proven(
                    self._engines[name],
                    self._weights() if self._weights else self._copies,
                    self._version,
                )
            return request(self._engines[name]) if repeat else None
        except UserError as error:
            raise RunStopped(
                f"the sampler was lost ({lost}), and once more after it was started again: {error}"
            ) from None

    def _at_once(self, work: Callable[[str], object]) -> list:
        """What `work` returns for each engine, all at once; one alone in the calling thread, where
        a signal interrupts it."""
        if len(self._starts) == 1:
            return [work(name) for name in self._starts]
        name_of = {self._threads.submit(work, name): name for name in self._starts}
        try:
            for done in as_completed(name_of):
                done.result()
        except BaseException as error:
            self.close()
            if isinstance(error, UserError):
                raise type(error)(f"{name_of[done]}: {error}") from None
            raise
        return [future.result() for future in name_of]


def check_completions(
    completions: Completions, prompts: int, sampling: SamplingConfig, vocabulary: int
) -> Completions:
    """The completions. Raises `SamplerLost` for an answer that cannot be `sampling.n` of each of
    `prompts` prompts."""
    if len(completions) != prompts or any(len(group) != sampling.n for group in completions):
        sizes = [len(group) for group in completions]
        raise SamplerLost(f"it was asked for {prompts} x {sampling.n} completions and gave {sizes}")
    for completion in (completion for group in completions for completion in group):
        tokens, log_probs = len(completion.token_ids), len(completion.log_probs)
        if not 1 <= tokens <= sampling.max_new_tokens or log_probs != tokens:
            raise SamplerLost(
                f"a completion has {tokens} of {sampling.max_new_tokens} tokens, and {log_probs}"
                " log-probs"
            )
        if not all(0 <= token < vocabulary for token in completion.token_ids):
            raise SamplerLost(f"a completion has tokens outside the vocabulary of {vocabulary}")
        # a bfloat16 sum may pass 0
        if not all(-math.inf < log_prob <= 1e-3 for log_prob in completion.log_probs):
            raise SamplerLost("a completion has log-probs that are no logarithms of probabilities")
    return completions


class EngineProcess:
    """A sampler whose engine is a child process that runs `entry` (by `answer_requests`). Raises
    `UserError` where it cannot start with the arguments `start`; closes one that breaks, dies or is
    silent for `config.timeout` seconds (`SamplerLost`)."""

    def __init__(
        self, name: str, entry: str, environment: Mapping[str, str], config: SamplerConfig, *start
    ):
        self.restarts, self.policy_version, self.dtype = (
            0,
            config.policy_version,
            getattr(torch, config.dtype),
        )
        self._timeout = config.timeout
        start_process = config.machines[0].start if config.machines[0] else ChildProcess
        self._worker = start_process(f"{name} process on {config.place}", entry, environment)
        try:
            config.start.wait_for_memory(self._worker)
            self._ask(
                "start", *start, seconds=max(config.timeout, START_SECONDS), send=self._prepare
            )
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
        self._ask(
            "reload",
            version,
            send=lambda connection: send_tensors(connection, named_tensors, self.dtype),
        )
        self.policy_version = version

    def weight_checksums(self, version: int) -> HeldWeights | None:
        return self._ask("checksums", version)

    def close(self) -> None:
        """End the worker and whatever it started. Also happens when the sampler is dropped and at
        exit."""
        self._worker.close()

    def _ask(self, verb: str, *arguments, **options):
        return self._worker.ask(options.pop("seconds", self._timeout), verb, *arguments, **options)


class SamplerProcess(EngineProcess):
    """A `Sampler` of any other engine, which `open_engine` makes, in a process with so many
    `threads` on a CPU."""

    def __init__(
        self, open_engine: Callable[..., Sampler], threads: int, config: SamplerConfig, *unused
    ):
        # Its process gets no object that waits in this one.
        own = dataclasses.replace(config, start=Start())
        start = open_engine, own, torch.are_deterministic_algorithms_enabled()
        super().__init__(
            "sampler",
            f"{__name__}:serve",
            {**os.environ, "OMP_NUM_THREADS": str(threads)},
            config,
            *start,
        )

    def sample(self, prompts: Sequence[str], sampling: SamplingConfig) -> Completions:
        return self._ask("sample", list(prompts), sampling)


def send_tensors(connection: Connection, tensors: NamedTensors, dtype: torch.dtype) -> None:
    """A header and the bytes of each tensor, then None: one tensor on its way at a time."""
    for name, tensor in tensors:
        # cast where it is, so that fewer bytes travel
        local = tensor.detach().to(dtype).cpu().contiguous()
        connection.send((name, dtype, tuple(local.shape)))
        connection.send_bytes(memoryview(local.flatten().view(torch.uint8).numpy()))
    connection.send(None)


def received_tensors(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """What `send_tensors` sends, on the other side."""
    for name, dtype, shape in iter(connection.recv, None):
        yield name, torch.frombuffer(bytearray(connection.recv_bytes()), dtype=dtype).view(shape)


def _start(
    open_engine: Callable[..., Sampler], config: SamplerConfig, deterministic: bool
) -> Sampler:
    from alignment.policy.loading import load_tokenizer, make_deterministic

    if deterministic:
        make_deterministic()
    return open_engine(config, load_tokenizer(config.model_path), None)


VERBS = {
    "start": _start,
    "sample": lambda sampler, _, prompts, sampling: sampler.sample(prompts, sampling),
    "reload": lambda sampler, connection, version: sampler.load_weights(
        received_tensors(connection), version
    ),
    "checksums": lambda sampler, _, version: getattr(
        sampler, "weight_checksums", lambda version: None
    )(version),
    "stop": lambda sampler: sampler.close(),
}
serve = functools.partial(answer_requests, verbs=VERBS)  # Be the process of a `SamplerProcess`.
