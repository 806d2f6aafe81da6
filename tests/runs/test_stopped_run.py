"""The last line that a signal leaves is the command that goes on, where there is a checkpoint."""

import os
import signal
from contextlib import nullcontext

import pytest
from rich.console import Console

from alignment.args import RLArgs
from alignment.builders.checks import run_config
from alignment.runs.run import open_run
from alignment.runs.run_folder import checkpoint_folder, refuse_lost_checkpoints, write_args
from alignment.system.errors import UserError, run_command
from alignment.system.manifests import write_manifest


@pytest.fixture
def stopped(tmp_path, capsys):
    """A function that resumes a run, whose last checkpoint is of a step, and sends SIGINT before
    anything is loaded; returns the lines of stdout and stderr."""

    def stop(step: int) -> tuple[list[str], list[str]]:
        args = RLArgs(sft_base="", output_dir=str(tmp_path), run_name="mine", resume=True)
        config = run_config(args)
        (tmp_path / "mine").mkdir(exist_ok=True)
        write_args(tmp_path / "mine", config.arguments, config.seeds, config.automatic)
        if step:
            checkpoint = checkpoint_folder(tmp_path / "mine", step)
            checkpoint.mkdir()
            with write_manifest(checkpoint):
                (checkpoint / "weights").write_text("")

        def main() -> None:
            with open_run(config, Console(width=300)):
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(SystemExit) as ended:
            run_command(main)
        assert ended.value.code == 130
        printed = capsys.readouterr()
        return printed.out.splitlines(), printed.err.splitlines()

    return stop


def test_a_resumed_run_that_is_stopped_before_its_first_step(stopped, tmp_path):
    out, errors = stopped(2)
    assert out == [
        f"going on after step 2, in {tmp_path}/mine",
        "stopped after step 2 (SIGINT); go on with: uv run -m alignment.train_rl --resume"
        f" {tmp_path}/mine",
    ]
    assert errors == []


def test_without_a_checkpoint_the_signal_alone_is_said(stopped):
    _, errors = stopped(0)
    assert errors == ["interrupted by SIGINT"]


def test_a_finished_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path):
    args = RLArgs(sft_base="", output_dir=str(tmp_path), run_name="mine", resume=True)
    config = run_config(args)
    run = tmp_path / "mine"
    (run / "final").mkdir(parents=True)
    write_args(run, config.arguments, config.seeds, config.automatic)
    (run / "summary.json").write_text('{"steps": 30}')
    (run / "metrics.jsonl").write_text('{"step": 30}\n')
    with (
        pytest.raises(UserError, match=r"30 steps, but its checkpoints are gone .*mine/final\)"),
        open_run(config, Console(width=300)),
    ):
        pass
    assert (run / "summary.json").exists() and (run / "final").exists()
    assert (run / "metrics.jsonl").read_text() == '{"step": 30}\n'


@pytest.mark.parametrize(("steps", "is_lost"), [(20, False), (21, True)])
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path, steps, is_lost):
    write_args(tmp_path, {"save_interval": 20}, {})
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {steps}}}\n')
    refused = pytest.raises(UserError, match=f"has done {steps} steps")
    with refused if is_lost else nullcontext():
        refuse_lost_checkpoints(tmp_path)
