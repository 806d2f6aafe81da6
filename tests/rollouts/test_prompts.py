"""Which prompts a step trains on."""

import dataclasses

import pytest
from rollout_helpers import ARGS

from alignment.core.records import Endless, Problem
from alignment.data.tasks import arithmetic
from alignment.model.loading import load_tokenizer
from alignment.rollouts.config import (
    problems_of_step,
    refill_problems,
    training_problems,
    with_short_solutions,
)
from alignment.system.errors import UserError


def test_every_problem_is_sampled_once_a_pass():
    problems = arithmetic.problems("test")[:10]
    sampled = [p.id for step in range(1, 6) for p in problems_of_step(problems, 4, 0, step)]
    assert sorted(sampled[:10]) == sorted(sampled[10:]) == sorted(p.id for p in problems)
    assert sampled[:10] != sampled[10:]
    assert sampled[:4] != [p.id for p in problems_of_step(problems, 4, data_seed=1, step=1)]


def test_refills_depend_on_the_step_and_the_seed_alone():
    problems = arithmetic.problems("train")
    refill = refill_problems(problems, 4, 0, step=3, refill=1)
    assert refill == refill_problems(problems, 4, 0, step=3, refill=1) and len(set(refill)) == 4
    assert refill != refill_problems(problems, 4, 0, step=3, refill=2)
    assert refill != refill_problems(problems, 4, 0, step=4, refill=1)
    assert len(refill_problems(problems[:2], 4, 0, step=3, refill=1)) == 2


def test_training_problems_are_the_first_ones_with_short_enough_prompts(tiny_folder):
    tokenizer, problems = load_tokenizer(str(tiny_folder)), arithmetic.problems("train")[:200]
    kept = training_problems(problems, 22, 10, tokenizer)
    short = [p for p in problems if len(tokenizer(p.prompt)["input_ids"]) <= 22]
    assert kept == short[:10] and 10 < len(short) < 200
    assert (
        training_problems(problems, ARGS.max_prompt_tokens, ARGS.num_problems, tokenizer)
        == problems
    )


def test_problems_with_long_solutions_are_left_out(tiny_folder):
    """By the tokens of a row's solution, or where it has none of its answer."""
    tokenizer = load_tokenizer(str(tiny_folder))
    rows = [{"answer": "1 + 1 = 2 #### 2"}, {"answer": "2"}, {"answer": "2", "solution": "2 " * 90}]
    problems = [Problem(str(i), "1 + 1?", "", "2", columns=row) for i, row in enumerate(rows)]
    length = len(tokenizer(rows[0]["answer"])["input_ids"])
    for longest, kept in ((0, "012"), (length, "01"), (length - 1, "1")):
        config = dataclasses.replace(ARGS, max_solution_tokens=longest).rollout_config
        ids = [problem.id for problem in with_short_solutions(problems, config, tokenizer)]
        assert "".join(ids) == kept
    config = dataclasses.replace(ARGS, max_solution_tokens=1).rollout_config
    for others, error in (
        (problems[2:], "every solution is longer"),
        ([dataclasses.replace(problems[0], columns={})], "0 of --task .* has no solution"),
        (Endless(lambda index: problems[0]), "--task .* makes its problems, without solutions"),
    ):
        with pytest.raises(UserError, match=f"^--max_solution_tokens 1: {error}"):
            with_short_solutions(others, config, tokenizer)


def test_endless_problems_are_numbered_by_step_and_seed(tiny_folder):
    tokenizer, problems = load_tokenizer(str(tiny_folder)), list(arithmetic.problems("train")[:200])
    endless = Endless(lambda i: problems[i % 200])
    assert training_problems(endless, 0, 0, tokenizer) is endless
    assert training_problems(endless, 0, 3, tokenizer) == problems[:3]
    assert problems_of_step(endless, 4, 0, 2) == problems[4:8]
    assert problems_of_step(endless, 4, 1, 2) != problems[4:8]


def test_the_data_seed_is_the_seed_unless_it_is_given():
    assert ARGS.rollout_config.data_seed == ARGS.seed
    assert dataclasses.replace(ARGS, seed=1).rollout_config.data_seed == 1
    assert dataclasses.replace(ARGS, data_seed=1).rollout_config.data_seed == 1
