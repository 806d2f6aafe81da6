"""Averages, intervals, pass@k and majority votes against numbers worked by hand."""

import io
import itertools
import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from alignment.builders.evaluations import PreparedEvaluation
from alignment.core.records import Completion, Group, Problem, SamplingConfig
from alignment.evaluation.accuracy import (
    CATEGORIES,
    category,
    clustered_interval,
    evaluate_vllm,
    figures,
    majority_share,
    pass_at_k,
    print_table,
    summarise,
)
from alignment.rewards.r1_zero import r1_zero_reward_fn
from alignment.rewards.rules import RULES, find_reward, score_groups
from alignment.system.errors import UserError
from alignment.system.terminal import say_once

PROBLEM = Problem("p", "", "", "5")
GRADES = {
    "right": {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0},
    "wrong": {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0},
    "shapeless": {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0},
}


def group(*answers: tuple[str, str]) -> Group:
    """A group of (text inside the answer tags or "", grade)."""
    completions = tuple(
        Completion(
            (1,), (2,), (0.0,), f" </think> <answer> {text} </answer>" if text else "?", "stop", 0
        )
        for text, _ in answers
    )
    return Group(PROBLEM, completions, tuple(GRADES[grade] for _, grade in answers))


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    for n, correct, k in itertools.product(range(1, 6), range(6), range(1, 6)):
        if correct <= n and k <= n:
            draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_majority():
    assert majority_share(group(("5", "right"), ("5", "right"), ("4", "wrong"))) == 1
    assert majority_share(group(("4", "wrong"), ("4", "wrong"), ("5", "right"))) == 0
    assert majority_share(group(("4", "wrong"), ("5", "right"))) == 0.5  # a draw
    # no answer, no vote
    assert majority_share(group(("", "shapeless"), ("", "shapeless"), ("5", "right"))) == 1
    assert majority_share(group(("", "shapeless"))) == 0


def test_votes_number_the_answers_of_a_problem():
    answers = (("4", "wrong"), ("", "shapeless"), ("5", "right"), ("4", "wrong"))
    evaluation = summarise([group(*answers)], 0.0)
    assert [score["vote"] for score in evaluation.groups[0].scores] == [0, -1, 1, 0]
    assert "vote" not in summarise([group(("5", "right"))], 0.0).groups[0].scores[0]


VOTES_OF_RULES = {
    "r1_zero": " t </think> <answer> 5 </answer>",
    "r1_zero_strict": " t </think>\n<answer> 5 </answer>",
    "think_answer": " t </think>\n<answer>\n5\n</answer>",
    "countdown": " 3 + 4 = 7 ; 7 * 2 = 14 </think>\n<answer>(3 + 4) * 2</answer>",
    "boxed": r" t </think> \boxed{5}",
    "flexible": " t </think> It is 5.",
}


@pytest.mark.parametrize("name", RULES)
def test_an_answer_that_a_rule_pays_has_a_vote(name):
    problem = Problem("p", "", "<think>", "14 = 2 3 4" if name == "countdown" else "5")
    completion = Completion((1,), (2,), (0.0,), VOTES_OF_RULES[name], "stop", 0)
    groups = score_groups([problem], [[completion] * 2], RULES[name])
    evaluation = summarise(groups, 0.0, rule=RULES[name])
    assert [score["reward"] for score in evaluation.groups[0].scores] == [1, 1]
    assert [score["vote"] for score in evaluation.groups[0].scores] == [0, 0]
    assert evaluation.record["maj@2"] == 1
    reward = find_reward("majority_vote", (name,))
    [voted] = reward.score([problem], [[completion] * 2])
    assert [score["reward"] for score in voted.scores] == [1, 1]


def test_a_rule_of_ones_own_has_no_votes():
    """Which part of a response it grades is not known; 0 would look like a measurement."""
    evaluation = summarise(
        [group(("5", "right"), ("5", "right"))], 0.0, rule=lambda response, truth: GRADES["right"]
    )
    assert not any(metric.startswith("maj@") for metric in evaluation.record["figures"])
    assert "vote" not in evaluation.groups[0].scores[0]
    with pytest.raises(UserError, match=r"--reward majority_vote: .*countdown:countdown_reward_fn"):
        find_reward("majority_vote", ("alignment.rewards.countdown:countdown_reward_fn",))


