"""Whole runs with a reference model that is served over HTTP, whose server is lost."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from alignment.system.files import read_jsonl
from alignment.verify import digests
from tests.e2e.conftest import NAME, said

FLAGS = ["--beta", "0.1", "--rollouts", "async", "--num_steps", "8"]


@contextmanager
def served(model: Path, port: int = 0):
    """The process of a reference server, and its address."""
    flags = ["--model", str(model), "--device", "cpu", "--dtype", "float32", "--port", str(port)]
    command = [sys.executable, "-m", "alignment.reference_server", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process, process.stdout.readline().strip().rpartition(": ")[2]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(warm, launcher, tmp_path_factory):
    """The digests of the run whose reference model is in a process of its own."""
    output = tmp_path_factory.mktemp("undisturbed")
    assert launcher.run(output, "--sft_base", str(warm), *FLAGS) == 0, said(output)
    return digests(output / NAME)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_run_goes_on_when_its_reference_server_is_started_again(number, undisturbed, warm, launcher, tmp_path, wait_for):
    with served(warm) as (server, url):
        launcher.start(tmp_path, "--sft_base", str(warm), *FLAGS, "--reference_url", url)
        wait_for(lambda: len(read_jsonl(tmp_path / NAME / "metrics.jsonl")) >= 2)
        server.send_signal(number)
        server.wait(20)
    wait_for(lambda: "asking it again" in said(tmp_path))
    with served(warm, int(url.rpartition(":")[2])):
        assert launcher.wait() == 0, said(tmp_path)
    assert digests(tmp_path / NAME) == undisturbed
