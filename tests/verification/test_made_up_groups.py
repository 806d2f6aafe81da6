"""The checks of groups and of what they are paid: sound rules pass, each fault fails its line."""

from dataclasses import replace

import pytest
from rollout_helpers import ARGS

from alignment.core.records import Group, Problem
from alignment.rewards.rules import find_reward
from alignment.rollouts import source
from alignment.verification.groups import MadeUpGroups
from alignment.verification.scored_groups import ScoredGroups
from alignment.verify import measured_by

COUNTS = "groups: responses that count or are paid wrongly"
REFILLS = "groups: faults of refills"
PROBLEMS = [Problem(str(number), "", "", str(number)) for number in range(2, 6)]


def failed() -> set[str]:
    checks = MadeUpGroups(ARGS.rollout_config).checks()
    return {check.what for check in checks if measured_by(check)[0] > check.limit}


def test_groups_without_a_fault():
    assert failed() == set()


def test_cut_off_responses_that_are_trained(monkeypatch):
    monkeypatch.setattr(source, "is_counted", lambda completion, score, config: True)
    assert COUNTS in failed()


def test_penalties_that_are_left_out(monkeypatch):
    monkeypatch.setattr(source, "length_penalty", lambda completion, config: 0.0)
    assert failed() == {COUNTS, REFILLS}


def test_refills_that_replace_groups_of_unequal_rewards(monkeypatch):
    is_informative = source.is_informative
    monkeypatch.setattr(source, "is_informative", lambda *rest: not is_informative(*rest))
    assert failed() == {REFILLS}


@pytest.mark.parametrize("name", ["r1_zero", "accuracy:1,format:0.5", "random:0.5,r1_zero"])
def test_scores_of_groups(name, monkeypatch):
    reward = find_reward(name, ("r1_zero", "r1_zero_strict"))
    parts = [("accuracy", 1.0), ("format", 0.5)] if name.startswith("accuracy") else []
    scored = ScoredGroups(reward, PROBLEMS, parts)
    assert scored.wrong() == 0
    score = type(reward).score

    def by_other_truths(self, problems, completions):
        groups = score(self, problems[::-1], completions)
        return [
            Group(problem, group.completions, group.scores)
            for problem, group in zip(problems, groups, strict=True)
        ]

    monkeypatch.setattr(type(reward), "score", by_other_truths)
    assert scored.wrong() > 0


def test_weights_of_parts_that_are_others():
    reward = find_reward("accuracy:1,format:0.5", ("r1_zero", "r1_zero_strict"))
    scored = ScoredGroups(reward, PROBLEMS, [("accuracy", 1.0), ("format", 0.25)])
    assert scored.wrong() > 0
    (check,) = replace(scored, parts=[("mine:reward", 1.0)]).checks()
    assert check.not_checked == "your own reward"
