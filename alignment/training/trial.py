"""A loss and an advantage of the user's own, tried on made-up responses before anything loads."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from alignment.core.advantages import AdvantageConfig, AdvantageInputs, advantage_inputs
from alignment.core.losses import LOSSES, LossConfig, LossInputs, micro_batch_loss
from alignment.core.state_tree import split_tensors
from alignment.system.errors import UserError, in_one_line

WEIGHTS = ("advantages", "raw_rewards", None)
LOGGED = {"ratio", "clipped", "kl", "weight"}  # what `micro_batch_loss` sums over tokens


@dataclass(frozen=True)
class MadeUp:
    """Made-up responses: what the user reads of them, lengths [B] of prompts and of responses in
    tokens, and how far the policy is from the one that sampled, in nats a token."""

    description: str
    prompts: Sequence[int]
    responses: Sequence[int]
    distance: float
    of_tokens: bool = False
    """Whether advantages are those of tokens, as a teacher's are."""


TRIALS = (
    MadeUp("four responses", (1, 2, 3, 1), (5, 3, 1, 4), 0.3),
    MadeUp(
        "four responses to which the policy gives the old probability",
        (1, 2, 3, 1),
        (5, 3, 1, 4),
        0.0,
    ),
    MadeUp("one response", (2,), (3,), 0.3),
)


# With --teacher.
TRIAL_OF_TOKENS = MadeUp(
    "four responses whose tokens have advantages of their own (--teacher)",
    (1, 2, 3, 1),
    (5, 3, 1, 4),
    0.3,
    of_tokens=True,
)


def try_loss(name: str, config: LossConfig, has_teacher: bool = False) -> None:
    """Compute the loss that --loss_type `name` names on made-up responses, with its gradient; and
    where it `has_teacher`, with advantages [batch, sequence]. Raises `UserError`, with the line of
    the user's file where there is one, if it raises an exception or returns what no update can be
    made of."""
    loss = config.loss
    if loss.weight not in WEIGHTS:
        raise UserError(
            f"--loss_type {name}: its weight is {loss.weight!r}, and must be one of {WEIGHTS}"
        )
    if loss.at_ratio_one not in ("", *LOSSES):
        raise UserError(
            f"--loss_type {name}: its at_ratio_one {loss.at_ratio_one!r} is none of"
            f" {', '.join(LOSSES)}"
        )
    trials = (*TRIALS, TRIAL_OF_TOKENS) if has_teacher else TRIALS
    for trial in trials:
        try:
            with warnings.catch_warnings(action="ignore"):
                fault = next(faults(config, trial), "")
            if fault:
                fault += definition(loss.function)
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            fault = in_one_line(error)
        if fault:
            raise UserError(
                f"--loss_type {name}: {fault}. This was for {trial.description}, made up;"
                " docs/extending.md says what a loss returns"
            )


def try_advantage(name: str, config: AdvantageConfig) -> None:
    """Compute the advantages that --advantage `name` names of two made-up steps. Raises
    `UserError`, with the line of the user's file where there is one, if it raises an exception or
    returns what no update or checkpoint can be made of."""
    try:
        with warnings.catch_warnings(action="ignore"):
            fault = next(faults_of_advantage(config), "")
        if fault:
            fault += definition(config.estimator.function)
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        fault = in_one_line(error)
    if fault:
        raise UserError(
            f"--advantage {name}: {fault}. This was for made-up rewards; docs/extending_settings.md"
            " says what an advantage returns"
        )


def faults_of_advantage(config: AdvantageConfig) -> Iterator[str]:
    """What is wrong with the advantages of made-up rewards, as words that follow its name; only the
    first is meant to be read."""
    state: Any = None
    for step in (1, 2):
        inputs = made_up_advantage_inputs(config, step)
        before = inputs.rewards_PG.clone()
        returned = config.estimator.function(inputs, copy.deepcopy(state))
        if not torch.equal(before, inputs.rewards_PG):
            yield "it writes into its inputs (rewards_PG): give its result a tensor of its own"
        if not isinstance(returned, tuple) or len(returned) != 2:
            yield f"it returns {described(returned)}, not (advantages, state)"
        advantages_PG, next_state = returned
        shape = tuple(before.shape)
        if not has_shape(advantages_PG, shape) or not advantages_PG.is_floating_point():
            yield (
                f"its advantages are {described(advantages_PG)}, and must be a tensor of"
                f" {list(shape)}, a number for every response of every problem"
            )
        counted_PG = inputs.counted_PG
        if not torch.isfinite(advantages_PG[counted_PG]).all():
            yield "its advantages are not finite"
        silent_G = advantages_PG[0][counted_PG[0]]
        if silent_G.any() and not config.estimator.silent_groups:
            yield (
                "a group of equal rewards has other advantages than 0: set silent_groups=True in"
                " its Advantage"
            )
        try:
            split_tensors(next_state, {})
        except TypeError as error:
            yield str(error)
        state = next_state


