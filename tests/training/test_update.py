"""Updates on real rollouts of the tiny model: the gate, the old policy, and gradients that do not depend on cuts."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.args import RLArgs, from_preset
from alignment.core.records import Completion, Endless, Group, Problem, SamplingConfig
from alignment.data.tasks import arithmetic
from alignment.policy.loading import load_model, load_tokenizer, make_optimizer
from alignment.policy.placement import Roles
from alignment.rewards.reward import score_groups
from alignment.rollouts.batches import make_rollout, per_response
from alignment.rollouts.collect import draw_groups, refuse_stale
from alignment.rollouts.prompts import problems_of_step, refill_problems, training_problems
from alignment.sampling.transformers import TransformersSampler
from alignment.system.errors import UserError
from alignment.training.mismatch import sampler_mismatch
from alignment.training.references import OldPolicy, Reference, needs_old_policy, rows_with_gradient
from alignment.training.update import backward, learning_rate, shuffled_groups, update

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
    sampling = SamplingConfig(n=4, max_new_tokens=12, seed=1, **how)
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
    with pytest.raises(UserError, match="--max_sampler_mismatch 0.005.*weights that did not reach the sampler"):
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
    with pytest.raises(RuntimeError, match=r"version \[3\] where 4 was asked for"):
        refuse_stale([[completion]], policy_version=4)


def test_the_samplers_log_probs_serve_as_the_old_ones_where_asked():
    several = dataclasses.replace(ARGS, epochs_per_rollout=2)
    assert needs_old_policy(several) and not several.trusts_sampler
    asked = dataclasses.replace(several, old_log_probs="sampler")
    assert asked.trusts_sampler and not needs_old_policy(asked)
    # REINFORCE has no ratio, so nothing stands in for an old policy; its correction for the sampler needs one still.
    for correction, needed in (("none", False), ("token_truncate", True)):
        other = dataclasses.replace(asked, loss_type="no_baseline", sampler_correction=correction)
        assert not other.trusts_sampler and needs_old_policy(other) is needed
    with pytest.raises(UserError, match="--old_log_probs sampler: the ratio of --loss_type grpo_clip"):
        dataclasses.replace(asked, sampler_correction="token_mask")


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
    # Rows without a gradient have no use for old log-probs.
    telling = rows_with_gradient(rollout, ARGS)
    assert 0 < len(telling) < 16
    mask = rollout.batch.response_mask.clone()
    assert theirs[telling][mask[telling]].lt(0).all()
    mask[telling] = False
    assert theirs[mask].eq(0).all()


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
        policy, make_optimizer(policy, 1e-3, 0.0), rollout, args, 1, torch.float32, lambda seen: changes.append(1)
    )
    assert report["updates"] == 1 and report["bad_updates"] == 1 and len(changes) == 1
    assert len(bad) == 1 and 3 in bad[0] and math.isfinite(report["loss"]) and math.isfinite(report["grad_norm"])

    optimizer = make_optimizer(other, args.learning_rate, 0.0)
    good = [row for row in rows_with_gradient(rollout, args) if row not in bad[0]]
    order = shuffled_groups(range(16), 4, f"update {args.seed} 1 0")
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


@pytest.mark.parametrize("loss_type", ["no_baseline", "grpo_clip"])
def test_rows_without_gradient_are_left_out_of_the_pass_and_of_nothing_else(policy, sampler, loss_type):
    """The weights after an update equal those of a pass over all rows; so does the loss."""
    args = dataclasses.replace(ARGS, loss_type=loss_type, warmup_steps=0)
    rollout, other = sample(sampler), copy.deepcopy(policy)
    telling = rows_with_gradient(rollout, args)
    weights = rollout.raw_rewards_B1 if loss_type == "no_baseline" else rollout.advantages_B1
    assert 0 < len(telling) < 16 and telling == [row for row in range(16) if weights[row] != 0]

    whole, every = copy.deepcopy(policy), range(16)
    losses = [sums["loss"].item() for _, _, sums in backward(whole, rollout, every, 16.0, args, torch.float32)]
    for _ in backward(other, rollout, telling, 16.0, args, torch.float32):
        pass
    for (name, a), b in zip(whole.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-7, msg=name)

    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    report, first_pass, _ = update(policy, optimizer, rollout, args, 1, torch.float32)
    assert report["rows_with_gradient"] == len(telling)
    assert report["loss"] == pytest.approx(sum(losses), abs=1e-6)
    torch.nn.utils.clip_grad_norm_(whole.parameters(), args.max_grad_norm)
    torch.optim.SGD(whole.parameters(), lr=args.learning_rate).step()
    for (name, a), b in zip(whole.named_parameters(), policy.named_parameters(), strict=True):
        torch.testing.assert_close(b[1], a, rtol=0, atol=1e-7, msg=name)
    mask = rollout.batch.response_mask
    assert [bool(row[m].ne(0).all()) for row, m in zip(first_pass, mask, strict=True)] == [r in telling for r in every]


def test_with_a_kl_penalty_every_row_has_a_gradient(policy, sampler):
    rollout = sample(sampler)
    assert rows_with_gradient(rollout, dataclasses.replace(ARGS, beta=0.1)) == list(range(16))


def test_where_nothing_tells_anything_momentum_goes_on(policy, sampler):
    """As with a gradient of zeros: what Adam does with it is the optimiser's business."""
    rollout, other = sample(sampler), copy.deepcopy(policy)
    silent = dataclasses.replace(rollout, advantages_B1=torch.zeros_like(rollout.advantages_B1))
    args = dataclasses.replace(ARGS, warmup_steps=0)
    ours, plain = (make_optimizer(model, ARGS.learning_rate, 0.0) for model in (policy, other))
    update(policy, ours, rollout, args, 1, torch.float32)
    update(other, plain, rollout, args, 1, torch.float32)
    report, first_pass, bad = update(policy, ours, silent, args, 2, torch.float32)
    assert (report["updates"], report["loss"], report["entropy"], report["update_tokens"], bad) == (1, 0.0, None, 0, [])
    assert first_pass.eq(0).all()
    before = [parameter.clone() for parameter in other.parameters()]
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))


