"""A study: finished runs, from folders of sweeps or of runs, grouped into the arms that a report
compares."""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from alignment.ablation.design import ALPHA, BOOKKEEPING, varied_values
from alignment.args import RLArgs
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl


def _samples(run: "Run", step: Mapping) -> float:
    return (
        step["prompts_asked"] * run.args["group_size"]
        if "prompts_asked" in step
        else step.get("responses", 0)
    )


AMOUNTS = {
    "steps": lambda run, step: 1,
    "samples": _samples,
    "tokens": lambda run, step: step.get(
        "tokens_asked", _samples(run, step) * step.get("response_length", 0)
    ),
    "seconds": lambda run, step: step.get("seconds", 0),
}
"""--match -> how much of it a step of a run took, by the step's record: responses and tokens of
refills too."""


class EvalScores(NamedTuple):
    """Rewards by evaluation and question: steps of the evaluations [E], ids of the questions [Q],
    mean rewards [E, Q], and the questions' texts [Q]. A question that was asked twice is there
    twice, so means are those of `evals.jsonl`."""

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
    machine: str  # "" in records of older versions

    @property
    def seed(self) -> int:
        return int(self.args["seed"])

    def spent(self, match: str, records: Sequence[Mapping]) -> np.ndarray:
        """How much of what --match names the run had taken by the step of each of the records."""
        total = np.cumsum([0, *(AMOUNTS[match](self, step) for step in self.metrics)])
        return np.interp(
            [record["step"] for record in records],
            [0, *(step["step"] for step in self.metrics)],
            total,
        )

    @cached_property
    def scores(self) -> EvalScores:
        """The rewards of all evaluations. Raises `UserError` where these differ in questions, or
        questions in completions."""
        rewards, ids, texts = [], None, ()
        for record in self.evals:
            file = self.path / "completions" / f"eval_{record['step']:06d}.jsonl"
            lines = read_jsonl(file)
            problems = record.get("problems") or len({line["problem"] for line in lines})
            if not lines or len(lines) % problems:
                raise UserError(
                    f"{file} is damaged: {len(lines)} completions of {problems} problems"
                )
            samples = len(lines) // problems
            first = lines[::samples]
            if ids not in (None, tuple(line["problem"] for line in first)):
                raise UserError(f"{file}: other questions than in the run's first evaluation")
            ids, texts = zip(
                *((line["problem"], line.get("question") or line["problem"]) for line in first),
                strict=True,
            )
            scores = [line["score"]["reward"] for line in lines]
            rewards.append(
                [sum(scores[i : i + samples]) / samples for i in range(0, len(lines), samples)]
            )
        return EvalScores(
            tuple(record["step"] for record in self.evals), ids or (), np.array(rewards), texts
        )


@dataclass(frozen=True)
class Study:
    """Finished runs by arm and seed, and the settings of the sweep. `missing` names the unfinished
    runs."""

    arms: Mapping[str, Mapping[int, Run]]
    # For each arm, its values of the arguments in which arms differ.
    varied: Mapping[str, Mapping[str, object]]
    missing: tuple[str, ...]
    tie: float
    hold: str  # "rollouts" or "prompts" (--hold of `sweep`); "" without a sweep
    warnings: tuple[str, ...]
    command: str
    alpha: float = ALPHA  # Largest probability that a table has any false verdict.
    match: str = "steps"  # --match of `sweep`

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms.values() for run in arm.values()]


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
    metrics, evals = (
        tuple(read_jsonl(path / name, have_steps=True)) for name in ("metrics.jsonl", "evals.jsonl")
    )
    versions, machine = (
        {name: str(version) for name, version in versions.items()},
        str(facts.get("machine", "")),
    )
    return Run(
        path,
        args,
        tuple(map(str, command)),
        versions,
        metrics,
        evals,
        (path / "summary.json").exists(),
        machine,
    )


