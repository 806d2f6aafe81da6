"""A study: finished runs, from folders of sweeps or of runs, grouped into the arms that a report
compares."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alignment.ablation.design import ALPHA, BOOKKEEPING, varied_values
from alignment.args import RLArgs
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl

Record = Mapping[str, Any]
"""A line of a run's metrics.jsonl or evals.jsonl: numbers by name, among them its step."""


def _count_steps(run: "Run", record: Record) -> float:
    return 1


def _count_samples(run: "Run", record: Record) -> float:
    """The responses that the step sampled, refills too. Older records have those it trained on."""
    if "prompts_asked" in record:
        return record["prompts_asked"] * run.args["group_size"]
    return record.get("responses", 0)


def _count_tokens(run: "Run", record: Record) -> float:
    """The tokens that the step sampled, refills too. Older records have their mean length."""
    if "tokens_asked" in record:
        return record["tokens_asked"]
    return _count_samples(run, record) * record.get("response_length", 0)


def _count_seconds(run: "Run", record: Record) -> float:
    return record.get("seconds", 0)


AMOUNTS: dict[str, Callable[["Run", Record], float]] = {
    "steps": _count_steps,
    "samples": _count_samples,
    "tokens": _count_tokens,
    "seconds": _count_seconds,
}
"""--match -> how much of it a step of a run took, by the step's record."""


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
    args: Mapping[str, Any]
    command: tuple[str, ...]
    versions: Mapping[str, str]
    metrics: tuple[dict[str, Any], ...]
    evals: tuple[dict[str, Any], ...]
    finished: bool
    machine: str  # "" in records of older versions

    @property
    def seed(self) -> int:
        return int(self.args["seed"])

    def spent(self, match: str, records: Sequence[Record]) -> np.ndarray:
        """How much of what --match names the run had taken by the step of each of the records."""
        steps = [0, *(record["step"] for record in self.metrics)]
        amounts = [0, *(AMOUNTS[match](self, record) for record in self.metrics)]
        return np.interp([record["step"] for record in records], steps, np.cumsum(amounts))

    @cached_property
    def scores(self) -> EvalScores:
        """The rewards of all evaluations. Raises `UserError` where these differ in questions, or
        questions in completions."""
        rewards: list[list[float]] = []
        questions: tuple[str, ...] | None = None
        texts: tuple[str, ...] = ()
        for record in self.evals:
            file = self.path / "completions" / f"eval_{record['step']:06d}.jsonl"
            lines = read_jsonl(file)
            problems = record.get("problems") or len({line["problem"] for line in lines})
            if not lines or len(lines) % problems:
                raise UserError(
                    f"{file} is damaged: {len(lines)} completions of {problems} problems"
                )
            # a question's completions follow each other
            samples = len(lines) // problems
            first_lines = lines[::samples]
            names = tuple(line["problem"] for line in first_lines)
            if questions not in (None, names):
                raise UserError(f"{file}: other questions than in the run's first evaluation")
            questions = names
            texts = tuple(line.get("question") or line["problem"] for line in first_lines)
            scores = [line["score"]["reward"] for line in lines]
            starts = range(0, len(lines), samples)
            rewards.append([sum(scores[start : start + samples]) / samples for start in starts])
        steps = tuple(record["step"] for record in self.evals)
        return EvalScores(steps, questions or (), np.array(rewards), texts)


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
    args = facts.get("args")
    command = facts.get("command")
    versions = facts.get("versions")
    if (
        not isinstance(args, dict)
        or not isinstance(command, list)
        or not isinstance(versions, dict)
        or type(args.get("seed")) is not int
    ):
        raise UserError(f"{file} is damaged: it needs args with a seed, command and versions")
    return Run(
        path,
        args,
        command=tuple(map(str, command)),
        versions={name: str(version) for name, version in versions.items()},
        metrics=tuple(read_jsonl(path / "metrics.jsonl", require_steps=True)),
        evals=tuple(read_jsonl(path / "evals.jsonl", require_steps=True)),
        finished=(path / "summary.json").exists(),
        machine=str(facts.get("machine", "")),
    )


