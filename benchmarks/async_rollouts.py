"""How much faster is a step where rollouts are drawn ahead than one where they are drawn between
updates?

    uv run -m benchmarks.async_rollouts --steps 12

Median seconds of a step of the default preset, without the first three, of a synchronous run and of
asynchronous ones by their --max_staleness; of them drawing and the rest. The last two columns are
the synchronous step over this one, and over the slower of the synchronous step's two parts, which
no overlap can beat. Each run has one core for the sampler and one for the trainer. A judge that
sleeps stands for a slower sampler, so that both sides can be given equal costs.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from alignment.system.files import read_jsonl
from alignment.system.terminal import make_table
from benchmarks.measuring import output_of

WARM_UP = 3  # steps that are left out: the first waits for the sampler's process to start
NUMBERS = ("step (s)", "drawing", "the rest", "sync / this", "at best")


def judge(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that takes its time and is worth nothing."""
    time.sleep(float(os.environ["JUDGE_SECONDS"]))
    return [0.0] * len(completions)


@dataclass(frozen=True)
class RunSeconds:
    """Median seconds of a run's steps."""

    step: float
    drawing: float
    """Sampling and judging, wherever that was done."""
    rest: float
    """What the trainer did beside."""


def train(steps: int, model: str, judging: float, flags: Sequence[str]) -> list[dict]:
    """The records of a run's steps, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "alignment.train_rl", "--sft_base", model]
        command += ["--num_steps", str(steps), *flags]
        command += ["--output_dir", folder, "--run_name", "run", "--max_problems", "8"]
        command += ["--eval_interval", str(steps), "--save_interval", str(steps)]
        # one update a rollout, so that neither side needs a pass of the old policy
        command += ["--train_mini_batch_size", "0"]
        command += ["--reward", "accuracy,benchmarks.async_rollouts:judge:0"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "JUDGE_SECONDS": str(judging)}
        output_of(command, environment=environment)
        return read_jsonl(Path(folder) / "run" / "metrics.jsonl")[WARM_UP:]


def sampling_seconds(record: dict) -> float:
    """What sampling took a step, by its speed: an asynchronous run logs no seconds of it."""
    tokens = record["response_length"] * record["responses"]
    return tokens / record["tokens_per_second_sample"]


def measure_sync(steps: int, model: str, judging: float) -> RunSeconds:
    """A run that draws a rollout, then trains on it."""
    records = train(steps, model, judging, ())
    step = statistics.median(record["seconds"] for record in records)
    drawing = judging + statistics.median(map(sampling_seconds, records))
    return RunSeconds(step, drawing, rest=step - drawing)


def measure_async(steps: int, model: str, judging: float, staleness: int) -> RunSeconds:
    """A run that draws rollouts ahead."""
    flags = ("--rollouts", "async", "--max_staleness", str(staleness))
    records = train(steps, model, judging, flags)
    step = statistics.median(record["seconds"] for record in records)
    drawing = judging + statistics.median(map(sampling_seconds, records))
    working = [record["seconds"] - record["seconds_wait"] for record in records]
    return RunSeconds(step, drawing, rest=statistics.median(working))


def format_row(name: str, seconds: RunSeconds, sync: RunSeconds) -> list[str]:
    """The row of a run, beside the synchronous one."""
    best = max(sync.drawing, sync.rest)
    return [
        name,
        f"{seconds.step:.2f}",
        f"{seconds.drawing:.2f}",
        f"{seconds.rest:.2f}",
        f"{sync.step / seconds.step:.2f}",
        f"{sync.step / best:.2f}",
    ]


def main(
    steps: int = 12,
    model: str = "checkpoints/tiny_sft",
    judging: float = 0.6,
    staleness: tuple[int, ...] = (0, 1, 2),
) -> None:
    """Print a row for each run.

    Args:
        steps: Of each run.
        model: The warm start, made by `alignment.sft`.
        judging: Seconds that scoring a rollout takes.
        staleness: The asynchronous runs' --max_staleness.
    """
    console = Console()
    with console.status("sync"):
        sync = measure_sync(steps, model, judging)
    rows = [format_row("sync", sync, sync)]
    for most in staleness:
        name = f"async, k = {most}"
        with console.status(name):
            seconds = measure_async(steps, model, judging, most)
        rows.append(format_row(name, seconds, sync))
    title = f"medians of {steps - WARM_UP} steps; a core for the sampler, a core for the trainer"
    console.print(make_table(title, ("", *NUMBERS), rows, numbers=NUMBERS))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
