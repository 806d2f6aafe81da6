"""A supervised fine-tuning that is stopped goes on to the bits of an undisturbed one."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from alignment import sft
from alignment.args import RLArgs, from_preset
from alignment.builders.warm_start import prepare_warm_start
from alignment.runs.run import Run
from alignment.system.errors import run_command
from alignment.system.files import read_jsonl
from alignment.system.terminal import make_console
from tests.files import digest

pytestmark = pytest.mark.slow

SMALL = [
    "--num_steps",
    "7",
    "--save_interval",
    "3",
    "--eval_interval",
    "2",
    "--batch_size",
    "8",
    "--warmup_steps",
    "2",
    "--max_problems",
    "4",
]
FINISH = Run.finish_sft_step


class Killed(Exception):
    """Ends a command as SIGKILL would, as nothing handles it."""


def train(monkeypatch, target: Path, *flags: str, before_step: int = 0, action=None) -> int:
    """Run `sft` in this process, with `action` before one of its steps is noted as done; returns
    the exit code."""

    def finish_sft_step(run, record, words):
        if record["step"] == before_step:
            action()
        FINISH(run, record, words)

    folders = ["--output_dir", str(target.parent), "--sft_base", str(target)]
    argv = ["sft", *SMALL, "--demonstrations", str(demonstrations(target.parent)), *folders, *flags]
    with monkeypatch.context() as patched:
        patched.setattr(Run, "finish_sft_step", finish_sft_step)
        patched.setattr(sys, "argv", argv)
        try:
            run_command(sft.main)
        except SystemExit as stop:
            return stop.code
        except Killed:
            return -9
    return 0


def demonstrations(folder: Path) -> Path:
    pairs = ({"prompt": f"{number} + 3 =", "response": f" {number + 3}"} for number in range(60))
    (folder / "shown.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder / "shown.jsonl"


def kill() -> None:
    raise Killed


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train(monkeypatch, folder / "sft") == 0
    return folder / "sft"


@pytest.mark.parametrize(
    ("action", "code", "saved"),
    [(lambda: os.kill(os.getpid(), signal.SIGTERM), 143, 5), (kill, -9, 3)],
    ids=["SIGTERM", "SIGKILL"],
)
def test_a_stopped_sft_resumes_to_the_same_bits(
    action, code, saved, straight, tmp_path, monkeypatch, capsys
):
    """SIGTERM in step 5 saves that step; a kill leaves the checkpoint of step 3, and the run
    repeats steps 4 and 5."""
    target, unfinished = tmp_path / "sft", tmp_path / "sft_unfinished"
    assert train(monkeypatch, target, before_step=5, action=action) == code
    assert not target.exists() and (unfinished / f"step_{saved:06d}").is_dir()
    line = (
        "stopped after step 5 (SIGTERM); go on with: uv run -m alignment.sft --resume"
        f" {unfinished}\n"
    )
    assert (line in capsys.readouterr().out) == (code == 143)
    assert train(monkeypatch, target, "--resume", str(unfinished)) == 0
    assert digest(target / "model.safetensors") == digest(straight / "model.safetensors")
    assert read_jsonl(target / "metrics.jsonl") == read_jsonl(straight / "metrics.jsonl")
    assert not unfinished.exists() and sorted(path.name for path in target.iterdir()) == sorted(
        path.name for path in straight.iterdir()
    )


def test_it_resumes_by_its_flags_and_refuses_others(tmp_path, monkeypatch, capsys):
    target = tmp_path / "sft"
    assert train(monkeypatch, target, "--resume") == 2
    assert f"--resume: there is no run {target}_unfinished" in capsys.readouterr().err
    assert train(monkeypatch, target, before_step=4, action=kill) == -9
    assert train(monkeypatch, target, "--resume", "--learning_rate", "1e-4") == 2
    assert "--learning_rate was 0.005, now 0.0001" in capsys.readouterr().err
    # the learning rate depends on it
    assert train(monkeypatch, target, "--resume", "--num_steps", "9") == 2
    assert "--num_steps was 7, now 9" in capsys.readouterr().err
    assert train(monkeypatch, target, "--eval_interval", "5") == 0  # the same command goes on, too
    assert f"going on after step 3, in {target}_unfinished" in capsys.readouterr().out
    assert (target / "summary.json").exists()


def test_other_demonstrations_start_anew_and_a_name_changes_nothing(
    straight, tmp_path, monkeypatch, capsys
):
    target, first = tmp_path / "sft", demonstrations

    def other(folder):
        return (
            first(folder).rename(folder / "before")
            and (folder / "shown.jsonl").write_text(
                (folder / "before").read_text().replace("+ 3 =", "plus 3 =")
            )
            and folder / "shown.jsonl"
        )

    monkeypatch.setattr(sys.modules[__name__], "demonstrations", other)
    assert train(monkeypatch, target, before_step=4, action=kill) == -9
    monkeypatch.setattr(sys.modules[__name__], "demonstrations", first)
    assert train(monkeypatch, target, "--run_name", "sft") == 0
    assert "going on after" not in capsys.readouterr().out
    assert digest(target / "model.safetensors") == digest(straight / "model.safetensors")


def test_a_second_command_trains_in_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    """It neither waits for the first nor harms it, and the first to end is kept."""
    target = tmp_path / "sft"
    assert train(monkeypatch, target, before_step=3, action=lambda: train(monkeypatch, target)) == 2
    assert "was made by another command meanwhile; that one is kept" in capsys.readouterr().err
    assert (target / "summary.json").exists() and not list(tmp_path.glob("*unfinished*"))


RULE = """
def by_length(response, ground_truth):
    reward = (len(response) % 7) / 7
    return {"reward": reward, "format_reward": 1.0, "answer_reward": reward}
