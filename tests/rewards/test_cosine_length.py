"""The reward of correctness and length, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import RLArgs, parse
from alignment.core.records import Completion, Problem
from alignment.rewards.rules import CosineLength, cosine_length, find_reward
from alignment.verification.papers import paper_cosine_reward

PROBLEM = Problem("1", "2 + 3?", "2 + 3?", "5")
ANSWERS = {True: "</think> <answer>5</answer>", False: "</think> <answer>6</answer>"}


def completion(length: int, is_right: bool, finish_reason="stop") -> Completion:
    tokens = tuple(range(length))
    log_probs = (0.0,) * length
    return Completion((0,), tokens, log_probs, ANSWERS[is_right], finish_reason, 0)


def reward(length: int, is_right: bool, settings: CosineLength, finish_reason="stop") -> float:
    score = {"reward": 0.0, "format_reward": 1.0, "answer_reward": float(is_right)}
    (value,) = cosine_length(
        [PROBLEM], [completion(length, is_right, finish_reason)], [score], settings
    )
    return value


SETTINGS = CosineLength(8, 2.0, 1.0, -10.0, 0.0, -11.0)


@pytest.mark.parametrize(
    ("length", "is_right", "expected"),
    [
        (0, True, 2.0),
        (4, True, 1.5),
        (2, True, 1.5 + math.sqrt(0.5) / 2),
        (0, False, -10.0),
        (4, False, -5.0),
        (6, False, -5.0 + 5 * math.sqrt(0.5)),
        # The longest, and longer.
        (8, True, -11.0),
        (9, False, -11.0),
    ],
)
def test_right_answers_get_less_and_wrong_ones_more_the_longer(length, is_right, expected):
    assert reward(length, is_right, SETTINGS) == pytest.approx(expected, abs=1e-14)


def test_a_response_that_is_cut_off_earlier_counts_as_the_longest():
    assert reward(3, True, SETTINGS, "length") == -11.0


@given(st.integers(0, 7), st.booleans())
def test_it_is_the_papers_formula(length, is_right):
    expected = paper_cosine_reward(length, 8, is_right, (2.0, 1.0), (-10.0, 0.0))
    assert reward(length, is_right, SETTINGS) == pytest.approx(expected, abs=1e-14)


def test_the_longest_response_is_that_of_the_run():
    """So that a finished answer of 300 tokens is not paid as one that is cut off."""
    words = ["--reward", "cosine_length", "--max_new_tokens", "512"]
    args = parse(RLArgs, words)
    assert dict(args.reward_settings)["longest"] == 512
    made = find_reward(args.reward, ("r1_zero",), None, args.reward_settings)
    (group,) = made.score([PROBLEM], [[completion(256, True)]])
    assert group.scores[0]["reward"] == pytest.approx(1.5, abs=1e-14)
    # A length of its own stays, also where a run of before recorded it.
    named = parse(RLArgs, [*words, "--reward.longest", "300"])
    assert dict(named.reward_settings)["longest"] == 300


def test_it_is_a_part_beside_others_with_its_own_settings():
    settings = (("longest", 4), ("right_short", 3.0))
    made = find_reward("cosine_length:2,accuracy", ("r1_zero",), None, settings)
    (group,) = made.score([PROBLEM], [[completion(2, True), completion(2, False)]])
    right, wrong = group.scores
    assert right["part_cosine_length"] == pytest.approx(2.0, abs=1e-14)
    assert right["reward"] == pytest.approx(2 * 2.0 + 1, abs=1e-14)
    assert wrong["part_cosine_length"] == pytest.approx(-5.0, abs=1e-14)
