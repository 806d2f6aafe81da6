"""`alignment.verify`, as a user runs it."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from alignment import verify
from alignment.system.files import read_json
from tests.command_line import exit_code
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


def flags_of(warm: Path) -> list[str]:
    return [*SMALL, *FEW_PROBLEMS, "--output_dir", ".", "--sft_base", str(warm)]


def test_two_processes_that_share_the_weights_pass(warm, tmp_path):
    line = [sys.executable, "-m", "alignment.verify", *flags_of(warm), "--kill_after", "0"]
    line += ["--policy_parallelism", "sharded", "--policy_ranks", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    checks = read_json(tmp_path / NAME / "summary.json")["checks"]
    failures = [check for check in checks if check["passed"] is False]
    assert done.returncode == 0 and len(checks) == 80 and not failures, done.stdout + done.stderr


def test_a_resume_that_skips_a_prompt(warm, tmp_path, monkeypatch, capsys):
    """Of the command's checks, those of the killed run alone."""
    for others in (
        "verification.checks.checks_without_model",
        "builders.verified_data.checks_of_rewards",
        "builders.verified_data.checks_of_data",
        "builders.verified_updates.first_weights",
        "builders.verified_updates.training_checks",
        "builders.verified_runs.short_run_checks",
    ):
        monkeypatch.setattr(f"alignment.{others}", lambda *arguments: ())
    (tmp_path / "sitecustomize.py").write_text(SKIP_A_PROMPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.chdir(tmp_path)
    flags = [*flags_of(warm), "--kill_after", "1", "--json", "lines.json"]
    code = exit_code(monkeypatch, verify.main, "alignment.verify", *flags)
    printed = capsys.readouterr()
    said = printed.out + printed.err
    checks = read_json(tmp_path / NAME / "summary.json")["checks"]
    assert code == 1 and f"2 of {len(checks)} checks failed" in said, said
    assert "reproducible: not verified" in said
    assert not list(tmp_path.glob(".verify_*"))  # the runs are deleted
    lines = read_json(tmp_path / "lines.json")["lines"]
    verdicts = Counter(line["verdict"] for line in lines)
    assert verdicts["failed"] == 2 and verdicts["measured"] == 1, lines
    failed = next(line for line in lines if line["verdict"] == "failed")
    assert failed["value"] == 1 and failed["tolerance"] == 0
    assert failed["reason"] == "other problems"
    start, parts = (check for check in checks if check["passed"] is False)
    assert (
        start["what"] == "resumed: other parts of the next step's start"
        and start["error"] == "other problems"
    ), said
    assert parts["what"].startswith("killed, resumed"), said
    assert (
        "weights" in parts["error"] and "completions" in parts["error"] and parts["error"] in said
    )
