"""The records of finished and unfinished runs, read from their folders."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl, read_records


class EvalScores(NamedTuple):
    """Rewards by evaluation and question: steps of the evaluations [E], ids of the questions [Q], mean rewards [E, Q]."""

    steps: tuple[int, ...]
    questions: tuple[str, ...]
    rewards_EQ: np.ndarray


@dataclass(frozen=True)
class Run:
    """The arguments, command, versions and records of one run."""

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
    def scores(self) -> EvalScores:
        """The rewards of all evaluations. Raises `UserError` where two evaluations have different questions."""
        steps, rows, ids = [], [], None
        for record in self.evals:
            rewards: dict[str, list[float]] = {}
            file = self.path / "completions" / f"eval_{record['step']:06d}.jsonl"
            for completion in read_jsonl(file):
                rewards.setdefault(completion["problem"], []).append(completion["score"]["reward"])
            if ids is not None and tuple(rewards) != ids:
                raise UserError(f"{file}: other questions than in the run's first evaluation")
            ids = tuple(rewards)
            steps.append(record["step"])
            rows.append([sum(values) / len(values) for values in rewards.values()])
        return EvalScores(tuple(steps), ids or (), np.array(rows))


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
