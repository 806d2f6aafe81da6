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
    """Rewards by evaluation and question: steps of the evaluations [E], ids of the questions [Q], mean rewards [E, Q], and the
    questions' texts [Q]. A question that was asked twice is there twice, so means are those of `evals.jsonl`."""

    steps: tuple[int, ...]
    questions: tuple[str, ...]
    rewards_EQ: np.ndarray
    texts: tuple[str, ...]


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
        return int(self.args["seed"])

    @cached_property
    def scores(self) -> EvalScores:
        """The rewards of all evaluations. Raises `UserError` where two evaluations have different questions, or one has not
        the same number of completions for each."""
        steps, rewards, ids, texts = [], [], None, ()
        for record in self.evals:
            file = self.path / "completions" / f"eval_{record['step']:06d}.jsonl"
            lines = read_jsonl(file)
            problems = record.get("problems") or len({line["problem"] for line in lines})
            if not lines or len(lines) % problems:
                raise UserError(f"{file} is damaged: {len(lines)} completions of {problems} problems")
            samples = len(lines) // problems
            first = lines[::samples]
            if ids not in (None, tuple(line["problem"] for line in first)):
                raise UserError(f"{file}: other questions than in the run's first evaluation")
            ids, texts = zip(*((line["problem"], line.get("question") or line["problem"]) for line in first), strict=True)
            steps.append(record["step"])
            scores = [line["score"]["reward"] for line in lines]
            rewards.append([sum(scores[i : i + samples]) / samples for i in range(0, len(lines), samples)])
        return EvalScores(tuple(steps), ids or (), np.array(rewards), texts)


def read_run(path: Path) -> Run:
    """A run's records. Raises `UserError`, naming the file, where they are damaged or missing."""
    file = path / "args.json"
    try:
        facts = read_json(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} is no run's folder: it has no args.json") from None
    args, command, versions = (facts.get(key) for key in ("args", "command", "versions"))
    typed = isinstance(args, dict) and isinstance(command, list) and isinstance(versions, dict)
    if not typed or type(args.get("seed")) is not int:
        raise UserError(f"{file} is damaged: it needs args with a seed, command and versions")
    metrics, evals = (tuple(read_records(path / name)) for name in ("metrics.jsonl", "evals.jsonl"))
    return Run(path, args, tuple(map(str, command)), versions, metrics, evals, (path / "summary.json").exists())
