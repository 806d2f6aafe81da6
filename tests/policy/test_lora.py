"""LoRA: what is trained, what is merged, and what PEFT makes of what is saved."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from rollout_helpers import ARGS, sample_rollout
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from alignment import build
from alignment.args import RLArgs, SFTArgs, from_preset
from alignment.core.records import Distribution
from alignment.data.tasks import arithmetic
from alignment.policy import lora
from alignment.policy.frozen import FrozenModel
from alignment.policy.loading import load_model, load_tokenizer
from alignment.policy.log_probs import get_response_log_probs
from alignment.policy.placement import ModelShape, Roles, place
from alignment.policy.policy import Objective, PolicyConfig, open_policy
from alignment.sampling.transformers import TransformersSampler
from alignment.system.errors import RunStopped, UserError

CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
NEAR = Distribution(0.9)


def negative_sum(rows, log_probs, mask):
    return -(log_probs * mask).sum() / 100, {}


def open_lora(folder, kind="single", devices=("cpu",), **fields):
    """A policy with adapters of rank 4."""
    return open_policy(
        kind, PolicyConfig(str(folder), devices, "float32", **{"micro_batch_tokens": 64, "lora_rank": 4, **fields})
    )


def train_a_little(policy, batch, steps=2):
    for _ in range(steps):
        list(policy.accumulate(batch, range(len(batch.labels)), Objective(negative_sum, NEAR)))
        policy.clip_gradient(1.0)
        policy.step(1e-2)


@pytest.fixture(scope="module")
def batch(tiny_folder):
    model = load_model(str(tiny_folder), ("cpu",), torch.float32)
    return sample_rollout(TransformersSampler(model, load_tokenizer(str(tiny_folder)), context=256)).batch


@pytest.fixture(scope="module")
def trained(tiny_folder, batch):
    policy = open_lora(tiny_folder)
    train_a_little(policy, batch)
    return policy


@pytest.fixture(scope="module")
def saved(trained, tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trained.save(folder, load_tokenizer(str(tiny_folder)))
    return folder


# --- merged ---------------------------------------------------------------------------------------------------------


def test_a_merged_weight_worked_by_hand():
    """W + 3 / 1 * B A = [[1, 2], [3, 4]] + 3 * [[2, -2], [0.5, -0.5]]."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), model[0].bias.detach().clone()
    model[0].weight.data = weight.clone()
    inject_adapter_in_model(LoraConfig(r=1, lora_alpha=3, target_modules=["0"]), model)
    layer = model[0]
    layer.lora_A["default"].weight.data = torch.tensor([[1.0, -1.0]])
    layer.lora_B["default"].weight.data = torch.tensor([[2.0], [0.5]])
    merged = dict(lora.merged_weights(model))
    assert list(merged) == ["0.weight", "0.bias"] and torch.equal(merged["0.bias"], bias)
    assert torch.equal(merged["0.weight"], torch.tensor([[7.0, -4.0], [4.5, 2.5]]))
    assert torch.equal(layer.base_layer.weight, weight)


def test_steps_change_no_bit_of_the_base_and_only_adapters_have_moments(trained, tiny_folder, batch):
    base = dict(load_model(str(tiny_folder), ("cpu",), torch.float32).named_parameters())
    names = [name for name, _ in trained.model.named_parameters() if "lora_" not in name]
    for name in names:
        assert torch.equal(trained.model.get_parameter(name), base[name.replace(".base_layer", "")]), name
    # Rank 4, two layers: q, o 128 + 128 each; k, v the same; gate, up, down 128 + 384.
    adapters = 4 * 2 * (4 * 256 + 3 * 512)
    moments = [value for state in trained.optimizer.state.values() for value in state.values() if value.ndim]
    assert sum(value.numel() for value in moments) == 2 * adapters == 2 * len(trained.gradient())
    merged = dict(trained.weights())
    assert merged.keys() == base.keys() and not torch.equal(*(w["model.layers.0.mlp.up_proj.weight"] for w in (merged, base)))
    list(trained.accumulate(batch, [], Objective(negative_sum)))  # no rows: zeros
    assert trained.gradient().shape == (adapters,) and not trained.gradient().any()
    assert sum(parameter.numel() for group in trained.optimizer.param_groups for parameter in group["params"]) == adapters
    assert all(trained.model.get_parameter(name).grad is None for name in names)
    trained.drop_gradient()