def test_the_gate_sees_what_the_first_mini_batch_with_a_gradient_has_computed(policy, sampler):
    """Groups one by one: those without a gradient, and those that are not finite, have nothing to compare."""
    args = dataclasses.replace(ARGS, train_mini_batch_size=4, loss_type="no_baseline", warmup_steps=0)
    rollout, seen = sample(sampler), []
    order = shuffled_groups(range(16), 4, f"update {args.seed} 1 0")
    rewards = rollout.raw_rewards_B1.clone()
    rewards[order[:4]], rewards[order[4:8]], rewards[order[8:]] = 0.0, math.nan, 1.0
    rollout = dataclasses.replace(rollout, raw_rewards_B1=rewards)
    report, _, bad = update(
        policy, make_optimizer(policy, 1e-6, 0.0), rollout, args, 1, torch.float32,
        lambda computed: seen.append(sorted(row for rows, _ in computed for row in rows)),
    )  # fmt: skip
    assert seen == [[], sorted(order[8:12]), sorted(order[12:])] and bad == [order[4:8]] and report["updates"] == 3


def test_the_tokens_that_were_computed_are_counted(policy, sampler):
    rollout = sample(sampler)
    args = dataclasses.replace(ARGS, beta=0.1, epochs_per_rollout=2, micro_batch_tokens=10_000)
    rollout = dataclasses.replace(rollout, reference_log_probs_BT=rollout.sampler_log_probs_BT)
    rollout = OldPolicy(policy, "", Roles(("cpu",), "cpu", "cpu", "cpu"), torch.float32).annotate(rollout, args)
    report, *_ = update(policy, make_optimizer(policy, 1e-3, 0.0), rollout, args, 1, torch.float32)
    mask = rollout.batch.response_mask
    prompts = sum(int(mask[row].int().argmax()) + 1 for row in range(0, 16, 4))  # four prompts of four responses each
    assert report["update_tokens"] == 2 * (prompts + int(mask.sum()) - 16)  # of a response the last is only a label
    assert report["update_token_share"] == report["update_tokens"] / (2 * mask.numel())


