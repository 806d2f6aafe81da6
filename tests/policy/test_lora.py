"""Adapters: their gradient by hand, merged weights, the base without them, what is trained and
counted, what is refused."""

import dataclasses
import math
from importlib.util import find_spec
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from rollout_helpers import open_tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.args import RLArgs, SFTArgs, from_preset
from alignment.builders.devices import roles_of
from alignment.builders.policies import make_policy
from alignment.builders.run_plan import plan_policy
from alignment.core.records import Distribution
from alignment.model.activations import activation_bytes
from alignment.model.loading import load_config
from alignment.model.shape import ModelShape
from alignment.planning.placement import assign_roles, place
from alignment.policy import micro_batches
from alignment.policy.policy import Objective, PolicyConfig, open_policy
from alignment.system.errors import UserError
from benchmarks.families import family_model, rows_of
from tests.some_families import BUFFER, save_with_buffer

RANK, ALPHA = 4, 6
UNTEMPERED = Distribution()
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config_of(folder, **fields) -> PolicyConfig:
    options = {"micro_batch_tokens": 64, "lora_rank": RANK, "lora_alpha": ALPHA, **fields}
    return PolicyConfig(str(folder), ("cpu",), "float32", **options)


@pytest.fixture
def adapted(tiny_folder):
    """A policy with random adapters."""
    policy = open_policy("single", config_of(tiny_folder))
    policy.use_adapters("random")
    return policy


def batch_of(seed: int = 0):
    torch.manual_seed(seed)
    return rows_of([(7, 9), (3, 8)], repeats=3)


OBJECTIVE = Objective(
    lambda rows, log_probs, mask: ((log_probs.square() * mask).sum(), {}), entropy=False
)


def backpropagate(policy, batch) -> torch.Tensor:
    for _ in policy.accumulate(batch, range(len(batch.labels)), OBJECTIVE):
        pass
    return policy.gradient()


def named_gradients(policy) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    }


def test_the_gradient_of_a_and_b_is_that_of_the_whole_weight(adapted, tiny_folder, tmp_path):
    """W = W0 + s B A with s = 6 / 4, so dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T, dL/dW being
    that of all of W."""
    adapted.save(tmp_path / "merged", AutoTokenizer.from_pretrained(tiny_folder))
    whole, batch = open_tiny(tmp_path / "merged", 64), batch_of()
    backpropagate(adapted, batch)
    backpropagate(whole, batch)
    ours, theirs, weights = (
        named_gradients(adapted),
        named_gradients(whole),
        dict(adapted.model.named_parameters()),
    )
    assert len(ours) == 2 * 2 * 7  # A and B of seven layers in each of two
    for name in (
        name for name in theirs if name.split(".")[-2] in LINEAR and name.endswith("weight")
    ):
        a, b = (f"{name.removesuffix('.weight')}.lora_{side}.default.weight" for side in "AB")
        expected = {a: 1.5 * weights[b].T @ theirs[name], b: 1.5 * theirs[name] @ weights[a].T}
        assert all(
            (ours[side] - by_hand).norm() < 1e-5 * by_hand.norm()
            for side, by_hand in expected.items()
        ), name


def test_only_adapters_are_trained_and_the_base_keeps_its_bits(adapted, tiny_folder):
    base = dict(AutoModelForCausalLM.from_pretrained(tiny_folder).named_parameters())
    gradient = backpropagate(adapted, batch_of())
    sizes = [
        parameter.numel()
        for group in adapted.optimizer.param_groups
        for parameter in group["params"]
    ]
    assert sum(sizes) == len(gradient) == sum(g.numel() for g in named_gradients(adapted).values())
    assert adapted.clip_gradient(1.0).item() == pytest.approx(gradient.norm().item(), rel=1e-5)
    before = dict(adapted.weights())
    adapted.step(1e-2)
    after = dict(adapted.weights())
    frozen = {n: p for n, p in adapted.model.named_parameters() if not p.requires_grad}
    assert all(
        torch.equal(weight, base[name.replace("base_layer.", "")])
        for name, weight in frozen.items()
    )
    changed = {name for name in base if not torch.equal(before[name], after[name])}
    assert changed == {
        name for name in base if name.split(".")[-2] in LINEAR and name.endswith("weight")
    }
    assert backpropagate(adapted, batch_of()).isfinite().all()
    adapted.drop_gradient()
    for _ in adapted.accumulate(batch_of(), [], OBJECTIVE):
        pass
    # zeros, of adapters alone
    assert not adapted.gradient().any() and adapted.gradient().shape == gradient.shape