def read_study(folders: Sequence[Path], tie: float = 0.03, match: str = "steps") -> Study:
    """Read a sweep's folder, or group runs that were made apart, in folders of their own or of
    several sweeps, into arms by their arguments; a single run may still be training. Raises
    `UserError` for a folder that is neither, for damaged files, and for two runs of equal arguments
    and seed."""
    sweeps = {folder: _read_sweep(folder) for folder in folders if (folder / "sweep.json").exists()}
    if len(folders) == len(sweeps) == 1:
        return sweeps[folders[0]]
    runs = [
        run
        for folder in folders
        for run in (sweeps[folder].runs if folder in sweeps else [read_run(folder)])
    ]
    names = {key for run in runs for key in run.args if key not in BOOKKEEPING}
    # of arguments that are newer than a run
    defaults = {f.name: f.default for f in dataclasses.fields(RLArgs)}

    def value_of(run, name):
        return run.args.get(name, defaults.get(name))

    differing = sorted(
        name for name in names if len({json.dumps(value_of(run, name) or None) for run in runs}) > 1
    )
    arms: dict[str, dict[int, Run]] = {}
    varied: dict[str, dict[str, object]] = {}
    for run in runs:
        values = {name: value_of(run, name) for name in differing}
        arm = ", ".join(f"{name} {value}" for name, value in values.items()) or "all runs"
        if run.seed in arms.setdefault(arm, {}):
            raise UserError(
                f"{run.path} and {arms[arm][run.seed].path} have the same arguments and seed: give"
                " one of them"
            )
        varied[arm] = values
        if run.finished or (len(runs) == 1 and run.evals):
            arms[arm][run.seed] = run
    missing = [run.path.name for run in runs if not run.finished] + [
        name for of in sweeps.values() for name in of.missing
    ]
    return Study(arms, varied, tuple(missing), tie, "", _other_versions(runs), "", match=match)


def _other_versions(runs: Sequence[Run]) -> tuple[str, ...]:
    """A warning for each package, and the code, that the runs have in several versions."""
    of = {
        name: {run.versions.get(name, "none") for run in runs}
        for name in sorted({n for run in runs for n in run.versions})
    }
    return tuple(
        f"the runs differ in {name}: {', '.join(sorted(several))}"
        for name, several in of.items()
        if len(several) > 1
    )


def _read_sweep(folder: Path) -> Study:
    sweep = {"match": "steps"} | read_json(folder / "sweep.json")
    types = {
        "arms": dict,
        "seeds": list,
        "command": list,
        "warnings": list,
        "tie": float,
        "alpha": float,
        "hold": str,
    }
    planned = sweep.get("arms")
    complete = all(isinstance(sweep.get(key), of_type) for key, of_type in types.items()) and sweep[
        "match"
    ] in tuple(AMOUNTS)
    if not (complete and planned and all(isinstance(arm, dict) for arm in planned.values())):
        raise UserError(f"{folder / 'sweep.json'} is damaged: it needs {', '.join(types)}")
    arms: dict[str, dict[int, Run]] = {arm: {} for arm in planned}
    expected = {(arm, seed) for arm in planned for seed in sweep["seeds"] if type(seed) is int}
    for path in sorted(folder.glob("*_seed*")):
        arm, _, seed = path.name.rpartition("_seed")
        if arm not in arms or not seed.isdigit():
            continue
        expected.add((arm, int(seed)))
        if (path / "args.json").exists() and (run := read_run(path)).finished:
            arms[arm][int(seed)] = run
    missing = tuple(f"{arm}_seed{seed}" for arm, seed in sorted(expected) if seed not in arms[arm])
    command = shell_command(["", *map(str, sweep["command"])])
    warnings = (
        *map(str, sweep["warnings"]),
        *_other_versions([run for by_seed in arms.values() for run in by_seed.values()]),
    )
    settings = {name: sweep[name] for name in ("tie", "hold", "alpha", "match")}
    return Study(
        arms, varied_values(planned), missing, warnings=warnings, command=command, **settings
    )


def shell_command(command: Sequence[str]) -> str:
    """A recorded command line as a user would type it. It drops --resume, which `sweep` adds when
    it restarts a run."""
    words = [word for word in command if word != "--resume"]
    if len(words) > 1 and words[1].endswith(".py"):
        words = ["uv", "run", "-m", f"alignment.{Path(words[1]).stem}", *words[2:]]
    return shlex.join(words)
