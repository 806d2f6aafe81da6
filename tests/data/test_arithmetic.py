"""The embedded task and its tokenizer: what is held out, what the teacher writes, and that text
survives."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.data.embedded import tiny_tokenizer
from alignment.data.tasks import arithmetic
from alignment.data.tasks.arithmetic import as_problem, solution, solve
from alignment.rewards.r1_zero import r1_zero_reward_fn

EXPRESSION = (2, "+", 3, "*", 4, "-", 1)


def test_no_held_out_problem_is_ever_trained_on():
    held_out = {arithmetic.key(problem) for problem in arithmetic.problems("test")}
    assert len(held_out) == len(arithmetic.problems("test")) == 627
    assert not held_out & {arithmetic.key(problem) for problem in arithmetic.problems("train")}
    assert not held_out & {
        arithmetic.key(p)
        for seed in (0, 1)
        for p, _ in arithmetic.demonstrations("train", seed=seed)
    }
    assert {arithmetic.key(problem) for problem, _ in arithmetic.demonstrations("test")} <= held_out


def test_the_split_does_not_depend_on_anything_but_the_problem():
    problems = arithmetic.problems("test")
    assert problems == arithmetic.problems("test")
    assert problems[0].id == "arithmetic/1 - 6 - 2 * 4"  # the SHA-256 of its text is the smallest


def test_one_operation_at_a_time():
    assert solve(EXPRESSION, by_precedence=True) == [
        (3, "*", 4, 12),
        (2, "+", 12, 14),
        (14, "-", 1, 13),
    ]
    assert solve(EXPRESSION, by_precedence=False) == [
        (2, "+", 3, 5),
        (5, "*", 4, 20),
        (20, "-", 1, 19),
    ]


def test_a_problem():
    problem = as_problem(EXPRESSION)
    assert problem.prompt == "User: What is 2 + 3 * 4 - 1?\nAssistant: <think>"
    assert problem.ground_truth == "13"


@pytest.mark.parametrize(
    ("habits", "text", "reward"),
    [
        ({}, " 3 * 4 = 12 ; 2 + 12 = 14 ; 14 - 1 = 13 </think> <answer> 13 </answer>", 1),
        (
            {"by_precedence": False},
            " 2 + 3 = 5 ; 5 * 4 = 20 ; 20 - 1 = 19 </think> <answer> 19 </answer>",
            0,
        ),
        ({"shows_work": False}, " </think> <answer> 13 </answer>", 1),
        ({"in_format": False}, " 3 * 4 = 12 ; 2 + 12 = 14 ; 14 - 1 = 13 </think> 13 .", 0),
    ],
)
def test_the_teachers_habits_and_what_they_earn(habits, text, reward):
    assert solution(EXPRESSION, **habits) == text
    assert r1_zero_reward_fn(text, "13")["reward"] == reward


def test_the_teacher_is_careful_at_first_and_careless_in_the_end():
    pairs = arithmetic.demonstrations("train")

    def rewards(some):
        return sum(
            r1_zero_reward_fn(response, problem.ground_truth)["reward"]
            for problem, response in some
        ) / len(some)

    assert rewards(pairs[:2000]) == 1
    # Half keep the format, and of these some 70 to 80 % are right whatever the order of operations.
    assert 0.3 < rewards(pairs[-2000:]) < 0.5


def test_intermediate_results_stay_small():
    for problem in random.Random(0).sample(arithmetic.problems("train"), 500):
        parts = problem.id.removeprefix("arithmetic/").split()
        expression = tuple(part if part in "+-*" else int(part) for part in parts)
        assert all(abs(result) <= 20 for *_, result in solve(expression, by_precedence=True))


TOKENIZER = tiny_tokenizer(
    problem.prompt + response for problem, response in arithmetic.demonstrations("test")
)


def test_digits_are_single_tokens_and_tags_are_whole():
    pieces = [
        TOKENIZER.decode([token])
        for token in TOKENIZER(" 12 + 3 </think> <answer> -4 </answer>")["input_ids"]
    ]
    assert pieces == [" 1", "2", " +", " 3", " </think>", " <answer>", " -", "4", " </answer>"]


@given(st.text())
def test_any_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
