"""Opening a sampler, whose engine is replaced where it dies, hangs, or answers what cannot be completions."""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

from alignment.core.records import Completion, SamplingConfig
from alignment.policy.loading import load_config
from alignment.policy.memory import release_memory
from alignment.policy.policy import Policy
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import OnResponseEnd, Sampler, SamplerConfig, SamplerEngine, SamplerLost
from alignment.system.errors import RunStopped, UserError
from alignment.system.registry import import_object


def open_sampler(
    engine: SamplerEngine,
    config: SamplerConfig,
    tokenizer,
    policy: Policy | None = None,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
) -> Sampler:
    """Start a sampler. `policy` is the one whose weights it will be given: an engine may read the policy's own model in place.
    `weights` gives the present weights to an engine that replaces a lost one; by default they are the policy's."""
    release_memory()  # an engine refuses to start where less than its share of the GPU is free
    start = import_object("--sampler", engine.open) if isinstance(engine.open, str) else engine.open
    if not engine.can_be_lost:
        return start(config, tokenizer, policy)
    weights = weights or (None if policy is None else policy.weights)
    vocabulary = load_config(config.model_path).vocab_size
    return RestartingSampler(functools.partial(start, config, tokenizer, None), weights, vocabulary)


class RestartingSampler:
    """A `Sampler` that replaces a lost engine once a request: the new one gets the weights that the lost one had, and the same
    request, which gives the same completions. `start` makes an engine with the weights that sampling began with; `weights`
    gives the present ones, and is None where they never change. Raises `RunStopped` where the new engine is lost as well."""

    def __init__(
        self, start: Callable[[], Sampler], weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None, vocabulary: int
    ):
        self._start, self._weights, self._vocabulary = start, weights, vocabulary
        self._engine = start()
        self._version: int | None = None
        self.restarts = 0

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def sample(
        self, prompts: Sequence[str], sampling: SamplingConfig, on_response_end: OnResponseEnd | None = None
    ) -> list[list[Completion]]:
        """See `Sampler.sample`; an engine in another process gives all of its answer at once."""
        try:
            return self._sample(prompts, sampling)
        except SamplerLost as error:
            return self._restart(error, lambda: self._sample(prompts, sampling))

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `Sampler.load_weights`."""
        self._version = version
        try:
            load_proven(self._engine, named_tensors, version)
        except SamplerLost as error:
            self._restart(error)

    def close(self) -> None:
        self._engine.close()

    def _sample(self, prompts: Sequence[str], sampling: SamplingConfig) -> list[list[Completion]]:
        completions = self._engine.sample(prompts, sampling)
        check_completions(completions, len(prompts), sampling, self._vocabulary)
        return completions

    def _restart(self, lost: SamplerLost, request: Callable = lambda: None):
        """Start a new engine with the weights of the lost one; returns its answer to the request that was left open."""
        print(f"the sampler is started again: {lost}", file=sys.stderr)
        self.restarts += 1
        self._engine.close()
        try:
            self._engine = self._start()
            if self._version is not None:
                load_proven(self._engine, self._weights(), self._version)
            return request()
        except (SamplerLost, UserError) as error:
            raise RunStopped(f"the sampler was lost ({lost}), and once more after it was started again: {error}") from None


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
