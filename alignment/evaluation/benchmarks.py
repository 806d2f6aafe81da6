"""Benchmarks by their names: each is a `Task` whose test problems are published rows, which the
library `datasets` loads. benchmarks.toml says of each where its rows are, what is in which column,
and how it is asked and graded."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from alignment.core.records import Problem
from alignment.data.rows import hub_splits, numbered
from alignment.data.tasks import Task
from alignment.data.tasks.own_data import DataConfig, worked_problems
from alignment.data.tasks.published import svamp_row
from alignment.rewards.grading.boxes import boxed_answer
from alignment.system.errors import UserError

ENTRIES = tomllib.loads(Path(__file__).with_name("benchmarks.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=len(ENTRIES))
def problems(name: str, dataset_path: str = "") -> tuple[Problem, ...]:
    """The problems of a benchmark, from the hub or from the folder `dataset_path`/`name`. Raises
    `UserError` for rows that cannot be loaded, no row or more rows than are published, and a bad
    row, with its number."""
    entry, flag, folder = ENTRIES[name], f"--eval_tasks {name}", Path(dataset_path) / name
    if dataset_path and not folder.is_dir():
        raise UserError(
            f"--dataset_path {dataset_path}: has no folder {name}, in which the files of that"
            " benchmark are"
        )
    source = [str(folder)] if dataset_path else [entry["hub"], *entry.get("subset", ())]
    # one of several files there that is the benchmark
    own = dataset_path and (folder / entry.get("file", "")).is_file()
    splits = hub_splits(
        flag,
        f"--dataset_path FOLDER with {name}/",
        *source,
        **{"data_files": entry["file"]} if own else {},
    )
    chosen = [part for part in (entry["splits"] if len(splits) > 1 else splits) if part in splits]
    rows = [row for part in chosen for row in numbered(f"{source[0]} {part}", splits[part])]
    if not 0 < len(rows) <= entry["problems"]:
        published = f"{entry['problems']} problems, in {' + '.join(entry['splits'])}"
        raise UserError(
            f"{flag}: {source[0]} has {len(rows)} rows in {', '.join(splits)}; published are"
            f" {published}"
        )

    def flat(place, row):
        return {c: ", ".join(map(str, v)) if isinstance(v, list) else v for c, v in row.items()}

    rows = [
        (place, (svamp_row if entry.get("equation") else flat)(place, row)) for place, row in rows
    ]
    question, answer = (
        next((c for c in entry[kind] if c in rows[0][1]), [*entry[kind]][0])
        for kind in ("question", "answer")
    )
    pairs = worked_problems(rows, DataConfig(question, answer, entry["answer"][answer]))
    return tuple(
        replace(p, id=f"{name}/{i}", ground_truth=boxed_answer(p.ground_truth).strip())
        for i, (p, _) in enumerate(pairs)
    )


def _task(name: str, entry: Mapping) -> Task:
    def in_split(split, dataset_path=""):
        return problems(name, dataset_path) if split == "test" else ()

    return Task(name, in_split, lambda *_: [], entry["prompt"], tuple(entry["rules"]))


BENCHMARKS: Mapping[str, Task] = {name: _task(name, entry) for name, entry in ENTRIES.items()}
globals().update(BENCHMARKS)  # --task alignment.evaluation.benchmarks:NAME is one, too
