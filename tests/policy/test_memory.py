"""Bytes of activations, and the micro-batches that the free memory allows."""

from math import ceil
from typing import Any

import pytest
import torch
from rollout_helpers import open_tiny
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.args import SFTArgs, from_preset
from alignment.builders.devices import roles_of
from alignment.builders.policies import make_policy
from alignment.builders.run_plan import plan_policy
from alignment.model.activations import activation_bytes, checkpointed_activation_bytes
from alignment.model.log_probs import get_response_log_probs
from alignment.policy import micro_batches
from alignment.policy.micro_batches import (
    MicroBatchNeed,
    MicroBatchSize,
    choose_micro_batch_tokens,
)
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy, make_optimizer
from benchmarks.families import family_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in the proportions of SmolLM2-135M."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    LlamaForCausalLM(config).save_pretrained(folder := tmp_path_factory.mktemp("memory") / "model")
    return folder


@pytest.fixture
def policy(folder):
    return open_tiny(folder)


def saved_bytes(model, tokens: int) -> int:
    """Bytes that autograd keeps for backward, parameters apart, of two responses to one prompt."""
    kept = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            # held, so that no other gets its address
            kept[storage.data_ptr()] = (
                storage.nbytes(),
                tensor,
            )
        return tensor

    half = tokens // 2
    ids = torch.arange(half + 1).repeat(2, 1) % 50
    mask = torch.arange(half + 1)[None].expand(2, -1) >= half // 2
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        get_response_log_probs(model, ids, ids, response_mask=mask)["log_probs"].sum()
    return sum(size for size, _ in kept.values())


