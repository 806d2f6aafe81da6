"""The reference model's own process: the same bits as a model in this process, whatever happens to
it."""

import contextlib
import dataclasses
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import collate
from alignment.model.frozen import FrozenModel, ReferenceProcess
from alignment.system.errors import RunStopped

VOCABULARY = 304


@pytest.fixture(scope="module")
def model(tiny_folder):
    return FrozenModel(str(tiny_folder), "cpu", torch.float32)


def make_batch(seed: int = 0, rows: int = 8) -> Batch:
    rng = random.Random(seed)
    prompts, responses = (
        [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))] for _ in range(rows)]
        for _ in "pr"
    )
    return collate(prompts, responses, pad_token_id=1)


def question(seed: int = 0, distribution=Distribution(), micro_batch_tokens=100) -> tuple:
    """The arguments with which log-probs are asked for."""
    return make_batch(seed), distribution, micro_batch_tokens


@pytest.mark.slow
def test_log_probs_are_those_of_the_model_in_this_process_bit_for_bit(process, model):
    for distribution, micro_batch_tokens in (
        (Distribution(), 1),
        (Distribution(), 100),
        (Distribution(0.7), 100),
        (Distribution(0.9, 0.8, 20), 100),
    ):
        arguments = question(1, distribution, micro_batch_tokens)
        batch = arguments[0]
        log_probs = process.log_probs(*arguments)
        expected = model.log_probs(*arguments)
        assert log_probs.shape == batch.labels.shape
        assert (log_probs[~batch.response_mask] == 0).all()
        assert torch.equal(log_probs[batch.response_mask], expected[batch.response_mask])


@contextlib.contextmanager
def opened(folder):
    with contextlib.closing(
        ReferenceProcess(str(folder), "cpu", torch.float32, False, 30.0)
    ) as process:
        yield process
    assert not process._child.is_open and process._child.process.returncode is not None


@pytest.fixture(scope="module")
def process(tiny_folder):
    """One that a test leaves with the folder's weights, whatever it has done to it."""
    with opened(tiny_folder) as process:
        yield process


@pytest.mark.slow
@pytest.mark.replaces_processes
def test_a_run_replaces_its_own_process_when_that_hangs(process, model, capsys, monkeypatch):
    restarts = process.restarts
    assert torch.equal(process.log_probs(*question()), model.log_probs(*question()))
    process._child.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(process, "timeout", 5.0)
    assert torch.equal(process.log_probs(*question(2)), model.log_probs(*question(2)))
    assert process.restarts == restarts + 1
    assert "gave no answer within 5 s (--sampler_timeout)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.replaces_processes
def test_a_process_has_other_weights_from_a_reset_on_also_when_it_is_replaced(
    process, model, tiny_folder, tmp_path, capsys
):
    """The other folder's weights are the first ones', halved."""
    restarts = process.restarts
    shutil.copytree(tiny_folder, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    halved = {name: tensor / 2 for name, tensor in load_file(file).items()}
    save_file(halved, file, metadata={"format": "pt"})
    expected = FrozenModel(str(tmp_path / "other"), "cpu", torch.float32).log_probs(*question())
    assert not torch.equal(expected, model.log_probs(*question()))
    process.reload(str(tmp_path / "other"))
    assert torch.equal(process.log_probs(*question()), expected)
    process._child.kill()
    assert torch.equal(process.log_probs(*question()), expected)
    process._child.kill()
    process.reload(str(tiny_folder))
    assert torch.equal(process.log_probs(*question()), model.log_probs(*question()))
    assert process.restarts == restarts + 2
    again = (
        "the reference model is started again: the reference model's process was killed by SIGKILL"
    )
    assert again in capsys.readouterr().err


@pytest.mark.slow
def test_a_rollout_that_no_process_can_compute_stops_the_run_with_its_reason(tiny_folder):
    batch, *settings = question()
    unknown = dataclasses.replace(batch, input_ids=batch.input_ids + VOCABULARY)
    reason = "the reference model's process failed: IndexError: index out of range"
    with opened(tiny_folder) as process:
        with pytest.raises(RunStopped, match=reason):
            process.log_probs(unknown, *settings)
        assert process.restarts == 1


@pytest.mark.slow
def test_a_process_that_is_closed_while_another_thread_waits_is_not_started_again(tiny_folder):
    with opened(tiny_folder) as process:
        process._child.process.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(process.log_probs, *question())
            time.sleep(0.3)
            process.close()
            with pytest.raises(RunStopped):
                waiting.result(5)
        assert process.restarts == 0
