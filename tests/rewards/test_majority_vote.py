"""The reward that pays the answer which most responses to a problem gave."""

from collections import Counter

import pytest

from alignment.core.records import Completion, Problem
from alignment.rewards.rules import RULES, find_reward
from alignment.verification.scored_groups import ScoredGroups


def responses(*answers: str) -> list[Completion]:
    texts = [f"<think> so </think> <answer> {answer} </answer>" for answer in answers]
    return [Completion((0,), (0,), (0.0,), text, "stop", 0) for text in texts]


def problem(name: str, truth: str) -> Problem:
    return Problem(name, "?", prompt="?", ground_truth=truth)


def test_the_majority_of_a_group_is_paid_whatever_the_truth_is():
    reward = find_reward("majority_vote", ("r1_zero", "r1_zero_strict"))
    silent = Completion((0,), (0,), (0.0,), "I do not know", "stop", 0)
    groups = reward.score(
        [problem("a", "7"), problem("b", "7")],
        [[*responses("3", "7", "3"), silent], responses("7", "3", "3", "7")],
    )
    # 3 has two votes of three; the silent response none. Of 7 and 3, two each, 7 came first.
    assert [score["reward"] for score in groups[0].scores] == [1, 0, 1, 0]
    assert [score["reward"] for score in groups[1].scores] == [1, 0, 0, 1]
    # what evaluations report stays the task's rule
    assert [score["answer_reward"] for score in groups[0].scores] == [0, 1, 0, 0]


def test_the_answer_is_the_one_that_the_tasks_rule_reads():
    reward = find_reward("majority_vote", ("boxed", "flexible"))
    texts = [r"so \boxed{3}", r"so \boxed{3}", r"so \boxed{7}", "7"]
    completions = [Completion((0,), (0,), (0.0,), text, "stop", 0) for text in texts]
    [group] = reward.score([problem("a", "7")], [completions])
    assert [score["reward"] for score in group.scores] == [1, 1, 0, 0]


@pytest.mark.parametrize("name", ["majority_vote", "accuracy"])
def test_a_verification_leaves_out_what_a_response_alone_cannot_show(name):
    reward = find_reward(name, ("r1_zero",))
    problems = [problem(letter, truth) for letter, truth in zip("abcd", "1234", strict=True)]
    check, *of_votes = ScoredGroups(reward, problems, ((name, 1.0),)).checks()
    assert bool(check.not_checked) == (name == "majority_vote") == bool(of_votes)


@pytest.mark.parametrize("rule", RULES)
def test_a_verification_counts_the_votes_itself(rule, monkeypatch):
    reward = find_reward("majority_vote", (rule,))
    problems = [problem(letter, truth) for letter, truth in zip("abcd", "1234", strict=True)]
    _, votes = ScoredGroups(reward, problems, (("majority_vote", 1.0),)).checks()
    assert votes.quantity() == 0
    # Of the five votes 2 1 1 1 2, the rarest answer is 2: all five are paid wrongly. Of 2 1 1 2 3
    # it is 3, and of 1 2 3 3 4 it is one of three that came once.
    monkeypatch.setattr(
        Counter, "most_common", lambda self, number: sorted(self.items(), key=lambda item: item[1])
    )
    assert votes.quantity() == 5 + 3 + 3