def test_merged_log_probs_are_the_adapters_log_probs_and_peft_loads_them_on_the_base(trained, saved, tiny_folder, batch):
    ours = trained.log_probs(batch, NEAR)
    assert (trained.base_log_probs(batch, NEAR) - ours).abs().max() > 0.01
    merged = FrozenModel(str(saved), "cpu", torch.float32).log_probs(batch, NEAR, 1000)
    assert (merged - ours).abs().max() < 1e-5
    assert json.loads((saved / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_folder)
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32), saved / "adapter"
    )
    assert (plain_log_probs(loaded, batch) - ours)[batch.response_mask].abs().max() < 1e-5


def plain_log_probs(model, batch):
    logits = model(input_ids=batch.input_ids).logits / NEAR.temperature
    return logits.log_softmax(-1).gather(-1, batch.labels[..., None]).squeeze(-1)


def test_the_gradient_is_autograds_on_the_plain_model_with_peft(trained, saved, tiny_folder, batch):
    list(trained.accumulate(batch, range(len(batch.labels)), Objective(negative_sum, NEAR)))
    ours = trained.gradient()
    trained.drop_gradient()
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, saved / "adapter", is_trainable=True)
    (-plain_log_probs(plain, batch)[batch.response_mask].sum() / 100).backward()
    theirs = torch.cat([p.grad.flatten() for p in plain.parameters() if p.requires_grad])
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_the_base_without_adapters_is_the_frozen_model_to_the_bit(trained, tiny_folder, batch):
    frozen = FrozenModel(str(tiny_folder), "cpu", torch.float32)
    assert torch.equal(trained.base_log_probs(batch, NEAR), frozen.log_probs(batch, NEAR, trained.micro_batch_tokens))


# --- resumed --------------------------------------------------------------------------------------------------------


