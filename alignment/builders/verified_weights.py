"""The weights that `verify` judges."""

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from alignment.args import VerifyArgs, refuse_missing_warm_start
from alignment.builders.checks import check_sft
from alignment.builders.warm_start import run_sft, warm_start_args

# A proof needs a policy whose samples differ and end, not a good one. Steps teach the tiny model
# that, more than solutions: 60 steps of 16 left it 1.31 nats of surprise a token and 86 % of the
# responses ended, 60 of 64 left 1.49 and 81 %, 45 of 64 left 2.22 and 48 %.
SHORT_WARM_START = 60  # steps
SHORT_BATCH = 16  # solutions of each
VALIDATED = 64  # solutions


@contextmanager
def judged_weights(args: VerifyArgs, console: Console) -> Iterator[tuple[VerifyArgs, str]]:
    """A run's arguments, with an --sft_base that is there, and what its weights are, in words.

    Where --sft_base is not there yet, its place is taken by the model of the warm start's first
    steps, which is deleted behind the block."""
    if not args.sft_base:
        yield args, args.model
        return
    if Path(args.sft_base).exists():
        yield args, args.sft_base
        return
    refuse_missing_warm_start(args)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".verify_", dir=args.output_dir) as folder:
        sft_base = str(Path(folder) / "sft")
        whole = warm_start_args(args)
        steps = min(whole.num_steps, SHORT_WARM_START)
        batch_size = min(whole.batch_size, SHORT_BATCH)
        words = (
            f"those of {steps} of the {whole.num_steps} steps of SFT that make {args.sft_base}, of"
            f" {batch_size} solutions each"
        )
        console.print(f"{args.sft_base} is not there yet: judging {words}", markup=False)
        sft_args = dataclasses.replace(
            whole,
            sft_base=sft_base,
            num_steps=steps,
            batch_size=batch_size,
            max_problems=1,
            eval_tasks=(),
            trackers=(),
        )
        demonstrations = check_sft(sft_args)
        few = {
            "train": demonstrations["train"][: steps * batch_size],
            "test": demonstrations["test"][:VALIDATED],
        }
        run_sft(sft_args, few, console)
        yield dataclasses.replace(args, sft_base=sft_base), words
