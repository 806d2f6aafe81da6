"""Sums of two to four small numbers: a task that a tiny policy can learn on a laptop's CPU.

Problem: `What is 2 + 3 * 4 - 1?`. A careful solution works one operation at a time, by precedence,
then answers:

    <think> 3 * 4 = 12 ; 2 + 12 = 14 ; 14 - 1 = 13 </think> <answer> 13 </answer>

The last demonstrations come from a careless teacher, who often ignores precedence, skips the work
or drops the tags. A policy warmed up on all of them can be careful and seldom is; reinforcement
learning then finds out which of its habits pay."""

import hashlib
import itertools
import operator
import random
import re
from functools import lru_cache

from alignment.core.records import Problem
from alignment.data.prompts import fill_prompt
from alignment.data.questions import distinct, question_text, split_of

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERANDS = range(1, 7)
LARGEST = 20  # absolute value of any intermediate result
DEMONSTRATIONS = {"train": 30_000, "test": 512}
CAREFUL_SHARE = 0.6  # of the demonstrations, the first ones
# probabilities that the careless teacher ignores precedence, skips work, breaks the format
BAD_HABITS = (
    0.5,
    0.6,
    0.5,
)

Expression = tuple[int | str, ...]  # number, sign, number, ...


@lru_cache
def problems(split: str, dataset_path: str = "") -> tuple[Problem, ...]:
    """Every problem of the split, in a fixed shuffled order; of test problems with one `key` the
    first."""
    made = tuple(map(as_problem, _expressions(split)))
    return tuple(distinct(made, key)) if split == "test" else made


def demonstrations(split: str, dataset_path: str = "", seed: int = 0) -> list[tuple[Problem, str]]:
    """(problem, response) pairs of this split, short problems as often as long ones. Training pairs
    first show how to calculate, then what a careless teacher does, whose habits the policy keeps.
    Test pairs are all careless."""
    rng = random.Random(f"{split} {seed}")
    by_length = [[e for e in _expressions(split) if len(e) == length] for length in (3, 5, 7)]
    chosen = [rng.choice(rng.choice(by_length)) for _ in range(DEMONSTRATIONS[split])]
    careful = int(CAREFUL_SHARE * len(chosen)) if split == "train" else 0
    habits = (
        [rng.random() >= probability for probability in BAD_HABITS] if i >= careful else ()
        for i in range(len(chosen))
    )
    return [
        (as_problem(expression), solution(expression, *good))
        for expression, good in zip(chosen, habits, strict=True)
    ]


def as_problem(expression: Expression) -> Problem:
    text = " ".join(map(str, expression))
    question = f"What is {text}?"
    answer = str(solve(expression, by_precedence=True)[-1][-1])
    return Problem(
        id=f"arithmetic/{text}",
        question=question,
        prompt=fill_prompt("tiny", question),
        ground_truth=answer,
    )


def solve(expression: Expression, by_precedence: bool) -> list[tuple[int, str, int, int]]:
    """One (left, sign, right, result) for each operation, in the order of precedence or strictly
    from the left."""
    steps = []
    while len(expression) > 1:
        place = (
            next((i for i, part in enumerate(expression) if part == "*"), 1) if by_precedence else 1
        )
        left, sign, right = expression[place - 1 : place + 2]
        result = OPERATIONS[sign](left, right)
        steps.append((left, sign, right, result))
        expression = (*expression[: place - 1], result, *expression[place + 2 :])
    return steps


def terms(expression: str) -> str:
    """The terms of an expression in one order, and the factors of each: equal for 2 + 3 * 4 - 1 and
    4 * 3 - 1 + 2."""
    products = re.findall(r"([-+]) (\d+(?: \* \d+)*)", f"+ {expression}")
    return " ".join(
        sorted(f"{sign} {sorted(map(int, factors.split(' * ')))}" for sign, factors in products)
    )


@lru_cache(maxsize=2**16)
def key(problem: Problem) -> str:
    """What a problem asks, whatever the order of its terms and factors (`Task.key`); the text of a
    question of another kind."""
    match = re.fullmatch(r"What is (\d+(?: [-+*] \d+)*)\?", problem.question)
    return terms(match[1]) if match else question_text(problem)


def solution(
    expression: Expression,
    by_precedence: bool = True,
    shows_work: bool = True,
    in_format: bool = True,
) -> str:
    """A worked response: a careful one by default."""
    steps = solve(expression, by_precedence)
    work = (
        [f"{left} {sign} {right} = {result}" for left, sign, right, result in steps]
        if shows_work
        else []
    )
    shape = "</think> <answer> {} </answer>" if in_format else "</think> {} ."
    return "".join(f" {part}" for part in (" ; ".join(work), shape.format(steps[-1][-1])) if part)


@lru_cache
def _expressions(split: str) -> tuple[Expression, ...]:
    """All expressions of a split, ordered by a hash of their text; a hash of their `terms`, in any
    order, decides the split."""
    by_hash = []
    for operations in (1, 2, 3):
        for expression in itertools.product(OPERANDS, *(OPERATIONS, OPERANDS) * operations):
            if all(abs(result) <= LARGEST for *_, result in solve(expression, by_precedence=True)):
                text = " ".join(map(str, expression))
                if split_of(terms(text)) == split:
                    by_hash.append((hashlib.sha256(text.encode()).digest(), expression))
    return tuple(expression for _, expression in sorted(by_hash))
