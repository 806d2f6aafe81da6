"""One step's groups: refills for groups of equal rewards, and the version of the weights that
sampled them."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from rollout_helpers import ARGS

from alignment.core.records import Completion, Group, Problem
from alignment.data.tasks import arithmetic
from alignment.rollouts.config import Schedule
from alignment.rollouts.source import (
    AheadRollouts,
    check_version,
    refilled_groups,
    sampled_report,
)
from alignment.system import errors
from alignment.system.clock import Clock
from alignment.system.errors import RunStopped

PROBLEMS = arithmetic.problems("train")


def group_of(number: int, *rewards: float) -> Group:
    """A group with made-up rewards, whose problem's id is a number."""
    scores = tuple(
        {"reward": reward, "format_reward": 1.0, "answer_reward": reward} for reward in rewards
    )
    completions = tuple(Completion((1,), (2,), (-1.0,), "", "stop", 0) for _ in rewards)
    return Group(Problem(str(number), "", "", ""), completions, scores)


def with_last(group: Group, **changes) -> Group:
    """The group with its last completion changed."""
    *others, last = group.completions
    return dataclasses.replace(group, completions=(*others, dataclasses.replace(last, **changes)))


def test_completions_of_another_version_are_refused():
    completion = Completion((1,), (2,), (0.0,), "", "stop", policy_version=3)
    group = Group(Problem("", "", "", ""), (completion,), ({},))
    check_version([group], policy_version=3)
    with pytest.raises(RuntimeError, match=r"version \[3\], not with version 4"):
        check_version([group], policy_version=4)


def test_zero_variance_groups_are_replaced_by_others():
    config = dataclasses.replace(ARGS, max_refills=2).rollout_config  # 4 prompts a step
    first = [group_of(0, 1, 0), group_of(1, 0, 0), group_of(2, 1, 1), group_of(3, 0, 0)]
    draws = iter(
        [
            first,
            [group_of(4, 0, 0), group_of(5, 0, 1), group_of(6, 1, 1)],
            [group_of(7, 1, 0), group_of(8, 1, 1)],
        ]
    )
    calls = []

    def sample(problems, refill):
        calls.append((len(problems), refill))
        return next(draws)

    groups, sampled = refilled_groups(PROBLEMS, config, 1, sample)
    assert calls == [(4, 0), (3, 1), (2, 2)] and [group.problem.id for group in sampled] == list(
        "012345678"
    )
    # a zero-variance group fills the step up
    assert [group.problem.id for group in groups] == [
        "0",
        "5",
        "7",
        "1",
    ]
    assert refilled_groups(PROBLEMS, ARGS.rollout_config, 1, lambda problems, refill: first) == (
        first,
        first,
    )


def test_failed_gradings_are_counted_of_all_groups_that_were_sampled():
    """A group whose gradings all fail has equal rewards, so that a refill replaces it."""
    failed = dataclasses.replace(
        group_of(0, 0, 0), scores=({"reward": 0.0, "grading_failed": 1.0},) * 2
    )
    assert sampled_report([failed, group_of(1, 1, 0)]) == {
        "prompts_sampled": 2,
        "responses_sampled": 4,
        "reward_sampled": 0.25,
        "tokens_sampled": 4,
        "grading_failed": 2,
    }


def test_variance_is_that_of_counted_responses_with_penalties():
    """Unfinished responses that do not count add no variance; penalties do."""
    unfinished = with_last(group_of(0, 1, 1, 0), finish_reason="length")
    overlong = with_last(group_of(1, 1, 1), token_ids=(2,) * 48)

    def sampled_groups(group, **options):
        config = dataclasses.replace(
            ARGS, max_refills=1, prompts_per_rollout=1, **options
        ).rollout_config
        return len(
            refilled_groups(
                PROBLEMS, config, 1, lambda _, refill: [group_of(9, 1, 0)] if refill else [group]
            )[1]
        )

    assert (sampled_groups(unfinished), sampled_groups(unfinished, skip_unfinished=True)) == (1, 2)
    assert (sampled_groups(overlong), sampled_groups(overlong, overlong_buffer=8)) == (2, 1)


@pytest.mark.parametrize(
    ("module", "fault", "code"),
    [("mine", "ValueError", 2), ("torch", "ValueError", 1), ("mine", "SystemExit", 2)],
)
def test_an_error_of_the_users_own_code_is_told_from_others_when_sampled_ahead(
    module, fault, code, monkeypatch
):
    """A sweep does not try it again."""
    monkeypatch.setattr(errors, "USERS_PACKAGES", {"mine"})
    named = {"__name__": f"{module}.rules"}
    exec(f"def sample_step(step, sampler): raise {fault}('of a task')", named)
    source = SimpleNamespace(sample_step=named["sample_step"])
    pool = SimpleNamespace(dtype=torch.float32, policy_version=0, close=lambda: None)
    rollouts = AheadRollouts(source, pool, Schedule(num_steps=2), Clock())
    with pytest.raises(RunStopped, match="of a task") as stopped:
        rollouts.next(1)
    rollouts.close()
    assert stopped.value.code == code