def test_a_resumed_policy_goes_on_from_the_adapter_to_the_bit(trained, saved, tiny_folder, batch, tmp_path):
    file = tmp_path / "optimizer.safetensors"
    trained.save_optimizer(file)
    resumed = open_lora(tiny_folder, adapter=str(saved / "adapter"))
    resumed.load_optimizer(file)
    straight = open_lora(tiny_folder)
    train_a_little(straight, batch, 3)
    train_a_little(resumed, batch, 1)
    for (name, one), (_, other) in zip(straight.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name
    elsewhere = open_lora(saved, adapter=str(saved / "adapter"))  # the merged weights would count the adapters twice
    with pytest.raises(UserError, match="has changed since"):
        elsewhere.load_optimizer(file)


# --- kinds of policy ------------------------------------------------------------------------------------------------


def test_split_by_layers_it_is_the_same(trained, tiny_folder, batch):
    split = open_lora(tiny_folder, "layer_split", ("cpu", "cpu:0"))
    train_a_little(split, batch)
    for (name, one), (_, other) in zip(trained.weights(), split.weights(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name


RANKS = """
import sys, torch
from pathlib import Path
from tests.policy.test_lora import NEAR, open_lora, train_a_little
from alignment.policy.loading import load_tokenizer
folder, batch, out = sys.argv[1], torch.load(sys.argv[2], weights_only=False), Path(sys.argv[3])
single = open_lora(folder)
train_a_little(single, batch)
for kind in ("replicated", "sharded"):
    policy = open_lora(folder, kind, ("cpu", "cpu"))
    train_a_little(policy, batch)
    pairs = zip(single.weights(), policy.weights(), strict=True)
    print(max((one - other).abs().max().item() for (_, one), (_, other) in pairs))
    print((single.base_log_probs(batch, NEAR) - policy.base_log_probs(batch, NEAR)).abs().max().item())
    before = policy.log_probs(batch, NEAR)
    policy.probe_adapters(True)
    assert (policy.log_probs(batch, NEAR) - before).abs().max() > 0.1
    policy.probe_adapters(False)
    assert torch.equal(policy.log_probs(batch, NEAR), before)
    policy.save(out / kind, load_tokenizer(folder))
    policy.save_optimizer(out / f"{kind}.safetensors")
    again = open_lora(folder, kind, ("cpu", "cpu"), adapter=f"{out}/{kind}/adapter")
    again.load_optimizer(out / f"{kind}.safetensors")
    assert torch.equal(again.log_probs(batch, NEAR), before)
"""


def test_ranks_compute_the_same(tiny_folder, batch, tmp_path):
    torch.save(batch, tmp_path / "batch")
    command = [sys.executable, "-c", RANKS, str(tiny_folder), str(tmp_path / "batch"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ":".join([".", "tests"]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    differences = list(map(float, done.stdout.split()))
    assert len(differences) == 4 and max(differences) < 1e-5


# --- targets --------------------------------------------------------------------------------------------------------


def test_targets_are_names_as_peft_takes_them():
    model = Qwen2ForCausalLM(CONFIG)
    assert lora.target_layers(model, ("q_proj", "0.mlp.up_proj")) == [
        "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    assert len(lora.target_layers(model, ())) == 14 and "lm_head" in lora.target_layers(model, ("lm_head",))
    for wrong in ("query", "proj", "embed_tokens", "self_attn"):
        with pytest.raises(UserError, match=f"^--lora_targets {wrong}: no linear layer has this name; there are down_proj,"):
            lora.target_layers(model, ("q_proj", wrong))
    tied = Qwen2ForCausalLM(Qwen2Config(**CONFIG.to_dict() | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match="^--lora_targets names the output head, whose matrix is the embedding's"):
        lora.target_layers(tied, ("q_proj", "lm_head"))


@pytest.mark.parametrize("targets", [("lm_head",), ("lm_head", "q_proj")])
def test_a_head_of_its_own_can_be_a_target(targets, tmp_path):
    torch.manual_seed(0)
    Qwen2ForCausalLM(CONFIG).save_pretrained(tmp_path)
    policy = open_lora(tmp_path, lora_targets=targets)
    policy.probe_adapters(True)  # so that gradients of A are not 0
    ids = torch.arange(24).view(2, 12)
    mask = (ids % 12) > 3
    ours = get_response_log_probs(policy.model, ids, ids + 1, response_mask=mask)["log_probs"]
    logits = policy.model(input_ids=ids).logits
    plain = logits.log_softmax(-1).gather(-1, (ids + 1)[..., None]).squeeze(-1) * mask
    assert (ours - plain).abs().max() < 1e-5
    parameters = [parameter for _, parameter in lora.adapters(policy.model)]
    pairs = zip(*(torch.autograd.grad(values.sum(), parameters) for values in (ours, plain)), strict=True)
    assert all((one - other).norm() <= 1e-5 * other.norm() for one, other in pairs)
    merged = dict(policy.weights())["lm_head.weight"]
    assert not torch.equal(merged, policy.model.lm_head.base_layer.weight)


# --- the sampler ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Deaf:
    """A sampler that says it has taken new weights, and has not."""

    sampler: TransformersSampler
    policy_version: int = 0

    def sample(self, *arguments):
        return self.sampler.sample(*arguments)

    def load_weights(self, named_tensors, version):
        list(named_tensors)


def test_a_sampler_must_follow_random_adapters_and_then_has_the_true_ones(trained, tiny_folder, sampler):
    args = dataclasses.replace(ARGS, lora_rank=4)
    problems = arithmetic.problems("train")[:4]
    with pytest.raises(RunStopped, match="^the sampler does not follow the LoRA adapters: with random ones its"):
        build.check_adapters_arrive(args, trained, Deaf(sampler), problems, 1)
    before = {name: tensor.clone() for name, tensor in trained.weights()}
    build.check_adapters_arrive(args, trained, sampler, problems, 1)
    for name, tensor in sampler.model.named_parameters():
        assert torch.equal(tensor, before[name]) and torch.equal(tensor, dict(trained.weights())[name]), name
    assert trained.model_on("cpu", torch.float32) is None  # a sampler would take the base's weights for all


# --- arguments and plans --------------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense_are_refused(monkeypatch):
    for fields in ({"lora_alpha": 8}, {"lora_targets": ("q_proj",)}):
        with pytest.raises(UserError, match=f"^--{next(iter(fields))} .*: must be left out without --lora_rank$"):
            from_preset(RLArgs, "tiny", **fields)
    monkeypatch.setitem(sys.modules, "peft", None)
    for command in (RLArgs, SFTArgs):
        with pytest.raises(UserError, match="^--lora_rank 8 needs peft: start with `uv run --extra lora ...`$"):
            from_preset(command, "tiny", lora_rank=8)


def test_a_plan_counts_frozen_weights_once_and_adapters_with_their_moments():
    roles = Roles(("cuda:0", "cuda:1"), "cpu", "cpu", "cpu")
    shape = ModelShape.from_config(CONFIG, lora_rank=4)
    attention, mlp = 2 * (32 + 32) + 2 * (32 + 16), 3 * (32 + 48)  # inputs and outputs of q, o and k, v; of gate, up and down
    assert shape.adapters["model.layers.1"] == 4 * (attention + mlp) and sum(shape.adapters.values()) == 8 * (attention + mlp)
    shares = [share for share in place(shape, roles) if share.role == "policy"]
    assert sum(share.bytes for share in shares) == 4 * sum(ModelShape.from_config(CONFIG).parameters.values()) + 16 * 8 * (
        attention + mlp
    )
    offloaded = next(share for share in place(shape, roles, "adamw_cpu_offload") if share.role == "moments")
    assert offloaded.bytes == 8 * 8 * (attention + mlp)
