"""The comparison of the sampler's log-probs with the trainer's."""

import dataclasses
import math

import pytest
from rollout_helpers import ARGS, sample_rollout

from alignment.system.errors import RunStopped
from alignment.training import update as update_module
from alignment.training.update import mismatch, sampler_mismatch, shuffled_groups, update


def mismatch_of(policy, rollout, args=ARGS):
    return sampler_mismatch(policy, rollout, args.sampling.distribution, args.max_sampler_mismatch)


def test_mismatch_is_tiny_for_equal_weights_and_stops_the_run_for_stale_ones(policy, sampler):
    assert mismatch_of(policy, sample_rollout(sampler))["sampler_mismatch_max"] < 1e-4
    update(policy, sample_rollout(sampler), ARGS.update_config, 1)
    with pytest.raises(
        RunStopped, match="--max_sampler_mismatch 0.005.*weights that did not reach the sampler"
    ):
        mismatch_of(policy, sample_rollout(sampler))
    sampler.load_weights(policy.weights(), version=1)
    assert mismatch_of(policy, sample_rollout(sampler))["sampler_mismatch_max"] < 1e-4


@pytest.mark.parametrize("distribution", [{"temperature": 0.7}, {"top_p": 0.8}])
def test_log_probs_are_compared_under_the_distribution_that_was_sampled_from(
    policy, sampler, distribution
):
    rollout = sample_rollout(sampler, **distribution)
    args = dataclasses.replace(
        ARGS, **{f"sampling_{key}": value for key, value in distribution.items()}
    )
    assert mismatch_of(policy, rollout, args)["sampler_mismatch_max"] < 1e-4
    with pytest.raises(RunStopped, match="other temperature or top-p"):
        mismatch_of(policy, rollout)


def test_the_first_mini_batch_with_a_gradient_is_compared(policy, sampler, monkeypatch):
    """One group a mini-batch: those without a gradient, and those that are not finite, have nothing
    to compare."""
    args = dataclasses.replace(
        ARGS, train_mini_batch_size=4, loss_type="no_baseline", warmup_steps=0, learning_rate=1e-6
    )
    rollout = sample_rollout(sampler)
    compared = []

    def record(trainer_BT, rows, rollout, limit, steps_old):
        compared.append((sorted(rows), steps_old))
        return mismatch(trainer_BT, rows, rollout, limit, steps_old)

    monkeypatch.setattr(update_module, "mismatch", record)
    order = shuffled_groups(range(16), 4, f"update {args.seed} 1 0")
    rewards = rollout.raw_rewards_B1.clone()
    rewards[order[:4]], rewards[order[4:8]], rewards[order[8:]] = 0.0, math.nan, 1.0
    rollout = dataclasses.replace(rollout, raw_rewards_B1=rewards)
    result = update(policy, rollout, args.update_config, 1)
    # the update without a gradient has moved the weights
    assert compared == [(sorted(order[8:12]), 1)]
    assert result.bad == [order[4:8]] and result.report["updates"] == 3
    assert 0 < result.report["sampler_mismatch"] < 1e-4
