"""An engine that is lost: replaced once a request, with the weights it had, or the run is
stopped."""

import copy
import dataclasses

import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.model.loading import load_model, load_tokenizer
from alignment.sampling.pool import SamplerPool, check_completions
from alignment.sampling.sampler import SamplerLost
from alignment.sampling.transformers import TransformersSampler
from alignment.system.errors import RunStopped

SAMPLING = SamplingConfig(n=2, max_new_tokens=8, seed=3)
PROMPTS = ["User: What is 2 + 3?\nAssistant: <think>", "User: What is 6 * 2?\nAssistant: <think>"]


class Engine(TransformersSampler):
    """A real sampler that is lost where `faults` says: "dies", "hangs", or a function that spoils
    its answer."""

    faults: list = []

    def sample(self, prompts, sampling):
        fault = Engine.faults.pop(0) if Engine.faults else None
        if isinstance(fault, str):
            raise SamplerLost(fault)
        drawn = super().sample(prompts, sampling)
        return fault(drawn) if fault else drawn

    def load_weights(self, named_tensors, version):
        if Engine.faults and Engine.faults[0] == "dies at new weights":
            next(iter(named_tensors))  # halfway
            raise SamplerLost(Engine.faults.pop(0))
        super().load_weights(named_tensors, version)


@pytest.fixture
def policy(tiny_folder):
    """A policy that has been trained since the engine's own weights were loaded."""
    model = load_model(str(tiny_folder), ("cpu",), torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


@pytest.fixture
def sampler(tiny_folder, policy):
    Engine.faults = []
    tokenizer = load_tokenizer(str(tiny_folder))
    return SamplerPool(
        {
            "engine": lambda: Engine(
                load_model(str(tiny_folder), ("cpu",), torch.float32), tokenizer, 256
            )
        },
        torch.float32,
        len(tokenizer),
        policy.named_parameters,
    )


def spoil(**change):
    return lambda drawn: [[dataclasses.replace(drawn[0][0], **change), *drawn[0][1:]], *drawn[1:]]


FAULTS = {
    "a worker that dies": "dies",
    "a worker that hangs": "hangs",
    "too few completions": lambda drawn: drawn[:1],
    "too few samples": lambda drawn: [drawn[0][:1], drawn[1]],
    "no tokens": spoil(token_ids=(), log_probs=()),
    "too many tokens": spoil(token_ids=(5,) * 9, log_probs=(-1.0,) * 9),
    "a token that there is not": lambda drawn: spoil(token_ids=(9999, *drawn[0][0].token_ids[1:]))(
        drawn
    ),
    "a log-prob is missing": spoil(log_probs=(-1.0,)),
    "not a number": lambda drawn: spoil(log_probs=(float("nan"),) * len(drawn[0][0].token_ids))(
        drawn
    ),
    "above zero": lambda drawn: spoil(log_probs=(0.5,) * len(drawn[0][0].token_ids))(drawn),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_lost_engine_is_replaced_with_the_weights_it_had(fault, sampler, policy, capfd):
    sampler.load_weights(policy.named_parameters(), 7)
    expected = sampler.sample(PROMPTS, SAMPLING)
    assert expected[0][0].policy_version == 7
    Engine.faults = [fault]
    assert sampler.sample(PROMPTS, SAMPLING) == expected
    assert sampler.restarts == 1 and capfd.readouterr().err.startswith(
        "the sampler is started again: "
    )


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_engine_that_is_lost_twice_stops_the_run(fault, sampler):
    Engine.faults = [fault, fault]
    with pytest.raises(
        RunStopped, match="the sampler was lost .*, and once more after it was started again"
    ):
        sampler.sample(PROMPTS, SAMPLING)
    assert sampler.restarts == 1


def test_lost_while_it_takes_new_weights(sampler, policy):
    before = copy.deepcopy(sampler.sample(PROMPTS, SAMPLING))
    Engine.faults = ["dies at new weights"]
    sampler.load_weights(policy.named_parameters(), 1)
    after = sampler.sample(PROMPTS, SAMPLING)
    assert sampler.policy_version == after[0][0].policy_version == 1
    assert [c.log_probs for g in after for c in g] != [c.log_probs for g in before for c in g]
    reference = TransformersSampler(
        policy, sampler._engines["engine"].tokenizer, 256, policy_version=1
    )
    assert after == reference.sample(PROMPTS, SAMPLING)


def test_an_honest_answer_is_none(sampler):
    check_completions(sampler.sample(PROMPTS, SAMPLING), 2, SAMPLING, 307)
    with pytest.raises(SamplerLost, match="asked for 3 x 2 completions and gave"):
        check_completions(sampler.sample(PROMPTS, SAMPLING), 3, SAMPLING, 307)
