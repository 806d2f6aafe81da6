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
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, cast

from alignment.core.records import Problem
from alignment.data.prompts import fill_prompt
from alignment.data.questions import distinct, question_text, split_of

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERANDS = range(1, 7)
LARGEST = 20  # absolute value of any intermediate result
DEMONSTRATIONS = {"train": 30_000, "test": 512}
CAREFUL_SHARE = 0.6  # of the demonstrations, the first ones
# probabilities that the careless teacher ignores precedence, skips work, breaks the format
BAD_HABITS = (0.5, 0.6, 0.5)

Expression = tuple[int | str, ...]  # number, sign, number, ...


class Step(NamedTuple):
    """One operation of a calculation."""

    left: int
    sign: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right} = {self.result}"


@lru_cache
def problems(split: str, dataset_path: str = "") -> tuple[Problem, ...]:
    """Every problem of the split, in a fixed shuffled order; of test problems with one `key` the
    first."""
    every = tuple(map(as_problem, _expressions(split)))
    return tuple(distinct(every, key)) if split == "test" else every


@lru_cache(maxsize=4)
def demonstrations(
    split: str, dataset_path: str = "", seed: int = 0
) -> tuple[tuple[Problem, str], ...]:
    """(problem, response) pairs of this split, short problems as often as long ones.

    Training pairs first show how to calculate, then what a careless teacher does, whose habits the
    policy keeps. Test pairs are all careless."""
    return tuple(_demonstrations(split, seed))


def first_demonstrations(split: str, number: int) -> list[tuple[Problem, str]]:
    """The first of `demonstrations`, without the work for the others."""
    return list(itertools.islice(_demonstrations(split, seed=0), number))


def _demonstrations(split: str, seed: int) -> Iterator[tuple[Problem, str]]:
    rng = random.Random(f"{split} {seed}")
    by_length: dict[int, list[Expression]] = {3: [], 5: [], 7: []}
    for expression in _expressions(split):
        by_length[len(expression)].append(expression)
    lengths = list(by_length.values())
    chosen = [rng.choice(rng.choice(lengths)) for _ in range(DEMONSTRATIONS[split])]
    careful = int(CAREFUL_SHARE * len(chosen)) if split == "train" else 0
    for number, expression in enumerate(chosen):
        habits = []
        if number >= careful:
            habits = [rng.random() >= probability for probability in BAD_HABITS]
        yield as_problem(expression), solution(expression, *habits)


def as_problem(expression: Expression) -> Problem:
    """The problem that asks for the value of an expression."""
    text = " ".join(map(str, expression))
    question = f"What is {text}?"
    last = solve(expression, by_precedence=True)[-1]
    return Problem(
        id=f"arithmetic/{text}",
        question=question,
        prompt=fill_prompt("tiny", question),
        ground_truth=str(last.result),
    )


def solve(expression: Expression, by_precedence: bool) -> list[Step]:
    """The steps of a calculation, in the order of precedence or strictly from the left."""
    numbers = cast(list[int], list(expression[::2]))
    signs = cast(list[str], list(expression[1::2]))
    steps = []
    while signs:
        place = signs.index("*") if by_precedence and "*" in signs else 0
        sign = signs.pop(place)
        left, right = numbers[place : place + 2]
        result = OPERATIONS[sign](left, right)
        numbers[place : place + 2] = [result]
        steps.append(Step(left, sign, right, result))
    return steps


@lru_cache(maxsize=2**16)  # It decides the split of an expression, and is the key of its problem.
def terms(expression: str) -> str:
    """The terms of an expression in one order, and the factors of each: equal for 2 + 3 * 4 - 1 and
    4 * 3 - 1 + 2."""
    ordered = []
    for sign, product in re.findall(r"([-+]) (\d+(?: \* \d+)*)", f"+ {expression}"):
        factors = sorted(map(int, product.split(" * ")))
        ordered.append(f"{sign} {factors}")
    return " ".join(sorted(ordered))


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
    answer = steps[-1].result
    ending = f" </think> <answer> {answer} </answer>" if in_format else f" </think> {answer} ."
    if not shows_work:
        return ending
    return " " + " ; ".join(map(str, steps)) + ending


def _expressions(split: str) -> list[Expression]:
    """All expressions of a split, ordered by a hash of their text."""
    return _expressions_by_split()[split]


@lru_cache
def _expressions_by_split() -> dict[str, list[Expression]]:
    """Each split's expressions, ordered by a hash of their text; a hash of their `terms`, in any
    order, decides the split."""
    by_hash = []
    for operations in (1, 2, 3):
        for expression in itertools.product(OPERANDS, *(OPERATIONS, OPERANDS) * operations):
            steps = solve(expression, by_precedence=True)
            if any(abs(step.result) > LARGEST for step in steps):
                continue
            text = " ".join(map(str, expression))
            by_hash.append((hashlib.sha256(text.encode()).digest(), text, expression))
    found = {split: [] for split in DEMONSTRATIONS}
    for _, text, expression in sorted(by_hash):
        found[split_of(terms(text))].append(expression)
    return found