def test_an_update_raises_the_probability_of_rewarded_responses(policy, sampler):
    rollout = sample(sampler)
    before = copy.deepcopy(policy)
    update(policy, make_optimizer(policy, 1e-3, 0.0), rollout, dataclasses.replace(ARGS, warmup_steps=0), 1, torch.float32)
    roles = Roles(("cpu",), "cpu", "cpu", "cpu")
    old, new = (OldPolicy(m, "", roles, torch.float32).annotate(rollout, ARGS).old_log_probs_BT for m in (before, policy))
    assert ((new - old).sum(dim=1, keepdim=True) * rollout.advantages_B1).sum() > 0


def test_mini_batches_take_groups_whole_and_in_another_order_each_time():
    rows = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]  # of three groups of four; one row is not trained on
    orders = {tuple(shuffled_groups(rows, 4, str(seed))) for seed in range(40)}
    assert len(orders) == 6
    for order in orders:
        groups = [row // 4 for row in order]
        assert sorted(order) == rows and sum(a != b for a, b in itertools.pairwise(groups)) == 2


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
        drawn = sampler.sample([p.prompt for p in problems], SamplingConfig(n=group_size, max_new_tokens=6, seed=1))

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


# --- variants -------------------------------------------------------------------------------------------------------


def test_unfinished_responses_are_in_no_update(policy, sampler):
    """As if they had not been sampled: the gradient is that of the other rows, over their number."""
    args = dataclasses.replace(ARGS, skip_unfinished=True)
    problems = problems_of_step(arithmetic.problems("train"), ARGS, step=1)
    drawn = sampler.sample([problem.prompt for problem in problems], SamplingConfig(n=4, max_new_tokens=6, seed=1))
    cut = [[dataclasses.replace(c, finish_reason="length" if i % 3 else "stop") for i, c in enumerate(d)] for d in drawn]
    rollout = make_rollout(score_groups(problems, cut, by_length), args, pad=1)
    assert rollout.trained_rows == tuple(row for row in range(16) if row % 4 in (0, 3))
    left_out = [row for row in range(16) if row not in rollout.trained_rows]
    assert rollout.advantages_B1[left_out].eq(0).all() and rollout.advantages_B1.abs().max() > 0.5
    assert [len(values) > 0 for values in per_response(rollout.sampler_log_probs_BT, rollout, rollout.trained_rows)] == [
        row in rollout.trained_rows for row in range(16)
    ]
    before = {name: p.clone() for name, p in policy.named_parameters()}
    report, _, _ = update(policy, make_optimizer(policy, 1e-2, 0.0), rollout, args, 1, torch.float32)
    assert report["updates"] == 1 and any(not torch.equal(p, before[name]) for name, p in policy.named_parameters())
    none = dataclasses.replace(rollout, trained_rows=())
    report, _, bad = update(policy, make_optimizer(policy, 1e-2, 0.0), none, args, 1, torch.float32)
    assert (report["updates"], report["bad_updates"], bad) == (0, 0, [])


def by_length(text, truth):
    return {"reward": float(len(text) % 2), "format_reward": 1.0, "answer_reward": 0.0}


def drawn_group(number, *rewards):
    scores = tuple({"reward": reward, "format_reward": 1.0, "answer_reward": reward} for reward in rewards)
    completions = tuple(Completion((1,), (2,), (-1.0,), "", "stop", 0) for _ in rewards)
    return Group(Problem(str(number), "", "", ""), completions, scores)


def test_groups_without_signal_are_replaced_by_others():
    args = dataclasses.replace(ARGS, max_refills=2)  # 4 prompts a step
    first = [drawn_group(0, 1, 0), drawn_group(1, 0, 0), drawn_group(2, 1, 1), drawn_group(3, 0, 0)]
    draws = iter(
        [
            first,
            [drawn_group(4, 0, 0), drawn_group(5, 0, 1), drawn_group(6, 1, 1)],
            [drawn_group(7, 1, 0), drawn_group(8, 1, 1)],
        ]
    )
    asked = []

    def draw(problems, refill):
        asked.append((len(problems), refill))
        return next(draws)

    groups, drawn = draw_groups(arithmetic.problems("train"), args, 1, draw)
    assert asked == [(4, 0), (3, 1), (2, 2)] and [group.problem.id for group in drawn] == list("012345678")
    assert [group.problem.id for group in groups] == ["0", "5", "7", "1"]  # what is lacking is made up by a silent one
    assert draw_groups(arithmetic.problems("train"), ARGS, 1, lambda problems, refill: first) == (first, first)


def test_refills_depend_on_the_step_and_the_seed_alone():
    problems = arithmetic.problems("train")
    one = refill_problems(problems, ARGS, 3, 1, 4)
    assert one == refill_problems(problems, ARGS, 3, 1, 4) and len(set(one)) == 4
    assert one != refill_problems(problems, ARGS, 3, 2, 4) and one != refill_problems(problems, ARGS, 4, 1, 4)
    assert len(refill_problems(problems[:2], ARGS, 3, 1, 4)) == 2


def test_overlong_responses_are_fined(sampler):
    problems = problems_of_step(arithmetic.problems("train"), ARGS, step=1)
    drawn = sampler.sample([problem.prompt for problem in problems], SamplingConfig(n=4, max_new_tokens=8, seed=1))
    args = dataclasses.replace(ARGS, max_new_tokens=8, overlong_buffer=4)
    rollout = make_rollout(score_groups(problems, drawn, by_length), args, pad=1)
    plain = make_rollout(score_groups(problems, drawn, by_length), dataclasses.replace(args, overlong_buffer=0), pad=1)
    fines = (rollout.raw_rewards_B1 - plain.raw_rewards_B1).squeeze(1).tolist()
    assert fines == [-max(0, length - 4) / 4 for length in rollout.lengths] and min(fines) == -1


def test_the_reference_stays_where_training_began(policy, sampler, tiny_folder):
    args = dataclasses.replace(ARGS, beta=0.1)
    reference = Reference(str(tiny_folder), Roles(("cpu",), "cpu", "cpu", "cpu"), torch.float32)
    optimizer = make_optimizer(policy, ARGS.learning_rate, 0.0)
    reports = []
    for step in (1, 2):
        rollout = reference.annotate(sample(sampler), args, "step-1")
        reports.append(update(policy, optimizer, rollout, args, step, torch.float32)[0])
        sampler.load_weights(policy.named_parameters(), version=step)
    assert reports[0]["kl"] == pytest.approx(0, abs=1e-6) and reports[1]["kl"] > 1e-4


@pytest.mark.parametrize("how", [{"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.9, "top_k": 10, "temperature": 0.7}])
def test_updates_take_log_probs_under_the_distribution_that_was_sampled_from(policy, sampler, how):
    """At the sampler's own weights its log-probs are the old policy's, and the trainer's first pass sees them again."""
    args = dataclasses.replace(ARGS, learning_rate=1e-6, **{f"sampling_{key}": value for key, value in how.items()})
    rollout = sample(sampler, **how)
    mask = rollout.batch.response_mask & (rollout.advantages_B1 != 0)
    old = OldPolicy(policy, "", Roles(("cpu",), "cpu", "cpu", "cpu"), torch.float32).annotate(rollout, args).old_log_probs_BT
    torch.testing.assert_close(old[mask], rollout.sampler_log_probs_BT[mask], rtol=0, atol=1e-4)
    report, first_pass, _ = update(policy, make_optimizer(policy, 1e-6, 0.0), rollout, args, 1, torch.float32)
    torch.testing.assert_close(first_pass[mask], old[mask], rtol=0, atol=1e-4)
    assert (
        old[mask].exp().max()
        > 1.2 * sample(sampler, temperature=how.get("temperature", 1.0)).sampler_log_probs_BT[mask].exp().mean()
    )


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_the_samplers_mismatch_is_weighed_out(policy, sampler, correction):
    rollout = sample(sampler)
    args = dataclasses.replace(ARGS, sampler_correction=correction)
    same = update(copy.deepcopy(policy), make_optimizer(policy, 1e-6, 0.0), rollout, args, 1, torch.float32)[0]
    assert same["correction_mean"] == pytest.approx(1, abs=1e-3)
    # A sampler that took every token for half as likely: weights of 2, under the cap of one and above that of the other.
    off = dataclasses.replace(
        rollout, sampler_log_probs_BT=rollout.sampler_log_probs_BT - math.log(2) * rollout.batch.response_mask
    )
    report = update(copy.deepcopy(policy), make_optimizer(policy, 1e-6, 0.0), off, args, 1, torch.float32)[0]
    assert report["correction_mean"] == pytest.approx({"token_truncate": 2.0, "sequence_mask": 0.0}[correction], abs=1e-2)


def test_training_problems_are_the_first_ones_with_short_enough_prompts(tiny_folder):
    tokenizer, problems = load_tokenizer(str(tiny_folder)), arithmetic.problems("train")[:200]
    args = dataclasses.replace(ARGS, max_prompt_tokens=22, num_problems=10)
    kept = training_problems(problems, args, tokenizer)
    short = [p for p in problems if len(tokenizer(p.prompt)["input_ids"]) <= 22]
    assert kept == short[:10] and 10 < len(short) < 200
    assert training_problems(problems, ARGS, tokenizer) == problems
    endless = Endless(lambda i: problems[i % 200])
    assert training_problems(endless, ARGS, tokenizer) is endless
    assert training_problems(endless, dataclasses.replace(ARGS, num_problems=3), tokenizer) == problems[:3]
    assert problems_of_step(endless, ARGS, 2) == problems[4:8]  # 4 prompts a step
    assert problems_of_step(endless, dataclasses.replace(ARGS, data_seed=1), 2) != problems[4:8]


def test_old_log_probs_are_taken_where_the_loss_or_the_samplers_correction_needs_them():
    several = dataclasses.replace(ARGS, train_mini_batch_size=4)
    plain = dataclasses.replace(several, loss_type="reinforce_with_baseline")
    assert needs_old_policy(several) and not needs_old_policy(plain)
    assert needs_old_policy(dataclasses.replace(plain, sampler_correction="token_truncate"))
    assert not needs_old_policy(dataclasses.replace(ARGS, sampler_correction="token_truncate"))  # one update a rollout


def test_signal_is_what_counts_after_fines():
    """Unfinished responses that do not count tell nothing; fines tell something."""
    cut = drawn_group(0, 1, 1, 0)
    cut = dataclasses.replace(
        cut, completions=(*cut.completions[:2], dataclasses.replace(cut.completions[2], finish_reason="length"))
    )
    longer = drawn_group(1, 1, 1)
    longer = dataclasses.replace(
        longer, completions=(longer.completions[0], dataclasses.replace(longer.completions[1], token_ids=(2,) * 48))
    )

    def kept(group, **how):
        args = dataclasses.replace(ARGS, max_refills=1, prompts_per_rollout=1, **how)
        _, drawn = draw_groups(
            arithmetic.problems("train"), args, 1, lambda problems, refill: [drawn_group(9, 1, 0)] if refill else [group]
        )
        return len(drawn)

    assert (kept(cut), kept(cut, skip_unfinished=True)) == (1, 2)
    assert (kept(longer), kept(longer, overlong_buffer=8)) == (2, 1)
