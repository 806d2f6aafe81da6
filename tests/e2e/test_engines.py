"""A run whose rollouts several engines draw is the run of one engine."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from alignment.system.files import read_jsonl
from tests.e2e.conftest import NAME, said
from tests.files import digest

pytestmark = pytest.mark.slow

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
    assert digest(other / "final" / "model.safetensors") == digest(
        one / "final" / "model.safetensors"
    )


def test_a_run_that_is_interrupted_while_engines_draw_ends_at_once_and_leaves_nothing(
    warm, launcher, tmp_path, wait_for
):
    flags = ["--sft_base", str(warm), *PROMPTS, "--sample_device", "cpu", "cpu"]
    pid = launcher.start(tmp_path, *flags, "--num_steps", "500")
    # of step 1, after which a run can go on
    wait_for(lambda: read_jsonl(tmp_path / NAME / "metrics.jsonl"))
    engines = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGINT)
    begin = time.monotonic()
    assert launcher.wait() == 130 and "Traceback" not in said(tmp_path)
    last = said(tmp_path).splitlines()[-1]
    assert last.startswith("stopped after step ") and " (SIGINT); go on with: uv run -m " in last
    assert (
        time.monotonic() - begin < 20
        and len(engines) >= 2
        and not any(engine.is_running() for engine in engines)
    )
