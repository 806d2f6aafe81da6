"""Updates on real rollouts of the tiny model: gradients do not depend on cuts, and bad updates are
left out."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_helpers import (
    ARGS,
    open_tiny,
    parity_reward,
    problems_of,
    rollout_of,
    sample_rollout,
    with_old_log_probs,
)

from alignment.core.records import Distribution, SamplingConfig
from alignment.model.loading import load_tokenizer
from alignment.policy.policy import Objective
from alignment.rewards.rules import score_groups
from alignment.sampling.transformers import TransformersSampler
from alignment.training.update import (
    RolloutLoss,
    learning_rate,
    rows_with_gradient,
    shuffled_groups,
    update,
)


def accumulate(policy, rollout, rows, denominator, args):
    """Add the gradient of some rows, divided by `denominator`; returns the micro-batches."""
    loss = RolloutLoss(rollout, args.update_config, denominator)
    return list(
        policy.accumulate(rollout.batch, rows, Objective(loss, args.update_config.distribution))
    )


def gradient(policy, rollout, args):
    policy.drop_gradient()
    accumulate(policy, rollout, range(16), 16.0, args)
    return policy.gradient()


def weights_of(policy):
    return [(name, weight.detach().clone()) for name, weight in policy.weights()]


def assert_equal_weights(policy, other):
    for (name, a), (_, b) in zip(policy.weights(), other.weights(), strict=True):
        assert torch.equal(a, b), name


def use_sgd(policy, learning_rate):
    """Replace the policy's AdamW, which blows up differences of rounding."""
    policy.optimizer = torch.optim.SGD(policy.model.parameters(), lr=learning_rate)


