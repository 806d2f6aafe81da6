"""What a Python program calls: `from alignment import RLArgs, train`.

A function checks its arguments as its command does, raises `UserError` where the command prints a
line and exits, prints what the command prints, and returns a record. docs/python.md shows them."""

import signal
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from alignment.args import Args, EvaluateArgs, Match, ReportArgs, RLArgs, SFTArgs, command_line
from alignment.builders.checks import check_rl, check_sft
from alignment.config.command_line import args_of_run
from alignment.config.presets import preset_names
from alignment.data.tasks import countdown, own_data
from alignment.evaluate import check_evaluation, evaluate_and_report
from alignment.evaluation import benchmarks
from alignment.rewards.users import close_functions
from alignment.runs.results import (
    Accuracy,
    Difference,
    EvaluationResult,
    RunResult,
    read_evaluation_result,
    read_run_result,
)
from alignment.sft import fine_tune
from alignment.system.command import calling
from alignment.system.errors import RunStopped, UserError, error_for_user, signal_behind
from alignment.system.signals import Interrupted, deliver_signals, interruptible_call
from alignment.system.terminal import make_program_console, say_once
from alignment.system.torchrun import PROCESSES
from alignment.train_rl import train as train_by_rl

if TYPE_CHECKING:
    from alignment.ablation.statistics import Comparison  # these modules load scipy
    from alignment.ablation.summary import Verdicts

__all__ = [
    "Accuracy",
    "Comparison",
    "Difference",
    "EvaluateArgs",
    "EvaluationResult",
    "RLArgs",
    "RunResult",
    "RunStopped",
    "SFTArgs",
    "UserError",
    "Verdicts",
    "args_of_run",
    "compare",
    "evaluate",
    "preset_names",
    "read_run",
    "train",
    "train_sft",
]

Checked = TypeVar("Checked")


def __getattr__(name: str) -> object:
    """The records of verdicts, whose modules load scipy."""
    if name == "Verdicts":
        from alignment.ablation.summary import Verdicts

        return Verdicts
    if name == "Comparison":
        from alignment.ablation.statistics import Comparison

        return Comparison
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def train(args: RLArgs) -> RunResult:
    """Train by reinforcement learning, as `alignment.train_rl`, and return the finished run.

    Raises `UserError` for arguments that cannot work, mostly before torch loads; `RunStopped` where
    the run cannot go on; KeyboardInterrupt at Ctrl-C, once a checkpoint is saved. After both of
    these `train(args_of_run(RLArgs, FOLDER))` goes on."""
    _refuse_other_class(args, RLArgs)

    def check(console: Console) -> None:
        check_rl(args)

    def work(checked: None, console: Console) -> Path:
        return train_by_rl(args, console)

    return read_run_result(_carry_out("train_rl", args, check, work))


def train_sft(args: SFTArgs) -> RunResult:
    """Fine-tune on worked solutions, as `alignment.sft`, and return the run, whose folder and model
    are --sft_base. Raises as `train`; an unfinished run of the same arguments goes on."""
    _refuse_other_class(args, SFTArgs)

    def check(console: Console):
        return check_sft(args)

    def work(demonstrations, console: Console) -> Path:
        return fine_tune(args, demonstrations, console)

    return read_run_result(_carry_out("sft", args, check, work))


def evaluate(args: EvaluateArgs) -> EvaluationResult:
    """Evaluate models on their tasks' test problems, as `alignment.evaluate`. Raises as `train`;
    what was evaluated until Ctrl-C is printed, and in the folder that is named last."""
    _refuse_other_class(args, EvaluateArgs)

    def check(console: Console):
        return check_evaluation(args, console)

    def work(checked, console: Console) -> Path:
        return evaluate_and_report(args, checked, console)

    return read_evaluation_result(_carry_out("evaluate", args, check, work))


def read_run(folder: str | PathLike[str]) -> RunResult:
    """The result of a run that `train`, `train_sft` or a command has made, or is still making.
    Raises `UserError` where the folder is no run's."""
    return read_run_result(Path(folder))


def compare(
    *runs: str | PathLike[str] | RunResult,
    tie: float = ReportArgs.tie,
    match: Match = ReportArgs.match,
) -> "Verdicts":
    """The verdicts of two or more runs of RL, grouped into arms of equal arguments but the seed, or
    of a sweep's folder; printed, they are those of `alignment.report`, and nothing is written.
    Differences of accuracies below `tie` count as equal; with `match` the arms are compared at
    equal samples, tokens or seconds. Raises `UserError` where there is nothing to compare."""
    folders: list[Path] = []
    for run in runs:
        folders.append(run.path if isinstance(run, RunResult) else Path(run))
    if not folders:
        raise UserError("compare: give the runs, or a sweep's folder")
    args = ReportArgs(runs=tuple(map(str, folders)), tie=tie, match=match)
    from alignment.ablation.study import read_study
    from alignment.ablation.summary import verdicts_of

    verdicts = verdicts_of(read_study(folders, args.tie, args.match))
    if not verdicts.tables:
        raise UserError(
            f"compare: nothing to compare in {', '.join(args.runs)}: give finished runs that differ"
            " in more than their seeds"
        )
    return verdicts


def _refuse_other_class(args: object, cls: type[Args]) -> None:
    """Raise `UserError` for arguments that are not of this class."""
    if type(args) is not cls:
        raise UserError(f"{cls.__name__}(...) is wanted here, not {type(args).__name__}")


def _carry_out(
    command: str,
    args: Args,
    check: Callable[[Console], Checked],
    work: Callable[[Checked, Console], Path],
) -> Path:
    """Check the arguments, then do the work, and return its folder. Afterwards signals, torch and
    the processes of this program are as they were."""
    if PROCESSES:
        raise UserError(f"torchrun starts commands: `torchrun ... -m alignment.{command}`")
    if vars(args).get("preview"):
        raise UserError("--preview: is for the command line; here it is 0")
    with calling(command, command_line(args)), interruptible_call():
        try:
            # an earlier call may have said it, or have read files that are others now
            say_once.cache_clear()
            for reader in (own_data, countdown, benchmarks):
                reader.forget_rows()
            console = make_program_console()
            checked = check(console)
            folder = _compute(checked, console, work)
            deliver_signals()  # in case the work caught the exception of a signal
            return folder
        except (Interrupted, SystemExit, Exception) as error:
            stop = signal_behind(error)
            mistake = error_for_user(error)
            if stop is None and mistake is None:
                raise
        finally:
            close_functions()
    # here the program's own handlers of signals are back
    if stop is not None:
        _pass_on(stop)
    assert mistake is not None
    # without our own lines, which the user cannot correct
    raise mistake.with_traceback(None) from mistake.__cause__


def _compute(checked: Checked, console: Console, work: Callable[[Checked, Console], Path]) -> Path:
    """Do the work, and then end its processes and give back its memory."""
    from alignment.model.torch_state import kept_torch_state
    from alignment.system.device_memory import release_memory
    from alignment.system.ranks import close_ranks

    with kept_torch_state():
        try:
            return work(checked, console)
        finally:
            close_ranks()
            release_memory()


def _pass_on(stop: Interrupted) -> None:
    """Give a signal to the program as if we had not been there. Raises KeyboardInterrupt for
    Ctrl-C, and `RunStopped` where the program's own handler of SIGTERM does not end it."""
    if stop.signum == signal.SIGINT:
        raise KeyboardInterrupt(str(stop)) from None
    signal.raise_signal(stop.signum)
    raise RunStopped(f"stopped by {stop}") from None
