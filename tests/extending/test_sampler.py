"""A sampler engine of the user's own: what it draws, and a whole run with it."""

import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.model.loading import load_tokenizer
from alignment.sampling.pool import check_completions, open_sampler
from alignment.sampling.sampler import SamplerConfig, find_engine
from alignment.system.files import read_jsonl

ENGINE = "my_package.generate:engine"


def test_completions_are_repeatable_and_end_at_the_stop_string(tiny_folder):
    tokenizer = load_tokenizer(str(tiny_folder))
    sampler = open_sampler(
        find_engine(ENGINE), SamplerConfig(str(tiny_folder), "cpu", "float32"), tokenizer
    )
    sampling = SamplingConfig(n=4, max_new_tokens=24, stop=("e",), seed=3)
    groups = sampler.sample(["1 + 1", "What is 2 + 3?"], sampling)
    check_completions(groups, 2, sampling, vocabulary=len(tokenizer))
    assert sampler.sample(["1 + 1", "What is 2 + 3?"], sampling) == groups
    completions = [completion for group in groups for completion in group]
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert completion.text.count("e") == completion.text.endswith("e")
        assert len(completion.token_ids) == 24 or completion.finish_reason == "stop"


@pytest.mark.slow
def test_a_run_with_it_agrees_with_the_trainer(train):
    run = train("--sampler", ENGINE, "--run_name", "run", "--max_sampler_mismatch", "1e-4")
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2]


def test_it_takes_new_weights(tiny_folder):
    tokenizer = load_tokenizer(str(tiny_folder))
    sampler = open_sampler(
        find_engine(ENGINE), SamplerConfig(str(tiny_folder), "cpu", "float32"), tokenizer
    )
    before = sampler.sample(["1 + 1"], SamplingConfig(max_new_tokens=4))
    halved = {name: tensor / 2 for name, tensor in sampler.model.named_parameters()}
    sampler.load_weights(halved.items(), version=7)
    after = sampler.sample(["1 + 1"], SamplingConfig(max_new_tokens=4))
    assert (before[0][0].policy_version, after[0][0].policy_version) == (0, 7)
    assert before[0][0].log_probs != after[0][0].log_probs
    assert all(
        torch.equal(halved[name], tensor) for name, tensor in sampler.model.named_parameters()
    )
