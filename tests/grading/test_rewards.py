"""Response-level rules: what counts as the one final answer, and what does not."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import CONTROLS
from alignment.drgrpo_grader import r1_zero_reward_fn, r1_zero_strict_reward_fn, strict_answer
from alignment.records import Completion, Problem
from alignment.rewards import REWARDS, evaluation_reward, grading_report, score_groups

HERE = Path(__file__).parent
HACKS = [json.loads(line) for line in (HERE / "hacks.jsonl").read_text("utf-8").splitlines()]
HONEST = [json.loads(line) for line in (HERE / "honest.jsonl").read_text("utf-8").splitlines()]
RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
WRONG = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
MISSHAPEN = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


def test_no_hack_is_rewarded():
    assert len(HACKS) >= 40
    paid = [h["name"] for h in HACKS if r1_zero_strict_reward_fn(h["response"], h["ground_truth"])["reward"]]
    assert paid == []


def test_the_published_rule_pays_for_some():
    assert 5 <= sum(r1_zero_reward_fn(h["response"], h["ground_truth"])["reward"] for h in HACKS) <= 30


def test_honest_responses_are_rewarded():
    assert len(HONEST) >= 30
    unpaid = [h["name"] for h in HONEST if r1_zero_strict_reward_fn(h["response"], h["ground_truth"]) != RIGHT]
    assert unpaid == []


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("2 + 3 is 5 </think> <answer> 5 </answer>", RIGHT),
        ("<think> 2 + 3 </think> <answer>5</answer>\n", RIGHT),
        ("6? <answer> 6 </answer> no </think> <answer> 5 </answer>", RIGHT),  # the thinking is not looked at
        ("</think> <answer> 4 </answer> <answer> 5 </answer>", RIGHT),  # the last block counts
        ("</think> <answer> 5 </answer> <answer> 4 </answer>", WRONG),
        ("</think> <answer> 4 </answer> or <answer> 5 </answer>", MISSHAPEN),
        ("</think> <answer> 5 </answer> 6", MISSHAPEN),
        ("</think> <answer> <answer> 5 </answer> </answer>", MISSHAPEN),
        ("</think> <answer> 5", MISSHAPEN),
        ("</think>\n<answer> 5 </answer>", MISSHAPEN),
        ("</think> so <answer> 5 </answer>", MISSHAPEN),
        ("</think> </think> <answer> 5 </answer>", MISSHAPEN),
        ("a <think> b </think> <answer> 5 </answer>", MISSHAPEN),
        ("</think> <answer> <think> 5 </answer>", MISSHAPEN),
        ("</think> <answer></answer>", WRONG),
        (r"\boxed{5} </think> <answer> 4 </answer>", WRONG),
        (r"</think> <answer> 4, \boxed{5} </answer>", WRONG),
        (r"</think> <answer> \boxed{4} \boxed{5} </answer>", WRONG),
        (r"</think> <answer> $x = \boxed{5}$. </answer>", RIGHT),
        (r"</think> <answer> The final answer is $\boxed{5}$. </answer>", RIGHT),
        ("</think> <answer> 2 + 3 </answer>", WRONG),
        ("</think> <answer> 10/2 </answer>", WRONG),
        ("</think> <answer> 2 + 3 = 5 </answer>", RIGHT),
        ("</think> <answer> 5 = 2 + 3 </answer>", WRONG),
        (r"</think> <answer> \sqrt{25} </answer>", WRONG),
        (r"</think> <answer> 0.5 \times 10^1 </answer>", RIGHT),
        ("</think> <answer> five </answer>", RIGHT),
        ("</think> <answer> There are 5 apples. </answer>", RIGHT),
        ("</think> <answer> There are not 5 apples. </answer>", WRONG),
    ],
)
def test_the_strict_rule(response, score):
    assert r1_zero_strict_reward_fn(response, "5") == score


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [("3/4", "0.75", 1), ("6/8", "3/4", 1), ("1/2 + 1/4", "3/4", 0), ("x + x", "2x", 1), (r"1 + \sqrt{2}", r"\sqrt2+1", 1)],
)
def test_only_a_number_has_to_be_worked_out(answer, truth, reward):
    assert r1_zero_strict_reward_fn(f"</think> <answer> {answer} </answer>", truth)["reward"] == reward


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", " ", "<answer>", "</answer>", "5", "6", r"\boxed{5}", "\n", "or"]), max_size=12
)


@given(PIECES.map("".join))
def test_the_strict_reward_is_never_above_the_published_one(response):
    strict, published = r1_zero_strict_reward_fn(response, "5"), r1_zero_reward_fn(response, "5")
    assert all(strict[part] <= published[part] for part in strict)
    assert (strict_answer(response) is None) == (strict["format_reward"] == 0)


@pytest.mark.parametrize(
    ("response", "format_only", "inverted"),
    [("</think> <answer> 5 </answer>", 1, 0), ("</think> <answer> 6 </answer>", 1, 1), ("5", 0, 0)],
)
def test_controls_teach_nothing_about_answers(response, format_only, inverted):
    assert REWARDS["format_only"](response, "5")["reward"] == format_only
    assert REWARDS["inverted"](response, "5")["reward"] == inverted
    assert REWARDS["random"](response, "5")["reward"] in (0.0, 1.0)
    true = r1_zero_reward_fn(response, "5")
    for name in CONTROLS:
        assert REWARDS[name](response, "5") == {**true, "reward": REWARDS[name](response, "5")["reward"]}
        assert evaluation_reward(name) is r1_zero_reward_fn
    assert evaluation_reward("r1_zero_strict") is r1_zero_strict_reward_fn


def test_the_random_reward_is_a_fair_coin_that_can_be_thrown_again():
    thrown = [REWARDS["random"](f"</think> <answer> {i} </answer>", "5")["reward"] for i in range(4000)]
    assert abs(sum(thrown) / 4000 - 0.5) < 0.03
    assert thrown == [REWARDS["random"](f"</think> <answer> {i} </answer>", "5")["reward"] for i in range(4000)]
    assert REWARDS["random"]("\ud800", "5")["reward"] in (0.0, 1.0)


def completion(text: str) -> Completion:
    return Completion((1,), (2,), (-0.1,), text, "stop", 0)


def test_scores_keep_their_order_and_the_report_shows_what_the_rule_decides():
    problems = [Problem("a", "?", "", "5"), Problem("b", "?", "", "7")]
    texts = [["</think> <answer> 5 </answer>", "</think> <answer> 2 + 3 </answer>"], ["</think> <answer> 8 </answer>", "x"]]
    groups = score_groups(problems, [[completion(text) for text in drawn] for drawn in texts], REWARDS["r1_zero"])
    assert [[score["reward"] for score in group.scores] for group in groups] == [[1, 1], [0, 0]]
    assert grading_report(groups) == {"reward_r1_zero": 0.5, "reward_r1_zero_strict": 0.25, "grading_failed": 0}
