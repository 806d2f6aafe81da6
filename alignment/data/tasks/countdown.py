"""Countdown: make a target from three or four numbers, each used once, by + - * /.

Problem: `3 4 2 -> 14`. A response combines two numbers at a time, and answers with the whole:

    <think> 3 + 4 = 7 ; 7 * 2 = 14 </think>
    <answer>(3 + 4) * 2</answer>

Without a data set, problems are generated without end, each from a solution. With one, they are
rows of Parquet files with the columns `nums` and `target`, such as those of Countdown-Tasks-3to4:
files named "train" and "test" are the splits, else the last 128 rows, an eighth of them at most,
are the test split. `countdown_small` has three numbers up to 9 and targets up to 30, which a tiny
policy can learn on a CPU; its last demonstrations come from a careless teacher, who often combines
numbers with no look at the target."""

import itertools
import operator
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from alignment.core.records import Endless, Problem, Problems
from alignment.data.prompts import fill_prompt
from alignment.data.questions import distinct, question_text, split_of
from alignment.data.rows import parquet_rows
from alignment.system.errors import UserError

# at most, from the first `TEST_DRAWS` draws: those of the small size have 212 distinct questions
TEST_PROBLEMS = 1024
TEST_DRAWS = 4096
DEMONSTRATIONS = {"train": 40_000, "test": 512}
CAREFUL_SHARE = 0.7  # of the demonstrations, the first ones
# Of files that are not split: at most, the last ones.
TEST_ROWS = 128
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
MOST_SOLVED = 4  # numbers for which an answer is searched; five would take seconds
QUESTION = re.compile(r"(\d+(?: \d+)*) -> (-?\d+)")
IGNORES_TARGET = 0.7  # probability that the careless teacher ignores the target


class Size(NamedTuple):
    """The possible counts of numbers, the largest number, and the largest target."""

    counts: tuple[int, ...]
    largest: int
    target: int


FULL = Size((3, 4), 99, 100)
SMALL = Size((3,), 9, 30)


class Attempt(NamedTuple):
    """An expression, the steps of its calculation, and its value."""

    text: str
    steps: tuple[str, ...]
    value: Fraction


class Row(NamedTuple):
    """The numbers and the target of one problem."""

    numbers: tuple[int, ...]
    target: int


def problems(split: str, dataset_path: str = "", size: Size = FULL) -> Problems:
    """The problems of `dataset_path`; if that is empty, generated ones: distinct ones for testing,
    `Endless` for training."""
    if dataset_path:
        return _read(split, Path(dataset_path))
    if split == "test":
        return list(_test_problems(size))
    return Endless(lambda index: _problem(index, "train", size))


def small_demonstrations(
    split: str, dataset_path: str = "", seed: int = 0
) -> list[tuple[Problem, str]]:
    """(problem, response) pairs of this split; those of the careful teacher come before those of
    the careless one."""
    careful = int(CAREFUL_SHARE * DEMONSTRATIONS[split]) if split == "train" else 0
    pairs = []
    for i in range(DEMONSTRATIONS[split]):
        rng = random.Random(f"demonstration {split} {seed} {i}")
        problem = _problem(rng.getrandbits(40), split, SMALL)
        target, _, listed = problem.ground_truth.partition(" = ")
        numbers = list(map(int, listed.split()))
        attempt = _solution(tuple(sorted(numbers)), int(target))
        if i >= careful and rng.random() < IGNORES_TARGET:
            attempt = _careless_attempt(numbers, rng)
        steps = " ; ".join(attempt.steps)
        pairs.append((problem, f" {steps} </think>\n<answer>{attempt.text}</answer>"))
    return pairs


def demonstrations(split: str, dataset_path: str = "", seed: int = 0) -> list[tuple[Problem, str]]:
    """Raises `UserError`: the full size has none, because it is meant for a model that follows
    instructions."""
    raise UserError(
        "--task countdown has no worked solutions to learn from: start from --model with"
        " --sft_base ''"
    )


def as_problem(numbers: Sequence[int], target: int) -> Problem:
    """The problem that asks for an expression of these numbers with the target as its value."""
    listed = " ".join(map(str, numbers))
    question = f"{listed} -> {target}"
    return Problem(
        f"countdown/{question}", question, fill_prompt("tiny", question), f"{target} = {listed}"
    )


def random_attempt(numbers: Sequence[int], rng: random.Random) -> Attempt | None:
    """A random expression of all numbers, combined two at a time; None if a quotient is not a whole
    number."""
    parts = [(str(number), Fraction(number)) for number in numbers]
    steps = []
    while len(parts) > 1:
        a, x = parts.pop(rng.randrange(len(parts)))
        b, y = parts.pop(rng.randrange(len(parts)))
        sign = rng.choice("+-*/")
        if sign == "/" and (y == 0 or (x / y).denominator != 1):
            return None
        value = OPERATIONS[sign](x, y)
        steps.append(f"{x} {sign} {y} = {value}")
        parts.append((f"({a} {sign} {b})", value))
    [(text, value)] = parts
    return Attempt(text[1:-1], tuple(steps), value)


