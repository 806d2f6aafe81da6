"""Packed rows against the same rows padded, one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from alignment.core.tokens import collate
from alignment.policy import packing
from alignment.policy.log_probs import compute_entropy, get_response_log_probs
from alignment.policy.packing import ATTENTION, AttentionRule, causal_bias, pack

SHAPE = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
    head_dim=4,
)  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.manual_seed(0)
    made = FAMILIES[request.param]().double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3)  # what attention sees then makes a difference
    return made


prompts = st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=7), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(prompts=prompts, data=st.data(), temperature=st.sampled_from([1.0, 0.6]), piece=st.sampled_from([1, 2, 256]))
def test_log_probs_and_gradients_are_those_of_padded_rows(model, prompts, data, temperature, piece):
    response = st.lists(st.integers(0, 39), min_size=1, max_size=6)
    rows = data.draw(st.lists(st.tuples(st.sampled_from(prompts), response), min_size=1, max_size=6))
    batch = collate([p for p, _ in rows], [r for _, r in rows], pad_token_id=0)
    logits = model(batch.input_ids).logits / temperature
    mask = batch.response_mask
    expected = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0].where(mask, 0)
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(len(rows)), dtype=torch.float64)
    model.zero_grad()
    (weights * expected).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "QUERIES_AT_A_TIME", piece)
        out = get_response_log_probs(model, batch.input_ids, batch.labels, True, response_mask=mask, temperature=temperature)
    torch.testing.assert_close(out["log_probs"], expected.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(out["token_entropy"], compute_entropy(logits).where(mask, 0), rtol=0, atol=1e-5)
    (weights * out["log_probs"]).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        # Log-probs are computed in float32, so that is the gradient's precision, relative to its largest entry.
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-5, atol=1e-5 * max(1, max(g.abs().max() for g in gradients))
        )


def test_a_packing_by_hand():
    """Two responses of one prompt, a row of its own, and a response of a single token, which is only ever a label."""
    packing = pack([((1, 2), (3, 4)), ((5,), (6,)), ((1, 2), (7,)), ((1, 2), ())])
    assert packing.input_ids_1N.tolist() == [[1, 2, 5, 6, 3, 4, 7]]
    assert packing.position_ids_1N.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert packing.spots_BT.tolist() == [[0, 1, 4, 5], [2, 3, 0, 0], [0, 1, 6, 0], [0, 1, 0, 0]]
    assert packing.prefixes_SL.tolist() == [[0, 1], [2, 3]]
    assert packing.suffixes_RQ.tolist() == [[4, 5], [6, 0]]
    assert packing.seen_RK.tolist() == [[0, 1, 4, 5], [0, 1, 6, 0]]
    assert packing.padding_R is None
    bias = causal_bias(packing.padding_R, 2, None, torch.empty(1, 1, 4, 1))
    assert bias.tolist() == [[[[0, 0, 0, -torch.inf], [0, 0, 0, 0]]]]
    assert packing.suffix_tokens.tolist() == [0, 1, 2]


def test_prompts_of_several_lengths_are_padded_on_the_left():
    packing = pack([((1, 2), (3,)), ((1, 2), (4,)), ((5,), (6,)), ((5,), (7,))])
    assert packing.seen_RK.tolist() == [[0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 6]]
    assert packing.padding_R.tolist() == [0, 0, 1, 1]
    bias = causal_bias(packing.padding_R, 1, None, torch.empty(1, 1, 3, 1))
    assert bias[:, 0, 0].tolist() == [[0, 0, 0]] * 2 + [[-torch.inf, 0, 0]] * 2


def test_a_window_ends_what_a_query_sees():
    """Of three tokens the last two ask, with a window of two: the second sees the first and itself, the third not the first."""
    assert causal_bias(None, 2, 2, torch.empty(1, 1, 3, 1)).tolist() == [[[[0, 0, -torch.inf], [-torch.inf, 0, 0]]]]


class LargestTensor(TorchDispatchMode):
    """Notes the most numbers that any tensor has."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


