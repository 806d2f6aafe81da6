"""`alignment.verify`, as a user runs it."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from alignment.system.files import read_json
from tests.e2e.conftest import FEW_PROBLEMS, NAME, SMALL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SKIP_A_PROMPT = """
import sys
if "--resume" in sys.argv:
    from alignment.rollouts import config, source
    real = config.problems_of_step
    def shifted(problems, number, seed, step):
        return real(problems, number, seed, step + 1)
    source.problems_of_step = shifted
"""


def verify(folder: Path, warm: Path, *flags: str) -> tuple[int, str, dict[str, dict]]:
    """The exit code and output of the command in a folder, and the record of each check."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "alignment.verify",
        *SMALL,
        *FEW_PROBLEMS,
        "--output_dir",
        ".",
        "--sft_base",
        str(warm),
        *flags,
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    checks = read_json(folder / NAME / "summary.json")["checks"]
    return done.returncode, done.stdout + done.stderr, {check["what"]: check for check in checks}


def test_two_processes_that_share_the_weights_pass(warm, tmp_path):
    code, said, checks = verify(
        tmp_path,
        warm,
        "--policy_parallelism",
        "sharded",
        "--policy_ranks",
        "2",
        "--kill_after",
        "0",
    )
    failures = [check for check in checks.values() if check["passed"] is False]
    assert code == 0 and len(checks) == 80 and not failures, said


def test_a_resume_that_skips_a_prompt(warm, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SKIP_A_PROMPT)
    code, said, checks = verify(tmp_path, warm, "--kill_after", "1", "--json", "lines.json")
    assert code == 1 and f"2 of {len(checks)} checks failed" in said, said
    assert "reproducible: not verified" in said
    assert not list(tmp_path.glob(".verify_*"))  # the runs are deleted
    lines = read_json(tmp_path / "lines.json")["lines"]
    verdicts = Counter(line["verdict"] for line in lines)
    assert verdicts["failed"] == 2 and verdicts["measured"] == 2, lines
    failed = next(line for line in lines if line["verdict"] == "failed")
    assert failed["value"] == 1 and failed["tolerance"] == 0
    assert failed["reason"] == "other problems"
    start, parts = (check for check in checks.values() if check["passed"] is False)
    assert (
        start["what"] == "resumed: other parts of the next step's start"
        and start["error"] == "other problems"
    ), said
    assert parts["what"].startswith("killed, resumed"), said
    assert (
        "weights" in parts["error"] and "completions" in parts["error"] and parts["error"] in said
    )