def right_answer(problem: Problem) -> str:
    """An expression that solves a problem of at most `MOST_SOLVED` numbers; where there is none, or
    there are more, the truth itself, which is no answer."""
    match = QUESTION.fullmatch(problem.question)
    if match is None:
        return problem.ground_truth
    parts = [(number, Fraction(number)) for number in match[1].split()]
    if len(parts) > MOST_SOLVED:
        return problem.ground_truth
    return _expression(parts, Fraction(match[2])) or problem.ground_truth


def _expression(parts: Sequence[tuple[str, Fraction]], target: Fraction) -> str:
    """The first expression of all `parts`, each a text with its value, that has the target's value;
    "" where none has."""
    if len(parts) == 1:
        [(text, value)] = parts
        is_compound = text.startswith("(")
        solved = text[1:-1] if is_compound else text
        return solved if value == target else ""
    for first, second in itertools.permutations(range(len(parts)), 2):
        rest = [part for index, part in enumerate(parts) if index not in (first, second)]
        a, x = parts[first]
        b, y = parts[second]
        for sign, operation in OPERATIONS.items():
            if sign == "/" and y == 0:
                continue
            found = _expression([*rest, (f"({a} {sign} {b})", operation(x, y))], target)
            if found:
                return found
    return ""


def key(problem: Problem) -> str:
    """The target and the numbers in one order (`Task.key`); the text of a question of another
    kind."""
    match = QUESTION.fullmatch(problem.question)
    if match is None:
        return question_text(problem)
    numbers = sorted(map(int, match[1].split()))
    return f"{numbers} -> {int(match[2])}"


@cache
def _test_problems(size: Size) -> list[Problem]:
    """The problems to test on: the first distinct ones."""
    drawn = (_problem(index, "test", size) for index in range(TEST_DRAWS))
    return distinct(drawn, key, TEST_PROBLEMS)


def _problem(index: int, split: str, size: Size) -> Problem:
    """Problem `index` of a split, which has a solution. A hash of the problem decides its split."""
    rng = random.Random(f"countdown {split} {index}")
    while True:
        numbers = [rng.randint(1, size.largest) for _ in range(rng.choice(size.counts))]
        attempt = random_attempt(numbers, rng)
        target = int(attempt.value) if attempt else 0
        if 1 <= target <= size.target and _split_of(numbers, target) == split:
            return as_problem(numbers, target)


def _split_of(numbers: Sequence[int], target: int) -> str:
    """The split of a problem, the same for every order of its numbers."""
    return split_of(f"{sorted(numbers)} {target}")


@cache
def _solution(numbers: tuple[int, ...], target: int) -> Attempt:
    """The first random expression that reaches the target; the same one every time."""
    rng = random.Random(f"solution {numbers} {target}")
    while True:
        attempt = random_attempt(numbers, rng)
        if attempt is not None and attempt.value == target:
            return attempt


def _careless_attempt(numbers: Sequence[int], rng: random.Random) -> Attempt:
    """A random expression whose value is at most 100, whatever the target."""
    while True:
        attempt = random_attempt(numbers, rng)
        if attempt is not None and abs(attempt.value) <= 100:
            return attempt


def _read(split: str, folder: Path) -> list[Problem]:
    """The problems of a split in all Parquet files of a folder. Raises `UserError`, naming file and
    row, for other content."""
    files = sorted(folder.glob("**/*.parquet"))
    if not files:
        raise UserError(
            f"--dataset_path {folder}: holds no .parquet file with the columns nums and target"
        )
    train_files = [file for file in files if _has_word(file, "train")]
    test_files = [file for file in files if _has_word(file, "test")]
    rows: list[Row] = []
    if train_files and test_files:
        files = train_files if split == "train" else test_files
        for file in files:
            rows += _rows(file)
    else:  # files of one split alone would leave the other split empty
        for file in files:
            rows += _rows(file)
        first_tested = len(rows) - min(TEST_ROWS, len(rows) // 8)
        rows = rows[first_tested:] if split == "test" else rows[:first_tested]
    if not rows:
        raise UserError(f"--dataset_path {folder}: has no problem for the {split} split")
    return [as_problem(row.numbers, row.target) for row in rows]


def _has_word(file: Path, word: str) -> bool:
    """Whether a file is named with a word, between signs that are no letters."""
    return word in re.split(r"[^a-z]+", file.stem)


def forget_rows() -> None:
    """Read files anew when they are asked for next: they may have changed."""
    _rows.cache_clear()


@lru_cache
def _rows(file: Path) -> tuple[Row, ...]:
    """The rows of a file."""
    return tuple(_checked_row(place, row) for place, row in parquet_rows(file))


def _checked_row(place: str, row: Mapping[str, Any]) -> Row:
    """A row of a file. Raises `UserError`, naming the place, where it is no problem."""
    numbers = row.get("nums")
    target = row.get("target")
    wanted = "nums must be whole numbers, ten at most, and target a whole number"
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise UserError(f"{place}: {wanted}")
    if not 1 <= len(numbers) <= 10 or not isinstance(target, int):
        raise UserError(f"{place}: {wanted}")
    return Row(tuple(numbers), target)
