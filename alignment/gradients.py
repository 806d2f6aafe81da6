"""A microscope for gradients: on one frozen set of rollouts, what does each estimator's gradient
look like?

    uv run -m alignment.gradients --preset tiny
    uv run -m alignment.gradients --sweep_file arms.toml

The second says which of a sweep's arms have the same gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from alignment.ablation.design import differing, named_arms, refuse_incomparable_arms
from alignment.args import GradientsArgs, RLArgs, from_preset, parse
from alignment.builders.announcements import announce_start
from alignment.builders.checks import check_rl
from alignment.config.settings import root_flag
from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LOSSES, LossConfig
from alignment.system.errors import UserError, run_command
from alignment.system.terminal import make_console, make_table

if TYPE_CHECKING:
    import torch

    from alignment.core.records import Rollout
    from alignment.policy.policy import Policy
    from alignment.rollouts.config import RolloutConfig, UpdateConfig
    from alignment.training.microscope import Estimator, Statistics

# what the numbers of each table mean, printed below it
ARMS_NOTE = (
    "apart: the length of the difference of two gradients by the longer one's, on one frozen set of"
    " rollouts, of the first update and, where weights matter that have moved, of a second one. A"
    " cosine of 1 beside it is a difference of length, most of which Adam takes away. What acts"
    " elsewhere, as in sampling or by more updates, is not looked at."
)
STATISTICS_NOTE = (
    "norm and spread are of the whole batch's gradient; SNR, its squared expectation over its"
    " variance, is what may be compared between estimators, since an optimiser like Adam takes the"
    " scale away. cosine: a prompt's gradient with the batch's. ESS: how many equally weighted"
    " responses would say as much. silent: prompts without any gradient."
)
# of the longer gradient's length; bfloat16 rounds its numbers by up to four times as much, but
# alike in all arms
SAME = 1e-3


def main() -> None:
    args = parse(GradientsArgs)
    console = make_console()
    arms: dict[str, RLArgs] = {}
    if args.sweep_file:
        arms = named_arms(args.sweep_file, args.preset, {})
    if len(arms) == 1:
        raise UserError(
            f"--sweep_file {args.sweep_file}: it has one arm, and none to compare it with"
        )
    sizes = {arm.group_size for arm in arms.values()} or set(args.group_size)
    largest = max(sizes)
    if any(largest % size for size in sizes):
        fault = "every group_size must divide the largest"
        raise UserError(f"--sweep_file {args.sweep_file}: {fault}")
    # one set of rollouts, which smaller groups are parts of
    sampled_once = {
        "max_refills": 0,
        "rollouts": "sync",
        "max_staleness": None,
        "sync_every": 1,
        "group_size": largest,
        "prompts_per_rollout": args.prompts,
        "seed": args.seed,
        "output_dir": args.output_dir,
    }
    runs = [dataclasses.replace(arm, **sampled_once) for arm in arms.values()]
    if not runs:
        runs = [from_preset(RLArgs, args.preset, **sampled_once)]
    refuse_incomparable_arms(arms)
    for rl in reversed(runs):
        check_rl(rl)
    first = runs[0]  # it samples
    if arms:
        policy, collated = frozen(first, f"--sweep_file {args.sweep_file}", len(arms), console)
        print_arms(arms, policy, collated, console)
    else:
        print_statistics(look(first, args, console), console)


def look(rl: RLArgs, args: GradientsArgs, console: Console) -> list[tuple[Estimator, Statistics]]:
    """The statistics of each estimator on sampled rollouts. Raises `UserError` as `frozen` does."""
    from rich.progress import track

    from alignment.training.microscope import estimators, inspect

    planned = list(estimators(args.group_size, args.updates))
    policy, collated = frozen(rl, f"--prompts {args.prompts}", args.prompts, console)
    inspected = inspect(policy, collated(rl.rollout_config), planned, rl.update_config)
    return list(track(inspected, "looking", total=len(planned), console=console, transient=True))


def frozen(
    rl: RLArgs, flag: str, gradients: int, console: Console
) -> tuple[Policy, Callable[[RolloutConfig], Rollout]]:
    """The policy at its warm start, and what makes a `Rollout` of its scored responses by a
    `RolloutConfig`. Raises `UserError` where no response is right, or where the memory is too small
    for twice so many `gradients`, of which `flag` speaks."""
    from alignment.builders.policies import make_policy
    from alignment.builders.run_plan import plan_engine, plan_run
    from alignment.builders.samplers import make_sampler
    from alignment.builders.warm_start import prepare_warm_start
    from alignment.core.tokens import pad_token_id
    from alignment.model.loading import load_tokenizer
    from alignment.rollouts.source import collate_groups, open_source
    from alignment.training.microscope import refuse_too_many_gradients

    announce_start(rl, console)
    base = prepare_warm_start(rl, console)
    plan = plan_run(rl, base)
    tokenizer = load_tokenizer(base)
    policy = make_policy(rl, plan.policy, base)
    weights = sum(tensor.numel() for _, tensor in policy.weights())
    refuse_too_many_gradients(flag, gradients, weights)
    engine = plan_engine(rl, plan.roles, base, plan.roles.sample)
    sampler = make_sampler(engine, tokenizer, policy, console)
    with (
        closing(sampler),
        console.status(f"sampling {rl.prompts_per_rollout} prompts x {rl.group_size}"),
    ):
        sampled = open_source(rl.rollout_config, tokenizer).sample_step(1, sampler)
    collated = partial(collate_groups, sampled.groups, pad_token_id=pad_token_id(tokenizer))
    rollout = collated(rl.rollout_config)
    message = policy.choose_micro_batch_tokens(rollout.batch.labels.shape[1])
    if message:
        console.print(message)
    if not rollout.raw_rewards_B1.any() and not rl.teacher:
        raise UserError(
            "no sampled response is right, so every gradient is zero: take more --prompts, or a"
            " warmer start"
        )
    return policy, collated


# the arguments that act in an update's gradient; the others act elsewhere
_ACTING_ON_GRADIENT = {
    *(field.name for field in dataclasses.fields(LossConfig)),
    *(field.name for field in dataclasses.fields(AdvantageConfig)),
    "loss_type",
    "advantage",
    "teacher",
    "teacher_weight",
    "old_log_probs",
    "log_probs_of",
    "overlong_buffer",
    "skip_unfinished",
} - {"group_size"}


def print_arms(
    arms: Mapping[str, RLArgs],
    policy: Policy,
    collated: Callable[[RolloutConfig], Rollout],
    console: Console,
) -> None:
    """Print how the gradient of each arm differs from the first arm's, in the first update, and in
    a second one where an arm's weights may then be others than those that sampled. Raises
    `UserError` where the first arm has no gradient."""
    from alignment.training.microscope import arm_gradients

    updates = 1
    for arm in arms.values():
        if arm.updates_per_rollout > 1 or arm.trusts_sampler or arm.staleness or arm.beta:
            updates = 2
    inputs: dict[str, tuple[Rollout, UpdateConfig]] = {}
    for name, arm in arms.items():
        config = arm.update_config
        # a later policy than the one that sampled
        if arm.staleness and config.old_log_probs == "policy":
            config = dataclasses.replace(config, old_log_probs="ratio_one")
        rollout = collated(arm.rollout_config)
        if arm.teacher:
            rollout = with_log_probs_of_teacher(rollout, arm, policy, console)
        inputs[name] = (rollout, config)
    (base, base_gradients), *others = arm_gradients(policy, inputs, updates).items()
    if not base_gradients[0].any():
        raise UserError(
            f"the gradient of {base} is zero, as where no group has right and wrong responses: take"
            " more --prompts"
        )
    rows = []
    for name, gradients in others:
        pairs = list(zip(gradients, base_gradients, strict=True))
        apart = [_relative_distance(a, b) for a, b in pairs]
        cosines = []
        for a, b in pairs:
            cosine = a @ b / (a.norm() * b.norm())
            cosines.append(cosine.item())
        differing_arguments = differing((arms[name], arms[base]))
        elsewhere = []
        for argument in differing_arguments:
            if root_flag(argument) not in _ACTING_ON_GRADIENT:
                elsewhere.append(f"--{argument}")
        numbers = [f"{distance:.2g}" for distance in apart]
        numbers += [f"{cosine:.4f}" for cosine in cosines]
        rows.append((name, *numbers, _describe(apart, elsewhere), " ".join(elsewhere)))
    columns = ("apart", "2nd apart")[:updates] + ("cosine", "2nd cosine")[:updates]
    title = f"gradients against {base}'s"
    headings = ("arm", *columns, "gradients", "acts elsewhere")
    console.print(make_table(title, headings, rows, columns))
    console.print(ARMS_NOTE, soft_wrap=True)


def with_log_probs_of_teacher(
    rollout: Rollout, arm: RLArgs, policy: Policy, console: Console
) -> Rollout:
    """The rollout with the log-probs of an arm's teacher. Raises `UserError` where its vocabulary
    is not the policy's."""
    from alignment.builders.run_plan import plan_run
    from alignment.builders.training import find_teacher
    from alignment.builders.warm_start import prepare_warm_start
    from alignment.model.frozen import FrozenModel

    plan = plan_run(arm, prepare_warm_start(arm, console))
    teacher = FrozenModel(find_teacher(arm, plan.base), plan.roles.teacher, policy.dtype)
    teacher_BT = teacher.log_probs(
        rollout.batch, arm.update_config.loss_distribution, policy.micro_batch_tokens
    )
    return dataclasses.replace(rollout, teacher_log_probs_BT=teacher_BT)