def test_skipping_the_old_policys_pass_leaves_the_gradient_identical(policy, sampler):
    rollout = sample_rollout(sampler)
    annotated = with_old_log_probs(rollout, policy, ARGS)
    assert rollout.old_log_probs_BT is None and annotated.old_log_probs_BT is not None
    torch.testing.assert_close(
        gradient(policy, rollout, ARGS), gradient(policy, annotated, ARGS), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("loss_normalization", ["sequence_mean", "token_mean", "constant"])
def test_micro_batches_never_change_the_gradient(policy, sampler, loss_normalization):
    rollout, args, gradients = (
        sample_rollout(sampler),
        dataclasses.replace(ARGS, loss_normalization=loss_normalization),
        [],
    )
    for policy.micro_batch_tokens in (100_000, 70):
        gradients.append(gradient(policy, rollout, args))
    whole, cut = gradients
    torch.testing.assert_close(whole, cut, rtol=0, atol=1e-6)
    assert whole.abs().max() > 1e-3


def test_ratios_are_clipped_only_after_the_first_update_and_reported(policy, sampler):
    args = dataclasses.replace(ARGS, epochs_per_rollout=3, warmup_steps=0)
    assert args.needs_old_policy and not ARGS.needs_old_policy
    rollout = with_old_log_probs(sample_rollout(sampler), policy, args)
    # With "sampler" the result has the log-probs that the first pass computed, not those of the
    # rollout.
    result = update(
        policy, rollout, dataclasses.replace(args.update_config, old_log_probs="sampler"), 1
    )
    assert result.report["updates"] == 3
    assert 0 < result.report["clip_fraction"] < 1
    assert result.report["ratio_max"] > 1.2
    # The first pass computed those of the old policy itself.
    torch.testing.assert_close(
        result.trainer_log_probs_BT, rollout.old_log_probs_BT, rtol=0, atol=1e-5
    )


def test_an_update_that_is_not_finite_is_left_out_and_the_others_are_made(policy, sampler):
    """Two mini-batches, one of them with a reward that is not a number: the same weights as without
    it."""
    args = dataclasses.replace(
        ARGS, train_mini_batch_size=8, loss_type="no_baseline", warmup_steps=0
    )
    rollout, other = sample_rollout(sampler), copy.deepcopy(policy)
    rewards = rollout.raw_rewards_B1.clone()
    rewards[3] = math.nan
    rollout = dataclasses.replace(rollout, raw_rewards_B1=rewards)
    result = update(policy, rollout, args.update_config, 1)
    report, bad = result.report, result.bad
    assert report["updates"] == 1 and report["bad_updates"] == 1
    assert (
        len(bad) == 1
        and 3 in bad[0]
        and math.isfinite(report["loss"])
        and math.isfinite(report["grad_norm"])
    )

    good = [row for row in rows_with_gradient(rollout, args.update_config) if row not in bad[0]]
    order = shuffled_groups(range(16), 4, f"update {args.seed} 1 0")
    good.sort(key=order.index)
    accumulate(other, rollout, good, 8.0, args)
    other.clip_gradient(args.max_grad_norm)
    other.step(args.learning_rate)
    assert_equal_weights(policy, other)


def test_where_no_update_is_finite_the_weights_stay(policy, sampler):
    before, rollout = copy.deepcopy(policy), sample_rollout(sampler)
    args = dataclasses.replace(ARGS, loss_type="no_baseline")
    rollout = dataclasses.replace(
        rollout, raw_rewards_B1=torch.full_like(rollout.raw_rewards_B1, math.inf)
    )
    result = update(policy, rollout, args.update_config, 1)
    assert result.report["updates"] == 0 and result.report["loss"] is None and len(result.bad) == 1
    assert_equal_weights(policy, before)


@pytest.mark.parametrize("loss_type", ["no_baseline", "grpo_clip"])
def test_rows_without_gradient_are_left_out_of_the_pass_and_of_nothing_else(
    policy, sampler, loss_type
):
    """The weights after an update equal those of a pass over all rows; so does the loss."""
    args = dataclasses.replace(ARGS, loss_type=loss_type, warmup_steps=0)
    rollout, other = sample_rollout(sampler), copy.deepcopy(policy)
    informative = rows_with_gradient(rollout, args.update_config)
    weights = rollout.raw_rewards_B1 if loss_type == "no_baseline" else rollout.advantages_B1
    assert 0 < len(informative) < 16 and informative == [
        row for row in range(16) if weights[row] != 0
    ]

    whole = copy.deepcopy(policy)
    losses = [
        result.sums["loss"].item() for result in accumulate(whole, rollout, range(16), 16.0, args)
    ]
    accumulate(other, rollout, informative, 16.0, args)
    torch.testing.assert_close(other.gradient(), whole.gradient(), rtol=0, atol=1e-7)

    use_sgd(policy, 0.1)
    result = update(policy, rollout, args.update_config, 1)
    assert (
        result.report["rows_with_gradient"] == len(informative)
        and result.rows_with_gradient == informative
    )
    assert result.report["loss"] == pytest.approx(sum(losses), abs=1e-6)
    use_sgd(whole, args.learning_rate)
    whole.clip_gradient(args.max_grad_norm)
    whole.step(args.learning_rate)
    for (name, a), (_, b) in zip(whole.weights(), policy.weights(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-7, msg=name)
    computed = zip(result.trainer_log_probs_BT, rollout.batch.response_mask, strict=True)
    assert [bool(row[mask].ne(0).all()) for row, mask in computed] == [
        row in informative for row in range(16)
    ]


def test_with_a_kl_penalty_every_row_has_a_gradient(sampler):
    rollout = sample_rollout(sampler)
    assert rows_with_gradient(rollout, dataclasses.replace(ARGS, beta=0.1).update_config) == list(
        range(16)
    )


def test_without_any_gradient_momentum_goes_on(policy, sampler):
    """As with a gradient of zeros, after which Adam's moments still move the weights."""
    rollout, other = sample_rollout(sampler), copy.deepcopy(policy)
    uninformative = dataclasses.replace(
        rollout, advantages_B1=torch.zeros_like(rollout.advantages_B1)
    )
    config = dataclasses.replace(ARGS, warmup_steps=0).update_config
    update(policy, rollout, config, 1)
    update(other, rollout, config, 1)
    result = update(policy, uninformative, config, 2)
    report = result.report
    assert (report["updates"], report["loss"], report["entropy"], report["update_tokens"]) == (
        1,
        0.0,
        None,
        0,
    )
    assert result.bad == [] and result.trainer_log_probs_BT.eq(0).all()
    before = weights_of(other)
    for parameter in other.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.step(config.learning_rate)
    assert any(
        not torch.equal(a, b) for (_, a), (_, b) in zip(before, other.weights(), strict=True)
    )
    assert_equal_weights(policy, other)


def test_computed_tokens_are_counted(policy, sampler):
    rollout = sample_rollout(sampler)
    args = dataclasses.replace(ARGS, beta=0.1, epochs_per_rollout=2)
    policy.micro_batch_tokens = 10_000
    rollout = dataclasses.replace(rollout, reference_log_probs_BT=rollout.sampler_log_probs_BT)
    rollout = with_old_log_probs(rollout, policy, args)
    report = update(policy, rollout, args.update_config, 1).report
    mask = rollout.batch.response_mask
    # four prompts of four responses each
    prompts = sum(int(mask[row].int().argmax()) + 1 for row in range(0, 16, 4))
    # a response's last token is only a label
    assert report["update_tokens"] == 2 * (prompts + int(mask.sum()) - 16)
    assert report["update_token_share"] == report["update_tokens"] / (2 * mask.numel())


def test_an_update_raises_the_probability_of_rewarded_responses(policy, sampler):
    rollout = sample_rollout(sampler)
    before = copy.deepcopy(policy)
    update(policy, rollout, dataclasses.replace(ARGS, warmup_steps=0).update_config, 1)
    old, new = (
        with_old_log_probs(rollout, each, ARGS).old_log_probs_BT for each in (before, policy)
    )
    assert ((new - old).sum(dim=1, keepdim=True) * rollout.advantages_B1).sum() > 0


def test_at_a_learning_rate_of_0_an_update_leaves_every_weight_as_it_is(policy, sampler):
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    args = dataclasses.replace(ARGS, learning_rate=0, weight_decay=0.1)
    report = update(policy, sample_rollout(sampler), args.update_config, 1).report
    assert report["grad_norm"] > 0 and report["learning_rate"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights())


def test_mini_batches_take_groups_whole_and_in_another_order_each_time():
    rows = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]  # of three groups of four; one row is not trained on
    orders = {tuple(shuffled_groups(rows, 4, str(seed))) for seed in range(40)}
    assert len(orders) == 6
    for order in orders:
        groups = [row // 4 for row in order]
        assert sorted(order) == rows and sum(a != b for a, b in itertools.pairwise(groups)) == 2


def test_the_learning_rate_rises_and_stays():
    config = dataclasses.replace(ARGS, learning_rate=1.0, warmup_steps=4).update_config
    assert [learning_rate(config, number) for number in range(1, 7)] == [0.25, 0.5, 0.75, 1, 1, 1]


@settings(max_examples=12, deadline=None)
@given(
    prompts=st.integers(1, 3),
    group_size=st.integers(2, 4),
    mini_batch=st.integers(0, 13),
    micro_batch_tokens=st.integers(1, 200),
    epochs=st.integers(1, 2),
    normalization=st.sampled_from(["sequence_mean", "token_mean", "constant"]),
    loss_type=st.sampled_from(["no_baseline", "reinforce_with_baseline", "grpo_clip"]),
)
def test_any_batch_arithmetic_trains_as_whole_mini_batches_do(
    tiny_folder,
    prompts,
    group_size,
    mini_batch,
    micro_batch_tokens,
    epochs,
    normalization,
    loss_type,
):
    """Micro-batches of any size, remainders included, end with the weights that one forward a
    mini-batch gives."""
    args = dataclasses.replace(
        ARGS,
        prompts_per_rollout=prompts,
        group_size=group_size,
        train_mini_batch_size=mini_batch,
        warmup_steps=0,
        epochs_per_rollout=epochs,
        loss_normalization=normalization,
        loss_type=loss_type,
        learning_rate=1e-3,
    )
    ends = []
    for tokens in (1_000_000, micro_batch_tokens):
        policy = open_tiny(tiny_folder, tokens)
        sampler = TransformersSampler(policy.model, load_tokenizer(str(tiny_folder)), context=256)
        problems, sampling = (
            problems_of(args),
            SamplingConfig(n=group_size, max_new_tokens=6, seed=1),
        )
        completions = sampler.sample([problem.prompt for problem in problems], sampling)
        rollout = rollout_of(score_groups(problems, completions, parity_reward), args)
        if args.needs_old_policy:
            rollout = with_old_log_probs(rollout, policy, args)
        use_sgd(policy, 1e-3)
        result = update(policy, rollout, args.update_config, 1)
        assert result.bad == [] and result.report["updates"] == args.updates_per_rollout
        ends.append(torch.cat([weight.flatten() for _, weight in weights_of(policy)]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "distribution", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.9, "top_k": 10, "temperature": 0.7}]
)
def test_updates_take_log_probs_under_the_distribution_that_was_sampled_from(
    policy, sampler, distribution
):
    """At the sampler's own weights its log-probs are the old policy's, and the trainer's first pass
    computes them again."""
    sampled_from = {f"sampling_{key}": value for key, value in distribution.items()}
    args = dataclasses.replace(ARGS, learning_rate=1e-6, **sampled_from)
    rollout = sample_rollout(sampler, **distribution)
    mask = rollout.batch.response_mask & (rollout.advantages_B1 != 0)
    old = with_old_log_probs(rollout, policy, args).old_log_probs_BT
    torch.testing.assert_close(old[mask], rollout.sampler_log_probs_BT[mask], rtol=0, atol=1e-4)
    result = update(policy, rollout, args.update_config, 1)
    assert result.report["sampling_entropy"] < 0.95 * result.report["entropy"]
    first_pass = result.trainer_log_probs_BT
    torch.testing.assert_close(first_pass[mask], old[mask], rtol=0, atol=1e-4)
    untruncated = sample_rollout(
        sampler, temperature=distribution.get("temperature", 1.0)
    ).sampler_log_probs_BT
    assert old[mask].exp().max() > 1.2 * untruncated[mask].exp().mean()


def test_log_probs_of_the_full_softmax(policy, sampler):
    """Log-probs of the first pass are those without truncation, which are lower; the comparison
    with the sampler is of what was sampled, as ever."""
    sampled_from = {"sampling_top_p": 0.5, "learning_rate": 1e-6}
    args = dataclasses.replace(ARGS, log_probs_of="full", **sampled_from)
    rollout = sample_rollout(sampler, top_p=0.5)
    mask = rollout.batch.response_mask & (rollout.advantages_B1 != 0)
    full_BT = policy.log_probs(rollout.batch, Distribution())
    result = update(policy, rollout, args.update_config, 1)
    torch.testing.assert_close(result.trainer_log_probs_BT[mask], full_BT[mask], rtol=0, atol=1e-5)
    assert (full_BT - rollout.sampler_log_probs_BT)[mask].mean() < -0.2
    assert result.report["sampler_mismatch"] < 1e-4
    for other in ({}, {"log_probs_of": "sampled"}):
        plain = dataclasses.replace(ARGS, **other).update_config
        assert plain.loss_distribution == plain.distribution == Distribution()


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_importance_weights_correct_for_the_samplers_mismatch(policy, sampler, correction):
    rollout = sample_rollout(sampler)
    config = dataclasses.replace(
        ARGS, sampler_correction=correction, max_sampler_mismatch=1.0
    ).update_config
    same = update(copy.deepcopy(policy), rollout, config, 1).report
    assert same["correction_mean"] == pytest.approx(1, abs=1e-3)
    # A sampler that took every token for half as likely: weights of 2, under the cap of one and
    # above that of the other.
    half = rollout.sampler_log_probs_BT - math.log(2) * rollout.batch.response_mask
    report = update(
        copy.deepcopy(policy), dataclasses.replace(rollout, sampler_log_probs_BT=half), config, 1
    ).report
    assert report["correction_mean"] == pytest.approx(
        {"token_truncate": 2.0, "sequence_mask": 0.0}[correction], abs=1e-2
    )
