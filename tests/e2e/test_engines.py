"""A run whose rollouts several engines draw is the run of one engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from alignment.system.files import read_jsonl
from tests.e2e.conftest import FEW_PROBLEMS, NAME, SMALL, said

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
PROMPTS = ["--prompts_per_rollout", "3"]  # of which two engines draw one and two


def drawn(run: Path) -> dict[str, list]:
    """All completions with their scores and versions, but for log-probs, which the rounding of a
    batch may change."""
    records = {file.name: read_jsonl(file) for file in (run / "completions").glob("*.jsonl")}
    return {
        name: [{k: v for k, v in one.items() if "log_probs" not in k} for one in of]
        for name, of in records.items()
    }


def test_several_engines_draw_the_completions_of_one_and_make_its_weights(warm, launcher, tmp_path):
    """Two engines in a process of their own, beside the trainer's, and one in the trainer's."""
    flags = ["--sft_base", str(warm), *PROMPTS]
    assert launcher.run(tmp_path / "one", *flags) == 0, said(tmp_path / "one")
    flags += ["--sample_device", "cpu,cpu", "--rollouts", "async", "--max_staleness", "0"]
    assert launcher.run(tmp_path / "two", *flags) == 0, said(tmp_path / "two")
    one, other = tmp_path / "one" / NAME, tmp_path / "two" / NAME
    assert drawn(other) == drawn(one) and len(drawn(one)) > 4
    assert (other / "final" / "model.safetensors").read_bytes() == (
        one / "final" / "model.safetensors"
    ).read_bytes()


def test_a_run_that_is_interrupted_while_engines_draw_ends_at_once_and_leaves_nothing(
    warm, tmp_path
):
    line = [sys.executable, "-m", "alignment.train_rl", *SMALL, *FEW_PROBLEMS, *PROMPTS]
    line += ["--output_dir", ".", "--sft_base", str(warm)]
    line += ["--sample_device", "cpu", "cpu", "--num_steps", "500"]
    with subprocess.Popen(
        line, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as started:
        metrics = tmp_path / NAME / "metrics.jsonl"  # of step 1, after which a run can go on
        while started.poll() is None and not (metrics.exists() and metrics.read_text().count("\n")):
            time.sleep(0.1)
        engines = psutil.Process(started.pid).children(recursive=True)
        started.send_signal(signal.SIGINT)
        begin, said = time.monotonic(), started.stdout.read().decode()
    last = said.splitlines()[-1]
    assert started.returncode == 130 and "Traceback" not in said
    assert last.startswith("stopped after step ") and " (SIGINT); go on with: uv run -m " in last
    assert (
        time.monotonic() - begin < 20
        and len(engines) >= 2
        and not any(engine.is_running() for engine in engines)
    )
