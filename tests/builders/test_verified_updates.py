"""What `verify` shortens of a run keeps the run's algorithm whole."""

import pytest

from alignment.args import VerifyArgs, parse
from alignment.builders.verified_updates import with_short_samples


@pytest.mark.parametrize(("k", "group_size"), [(1, 4), (4, 5), (7, 8)])
def test_groups_are_as_large_as_the_estimator_needs(k, group_size):
    flags = ["--sft_base", "", "--advantage", "pass_at_k", "--advantage.k", str(k)]
    args = parse(VerifyArgs, flags)
    assert args.group_size == 8
    assert with_short_samples(args).group_size == group_size


@pytest.mark.parametrize("mini_batch", [0, 32, 50, 128])
def test_mini_batches_are_as_many_as_the_runs(mini_batch):
    args = VerifyArgs(
        sft_base="", prompts_per_rollout=32, group_size=8, train_mini_batch_size=mini_batch
    )
    short = with_short_samples(args)
    assert short.group_size == 4
    assert short.updates_per_rollout == args.updates_per_rollout


def test_a_selection_that_needs_an_older_policy_still_has_one():
    args = VerifyArgs(
        sft_base="",
        loss_type="grpo_no_clip",
        token_selection="kl_cov",
        prompts_per_rollout=32,
        group_size=8,
        train_mini_batch_size=128,
    )
    assert with_short_samples(args).updates_per_rollout == 2
