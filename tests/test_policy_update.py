"""Updates on real rollouts of the tiny model: the gate, the old policy, and gradients that do not depend on cuts."""

import copy
import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.args import RLArgs, from_preset
from alignment.errors import UserError
from alignment.models import load_model, load_tokenizer, make_optimizer
from alignment.placement import Roles
from alignment.policy_update import OldPolicy, backward, learning_rate, needs_old_policy, update
from alignment.records import Completion, Sampling
from alignment.rewards import score_groups
from alignment.rollouts import make_rollout, problems_of_step, refuse_stale, sampler_mismatch
from alignment.samplers.transformers import TransformersSampler
from alignment.tasks import arithmetic

ARGS = from_preset(RLArgs, "tiny", prompts_per_rollout=4, group_size=4, train_mini_batch_size=0, learning_rate=1e-2)


@pytest.fixture
def policy(tiny_folder):
    return load_model(str(tiny_folder), ("cpu",), torch.float32)


@pytest.fixture
def sampler(tiny_folder):
    """A sampler with weights of its own, as on another device."""
    return TransformersSampler(
        load_model(str(tiny_folder), ("cpu",), torch.float32), load_tokenizer(str(tiny_folder)), context=256
    )


def sample(sampler, **how):
    """A rollout whose rewards are made up, so that there is something to learn from an untrained model."""
    problems = problems_of_step(arithmetic.problems("train"), ARGS, step=1)
    sampling = Sampling(n=4, max_new_tokens=12, seed=1, **how)
    completions = sampler.sample([problem.prompt for problem in problems], sampling)

    def reward_fn(text, truth):
        return {"reward": float(len(text) % 2), "format_reward": 1.0, "answer_reward": 0.0}

    return make_rollout(score_groups(problems, completions, reward_fn), ARGS, pad=1)


def gradient(policy, rollout, args):
    policy.zero_grad(set_to_none=True)
    for _ in backward(policy, rollout, range(16), 16.0, args, torch.float32):
        pass
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def test_the_gate_is_open_while_weights_agree_and_shuts_on_stale_ones(policy, sampler):
    optimizer = make_optimizer(policy, ARGS.learning_rate, 0.0)
    agreed = sampler_mismatch(policy, sample(sampler), ARGS, torch.float32)
    assert agreed["sampler_mismatch_max"] < 1e-4
    update(policy, optimizer, sample(sampler), ARGS, 1, torch.float32)
    with pytest.raises(UserError, match="--max_sampler_mismatch 0.001.*weights that did not reach the sampler"):
        sampler_mismatch(policy, sample(sampler), ARGS, torch.float32)
    sampler.load_weights(policy.named_parameters(), version=1)
    assert sampler_mismatch(policy, sample(sampler), ARGS, torch.float32)["sampler_mismatch_max"] < 1e-4


@pytest.mark.parametrize("how", [{"temperature": 0.7}, {"top_p": 0.8}])
def test_the_gate_compares_under_the_distribution_sampled_from(policy, sampler, how):
    rollout = sample(sampler, **how)
    args = dataclasses.replace(ARGS, **{f"sampling_{key}": value for key, value in how.items()})
    assert sampler_mismatch(policy, rollout, args, torch.float32)["sampler_mismatch_max"] < 1e-4
    with pytest.raises(UserError, match="other temperature or top-p"):
        sampler_mismatch(policy, rollout, ARGS, torch.float32)


def test_completions_of_another_version_are_refused():
    completion = Completion((1,), (2,), (0.0,), "", "stop", policy_version=3)
    refuse_stale([[completion]], policy_version=3)
    with pytest.raises(RuntimeError, match=r"version \[3\], the trainer is at 4"):
        refuse_stale([[completion]], policy_version=4)


def test_skipping_the_old_policys_pass_leaves_the_gradient_identical(policy, sampler):
    rollout = sample(sampler)
    asked = OldPolicy(policy, "", Roles(("cpu",), "cpu", "cpu", "cpu"), torch.float32).annotate(rollout, ARGS)
    assert rollout.old_log_probs_BT is None and asked.old_log_probs_BT is not None
    torch.testing.assert_close(gradient(policy, rollout, ARGS), gradient(policy, asked, ARGS), rtol=0, atol=1e-7)


def test_a_reference_of_its_own_gives_the_same_old_log_probs(policy, sampler, tiny_folder):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)  # what the reference was loaded with is out of date
    rollout = sample(sampler)
    shared = OldPolicy(policy, "", Roles(("cpu",), "cpu", "cpu", "cpu"), torch.float32)
    apart = OldPolicy(policy, str(tiny_folder), Roles(("elsewhere",), "cpu", "cpu", "cpu"), torch.float32)
    assert apart.model is not policy
    ours, theirs = (old.annotate(rollout, ARGS).old_log_probs_BT for old in (apart, shared))
    assert torch.equal(ours, theirs)
    assert theirs[rollout.batch.response_mask].lt(0).all()


@pytest.mark.parametrize("loss_normalization", ["sequence_mean", "token_mean", "constant"])
def test_micro_batches_never_change_the_gradient(policy, sampler, loss_normalization):
    rollout = sample(sampler)
    whole, cut = (
        gradient(policy, rollout, dataclasses.replace(ARGS, micro_batch_tokens=tokens, loss_normalization=loss_normalization))
        for tokens in (100_000, 70)
    )
    torch.testing.assert_close(whole, cut, rtol=0, atol=1e-6)
    assert whole.abs().max() > 1e-3


