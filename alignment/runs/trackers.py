"""Trackers: where a run's numbers go besides its own files. Each of ours has the name of its
library, which is imported late; a user's own is named `package.module:name`."""

# The libraries are extras, which a checkout may lack.
# pyright: reportMissingImports=false

import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from alignment.system.files import read_json, write_json
from alignment.system.registry import find

Numbers = Mapping[str, float]


class Tracker(NamedTuple):
    """A run, as it is open at a tracker."""

    log: Callable[[int, Numbers, str], object]
    """Sends the numbers of a step and, as HTML, a sample of the texts of an evaluation or of a
    step's rollout; "" where there is none."""
    close: Callable[[], object]


OpenTracker = Callable[[Path, str, Mapping[str, object]], Tracker]
"""Opens a run at a tracker, by the run's folder, its id, which a resumed run keeps, and the
arguments of its args.json."""


@dataclass(frozen=True)
class TrackerKind:
    """One kind of tracker, and the facts about it."""

    open: OpenTracker
    starts_anew: bool = False
    """Whether opening deletes what the tracker had of the run, so that a resumed run sends all of
    its steps again; else it sends those that are new."""


def open_tensorboard(folder: Path, run_id: str, arguments: Mapping[str, object]) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(step: int, numbers: Numbers, sample: str) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        if sample:
            is_rollout = any(not key.startswith("eval/") for key in numbers)
            kind = "rollout" if is_rollout else "eval"
            writer.add_text(f"{kind}/sample", sample, step)

    return Tracker(log, writer.close)


def open_wandb(folder: Path, run_id: str, arguments: Mapping[str, object]) -> Tracker:
    import wandb

    project = os.environ.get("WANDB_PROJECT", "alignment")
    run = wandb.init(
        project=project,
        id=run_id,
        resume="allow",
        config=dict(arguments),
        settings={"console": "off"},
    )
    run.define_metric("*", step_metric="step")  # its own step cannot go back

    def log(step: int, numbers: Numbers, sample: str) -> None:
        run.log({**numbers, "step": step})

    return Tracker(log, run.finish)


def open_trackio(folder: Path, run_id: str, arguments: Mapping[str, object]) -> Tracker:
    import trackio

    run = trackio.init(
        "alignment", run_id, resume="allow", config=dict(arguments), embed=False, auto_log_cpu=False
    )

    def log(step: int, numbers: Numbers, sample: str) -> None:
        run.log(dict(numbers), step=step)

    return Tracker(log, run.finish)


def open_mlflow(folder: Path, run_id: str, arguments: Mapping[str, object]) -> Tracker:
    # Its small package lacks the databases that it prefers.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_TRACKING_URI", Path("mlruns").resolve().as_uri())
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "alignment"))
    earlier_runs = mlflow.search_runs(
        filter_string=f"attributes.run_name = '{run_id}'", output_format="list"
    )
    if earlier_runs:
        run = mlflow.start_run(earlier_runs[0].info.run_id, run_name=run_id)
    else:
        run = mlflow.start_run(run_name=run_id)
        mlflow.log_params(dict(arguments))

    def log(step: int, numbers: Numbers, sample: str) -> None:
        # It takes no "@": pass@4 is pass_4 there.
        plain = {re.sub(r"[^/\w.\- :]", "_", key): value for key, value in numbers.items()}
        mlflow.log_metrics(plain, step, run_id=run.info.run_id)

    return Tracker(log, mlflow.end_run)


TRACKERS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(open_tensorboard, starts_anew=True),
    "wandb": TrackerKind(open_wandb),
    "trackio": TrackerKind(open_trackio),
    "mlflow": TrackerKind(open_mlflow),
}
"""--trackers -> its kind."""


def find_tracker(name: str) -> TrackerKind:
    """The kind of tracker that is called `name` in `TRACKERS`, or the user's own that
    `package.module:name` imports: a `TrackerKind`, or a function that opens a tracker. Raises
    `UserError` as `find`."""
    return find("--trackers", name, TRACKERS, wrap=TrackerKind)


class Trackers:
    """The trackers of a run. One that fails is left out, with a warning, until the run is resumed,
    which sends it what it lacks: trackers.json has the run's id in them, and the last step of each
    log that each was sent."""

    def __init__(self, folder: Path, names: Sequence[str], run_name: str):
        self._file = folder / "trackers.json"
        # "id", and the last step of a log that a tracker was sent, by "TRACKER LOG".
        self._sent: dict[str, Any] = {"id": f"{run_name}-{uuid.uuid4().hex[:8]}"}
        if self._file.exists():
            self._sent = read_json(self._file)
        arguments: Mapping[str, object] = {}
        if (folder / "args.json").exists():
            arguments = read_json(folder / "args.json")["args"]
        self._kinds = {name: find_tracker(name) for name in names}
        self._open: dict[str, Tracker] = {}
        for name, kind in self._kinds.items():
            tracker = self._attempt(name, kind.open, folder, self._sent["id"], arguments)
            if tracker is not None:
                self._open[name] = tracker

    def log(self, log: str, step: int, numbers: Numbers, sample: str) -> None:
        """Send each tracker a record of a log, unless it had this step of it before."""
        for name, tracker in list(self._open.items()):
            key = f"{name} {log}"
            if step <= self._sent.get(key, -1):
                continue
            was_sent = self._attempt(name, tracker.log, step, numbers, sample)
            if was_sent and not self._kinds[name].starts_anew:
                self._sent[key] = step
                write_json(self._file, self._sent)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._attempt(name, tracker.close)

    def _attempt(self, name: str, function: Callable, *arguments) -> Any:
        """What the function returns, or True where that is nothing; None where it fails. A tracker
        whose function fails is left out from then on."""
        try:
            return function(*arguments) or True
        except Exception as error:  # whatever the tracker's library raises
            self._open.pop(name, None)
            one_line = " ".join(f"{type(error).__name__}: {error}".split())
            reason = one_line[:300]
            print(
                f"warning: --trackers {name} failed, and is left out until the run is resumed:"
                f" {reason}",
                file=sys.stderr,
            )