"""


def test_an_sft_that_ends_by_its_accuracy_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """By a rule under which an untrained model's accuracy rises and falls; the weights that are
    kept are those of the best measurement, whose checkpoint outlives the newest. A kill in the last
    step leaves checkpoints of every third step and of the best."""
    (tmp_path / "rule_of_length.py").write_text(RULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("alignment.data.tasks.MOST_HELD_OUT", 16)
    words = "--patience 2 --num_steps 40 --max_new_tokens 12 --eval_rule rule_of_length:by_length"
    straight = tmp_path / "straight"
    stopped = tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
    assert train(monkeypatch, straight / "sft", *words.split()) == 0
    records = read_jsonl(straight / "sft" / "metrics.jsonl")
    measured = {
        record["step"]: record["held_out_accuracy"]
        for record in records
        if "held_out_accuracy" in record
    }
    [evaluation] = read_jsonl(straight / "sft" / "evals.jsonl")
    best = evaluation["step"]
    assert measured[best] == max(measured.values())
    last = max(measured)
    assert last == records[-1]["step"] == best + 4 < 40
    flags = words.split()
    assert train(monkeypatch, stopped / "sft", *flags, before_step=last, action=kill) == -9
    assert train(monkeypatch, stopped / "sft", *flags, "--resume") == 0
    for name in ("model.safetensors", "metrics.jsonl"):
        assert digest(stopped / "sft" / name) == digest(straight / "sft" / name)
    assert not list(stopped.glob("*unfinished*"))


PRESET = """
task = "arithmetic"
model = "tiny"
sampler = "transformers"
dtype = "float32"
max_problems = 4

[sft]
demonstrations = ["shown.jsonl"]
num_steps = 4
batch_size = 8
save_interval = 2

[train_rl]
auto_sft = true
"""


def test_the_warm_up_of_a_run_goes_on_where_it_was_killed(tmp_path, monkeypatch, capsys):
    """Of four steps the third is not noted, so that the second warm-up makes two; the third run
    finds the model."""
    monkeypatch.setattr("alignment.config.presets.PRESETS", tmp_path)
    (tmp_path / "mine.toml").write_text(
        PRESET.replace("shown.jsonl", str(demonstrations(tmp_path)))
    )
    rl = from_preset(
        RLArgs,
        "mine",
        sft_base=str(tmp_path / "sft"),
        output_dir=str(tmp_path),
        run_name="rl",
        seed=5,
    )
    noted = []

    def finish_sft_step(run, record, words):
        noted.append(record["step"])
        if noted == [1, 2, 3]:
            raise Killed
        FINISH(run, record, words)

    monkeypatch.setattr(Run, "finish_sft_step", finish_sft_step)
    with pytest.raises(Killed):
        prepare_warm_start(rl, make_console())
    assert (tmp_path / "sft_unfinished" / "step_000002").is_dir() and not (
        tmp_path / "sft"
    ).exists()
    prepare_warm_start(rl, make_console())
    assert noted == [1, 2, 3, 3, 4] and "going on after step 2" in capsys.readouterr().out
    assert prepare_warm_start(rl, make_console()) == str(tmp_path / "sft")
    assert noted == [1, 2, 3, 3, 4]
    assert not (tmp_path / "sft_unfinished").exists()