def test_categories():
    assert [category(GRADES[grade]) for grade in ("right", "wrong", "shapeless")] == list(
        CATEGORIES
    )


def test_one_sample_a_problem_gives_wilsons_interval():
    # 10 of 40, z = 1.96: centre (0.25 + 0.04802) / 1.09604, half width 0.13082... (Wilson 1927)
    low, high = clustered_interval([[1.0]] * 10 + [[0.0]] * 30)
    n = 40 * 39 / 40  # the unbiased variance between problems counts one problem less
    centre, spread = (
        0.25 + 1.96**2 / (2 * n),
        1.96 * math.sqrt(0.25 * 0.75 / n + 1.96**2 / (4 * n * n)),
    )
    assert (low, high) == pytest.approx(
        ((centre - spread) / (1 + 1.96**2 / n), (centre + spread) / (1 + 1.96**2 / n))
    )
    assert (low, high) == pytest.approx((0.141, 0.403), abs=2e-3)


def test_nothing_right_does_not_mean_certainly_nothing():
    low, high = clustered_interval([[0.0]] * 64)
    assert low == 0
    assert high == pytest.approx(1.96**2 / (64 + 1.96**2))


def test_copies_of_the_same_outcome_add_no_certainty():
    one = clustered_interval([[1.0]] * 10 + [[0.0]] * 30)
    assert clustered_interval([[1.0] * 8] * 10 + [[0.0] * 8] * 30) == pytest.approx(one)


def test_independent_samples_add_certainty():
    scores = (torch.rand(400, 4, generator=torch.Generator().manual_seed(0)) < 0.25).double()
    low, high = clustered_interval(scores.tolist())
    # As of 1,600 independent samples: 2 * 1.96 * sqrt(0.25 * 0.75 / 1600) = 0.042, not of 400:
    # 0.085.
    assert high - low == pytest.approx(0.042, abs=0.005)


def test_the_interval_covers_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    trials, problems, samples, hits = 2000, 60, 4, 0
    for _ in range(trials):
        skill = torch.rand(problems, 1, generator=generator)  # mean 1/2, and problems differ
        scores = (torch.rand(problems, samples, generator=generator) < skill).double()
        low, high = clustered_interval(scores.tolist())
        hits += low <= 0.5 <= high
    # Three standard errors of a coverage of 95 % in 2,000 trials are 1.5 points.
    assert hits / trials == pytest.approx(0.95, abs=0.015)
    assert NormalDist().inv_cdf(0.975) == pytest.approx(1.96, abs=1e-4)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2), min_size=1, max_size=30)
)
def test_the_interval_holds_the_mean_and_stays_in_range(scores):
    low, high = clustered_interval(scores)
    mean = sum(map(sum, scores)) / (2 * len(scores))
    assert 0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1


def test_summary():
    found = summarise(
        [group(("5", "right"), ("4", "wrong")), group(("", "shapeless"), ("5", "right"))],
        seconds=3.0,
    ).record
    averages = {
        name: found[name]
        for name in ("avg_format_rewards", "avg_answer_rewards", "avg_all_rewards")
    }
    assert averages == {
        "avg_format_rewards": 0.75,
        "avg_answer_rewards": 0.5,
        "avg_all_rewards": 0.5,
    }
    assert found["categories"] == {"format and answer": 2, "format only": 1, "neither": 1}
    assert {name: found[name] for name in found if name.startswith("pass@")} == {
        "pass@1": 0.5,
        "pass@2": 1.0,
    }
    assert found["maj@2"] == 0.75


