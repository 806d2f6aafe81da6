"""Finished and unfinished runs, read back from their folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl, read_records


@dataclass(frozen=True)
class Run:
    """What one run wrote."""

    path: Path
    args: Mapping[str, object]
    command: tuple[str, ...]
    versions: Mapping[str, str]
    metrics: tuple[dict, ...]
    evals: tuple[dict, ...]
    finished: bool

    @property
    def seed(self) -> int:
        """The seed that the run was trained with."""
        return int(self.args["seed"])

    @cached_property
    def scores(self) -> tuple[tuple[int, ...], tuple[str, ...], np.ndarray]:
        """Steps of the evaluations [E], ids of the questions [Q], and each question's mean reward [E, Q].

        Raises `UserError` where the evaluations do not ask the same questions.
        """
        steps, rows, ids = [], [], None
        for record in self.evals:
            found: dict[str, list[float]] = {}
            file = self.path / "completions" / f"eval_{record['step']:06d}.jsonl"
            for completion in read_jsonl(file):
                found.setdefault(completion["problem"], []).append(completion["score"]["reward"])
            if ids is not None and tuple(found) != ids:
                raise UserError(f"{file}: other questions than in the run's first evaluation")
            ids = tuple(found)
            steps.append(record["step"])
            rows.append([sum(scores) / len(scores) for scores in found.values()])
        return tuple(steps), ids or (), np.array(rows)


def read_run(path: Path) -> Run:
    """A run's records. Raises `UserError`, naming the file, where they are damaged or missing."""
    file = path / "args.json"
    try:
        facts = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is no run's folder: it has no args.json") from None
    args, command, versions = (facts.get(key) for key in ("args", "command", "versions"))
    if not (
        isinstance(args, dict) and type(args.get("seed")) is int and isinstance(command, list) and isinstance(versions, dict)
    ):
        raise UserError(f"{file} is damaged: it needs args with a seed, command and versions")
    metrics, evals = (tuple(read_records(path / name)) for name in ("metrics.jsonl", "evals.jsonl"))
    return Run(path, args, tuple(map(str, command)), versions, metrics, evals, (path / "summary.json").exists())
