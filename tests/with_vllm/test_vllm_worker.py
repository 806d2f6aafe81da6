"""What becomes of the process of vLLM: it is killed, hangs, cannot start, or loses its parent."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from alignment.system.errors import UserError
from tests.with_vllm.conftest import ROOT, happens_within, tiny_llama
from tests.with_vllm.test_vllm_sampler import OPEN_END, PROMPTS


def new_processes(before: set[psutil.Process]) -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True)) - before


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker_of(engine) -> psutil.Process:
    """The process of a vLLM sampler."""
    return psutil.Process(engine._worker.process.pid)


def test_an_engine_that_cannot_start_says_why(start_sampler, tmp_path):
    before = set(psutil.Process().children(recursive=True))
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["NoSuchArchitecture"]}'
    )
    with pytest.raises(UserError, match="vLLM could not start on cpu.*NoSuchArchitecture"):
        start_sampler(str(tmp_path))
    assert not new_processes(before)


def test_the_worker_of_a_killed_command_dies_with_it(tmp_path, model_path):
    # No `if __name__ == "__main__"`: the script must not run a second time in the worker.
    script = tmp_path / "command.py"
    script.write_text(
        "from alignment.model.loading import load_tokenizer\n"
        "from alignment.sampling.vllm import SamplerConfig, VLLMSampler\n"
        f"print('begun', file=open({str(tmp_path / 'log')!r}, 'a'))\n"
        f"path = {model_path!r}\n"
        "config = SamplerConfig(path, 'cpu', 'float32', memory_share=0.5)\n"
        "VLLMSampler(config, load_tokenizer(path), context=64)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = psutil.Popen([sys.executable, str(script)], env=environment)
    # A child before that is no worker, but what an import asks of the system.
    assert happens_within(300, lambda: (tmp_path / "log").exists() and command.children())
    workers = command.children(recursive=True)
    time.sleep(1)  # into the imports, where the worker does not listen to its parent
    command.send_signal(signal.SIGKILL)
    command.wait()
    assert happens_within(120, lambda: not any(alive(worker) for worker in workers))
    assert (tmp_path / "log").read_text() == "begun\n"


def test_a_worker_outlives_a_signal_for_the_whole_job_and_is_lost_when_it_is_killed(
    restarting, capfd
):
    """It waits for an answer without a limit, so that it would hang here if it did not see that the
    worker is gone. One that hangs and is replaced: test_vllm_weights.py."""
    before = set(psutil.Process().children(recursive=True)) - {
        worker_of(restarting._engines["engine"])
    }
    restarting.load_weights(tiny_llama(seed=1).named_parameters(), 4)
    expected, restarts = restarting.sample(PROMPTS, OPEN_END), restarting.restarts
    assert capfd.readouterr() == ("", "")
    (worker,) = new_processes(before)
    worker.send_signal(signal.SIGTERM)  # which a whole job may be sent: its parent says when to end
    assert restarting.sample(PROMPTS, OPEN_END) == expected and restarting.restarts == restarts
    assert expected[0][0].policy_version == restarting.policy_version == 4
    worker.send_signal(signal.SIGKILL)
    # The next test has the engine that is started in its place.
    assert restarting.sample(PROMPTS, OPEN_END) == expected and restarting.restarts == restarts + 1
    printed = capfd.readouterr()
    assert printed.out == "" and "killed by SIGKILL" in printed.err
    (replacement,) = new_processes(before)
    assert replacement != worker
