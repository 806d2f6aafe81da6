"""Opening a sampler: its engines draw together, and one that dies, hangs, or answers what cannot be completions is replaced."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

from alignment.core.records import Completion, SamplingConfig
from alignment.policy.loading import load_config
from alignment.policy.memory import release_memory
from alignment.policy.policy import Policy
from alignment.sampling.arrival import load_proven
from alignment.sampling.process import SamplerProcess
from alignment.sampling.sampler import OnResponseEnd, Sampler, SamplerConfig, SamplerEngine, SamplerLost
from alignment.system.errors import RunStopped, UserError
from alignment.system.registry import import_object

Answer = TypeVar("Answer")
Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def open_sampler(
    engine: SamplerEngine, config: SamplerConfig, tokenizer, policy: Policy | None = None, in_process: bool = True
) -> Sampler:
    """Start an engine for each of `config`'s devices, on each of its machines, or addresses. One alone may read the model of
    `policy`, whose weights it gets, in place. Without `in_process` each has a process, which can be ended while it draws."""
    release_memory()  # an engine refuses to start where less than its share of the GPU is free
    configs, start = engine_configs(config), engine.open
    if isinstance(start, str):
        start = import_object("--sampler", start)
    alone = in_process and len(configs) == 1
    if alone and not engine.can_be_lost:
        return start(config, tokenizer, policy)
    if not alone and (config.url or not engine.can_be_lost):
        threads = torch.get_num_threads() * len(config.machines) // len(configs)
        start = functools.partial(SamplerProcess, engine, max(1, threads))
    names = (f"engine {number} of {len(configs)} on {one.place}" for number, one in enumerate(configs, start=1))
    weights = None if policy is None or not alone else policy.weights
    if weights:
        configs = [dataclasses.replace(configs[0], policy_device=policy.devices[0])]
    starts = (functools.partial(start, one, tokenizer, None) for one in configs)
    vocabulary = load_config(config.model_path).vocab_size
    return SamplerPool(dict(zip(names, starts, strict=True)), getattr(torch, config.dtype), vocabulary, weights)


def engine_configs(config: SamplerConfig) -> list[SamplerConfig]:
    """What each engine is started with: one for each address, or for each `tensor_parallel` devices of each machine."""
    if config.url:
        return [dataclasses.replace(config, url=url, machines=(None,)) for url in config.url.split(",")]
    groups = zip(*[iter(config.devices)] * config.tensor_parallel, strict=True)
    engines = [dataclasses.replace(config, device=first, further_devices=tuple(rest)) for first, *rest in groups]
    return [dataclasses.replace(engine, machines=(machine,)) for machine in config.machines for engine in engines]


class SamplerPool:
    """A `Sampler` of engines that can be lost, one or several, which draw at the same time.

    Of P prompts engine k of N draws those from number P * k // N up to the next one's first. A response's random numbers follow
    from its prompt's number: neither the number nor the speed of engines changes a completion, but for the rounding of what
    shares a batch. All engines take all weights, each with its own proof of arrival (`load_proven`).

    A lost engine is replaced once a request: the new one gets the same weights and the same request, which gives the same
    completions. `weights` gives the weights; where it is None, a copy in the host's memory does. Raises `RunStopped` where the
    new engine is lost as well.

    `engines`: name -> function that makes it with the first weights. An engine's error has its name and closes the others."""

    def __init__(
        self, engines: Mapping[str, Callable[[], Sampler]], dtype: torch.dtype, vocabulary: int, weights: Weights | None = None
    ):
        self._starts, self.dtype, self._vocabulary, self._weights = engines, dtype, vocabulary, weights
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
        self, prompts: Sequence[str], sampling: SamplingConfig, on_response_end: OnResponseEnd | None = None
    ) -> list[list[Completion]]:
        """See `Sampler.sample`; an engine in another process gives all of its answer at once."""
        firsts = [len(prompts) * number // len(self._starts) for number in range(len(self._starts) + 1)]
        places = dict(zip(self._starts, zip(firsts, firsts[1:], strict=False), strict=True))

        def draw(name: str) -> list[list[Completion]]:
            first, end = places[name]
            numbered = dataclasses.replace(sampling, first_prompt=sampling.first_prompt + first)
            return self._ask(name, lambda engine: self._sample(engine, prompts[first:end], numbered)) if end > first else []

        return [group for groups in self._at_once(draw) for group in groups]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `Sampler.load_weights`. Several engines get them by the host's memory, since a policy may have to gather them."""
        self._version = version
        if self._weights is None:
            self._copies = []  # frees the memory of those before
            self._copies = [(name, tensor.detach().to(self.dtype).cpu()) for name, tensor in named_tensors]
            named_tensors = self._copies
        self._at_once(lambda name: self._ask(name, lambda engine: load_proven(engine, named_tensors, version), repeat=False))

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

    def _sample(self, engine: Sampler, prompts: Sequence[str], sampling: SamplingConfig) -> list[list[Completion]]:
        completions = engine.sample(prompts, sampling)
        check_completions(completions, len(prompts), sampling, self._vocabulary)
        return completions

    def _ask(self, name: str, request: Callable[[Sampler], Answer], repeat: bool = True) -> Answer | None:
        """An engine's answer to a request, which a new engine is asked again, with `repeat`, where the first is lost."""
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
                load_proven(self._engines[name], self._weights() if self._weights else self._copies, self._version)
            return request(self._engines[name]) if repeat else None
        except UserError as error:
            raise RunStopped(f"the sampler was lost ({lost}), and once more after it was started again: {error}") from None

    def _at_once(self, work: Callable[[str], Answer]) -> list[Answer]:
        """What `work` returns for each engine, all at once; one alone in the calling thread, where a signal interrupts it."""
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
    completions: Sequence[Sequence[Completion]], prompts: int, sampling: SamplingConfig, vocabulary: int
) -> None:
    """Raise `SamplerLost` for an answer that cannot be `sampling.n` completions of each of `prompts` prompts."""
    if len(completions) != prompts or any(len(group) != sampling.n for group in completions):
        sizes = [len(group) for group in completions]
        raise SamplerLost(f"it was asked for {prompts} x {sampling.n} completions and gave {sizes}")
    for completion in (completion for group in completions for completion in group):
        tokens, log_probs = len(completion.token_ids), len(completion.log_probs)
        if not 1 <= tokens <= sampling.max_new_tokens or log_probs != tokens:
            raise SamplerLost(f"a completion has {tokens} of {sampling.max_new_tokens} tokens, and {log_probs} log-probs")
        if not all(0 <= token < vocabulary for token in completion.token_ids):
            raise SamplerLost(f"a completion has tokens outside the vocabulary of {vocabulary}")
        if not all(-math.inf < log_prob <= 1e-3 for log_prob in completion.log_probs):  # a bfloat16 sum may pass 0
            raise SamplerLost("a completion has log-probs that are no logarithms of probabilities")