def test_a_tokens_bytes_are_those_that_autograd_keeps(policy):
    """Of 96 more tokens, of which a quarter are of the shared prompt."""
    model = policy.model.train()
    more = saved_bytes(model, 256) - saved_bytes(model, 128)
    assert activation_bytes(model.config) * 96 == pytest.approx(more, rel=0.2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    less = saved_bytes(model, 256) - saved_bytes(model, 128)
    one_layer = activation_bytes(model.config) // 4
    assert (checkpointed_activation_bytes(model.config) - one_layer) * 96 == pytest.approx(
        less, rel=0.35
    )


def chosen_with_free(monkeypatch, policy, tokens: float, longest: int = 10) -> int:
    """The micro-batch that a policy chooses where activations of so many tokens have room."""
    parameters = sum(weight.numel() for _, weight in policy.weights())
    free = (
        int(tokens * activation_bytes(policy.config) / micro_batches.ACTIVATION_SHARE)
        + 12 * parameters
        + 1
    )
    monkeypatch.setattr(micro_batches, "free_bytes", lambda device: free)
    policy.micro_batch_tokens = 0
    policy.choose_micro_batch_tokens(longest)
    return policy.micro_batch_tokens


def test_the_free_memory_decides_in_powers_of_two(policy, folder, monkeypatch):
    assert chosen_with_free(monkeypatch, policy, 300) == 256
    assert chosen_with_free(monkeypatch, policy, 255) == 128
    assert not policy.model.is_gradient_checkpointing
    args = from_preset(SFTArgs, "tiny")
    plan = plan_policy(args, roles_of(args), str(folder))
    assert chosen_with_free(monkeypatch, make_policy(args, plan, str(folder)), 300) == 256


def test_no_more_than_a_useful_number_is_taken(policy, monkeypatch):
    assert chosen_with_free(monkeypatch, policy, 10**9) == micro_batches.MAX_TOKENS
    monkeypatch.setitem(
        micro_batches.MAX_ACTIVATION_BYTES, "cpu", 100 * activation_bytes(policy.config)
    )
    assert chosen_with_free(monkeypatch, policy, 10**9) == 64


def test_a_given_number_stays_and_a_stopped_runs_number_returns(policy, monkeypatch):
    monkeypatch.setattr(micro_batches, "free_bytes", lambda device: 0)
    policy.micro_batch_tokens = 77
    message = policy.choose_micro_batch_tokens(longest=9)
    assert message == (
        "memory is short: what is inside of the MLPs of 4 of 4 layers is computed again in backward"
    )
    assert policy.micro_batch_tokens == 77
    assert not policy.model.is_gradient_checkpointing
    monkeypatch.setattr(micro_batches, "free_bytes", lambda device: 2**40)
    policy.micro_batch_tokens = 0
    assert policy.choose_micro_batch_tokens(longest=10, previous=32) is None
    assert policy.micro_batch_tokens == 32


def test_existing_moments_are_not_counted_again(policy, monkeypatch):
    """As when a run is resumed: the free memory is then less by as much."""
    model, unused = policy.model, make_optimizer(policy.model, 1e-3, 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    policy.step(1e-3)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    free = (
        int(300 * activation_bytes(model.config) / micro_batches.ACTIVATION_SHARE)
        + 4 * parameters
        + 1
    )
    monkeypatch.setattr(micro_batches, "free_bytes", lambda device: free)

    def chosen(optimizer, dtype="float32") -> int:
        config = PolicyConfig("", ("cpu",), dtype)
        return choose_micro_batch_tokens(model, optimizer, config, MicroBatchNeed(10)).tokens

    assert chosen(policy.optimizer) == 256
    assert chosen(policy.optimizer, "bfloat16") == 256  # 300 / 0.6 = 500
    assert chosen(unused) < 256


@pytest.mark.slow
def test_layers_are_computed_twice_where_a_flag_says_so(folder, monkeypatch):
    """With a given number of tokens, and with what fits; the gradient keeps its bits."""
    gradients = []
    for recomputes in (False, True):
        args = from_preset(SFTArgs, "tiny", gradient_checkpointing=recomputes)
        policy: Any = make_policy(args, plan_policy(args, roles_of(args), str(folder)), str(folder))
        assert policy.model.is_gradient_checkpointing is recomputes
        ids = torch.arange(20).reshape(2, 10)
        policy.model(ids, labels=ids).loss.backward()
        gradients.append(policy.gradient())
        policy.drop_gradient()
        chosen = chosen_with_free(monkeypatch, policy, 300)
        assert chosen > 256 if recomputes else chosen == 256
    assert torch.equal(*gradients)


def gradient_of(policy) -> torch.Tensor:
    ids = torch.arange(20).reshape(2, 10)
    policy.model(ids, labels=ids).loss.backward()
    gradient = policy.gradient()
    policy.drop_gradient()
    return gradient


@pytest.mark.parametrize("trains", [False, True])
def test_layers_are_computed_twice_of_a_family_that_transformers_refuses(trains, tmp_path):
    """In training mode and in evaluation mode; the gradient keeps its bits."""
    family_model("jetmoe").save_pretrained(tmp_path)
    gradients = []
    kept = []
    for recomputes in (False, True):
        config = PolicyConfig(str(tmp_path), ("cpu",), "float32", gradient_checkpointing=recomputes)
        policy = SingleDevicePolicy(config)
        assert not policy.model.supports_gradient_checkpointing
        policy.model.train(trains)
        gradients.append(gradient_of(policy))
        kept.append(saved_bytes(policy.model, 64))
    assert torch.equal(*gradients)
    assert kept[1] < kept[0] / 2


def test_mlps_are_computed_twice_where_a_row_would_not_fit_and_layers_where_that_is_too_little(
    policy, monkeypatch
):
    own = gradient_of(policy)
    before = saved_bytes(policy.model, 128)
    assert chosen_with_free(monkeypatch, policy, 300, longest=300) == 256
    assert saved_bytes(policy.model, 128) == before
    # Of 4 layers the MLPs' insides are 4 x 4 x 384 of 4 x (4 x 384 + 11 x 144) numbers, 49 %: of
    # one layer 12 %, of two 25 %.
    assert chosen_with_free(monkeypatch, policy, 300, longest=380) == 256
    tokens = 31 + 2 * 33  # Of a shared prompt, and of two responses.
    assert before - saved_bytes(policy.model, 128) == 4 * 2 * 4 * 384 * tokens
    assert torch.equal(gradient_of(policy), own)
    assert not policy.model.is_gradient_checkpointing
    checkpointed = chosen_with_free(monkeypatch, policy, 300, longest=600)
    assert policy.model.is_gradient_checkpointing and checkpointed > 256
    tokens = 300 * activation_bytes(policy.config) // checkpointed_activation_bytes(policy.config)
    assert checkpointed == 2 ** (tokens.bit_length() - 1)


def test_given_tokens_that_do_not_fit_take_as_few_mlps_as_they_need():
    """By compiled kernels in bfloat16, of two layers with M = 40 and H = 10: of 640 bytes a token
    320 are inside of MLPs."""
    config = LlamaConfig(
        hidden_size=10, intermediate_size=40, num_hidden_layers=2, num_attention_heads=1
    )
    a_token = activation_bytes(config, 2, "compiled")
    assert a_token == 2 * (2 * (2 * 40 + 4 * 10) + 8 * 10)
    sizes = []
    for kept in (a_token, a_token - 1, a_token - 160, a_token - 161, 1):
        room = micro_batches.ActivationRoom(ceil(100 * kept / micro_batches.SHARE_OF_GIVEN), 2**60)
        need = MicroBatchNeed(50, given=100, kernels="compiled")
        sizes.append(micro_batches.tokens_that_fit(config, 2, room, need))
    assert [size.recomputed_mlps for size in sizes] == [0, 1, 1, 2, 2]
    assert {(size.tokens, size.checkpointing) for size in sizes} == {(100, False)}


def test_a_split_policy_is_charged_for_the_layers_of_its_fullest_device(policy, monkeypatch):
    """Of four layers two a device, so that twice the tokens fit."""
    config = PolicyConfig("", ("cpu", "cpu:0"), "float32")
    free = int(300 * activation_bytes(policy.config) / micro_batches.ACTIVATION_SHARE)
    parameters = sum(weight.numel() for _, weight in policy.weights())
    monkeypatch.setattr(micro_batches, "free_bytes", lambda device: free + 12 * parameters // 2 + 1)
    monkeypatch.setattr(micro_batches, "devices_of", lambda model: ["cpu", "cpu:0"])
    size = choose_micro_batch_tokens(policy.model, policy.optimizer, config, MicroBatchNeed(10))
    assert size == MicroBatchSize(512, checkpointing=False)


def test_checkpointing_a_share_of_the_layers_keeps_one_whole_layer(policy):
    """Of four layers two, with a hidden size of h: the inputs of two, three vectors at the ends,
    one layer."""
    config = policy.config
    whole, half = (
        checkpointed_activation_bytes(config),
        checkpointed_activation_bytes(config, layers=0.5),
    )
    assert whole - half == 4 * 2 * config.hidden_size
    a_token = activation_bytes(config)
    # A row of 200 tokens does not fit in the room of 40 with half of the layers each, so layers are
    # computed twice.
    free = int(40 * a_token / micro_batches.ACTIVATION_SHARE)
    device = micro_batches.ActivationRoom(free, 2**60, layers=0.5)
    size = micro_batches.tokens_that_fit(config, 4, device, MicroBatchNeed(200))
    assert size.checkpointing and size.tokens == 2 ** ((40 * a_token // half).bit_length() - 1)
    assert not micro_batches.tokens_that_fit(config, 4, device, MicroBatchNeed(79)).checkpointing
