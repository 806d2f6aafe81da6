"""An engine that opens beside the loading of models: what it waits for, what the user sees, and
what is left when it is given up."""

import io
import threading
import time

import psutil
import pytest
from rich.console import Console

from alignment.core.records import SamplingConfig
from alignment.model.loading import load_tokenizer
from alignment.sampling import opening as module
from alignment.sampling.opening import Opening, PolicyToCome
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import SamplerConfig, SamplerEngine
from alignment.sampling.transformers import open_transformers
from alignment.system.errors import UserError
from alignment.system.processes import ChildProcess

pytestmark = pytest.mark.slow

SECONDS = 60


def slow_engine(config, tokenizer, policy):
    """An engine that tells what it does, and takes long. It runs in a process of its own."""
    print("stage: loading weights\nof other lines\nstage: compiling", flush=True)
    time.sleep(2.5)
    return open_transformers(config, tokenizer, policy)


def refusing_engine(config, tokenizer, policy):
    raise UserError("no room")


def opening_of(folder, engine, devices=("cpu", "cpu")) -> Opening:
    """Of two engines, which have processes of their own."""
    tokenizer = load_tokenizer(str(folder))

    def start(begun):
        config = SamplerConfig(
            str(folder),
            devices[0],
            "float32",
            timeout=SECONDS,
            further_devices=devices[1:],
            start=begun,
        )
        return open_sampler(SamplerEngine(engine), config, tokenizer, PolicyToCome(("cpu",)))

    return Opening("the engines", start)


def processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def happens_within(seconds, condition) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def test_processes_start_at_once_and_engines_when_they_may_take_memory(
    tiny_folder, monkeypatch, capfd
):
    """The user reads what is waited for: where the output is no terminal, a line now and then. An
    engine that is lost later is replaced at once."""
    monkeypatch.setattr(module, "LINE_SECONDS", 1)
    output = io.StringIO()
    before, asked = processes(), []
    ask = ChildProcess.ask
    monkeypatch.setattr(
        ChildProcess,
        "ask",
        lambda self, *arguments, **named: asked.append(1) or ask(self, *arguments, **named),
    )
    opening = opening_of(tiny_folder, slow_engine)
    try:
        assert happens_within(
            SECONDS, lambda: len(processes() - before) == 2 and len(opening._processes) == 2
        )
        time.sleep(0.5)  # in which an engine that does not wait would be asked to start
        assert not asked
        sampler = opening.result(Console(file=output, width=200))
        assert len(asked) == 2
        last = output.getvalue().splitlines()[-1]
        assert last.startswith("waiting for the engines: ") and last.endswith(" s (compiling)")
        sampling = SamplingConfig(n=1, max_new_tokens=4, seed=0)
        drawn = sampler.sample(["1 + 1", "2 + 2"], sampling)
        next(iter(sampler._engines.values()))._worker.kill()
        assert sampler.sample(["1 + 1", "2 + 2"], sampling) == drawn and sampler.restarts == 1
        assert "the sampler is started again" in capfd.readouterr().err
        sampler.close()
    finally:
        opening.close()
    assert happens_within(SECONDS, lambda: not processes() - before)


def test_what_an_engine_refuses_is_raised_where_the_sampler_is_wanted(tiny_folder):
    """And ends all engines."""
    before = processes()
    opening = opening_of(tiny_folder, refusing_engine)
    refusal = "^engine . of 2 on cpu: sampler could not start on cpu with .*: UserError: no room"
    with pytest.raises(UserError, match=refusal):
        opening.result(Console(file=io.StringIO()))
    assert happens_within(SECONDS, lambda: not processes() - before)


@pytest.mark.parametrize("allowed", [False, True])
def test_an_engine_that_is_given_up_leaves_no_process(allowed, tiny_folder):
    """Before it may start, and while it does."""
    before, threads = processes(), set(threading.enumerate())
    opening = opening_of(tiny_folder, slow_engine)
    assert happens_within(SECONDS, lambda: len(opening._processes) == 2)
    if allowed:
        opening.allow()
    opening.close()
    assert happens_within(15, lambda: not processes() - before)
    assert happens_within(15, lambda: set(threading.enumerate()) <= threads)


def test_a_policy_to_come_gives_its_weights_when_it_is_there():
    coming = PolicyToCome(("cuda:0", "cuda:1"))
    coming.policy = type("Loaded", (), {"weights": lambda self: [("a", 1)]})()
    assert coming.devices[0] == "cuda:0" and coming.weights() == [("a", 1)]
