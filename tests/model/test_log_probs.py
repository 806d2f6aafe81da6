"""Log-probs and entropy against log_softmax of the whole logits."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.core.losses import kl_penalty
from alignment.core.records import Distribution
from alignment.model import log_probs as module
from alignment.model.log_probs import (
    LabelLogProbs,
    compute_entropy,
    get_response_log_probs,
    sampling_logits,
    score_in_place,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 61,
    }
    return LlamaForCausalLM(LlamaConfig(**shape)).double()


@pytest.fixture
def batch():
    torch.manual_seed(1)
    mask = torch.tensor([[False, True, True, True, False], [False, False, True, False, False]])
    return torch.randint(0, 61, (2, 5)), torch.randint(0, 61, (2, 5)), mask


def plain(model, inputs, labels, temperature=1.0):
    return (
        (model(inputs).logits / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    )


def test_entropy_of_known_distributions():
    logits = torch.tensor(
        [
            [0.0, 0, 0, 0],
            [100, 0, 0, 0],
            [math.log(0.5), math.log(0.25), math.log(0.25), -torch.inf],
        ]
    )
    expected = [math.log(4), 0, 1.5 * math.log(2)]
    assert compute_entropy(logits[:2]).tolist() == pytest.approx(expected[:2], abs=1e-6)
    assert compute_entropy(logits[2:, :3]).tolist() == pytest.approx(expected[2:], abs=1e-6)


@pytest.mark.parametrize("at_a_time", [2**26, 61, 130])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_plain_computation(
    model, batch, monkeypatch, at_a_time, temperature
):
    monkeypatch.setattr(module, "LOGITS_IN_MEMORY", at_a_time)
    inputs, labels, mask = batch
    weights = torch.randn(2, 5, dtype=torch.float64)

    expected = torch.where(mask, plain(model, inputs, labels, temperature), 0)
    (weights * expected).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = get_response_log_probs(
        model, inputs, labels, True, response_mask=mask, temperature=temperature
    )
    torch.testing.assert_close(out["log_probs"], expected.float(), rtol=0, atol=1e-5)
    (weights * out["log_probs"]).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-5)
    entropy = torch.where(mask, compute_entropy(model(inputs).logits / temperature), 0)
    torch.testing.assert_close(out["token_entropy"], entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("distribution", [{"top_p": 0.7}, {"top_k": 5, "temperature": 1.3}])
@pytest.mark.parametrize("at_a_time", [2**26, 61])
def test_gradients_of_a_truncated_distribution(model, batch, monkeypatch, distribution, at_a_time):
    """Against autograd through the very distribution that is sampled from."""
    monkeypatch.setattr(module, "LOGITS_IN_MEMORY", at_a_time)
    inputs, labels, mask = batch
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **distribution}
    kept = sampling_logits(model(inputs).logits[mask], *settings.values(), keep=labels[mask])
    expected = kept.log_softmax(-1).gather(-1, labels[mask][:, None])[:, 0]
    weights = torch.randn(len(expected))
    (weights * expected).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = get_response_log_probs(model, inputs, labels, True, response_mask=mask, **settings)
    torch.testing.assert_close(out["log_probs"][mask], expected, rtol=0, atol=1e-5)
    (weights * out["log_probs"][mask]).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-5)
    entropy = compute_entropy(model(inputs).logits[mask] / settings["temperature"])
    torch.testing.assert_close(out["token_entropy"][mask], entropy, rtol=0, atol=1e-5)
    of_sampled = torch.distributions.Categorical(logits=kept.detach().clamp(min=-1e4)).entropy()
    torch.testing.assert_close(out["sampling_entropy"][mask], of_sampled, rtol=0, atol=1e-5)
    assert out["sampling_entropy"][~mask].eq(0).all() and not out["sampling_entropy"].requires_grad


def test_entropies_before_and_after_truncation_by_hand():
    """Probabilities 1/2, 1/4, 1/8, 1/8 have 1.75 bits; their first two, 2/3 and 1/3, log2 3 - 2/3
    bits; squared (temperature 1/2), they are 16, 4, 1 and 1 of 22."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    bits = math.log(2)
    squared = sum(n / 22 * math.log(22 / n) for n in (16, 4, 1, 1))
    for distribution, expected in (
        ((1.0, 1.0, 0), [1.75 * bits] * 2),
        ((1.0, 0.7, 0), [1.75 * bits, math.log(3) - 2 / 3 * bits]),
        ((1.0, 1.0, 2), [1.75 * bits, math.log(3) - 2 / 3 * bits]),
        ((0.5, 1.0, 0), [squared] * 2),
        ((0.5, 1.0, 1), [squared, 0.0]),
    ):
        entropies_21 = torch.zeros(2, 1)
        score_in_place(
            logits.clone(),
            torch.tensor([0]),
            Distribution(*distribution),
            entropies_2N=entropies_21,
        )
        assert entropies_21.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_kl_estimates_part_where_nuclei_differ():
    """At top-p 0.7 the policy (.5, .3, .2) samples its first two tokens, as (5/8, 3/8). The
    reference (.5, .2, .3) keeps the first and the third, as (5/8, 3/8): the second, where it is
    sampled, has .2 of all three."""
    policy, reference = (torch.tensor([p] * 2).log() for p in ((0.5, 0.3, 0.2), (0.5, 0.2, 0.3)))
    sampled = torch.tensor([0, 1])
    of_policy, of_reference = (
        sampling_logits(logits, 1.0, 0.7, 0, keep=sampled)
        .log_softmax(-1)
        .gather(1, sampled[:, None])[:, 0]
        for logits in (policy, reference)
    )
    assert of_policy.exp().tolist() == pytest.approx([5 / 8, 3 / 8])
    k1, k3 = (
        (of_policy.exp() * kl_penalty(of_policy, of_reference, name)).sum().item()
        for name in ("k1", "k3")
    )
    assert k1 == pytest.approx(3 / 8 * math.log(15 / 8), abs=1e-6)
    assert k3 - k1 == pytest.approx(5 / 8 + 0.2 - 1, abs=1e-6)


