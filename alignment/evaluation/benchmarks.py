"""Benchmarks by their names: each is a `Task` whose test problems are published rows, which the library `datasets` loads.
benchmarks.toml says of each where its rows are, what is in which column, and how it is asked and graded."""

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path

from alignment.core.records import Problem
from alignment.data.prompts import fill_prompt
from alignment.data.tasks import Task
from alignment.data.tasks.own_data import cell_text, hub_splits, numbered
from alignment.data.tasks.svamp import svamp_row
from alignment.rewards.grading.text import unbox
from alignment.system.errors import UserError

ENTRIES = tomllib.loads(Path(__file__).with_name("benchmarks.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=len(ENTRIES))
def problems(name: str, split: str, dataset_path: str = "") -> tuple[Problem, ...]:
    """The problems of a benchmark, all of them test problems, from the hub or from the folder `dataset_path`/`name`. Raises
    `UserError` for rows that cannot be loaded, no row or more rows than are published, and a bad row, with its number."""
    if split != "test":
        return ()
    entry, flag, folder = ENTRIES[name], f"--eval_tasks {name}", Path(dataset_path) / name
    if dataset_path and not folder.is_dir():
        raise UserError(f"--dataset_path {dataset_path}: has no folder {name}, in which the files of that benchmark are")
    source = [str(folder)] if dataset_path else [entry["hub"], *entry.get("subset", ())]
    own = dataset_path and (folder / entry.get("file", "")).is_file()  # one of several files there that is the benchmark
    splits = hub_splits(
        flag, f"--dataset_path FOLDER with {name}/ in it", *source, **{"data_files": entry["file"]} if own else {}
    )
    chosen = [part for part in (entry["splits"] if len(splits) > 1 else splits) if part in splits]
    rows = [row for part in chosen for row in numbered(f"{source[0]} {part}", splits[part])]
    if not 0 < len(rows) <= entry["problems"]:
        published = f"{entry['problems']} problems, in {' + '.join(entry['splits'])}"
        raise UserError(f"{flag}: {source[0]} has {len(rows)} rows in {', '.join(splits)}; published are {published}")
    return tuple(_problem(f"{name}/{number}", entry, place, row) for number, (place, row) in enumerate(rows))


def _problem(name: str, entry: Mapping, place: str, row: dict) -> Problem:
    row = svamp_row(place, row) if entry.get("equation") else row
    asked, answered = (next((c for c in entry[kind] if c in row), [*entry[kind]][0]) for kind in ("question", "answer"))
    if isinstance(several := row.get(answered), list):
        row = row | {answered: ", ".join(map(str, several))}
    question, cell = (cell_text(place, row, column).strip() for column in (asked, answered))
    match = re.search(entry["answer"][answered], cell)
    if not match or not (answer := unbox(match[1]).strip()):
        raise UserError(f'{place}: "{answered}" holds no answer where {entry["answer"][answered]} looks')
    return Problem(name, question, fill_prompt("r1_zero", question), answer)


def _task(name: str, entry: Mapping) -> Task:
    return Task(name, partial(problems, name), lambda *_: [], entry["prompt"], tuple(entry["rules"]))


BENCHMARKS: Mapping[str, Task] = {name: _task(name, entry) for name, entry in ENTRIES.items()}
globals().update(BENCHMARKS)  # --task alignment.evaluation.benchmarks:NAME is one, too
