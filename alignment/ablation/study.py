"""A study: the finished runs that a report compares, grouped into arms, as read from folders of
sweeps or of single runs. The runs of one arm differ only in their seeds."""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alignment.ablation.design import (
    ALPHA,
    BOOKKEEPING,
    REPORTED,
    fixed_facts,
    implied_settings,
    is_control,
    is_of_all_evaluations,
    reported_seeds,
    run_folders,
    varied_values,
)
from alignment.ablation.tuning import Tuning, read_tuning
from alignment.args import ReportArgs, RLArgs
from alignment.config.flag import defaults_of_flags
from alignment.runs.metric_names import read_metrics
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl

Record = Mapping[str, Any]
"""A line of a run's metrics.jsonl or evals.jsonl: numbers by name, among them "step"."""


def _count_steps(run: "Run", record: Record) -> float:
    return 1


def _count_samples(run: "Run", record: Record) -> float:
    """The responses that a step sampled, those for refills included. The record of a step that
    could not refill has no "prompts_sampled"; it trained on all that it sampled."""
    if "prompts_sampled" in record:
        return record["prompts_sampled"] * run.args["group_size"]
    return record.get("responses", 0)


def _count_tokens(run: "Run", record: Record) -> float:
    """The tokens that a step sampled, those for refills included. Without "tokens_sampled" they
    follow from the mean length of a response."""
    if "tokens_sampled" in record:
        return record["tokens_sampled"]
    return _count_samples(run, record) * record.get("response_length", 0)


def _count_seconds(run: "Run", record: Record) -> float:
    return record.get("seconds", 0)


AMOUNTS: dict[str, Callable[["Run", Record], float]] = {
    "steps": _count_steps,
    "samples": _count_samples,
    "tokens": _count_tokens,
    "seconds": _count_seconds,
}
"""The amounts at which arms can be compared (--match) -> the function that counts what one step
took, of the step's run and its line of metrics.jsonl."""


def amounts_of(runs: "Sequence[Run]") -> dict[str, float]:
    """What runs took together: their number ("runs"), and each of `AMOUNTS`."""
    amounts = {"runs": float(len(runs))}
    for name, count in AMOUNTS.items():
        amounts[name] = 0.0
        for run in runs:
            amounts[name] += sum(count(run, record) for record in run.metrics)
    return amounts


class Measure(NamedTuple):
    """How a kind of measure is called: as a title and as part of a sentence, in which {} is its
    name; and whether it has a value in every evaluation, so that --match can compare it between."""

    title: str
    description: str
    has_curve: bool = False


MEASURE_KINDS: dict[str, Measure] = {
    "accuracy": Measure("final accuracy", "the accuracy of the last evaluation", True),
    "avg": Measure("final {}", "{} of the last evaluation, the mean over its samples", True),
    "pass": Measure("final {}", "{} of the last evaluation, unbiased over its samples", True),
    "maj": Measure("final {}", "{} of the last evaluation, unbiased over its samples", True),
    "area": Measure(
        "area under the learning curve", "the mean accuracy over training, by its area", True
    ),
    "best": Measure(
        "accuracy of the best evaluation",
        "the accuracy of the best evaluation, chosen by one half of the questions and scored by the"
        " other",
    ),
    "tokens_to": Measure(
        "share of sampled tokens, {}",
        "the share of the sampled tokens that all runs have taken, until the accuracy is first"
        " reached ({}); 1 where it is not",
    ),
    "greedy": Measure(
        "final accuracy of greedy answers", "the accuracy of the last evaluation's greedy answers"
    ),
    "entropy": Measure("entropy", "the entropy of the last 10 steps, in nats a token"),
}
"""What verdicts may be on (--measure), by the part of its name before @."""


class NamedMeasure(NamedTuple):
    """A kind of measure and the number in its name: k of pass@k, n of avg@n and maj@n, the
    accuracy of tokens_to@0.5; 0 where it has none."""

    kind: str
    number: float


def read_measure(measure: str) -> NamedMeasure:
    """The measure of a name. Raises `UserError` for another name."""
    kind, at, text = measure.partition("@")
    is_named = kind in MEASURE_KINDS and bool(at) == (kind in ("avg", "pass", "maj", "tokens_to"))
    number = 0.0
    if at and is_named:
        try:
            number = float(text)
        except ValueError:
            is_named = False
        if kind == "tokens_to":
            is_named = is_named and 0 < number < 1
        else:
            is_named = is_named and number >= 1 and number.is_integer()
    if not is_named:
        raise UserError(
            f"--measure {measure}: give accuracy, avg@N, pass@K, maj@N, greedy, area, best,"
            " tokens_to@ACCURACY or entropy"
        )
    return NamedMeasure(kind, number)


