"""Flags of sampling: the engine, the distribution, and the rollouts of RL. The fields of `Flag`
(flag.py) say what `group`, `setting`, `bookkeeping` and `changeable` mean."""

from dataclasses import dataclass
from typing import Literal

from alignment.config.flag import flag
from alignment.rollouts.config import TrainOn


@dataclass(frozen=True)
class EngineFlags:
    """What draws responses."""

    sampler: str = flag("auto", group="rollouts", setting=True)
    """Sampling engine: transformers, vllm, or your own as package.module:name; auto: vllm if
    installed, else transformers."""


@dataclass(frozen=True)
class SamplingFlags:
    """How responses are drawn, in training and evaluation."""

    sampler_timeout: float = flag(3600.0, group="rollouts", above=0, changeable=True)
    """Seconds after which a process of an engine or of the reference model is hung."""
    max_new_tokens: int = flag(48, group="rollouts", at_least=1)
    """Longest response, in tokens."""
    sampling_temperature: float = flag(1.0, group="rollouts", at_least=0, zero="greedy")
    """Softmax temperature of training and evaluation samples; 0 is greedy (evaluation only)."""
    sampling_top_p: float = flag(1.0, group="rollouts", above=0, at_most=1)
    """Nucleus of training and evaluation samples: the likeliest tokens that have this
    probability."""
    sampling_top_k: int = flag(0, group="rollouts", at_least=0, zero="all")
    """Likeliest tokens that training and evaluation samples are drawn from, before the nucleus; 0:
    all."""
    stop: tuple[str, ...] = flag((), group="rollouts", swept=False)
    """Strings that end a response, in training and evaluation, beside the end token, which is
    trained where it was sampled; none: the end token alone. By default the task's own."""


@dataclass(frozen=True)
class RolloutSizeFlags:
    """How many responses a step of RL has."""

    group_size: int = flag(8, group="rollouts", above=0)
    """Responses sampled for each prompt."""
    prompts_per_rollout: int = flag(32, group="rollouts", above=0)
    """Prompts sampled at each step; a rollout has prompts x group size responses."""
    train_on: TrainOn = flag("samples", group="rollouts")
    """What updates learn from: the policy's samples, or the task's worked solutions of the same
    problems, which is SFT with RL's steps and evaluations."""


@dataclass(frozen=True)
class StalenessFlags:
    """Where rollouts are sampled, and how old their sampler's weights may be."""

    rollouts: Literal["sync", "async"] = flag("sync", group="rollouts", setting=True)
    """async: a sampler in its own process works ahead, with weights some steps old."""
    max_staleness: int | None = flag(None, group="rollouts", at_least=0)
    """How many steps old, at most and as a rule; by default 1 with --rollouts async. 0: sync."""
    sync_every: int = flag(1, group="rollouts", at_least=1)
    """Steps between the versions of the weights that such a sampler gets; at most --max_staleness +
    1."""
    sampler_url: str = flag("", group="rollouts", bookkeeping=True, setting=True)
    """vLLM server to sample from, http://HOST:PORT, or several, with commas; see
    docs/asynchronous.md."""
    max_sampler_mismatch: float = flag(
        0.1, group="rollouts", above=0, bookkeeping=True, changeable=True
    )
    """Mean nats a token between sampler's and trainer's log-probs, above which to stop."""
