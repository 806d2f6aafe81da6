"""When a sampler that shares a GPU with the trainer sleeps: who says so, and what a pool and a
client of an engine make of it."""

from types import SimpleNamespace

import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.evaluation.accuracy import Evaluator
from alignment.model.loading import load_tokenizer
from alignment.rollouts.source import SyncRollouts
from alignment.sampling.pool import SamplerPool
from alignment.sampling.sampler import SamplerConfig, SamplerLost, WeightsDiscarded, put_to_sleep
from alignment.sampling.vllm import VLLMSampler
from alignment.sampling.vllm_memory import Span, extent, gaps, merged, overlaps
from alignment.system.clock import Clock

SAMPLING = SamplingConfig(n=1, max_new_tokens=4, seed=0)


class Sampler:
    """Writes down what it is asked for. `dies` names the requests at which it is lost."""

    restarts = 0

    def __init__(self, log, dies=()):
        self.log, self.dies, self.policy_version = log, list(dies), 0

    def note(self, request):
        self.log.append(request)
        if request in self.dies:
            raise SamplerLost("gone")

    def sample(self, prompts, sampling, on_response_end=None):
        self.note("sample")

    def load_weights(self, named_tensors, version):
        list(named_tensors)
        self.policy_version = version
        self.note(f"load {version}")

    def sleep(self, keep_weights):
        self.note("sleep, weights kept" if keep_weights else "sleep, weights discarded")

    def close(self):
        self.note("close")


class Folder:
    evaluated: set = set()

    def log_eval(self, record, groups, others):
        pass


def evaluator(sampler, check=None):
    run = SimpleNamespace(folder=Folder(), clock=Clock(), config=SimpleNamespace(num_steps=2))
    policy = SimpleNamespace(weights=lambda: iter(()))

    def evaluate(sampler):
        sampler.sample([], SAMPLING)
        return SimpleNamespace(groups=[], record={})

    return Evaluator(evaluate, 1, sampler, run, policy, check)


def rollouts(sampler):
    def sample_step(step, sampler):
        sampler.sample([], SAMPLING)
        return SimpleNamespace(step=step, policy_version=step - 1, seconds={})

    source = SimpleNamespace(sample_step=sample_step, config=SimpleNamespace(seed=0))
    return SyncRollouts(source, sampler, Clock())


def test_a_sampler_sleeps_once_a_step_while_the_trainer_computes_and_keeps_no_weights_then():
    log = []
    sampler = Sampler(log)
    steps, evaluations = rollouts(sampler), evaluator(sampler)
    policy = SimpleNamespace(weights=lambda: iter(()))
    evaluations.run_if_due(0)
    for step in (1, 2):
        steps.next(step)
        log.append("update")
        with steps.syncing(policy, step):
            pass
        evaluations.run_if_due(step)
    step = ["sample", "sleep, weights discarded", "update"]
    assert log == ["sample", *step, "load 1", "sample", *step, "load 2", "sample"]


def test_a_sampler_that_only_evaluates_sleeps_before_the_trainer_computes_log_probs():
    log = []
    evaluations = evaluator(
        Sampler(log), check=lambda groups: log.append("the trainer's log-probs")
    )
    evaluations.run_if_due(0)
    evaluations.run_if_due(1)
    once = ["sample", "sleep, weights discarded", "the trainer's log-probs"]
    assert log == [*once, "load 1", *once]


def test_a_sampler_that_cannot_sleep_is_left_alone():
    put_to_sleep(SimpleNamespace(), keep_weights=False)


@pytest.fixture
def pool():
    """A pool of one engine, which is lost at `log.dies`, with the policy's weights at hand."""
    log, started = [], []

    def start():
        started.append(Sampler(log, dies if not started else ()))
        log.append(f"start {len(started)}")
        return started[-1]

    dies: list[str] = []
    pool = SamplerPool(
        {"engine": start}, torch.float32, 9, weights=lambda: iter([("a", torch.ones(1))])
    )
    started[0].dies = dies
    pool.log, pool.dies = log, dies
    yield pool
    pool.close()


