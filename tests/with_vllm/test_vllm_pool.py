"""Two real vLLM engines, one as on another machine, draw what one draws, and both take new
weights."""

import dataclasses
import socket

import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.sampling.arrival import load_proven
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import SAMPLERS, SamplerConfig
from alignment.system.errors import RunStopped
from alignment.system.remote import ProcessHost
from tests.with_vllm.conftest import tiny_llama
from tests.with_vllm.test_vllm_sampler import PROMPTS, expected_log_probs, flat

SAMPLING = SamplingConfig(n=4, max_new_tokens=24, stop=(), seed=7)


@pytest.fixture
def two(model_path, tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as store:
        host = ProcessHost("there", 60.0, store.getsockname())
    config = SamplerConfig(
        model_path, "cpu", "float32", memory_share=0.4, machines=(None, host.machine)
    )
    pool = open_sampler(SAMPLERS["vllm"], config, tokenizer)
    yield pool
    pool.close()
    host.close()


def test_two_engines_draw_the_tokens_of_one_and_take_new_weights(two, sampler, monkeypatch):
    """Both take new weights, and one that does not is named: its weights are others from then on,
    so that one test has all of it."""
    for sampling in (SAMPLING, dataclasses.replace(SAMPLING, seed=8, temperature=0.7, top_p=0.9)):
        pairs = list(
            zip(
                flat(two.sample(PROMPTS, sampling)),
                flat(sampler.sample(PROMPTS, sampling)),
                strict=True,
            )
        )
        assert len(pairs) == 12
        for drawn, expected in pairs:
            assert drawn.token_ids == expected.token_ids and drawn.prompt_ids == expected.prompt_ids
            assert (
                torch.tensor(drawn.log_probs) - torch.tensor(expected.log_probs)
            ).abs().max() < 1e-3

    moved, later, first = (
        tiny_llama(seed=1),
        tiny_llama(seed=2),
        two._engines["engine 1 of 2 on cpu"]._client._source,
    )
    load_proven(two, moved.named_parameters(), 3)
    for completion in flat(two.sample(PROMPTS, SAMPLING)):
        assert completion.policy_version == 3
        assert (
            torch.tensor(completion.log_probs) - expected_log_probs(moved, completion)
        ).abs().max() < 1e-3

    def old_ones_for_the_first(source):
        new = list(right(source))
        return iter(
            [(name, tensor.detach()) for name, tensor in moved.named_parameters()]
            if source is first
            else new
        )

    right = type(first).__iter__
    monkeypatch.setattr(type(first), "__iter__", old_ones_for_the_first)
    with pytest.raises(
        RunStopped, match="^engine 1 of 2 on cpu: after step 4 the sampler holds other weights"
    ):
        load_proven(two, later.named_parameters(), 4)


def test_one_engine_of_two_devices_draws_the_tokens_of_one_and_takes_new_weights(
    model_path, tokenizer, sampler, monkeypatch
):
    """Tensor parallelism over two processes, each on a core of its own: vLLM binds them to two NUMA
    nodes otherwise."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    config = SamplerConfig(
        model_path,
        "cpu",
        "float32",
        memory_share=0.4,
        further_devices=("cpu",),
        tensor_parallel=2,
    )
    two = open_sampler(SAMPLERS["vllm"], config, tokenizer)
    try:
        for version in range(2):
            model = tiny_llama(seed=version)
            for engine in (sampler, two) if version else ():
                load_proven(engine, model.named_parameters(), version)
            drawn, expected = (flat(engine.sample(PROMPTS, SAMPLING)) for engine in (two, sampler))
            assert [completion.token_ids for completion in drawn] == [
                completion.token_ids for completion in expected
            ]
            for completion in drawn:
                difference = torch.tensor(completion.log_probs) - expected_log_probs(
                    model, completion
                )
                assert completion.policy_version == version and difference.abs().max() < 1e-3
    finally:
        two.close()