def made_up_advantage_inputs(config: AdvantageConfig, step: int) -> AdvantageInputs:
    """Three groups: one of equal rewards, one of rewards 1 and 0 in turn, one whose last response
    does not count."""
    place_G = torch.arange(config.group_size)
    alternating_G = (place_G % 2 == 0).float()
    rewards_PG = torch.stack([torch.ones_like(alternating_G), alternating_G, 1 - alternating_G])
    counted_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
    counted_PG[2, -1] = False
    problems: list[str] = []
    for problem in ("a", "b", "c"):
        problems += [problem] * config.group_size
    return advantage_inputs(
        rewards_PG.reshape(-1, 1),
        counted_PG.reshape(-1, 1),
        config,
        lengths=(place_G.repeat(3) + 1).tolist(),
        problems=problems,
        step=step,
    )


def faults(config: LossConfig, trial: MadeUp) -> Iterator[str]:
    """What is wrong with the loss of made-up responses, as words that follow its name.

    Only the first is meant to be read: what it is of may break the tests for the others."""
    inputs = made_up_inputs(config, trial)
    before = {
        name: value.detach().clone()
        for name, value in vars(inputs).items()
        if isinstance(value, torch.Tensor)
    }
    returned = config.loss.function(inputs)
    # Other losses, later steps and what is logged read the same tensors.
    for name, value in before.items():
        if not torch.equal(getattr(inputs, name), value):
            yield f"it writes into its inputs ({name}): give what it computes a tensor of its own"
    yield from faults_of_returned(returned, tuple(inputs.log_probs.shape))
    loss_BT, _ = returned
    if not torch.isfinite(loss_BT[inputs.mask]).all():
        yield "its loss is not finite"
    if not loss_BT.requires_grad:
        yield "its loss has no gradient: it does not depend on log_probs, or detaches them"
    gradients_BT: list[torch.Tensor] = []
    inputs.log_probs.register_hook(gradients_BT.append)
    total, _ = micro_batch_loss(inputs, float(len(trial.responses)))
    total.backward()
    if not gradients_BT:
        yield "its loss has no gradient to log_probs"
    if not torch.isfinite(gradients_BT[0]).all():
        yield "its gradient is not finite"


def faults_of_returned(returned: Any, shape: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with the shapes and types of what a loss returned, for log-probs of `shape`."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        yield (
            f"it returns {described(returned)}, not (loss of every token, what to log of every"
            " token)"
        )
    loss_BT, logged = returned
    if not has_shape(loss_BT, shape) or not loss_BT.is_floating_point():
        yield (
            f"its loss is {described(loss_BT)}, and must be a tensor of {list(shape)}, a number for"
            " every token"
        )
    if not isinstance(logged, Mapping):
        yield f"what it logs is {described(logged)}, and must be a dict of tensors"
    for key in LOGGED & logged.keys():
        if not has_shape(logged[key], shape):
            yield (
                f"what it logs as {key!r} is {described(logged[key])}, and must be a tensor of"
                f" {list(shape)}"
            )
    if ("ratio" in logged) != ("clipped" in logged):
        yield "it logs one of 'ratio' and 'clipped', which go together"
    if "clipped" in logged and logged["clipped"].dtype != torch.bool:
        yield (
            f"what it logs as 'clipped' is {described(logged['clipped'])}, and must be true or"
            " false for every token"
        )


def has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is a tensor of that shape."""
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape


def made_up_inputs(config: LossConfig, trial: MadeUp) -> LossInputs:
    """What a micro-batch gives a loss: log-probs are 0 outside the mask, rewards are 1 and 0 in
    turn."""
    generator = torch.Generator().manual_seed(0)
    number = len(trial.responses)
    # The label at place t is token t + 1, so a response of a prompt of p tokens begins at p - 1.
    prompts_B1 = torch.tensor(trial.prompts)[:, None]
    responses_B1 = torch.tensor(trial.responses)[:, None]
    width = int((prompts_B1 + responses_B1).max()) - 1
    place_T = torch.arange(width)
    mask_BT = (place_T >= prompts_B1 - 1) & (place_T < prompts_B1 - 1 + responses_B1)
    probs_BT = torch.empty(number, width).uniform_(0.05, 0.95, generator=generator)
    log_probs_BT = probs_BT.log().where(mask_BT, 0)

    def draw_other_policy() -> torch.Tensor:
        """Log-probs [B, T] of another policy."""
        moved_BT = log_probs_BT + trial.distance * torch.randn(number, width, generator=generator)
        return moved_BT.clamp(max=0).where(mask_BT, 0)

    old_BT = draw_other_policy()
    sampler_BT = draw_other_policy()
    reference_BT = draw_other_policy() if config.beta else None
    rewards_B1 = (torch.arange(number)[:, None] % 2 == 0).float()
    advantages = rewards_B1 - 0.5
    if trial.of_tokens:
        advantages = advantages + 0.1 * (draw_other_policy() - log_probs_BT)
    return LossInputs(
        config,
        log_probs_BT.requires_grad_(),
        mask_BT,
        raw_rewards=rewards_B1,
        advantages=advantages,
        old_log_probs=old_BT,
        reference_log_probs=reference_BT,
        sampler_log_probs=sampler_BT,
        entropies=torch.rand(number, width, generator=generator, requires_grad=True),
        selected=place_T.expand_as(mask_BT) % 2 == 0,
        selected_share=0.5,
    )


def described(value: object) -> str:
    """A value in a few words: a tensor's shape and type, else what it is."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {list(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} ({' '.join(str(value).split())[:60]})"


def definition(function: object) -> str:
    """ " (FILE:LINE)" of where a function is defined; empty for other callables."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
