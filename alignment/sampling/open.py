"""Opening a sampler: its engine, and what replaces the engine where it can be lost."""

import functools
from collections.abc import Callable, Iterable

import torch

from alignment.policy.loading import load_config
from alignment.policy.policy import Policy
from alignment.sampling.restarts import RestartingSampler
from alignment.sampling.sampler import Sampler, SamplerConfig, SamplerEngine
from alignment.system.registry import import_object


def open_sampler(
    engine: SamplerEngine,
    config: SamplerConfig,
    tokenizer,
    policy: Policy | None = None,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
) -> Sampler:
    """Start a sampler.

    `policy` is the one whose weights it will be given: an engine may read the policy's own model in place. `weights` gives the
    present weights to an engine that takes the place of a lost one; by default they are the policy's.
    """
    start = import_object("--sampler", engine.open) if isinstance(engine.open, str) else engine.open
    if not engine.can_be_lost:
        return start(config, tokenizer, policy)
    weights = weights or (None if policy is None else policy.weights)
    return RestartingSampler(
        functools.partial(start, config, tokenizer, None), weights, load_config(config.model_path).vocab_size
    )
