"""Every estimator of advantages by hand, and what responses that do not count change."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from alignment.core.advantages import (
    ADVANTAGES,
    AdvantageConfig,
    NegativeOnlySettings,
    PassAtKSettings,
    PositiveOnlySettings,
    ProblemAverageSettings,
    advantage_inputs,
    compute_advantages,
)
from alignment.core.state_tree import join_tensors, split_tensors


def estimate(name, rewards, settings=None, state=None, counted=None, eps=1e-6, **facts):
    """The advantages of groups of rewards by an estimator, and its next state."""
    config = AdvantageConfig(
        len(rewards[0]), advantage_eps=eps, estimator=ADVANTAGES[name], settings=settings
    )
    rewards_PG = torch.tensor(rewards, dtype=torch.float32)
    counted_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
    if counted is not None:
        counted_PG = torch.tensor(counted)
    inputs = advantage_inputs(rewards_PG.reshape(-1, 1), counted_PG.reshape(-1, 1), config, **facts)
    return compute_advantages(inputs, state)


def close(advantages_PG, expected):
    torch.testing.assert_close(advantages_PG, torch.tensor(expected, dtype=torch.float64))


def test_reinforce_plus_plus_baseline():
    """The differences are 1/2 -1/2 0 0: their unbiased variance is (1/4 + 1/4) / 3 = 1/6."""
    advantages_PG, _ = estimate("reinforce_plus_plus_baseline", [[1, 0], [1, 1]], eps=0.0)
    close(advantages_PG, [[math.sqrt(6) / 2, -math.sqrt(6) / 2], [0, 0]])


def test_opo():
    """The right one has 3 of 6 tokens: the baseline is 1/2."""
    advantages_PG, _ = estimate("opo", [[1, 0, 0]], lengths=[3, 1, 2])
    close(advantages_PG, [[0.5, -0.5, -0.5]])


def test_positive_and_negative_only():
    close(estimate("positive_only", [[1, 0]])[0], [[1, 0]])
    close(estimate("negative_only", [[1, 0]])[0], [[0, -1]])
    weighted = NegativeOnlySettings(positive_weight=0.1, threshold=0.2)
    close(estimate("negative_only", [[0.3, 0.1]], weighted)[0], [[0.1, -1]])
    close(estimate("positive_only", [[1, 0]], PositiveOnlySettings(0.25))[0], [[1, -0.25]])


def test_pass_at_k():
    """Of four responses one is right, k = 2: three of the six pairs have it, so that m = s = 1/2;
    two of the three pairs of a wrong one fail."""
    advantages_PG, _ = estimate("pass_at_k", [[1, 0, 0, 0], [1, 1, 1, 0]], PassAtKSettings(2))
    # In the second group every pair has a right one.
    close(advantages_PG, [[1, -1 / 3, -1 / 3, -1 / 3], [0, 0, 0, 0]])


def test_maxrl():
    """A right one of K = 1 of N = 4 has N / K - 1 = 3."""
    close(estimate("maxrl", [[1, 0, 0, 0], [0, 0, 0, 0]])[0], [[3, -1, -1, -1], [0, 0, 0, 0]])


def test_problem_average():
    """The first time the baseline is the group's mean 1/2, then the average: 1/2, and after a step
    of mean 1 it is 3/4 * 1/2 + 1/4 = 5/8."""
    settings = ProblemAverageSettings(decay=0.75)
    first, state = estimate("problem_average", [[1, 0]], settings, problems=["a", "a"])
    close(first, [[0.5, -0.5]])
    assert state == {"a": 0.5}
    second, state = estimate("problem_average", [[1, 1]], settings, state, problems=["a", "a"])
    close(second, [[0.5, 0.5]])
    assert state == {"a": 0.625}
    both, state = estimate(
        "problem_average", [[0, 0], [0, 1]], settings, state, problems=["a", "a", "b", "b"]
    )
    close(both, [[-0.625, -0.625], [-0.5, 0.5]])
    assert state == {"a": 0.46875, "b": 0.5}
    _, unchanged = estimate(
        "problem_average", [[1, 1]], settings, state, [[False, False]], problems=["a", "a"]
    )
    assert unchanged == state


@pytest.mark.parametrize("name", ADVANTAGES)
@given(data=st.data())
def test_responses_that_do_not_count_change_no_other(name, data):
    """Neither their reward nor their length does; they themselves have 0."""
    drawn = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=8, max_size=8)
    rewards = data.draw(drawn)
    counted = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    others = data.draw(drawn)
    state = {"0": 0.3}
    settings = PassAtKSettings(k=2) if name == "pass_at_k" else None
    advantages = []
    for given_rewards in (rewards, others):
        mixed = [
            own if counts else other
            for own, other, counts in zip(rewards, given_rewards, counted, strict=True)
        ]
        lengths = [
            2 if counts else 2 + round(8 * other)
            for other, counts in zip(given_rewards, counted, strict=True)
        ]
        advantages_PG, _ = estimate(
            name,
            [mixed[:4], mixed[4:]],
            settings,
            state,
            [counted[:4], counted[4:]],
            lengths=lengths,
        )
        advantages.append(advantages_PG)
    assert torch.equal(*advantages)
    assert not advantages[0][~torch.tensor([counted[:4], counted[4:]])].any()


@pytest.mark.parametrize("name", ADVANTAGES)
@given(
    reward=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    lengths=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_only_entries_that_say_so_give_silent_groups_advantages(name, reward, lengths):
    """The rewards 0.1 and 0.7 are no binary fractions, whose means could be off by rounding."""
    advantages_PG, _ = estimate(
        name,
        [[reward] * 3, [1, 0, 1]],
        PassAtKSettings(2) if name == "pass_at_k" else None,
        {"0": 0.5},
        lengths=lengths,
        problems=["0"] * 3 + ["1"] * 3,
    )
    assert ADVANTAGES[name].silent_groups or not advantages_PG[0].any()


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if ADVANTAGES[name].silent_groups])
def test_entries_that_keep_silent_groups_do(name):
    totals = [
        estimate(name, [[reward] * 3], None, {"0": 0.5}, problems=["0"] * 3)[0].abs().sum()
        for reward in (0.0, 1.0)
    ]
    assert sum(totals) > 0


def test_an_interrupted_step_leaves_the_state_as_it_was():
    state = {"0": 0.5}
    estimate("problem_average", [[1, 1]], None, state)
    assert state == {"0": 0.5}


def test_tensors_of_a_state_that_share_memory_can_be_saved(tmp_path):
    tensors: dict = {}
    mean = torch.arange(4.0)
    split_tensors({"mean": mean, "last": mean, "part": mean[1:]}, tensors)
    save_file(tensors, tmp_path / "state.safetensors")
    assert [tensor.tolist() for tensor in tensors.values()] == [[0, 1, 2, 3]] * 2 + [[1, 2, 3]]


def test_a_state_becomes_json_and_tensors_and_back():
    state = {"a": [1, 0.1, None, True, "x"], "b": {"c": torch.tensor([0.1, 2.0])}}
    tensors: dict = {}
    tree = split_tensors(state, tensors)
    back = join_tensors(tree, tensors)
    assert torch.equal(back["b"].pop("c"), state["b"].pop("c")) and back == state
    for bad in ((1, 2), {1: 2}, {"a": {3}}):
        with pytest.raises(TypeError):
            split_tensors(bad, {})
