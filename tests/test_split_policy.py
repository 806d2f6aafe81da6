"""A policy split over devices: same numbers, every activation where it belongs, and no waiting between micro-batches."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from alignment.log_probs import get_response_log_probs
from alignment.models import spread
from alignment.placement import ModelShape, partition_layers

CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=48, tie_word_embeddings=True,
)  # fmt: skip


def log_probs(model):
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[False, False, True, True, True, True], [False, True, True, False, False, False]])
    return get_response_log_probs(model, ids, ids + 1, True, response_mask=mask)["log_probs"]


def test_loss_and_gradients_equal_those_of_the_whole_model():
    torch.manual_seed(0)
    whole = Qwen2ForCausalLM(CONFIG)
    # Two names for the CPU stand for two devices: all moves are made, and none of them may change a number.
    device_map = partition_layers(ModelShape.from_config(CONFIG), ["cpu", "cpu:0"])
    assert set(device_map.values()) == {"cpu", "cpu:0"}
    split = spread(copy.deepcopy(whole), device_map)
    expected, found = log_probs(whole), log_probs(split)
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for (name, one), (_, other) in zip(whole.named_parameters(), split.named_parameters(), strict=True):
        assert torch.equal(other.grad, one.grad), name


simulated = pytest.mark.skipif(torch.version.cuda is None, reason="simulated GPUs need the CUDA build of torch")