@pytest.mark.parametrize("window", [None, 600])
def test_no_tensor_grows_with_the_square_of_the_responses(window):
    """Twice as long responses make twice as large tensors, in an update's forward and backward pass."""
    config = MistralConfig(**SHAPE, sliding_window=window, max_position_embeddings=4096)
    model = MistralForCausalLM._from_config(config, attn_implementation=ATTENTION)
    largest = []
    for length in (512, 1024):
        batch = collate([[1, 2], [1, 2], [3]], [[4] * length] * 3, pad_token_id=0)
        with LargestTensor() as held:
            out = get_response_log_probs(model, batch.input_ids, batch.labels, response_mask=batch.response_mask)
            out["log_probs"].sum().backward()
        largest.append(held.numbers)
    assert largest[1] < 2.1 * largest[0]


def test_a_packing_is_copied_to_a_device_once():
    packing = pack([((1, 2), (3,)), ((1, 2), (4,)), ((5,), (6,)), ((5,), (7,))])
    copied = packing.to("meta")
    assert copied.prefixes_SL.is_meta and copied.padding_R.is_meta and packing.to("meta") is copied
    assert packing.to("cpu") is packing and not packing.prefixes_SL.is_meta


def test_a_model_that_ignores_packings_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2))
    model.config._attn_implementation = "eager"
    ids = torch.arange(8).view(2, 4)

    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.inner = model.config, model

        def get_decoder(self):
            return lambda input_ids, position_ids, use_cache, layout: model.transformer(input_ids, position_ids=position_ids)

        def get_input_embeddings(self):
            return model.get_input_embeddings()

    with pytest.raises(ValueError, match="Deaf does not pass keyword arguments to its attention"):
        get_response_log_probs(Deaf(), ids, ids)


def test_a_models_own_attention_is_put_back(model):
    before = model.config._attn_implementation
    ids = torch.arange(8).view(2, 4)
    get_response_log_probs(model, ids, ids)
    assert model.config._attn_implementation == before != ATTENTION
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="load the model with attn_implementation='layout'"):
        get_response_log_probs(model, ids, ids)
    model.gradient_checkpointing_disable()


def test_layers_that_are_run_again_in_backward_give_the_same_gradient(model):
    ids, labels = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]]), torch.tensor([[2, 3, 4, 5], [2, 5, 6, 7]])
    mask = torch.tensor([[False, True, True, True]] * 2)
    gradients = []
    before, model.config._attn_implementation = model.config._attn_implementation, ATTENTION
    model.train()
    for again in (False, True):
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        get_response_log_probs(model, ids, labels, response_mask=mask)["log_probs"].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    model.gradient_checkpointing_disable()
    model.config._attn_implementation = before
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.skipif(torch.version.cuda is None, reason="simulated GPUs need the CUDA build of torch")
@pytest.mark.parametrize(("dtype", "grouped"), [(torch.float32, False), (torch.bfloat16, True)])
def test_on_a_gpu_grouped_queries_in_fp32_get_keys_of_their_own(dtype, grouped, monkeypatch):
    """torch has no memory-saving kernel for grouped queries in fp32."""
    calls, plain = [], packing.scaled_dot_product_attention

    def recorded(q, k, v, **options):
        calls.append((k.shape[1], options["enable_gqa"]))
        return plain(q, k, v, **options)

    monkeypatch.setattr(packing, "scaled_dot_product_attention", recorded)
    with FakeTensorMode():
        q, k, v = (torch.empty(6, heads, 8, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        places = torch.empty(2, 3, dtype=torch.int64, device="cuda")
        out = packing._attend((q, k, v), places, places, None, AttentionRule(0.5), {})
    assert calls == [(2 if grouped else 4, grouped)] and out.shape == (6, 4, 8)
