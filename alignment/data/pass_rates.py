"""Measured pass rates of problems: the file that an evaluation or a rejection sampling writes of
them, and the training problems whose rate lies in a band.

A line of the file is one problem, with the number of samples that answered it and how many of them
were right:

    {"id": "sums.csv:2", "question": "What is 1 + 1?", "samples": 8, "correct": 3, "task":
      "file:sums.csv", "model": "checkpoints/sums_sft"}"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from alignment.core.records import Endless, Group, Problem, Problems
from alignment.data.questions import plain, question_text
from alignment.data.rows import Row, read_rows
from alignment.system.errors import UserError
from alignment.system.nearest import did_you_mean_path

NUMBER = r"\d+(?:\.\d*)?|\.\d+"
BAND = re.compile(rf"({NUMBER})-({NUMBER})")


class Band(NamedTuple):
    """A closed interval of pass rates: both ends belong to it."""

    low: float
    high: float


class _Counts(NamedTuple):
    """The samples of a row, and the right ones among them."""

    samples: int
    correct: int


@dataclass(frozen=True)
class PassRates:
    """What a file says of problems: right answers and samples by question, as `question_text` gives
    it."""

    samples: Mapping[str, int]
    correct: Mapping[str, int]
    rows: int  # Of the file; a question that several rows have is counted once in the fields above.
    tasks: tuple[str, ...]  # As --task named them; () where no row says it.
    model: str  # As --model named it; "" where no row says it.

    def rate_of(self, problem: Problem) -> float | None:
        """The share of a problem's samples that were right; None where the file does not have the
        problem."""
        question = question_text(problem)
        if question not in self.samples:
            return None
        return self.correct[question] / self.samples[question]


class BandSelection(NamedTuple):
    """The training problems that a band keeps, and why others are left out."""

    kept: list[Problem]
    outside: tuple[float, ...]  # The pass rates of those outside the band.
    unmeasured: int  # Problems that the file does not have.


def read_band(text: str) -> Band | None:
    """The band that "LOW-HIGH" names, such as "0.2-0.8"; None where that is no band within 0 and
    1."""
    match = BAND.fullmatch(text)
    if match is None:
        return None
    band = Band(float(match[1]), float(match[2]))
    if not band.low <= band.high <= 1:
        return None
    return band


def pass_rate_rows(groups: Iterable[Group], task: str, model: str) -> Iterator[dict[str, Any]]:
    """The lines of the file for scored groups of one task and model. A response is right whose
    reward is 1."""
    for group in groups:
        yield {
            "id": group.problem.id,
            "question": group.problem.question or group.problem.prompt,
            "samples": len(group.scores),
            "correct": sum(score["reward"] == 1 for score in group.scores),
            "task": task,
            "model": model,
        }


def read_pass_rates(file: str) -> PassRates:
    """What a file says. Counts of rows with one question are added up.

    Raises `UserError` where there is no such file, where its rows are of several models, and, with
    file and line, for a row without a question or counts."""
    samples: Counter[str] = Counter()
    correct: Counter[str] = Counter()
    tasks: dict[str, None] = {}
    models: dict[str, None] = {}
    if not Path(file).is_file():
        raise UserError(
            f"--pass_rates {file}: is no file{did_you_mean_path(file)}; `rejection_sample` and"
            " `evaluate` write one with several samples a problem"
        )
    rows = read_rows(Path(file), "question")
    for place, row in rows:
        counts = _counts(place, row)
        question = plain(str(row["question"]))
        samples[question] += counts.samples
        correct[question] += counts.correct
        tasks[str(row.get("task", ""))] = None
        models[str(row.get("model", ""))] = None
    if not rows:
        raise UserError(f"--pass_rates {file}: holds no row")
    if len(models) > 1:
        raise UserError(
            f"--pass_rates {file}: holds rates of {len(models)} models ({', '.join(models)}); keep"
            " the lines of one"
        )
    named_tasks = tuple(task for task in tasks if task)
    return PassRates(samples, correct, len(rows), named_tasks, next(iter(models)))


def _counts(place: str, row: Row) -> _Counts:
    """The counts of a row. Raises `UserError` where it has no whole numbers of samples and of right
    ones among them."""
    samples = row.get("samples")
    correct = row.get("correct")
    # A truth value is no count, though Python takes it for a whole number.
    if type(samples) is int and type(correct) is int and 0 <= correct <= samples and samples:
        return _Counts(samples, correct)
    raise UserError(
        f'{place}: needs "samples" and "correct", two counts, as `rejection_sample` and `evaluate`'
        " write them with several samples a problem"
    )


def problems_in_band(problems: Problems, rates: PassRates, band: Band) -> BandSelection:
    """The problems whose measured pass rate lies in the band, in their order. Of `Endless` problems
    the first ones are looked at, as many as the file has rows."""
    if isinstance(problems, Endless):
        candidates = [problems[index] for index in range(rates.rows)]
    else:
        candidates = problems
    kept: list[Problem] = []
    outside: list[float] = []
    unmeasured = 0
    for problem in candidates:
        rate = rates.rate_of(problem)
        if rate is None:
            unmeasured += 1
        elif band.low <= rate <= band.high:
            kept.append(problem)
        else:
            outside.append(rate)
    return BandSelection(kept, tuple(outside), unmeasured)


def rows_with_rates(problems: Iterable[Problem], file: str) -> Iterator[dict[str, Any]]:
    """A line for each problem, with the pass rate that a file has of it. Raises `UserError` as
    `read_pass_rates`."""
    rates = read_pass_rates(file)
    for problem in problems:
        yield {
            "id": problem.id,
            "question": problem.question or problem.prompt,
            "pass_rate": rates.rate_of(problem),
        }


def banded(problems: Problems, file: str, band: str) -> Problems:
    """The problems whose pass rate, of the file, lies in the band "LOW-HIGH"; all of them where no
    file is named. Raises `UserError` as `read_pass_rates`."""
    if not file:
        return problems
    bounds = read_band(band)
    assert bounds is not None  # The arguments of a run are checked when they are made.
    return problems_in_band(problems, read_pass_rates(file), bounds).kept
