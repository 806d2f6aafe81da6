"""Learning rates of a run's updates, by hand."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import ARGS

from alignment.builders.checks import run_config
from alignment.core.schedules import SCHEDULES, LearningRate
from alignment.training import sft, update
from alignment.training.sft import SFTConfig

ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [0.775, 0.55, 0.325, 0.1]),
        # 1 - 0.45 (1 - cos) at 45, 90, 135 and 180 degrees.
        ("cosine", [1 - 0.45 * (1 - ROOT), 0.55, 1 - 0.45 * (1 + ROOT), 0.1]),
    ],
)
def test_rates_rise_for_two_updates_and_then_follow_the_schedule(schedule, shares):
    rates = LearningRate(2.0, 2, schedule, 6)
    expected = [1.0, 2.0, *(2 * share for share in shares)]
    assert [rates.of_update(n) for n in range(1, 7)] == pytest.approx(expected, abs=1e-15)


@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    warmup=st.integers(0, 9),
    updates=st.integers(1, 40),
)
def test_a_rate_never_exceeds_the_peak_nor_rises_after_the_warm_up(schedule, warmup, updates):
    rates = LearningRate(1.0, warmup, schedule, updates)
    after = [rates.of_update(number) for number in range(max(1, warmup), updates + 1)]
    assert after == sorted(after, reverse=True)
    assert all(0.1 - 1e-12 <= rate <= 1 for rate in after)


def test_rl_counts_the_updates_of_all_steps():
    """Two updates a rollout, three rollouts: the sixth update is the last."""
    args = dataclasses.replace(
        ARGS,
        num_steps=3,
        train_mini_batch_size=ARGS.rollout_size // 2,
        lr_schedule="linear",
        learning_rate=1.0,
        warmup_steps=0,
    )
    rates = [update.learning_rate(args.update_config, number) for number in range(1, 7)]
    assert rates == pytest.approx([0.85, 0.7, 0.55, 0.4, 0.25, 0.1], abs=1e-15)


def test_sft_falls_to_a_tenth_by_default():
    settings = {"num_steps": 4, "batch_size": 2, "curriculum": False, "warmup_steps": 2}
    config = SFTConfig(**settings, learning_rate=1.0, max_grad_norm=1.0, eval_interval=1, seed=0)
    assert [sft.learning_rate(config, n) for n in range(1, 5)] == [0.5, 1.0, 0.55, 1 - 0.9 * 2 / 2]
    cosine = dataclasses.replace(config, lr_schedule="cosine")
    assert sft.learning_rate(cosine, 3) == pytest.approx(0.55, abs=1e-15)
    assert sft.learning_rate(dataclasses.replace(config, lr_schedule="constant"), 4) == 1.0


def test_a_run_whose_rate_falls_keeps_its_number_of_steps_on_resume():
    assert "num_steps" in run_config(ARGS).changeable
    assert "num_steps" not in run_config(dataclasses.replace(ARGS, lr_schedule="cosine")).changeable
