"""What a run's folder says of its evaluations and steps, as records for Python programs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.runs.metric_names import read_metrics
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl
from alignment.system.nearest import did_you_mean_path


@dataclass(frozen=True)
class Accuracy:
    """One evaluation: the share of right answers to the test problems, in [0, 1], and its 95 %
    interval. `record` is its whole line of evals.jsonl, as docs/files.md describes it."""

    step: int
    """Steps of training before it; of `evaluate`, the number of the evaluation."""
    model: str
    task: str
    value: float
    interval: tuple[float, float]
    format_rate: float
    problems: int
    record: Mapping[str, Any]

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} ({low:.3f} .. {high:.3f}), {self.problems} problems"


@dataclass(frozen=True)
class RunResult:
    """A run of RL or SFT: its folder, its final model's, all evaluations, and a dict for each step,
    a line of metrics.jsonl."""

    path: Path
    model: Path
    accuracies: tuple[Accuracy, ...]
    metrics: list[dict[str, Any]]

    @property
    def accuracy(self) -> Accuracy:
        """The last evaluation."""
        return self.accuracies[-1]

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.metrics)} steps"]
        lines += [f"step {accuracy.step}: {accuracy}" for accuracy in self.accuracies]
        return "\n".join(lines)


@dataclass(frozen=True)
class Difference:
    """The second model's accuracy minus the first one's on the same problems, its 95 % interval,
    and the models."""

    models: tuple[str, str]
    value: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        first, second = self.models
        return f"{second} - {first}: {self.value:+.4f} (95 %: {low:+.4f} .. {high:+.4f})"


@dataclass(frozen=True)
class EvaluationResult:
    """The folder of an evaluation, an accuracy for each model and task, and the difference of two
    models that were compared, else None."""

    path: Path
    accuracies: tuple[Accuracy, ...]
    difference: Difference | None

    @property
    def accuracy(self) -> Accuracy:
        """The last one; where one model was evaluated on one task, the only one."""
        return self.accuracies[-1]

    def __str__(self) -> str:
        lines = [f"{accuracy.model}, {accuracy.task}: {accuracy}" for accuracy in self.accuracies]
        if self.difference is not None:
            lines.append(str(self.difference))
        return "\n".join(lines)


def read_run_result(path: Path) -> RunResult:
    """The result of a run's folder, of RL or SFT, which may still be training. Raises `UserError`
    where it is no run's folder or a file is damaged."""
    args = _read_args(path)
    model = path / "final"
    # SFT saves its model in the run's folder itself
    if (path / "config.json").exists():
        model = path
    metrics = read_metrics(path / "metrics.jsonl")
    return RunResult(path, model, _read_accuracies(path, str(model), args), metrics)


def read_evaluation_result(path: Path) -> EvaluationResult:
    """The result of an evaluation's folder. Raises `UserError` as `read_run_result`."""
    args = _read_args(path)
    accuracies = _read_accuracies(path, args.get("model", ""), args)
    difference = None
    if args.get("compare"):
        summary = read_json(path / "summary.json")
        first, second = summary["compare"]
        low, high = summary["interval"]
        difference = Difference((first, second), summary["difference"], (low, high))
    return EvaluationResult(path, accuracies, difference)


def _read_args(path: Path) -> Mapping[str, Any]:
    """The arguments of args.json. Raises `UserError` where there are none."""
    file = path / "args.json"
    if not file.is_file():
        nearest = did_you_mean_path(path)
        raise UserError(f"{path} is no run's folder: it has no args.json{nearest}")
    args = read_json(file).get("args")
    if not isinstance(args, dict):
        raise UserError(f"{file} is damaged: it has no args")
    return args


def _read_accuracies(path: Path, model: str, args: Mapping[str, Any]) -> tuple[Accuracy, ...]:
    """The evaluations of evals.jsonl; a line that names no model or task is of these."""
    file = path / "evals.jsonl"
    accuracies: list[Accuracy] = []
    for record in read_jsonl(file, require_steps=True):
        try:
            accuracies.append(_accuracy(record, model, str(args.get("task", ""))))
        except KeyError as error:
            raise UserError(f"{file} is damaged: step {record['step']} has no {error}") from None
    return tuple(accuracies)


def _accuracy(record: Mapping[str, Any], model: str, task: str) -> Accuracy:
    """A line of evals.jsonl, which is of this model and task where it names none."""
    low, high = record["avg_all_rewards_ci"]
    return Accuracy(
        step=record["step"],
        model=record.get("model", model),
        task=record.get("task", task),
        value=record["avg_all_rewards"],
        interval=(low, high),
        format_rate=record["avg_format_rewards"],
        problems=record["problems"],
        record=record,
    )
