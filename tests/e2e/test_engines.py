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
from tests.e2e.conftest import FEW_PROBLEMS, NAME, SMALL

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
PROMPTS = ["--prompts_per_rollout", "3"]  # of which two engines draw one and two


def command(warm: Path, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "alignment.train_rl",
        *SMALL,
        *FEW_PROBLEMS,
        *PROMPTS,
        "--output_dir",
        ".",
        "--sft_base",
        str(warm),
        *flags,
    ]


def run(folder: Path, *line: str) -> Path:
    done = subprocess.run(line, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / NAME


def drawn(run: Path) -> dict[str, list]:
    """All completions with their scores and versions, but for log-probs, which the rounding of a
    batch may change."""
    records = {file.name: read_jsonl(file) for file in (run / "completions").glob("*.jsonl")}
    return {
        name: [{k: v for k, v in one.items() if "log_probs" not in k} for one in of]
        for name, of in records.items()
    }


@pytest.fixture(scope="module")
def one(warm, tmp_path_factory) -> Path:
    """The run of one engine, which is the trainer's process."""
    return run(tmp_path_factory.mktemp("one"), *command(warm))


def test_several_engines_draw_the_completions_of_one_and_make_its_weights(one, warm, tmp_path):
    """Two engines in a process of their own, beside the trainer's."""
    flags = ["--sample_device", "cpu,cpu", "--rollouts", "async", "--max_staleness", "0"]
    other = run(tmp_path, *command(warm, *flags))
    assert drawn(other) == drawn(one) and len(drawn(one)) > 4
    assert (other / "final" / "model.safetensors").read_bytes() == (
        one / "final" / "model.safetensors"
    ).read_bytes()


def test_a_run_that_is_interrupted_while_engines_draw_ends_at_once_and_leaves_nothing(
    warm, tmp_path
):
    line = command(warm, "--sample_device", "cpu", "cpu", "--num_steps", "500")
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