def test_merged_weights_are_pefts_to_the_bit_and_the_same_however_often_they_are_asked_for(
    adapted, tiny_folder, tmp_path
):
    adapted.save(tmp_path, AutoTokenizer.from_pretrained(tiny_folder))
    for _ in range(3):
        merged = dict(adapted.weights())
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        logits = peft(ids).logits
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits, rtol=0, atol=1e-5
        )
        torch.testing.assert_close(adapted.model(ids).logits, logits, rtol=0, atol=0)
    theirs = dict(peft.merge_and_unload().named_parameters())
    assert theirs.keys() == merged.keys() and all(
        torch.equal(merged[name], theirs[name]) for name in theirs
    )
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], merged[name]) for name in merged)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gpt2",
        "mixtral",
        "qwen3_moe_dense",
        "deepseek_v3",
        "phi3",
        "gemma2",
        "gpt_oss",
        "opt",
        "falcon",
        "gpt_neox",
    ],
)
def test_every_familys_adapters_are_merged_and_counted(family, tmp_path):
    """Transposed weights, fused ones, mixtures of experts, also with dense or shared MLPs, and rows
    that are not packed."""
    family_model(family, std=0.1).save_pretrained(tmp_path / "base")
    policy, batch = open_policy("single", config_of(tmp_path / "base")), batch_of()
    shape = ModelShape.from_config(load_config(str(tmp_path / "base")), RANK)
    assert shape.trained(shape.parameters) == len(policy.gradient())
    policy.use_adapters("random")
    ours, base = policy.log_probs(batch, UNTEMPERED), policy.base_log_probs(batch, UNTEMPERED)
    policy.save(tmp_path / "merged", NoTokenizer())
    merged = open_policy("single", config_of(tmp_path / "merged", lora_rank=0)).log_probs(
        batch, UNTEMPERED
    )
    assert (ours - base)[batch.response_mask].abs().mean() > 0.1
    torch.testing.assert_close(merged, ours, rtol=0, atol=5e-5)


def test_a_dense_mlp_of_a_mixture_has_adapters_and_its_experts_have_none(tmp_path):
    family_model("qwen3_moe_dense").save_pretrained(tmp_path)
    policy = open_policy("single", config_of(tmp_path, lora_targets="down_proj"))
    layer = "model.layers.0.mlp.down_proj"
    assert named_gradients(policy).keys() == {
        f"{layer}.lora_A.default.weight",
        f"{layer}.lora_B.default.weight",
    }


def test_adapters_in_other_places_are_refused(tiny_folder, monkeypatch):
    inject = peft.inject_adapter_in_model

    def inject_elsewhere(lora, model):
        inject(dataclasses.replace(lora, target_modules=["q_proj"]), model)

    monkeypatch.setattr(peft, "inject_adapter_in_model", inject_elsewhere)
    message = (
        "--lora_rank 4: PEFT adds adapters to other layers of qwen2 than its linear ones, such as"
    )
    with pytest.raises(UserError, match=message):
        open_policy("single", config_of(tiny_folder))


def test_merged_models_keep_their_buffers(tmp_path):
    buffer = save_with_buffer(tmp_path / "base")
    open_policy("single", config_of(tmp_path / "base")).save(tmp_path / "merged", NoTokenizer())
    merged: Any = open_policy("single", config_of(tmp_path / "merged", lora_rank=0))
    assert torch.equal(merged.model.get_buffer(BUFFER), buffer)


class NoTokenizer:
    """Stands for a tokenizer, of which these models have none."""

    def save_pretrained(self, folder) -> None:
        pass


def test_the_reference_is_the_base_before_and_after_a_step(adapted, tiny_folder):
    batch = batch_of()
    base = open_tiny(tiny_folder, 64).log_probs(batch, UNTEMPERED)
    trained = adapted.log_probs(batch, UNTEMPERED)
    for _ in range(2):
        assert torch.equal(adapted.base_log_probs(batch, UNTEMPERED), base)
        assert not torch.equal(trained, base) and torch.equal(
            adapted.log_probs(batch, UNTEMPERED), trained
        )
        backpropagate(adapted, batch)
        adapted.step(1e-2)
        trained = adapted.log_probs(batch, UNTEMPERED)


def test_new_adapters_change_nothing_and_depend_on_the_seed_alone(tiny_folder):
    batch = batch_of()
    torch.manual_seed(5)
    one = open_policy("single", config_of(tiny_folder, seed=1))
    # nothing was drawn
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
    again, other = (open_policy("single", config_of(tiny_folder, seed=seed)) for seed in (1, 2))
    assert torch.equal(
        one.log_probs(batch, UNTEMPERED), open_tiny(tiny_folder, 64).log_probs(batch, UNTEMPERED)
    )
    # of B, which A enters
    gradients = [backpropagate(policy, batch) for policy in (one, again, other)]
    assert torch.equal(gradients[0], gradients[1]) and not torch.allclose(
        gradients[0], gradients[2]
    )
    one.use_adapters("random")
    assert not torch.equal(one.log_probs(batch, UNTEMPERED), one.base_log_probs(batch, UNTEMPERED))
    one.use_adapters("trained")
    assert torch.equal(one.log_probs(batch, UNTEMPERED), one.base_log_probs(batch, UNTEMPERED))


