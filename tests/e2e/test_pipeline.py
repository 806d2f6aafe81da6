"""A pipeline of real stages, stopped in the middle and gone on with."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alignment.data.tasks import arithmetic
from alignment.system.files import read_json, read_jsonl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STAGES = """
preset = "tiny"
max_problems = 16

[stages.warm]
command = "sft"
model = "MODEL"
demonstrations = ["SHOWN"]
num_steps = 5
learning_rate = 1e-5
batch_size = 32

[stages.kept]
command = "rejection_sample"
model = "{warm}"
num_problems = 64
num_samples = 8

[stages.student]
command = "sft"
model = "tiny_student"
demonstrations = ["{kept}"]
num_steps = 5
curriculum = false
"""


def test_stages_run_in_a_row_and_go_on_where_they_were_stopped(warm_start, tmp_path, wait_for):
    """The first stage goes on from a warm start, so that there are right answers to keep."""
    shown = [
        {"question": problem.question, "response": response}
        for problem, response in arithmetic.demonstrations("train")
    ]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown[::50]))
    stages = STAGES.replace("MODEL", str(warm_start / "sft")).replace(
        "SHOWN", str(tmp_path / "shown.jsonl")
    )
    (tmp_path / "stages.toml").write_text(stages)
    command = [sys.executable, "-m", "alignment.pipeline", "--file", str(tmp_path / "stages.toml")]
    command += ["--output_dir", str(tmp_path)]
    folder = tmp_path / "stages"
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for((folder / "logs" / "kept.log").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=480)
    assert (
        process.returncode == 143
        and not (folder / "kept.jsonl").exists()
        and (folder / "warm").exists()
    )
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "warm: done already" in done.stdout and "student" in done.stdout
    rows = read_jsonl(folder / "kept.jsonl")
    assert rows and all(set(row) == {"id", "question", "ground_truth", "response"} for row in rows)
    assert read_json(folder / "student" / "args.json")["args"]["demonstrations"] == [
        str(folder / "kept.jsonl")
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["stage"] for row in summary] == ["warm", "student"] and all(
        row["problems"] == 16 for row in summary
    )
    (tmp_path / "stages.toml").write_text(stages.replace("num_problems = 64", "num_problems = 32"))
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert other.returncode == 2 and "holds a pipeline of other stages" in other.stderr
