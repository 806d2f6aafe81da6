"""Trackers: where a run's numbers go besides its own files. Each has the name of its library, which
is imported late."""

import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from alignment.system.files import read_json, write_json

# Sends the numbers of a step and, as HTML, the sample of an evaluation; and closes the run there.
Tracker = tuple[Callable[[int, Mapping[str, float], str], object], Callable[[], object]]


def open_tensorboard(folder: Path, run_id: str, arguments: Mapping[str, object]) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(step: int, numbers: Mapping[str, float], sample: str) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        if sample:
            writer.add_text("eval/sample", sample, step)

    return log, writer.close


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
    return lambda step, numbers, _: run.log({**numbers, "step": step}), run.finish


def open_trackio(folder: Path, run_id: str, arguments: Mapping[str, object]) -> Tracker:
    import trackio

    run = trackio.init(
        "alignment", run_id, resume="allow", config=dict(arguments), embed=False, auto_log_cpu=False
    )
    return lambda step, numbers, _: run.log(dict(numbers), step=step), run.finish


def open_mlflow(folder: Path, run_id: str, arguments: Mapping[str, object]) -> Tracker:
    # its small package lacks the databases that it prefers
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_TRACKING_URI", Path("mlruns").resolve().as_uri())
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "alignment"))
    known = mlflow.search_runs(
        filter_string=f"attributes.run_name = '{run_id}'", output_format="list"
    )
    run = mlflow.start_run(known[0].info.run_id if known else None, run_name=run_id)
    mlflow.log_params({} if known else dict(arguments))

    # pass@4 is pass_4
    def plain(numbers):
        return {re.sub(r"[^/\w.\- :]", "_", key): value for key, value in numbers.items()}

    return (
        lambda step, numbers, _: mlflow.log_metrics(plain(numbers), step, run_id=run.info.run_id),
        mlflow.end_run,
    )


TRACKERS = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
    "mlflow": open_mlflow,
}


class Trackers:
    """The trackers of a run. One that fails is left out, with a warning, until the run is resumed,
    which sends it what it lacks: trackers.json has the run's id in them, and the last step of each
    log that each was sent."""

    def __init__(self, folder: Path, names: Sequence[str], run_name: str):
        self._file, self._open = folder / "trackers.json", {}
        self._sent = (
            read_json(self._file)
            if self._file.exists()
            else {"id": f"{run_name}-{uuid.uuid4().hex[:8]}"}
        )
        arguments = (
            read_json(folder / "args.json")["args"] if (folder / "args.json").exists() else {}
        )
        opened = {
            name: self._attempt(name, TRACKERS[name], folder, self._sent["id"], arguments)
            for name in names
        }
        self._open |= {name: tracker for name, tracker in opened.items() if tracker}

    def log(self, log: str, step: int, numbers: Mapping[str, float], sample: str) -> None:
        """Send each tracker a record of a log, unless it had this step of it before."""
        for name in [name for name in self._open if step > self._sent.get(f"{name} {log}", -1)]:
            if (
                self._attempt(name, self._open[name][0], step, numbers, sample)
                and name != "tensorboard"
            ):
                self._sent[f"{name} {log}"] = step
                write_json(self._file, self._sent)

    def close(self) -> None:
        for name in list(self._open):
            self._attempt(name, self._open[name][1])

    def _attempt(self, name: str, function: Callable, *arguments):
        """What the function returns, or True; None where it fails."""
        try:
            return function(*arguments) or True
        except Exception as error:  # whatever the tracker's library raises
            self._open.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(
                f"warning: --trackers {name} failed, and is left out until the run is resumed:"
                f" {reason}",
                file=sys.stderr,
            )