def test_clipping_bites_only_after_the_first_update_and_reports_it(policy, sampler):
    args = dataclasses.replace(ARGS, epochs_per_rollout=3, warmup_steps=0)
    assert needs_old_policy(args) and not needs_old_policy(ARGS)
    rollout = OldPolicy(policy, "", Roles(("cpu",), "cpu", "cpu", "cpu"), torch.float32).annotate(sample(sampler), args)
    report, seen, _ = update(policy, make_optimizer(policy, 1e-2, 0.0), rollout, args, 1, torch.float32)
    assert report["updates"] == 3
    assert 0 < report["clip_fraction"] < 1
    assert report["ratio_max"] > 1.2
    # What the first pass saw is the old policy itself.
    torch.testing.assert_close(seen, rollout.old_log_probs_BT, rtol=0, atol=1e-5)


def test_an_update_that_is_not_finite_is_left_out_and_the_others_are_made(policy, sampler):
    """Two mini-batches, one of them with a reward that is no number: the same weights as without it."""
    args = dataclasses.replace(ARGS, train_mini_batch_size=8, loss_type="no_baseline", warmup_steps=0)
    rollout, other = sample(sampler), copy.deepcopy(policy)
    poisoned = rollout.raw_rewards_B1.clone()
    poisoned[3] = math.nan
    rollout = dataclasses.replace(rollout, raw_rewards_B1=poisoned)
    changes = []
    report, _, bad = update(
        policy, make_optimizer(policy, 1e-3, 0.0), rollout, args, 1, torch.float32, lambda: changes.append(1)
    )
    assert report["updates"] == 1 and report["bad_updates"] == 1 and len(changes) == 1
    assert len(bad) == 1 and 3 in bad[0] and math.isfinite(report["loss"]) and math.isfinite(report["grad_norm"])

    optimizer = make_optimizer(other, args.learning_rate, 0.0)
    good = [row for row in range(16) if row not in bad[0]]
    order = random.Random(f"update {args.seed} 1 0").sample(range(16), 16)
    good.sort(key=order.index)
    for _ in backward(other, rollout, good, 8.0, args, torch.float32):
        pass
    torch.nn.utils.clip_grad_norm_(other.parameters(), args.max_grad_norm)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))


def test_where_no_update_is_finite_the_weights_stay(policy, sampler):
    before, rollout = copy.deepcopy(policy), sample(sampler)
    args = dataclasses.replace(ARGS, loss_type="no_baseline")
    rollout = dataclasses.replace(rollout, raw_rewards_B1=torch.full_like(rollout.raw_rewards_B1, math.inf))
    report, _, bad = update(policy, make_optimizer(policy, 1e-3, 0.0), rollout, args, 1, torch.float32)
    assert report["updates"] == 0 and report["loss"] is None and len(bad) == 1
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), before.parameters(), strict=True))


def test_an_update_raises_the_probability_of_rewarded_responses(policy, sampler):
    rollout = sample(sampler)
    before = copy.deepcopy(policy)
    update(policy, make_optimizer(policy, 1e-3, 0.0), rollout, dataclasses.replace(ARGS, warmup_steps=0), 1, torch.float32)
    roles = Roles(("cpu",), "cpu", "cpu", "cpu")
    old, new = (OldPolicy(m, "", roles, torch.float32).annotate(rollout, ARGS).old_log_probs_BT for m in (before, policy))
    assert ((new - old).sum(dim=1, keepdim=True) * rollout.advantages_B1).sum() > 0


def test_every_problem_is_drawn_once_a_pass():
    problems = arithmetic.problems("test")[:10]
    drawn = [p.id for step in range(1, 6) for p in problems_of_step(problems, ARGS, step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == sorted(p.id for p in problems)
    assert drawn[:10] != drawn[10:]
    other = dataclasses.replace(ARGS, seed=1)
    assert drawn[:4] != [p.id for p in problems_of_step(problems, other, 1)]


def test_the_learning_rate_rises_and_stays():
    rates = [learning_rate(dataclasses.replace(ARGS, learning_rate=1.0, warmup_steps=4), number) for number in range(1, 7)]
    assert rates == [0.25, 0.5, 0.75, 1, 1, 1]


@settings(max_examples=25, deadline=None)
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
    tiny_folder, prompts, group_size, mini_batch, micro_batch_tokens, epochs, normalization, loss_type
):
    """Micro-batches of any size, remainders included, end with the weights that one forward a mini-batch gives."""
    args = dataclasses.replace(
        ARGS, prompts_per_rollout=prompts, group_size=group_size, train_mini_batch_size=mini_batch, warmup_steps=0,
        epochs_per_rollout=epochs, loss_normalization=normalization, loss_type=loss_type, learning_rate=1e-3,
    )  # fmt: skip
    ends = []
    for tokens in (1_000_000, micro_batch_tokens):
        policy = load_model(str(tiny_folder), ("cpu",), torch.float32)
        sampler = TransformersSampler(policy, load_tokenizer(str(tiny_folder)), context=256)
        problems = problems_of_step(arithmetic.problems("train"), args, step=1)
        drawn = sampler.sample([p.prompt for p in problems], Sampling(n=group_size, max_new_tokens=6, seed=1))

        def reward_fn(text, truth):
            return {"reward": float(len(text) % 2), "format_reward": 1.0, "answer_reward": 0.0}

        cut = dataclasses.replace(args, micro_batch_tokens=tokens)
        rollout = make_rollout(score_groups(problems, drawn, reward_fn), cut, pad=1)
        if needs_old_policy(cut):
            rollout = OldPolicy(policy, "", Roles(("cpu",), "cpu", "cpu", "cpu"), torch.float32).annotate(rollout, cut)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)  # Adam would blow up differences of rounding
        report, _, bad = update(policy, optimizer, rollout, cut, 1, torch.float32)
        assert bad == [] and report["updates"] == args.updates_per_rollout
        ends.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)