def _relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| by the longer one's length; 0 where both are zero."""
    longest = max(a.norm(), b.norm()).item() or 1.0
    return (a - b).norm().item() / longest


def _describe(apart: Sequence[float], elsewhere: Sequence[str]) -> str:
    """What distances of gradients say of an arm, some of whose arguments may act elsewhere."""
    # so that NaN counts as another gradient
    if not max(apart) <= SAME:
        return "other"
    return "not looked at" if elsewhere else "changes nothing"


def print_statistics(inspected: Iterable[tuple[Estimator, Statistics]], console: Console) -> None:
    """Print a row for each estimator that `look` returns."""
    numbers = ("group", "norm", "spread", "SNR", "cosine", "ESS", "silent")
    rows = []
    for estimator, statistics in inspected:
        name = estimator.loss_type
        if estimator.second_update:
            name += " (2nd update)"
        divides_by_std = ""  # where the loss has no such choice
        if "normalize_by_std" in LOSSES[estimator.loss_type].arguments:
            divides_by_std = "yes" if estimator.normalize_by_std else "no"
        rows.append(
            (
                name,
                estimator.loss_normalization,
                divides_by_std,
                str(estimator.group_size),
                f"{statistics.norm:.2g}",
                f"{statistics.std:.2g}",
                f"{statistics.snr:+.2f}",
                f"{statistics.cosine:.2f}",
                f"{statistics.effective:.0f}",
                f"{statistics.silent:.0%}",
            )
        )
    title = "gradients on one frozen set of rollouts"
    console.print(make_table(title, ("loss", "length", "/ std", *numbers), rows, numbers))
    console.print(STATISTICS_NOTE, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
