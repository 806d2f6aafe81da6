"""What a sweep does when a run ends badly."""

import dataclasses
import io
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from alignment.ablation import schedule
from alignment.ablation.schedule import LOST, State, is_done, print_started, progress_words, settle
from alignment.args import RLArgs, SFTArgs, from_preset, parse
from alignment.builders.warm_start import warm_start_args


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A function that notes the end of a run with this exit code and log; returns its state, what
    is printed, and whether it is started again."""
    again = []
    monkeypatch.setattr(schedule, "submit", lambda design, executor, state: again.append(state))

    def run(code: int, log: str | None, attempts: int = 1) -> tuple[State, str, bool]:
        again.clear()
        (tmp_path / "logs").mkdir(exist_ok=True)
        if log is not None:
            (tmp_path / "logs" / "a_seed0.log").write_text(log)
        state, console = State("a", 0, "running", attempts), Console(file=io.StringIO(), width=500)
        settle(SimpleNamespace(folder=tmp_path), None, state, code, console)
        return state, console.file.getvalue().strip(), bool(again)

    return run


def test_to_ask_whether_a_run_is_done_changes_nothing(tmp_path):
    (tmp_path / "a_seed0").mkdir()
    state = State("a", 0, "running")
    design = SimpleNamespace(folder=tmp_path)
    assert not is_done(design, state)
    (tmp_path / "a_seed0" / "summary.json").write_text("{}")
    assert is_done(design, state) and state == State("a", 0, "running")
    settle(design, None, state, 1, Console(file=io.StringIO()))
    assert state == State("a", 0, "done")


def test_a_log_says_how_far_the_runs_are(tmp_path):
    """One is done, one trains, one waits, one has failed."""
    (tmp_path / "a_seed1").mkdir()
    (tmp_path / "a_seed1" / "metrics.jsonl").write_text('{"step": 3, "reward": 0.25}\n')
    (tmp_path / "a_seed0").mkdir()
    (tmp_path / "a_seed0" / "evals.jsonl").write_text('{"avg_all_rewards": 0.5}\n')
    statuses = ("done", "running", "running", "failed")
    states = [State("a", seed, status) for seed, status in enumerate(statuses)]
    design = SimpleNamespace(folder=tmp_path, arms={"a": SimpleNamespace(num_steps=8)})
    assert progress_words(design, states) == (
        "1 of 4 runs done, 1 failed; a_seed1: step 3 of 8, reward 0.25"
    )


def test_a_run_that_starts_is_printed_once_with_its_log(tmp_path):
    """One has started, the log of another is an earlier sweep's, a third waits."""
    states = [State("a", seed, "running") for seed in (0, 1, 2)]
    (tmp_path / "logs").mkdir()
    for seed, changed in ((0, 100.0), (1, 90.0)):
        log = tmp_path / "logs" / f"a_seed{seed}.log"
        log.write_text("")
        os.utime(log, (changed, changed))
    console = Console(file=io.StringIO(), width=500)
    for _ in range(2):
        print_started(SimpleNamespace(folder=tmp_path), states, 95.0, console)
    assert console.file.getvalue() == f"a_seed0 has started: {tmp_path}/logs/a_seed0.log\n"


def test_a_sweep_makes_the_warm_start_that_a_run_of_its_arm_makes(tmp_path):
    """Of all weights, whatever adapters and seed the arm has."""
    base = str(tmp_path / "sft")
    arm = from_preset(RLArgs, "tiny", sft_base=base, lora_rank=8, lora_alpha=64, seed=3)
    commands = []
    executor = SimpleNamespace(
        submit=lambda name, command: commands.append(command),
        finished=lambda seconds: {"sft": 0},
    )
    design = SimpleNamespace(folder=tmp_path, arms={"a": arm})
    schedule.warm_up(design, executor, "elsewhere", Console(file=io.StringIO()))
    [command] = commands
    module, flags, *_ = command.args
    made_by_run = dataclasses.replace(warm_start_args(arm), output_dir="elsewhere")
    assert module == "alignment.sft" and parse(SFTArgs, flags) == made_by_run
    assert made_by_run.lora_rank == 0


TRACEBACK = "Traceback (most recent call last):\n  File ...\nRuntimeError: a bug of ours\n"


@pytest.mark.parametrize(
    ("code", "log", "reason", "again"),
    [
        (
            2,
            "RL, step 1\nerror: KeyError: 'rare' (/own/loss.py:8)\n",
            "KeyError: 'rare' (/own/loss.py:8)",
            False,
        ),
        (
            2,
            "error: --reward x: there is no such reward\n",
            "--reward x: there is no such reward",
            False,
        ),
        (1, "error: the sampler was lost [cuda:1]\n", "the sampler was lost [cuda:1]", True),
        (1, TRACEBACK, "RuntimeError: a bug of ours", True),
        (-9, "RL, step 3 of 8\n", "RL, step 3 of 8", True),
        (1, "", "it said nothing", True),
    ],
)
def test_the_reason_is_shown_and_what_would_fail_again_is_not_tried_again(
    code, log, reason, again, ended
):
    state, printed, tried_again = ended(code, log)
    assert tried_again is again
    assert (state.status, state.note, state.reason) == ("failed", f"exit code {code}", reason)
    assert printed.startswith(
        f"a_seed0: exit code {code}{'; trying again' * again} ("
    ) and printed.endswith(f"): {reason}")
    assert not ended(code, log, attempts=2)[2]


def test_a_machine_that_is_gone_has_no_reason_in_the_log(ended):
    state, printed, again = ended(LOST, "RL, step 3 of 8\n")
    assert (
        again
        and state.reason == ""
        and printed.startswith("a_seed0: its worker or machine is gone; trying again (")
    )
