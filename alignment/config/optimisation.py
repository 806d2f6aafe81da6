"""Optimiser, learning rate, and how rollouts become updates."""

from dataclasses import dataclass

from alignment.config.flag import Extra, flag
from alignment.core.schedules import SCHEDULES
from alignment.policy.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class StepFlags:
    """How long RL trains."""

    num_steps: int = flag(60, group="optimisation", above=0, changeable=True)
    """Rollout steps."""


@dataclass(frozen=True)
class MiniBatchFlags:
    """How rollouts become updates."""

    epochs_per_rollout: int = flag(1, group="optimisation", above=0)
    """Passes over each rollout."""
    train_mini_batch_size: int = flag(0, group="optimisation", at_least=0, zero="all")
    """Responses an update, at most; 0: the whole rollout. Several updates need old log-probs."""


@dataclass(frozen=True)
class OptimizerFlags:
    """What makes an update, in RL and in SFT."""

    micro_batch_tokens: int = flag(
        0, group="optimisation", at_least=0, zero="what fits", bookkeeping=True
    )
    """Tokens computed at once, in one micro-batch or several, a prompt of several responses counted
    once; 0: what the free memory allows, up to where more is no faster. Changes memory and speed,
    never the gradient."""
    optimizer: str = flag(
        "adamw",
        group="optimisation",
        choices=tuple(OPTIMIZERS),
        needs=Extra("torchao", "torchao", only_for="adamw_8bit"),
        setting=True,
    )
    """adamw, whose moments take 8 bytes a parameter; adamw_cpu_offload: the same, moments and step
    on the CPU; adamw_8bit: moments of 2 bytes a parameter, rounded (extra "torchao"); muon: Muon
    for hidden matrices, AdamW for all else."""
    adam_beta1: float = flag(0.9, group="optimisation", at_least=0, below=1)
    """AdamW's decay of the mean of gradients an update."""
    adam_beta2: float = flag(0.95, group="optimisation", at_least=0, below=1)
    """AdamW's decay of the mean of squared gradients an update; much code has torch's 0.999."""
    adam_eps: float = flag(1e-8, group="optimisation", above=0)
    """What AdamW adds to the root of that second mean."""
    gradient_checkpointing: bool = flag(
        False, group="optimisation", bookkeeping=True, changeable=True, setting=True
    )
    """Compute each layer's activations again in backward, which takes a third more time and much
    less memory. Without it layers are computed again only where memory is short: first the inside
    of MLPs, in as few layers as suffice; whole layers where one row would still not fit."""


@dataclass(frozen=True)
class LearningRateFlags:
    """The learning rate of RL."""

    learning_rate: float = flag(2e-4, group="optimisation", at_least=0, zero="trains nothing")
    """Peak learning rate."""
    warmup_steps: int = flag(5, group="optimisation", at_least=0)
    """Updates of linear rise of the learning rate."""
    lr_schedule: str = flag("constant", group="optimisation", choices=tuple(SCHEDULES))
    """The learning rate after that: constant, or a linear or cosine fall to a tenth of it at the
    last update, for which a resumed run may not change --num_steps."""


@dataclass(frozen=True)
class WeightLimitFlags:
    """What keeps weights and gradients small, in RL and in SFT."""

    weight_decay: float = flag(0.0, group="optimisation", at_least=0)
    """AdamW weight decay."""
    max_grad_norm: float = flag(1.0, group="optimisation", at_least=0, zero="no limit")
    """Gradient norm above which the gradient is scaled down; 0: it never is."""


@dataclass(frozen=True)
class SFTStepFlags:
    """How long SFT trains, and on how much at a time."""

    num_steps: int = flag(1000, group="optimisation", above=0, changeable=True)
    """Optimiser steps."""
    batch_size: int = flag(64, group="optimisation", above=0)
    """Sequences an optimiser step."""


@dataclass(frozen=True)
class SFTLearningRateFlags:
    """The learning rate of SFT."""

    learning_rate: float = flag(3e-3, group="optimisation", at_least=0, zero="trains nothing")
    """Peak learning rate."""
    warmup_steps: int = flag(50, group="optimisation", at_least=0)
    """Steps of linear rise of the learning rate."""
    lr_schedule: str = flag("linear", group="optimisation", choices=tuple(SCHEDULES))
    """The learning rate after that: constant, or a linear or cosine fall to a tenth of it at the
    last step."""
