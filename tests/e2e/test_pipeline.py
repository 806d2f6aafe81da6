"""A pipeline of real stages, stopped in the middle and gone on with."""

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from alignment import pipeline
from alignment.data.tasks import arithmetic
from alignment.system.files import read_json, read_jsonl
from tests.command_line import Ended, exit_code

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


class EndedStage(Ended):
    """A stage that has run in this process."""

    def __init__(self, returncode: int):
        self.returncode = returncode

    def terminate(self) -> None:
        """It has ended."""


def test_stages_run_in_a_row_and_go_on_where_they_were_stopped(
    warm_start, tmp_path, wait_for, monkeypatch, capsys
):
    """The first stage goes on from a warm start, so that there are right answers to keep. Before
    the pipeline is stopped, its stages are processes."""
    shown = [
        {"question": problem.question, "response": response}
        for problem, response in arithmetic.demonstrations("train")
    ]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown[::50]))
    stages = STAGES.replace("MODEL", str(warm_start / "sft")).replace(
        "SHOWN", str(tmp_path / "shown.jsonl")
    )
    (tmp_path / "stages.toml").write_text(stages)
    flags = ["--file", str(tmp_path / "stages.toml"), "--output_dir", str(tmp_path)]
    folder = tmp_path / "stages"
    command = [sys.executable, "-m", "alignment.pipeline", *flags]
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

    def run_here(module: str, flags: Sequence[str], log: Path) -> EndedStage:
        return EndedStage(
            exit_code(monkeypatch, importlib.import_module(module).main, module, *flags)
        )

    monkeypatch.setattr(pipeline, "start_command", run_here)
    code = exit_code(monkeypatch, pipeline.main, "alignment.pipeline", *flags)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "warm: done already" in printed.out and "student: done" in printed.out
    rows = read_jsonl(folder / "kept.jsonl")
    assert rows and all(set(row) == {"id", "question", "ground_truth", "response"} for row in rows)
    assert read_json(folder / "student" / "args.json")["args"]["demonstrations"] == [
        str(folder / "kept.jsonl")
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["stage"] for row in summary] == ["warm", "student"] and all(
        row["problems"] == 16 for row in summary
    )
    with (tmp_path / "shown.jsonl").open("a") as file:
        file.write("\n")
    assert exit_code(monkeypatch, pipeline.main, "alignment.pipeline", *flags) == 2
    assert "shown.jsonl has changed since the pipeline" in capsys.readouterr().err
    (tmp_path / "stages.toml").write_text(stages.replace("num_problems = 64", "num_problems = 32"))
    assert exit_code(monkeypatch, pipeline.main, "alignment.pipeline", *flags) == 2
    assert "holds a pipeline of other stages" in capsys.readouterr().err