def test_a_second_backward_gives_the_same_gradient_again(model, batch):
    """The probabilities that the first one has written over are computed anew."""
    inputs, labels, mask = batch
    total = get_response_log_probs(model, inputs, labels, response_mask=mask)["log_probs"].sum()
    first = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(total, list(model.parameters())), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-6)


def test_under_autocast_values_equal_the_plain_computation_under_autocast(model, batch):
    inputs, labels, mask = batch
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(model, inputs, labels)[mask]
        out = get_response_log_probs(model, inputs, labels, response_mask=mask)["log_probs"]
    torch.testing.assert_close(out[mask], expected.float(), rtol=0, atol=0.03)
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_without_a_mask_every_position_is_scored(model, batch):
    inputs, labels, _ = batch
    out = get_response_log_probs(model, inputs, labels)
    assert set(out) == {"log_probs"}
    torch.testing.assert_close(
        out["log_probs"], plain(model, inputs, labels).float(), rtol=0, atol=1e-5
    )


def test_nucleus_keeps_the_fewest_likeliest_tokens_that_reach_top_p():
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    kept = sampling_logits(logits, 1.0, 0.75).softmax(-1)
    # 0.5 < 0.75 <= 0.5 + 0.3, renormalised by 0.8
    assert kept[0].tolist() == pytest.approx([0.625, 0, 0.375, 0])
    assert sampling_logits(logits, 1.0, 0.4).softmax(-1)[0].tolist() == pytest.approx([1, 0, 0, 0])


def test_a_kept_token_stays_finite_outside_the_nucleus():
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    kept = sampling_logits(logits, 1.0, 0.75, keep=torch.tensor([3])).softmax(-1)
    assert kept[0].tolist() == pytest.approx([5 / 9, 0, 3 / 9, 1 / 9])


def by_sorting(logits: torch.Tensor, top_p: float, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [V] that stay of one row [V], from a sort of all, and the probabilities before
    each token in its order."""
    order = logits.argsort(descending=True, stable=True)
    order = order[: top_k or None]
    probabilities = logits[order].double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return (
        torch.zeros_like(logits, dtype=torch.bool).index_fill(0, order[before < top_p], True),
        before,
    )


@given(
    st.lists(st.integers(-12, 12), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
    st.integers(0, 8),
    st.integers(1, 9),
)
def test_truncation_keeps_what_a_sort_of_all_tokens_keeps(integers, top_p, top_k, sorted_first):
    """Integers make ties: of equally likely tokens the first ones stay."""
    logits = torch.tensor(integers).float() / 2
    stays, before = by_sorting(logits, top_p, top_k)
    assume((before - top_p).abs().min() > 1e-5)  # there rounding decides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUCLEUS_TOKENS", sorted_first)
        kept = sampling_logits(torch.stack([logits, logits]), 1.0, top_p, top_k)
    assert kept.isfinite().tolist() == [stays.tolist()] * 2
    assert kept[0, stays].tolist() == logits[stays].tolist()


def test_temperature_divides_the_logits():
    assert sampling_logits(torch.tensor([[2.0, 4.0]]), 0.5, 1.0).tolist() == [[4, 8]]


class Products(TorchDispatchMode):
    """Notes the type of every matrix product's result, by its shape."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.mm:
            self.dtypes.append((tuple(result.shape), result.dtype))
        return result


@pytest.mark.skipif(
    torch.version.cuda is None, reason="simulated GPUs need the CUDA build of torch"
)
def test_on_a_gpu_logits_are_summed_and_kept_in_fp32():
    """The product with the head, forward and again in backward, of bfloat16 weights on a simulated
    GPU."""
    ctx = SimpleNamespace(needs_input_grad=(True, True), mark_non_differentiable=lambda *_: None)
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    with FakeTensorMode(allow_non_fake_inputs=True), Products() as products:
        hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16, device="cuda") for n in (5, 11))
        labels = torch.zeros(5, dtype=torch.int64, device="cuda")
        # a cap: computed twice
        log_probs, _ = LabelLogProbs.forward(
            ctx, hidden, weight, labels, Distribution(), "none", 30.0
        )
        gradients = LabelLogProbs.backward(ctx, torch.ones_like(log_probs), None)[:2]
    assert [dtype for shape, dtype in products.dtypes if shape == (5, 11)] == [
        torch.float32,
        torch.float32,
    ]
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16]
