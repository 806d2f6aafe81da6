"""Benchmarks by their names: each is a `Task` whose test problems are published rows, which the
library `datasets` loads. benchmarks.toml says of each where its rows are, what is in which column,
and how it is asked and graded."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from alignment.core.records import Problem
from alignment.data.rows import PlacedRow, hub_splits, numbered
from alignment.data.tasks import Task
from alignment.data.tasks.own_data import DataConfig, worked_problems
from alignment.data.tasks.published import svamp_row
from alignment.rewards.grading.boxes import boxed_answer
from alignment.system.errors import UserError

ENTRIES = tomllib.loads(Path(__file__).with_name("benchmarks.toml").read_text(encoding="utf-8"))


def forget_rows() -> None:
    """Read the rows anew when they are asked for next: files may have changed."""
    problems.cache_clear()


@lru_cache(maxsize=len(ENTRIES))
def problems(name: str, dataset_path: str = "") -> tuple[Problem, ...]:
    """The problems of a benchmark, from the hub or from the folder `dataset_path`/`name`.

    Raises `UserError` for rows that cannot be loaded, no row or more rows than are published, and a
    bad row, with its number."""
    entry = ENTRIES[name]
    rows = []
    for place, row in _published_rows(name, entry, dataset_path):
        cells = _join_lists(row)
        if entry.get("equation"):  # An equation in place of a worked solution, as SVAMP has.
            cells = svamp_row(place, row)
        rows.append((place, cells))
    _, first_cells = rows[0]
    question = _present_column(entry["question"], first_cells)
    answer = _present_column(entry["answer"], first_cells)
    config = DataConfig(
        question_column=question, answer_column=answer, answer_pattern=entry["answer"][answer]
    )
    pairs = worked_problems(rows, config)
    numbered_problems = []
    for index, (problem, _) in enumerate(pairs):
        ground_truth = boxed_answer(problem.ground_truth).strip()
        numbered_problems.append(replace(problem, id=f"{name}/{index}", ground_truth=ground_truth))
    return tuple(numbered_problems)


def _published_rows(name: str, entry: Mapping[str, Any], dataset_path: str) -> list[PlacedRow]:
    """The rows of a benchmark's test splits, with their places. Raises `UserError` as `problems`
    does."""
    flag = f"--eval_tasks {name}"
    folder = Path(dataset_path) / name
    if dataset_path and not folder.is_dir():
        raise UserError(
            f"--dataset_path {dataset_path}: has no folder {name}, in which the files of that"
            " benchmark are"
        )
    source = [str(folder)] if dataset_path else [entry["hub"], *entry.get("subset", ())]
    options = {}
    if dataset_path and (folder / entry.get("file", "")).is_file():
        options["data_files"] = entry["file"]  # of several files there the one of the benchmark
    splits = hub_splits(flag, f"--dataset_path FOLDER with {name}/", *source, **options)
    # a single split is the benchmark, whatever its name
    names = entry["splits"] if len(splits) > 1 else splits
    rows = []
    for split in names:
        if split in splits:
            rows += numbered(f"{source[0]} {split}", splits[split])
    if not 0 < len(rows) <= entry["problems"]:
        published = f"{entry['problems']} problems, in {' + '.join(entry['splits'])}"
        raise UserError(
            f"{flag}: {source[0]} has {len(rows)} rows in {', '.join(splits)}; published are"
            f" {published}"
        )
    return rows


def _join_lists(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose lists, of several right answers, are texts with commas."""
    cells = dict(row)
    for column, value in row.items():
        if isinstance(value, list):
            cells[column] = ", ".join(map(str, value))
    return cells


def _present_column(names: Iterable[str], row: Mapping[str, Any]) -> str:
    """The first of `names` that a row has; the first of all where it has none."""
    choices = list(names)
    return next((name for name in choices if name in row), choices[0])


def _task(name: str, entry: Mapping[str, Any]) -> Task:
    """The task of a benchmark, which has test problems only."""

    def test_problems(split: str, dataset_path: str = "") -> tuple[Problem, ...]:
        return problems(name, dataset_path) if split == "test" else ()

    def no_demonstrations(
        split: str, dataset_path: str = "", seed: int = 0
    ) -> list[tuple[Problem, str]]:
        return []

    return Task(name, test_problems, no_demonstrations, entry["prompt"], tuple(entry["rules"]))


BENCHMARKS: Mapping[str, Task] = {name: _task(name, entry) for name, entry in ENTRIES.items()}
globals().update(BENCHMARKS)  # --task alignment.evaluation.benchmarks:NAME is one, too
