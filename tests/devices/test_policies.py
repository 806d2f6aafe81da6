"""Policies, frozen models, sampler, SFT and updates on simulated GPUs: no two devices meet, and the
numbers are a CPU's."""

import dataclasses

import pytest
import torch
from rollout_helpers import ARGS, parity_reward, problems_of, rollout_of
from simulated_gpus import simulated_gpus

from alignment.core.records import Distribution, SamplingConfig
from alignment.model.frozen import FrozenModel
from alignment.model.loading import load_model, load_tokenizer
from alignment.policy.policy import PolicyConfig, open_policy
from alignment.rewards.rules import score_groups
from alignment.sampling.transformers import TransformersSampler
from alignment.system.clock import Clock
from alignment.training.sft import SFTConfig, SFTData, fine_tune
from alignment.training.update import LogProbSource, References, update

EXAMPLES = [((1, 2, number), (3 + number, 4, 5)) for number in range(6)]
SAMPLING = SamplingConfig(n=4, max_new_tokens=12, seed=1, top_k=20)


def train(
    folder, kind: str, devices: tuple[str, ...], others: str, save_to=None, **options
) -> dict[str, torch.Tensor]:
    """What two steps of RL with a KL penalty, several mini-batches and an old policy on `others`,
    then a step of SFT, change.

    `options` are further fields of the policy's configuration. Returns CPU tensors: weights, and
    log-probs of each step.
    """
    policy = open_policy(
        kind,
        PolicyConfig(
            str(folder), devices, micro_batch_tokens=150, **{"dtype": "float32", **options}
        ),
    )
    dtype = getattr(torch, policy.policy_config.dtype)
    sampler_model = load_model(str(folder), (others,), dtype)
    sampler = TransformersSampler(sampler_model, load_tokenizer(str(folder)), context=256)
    reference = FrozenModel(str(folder), others, dtype)
    old_policy = None if options.get("lora_rank") else FrozenModel(str(folder), others, dtype)
    args = dataclasses.replace(
        ARGS, beta=0.1, train_mini_batch_size=8, max_sampler_mismatch=5.0, sampling_top_k=20
    )
    references = References(
        args.update_config, old_policy, LogProbSource(reference.log_probs), Clock()
    )
    found = {}
    for step in (1, 2):
        problems = problems_of(args, step)
        completions = sampler.sample([problem.prompt for problem in problems], SAMPLING)
        rollout = rollout_of(score_groups(problems, completions, parity_reward), args)
        rollout = references.annotate(rollout, policy, step)
        result = update(policy, rollout, args.update_config, step)
        assert result.report["updates"] == 2
        found[f"log-probs of step {step}"] = result.trainer_log_probs_BT
        assert result.report["sampler_mismatch"] < (0.05 if dtype == torch.bfloat16 else 1e-4)
        sampler.load_weights(policy.weights(), step)
    config = SFTConfig(1, 6, False, 1e-3, 1, 1.0, 1, 0)
    fine_tune(policy, SFTData(EXAMPLES, EXAMPLES, 1), config, lambda record, words: None)
    found["base log-probs"] = policy.base_log_probs(rollout.batch, Distribution())
    if save_to is not None:
        save_to.mkdir()
        policy.save(save_to, load_tokenizer(str(folder)))
        policy.save_optimizer(save_to)
        policy.load_optimizer(save_to)
        policy.step(0.0)
    assert {str(weight.device) for _, weight in policy.weights()} <= set(devices)
    return found | {name: weight.detach().cpu().clone() for name, weight in policy.weights()}


@pytest.fixture(scope="module")
def on_the_cpu(tiny_folder):
    """The results of `train` on the CPU, by the policy's options."""
    known = {}

    def results(**options):
        key = tuple(options.items())
        if key not in known:
            known[key] = train(tiny_folder, "single", ("cpu",), "cpu", **options)
        return known[key]

    return results


# The others on a GPU of their own: `test_every_way_of_training_trains_as_on_a_cpu`.
PLACEMENTS = {
    "three GPUs": ("layer_split", ("cuda:2", "cuda:0", "cuda:1"), "cuda:1"),
    "the policy on the host": ("single", ("cpu",), "cuda:1"),
    "one GPU": ("single", ("cuda:0",), "cuda:0"),
    "the others on the host": ("single", ("cuda:0",), "cpu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_placement_trains_as_a_cpu_does(placement, tiny_folder, on_the_cpu, tmp_path):
    with simulated_gpus(3):
        found = train(tiny_folder, *placement, save_to=tmp_path / "saved")
    for name, expected in on_the_cpu().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4, msg=name)


OPTIONS = {
    "muon": {"optimizer": "muon"},
    "moments on the host": {"optimizer": "adamw_cpu_offload"},
    "adapters": {"lora_rank": 4},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "devices", [("cuda:1",), ("cuda:0", "cuda:1")], ids=["one GPU", "two GPUs"]
)
def test_every_way_of_training_trains_as_on_a_cpu(
    options, devices, tiny_folder, on_the_cpu, tmp_path
):
    kind = "single" if len(devices) == 1 else "layer_split"
    with simulated_gpus(3):
        found = train(tiny_folder, kind, devices, "cuda:2", tmp_path / "saved", **options)
    if "dtype" in options:
        # one rounding more moves a draw, after which everything differs; sampler and trainer have
        # been compared
        return
    for name, expected in on_the_cpu(**options).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-3, msg=name)


def test_decoding_with_dropped_rows_and_a_window_stays_on_its_device(tmp_path):
    """A window shorter than the prompt goes by the pieces of attention that no kernel has."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    MistralForCausalLM(MistralConfig(**sizes, **heads)).save_pretrained(tmp_path / "model")
    with simulated_gpus(2):
        model = load_model(str(tmp_path / "model"), ("cuda:1",), torch.float32)
        assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda:1")}
        policy = open_policy(
            "single",
            PolicyConfig(str(tmp_path / "model"), ("cuda:1",), "float32", micro_batch_tokens=64),
        )
        config = SFTConfig(1, 6, False, 1e-3, 1, 1.0, 1, 0)
        longer = [((1, 2, 3, 4, 5, 6, 7, number), (8, 9, 10, 11, 12)) for number in range(6)]
        fine_tune(policy, SFTData(longer, longer, 1), config, lambda record, words: None)
