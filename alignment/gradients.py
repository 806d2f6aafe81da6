"""A microscope for gradients: on one frozen set of rollouts, what does each estimator's gradient look like?

uv run -m alignment.gradients --preset tiny"""

from collections.abc import Iterable
from contextlib import closing

from rich.console import Console

from alignment.args import GradientsArgs, RLArgs, from_preset, parse
from alignment.checks import check_rl, roles_of
from alignment.core.losses import LOSSES
from alignment.system.errors import UserError, run_command
from alignment.system.terminal import make_console, make_table


def main() -> None:
    args = parse(GradientsArgs)
    once = {"max_refills": 0, "rollouts": "sync", "max_staleness": None, "sync_every": 1}
    size = {"group_size": max(args.group_size), "prompts_per_rollout": args.prompts}
    rl = from_preset(RLArgs, args.preset, seed=args.seed, output_dir=args.output_dir, **size, **once)
    check_rl(rl)
    console = make_console()
    print_statistics(look(rl, args, console), console)


def look(rl: RLArgs, args: GradientsArgs, console: Console) -> list[tuple]:
    """Each `Estimator`, `Statistics` of sampled rollouts. Raises `UserError` where no response is right, or memory is short."""
    from rich.progress import track

    from alignment.core.tokens import pad_token_id
    from alignment.models import make_policy, make_sampler, warm_start
    from alignment.policy.loading import load_tokenizer
    from alignment.rollouts.source import collate_groups, open_source
    from alignment.training.microscope import estimators, inspect, refuse_too_many_gradients

    base = warm_start(rl, console)
    tokenizer, policy = load_tokenizer(base), make_policy(rl, base)
    refuse_too_many_gradients(args.prompts, sum(tensor.numel() for _, tensor in policy.weights()))
    sampler = make_sampler(rl, base, roles_of(rl).sample, tokenizer, policy)
    with closing(sampler), console.status(f"sampling {args.prompts} prompts x {rl.group_size}"):
        sampled = open_source(rl.rollout_config, tokenizer).sample_step(1, sampler)
    rollout = collate_groups(sampled.groups, rl.rollout_config, pad_token_id(tokenizer))
    if message := policy.choose_micro_batch_tokens(rollout.batch.labels.shape[1]):
        console.print(message)
    if not rollout.raw_rewards_B1.any():
        raise UserError("no sampled response is right, so every gradient is zero: take more --prompts, or a warmer start")
    planned = list(estimators(args.group_size, args.updates))
    inspected = inspect(policy, rollout, planned, rl.update_config)
    return list(track(inspected, "looking", total=len(planned), console=console, transient=True))


def print_statistics(inspected: Iterable[tuple], console: Console) -> None:
    """Print a row for each estimator that `look` returns."""
    numbers = ("group", "norm", "spread", "SNR", "cosine", "ESS", "silent")
    rows = []
    for e, s in inspected:
        uses_std = "normalize_by_std" in LOSSES[e.loss_type].arguments
        std = ("yes" if e.normalize_by_std else "no") if uses_std else ""
        cells = f"{s.norm:.2g}", f"{s.std:.2g}", f"{s.snr:+.2f}", f"{s.cosine:.2f}", f"{s.effective:.0f}", f"{s.silent:.0%}"
        name = e.loss_type + (" (2nd update)" if e.second_update else "")
        rows.append((name, e.loss_normalization, std, str(e.group_size), *cells))
    console.print(make_table("gradients on one frozen set of rollouts", ("loss", "length", "/ std", *numbers), rows, numbers))
    console.print(
        "norm and spread are of the whole batch's gradient; SNR, its squared expectation over its variance, is what may be"
        " compared between estimators, since an optimiser like Adam takes the scale away. cosine: a prompt's gradient with the"
        " batch's. ESS: how many equally weighted responses would say as much. silent: prompts without any gradient.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    run_command(main)
