"""Runs of `train_rl` that are small, and started quickly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 4
NAME = "run"
SMALL = [
    "--reward",
    "random",
    "--prompts_per_rollout",
    "2",
    "--group_size",
    "4",
    "--train_mini_batch_size",
    "4",
]
SMALL += [
    "--max_new_tokens",
    "16",
    "--max_problems",
    "4",
    "--num_steps",
    str(STEPS),
    "--eval_interval",
    "2",
]
SMALL += ["--save_interval", "1", "--run_name", NAME]
# For a process of its own: of 23,677 problems, all of which every start would encode.
FEW_PROBLEMS = ["--num_problems", "64"]


class Launcher:
    """Starts `train_rl` in forks of a process that has imported it (launcher.py), so that fifty
    starts take little time."""

    def __init__(self):
        script = Path(__file__).with_name("launcher.py")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(script), *SMALL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, output: Path, *flags: str, **request) -> int:
        """Start a run in the folder `output`; returns its process's id."""
        output.mkdir(exist_ok=True)
        argv = [*SMALL, "--output_dir", str(output), *flags]
        self.process.stdin.write(
            json.dumps({"argv": argv, "log": str(output / "log"), **request}) + "\n"
        )
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["pid"]

    def wait(self) -> int:
        """The exit code of the run that was started last; negative for a signal."""
        return json.loads(self.process.stdout.readline())["status"]

    def run(self, output: Path, *flags: str, **request) -> int:
        self.start(output, *flags, **request)
        return self.wait()


@pytest.fixture(scope="session")
def launcher():
    made = Launcher()
    yield made
    made.process.stdin.close()
    made.process.wait()


@pytest.fixture(scope="module")
def warm(tiny_folder):
    """--sft_base."""
    return tiny_folder


def said(output: Path) -> str:
    """What a run has printed."""
    return (output / "log").read_text()