def test_an_engine_that_is_lost_as_it_falls_asleep_is_replaced_by_one_that_sleeps_too(pool):
    pool.load_weights(iter(()), 3)
    pool.dies.append("sleep, weights discarded")
    pool.sleep(keep_weights=False)
    discarded = "sleep, weights discarded"
    assert (
        pool.log == ["start 1", "load 3", discarded, "close", "start 2", "load 3", discarded]
        and pool.restarts == 1
    )


def test_one_that_died_asleep_is_replaced_with_the_weights_that_come_next(pool):
    pool.sleep(keep_weights=False)
    pool.dies.append("load 4")
    pool.load_weights(iter(()), 4)
    assert pool.log[-3:] == ["close", "start 2", "load 4"] and pool.policy_version == 4


class Process:
    """Stands in for the process of vLLM: it answers, and writes down what it is asked."""

    def __init__(self, *unused):
        self.asked = []

    def ask(self, seconds, verb, *arguments, **options):
        self.asked.append((verb, *arguments))
        return [] if verb == "generate" else None

    def clear_log(self):
        pass

    def close(self):
        pass


@pytest.fixture
def client(tiny_folder, monkeypatch):
    """A `VLLMSampler` of such a process, on a GPU that it shares."""
    import alignment.sampling.pool as module

    monkeypatch.setattr(module, "ChildProcess", Process)
    config = SamplerConfig(str(tiny_folder), "cuda:0", "bfloat16", sleeps=True, policy_version=7)
    sampler = VLLMSampler(config, load_tokenizer(str(tiny_folder)))
    sampler._client = SimpleNamespace(send=lambda named_tensors, version: list(named_tensors))
    return sampler


def test_a_client_asks_no_engine_for_completions_with_discarded_weights(client):
    """Asked, the engine would fail, and be replaced by one with weights of another version."""
    client.sample(["1"], SAMPLING)
    client.sleep(keep_weights=True)
    client.sample(["1"], SAMPLING)
    client.sleep(keep_weights=False)
    asked = len(client._worker.asked)
    with pytest.raises(WeightsDiscarded, match="cuda:0 has discarded its weights, of version 7"):
        client.sample(["1"], SAMPLING)
    assert len(client._worker.asked) == asked

    def broken():
        yield "a", torch.ones(1)
        raise SamplerLost("halfway")

    with pytest.raises(SamplerLost):
        client.load_weights(broken(), 8)
    with pytest.raises(WeightsDiscarded):
        client.sample(["1"], SAMPLING)
    client.load_weights(iter(()), 8)
    client.sample(["1"], SAMPLING)
    assert client._worker.asked[-1][0] == "generate"


def test_the_trainer_gives_back_unused_memory_once_before_an_engine_wakes_and_not_in_each_phase(
    client, monkeypatch
):
    from alignment.system import device_memory

    released = []
    monkeypatch.setattr(
        device_memory, "release_memory", lambda: released.append(len(client._worker.asked))
    )
    client._client.send = lambda named_tensors, version: [
        client._ask("transfer", number) for number in range(9)
    ]
    before = len(client._worker.asked)
    client.load_weights(iter(()), 8)
    client.sample(["1"], SAMPLING)
    client.sleep(keep_weights=False)
    assert released == [before, before + 9]


def test_spans_of_addresses():
    blocks = [Span(0, 100), Span(200, 260)]
    parts = [Span(10, 30), Span(90, 210), Span(255, 300)]
    assert overlaps(blocks, parts) == [Span(10, 30), Span(90, 100), Span(200, 210), Span(255, 260)]
    assert gaps(blocks, parts) == [Span(0, 10), Span(30, 90), Span(210, 255)]
    assert gaps(blocks, []) == blocks and gaps(blocks, [Span(0, 300)]) == []
    assert merged([Span(5, 9), Span(0, 6), Span(9, 12), Span(20, 21), Span(30, 30)]) == [
        Span(0, 12),
        Span(20, 21),
    ]
    matrix = torch.zeros(4, 6)
    start = matrix.data_ptr()
    assert extent(matrix.mT) == Span(start, start + 96)
    assert extent(matrix[1:3, 2:4]) == Span(start + 32, start + 64)  # numbers 8 to 15
    assert merged([extent(matrix[:0])]) == []
