"""Rollouts drawn ahead beside rollouts drawn between the updates: seconds a step in one run, one core for each process.

uv run -m benchmarks.async_rollouts --steps 12
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from alignment.files import read_jsonl

WARM_UP = 3  # steps that are left out: the first waits for the sampler's process to start


def main(steps: int = 12, model: str = "checkpoints/tiny_sft", epochs: int = 1, staleness: tuple[int, ...] = (0, 1, 2)) -> None:
    """`epochs` passes over each rollout make the trainer's share as large as the sampler's, or larger."""
    console = Console()
    runs = {"sync": ()} | {f"async, k = {k}": ("--rollouts", "async", "--max_staleness", str(k)) for k in staleness}
    table = Table(title=f"{model}, medians of {steps - WARM_UP} steps; a core for the sampler, a core for the trainer")
    for heading in ("", "step (s)", "sampling and scoring", "the rest", "sync / this", "at best"):
        table.add_column(heading, justify="right" if heading else "left")
    first = None
    for name, flags in runs.items():
        with console.status(name):
            records = measured(steps, model, epochs, flags)
        drawing = statistics.median(record["drawing"] for record in records)
        step = statistics.median(record["seconds"] for record in records)
        rest = step - drawing if not flags else statistics.median(r["seconds"] - r["seconds_wait"] for r in records)
        first = first or (step, drawing, rest)
        ratio, best = first[0] / step, first[0] / max(first[1:])
        table.add_row(name, f"{step:.2f}", f"{drawing:.2f}", f"{rest:.2f}", f"{ratio:.2f}", f"{best:.2f}")
    console.print(table)


def measured(steps: int, model: str, epochs: int, flags: tuple[str, ...]) -> list[dict]:
    """The records of a run's steps, with the seconds that sampling and scoring took, wherever they were done."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "alignment.train_rl", "--sft_base", model, "--num_steps", str(steps), *flags]
        command += ["--output_dir", folder, "--run_name", "run", "--max_problems", "8", "--eval_interval", str(steps)]
        command += ["--epochs_per_rollout", str(epochs), "--save_interval", str(steps)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        records = read_jsonl(Path(folder) / "run" / "metrics.jsonl")[WARM_UP:]
    for record in records:
        record["drawing"] = record["response_length"] * record["responses"] / record["tokens_per_second_sample"]
    return records


if __name__ == "__main__":
    tyro.cli(main)
