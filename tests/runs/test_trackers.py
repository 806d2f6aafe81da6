"""Trackers: the same fields in each, one run from its first step to its last, and no say in the
run."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alignment.args import CHANGEABLE_ON_RESUME, RLArgs, command_line, parse
from alignment.builders import checks
from alignment.core.records import Completion, Group, Problem
from alignment.runs import trackers
from alignment.runs.run_folder import RunFolder
from alignment.runs.trackers import TRACKERS
from alignment.system.errors import UserError

GROUP = Group(
    Problem("a", "<b>q", "", ""),
    (Completion((1,), (2,), (-0.1,), "5", "stop", 0),),
    ({"reward": 1.0},),
)
SAMPLE = "<pre>&lt;b&gt;q\n\n[reward 1]\n5</pre>"


@pytest.fixture
def recorded(monkeypatch):
    """A stand-in for a tracker, which fails where the run's name says so: the ids it is opened
    with, and what it is sent."""
    ids, sent = [], []

    def open_recorded(folder, run_id, arguments):
        ids.append((run_id, arguments))
        if "opening" in run_id:
            raise ConnectionError("no\nroute")

        def log(step, numbers, sample):
            if "logging" in run_id and step == 2 and len(ids) == 1:
                raise OSError(28, "No space left on device")
            sent.append((step, dict(numbers), sample))

        def close():
            if "closing" in run_id:
                raise TimeoutError("late")

        return trackers.Tracker(log, close)

    kind = trackers.TrackerKind(open_recorded)
    monkeypatch.setattr(trackers, "TRACKERS", {**trackers.TRACKERS, "recorded": kind})
    return ids, sent


def train(folder, first: int, last: int, names):
    """Log steps `first` to `last` of a run that goes on after step `first` - 1, and an evaluation
    of the last one."""
    folder.mkdir(exist_ok=True)
    run = RunFolder(folder, first - 1, names)
    if first == 1:
        run.log_eval({"step": 0, "pass@1": 0.5, "avg_all_rewards_ci": [0, 1]}, [GROUP])
    for step in range(first, last + 1):
        run.log_step({"step": step, "reward": step / 10, "kl": None, "warnings": []})
    run.log_eval({"step": last, "pass@1": last / 4}, [GROUP])
    run.close()


def test_a_resumed_run_goes_on_with_its_id_and_sends_no_step_twice(tmp_path, recorded):
    ids, sent = recorded
    (folder := tmp_path / "mine").mkdir()
    (folder / "args.json").write_text('{"args": {"seed": 3}}')
    train(folder, 1, 3, ["recorded"])
    train(folder, 3, 4, ["recorded"])  # step 3 is repeated, as after a kill
    assert ids[0] == ids[1] and ids[0][0].startswith("mine-") and ids[0][1] == {"seed": 3}
    assert sent == [
        (0, {"eval/pass@1": 0.5}, SAMPLE),
        *((step, {"reward": step / 10}, "") for step in (1, 2, 3)),
        (3, {"eval/pass@1": 0.75}, SAMPLE),
        (4, {"reward": 0.4}, ""),
        (4, {"eval/pass@1": 1.0}, SAMPLE),
    ]


def test_a_tracker_that_is_added_later_gets_the_run_from_its_start(tmp_path, recorded):
    train(tmp_path, 1, 2, [])
    assert not (tmp_path / "trackers.json").exists() and not (tmp_path / "tensorboard").exists()
    train(tmp_path, 3, 3, ["recorded"])
    assert sorted(step for step, numbers, _ in recorded[1] if "reward" in numbers) == [1, 2, 3]
    assert [step for step, numbers, _ in recorded[1] if "eval/pass@1" in numbers] == [0, 2, 3]


@pytest.mark.parametrize(
    ("when", "sent"), [("opening", []), ("logging", [1]), ("closing", [1, 2, 3])]
)
def test_a_tracker_that_fails_is_warned_of_once_and_stops_nothing(
    when, sent, tmp_path, recorded, capsys
):
    folder = tmp_path / f"fails at {when}"
    train(folder, 1, 3, ["recorded", "tensorboard"])
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and warnings[0].startswith(
        "warning: --trackers recorded failed, and is left out until"
    )
    assert [step for step, numbers, _ in recorded[1] if "reward" in numbers] == sent
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3]
    if when == "logging":
        train(folder, 4, 4, ["recorded"])  # resumed: what it lacks, it gets
        assert sorted(step for step, numbers, _ in recorded[1] if "reward" in numbers) == [
            1,
            2,
            3,
            4,
        ]


def test_a_tracker_that_is_not_installed_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    train(tmp_path, 1, 2, ["wandb"])
    assert (
        "warning: --trackers wandb failed, and is left out until the run is resumed:"
        " ModuleNotFoundError" in capsys.readouterr().err
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_trackers_get_the_first_texts_of_a_rollout_escaped(tmp_path, recorded):
    """Three responses at most, each with its rewards, below the question that they answer."""
    _, sent = recorded
    responses = ("<i>5</i>", "6", "7", "8")
    completions = tuple(Completion((1,), (2,), (-0.1,), text, "stop", 0) for text in responses)
    score = {"reward": 0.5, "part_format": -1.0}
    group = Group(Problem("a", "1 < 2?", "", ""), completions, (score,) * 4)
    run = RunFolder(tmp_path, 0, ["recorded", "tensorboard"])
    run.log_completions("rollout", 1, [group])
    run.log_step({"step": 1, "reward": 0.5})
    run.close()
    words = "[reward 0.5, part_format -1]"
    text = f"1 &lt; 2?\n\n{words}\n&lt;i&gt;5&lt;/i&gt;\n\n{words}\n6\n\n{words}\n7"
    assert sent == [(1, {"reward": 0.5}, f"<pre>{text}</pre>")]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "rollout/sample/text_summary" in events.Tags()["tensors"]


def test_metrics_do_not_depend_on_trackers(tmp_path, recorded):
    for folder, names in (("none", []), ("several", ["tensorboard", "recorded"])):
        train(tmp_path / folder, 1, 3, names)
    for name in ("metrics.jsonl", "evals.jsonl", "completions/eval_000003.jsonl"):
        assert (tmp_path / "none" / name).read_text() == (tmp_path / "several" / name).read_text()


def test_flags():
    assert parse(RLArgs, []).trackers == ("tensorboard",) and "trackers" in CHANGEABLE_ON_RESUME
    args = parse(RLArgs, ["--trackers"])
    assert args.trackers == () and parse(RLArgs, command_line(args)) == args
    assert parse(RLArgs, ["--trackers", "wandb", "mlflow"]).trackers == ("wandb", "mlflow")
    with pytest.raises(
        UserError, match="--trackers clearml: choose one of tensorboard, wandb, trackio, mlflow"
    ):
        parse(RLArgs, ["--trackers", "clearml"])


# --- the libraries themselves, where they are installed -------------------------------------------


def in_wandb(run_id: str) -> tuple[set[str], dict[str, list[float]]]:
    """The ids of the offline runs, and the distinct values of each field, in their order: some are
    in a summary, too."""
    files = sorted(Path("wandb").glob("offline-run-*/run-*.wandb"))
    data = b"".join(file.read_bytes() for file in files)
    fields = {}
    # in each record a name is followed by the length of the value, and the value
    for name in (
        "reward",
        "eval/pass@1",
    ):
        found = re.findall(rb"\x12.%s\x82\x01(.)(.{4})" % name.encode(), data, re.DOTALL)
        fields[name] = list(dict.fromkeys(float(value[: length[0]]) for length, value in found))
    return {file.stem.removeprefix("run-") for file in files}, fields


def in_trackio(run_id: str) -> tuple[set[str], dict[str, list[float]]]:
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs("alignment")
    logs = [record for run in runs for record in SQLiteStorage.get_logs("alignment", run)]
    return set(runs), {
        name: [log[name] for log in logs if name in log] for name in ("reward", "eval/pass@1")
    }


def in_mlflow(run_id: str) -> tuple[set[str], dict[str, list[float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    runs = client.search_runs([client.get_experiment_by_name("alignment").experiment_id])
    history = {
        name: client.get_metric_history(runs[0].info.run_id, name)
        for name in ("reward", "eval/pass_1")
    }
    fields = {
        name.replace("_1", "@1"): [point.value for point in points]
        for name, points in history.items()
    }
    assert runs[0].info.status == "FINISHED" and runs[0].data.params == {"seed": "3"}
    return {run.info.run_name for run in runs}, fields


READERS = {"wandb": in_wandb, "trackio": in_trackio, "mlflow": in_mlflow}


def use_library(name: str) -> None:
    """Track a run in the working folder that stops and goes on, and find in the library's files
    what was sent."""
    folder = Path("run")
    folder.mkdir()
    (folder / "args.json").write_text('{"args": {"seed": 3}}')
    train(folder, 1, 3, [name])
    time.sleep(1.1)  # W&B names the folder of an offline run by the second
    train(folder, 3, 4, [name])
    run_id = json.loads((folder / "trackers.json").read_text())["id"]
    expected = {run_id}, {"reward": [0.1, 0.2, 0.3, 0.4], "eval/pass@1": [0.5, 0.75, 1.0]}
    deadline = time.monotonic() + 30
    while (found := READERS[name](run_id)) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)  # a process of W&B may still be writing


@pytest.mark.parametrize("name", READERS)
def test_the_library_itself(name, tmp_path):
    """In a process of its own: libraries leave hooks, threads and variables to its end."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    code = f"from tests.runs.test_trackers import use_library; use_library({name!r})"
    # the paths of sockets are limited to some hundred characters
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, **settings, "TMPDIR": short},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "warning: --trackers" not in done.stderr


@pytest.mark.parametrize("name", sorted(set(TRACKERS) - {"tensorboard"}))
def test_a_tracker_whose_library_is_absent_is_refused_before_a_model_loads(name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(checks, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=f"--trackers {name}: {name} is not installed; start with"):
        checks.check_trackers((name,))
