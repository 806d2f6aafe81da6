"""Supervised fine-tuning on worked solutions: the warm-up before reinforcement learning.

uv run -m alignment.sft"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from alignment.args import SFTArgs, parse
from alignment.builders.checks import check_sft
from alignment.data.tasks.own_data import Demonstration
from alignment.runs.held_out import evaluation_words
from alignment.system.errors import run_command
from alignment.system.terminal import make_console
from alignment.system.torchrun import followed


def fine_tune(
    args: SFTArgs, demonstrations: Mapping[str, Sequence[Demonstration]], console: Console
) -> Path:
    """Fine-tune on the demonstrations of `check_sft`, print the accuracy, and return --sft_base."""
    from alignment.builders.warm_start import run_sft  # these modules load torch
    from alignment.evaluation.accuracy import print_table

    rows = []
    for prefix, evaluation in run_sft(args, demonstrations, console).items():
        task = prefix or args.task
        rows.append({"model": args.sft_base, "task": task, **evaluation.record})
    print_table(rows, {}, console)
    console.print(f"evaluations are {evaluation_words(vars(args))}", markup=False, soft_wrap=True)
    console.print(f"model: {args.sft_base}", markup=False)
    return Path(args.sft_base)


def main() -> None:
    args = parse(SFTArgs)
    if followed(args.rank_timeout):
        return
    demonstrations = check_sft(args)
    if args.preview:
        from alignment.preview import preview_demonstrations

        return preview_demonstrations(args, demonstrations["train"])
    fine_tune(args, demonstrations, make_console(args.quiet))


if __name__ == "__main__":
    run_command(main)
