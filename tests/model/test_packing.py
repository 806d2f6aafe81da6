"""Packed rows against the same rows padded, one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from alignment.core.tokens import collate
from alignment.model.log_probs import compute_entropy, get_response_log_probs
from alignment.model.packing import ATTENTION, pack

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "head_dim": 4,
}
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
@given(prompts=prompts, data=st.data(), temperature=st.sampled_from([1.0, 0.6]))
def test_log_probs_and_gradients_are_those_of_padded_rows(model, prompts, data, temperature):
    response = st.lists(st.integers(0, 39), min_size=1, max_size=6)
    rows = data.draw(
        st.lists(st.tuples(st.sampled_from(prompts), response), min_size=1, max_size=6)
    )
    batch = collate([p for p, _ in rows], [r for _, r in rows], pad_token_id=0)
    logits = model(batch.input_ids).logits / temperature
    mask = batch.response_mask
    expected = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0].where(mask, 0)
    weights = torch.randn(
        mask.shape, generator=torch.Generator().manual_seed(len(rows)), dtype=torch.float64
    )
    model.zero_grad()
    (weights * expected).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = get_response_log_probs(
        model, batch.input_ids, batch.labels, True, response_mask=mask, temperature=temperature
    )
    torch.testing.assert_close(out["log_probs"], expected.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        out["token_entropy"], compute_entropy(logits).where(mask, 0), rtol=0, atol=1e-5
    )
    (weights * out["log_probs"]).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        # Log-probs are computed in float32, so that is the gradient's precision, relative to its
        # largest entry.
        torch.testing.assert_close(
            parameter.grad,
            gradient,
            rtol=1e-5,
            atol=1e-5 * max(1, max(g.abs().max() for g in gradients)),
        )


def test_a_packing_by_hand():
    """Two responses of one prompt, a row of its own, and a response of a single token, which is
    only ever a label."""
    packing = pack([((1, 2), (3, 4)), ((5,), (6,)), ((1, 2), (7,)), ((1, 2), ())])
    assert packing.input_ids_1N.tolist() == [[1, 2, 5, 6, 3, 4, 7]]
    assert packing.position_ids_1N.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert packing.spots_BT.tolist() == [[0, 1, 4, 5], [2, 3, 0, 0], [0, 1, 6, 0], [0, 1, 0, 0]]
    assert [
        [part.queries_XQ.tolist(), part.keys_XK.tolist(), part.before] for part in packing.parts
    ] == [
        [[[0, 1], [2, 3]]] * 2 + [0],
        [[[4, 5], [6, -1]]] * 2 + [0],
        [[[4, 5], [6, -1]], [[0, 1], [0, 1]], 2],
    ]


def test_suffixes_see_their_prefixes_by_the_length_of_these():
    """So that there is no padding among keys."""
    packing = pack([((1, 2), (3,)), ((1, 2), (4,)), ((5,), (6,)), ((5,), (7, 8))])
    assert packing.input_ids_1N.tolist() == [[1, 2, 5, 3, 4, 6, 7, 8]]
    assert [
        [part.queries_XQ.tolist(), part.keys_XK.tolist(), part.before] for part in packing.parts
    ] == [
        [[[0, 1], [2, -1]]] * 2 + [0],
        [[[3, -1], [4, -1], [5, -1], [6, 7]]] * 2 + [0],
        [[[5, -1], [6, 7]], [[2], [2]], 1],
        [[[3], [4]], [[0, 1], [0, 1]], 2],
    ]


def test_rows_of_their_own_are_one_part():
    (part,) = pack([((1, 2), (3,)), ((4,), (5,))]).parts
    assert (
        part.queries_XQ.tolist() == part.keys_XK.tolist() == [[0, 1, 2], [3, 4, -1]]
        and part.before == 0
    )


def test_a_packing_is_copied_to_a_device_once():
    packing = pack([((1, 2), (3,)), ((1, 2), (4,)), ((5,), (6,)), ((5,), (7,))])
    copied = packing.to("meta")
    assert copied.spots_BT.is_meta and packing.to("meta") is copied
    assert all(part.queries_XQ.is_meta and part.keys_XK.is_meta for part in copied.parts)
    assert (
        [part.before for part in copied.parts]
        == [part.before for part in packing.parts]
        == [0, 0, 1, 2]
    )
    assert packing.to("cpu") is packing and not packing.spots_BT.is_meta


def test_a_model_that_ignores_packings_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2))
    model.config._attn_implementation = "eager"
    ids = torch.arange(8).view(2, 4)

    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.inner = model.config, model

        def get_decoder(self):
            return lambda input_ids, position_ids, use_cache, layout: model.transformer(
                input_ids, position_ids=position_ids
            )

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
    ids, labels = (
        torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]]),
        torch.tensor([[2, 3, 4, 5], [2, 5, 6, 7]]),
    )
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
