"""Countdown: make a target from three or four numbers, each used once, by + - * /.

Problem: `3 4 2 -> 14`. A response combines two numbers at a time, and answers with the whole:

    <think> 3 + 4 = 7 ; 7 * 2 = 14 </think>
    <answer>(3 + 4) * 2</answer>

Problems are made without end, every one from a solution of its own; or they are read from Parquet files with the columns
`nums` and `target`, as the data set Countdown-Tasks-3to4 has them: where some files are named "train" and others "test", these
are the splits, else one row in eight is held out. `countdown_small` has three numbers up to 9 and targets up to 30, which a
tiny policy can learn on a CPU; its demonstrations end with those of a careless teacher, who more often than not combines the
numbers without a look at the target.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path

from alignment.core.records import Endless, Problem
from alignment.data.prompts import fill_prompt
from alignment.system.errors import UserError

TEST_SHARE = 8  # one problem in so many is held out
TEST_PROBLEMS = 1024
DEMONSTRATIONS = {"train": 40_000, "test": 512}
CAREFUL_SHARE = 0.7  # of the demonstrations, the first ones
IGNORES_TARGET = 0.7  # chance that the careless teacher does


@dataclass(frozen=True)
class Size:
    """How many numbers, up to which, and the largest target."""

    counts: tuple[int, ...]
    largest: int
    target: int


FULL, SMALL = Size((3, 4), 99, 100), Size((3,), 9, 30)


@dataclass(frozen=True)
class Try:
    """An expression, how it is calculated step by step, and its value."""

    text: str
    steps: tuple[str, ...]
    value: Fraction


def problems(split: str, dataset_path: str = "", size: Size = FULL) -> Sequence[Problem]:
    """The problems of `dataset_path`, or, where that is empty, made ones: `TEST_PROBLEMS` held out, and others without end."""
    if dataset_path:
        return _read(split, Path(dataset_path))
    if split == "test":
        return [_made(i, "test", size) for i in range(TEST_PROBLEMS)]
    return Endless(lambda i: _made(i, "train", size))


def small_problems(split: str, dataset_path: str = "") -> Sequence[Problem]:
    """Three small numbers."""
    return problems(split, dataset_path, SMALL)


def small_demonstrations(split: str, dataset_path: str = "", seed: int = 0) -> list[tuple[Problem, str]]:
    """Problems of this split with responses, those of the careful teacher before those of the careless one."""
    careful = int(CAREFUL_SHARE * DEMONSTRATIONS[split]) if split == "train" else 0
    found = []
    for i in range(DEMONSTRATIONS[split]):
        rng = random.Random(f"demonstration {split} {seed} {i}")
        problem = _made(rng.getrandbits(40), split, SMALL)
        found.append((problem, _demonstration(problem, rng, careless=i >= careful)))
    return found


def demonstrations(split: str, dataset_path: str = "", seed: int = 0) -> list[tuple[Problem, str]]:
    """There are none for the full size: it is meant for a model that follows instructions."""
    raise UserError("--task countdown has no worked solutions to learn from: start from --model with --sft_base ''")


def as_problem(numbers: Sequence[int], target: int) -> Problem:
    """The problem of these numbers."""
    listed = " ".join(map(str, numbers))
    question = f"{listed} -> {target}"
    return Problem(f"countdown/{question}", question, fill_prompt("tiny", question), f"{target} = {listed}")


def a_try(numbers: Sequence[int], rng: random.Random) -> Try | None:
    """All numbers combined at random, two at a time; None where it divides by zero or leaves the whole numbers."""
    parts = [(str(n), Fraction(n)) for n in numbers]
    steps = []
    while len(parts) > 1:
        (a, x), (b, y) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        sign = rng.choice("+-*/")
        if sign == "/" and (y == 0 or (x / y).denominator != 1):
            return None
        value = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x / y}[sign]()  # noqa: B023
        steps.append(f"{x} {sign} {y} = {value}")
        parts.append((f"({a} {sign} {b})", value))
    text = parts[0][0]
    return Try(text[1:-1], tuple(steps), parts[0][1])


def _made(index: int, split: str, size: Size) -> Problem:
    """Problem `index` of a split, whose target some combination reaches. A hash of the problem decides its split."""
    rng = random.Random(f"countdown {split} {index}")
    while True:
        numbers = [rng.randint(1, size.largest) for _ in range(rng.choice(size.counts))]
        tried = a_try(numbers, rng)
        if tried is None or not 1 <= tried.value <= size.target:
            continue
        problem = as_problem(numbers, int(tried.value))
        if _held_out(numbers, int(tried.value)) == (split == "test"):
            return problem


def _held_out(numbers: Sequence[int], target: int) -> bool:
    """The same for every order of the numbers, so that no problem is in one split and its twin in the other."""
    return hashlib.sha256(f"{sorted(numbers)} {target}".encode()).digest()[-1] % TEST_SHARE == 0


def _demonstration(problem: Problem, rng: random.Random, careless: bool) -> str:
    target, _, listed = problem.ground_truth.partition(" = ")
    numbers = list(map(int, listed.split()))
    shown = _solution(tuple(sorted(numbers)), int(target))
    if careless and rng.random() < IGNORES_TARGET:
        while (shown := a_try(numbers, rng)) is None or abs(shown.value) > 100:
            pass
    return f" {' ; '.join(shown.steps)} </think>\n<answer>{shown.text}</answer>"


@cache
def _solution(numbers: tuple[int, ...], target: int) -> Try:
    """The same solution each time, found by trying."""
    rng = random.Random(f"solution {numbers} {target}")
    while (tried := a_try(numbers, rng)) is None or tried.value != target:
        pass
    return tried


def _read(split: str, folder: Path) -> list[Problem]:
    """Rows of all Parquet files of a folder. Raises `UserError`, naming file and row, for what is no problem."""
    files = sorted(folder.glob("**/*.parquet"))
    if not files:
        raise UserError(f"--dataset_path {folder}: holds no .parquet file with the columns nums and target")
    named = {each: [file for file in files if each in re.split(r"[^a-z]+", file.stem)] for each in ("train", "test")}
    by_name = all(named.values())  # with files of one split alone, the other would be made of the same rows
    rows = [row for file in (named[split] if by_name else files) for row in _rows(file)]
    if not by_name:
        rows = [(numbers, target) for numbers, target in rows if _held_out(numbers, target) == (split == "test")]
    if not rows:
        raise UserError(f"--dataset_path {folder}: has no problem for the {split} split")
    return [as_problem(numbers, target) for numbers, target in rows]


@lru_cache
def _rows(file: Path) -> tuple[tuple[tuple[int, ...], int], ...]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError("--dataset_path: reading Parquet needs pyarrow: run with `uv run --extra parquet ...`") from None
    try:
        columns = parquet.read_table(file, columns=["nums", "target"]).to_pydict()
    except (ArrowException, OSError, KeyError) as error:
        raise UserError(f"{file}: cannot be read as Parquet with the columns nums and target ({error})") from None
    found = []
    for number, (nums, target) in enumerate(zip(columns["nums"], columns["target"], strict=True), start=1):
        whole = isinstance(nums, list) and nums and all(isinstance(n, int) for n in nums) and isinstance(target, int)
        if not whole or len(nums) > 10:
            raise UserError(f"{file}: row {number}: nums must be whole numbers, ten at most, and target a whole number")
        found.append((tuple(nums), target))
    return tuple(found)
