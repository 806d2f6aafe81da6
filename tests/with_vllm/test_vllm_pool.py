"""A real vLLM engine of two devices, and one as on another machine, draw what one draws, and both
take new weights."""

import dataclasses
import functools
import socket

import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.sampling.arrival import load_proven
from alignment.sampling.pool import SamplerPool
from alignment.sampling.sampler import SamplerConfig
from alignment.sampling.vllm import VLLMSampler
from alignment.system.errors import RunStopped
from alignment.system.remote import ProcessHost
from tests.with_vllm.conftest import VOCABULARY, tiny_llama
from tests.with_vllm.test_vllm_sampler import PROMPTS, expected_log_probs, flat

SAMPLING = SamplingConfig(n=4, max_new_tokens=24, stop=(), seed=7)


@pytest.fixture
def two(model_path, tokenizer, monkeypatch):
    """Tensor parallelism over two processes, each on a core of its own: vLLM binds them to two NUMA
    nodes otherwise. And an engine as on another machine."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with socket.create_server(("127.0.0.1", 0)) as store:
        host = ProcessHost("there", 60.0, store.getsockname())
    config = SamplerConfig(model_path, "cpu", "float32", memory_share=0.4)
    of_two_devices = dataclasses.replace(config, further_devices=("cpu",), tensor_parallel=2)
    elsewhere = dataclasses.replace(config, machines=(host.machine,))
    starts = {
        "two devices": functools.partial(VLLMSampler, of_two_devices, tokenizer),
        "elsewhere": functools.partial(VLLMSampler, elsewhere, tokenizer),
    }
    pool = SamplerPool(starts, torch.float32, len(VOCABULARY))
    yield pool
    pool.close()
    host.close()


def test_both_engines_draw_the_tokens_of_one_and_take_new_weights(two, sampler, monkeypatch):
    """One that does not take them is named: its weights are others from then on, so that one test
    has all of it."""
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    for sampling in (SAMPLING, dataclasses.replace(SAMPLING, seed=8, temperature=0.7, top_p=0.9)):
        pairs = list(
            zip(
                flat(two.sample(prompts, sampling)),
                flat(sampler.sample(prompts, sampling)),
                strict=True,
            )
        )
        assert len(pairs) == 24
        for drawn, expected in pairs:
            assert drawn.token_ids == expected.token_ids and drawn.prompt_ids == expected.prompt_ids
            assert (
                torch.tensor(drawn.log_probs) - torch.tensor(expected.log_probs)
            ).abs().max() < 1e-3

    moved, later = tiny_llama(seed=1), tiny_llama(seed=2)
    for engine in (two, sampler):
        load_proven(engine, moved.named_parameters(), 3)
    pairs = zip(
        flat(two.sample(prompts, SAMPLING)), flat(sampler.sample(prompts, SAMPLING)), strict=True
    )
    for drawn, expected in pairs:
        assert drawn.token_ids == expected.token_ids and drawn.policy_version == 3
        assert (torch.tensor(drawn.log_probs) - expected_log_probs(moved, drawn)).abs().max() < 1e-3

    elsewhere = two._engines["elsewhere"]
    load, old = elsewhere.load_weights, dict(moved.named_parameters())

    def load_the_old_ones(new, version):
        load([(name, old[name]) for name, _ in new], version)

    monkeypatch.setattr(elsewhere, "load_weights", load_the_old_ones)
    with pytest.raises(
        RunStopped, match="^elsewhere: after step 4 the sampler holds other weights"
    ):
        load_proven(two, later.named_parameters(), 4)