@pytest.mark.parametrize("kind", ["single", "layer_split"])
def test_a_checkpoint_goes_on_to_the_bit_and_only_on_its_own_base(
    kind, adapted, tiny_folder, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    backpropagate(adapted, batch_of())
    adapted.step(1e-2)
    adapted.save(tmp_path / "step", tokenizer)
    adapted.save_optimizer(tmp_path)
    config = config_of(tiny_folder, checkpoint=str(tmp_path / "step"))
    again = open_policy(
        kind,
        dataclasses.replace(
            config, devices=("cpu", "cpu:0") if kind == "layer_split" else ("cpu",)
        ),
    )
    again.load_optimizer(tmp_path)
    for policy in (adapted, again):
        backpropagate(policy, batch_of(1))
        policy.step(1e-2)
    weights = dict(adapted.weights())
    if kind == "single":  # which sums in the same order
        assert all(torch.equal(weights[name], weight) for name, weight in again.weights())
    assert all(torch.allclose(weights[name], weight, atol=1e-4) for name, weight in again.weights())
    with pytest.raises(
        UserError,
        match="has changed since the run began: model.layers.0.self_attn.q_proj.weight is not",
    ):
        open_policy("single", dataclasses.replace(config, model_path=str(tmp_path / "step")))


def test_targets(tiny_folder):
    policy = open_policy("single", config_of(tiny_folder, lora_targets="q_proj,down_proj"))
    names = {name.split(".")[-4] for name in named_gradients(policy)}
    assert names == {"q_proj", "down_proj"} and len(named_gradients(policy)) == 2 * 2 * 2
    for targets in ("lm_head", "q_proj,embed_tokens", "q_proj,"):
        arguments = from_preset(SFTArgs, "tiny", lora_rank=2, lora_targets=targets)
        plan = plan_policy(arguments, roles_of(arguments), str(tiny_folder))
        if targets == "q_proj,":
            make_policy(arguments, plan, str(tiny_folder))
            continue
        with pytest.raises(
            UserError,
            match=(
                "is none of this model's linear layers: q_proj, k_proj, v_proj, o_proj, gate_proj"
            ),
        ):
            make_policy(arguments, plan, str(tiny_folder))


def test_a_missing_extra_is_named_at_once(monkeypatch):
    assert find_spec("peft")
    monkeypatch.setattr("alignment.config.flag.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="--lora_rank 8 needs peft: start with `uv run --extra lora"
    ):
        from_preset(RLArgs, "tiny", lora_rank=8)
    with pytest.raises(UserError, match="--lora_alpha 0: must be at least 1"):
        from_preset(RLArgs, "tiny", lora_alpha=0)


def test_memory_by_hand(tiny_folder, monkeypatch):
    """A layer of the tiny model: 128 wide, its MLP 384, 4 heads of queries and keys of 32; adapters
    of rank 4."""
    shape = ModelShape.from_config(load_config(str(tiny_folder)), RANK)
    layer = RANK * (4 * (128 + 128) + 3 * (128 + 384))
    assert shape.adapters == {name: layer * (name in shape.layers) for name in shape.parameters}
    base = sum(shape.parameters.values())
    policy, *others = place(shape, assign_roles(1), "adamw", itemsize=2, kind="single")
    assert policy.bytes == 4 * base + 16 * 2 * layer and [share.role for share in others] == [
        "sample+eval"
    ]
    moments = place(shape, assign_roles(2), "adamw_cpu_offload", itemsize=4, kind="single")
    assert [share.bytes for share in moments if share.role == "moments"] == [8 * 2 * layer]

    model = open_policy("single", config_of(tiny_folder, micro_batch_tokens=0))
    free = 300 * activation_bytes(model.config) / micro_batches.ACTIVATION_SHARE + 12 * 2 * layer
    monkeypatch.setattr(micro_batches, "free_bytes", lambda device: math.ceil(free))
    model.choose_micro_batch_tokens(longest=10)
    assert model.micro_batch_tokens == 256
    monkeypatch.setattr(
        micro_batches,
        "free_bytes",
        lambda device: math.ceil(free - 45 * activation_bytes(model.config) / 0.5),
    )
    model.micro_batch_tokens = 0
    model.choose_micro_batch_tokens(longest=10)
    assert model.micro_batch_tokens == 128
