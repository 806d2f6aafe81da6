"""A tracker of the user's own: what it is sent, over a resumed run; and what is refused."""

import csv

import pytest
from my_package_helpers import design_of, refusal_of

from alignment.args import RLArgs, parse
from alignment.builders.checks import check
from alignment.runs.run_folder import RunFolder
from alignment.system.errors import UserError

OWN = "my_package.csv_tracker:open_csv"


def log_steps(folder, first, last, tracker):
    run = RunFolder(folder, first - 1, [tracker])
    for step in range(first, last + 1):
        run.log_step({"step": step, "reward": step / 10, "warnings": []})
    run.close()


def test_it_gets_each_step_once_under_one_id(tmp_path):
    log_steps(tmp_path, 1, 2, OWN)
    log_steps(tmp_path, 2, 3, OWN)  # step 2 is repeated, as after a kill
    rows = list(csv.reader((tmp_path / "numbers.csv").open(newline="")))
    assert [row[1:] for row in rows] == [
        ["1", "reward", "0.1"],
        ["2", "reward", "0.2"],
        ["3", "reward", "0.3"],
    ]
    assert len({run_id for run_id, *_ in rows}) == 1


def test_one_that_starts_anew_is_sent_the_whole_run_again(tmp_path, monkeypatch):
    """Its entry says so, as TensorBoard's does, whose events a resumed run writes anew."""
    source = (
        "from alignment.runs.trackers import Tracker, TrackerKind\nsent = []\n\n\n"
        "def open_sent(folder, run_id, arguments):\n"
        "    sent.clear()\n"
        "    return Tracker(lambda step, numbers, sample: sent.append(step), lambda: None)\n\n\n"
        "entry = TrackerKind(open_sent, starts_anew=True)\n"
    )
    (tmp_path / "anew_tracker.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    log_steps(folder, 1, 2, "anew_tracker:entry")
    log_steps(folder, 3, 3, "anew_tracker:entry")
    import anew_tracker

    assert anew_tracker.sent == [1, 2, 3]


def test_what_cannot_be_imported_is_refused_before_anything_loads():
    assert parse(RLArgs, ["--trackers", OWN, "wandb"]).trackers == (OWN, "wandb")
    assert refusal_of("--trackers", "my_tracker").startswith(
        "--trackers my_tracker: choose one of tensorboard, wandb, trackio, mlflow, or name one of"
        " your own as package.module:name"
    )
    absent = "my_package.no_tracker:open_csv"
    with pytest.raises(UserError, match=f"^--trackers {absent}: cannot be imported .ModuleNotFou"):
        check(parse(RLArgs, ["--trackers", absent]))
    with pytest.raises(UserError, match=f"^--trackers {absent}: cannot be imported"):
        design_of("--trackers", absent)
    with pytest.raises(UserError, match="not a function"):
        check(parse(RLArgs, ["--trackers", "my_package.evens:LOWS"]))


@pytest.mark.slow
def test_a_whole_run_sends_it_its_numbers(train):
    run = train("--trackers", OWN)
    rows = csv.reader((run / "numbers.csv").open(newline=""))
    assert {step for _, step, name, _ in rows if name == "reward"} == {"1", "2"}
