"""Supervised fine-tuning on worked solutions: the warm-up before reinforcement learning.

uv run -m alignment.sft"""

from alignment.args import SFTArgs, parse
from alignment.builders.checks import check_sft
from alignment.runs.held_out import evaluation_words
from alignment.system.errors import run_command
from alignment.system.terminal import make_console
from alignment.system.torchrun import followed


def main() -> None:
    args = parse(SFTArgs)
    if followed(args.rank_timeout):
        return
    demonstrations = check_sft(args)
    from alignment.builders.warm_start import run_sft
    from alignment.evaluation.accuracy import print_table
    from alignment.preview import preview_demonstrations

    if args.preview:
        return preview_demonstrations(args, demonstrations["train"])
    console = make_console()
    rows = []
    for prefix, evaluation in run_sft(args, demonstrations, console).items():
        task = prefix or args.task
        rows.append({"model": args.sft_base, "task": task, **evaluation.record})
    print_table(rows, {}, console)
    console.print(f"evaluations are {evaluation_words(vars(args))}", markup=False, soft_wrap=True)
    console.print(f"model: {args.sft_base}", markup=False)


if __name__ == "__main__":
    run_command(main)