def test_figures_by_hand():
    """Three problems of which all, half and none of four answers are right; z = 1.96, z^2 =
    3.8416."""
    right, wrong = ("5", "right"), ("4", "wrong")
    found = figures([group(*[right] * 4), group(right, right, wrong, wrong), group(*[wrong] * 4)])
    assert list(found) == [
        "avg_format_rewards",
        "avg_answer_rewards",
        "avg_all_rewards",
        "avg@4",
        "pass@1",
        "pass@2",
        "pass@4",
        "maj@4",
    ]
    values = {name: figure["value"] for name, figure in found.items() if "@" in name}
    # pass@2 of the second problem: 1 - C(2, 2) / C(4, 2) = 5 / 6; its majority is a draw.
    assert values == pytest.approx(
        {"avg@4": 0.5, "pass@1": 0.5, "pass@2": 11 / 18, "pass@4": 2 / 3, "maj@4": 0.5}
    )
    # The variance of (1, 1/2, 0) is 1/4, of its mean 1/12, as of 0.25 / (1/12) = 3 samples: half a
    # width of z / (1 + z^2 / 3) * sqrt(0.25 / 3 + z^2 / 36) = 0.859449 * 0.435940.
    average = found["avg@4"]
    assert average["interval"] == pytest.approx([0.5 - 0.374668, 0.5 + 0.374668], abs=1e-5)
    assert average["std_error"] == pytest.approx(math.sqrt(1 / 12))
    # With z^2 more answers, half of them right: 0.5 / sqrt(6.8416), times (1.959964 + 0.841621)
    # sqrt(2) = 3.962039.
    assert average["smallest_difference"] == pytest.approx(
        3.962039 * 0.5 / math.sqrt(6.8416), abs=1e-5
    )
    # The variance of (1, 5/6, 0) is 31/108, of its mean 31/324.
    assert found["pass@2"]["std_error"] == pytest.approx(math.sqrt(31 / 324))
    assert found["maj@4"] == average and found["pass@1"] == average
    # Means of 1/2, 1/2, 1/2 and 1/4 differ less than those of 16 independent answers: there are no
    # more than that.
    found = figures([group(right, right, wrong, wrong)] * 3 + [group(right, wrong, wrong, wrong)])
    assert found["pass@1"] == found["avg@4"]
    assert found["avg@4"]["std_error"] == pytest.approx(math.sqrt(7 / 16 * 9 / 16 / 16))


def test_more_problems_show_smaller_differences_and_more_samples_of_the_same_outcome_do_not():
    def smallest(groups):
        return figures(groups)["avg@1" if len(groups[0].completions) == 1 else "avg@2"][
            "smallest_difference"
        ]

    right, wrong = ("5", "right"), ("4", "wrong")
    few, many = ([group(right)] * n + [group(wrong)] * n for n in (15, 60))
    assert smallest(few) / smallest(many) == pytest.approx(2, abs=0.1)
    twice = [group(right, right)] * 15 + [group(wrong, wrong)] * 15
    assert smallest(twice) == pytest.approx(smallest(few))
    # none of AIME's 30 right does not mean that all is known
    assert 0.1 < smallest([group(wrong)] * 30) < 0.2


class CutOffSampler:
    """Each response is one token, and the last `ending` end by themselves."""

    def __init__(self, ending: int):
        self.ending = ending

    def sample(self, prompts, sampling, on_response_end=None):
        completions = []
        for number in range(len(prompts)):
            reason = "stop" if len(prompts) - number <= self.ending else "length"
            completions.append((Completion((1,), (2,), (0.0,), "?", reason, 0),))
        return completions


def test_an_evaluation_of_which_every_response_is_cut_off_says_so(capsys):
    say_once.cache_clear()
    sampling = SamplingConfig(n=1, max_new_tokens=48)
    prepared = PreparedEvaluation([PROBLEM] * 8, r1_zero_reward_fn, sampling, ())
    prepared.evaluate(CutOffSampler(ending=1))
    assert capsys.readouterr().err == ""
    prepared.evaluate(CutOffSampler(ending=0))
    prepared.evaluate(CutOffSampler(ending=0))  # once
    assert capsys.readouterr().err == (
        "warning: all 8 responses of the evaluation were cut off at --max_new_tokens 48\n"
    )


def test_the_table_says_which_share_of_responses_ended():
    printed = io.StringIO()
    record = summarise([group(("5", "right"))], seconds=1.0).record
    print_table([{"model": "m", "task": "t", **record}], {}, Console(file=printed, width=200))
    assert "finished: 1.000" in printed.getvalue()


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate_vllm(None, None, [], SamplingConfig())
