"""Rollouts drawn ahead beside rollouts drawn between the updates: seconds a step in one run, one
core for each process.

A judge that sleeps stands for a slower sampler, so that both sides can be given equal costs.

uv run -m benchmarks.async_rollouts --steps 12
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from alignment.system.files import read_jsonl

WARM_UP = 3  # steps that are left out: the first waits for the sampler's process to start


def judge(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that takes its time and is worth nothing."""
    time.sleep(float(os.environ["JUDGE_SECONDS"]))
    return [0.0] * len(completions)


def main(
    steps: int = 12,
    model: str = "checkpoints/tiny_sft",
    judging: float = 0.6,
    staleness: tuple[int, ...] = (0, 1, 2),
) -> None:
    """`judging`: seconds that scoring a rollout takes."""
    console = Console()
    runs = {"sync": ()} | {
        f"async, k = {k}": ("--rollouts", "async", "--max_staleness", str(k)) for k in staleness
    }
    table = Table(
        title=f"medians of {steps - WARM_UP} steps; a core for the sampler, a core for the trainer"
    )
    for heading in ("", "step (s)", "drawing", "the rest", "sync / this", "at best"):
        table.add_column(heading, justify="right" if heading else "left")
    first = None
    for name, flags in runs.items():
        with console.status(name):
            records = measured(steps, model, judging, flags)
        drawing = judging + statistics.median(record["sampling"] for record in records)
        step = statistics.median(record["seconds"] for record in records)
        rest = (
            statistics.median(r["seconds"] - r["seconds_wait"] for r in records)
            if flags
            else step - drawing
        )
        first = first or (step, max(drawing, rest))
        table.add_row(
            name,
            f"{step:.2f}",
            f"{drawing:.2f}",
            f"{rest:.2f}",
            f"{first[0] / step:.2f}",
            f"{first[0] / first[1]:.2f}",
        )
    console.print(table)


def measured(steps: int, model: str, judging: float, flags: tuple[str, ...]) -> list[dict]:
    """The records of a run's steps, with the seconds that sampling took, wherever that was done."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "alignment.train_rl",
            "--sft_base",
            model,
            "--num_steps",
            str(steps),
            *flags,
        ]
        command += [
            "--output_dir",
            folder,
            "--run_name",
            "run",
            "--max_problems",
            "8",
            "--eval_interval",
            str(steps),
        ]
        # One update a rollout, so that neither side needs a pass of the old policy.
        command += ["--train_mini_batch_size", "0", "--save_interval", str(steps)]
        command += ["--reward", "accuracy,benchmarks.async_rollouts:judge:0"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "JUDGE_SECONDS": str(judging)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        records = read_jsonl(Path(folder) / "run" / "metrics.jsonl")[WARM_UP:]
    for record in records:
        record["sampling"] = (
            record["response_length"] * record["responses"] / record["tokens_per_second_sample"]
        )
    return records


if __name__ == "__main__":
    tyro.cli(main)
