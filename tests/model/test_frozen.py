"""Frozen models in bfloat16: a policy's log-probs bit for bit, in half of the memory."""

import pytest
import torch

from alignment.core.records import Distribution
from alignment.model.frozen import FrozenModel, MicroBatchedModel
from alignment.model.loading import load_model
from alignment.model.shape import ModelShape
from benchmarks.families import FAMILIES, family_model, rows_of
from tests.some_families import by_speed

EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss"}


@pytest.fixture
def saved(request, tmp_path):
    """A folder with a model of a family."""
    torch.manual_seed(0)
    family_model(request.param).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("saved", by_speed([*FAMILIES, "rwkv"]), indirect=True)
def test_a_frozen_model_computes_what_the_policy_does_under_autocast(saved):
    policy, frozen = (
        load_model(saved, ("cpu",), torch.float32),
        FrozenModel(saved, "cpu", torch.bfloat16),
    )
    torch.manual_seed(0)
    batch = rows_of([(9, 8), (4, 9)], repeats=2)
    theirs = MicroBatchedModel(policy, torch.bfloat16, 1000).log_probs(batch, Distribution())
    assert theirs.lt(0).any() and torch.equal(frozen.log_probs(batch, Distribution(), 1000), theirs)


@pytest.mark.parametrize("saved", ["llama", "gpt2", *sorted(EXPERTS)], indirect=True)
def test_the_weights_of_products_take_half_the_memory(saved):
    """Of the matrices, only embeddings, and the few of a router and of experts' biases, are in
    float32."""
    model = FrozenModel(saved, "cpu", torch.bfloat16).model
    parameters = dict(model.named_parameters())
    kept = {name for name, p in parameters.items() if p.dtype == torch.float32 and p.ndim > 1}
    assert not [
        name
        for name in kept
        if not any(word in name for word in ("embed", "wte", "wpe", "gate.", "router", "_bias"))
    ]
    held = sum(parameter.nbytes for parameter in parameters.values())
    assert (
        held
        == ModelShape.of(model).frozen_bytes(2)
        == ModelShape.from_config(model.config).frozen_bytes(2)
    )


@pytest.mark.parametrize("family", sorted(EXPERTS))
def test_autocast_casts_experts(family):
    """Their product is a kernel that torch's autocast leaves alone."""
    model, seen = family_model(family), []
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            gate = module._apply_gate
            module._apply_gate = lambda values, gate=gate: seen.append(values.dtype) or gate(values)
    MicroBatchedModel(model, torch.bfloat16, 1000).log_probs(
        rows_of([(9, 8)], repeats=2), Distribution()
    )
    assert set(seen) == {torch.bfloat16}
