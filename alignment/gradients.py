"""A microscope for gradients: on one frozen set of rollouts, what does each estimator's gradient
look like?

uv run -m alignment.gradients --preset tiny uv run -m alignment.gradients --sweep_file arms.toml
# which of a sweep's arms have the same gradients"""

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.console import Console

from alignment.ablation.design import differing, named_arms, refuse_incomparable_arms
from alignment.args import GradientsArgs, RLArgs, from_preset, parse
from alignment.builders.checks import check_rl, roles_of
from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LOSSES, LossConfig
from alignment.system.errors import UserError, run_command
from alignment.system.files import read_toml
from alignment.system.terminal import make_console, make_table

NOTES = read_toml(Path(__file__).with_name("gradients.toml"), "notes")
# of the longer gradient's length; bfloat16 rounds its numbers by up to four times as much, but
# alike in all arms
SAME = 1e-3


def main() -> None:
    args, console = parse(GradientsArgs), make_console()
    arms = named_arms(args.sweep_file, args.preset, {}) if args.sweep_file else {}
    sizes = {arm.group_size for arm in arms.values()} or set(args.group_size)
    if len(arms) == 1 or any(max(sizes) % size for size in sizes):
        fault = (
            "every group_size must divide the largest"
            if len(arms) > 1
            else "it has one arm, and none to compare it with"
        )
        raise UserError(f"--sweep_file {args.sweep_file}: {fault}")
    once = {"max_refills": 0, "rollouts": "sync", "max_staleness": None, "sync_every": 1}
    once |= {
        "group_size": max(sizes),
        "prompts_per_rollout": args.prompts,
        "seed": args.seed,
        "output_dir": args.output_dir,
    }
    runs = [dataclasses.replace(arm, **once) for arm in arms.values()] or [
        from_preset(RLArgs, args.preset, **once)
    ]
    refuse_incomparable_arms(arms)
    for rl in reversed(runs):  # the first one samples
        check_rl(rl)
    if arms:
        print_arms(
            arms, *frozen(rl, f"--sweep_file {args.sweep_file}", len(arms), console), console
        )
    else:
        print_statistics(look(rl, args, console), console)


def look(rl: RLArgs, args: GradientsArgs, console: Console) -> list[tuple]:
    """Each `Estimator`, `Statistics` of sampled rollouts. Raises `UserError` as `frozen` does."""
    from rich.progress import track

    from alignment.training.microscope import estimators, inspect

    planned = list(estimators(args.group_size, args.updates))
    policy, collated = frozen(rl, f"--prompts {args.prompts}", args.prompts, console)
    inspected = inspect(policy, collated(rl.rollout_config), planned, rl.update_config)
    return list(track(inspected, "looking", total=len(planned), console=console, transient=True))


def frozen(rl: RLArgs, flag: str, gradients: int, console: Console) -> tuple:
    """The policy at its warm start, and what makes a `Rollout` of its scored responses by a
    `RolloutConfig`. Raises `UserError` where no response is right, or where the memory is too small
    for twice so many `gradients`, of which `flag` speaks."""
    from alignment.builders.policies import make_policy
    from alignment.builders.samplers import make_sampler
    from alignment.builders.warm_start import warm_start
    from alignment.core.tokens import pad_token_id
    from alignment.model.loading import load_tokenizer
    from alignment.rollouts.source import collate_groups, open_source
    from alignment.training.microscope import refuse_too_many_gradients

    base = warm_start(rl, console)
    tokenizer, policy = load_tokenizer(base), make_policy(rl, base)
    refuse_too_many_gradients(
        flag, gradients, sum(tensor.numel() for _, tensor in policy.weights())
    )
    sampler = make_sampler(rl, base, roles_of(rl).sample, tokenizer, policy, console)
    with (
        closing(sampler),
        console.status(f"sampling {rl.prompts_per_rollout} prompts x {rl.group_size}"),
    ):
        sampled = open_source(rl.rollout_config, tokenizer).sample_step(1, sampler)
    collated = partial(collate_groups, sampled.groups, pad_token_id=pad_token_id(tokenizer))
    rollout = collated(rl.rollout_config)
    if message := policy.choose_micro_batch_tokens(rollout.batch.labels.shape[1]):
        console.print(message)
    if not rollout.raw_rewards_B1.any():
        raise UserError(
            "no sampled response is right, so every gradient is zero: take more --prompts, or a"
            " warmer start"
        )
    return policy, collated


