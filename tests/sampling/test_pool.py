"""Several engines draw together: the completions of one, and any fault of one is seen and named."""

import copy
import dataclasses
import socket
import threading
import time

import psutil
import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.model.loading import load_model, load_tokenizer
from alignment.sampling.arrival import load_proven
from alignment.sampling.pool import SamplerPool, open_sampler
from alignment.sampling.sampler import SAMPLERS, SamplerConfig, SamplerEngine
from alignment.sampling.transformers import TransformersSampler, open_transformers
from alignment.system.errors import RunStopped
from alignment.system.remote import ProcessHost

pytestmark = pytest.mark.slow

PROMPTS = [f"User: What is {i} + {i * i}?\nAssistant: <think>" for i in range(7)]
SAMPLING = SamplingConfig(n=3, max_new_tokens=12, seed=3, stop=())


def open_engines(folder, number: int, engine: SamplerEngine = SAMPLERS["transformers"]):
    config = SamplerConfig(
        str(folder), "cpu", "float32", timeout=60.0, further_devices=("cpu",) * (number - 1)
    )
    return open_sampler(engine, config, load_tokenizer(str(folder)))


@pytest.fixture(scope="module")
def three(tiny_folder):
    """Two engines here, and one on another machine, whose part this process takes. A test that
    changes their weights puts them back."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        host = ProcessHost("b (rank 2)", 60.0, store.getsockname())
    machines = (None, None, host.machine)
    config = SamplerConfig(str(tiny_folder), "cpu", "float32", timeout=60.0, machines=machines)
    pool = open_sampler(SAMPLERS["transformers"], config, load_tokenizer(str(tiny_folder)))
    yield pool
    processes = [process_of(pool, name) for name in pool._engines]
    pool.close()
    pool.close()
    assert not any(process.is_running() for process in processes)
    host.close()


def process_of(pool, engine: str) -> psutil.Process:
    return psutil.Process(pool._engines[engine]._worker.process.pid)


def other_end(process: psutil.Process) -> psutil.Process:
    """The child of this process that a process has a connection with."""
    (connection,) = process.net_connections("tcp")
    for child in psutil.Process().children():
        for end in child.net_connections("tcp"):
            if end.raddr == connection.laddr:
                return child
    raise AssertionError("there is none")


@pytest.fixture
def moved(tiny_folder):
    """The tiny model after an update."""
    model = load_model(str(tiny_folder), ("cpu",), torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn_like(weight)
    return model


def tokens(groups) -> list:
    return [
        (c.prompt_ids, c.token_ids, c.text, c.finish_reason, c.policy_version)
        for group in groups
        for c in group
    ]


def log_probs(groups) -> torch.Tensor:
    return torch.tensor([value for group in groups for c in group for value in c.log_probs])


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:2], PROMPTS[:3] * 2], ids=len)
def test_three_engines_draw_the_tokens_of_one(prompts, three, tiny_folder):
    one = open_engines(tiny_folder, 1)
    assert isinstance(one, TransformersSampler)
    for sampling in (
        SAMPLING,
        dataclasses.replace(SAMPLING, seed=4, temperature=0.7, top_p=0.9),
    ):
        expected = one.sample(prompts, sampling)
        drawn = three.sample(prompts, sampling)
        assert tokens(drawn) == tokens(expected)
        assert (log_probs(drawn) - log_probs(expected)).abs().max() < 1e-5


def test_no_two_prompts_share_random_numbers(three):
    drawn = three.sample(PROMPTS[:1] * 7, dataclasses.replace(SAMPLING, max_new_tokens=24))
    assert len({c.token_ids for group in drawn for c in group}) == 21


@pytest.mark.replaces_processes
def test_all_engines_take_new_weights_and_those_that_are_replaced_take_them_too(
    three, moved, tiny_folder, capfd
):
    """One that is killed here, and one there, which is replaced there."""
    tokenizer = load_tokenizer(str(tiny_folder))
    expected = TransformersSampler(moved, tokenizer, 256, policy_version=5)
    drawn = tokens(expected.sample(PROMPTS, SAMPLING))
    try:
        load_proven(three, moved.named_parameters(), 5)
        assert three.policy_version == 5 and tokens(three.sample(PROMPTS, SAMPLING)) == drawn
        process_of(three, "engine 2 of 3 on cpu").kill()
        assert tokens(three.sample(PROMPTS, SAMPLING)) == drawn
        assert three.restarts == 1
        assert "started again: the sampler process on cpu was killed" in capfd.readouterr().err
        other_end(process_of(three, "engine 3 of 3 on cpu of b (rank 2)")).kill()
        assert tokens(three.sample(PROMPTS, SAMPLING)) == drawn
        assert three.restarts == 2
        failure = "on cpu of b (rank 2) failed: the process was killed by SIGKILL"
        assert f"started again: the sampler process {failure}" in capfd.readouterr().err
    finally:
        first = load_model(str(tiny_folder), ("cpu",), torch.float32)
        load_proven(three, first.named_parameters(), 0)


def test_weights_that_reach_only_one_engine_are_noticed(loaded_model, moved, tiny_folder):
    """The other one keeps its old values. (What it sees of faults: test_arrival.py.)"""
    tokenizer = load_tokenizer(str(tiny_folder))

    def open_here() -> TransformersSampler:
        return TransformersSampler(copy.deepcopy(loaded_model), tokenizer, context=256)

    def open_deaf() -> TransformersSampler:
        sampler = open_here()
        load = sampler.load_weights

        def load_the_old_ones(new, version):
            load([(name, old[name]) for name, _ in new], version)

        sampler.load_weights = load_the_old_ones
        return sampler

    old = dict(loaded_model.named_parameters())
    starts = {"engine 1 of 2": open_here, "engine 2 of 2": open_deaf}
    pool = SamplerPool(starts, torch.float32, loaded_model.config.vocab_size)
    with pytest.raises(
        RunStopped, match="^engine 2 of 2: after step 1 the sampler holds other weights"
    ):
        load_proven(pool, moved.named_parameters(), 1)


def slow_or_faulty(config, tokenizer, policy):
    """An engine that takes long, but where it draws the first prompt: there it is lost, again and
    again."""
    sampler = open_transformers(config, tokenizer, policy)
    draw = sampler.sample

    def sample(prompts, sampling):
        if not sampling.first_prompt:
            raise ValueError("a cable is loose")
        time.sleep(300)
        return draw(prompts, sampling)

    sampler.sample = sample
    return sampler


def test_an_engine_that_fails_is_named_and_the_others_end(tiny_folder):
    before, threads = set(psutil.Process().children(recursive=True)), set(threading.enumerate())
    pool = open_engines(tiny_folder, 2, SamplerEngine(slow_or_faulty))
    start = time.monotonic()
    with pytest.raises(
        RunStopped,
        match="^engine 1 of 2 on cpu: the sampler was lost .*ValueError: a cable is loose",
    ):
        pool.sample(PROMPTS, SAMPLING)
    assert time.monotonic() - start < 60
    assert not set(psutil.Process().children(recursive=True)) - before
    assert set(threading.enumerate()) <= threads
