"""The gradient of the entropy through the output head, against autograd in float64."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.core.records import Distribution
from alignment.model import log_probs as module
from alignment.model.log_probs import LabelLogProbs, entropy_slope, logits_log_probs


def test_the_slope_of_an_entropy_by_hand():
    """p = 1/2, 1/4, 1/4, 0: H = 1.5 log 2, and -p (log p + H) = -p log 2 (1.5 - log2 1/p)."""
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    bits = math.log(2)
    slope = entropy_slope(p, torch.tensor([1.5 * bits], dtype=torch.float64))
    expected = [-0.5 * 0.5 * bits, 0.25 * 0.5 * bits, 0.25 * 0.5 * bits, 0.0]
    assert slope[0].tolist() == pytest.approx(expected, abs=1e-15)


def entropy_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """-sum p log p of softmax(z / T), term by term."""
    p = (logits / temperature).softmax(-1)
    return -(p * p.log()).sum(-1)


@pytest.mark.parametrize("at_a_time", [2**26, 61, 300])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("distribution", [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.6, 0), (1, 1, 5)])
def test_the_head_has_the_gradient_of_log_probs_and_entropies(
    monkeypatch, at_a_time, soft_cap, distribution
):
    monkeypatch.setattr(module, "LOGITS_IN_MEMORY", at_a_time)
    drawn = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=drawn, dtype=torch.float64)
    weight = 0.7 * torch.randn(61, 16, generator=drawn, dtype=torch.float64)
    labels = torch.randint(0, 61, (7,), generator=drawn)
    by_log_prob, by_entropy = torch.randn(2, 7, generator=drawn, dtype=torch.float64)
    settings = Distribution(*distribution)

    def gradients(log_probs, entropies, *inputs):
        total = (by_log_prob * log_probs).sum() + (by_entropy * entropies).sum()
        return torch.autograd.grad(total, inputs)

    h = hidden.clone().requires_grad_()
    w = weight.clone().requires_grad_()
    logits = h @ w.T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    # Which tokens are left out has no gradient: only their values do.
    kept = module.sampling_logits(logits.detach(), *distribution, keep=labels).isfinite()
    truncated = (logits / distribution[0]).masked_fill(~kept, -torch.inf)
    log_probs = truncated.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    entropies = entropy_of(logits, distribution[0])
    expected = gradients(log_probs, entropies, h, w)

    h = hidden.float().requires_grad_()
    w = weight.float().requires_grad_()
    outputs = LabelLogProbs.apply(h, w, labels, settings, "differentiable", soft_cap)
    torch.testing.assert_close(outputs[1][0].double(), entropies, rtol=0, atol=2e-6)
    for computed, exact in zip(gradients(outputs[0], outputs[1][0], h, w), expected, strict=True):
        torch.testing.assert_close(computed.double(), exact, rtol=0, atol=5e-6)

    # The path of models without a head of their own, by autograd of the same logits.
    h = hidden.clone().requires_grad_()
    logits = h @ weight.T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    log_probs, both = logits_log_probs(logits, labels, settings, "differentiable")
    (computed,) = gradients(log_probs, both[0], h)
    torch.testing.assert_close(computed, expected[0], rtol=0, atol=2e-5)  # fp32 sums


def test_entropies_without_gradient_leave_the_log_probs_gradient_as_it_is():
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    labels = torch.arange(5)
    found = []
    for kind in ("none", "detached", "differentiable"):
        log_probs, entropies = LabelLogProbs.apply(hidden, weight, labels, Distribution(), kind)
        assert entropies.requires_grad == (kind == "differentiable")
        found.append(torch.autograd.grad(log_probs.sum(), hidden)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_pass_gives_entropies_beside_the_log_probs(tmp_path):
    from rollout_helpers import open_tiny

    from alignment.core.tokens import collate

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy = open_tiny(tmp_path, micro_batch_tokens=8)
    batch = collate([[1, 2], [3]], [[4, 5, 6], [7]], 0)
    distribution = Distribution(0.8)
    log_probs, entropies = policy.log_probs_and_entropies(batch, distribution, [0])
    assert torch.equal(log_probs, policy.log_probs(batch, distribution, [0]))
    logits = policy.model(batch.input_ids[:1]).logits.detach().double()
    expected = entropy_of(logits, 0.8)[0].where(batch.response_mask[0], 0)
    torch.testing.assert_close(entropies[0].double(), expected, rtol=0, atol=1e-5)
    assert entropies[1].eq(0).all()