def read_study(folders: Sequence[Path], tie: float = 0.03, match: str = "steps") -> Study:
    """Read a sweep's folder, or group runs that were made apart, in folders of their own or of
    several sweeps, into arms by their arguments; a single run may still be training. Raises
    `UserError` for a folder that is neither, for damaged files, and for two runs of equal arguments
    and seed."""
    sweeps = {folder: _read_sweep(folder) for folder in folders if (folder / "sweep.json").exists()}
    if len(folders) == len(sweeps) == 1:
        return sweeps[folders[0]]
    runs: list[Run] = []
    for folder in folders:
        runs += sweeps[folder].runs if folder in sweeps else [read_run(folder)]

    differing = _differing_arguments(runs)
    arms: dict[str, dict[int, Run]] = {}
    varied: dict[str, dict[str, object]] = {}
    for run in runs:
        values = {name: _argument(run, name) for name in differing}
        arm = ", ".join(f"{name} {value}" for name, value in values.items()) or "all runs"
        by_seed = arms.setdefault(arm, {})
        if run.seed in by_seed:
            raise UserError(
                f"{run.path} and {by_seed[run.seed].path} have the same arguments and seed: give"
                " one of them"
            )
        varied[arm] = values
        if run.finished or (len(runs) == 1 and run.evals):
            by_seed[run.seed] = run
    missing = [run.path.name for run in runs if not run.finished]
    for sweep in sweeps.values():
        missing += sweep.missing
    return Study(
        arms,
        varied,
        tuple(missing),
        tie,
        hold="",
        warnings=_other_versions(runs),
        command="",
        match=match,
    )


# the value of an argument that is newer than a run
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(RLArgs)}


def _argument(run: Run, name: str) -> Any:
    return run.args.get(name, _DEFAULTS.get(name))


def _differing_arguments(runs: Sequence[Run]) -> list[str]:
    """The names of the arguments that decide a result and have several values among the runs,
    sorted; empty values are one."""
    names = {name for run in runs for name in run.args} - BOOKKEEPING
    differing = []
    for name in sorted(names):
        values = {json.dumps(_argument(run, name) or None) for run in runs}
        if len(values) > 1:
            differing.append(name)
    return differing


def _other_versions(runs: Sequence[Run]) -> tuple[str, ...]:
    """A warning for each package, and the code, that the runs have in several versions."""
    packages = {package for run in runs for package in run.versions}
    warnings = []
    for package in sorted(packages):
        versions = sorted({run.versions.get(package, "none") for run in runs})
        if len(versions) > 1:
            warnings.append(f"the runs differ in {package}: {', '.join(versions)}")
    return tuple(warnings)


_SWEEP_TYPES = {
    "arms": dict,
    "seeds": list,
    "command": list,
    "warnings": list,
    "tie": float,
    "alpha": float,
    "hold": str,
}


def _read_sweep(folder: Path) -> Study:
    """The finished runs of a sweep's folder. Raises `UserError` where sweep.json is damaged."""
    sweep = _read_settings(folder)
    planned: dict[str, dict[str, Any]] = sweep["arms"]
    arms: dict[str, dict[int, Run]] = {arm: {} for arm in planned}
    expected: set[tuple[str, int]] = set()
    for seed in sweep["seeds"]:
        if type(seed) is int:
            expected |= {(arm, seed) for arm in planned}
    for path in sorted(folder.glob("*_seed*")):
        arm, _, seed = path.name.rpartition("_seed")
        if arm not in arms or not seed.isdigit():
            continue
        # a seed that --until_decided added
        expected.add((arm, int(seed)))
        if (path / "args.json").exists():
            run = read_run(path)
            if run.finished:
                arms[arm][int(seed)] = run
    missing = [f"{arm}_seed{seed}" for arm, seed in sorted(expected) if seed not in arms[arm]]
    runs = [run for by_seed in arms.values() for run in by_seed.values()]
    return Study(
        arms,
        varied_values(planned),
        tuple(missing),
        tie=sweep["tie"],
        hold=sweep["hold"],
        warnings=(*map(str, sweep["warnings"]), *_other_versions(runs)),
        command=shell_command(["", *map(str, sweep["command"])]),
        alpha=sweep["alpha"],
        match=sweep["match"],
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """The content of sweep.json. Raises `UserError` where an entry is missing or of another
    type."""
    settings: dict[str, Any] = {"match": "steps"} | read_json(folder / "sweep.json")
    is_typed = all(isinstance(settings.get(key), kind) for key, kind in _SWEEP_TYPES.items())
    arms = settings.get("arms")
    has_arms = isinstance(arms, dict) and arms and all(isinstance(a, dict) for a in arms.values())
    # a tuple, since a damaged match may be unhashable
    if not is_typed or not has_arms or settings["match"] not in tuple(AMOUNTS):
        raise UserError(f"{folder / 'sweep.json'} is damaged: it needs {', '.join(_SWEEP_TYPES)}")
    return settings


def shell_command(command: Sequence[str]) -> str:
    """A recorded command line as a user would type it. It drops --resume, which `sweep` adds when
    it restarts a run."""
    words = [word for word in command if word != "--resume"]
    if len(words) > 1 and words[1].endswith(".py"):
        words = ["uv", "run", "-m", f"alignment.{Path(words[1]).stem}", *words[2:]]
    return shlex.join(words)