def refuse_unmatched_measure(measure: str, match: str) -> None:
    """Raise `UserError` for an unknown measure, and for one of a whole run at equal amounts."""
    kind, _ = read_measure(measure)
    if match != "steps" and not MEASURE_KINDS[kind].has_curve:
        raise UserError(f"--measure {measure}: it is of whole runs, so it needs --match steps")


class EvalScores(NamedTuple):
    """The rewards of a run's E evaluations on Q questions.

    A question that the test data has twice counts as two, so that the mean over Q is the mean in
    evals.jsonl."""

    steps: tuple[int, ...]  # [E]
    questions: tuple[str, ...]  # [Q], ids
    rewards_EQ: np.ndarray  # mean over a question's completions
    texts: tuple[str, ...]  # [Q]
    samples: int = 1  # of each question in the last evaluation
    rewards_of_samples: tuple[np.ndarray, ...] = ()  # [E] of [Q, N]: of each sample of a question
    votes: tuple[np.ndarray, ...] = ()  # [E] of [Q, N]: the number of its answer, -1 without one


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

    def amounts_until(self, match: str, records: Sequence[Record]) -> np.ndarray:
        """The steps, samples, tokens or seconds, whichever `match` names, that the run had taken in
        all by the step of each record."""
        count = AMOUNTS[match]
        steps = [0, *(record["step"] for record in self.metrics)]
        amounts = [0, *(count(self, record) for record in self.metrics)]
        return np.interp([record["step"] for record in records], steps, np.cumsum(amounts))

    @cached_property
    def scores(self) -> EvalScores:
        """The rewards of all evaluations. Raises `UserError` where a file is damaged, or where two
        evaluations asked different questions."""
        rewards: list[list[float]] = []
        rewards_of_samples: list[np.ndarray] = []
        votes: list[np.ndarray] = []
        samples = 1
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
            # The file has the completions of the first question, then those of the second, ...
            samples = len(lines) // problems
            first_lines = lines[::samples]
            questions_of_file = tuple(line["problem"] for line in first_lines)
            if questions is not None and questions != questions_of_file:
                raise UserError(f"{file}: other questions than in the run's first evaluation")
            questions = questions_of_file
            texts = tuple(line.get("question") or line["problem"] for line in first_lines)
            scores = [line["score"]["reward"] for line in lines]
            starts = range(0, len(lines), samples)
            rewards.append([sum(scores[start : start + samples]) / samples for start in starts])
            rewards_of_samples.append(np.array(scores, dtype=float).reshape(-1, samples))
            own_votes = [line["score"].get("vote", math.nan) for line in lines]
            votes.append(np.array(own_votes, dtype=float).reshape(-1, samples))
        steps = tuple(record["step"] for record in self.evals)
        return EvalScores(
            steps,
            questions or (),
            np.array(rewards),
            texts,
            samples,
            tuple(rewards_of_samples),
            tuple(votes),
        )


@dataclass(frozen=True)
class Study:
    """Finished runs by arm and seed, and the settings of the sweep."""

    arms: Mapping[str, Mapping[int, Run]]  # Each arm's runs are in the order of their seeds.
    # For each arm, its values of the arguments in which arms differ.
    varied: Mapping[str, Mapping[str, object]]
    missing: tuple[str, ...]  # Names of the unfinished runs.
    tie: float  # Difference of accuracies below which two arms are called equal.
    # What was equal while the group size varied: "rollouts" or "prompts" (--hold of `sweep`). ""
    # without a sweep.
    hold: str
    warnings: tuple[str, ...]
    command: str  # That of the sweep, as a user would type it; "" without a sweep.
    alpha: float = ALPHA  # Largest probability that a table has any false verdict.
    match: str = "steps"  # Amount at which arms are compared: a key of `AMOUNTS`.
    tuning: Tuning | None = None  # What each arm tried before, and took.
    measure: str = "accuracy"  # What verdicts are on: a name that `read_measure` takes.
    is_finished: bool = True  # Whether no run, and no seed of --until_decided, is still to come.
    # The numbers of seeds after which the sweep's verdicts were reported.
    reported: tuple[int, ...] = ()
    # What was decided before the sweep's runs, as its sweep.json has it; empty without one.
    design: Mapping[str, Any] = field(default_factory=dict)

    @property
    def looks(self) -> int:
        """How many times the sweep may make verdicts, which share the chance of a false one: once,
        or with --until_decided after each further seed too."""
        return max(1, round(ALPHA / self.alpha))

    @property
    def runs(self) -> list[Run]:
        """The runs of all arms."""
        runs: list[Run] = []
        for by_seed in self.arms.values():
            runs += by_seed.values()
        return runs


