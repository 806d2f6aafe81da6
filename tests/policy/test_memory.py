"""What activations take, and how rollouts are cut for the memory that is free."""

import dataclasses

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.args import RLArgs, SFTArgs, from_preset
from alignment.policy import memory
from alignment.policy.loading import make_optimizer
from alignment.policy.log_probs import get_response_log_probs
from alignment.policy.memory import checkpointed_token_bytes, fit, token_bytes
from alignment.policy.packing import ATTENTION

ARGS = from_preset(RLArgs, "tiny")
QUIET = Console(quiet=True)


@pytest.fixture
def model():
    """In the proportions of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=144, intermediate_size=384, num_hidden_layers=4, num_attention_heads=9,
        num_key_value_heads=3, attn_implementation=ATTENTION,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def saved_bytes(model, tokens: int) -> int:
    """Bytes that autograd keeps for backward, parameters apart, of two responses to one prompt."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no other gets its address
        return tensor

    half = tokens // 2
    ids = torch.arange(half + 1).repeat(2, 1) % 50
    mask = torch.arange(half + 1)[None].expand(2, -1) >= half // 2
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        get_response_log_probs(model, ids, ids, response_mask=mask)["log_probs"].sum()
    return sum(size for size, _ in kept.values())


def test_what_a_token_takes_is_what_autograd_keeps_of_it(model):
    """Of 96 more tokens, of which a quarter are of the shared prompt."""
    more = saved_bytes(model, 256) - saved_bytes(model, 128)
    assert token_bytes(model.config) * 96 == pytest.approx(more, rel=0.2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    less = saved_bytes(model, 256) - saved_bytes(model, 128)
    one_layer = token_bytes(model.config) // 4
    assert (checkpointed_token_bytes(model.config) - one_layer) * 96 == pytest.approx(less, rel=0.35)


def with_free(monkeypatch, model, args, tokens: float, longest: int = 10):
    """`fit` where activations of so many tokens have room."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    free = int(tokens * token_bytes(model.config) / memory.SHARE) + 12 * parameters + 1
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    return fit(model, args, longest, QUIET).micro_batch_tokens


def test_the_free_memory_decides_in_powers_of_two(model, monkeypatch):
    assert with_free(monkeypatch, model, ARGS, 300) == 256
    assert with_free(monkeypatch, model, ARGS, 255) == 128
    assert not model.is_gradient_checkpointing
    assert with_free(monkeypatch, model, from_preset(SFTArgs, "tiny"), 300) == 256


def test_more_than_what_is_of_use_is_not_taken(model, monkeypatch):
    assert with_free(monkeypatch, model, ARGS, 10**9) == memory.MOST_TOKENS
    monkeypatch.setitem(memory.MOST_BYTES, "cpu", 100 * token_bytes(model.config))
    assert with_free(monkeypatch, model, ARGS, 10**9) == 64


def test_what_is_asked_for_counts_and_what_a_stopped_run_had(model, monkeypatch):
    assert with_free(monkeypatch, model, dataclasses.replace(ARGS, micro_batch_tokens=77), 3, longest=9) == 77
    assert not model.is_gradient_checkpointing
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**40)
    assert fit(model, ARGS, 10, QUIET, before=32).micro_batch_tokens == 32


def test_moments_that_are_there_are_not_counted_again(model, monkeypatch):
    """As when a run goes on: what is free is then less by as much."""
    optimizer = make_optimizer(model, 1e-3, 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    free = int(300 * token_bytes(model.config) / memory.SHARE) + 4 * parameters + 1
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    assert fit(model, ARGS, 10, QUIET, optimizer=optimizer).micro_batch_tokens == 256
    assert fit(model, ARGS, 10, QUIET, torch.bfloat16, optimizer).micro_batch_tokens == 256  # 300 / 0.6 = 500
    assert fit(model, ARGS, 10, QUIET).micro_batch_tokens < 256


def test_layers_are_computed_twice_only_where_a_row_would_not_fit(model, monkeypatch):
    assert with_free(monkeypatch, model, ARGS, 300, longest=300) == 256 and not model.is_gradient_checkpointing
    fitted = with_free(monkeypatch, model, ARGS, 300, longest=301)
    assert model.is_gradient_checkpointing and fitted > 256
    each = 300 * token_bytes(model.config) // checkpointed_token_bytes(model.config)
    assert fitted == 2 ** (each.bit_length() - 1)
