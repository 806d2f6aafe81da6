"""A policy split over devices: the same numbers, and no waiting between micro-batches."""

import copy

import pytest
import torch
from rollout_helpers import open_tiny, rollout_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from alignment.args import RLArgs, from_preset
from alignment.core.records import Completion, Group, Problem
from alignment.model import parallel_micro_batches
from alignment.model.device_map import partition_layers
from alignment.model.loading import spread
from alignment.model.log_probs import get_response_log_probs
from alignment.model.shape import ModelShape
from alignment.policy.layer_split import LayerSplitPolicy
from alignment.policy.policy import PolicyConfig, open_policy
from alignment.training.update import rollout_objective

CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=48,
    tie_word_embeddings=True,
)


def log_probs(model):
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor(
        [[False, False, True, True, True, True], [False, True, True, False, False, False]]
    )
    return get_response_log_probs(model, ids, ids + 1, True, response_mask=mask)["log_probs"]


def test_loss_and_gradients_equal_those_of_the_whole_model():
    torch.manual_seed(0)
    whole = Qwen2ForCausalLM(CONFIG)
    # Two names for the CPU stand for two devices: all moves are made, and none of them may change a
    # number.
    device_map = partition_layers(ModelShape.from_config(CONFIG), ["cpu", "cpu:0"])
    assert set(device_map.values()) == {"cpu", "cpu:0"}
    split = spread(copy.deepcopy(whole), device_map)
    of_whole, of_split = log_probs(whole), log_probs(split)
    assert torch.equal(of_split, of_whole)
    of_whole.sum().backward()
    of_split.sum().backward()
    for (name, one), (_, other) in zip(
        whole.named_parameters(), split.named_parameters(), strict=True
    ):
        assert torch.equal(other.grad, one.grad), name


# `take_rows` reads the width of the rows it takes, from a mask that never leaves the CPU
HOST_SIDE = 1


class HostReads(TorchDispatchMode):
    """Counts reads of tensor values by the host: on a GPU each one waits for all that was issued
    before."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.equal.default,
        )
        return function(*args, **(kwargs or {}))


ARGS = from_preset(RLArgs, "tiny", train_mini_batch_size=0)


def made_up_rollout():
    """Two groups of eight responses of three tokens, half of them right."""
    completion = Completion((1, 2), (3, 4, 5), (-1.0, -1.0, -1.0), "", "stop", 0)
    wrong = Completion((1, 2), (6, 7, 8), (-1.0, -1.0, -1.0), "", "stop", 0)
    score = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
    other = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
    group = Group(Problem("", "", "", ""), (completion, wrong) * 4, (score, other) * 4)
    return rollout_of([group, group], ARGS, pad=0)


@pytest.fixture
def saved(tmp_path):
    """A folder with a model of `CONFIG`."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(CONFIG).save_pretrained(folder := tmp_path / "model")
    return str(folder)


def accumulate(policy, rollout):
    """The micro-batches of one update on the whole rollout."""
    return policy.accumulate(
        rollout.batch, range(16), rollout_objective(rollout, range(16), ARGS.update_config)
    )


def test_micro_batches_do_not_wait_for_the_device(saved, monkeypatch):
    monkeypatch.setattr(parallel_micro_batches, "PARALLEL", 1)  # as on a GPU
    rollout, policy = made_up_rollout(), open_tiny(saved)

    def reads(micro_batch_tokens: int) -> tuple[int, int]:
        policy.micro_batch_tokens = micro_batch_tokens
        with HostReads() as counter:
            pieces = list(accumulate(policy, rollout))
        return len(pieces), counter.count - HOST_SIDE * (1 + len(pieces))

    assert reads(1000) == (1, 0)
    # 2 tokens of prompt and 2 of each response: three responses a micro-batch
    assert reads(8) == (
        6,
        0,
    )


def test_several_micro_batches_in_flight_give_the_gradient_of_one_after_another(saved):
    policies = [
        open_policy(kind, PolicyConfig(saved, devices, "float32", micro_batch_tokens=16))
        for kind, devices in (("single", ("cpu",)), ("layer_split", ("cpu", "cpu:0")))
    ]
    whole, split = policies
    split.devices = ("cpu", "cpu:0")  # two names for the CPU, which torch takes for one
    assert isinstance(split, LayerSplitPolicy) and not isinstance(whole, LayerSplitPolicy)
    rollout, in_flight, most = made_up_rollout(), 0, 0

    def count(change):
        nonlocal in_flight, most
        in_flight += change
        most = max(most, in_flight)

    split.model.model.norm.register_forward_hook(lambda *_: count(1))
    split.model.model.norm.register_full_backward_hook(lambda *_: count(-1))
    micro_batches = [len(list(accumulate(policy, rollout))) for policy in policies]
    # With four in flight each has a quarter of the budget, and so one response.
    assert (*micro_batches, most) == (3, 16, 4)
    norms = [policy.clip_gradient(0.01).item() for policy in policies]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6) and norms[0] > 0.1
    assert split.gradient().norm().item() == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(split.gradient(), whole.gradient(), rtol=0, atol=1e-6)


def test_rows_of_a_prompt_stay_together_where_every_device_gets_a_micro_batch(saved):
    """A micro-batch for each of four prompts; of a single one the eight rows are shared out."""
    policy = open_policy(
        "layer_split", PolicyConfig(saved, ("cpu", "cpu:0"), "float32", micro_batch_tokens=60)
    )
    policy.devices = ("cpu", "cpu:0")
    score = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}

    def pieces(prompts):
        groups = [
            Group(
                Problem("", "", "", ""),
                (Completion((1, prompt), (3, 4, 5), (-1.0,) * 3, "", "stop", 0),) * 8,
                (score,) * 8,
            )
            for prompt in prompts
        ]
        rollout, rows = rollout_of(groups, ARGS, pad=0), range(8 * len(prompts))
        objective = rollout_objective(rollout, rows, ARGS.update_config)
        return sorted(
            sorted(piece.rows) for piece in policy.accumulate(rollout.batch, rows, objective)
        )

    assert pieces([2, 3, 4, 5]) == [[*range(start, start + 8)] for start in range(0, 32, 8)]
    assert pieces([2]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_without_rows_the_gradient_is_zeros(saved):
    """A mini-batch whose groups have equal rewards has no row with a gradient."""
    policy, rollout = (
        open_policy("layer_split", PolicyConfig(saved, ("cpu", "cpu:0"), "float32")),
        made_up_rollout(),
    )
    objective = rollout_objective(rollout, range(16), ARGS.update_config)
    assert list(policy.accumulate(rollout.batch, [], objective)) == []
    parameters = list(policy.model.parameters())
    assert (
        all(p.grad is not None and not p.grad.any() for p in parameters)
        and policy.clip_gradient(1.0) == 0
    )
    before = [p.detach().clone() for p in parameters]
    policy.step(0.1)
    assert all(map(torch.equal, before, parameters))


def test_without_rows_an_earlier_gradient_stays(saved):
    """`accumulate` adds to the gradient that is there."""
    policy = open_policy("layer_split", PolicyConfig(saved, ("cpu", "cpu:0"), "float32"))
    rollout = made_up_rollout()
    objective = rollout_objective(rollout, range(16), ARGS.update_config)
    list(policy.accumulate(rollout.batch, range(2), objective))
    gradient = policy.gradient().clone()
    list(policy.accumulate(rollout.batch, [], objective))
    assert gradient.any() and torch.equal(policy.gradient(), gradient)


def test_the_counter_sees_a_wait():
    with HostReads() as counter:
        float(torch.ones(1) + 1)
    assert counter.count == 1