def read_run(path: Path) -> Run:
    """Read the folder of a run. Raises `UserError`, which names the file, where a file is damaged,
    or where there is no args.json."""
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
        metrics=tuple(read_metrics(path / "metrics.jsonl")),
        evals=tuple(read_jsonl(path / "evals.jsonl", require_steps=True)),
        finished=(path / "summary.json").exists(),
        machine=str(facts.get("machine", "")),
    )


def read_study(
    folders: Sequence[Path],
    tie: float = ReportArgs.tie,
    match: str = ReportArgs.match,
    measure: str = ReportArgs.measure,
) -> Study:
    """The study of one sweep's folder, with its arms and settings; or of any other folders of runs
    and sweeps, whose runs are grouped into arms by their arguments.

    `measure` is what verdicts are on; empty: what the sweep was made for, or accuracy. Where a
    sweep was made for another, the study warns. A sweep alone keeps its own `tie` and `match`; of
    several, the study warns of every decision that it leaves out.

    Only finished runs count, but one run alone may still be training. Raises `UserError` for a
    folder that is neither a run's nor a sweep's, for damaged files, for two runs with the same
    arguments and seed, and for another `tie` or `match` than a sweep's own."""
    sweeps = {}
    for folder in folders:
        if (folder / "sweep.json").exists():
            sweeps[folder] = _read_sweep(folder)
    if len(folders) == len(sweeps) == 1:
        [sweep] = sweeps.values()
        _refuse_other_rules(folders[0], sweep, tie, match)
        return _warned_of_uneven_evaluations(_with_measure(sweep, measure))
    measure = measure or "accuracy"
    refuse_unmatched_measure(measure, match)
    merged = _merge(folders, sweeps)
    warnings = _warnings_of_merged(sweeps, tie, match, measure)
    study = replace(
        merged,
        tie=tie,
        match=match,
        measure=measure,
        warnings=(*warnings, *merged.warnings),
    )
    return _warned_of_uneven_evaluations(study)


def _merge(folders: Sequence[Path], sweeps: Mapping[Path, Study]) -> Study:
    """The study of the runs of several folders, of which some are sweeps, by accuracy after their
    steps. Arms are named by the arguments in which the runs differ."""
    runs: list[Run] = []
    for folder in folders:
        if folder in sweeps:
            runs += sweeps[folder].runs
        else:
            runs.append(read_run(folder))

    differing = _differing_arguments(runs)
    values_of_runs = {}
    for run in runs:
        values_of_runs[str(run.path)] = {name: _argument(run, name) for name in differing}
    implied = implied_settings(values_of_runs)
    arms: dict[str, dict[int, Run]] = {}
    varied: dict[str, dict[str, object]] = {}
    for run in runs:
        values = values_of_runs[str(run.path)]
        named = [f"{name} {value}" for name, value in values.items() if name not in implied]
        arm = ", ".join(named) or "all runs"
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
    are_finished = not missing  # A sweep has its finished runs alone.
    for sweep in sweeps.values():
        missing += sweep.missing
    return Study(
        _in_order_of_seeds(arms),
        varied,
        tuple(missing),
        ReportArgs.tie,
        hold="",
        warnings=(*_early_ends(runs), *_version_warnings(runs)),
        command="",
        is_finished=all(sweep.is_finished for sweep in sweeps.values()) and are_finished,
    )


def _in_order_of_seeds(arms: Mapping[str, Mapping[int, Run]]) -> dict[str, dict[int, Run]]:
    """The runs of each arm in the order of their seeds. Folders sort seed 10 before seed 9, and
    reports show values beside seeds."""
    return {arm: dict(sorted(by_seed.items())) for arm, by_seed in arms.items()}


