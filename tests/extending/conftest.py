"""A user's own package, `my_package`, is beside this file; the runs that use it have two steps."""

import sys
from pathlib import Path

import pytest

from alignment import sweep, train_rl
from alignment.ablation import schedule
from alignment.args import RLArgs, parse
from alignment.builders.checks import check_rl
from alignment.rollouts.source import AheadRollouts, SyncRollouts
from alignment.system.errors import RunStopped
from alignment.system.terminal import make_console
from tests.command_line import train_here
from tests.files import digest

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def my_package_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")


@pytest.fixture
def rl_flags(tiny_folder, tmp_path):
    """The flags of a run of two steps, of two updates each, in the folder `tmp_path`."""
    return [
        "--sft_base",
        str(tiny_folder),
        "--output_dir",
        str(tmp_path),
        "--num_steps",
        "2",
        "--save_interval",
        "1",
        "--prompts_per_rollout",
        "4",
        "--group_size",
        "4",
        "--train_mini_batch_size",
        "8",
        "--max_new_tokens",
        "16",
        "--max_problems",
        "4",
        "--num_problems",
        "64",  # of 23,677, all of which every start would encode
        "--warmup_steps",
        "0",
        "--reward",
        "random",
    ]


@pytest.fixture
def train(rl_flags, monkeypatch, undrawn_curve):
    """Runs train_rl with further flags; returns its folder."""

    def training(*flags: str) -> Path:
        argv = [*rl_flags, *flags]
        monkeypatch.setattr(sys, "argv", ["alignment.train_rl", *argv])
        args = parse(RLArgs, argv)
        check_rl(args)
        return train_rl.train(args, make_console())

    return training


@pytest.fixture
def train_in_two_parts(train, monkeypatch):
    """As `train`, but stopped after the first step, and resumed."""

    def training(*flags: str) -> Path:
        def failing(sample):
            def fail_at_the_second(self, step: int):
                if step == 2:
                    raise RunStopped("as if the sampler were lost")
                return sample(self, step)

            return fail_at_the_second

        with monkeypatch.context() as patched, pytest.raises(RunStopped):
            for kind in (SyncRollouts, AheadRollouts):
                patched.setattr(kind, "next", failing(kind.next))
            train(*flags)
        return train(*flags, "--resume")

    return training


@pytest.fixture
def weights():
    """A function that gives a hash of a run's final weights."""
    return lambda run: digest(run / "final" / "model.safetensors")


@pytest.fixture
def sweep_in_this_process(rl_flags, monkeypatch, tmp_path, undrawn_curve):
    """Runs the command `alignment.sweep` with further flags, whose runs it trains in this process;
    returns its folder."""

    def sweeping(*flags: str) -> Path:
        monkeypatch.setattr(schedule, "start_command", train_here)
        monkeypatch.setattr(schedule, "find_spec", lambda name: None)  # Without Ray.
        words = [*rl_flags, "--run_name", "swept", *flags]
        monkeypatch.setattr(sys, "argv", ["alignment.sweep", *words])
        sweep.main()
        return tmp_path / "swept"

    return sweeping