def print_arms(arms: Mapping[str, RLArgs], policy, collated, console: Console) -> None:
    """Print how the gradient of each arm differs from the first arm's, in the first update, and in
    a second one where an arm's weights may then be others than those that sampled. Raises
    `UserError` where the first arm has no gradient."""
    from alignment.training.microscope import arm_gradients

    updates = 1 + any(
        arm.updates_per_rollout > 1 or arm.trusts_sampler or arm.staleness or arm.beta
        for arm in arms.values()
    )
    own = {name: (collated(arm.rollout_config), arm.update_config) for name, arm in arms.items()}
    for name, (rollout, config) in own.items():
        # a later policy than the one that sampled
        if arms[name].staleness and config.old_log_probs == "policy":
            own[name] = rollout, dataclasses.replace(config, old_log_probs="ratio_one")
    (base, of_base), *others = arm_gradients(policy, own, updates).items()
    seen = {
        field.name for of in (LossConfig, AdvantageConfig) for field in dataclasses.fields(of)
    } - {"group_size"}
    seen |= {"loss_type", "old_log_probs", "overlong_buffer", "skip_unfinished"}
    if not of_base[0].any():
        raise UserError(
            f"the gradient of {base} is zero, as where no group has right and wrong responses: take"
            " more --prompts"
        )
    rows = []
    for name, gradients in others:
        lengths = [
            max(a.norm(), b.norm()).item() or 1.0 for a, b in zip(gradients, of_base, strict=True)
        ]
        apart = [
            (a - b).norm().item() / length
            for a, b, length in zip(gradients, of_base, lengths, strict=True)
        ]
        cosines = [
            (a @ b / (a.norm() * b.norm())).item() for a, b in zip(gradients, of_base, strict=True)
        ]
        unseen = [f"--{flag}" for flag in differing((arms[name], arms[base])) if flag not in seen]
        verdict = (
            "other" if not max(apart) <= SAME else "not looked at" if unseen else "changes nothing"
        )
        rows.append(
            (
                name,
                *(f"{x:.2g}" for x in apart),
                *(f"{x:.4f}" for x in cosines),
                verdict,
                " ".join(unseen),
            )
        )
    numbers = ("apart", "2nd apart")[:updates] + ("cosine", "2nd cosine")[:updates]
    console.print(
        make_table(
            f"gradients against {base}'s",
            ("arm", *numbers, "gradients", "acts elsewhere"),
            rows,
            numbers,
        )
    )
    console.print(NOTES["arms"], soft_wrap=True)


def print_statistics(inspected: Iterable[tuple], console: Console) -> None:
    """Print a row for each estimator that `look` returns."""
    numbers = ("group", "norm", "spread", "SNR", "cosine", "ESS", "silent")
    rows = []
    for e, s in inspected:
        uses_std = "normalize_by_std" in LOSSES[e.loss_type].arguments
        std = ("yes" if e.normalize_by_std else "no") if uses_std else ""
        cells = (
            f"{s.norm:.2g}",
            f"{s.std:.2g}",
            f"{s.snr:+.2f}",
            f"{s.cosine:.2f}",
            f"{s.effective:.0f}",
            f"{s.silent:.0%}",
        )
        name = e.loss_type + (" (2nd update)" if e.second_update else "")
        rows.append((name, e.loss_normalization, std, str(e.group_size), *cells))
    console.print(
        make_table(
            "gradients on one frozen set of rollouts",
            ("loss", "length", "/ std", *numbers),
            rows,
            numbers,
        )
    )
    console.print(NOTES["statistics"], soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