def _refuse_other_rules(folder: Path, sweep: Study, tie: float, match: str) -> None:
    """Raise `UserError` where the margin of a tie or the amount at which arms are compared is given
    for a sweep, and is not its own: that was decided before its runs."""
    given = {
        "tie": (tie, ReportArgs.tie, sweep.tie),
        "match": (match, ReportArgs.match, sweep.match),
    }
    for name, (value, default, own) in given.items():
        if value not in (default, own):
            raise UserError(
                f"--{name} {value}: {folder} is a sweep that was made with --{name} {own}, which"
                " its verdicts keep; give the folders of its runs to compare them otherwise"
            )


def _warnings_of_merged(
    sweeps: Mapping[Path, Study], tie: float, match: str, measure: str
) -> list[str]:
    """A warning for each decision of a sweep's design that its runs, compared with others, lose."""
    warnings = []
    for folder, sweep in sweeps.items():
        lost = []
        for name, value, own in (
            ("measure", measure, sweep.measure),
            ("match", match, sweep.match),
            ("tie", tie, sweep.tie),
        ):
            if value != own:
                lost.append(f"--{name} {own}")
        if sweep.looks > 1:
            lost.append("that its verdicts share 5 % with those after other numbers of seeds")
        if len(sweep.reported) > 1:
            numbers = ", then ".join(map(str, sweep.reported))
            lost.append(f"that its verdicts were made after {numbers} seeds")
        if sweep.tuning is not None:
            names = " and ".join(sweep.tuning.names)
            lost.append(f"that each arm tuned {names}, which now is an argument that varies")
        if any(is_control(arm) for arm in sweep.arms):
            lost.append("that arms are controls")
        if lost:
            warnings.append(f"{folder} was made with other rules, left out here: {'; '.join(lost)}")
    return warnings


def _with_measure(study: Study, measure: str) -> Study:
    """A sweep's study by another measure, with a warning that it was chosen afterwards. Raises
    `UserError` where it cannot be matched."""
    if measure in ("", study.measure):
        return study
    refuse_unmatched_measure(measure, study.match)
    warning = (
        f"verdicts are on {measure}, which was chosen afterwards: the sweep was made for"
        f" {study.measure}, and each further measure has a chance of a false verdict of its own"
    )
    return replace(study, measure=measure, warnings=(*study.warnings, warning))


def _warned_of_uneven_evaluations(study: Study) -> Study:
    """The study, with a warning where its measure is of all evaluations of a run, and runs have
    unequal numbers of them."""
    numbers = sorted({len(run.evals) for run in study.runs})
    if len(numbers) < 2 or not is_of_all_evaluations(study.measure):
        return study
    warning = (
        f"runs have from {numbers[0]} to {numbers[-1]} evaluations, and {study.measure} is of all"
        " of them: those with more look better or worse by that"
    )
    return replace(study, warnings=(*study.warnings, warning))


_DEFAULTS = defaults_of_flags(RLArgs)


def _argument(run: Run, name: str) -> Any:
    """The value of a run's argument; the default where the argument is newer than the run."""
    return run.args.get(name, _DEFAULTS.get(name))


