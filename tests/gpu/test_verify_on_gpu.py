"""`alignment.verify` on a GPU, as a user runs it: a healthy machine passes, though a resumed run
has other last digits."""

import subprocess
import sys
from pathlib import Path

import pytest

from alignment.system.files import read_json

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
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
    "--eval_interval",
    "2",
    "--run_name",
    "verified",
    "--kill_after",
    "1",
]


def test_a_healthy_gpu_passes_and_says_what_is_not_promised(tiny_folder, tmp_path):
    flags = [*SMALL, "--sft_base", str(tiny_folder), "--output_dir", str(tmp_path)]
    command = [sys.executable, "-m", "alignment.verify", *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    print(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {
        record["what"]: record
        for record in read_json(tmp_path / "verified" / "summary.json")["checks"]
    }
    start = checks["resumed: other parts of the next step's start"]
    parts = checks["killed, resumed: parts with other bits"]
    assert start["measured"] == 0 == start["limit"] and parts["limit"] is None
    assert "measured" in done.stdout and "FAILED" not in done.stdout
    assert any(what.startswith("peak / plan's: cuda:0") for what in checks), (
        "the trainer's memory was not compared"
    )
