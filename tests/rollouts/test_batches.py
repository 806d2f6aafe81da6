"""From groups to batches: responses that do not count, and penalties of long ones."""

import dataclasses

import torch
from rollout_helpers import ARGS, parity_reward, problems_of, rollout_of

from alignment.core.records import Completion, Group, Problem, SamplingConfig
from alignment.rewards.rules import score_groups
from alignment.rollouts.source import is_informative
from alignment.training.update import update


def completions_of(sampler, problems, max_new_tokens: int):
    sampling = SamplingConfig(n=4, max_new_tokens=max_new_tokens, seed=1)
    return sampler.sample([problem.prompt for problem in problems], sampling)


def test_unfinished_responses_are_in_no_update(policy, sampler):
    """As if they had not been sampled: the gradient is that of the other rows, over their
    number."""
    args, problems = dataclasses.replace(ARGS, skip_unfinished=True), problems_of(ARGS)
    completions = [
        [
            dataclasses.replace(c, finish_reason="length" if i % 3 else "stop")
            for i, c in enumerate(group)
        ]
        for group in completions_of(sampler, problems, max_new_tokens=6)
    ]
    rollout = rollout_of(score_groups(problems, completions, parity_reward), args)
    assert rollout.trained_rows == [row for row in range(16) if row % 4 in (0, 3)]
    left_out = [row for row in range(16) if row not in rollout.trained_rows]
    assert rollout.advantages_B1[left_out].eq(0).all() and rollout.advantages_B1.abs().max() > 0.5
    values = rollout.response_values(rollout.sampler_log_probs_BT, rollout.trained_rows)
    assert [len(row) > 0 for row in values] == [row in rollout.trained_rows for row in range(16)]
    before = {name: weight.clone() for name, weight in policy.weights()}
    report = update(policy, rollout, args.update_config, 1).report
    assert report["updates"] == 1 and any(
        not torch.equal(weight, before[name]) for name, weight in policy.weights()
    )
    none = dataclasses.replace(rollout, counted_B1=torch.zeros_like(rollout.counted_B1))
    result = update(policy, none, args.update_config, 1)
    assert (result.report["updates"], result.report["bad_updates"], result.bad) == (0, 0, [])


def test_responses_to_which_no_part_of_the_reward_applies_are_in_no_baseline_and_no_update():
    """Rewards 1, 3 and one that is none: the mean is 2, not 4/3."""
    completion = Completion((1,), (2,), (-1.0,), "", "stop", 0)
    scores = tuple(
        {"reward": reward, **extra}
        for reward, extra in ((1.0, {}), (3.0, {}), (0.0, {"unscored": 1.0}))
    )
    args = dataclasses.replace(ARGS, group_size=3, normalize_by_std=False)
    group = Group(Problem("a", "", "", ""), (completion,) * 3, scores)
    rollout = rollout_of([group], args)
    assert rollout.advantages_B1.squeeze(1).tolist() == [-1, 1, 0] and rollout.trained_rows == [
        0,
        1,
    ]
    equal = dataclasses.replace(group, scores=(scores[0], scores[0], scores[2]))
    assert is_informative(group, args.rollout_config) and not is_informative(
        equal, args.rollout_config
    )


def test_overlong_responses_get_a_penalty(sampler):
    problems = problems_of(ARGS)
    groups = score_groups(
        problems, completions_of(sampler, problems, max_new_tokens=8), parity_reward
    )
    args = dataclasses.replace(ARGS, max_new_tokens=8, overlong_buffer=4)
    rollout, plain = (
        rollout_of(groups, args),
        rollout_of(groups, dataclasses.replace(args, overlong_buffer=0)),
    )
    penalties = (rollout.raw_rewards_B1 - plain.raw_rewards_B1).squeeze(1).tolist()
    assert (
        penalties == [-max(0, length - 4) / 4 for length in rollout.lengths]
        and min(penalties) == -1
    )