def _meaning(name: str, value: Any) -> Any:
    """The value of an argument, None for an empty one. 0 is not empty where the argument's default
    is None: that stands for the value of another argument."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and name in _DEFAULTS and _DEFAULTS[name] is None:
        return float(value)
    return value or None


def _differing_arguments(runs: Sequence[Run]) -> list[str]:
    """The names, sorted, of the arguments that may change a result and that have several values
    among the runs. Empty values such as "", 0, False and None count as the same one, but for
    arguments whose None means another value than 0 (--eval_temperature)."""
    names: set[str] = set()
    for run in runs:
        names.update(run.args)
    differing = []
    for name in sorted(names - (BOOKKEEPING - {"target_accuracy"})):
        values = {json.dumps(_meaning(name, _argument(run, name))) for run in runs}
        if len(values) > 1:
            differing.append(name)
    return differing


def _early_ends(runs: Sequence[Run]) -> tuple[str, ...]:
    """A warning where compared runs have --target_accuracy, which no sweep has."""
    stopped = [run.path.name for run in runs if _argument(run, "target_accuracy")]
    if not stopped or len(runs) == 1:
        return ()
    verb = "has" if len(stopped) == 1 else "have"
    return (
        f"{', '.join(stopped)} {verb} --target_accuracy: such a run ends at the first evaluation"
        " that reaches it, also by luck, so that its accuracy is too high and its steps are fewer;"
        " compare runs without it",
    )


def _version_warnings(runs: Sequence[Run]) -> tuple[str, ...]:
    """A warning for each package of which the runs used several versions. A run's `versions` also
    has "python", and "code", the commit of this repository."""
    packages: set[str] = set()
    for run in runs:
        packages.update(run.versions)
    warnings = []
    for package in sorted(packages):
        versions = sorted({run.versions.get(package, "none") for run in runs})
        if len(versions) > 1:
            warnings.append(f"the runs differ in {package}: {', '.join(versions)}")
    return tuple(warnings)


# The entries that every sweep.json has, and their types.
_SWEEP_TYPES = {
    "arms": dict,
    "seeds": list,
    "command": list,
    "warnings": list,
    "tie": float,
    "alpha": float,
    "hold": str,
    "tuned": list,
    "measure": str,
}


def _read_sweep(folder: Path) -> Study:
    """The study of a sweep's folder. Raises `UserError` where sweep.json is damaged."""
    sweep = _read_settings(folder)
    args_of_arms: dict[str, dict[str, Any]] = sweep["arms"]
    arms: dict[str, dict[int, Run]] = {arm: {} for arm in args_of_arms}
    expected: set[tuple[str, int]] = set()
    for seed in sweep["seeds"]:
        if type(seed) is int:
            expected |= {(arm, seed) for arm in arms}
    for path, arm, seed in run_folders(folder):
        if arm not in arms:
            continue
        # Seeds that --until_decided added are not in sweep.json.
        expected.add((arm, seed))
        if (path / "args.json").exists():
            run = read_run(path)
            if run.finished:
                arms[arm][seed] = run
    missing = [f"{arm}_seed{seed}" for arm, seed in sorted(expected) if seed not in arms[arm]]
    reported = reported_seeds(sweep, folder / "sweep.json")
    is_finished = not missing
    if REPORTED in sweep:  # which older files lack
        # Runs that have failed stay missing, and --until_decided may add seeds until the report.
        is_finished = max(reported, default=0) >= len(sweep["seeds"])
    runs: list[Run] = []
    for by_seed in arms.values():
        runs += by_seed.values()
    tuning = read_tuning(folder)
    edge_warnings: list[str] = []
    if tuning is not None:
        edge_warnings = tuning.edge_warnings()
    # A recorded command begins with the Python interpreter. That of a sweep lacks it.
    command = shell_command(["", *map(str, sweep["command"])])
    return Study(
        _in_order_of_seeds(arms),
        varied_values(args_of_arms, sweep["tuned"]),
        tuple(missing),
        tie=sweep["tie"],
        hold=sweep["hold"],
        warnings=(*map(str, sweep["warnings"]), *edge_warnings, *_version_warnings(runs)),
        command=command,
        alpha=sweep["alpha"],
        match=sweep["match"],
        tuning=tuning,
        measure=sweep["measure"],
        is_finished=is_finished,
        reported=tuple(reported),
        design=fixed_facts(sweep) | {"seeds": sorted(map(str, sweep["seeds"]))},
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """The content of sweep.json. Raises `UserError` where an entry is missing or of another
    type."""
    newer = {"match": "steps", "tuned": [], "measure": "accuracy"}  # entries that older files lack
    settings: dict[str, Any] = newer | read_json(folder / "sweep.json")
    is_typed = all(isinstance(settings.get(key), kind) for key, kind in _SWEEP_TYPES.items())
    arms = settings.get("arms")
    has_arms = isinstance(arms, dict) and arms and all(isinstance(a, dict) for a in arms.values())
    # A damaged "match" may be unhashable, which a look-up in a dict would not take.
    if not is_typed or not has_arms or settings["match"] not in tuple(AMOUNTS):
        raise UserError(f"{folder / 'sweep.json'} is damaged: it needs {', '.join(_SWEEP_TYPES)}")
    read_measure(settings["measure"])
    return settings


def shell_command(command: Sequence[str]) -> str:
    """A recorded command, [interpreter, script, arguments...], as a user would type it: `uv run -m
    alignment.SCRIPT ...`. It drops --resume, which `sweep` adds when it restarts a run."""
    words = [word for word in command if word != "--resume"]
    if len(words) > 1 and words[1].endswith(".py"):
        words = ["uv", "run", "-m", f"alignment.{Path(words[1]).stem}", *words[2:]]
    return shlex.join(words)
