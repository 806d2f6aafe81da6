"""The problems that a run trains and is tested on, read before a model is loaded."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignment.args import RLArgs
from alignment.builders.held_out import GREEDY
from alignment.config.data import ALL_PASS_RATES
from alignment.core.records import Endless, Problem, Problems
from alignment.data.pass_rates import PassRates, problems_in_band, read_band, read_pass_rates
from alignment.data.questions import number_shared
from alignment.data.tasks import Task, try_rows
from alignment.system.errors import UserError

COMPARED_ENDLESS = 512  # Problems without end that are compared with those of the test split.


def check_test_split(task: Task, dataset_path: str, max_problems: int) -> list[Problem]:
    """The first `max_problems` (0: all) distinct test questions. Prints how many repeat. Raises
    `UserError` for bad data."""
    try_rows(task, "problems", "test", dataset_path)
    number = len(task.test_split(dataset_path))
    problems = task.test_problems(dataset_path)
    if len(problems) < number:
        repeated = f"{number - len(problems)} of {number} questions twice or more"
        print(f"the test split has {repeated}: each is asked once", file=sys.stderr)
    return problems[: max_problems or None]


def check_training_split(task: Task, dataset_path: str, sft_share: float = 0.0) -> Problems:
    """The training problems that ask what no test problem asks, without those of SFT's share;
    prints how many are left out. Raises `UserError` for none or bad data."""
    try_rows(task, "problems", "train", dataset_path)
    problems = task.problems("train", dataset_path)
    kept = task.training_problems(dataset_path)
    if not isinstance(problems, Endless) and not isinstance(kept, Endless):
        print_left_out(len(problems), len(kept), "training problems")
    if not sft_share:
        return kept
    of_rl = task.training_problems(dataset_path, sft_share)
    if not isinstance(of_rl, Endless) and not isinstance(kept, Endless):
        line = f"--sft_share {sft_share:g}: RL trains on {len(of_rl)} of {len(kept)} problems"
        if not of_rl:
            raise UserError(f"{line}; give a smaller share")
        print(f"{line}, and leaves the others to SFT", file=sys.stderr)
    return of_rl


def check_pass_rates(args: RLArgs, problems: Problems) -> Problems:
    """Those of a task's training problems that --pass_rate_band keeps; prints how many they are,
    and where the file is of another task or model. Raises `UserError` for a file that is not there
    or damaged, and where no problem is kept."""
    if not args.pass_rates:
        if args.pass_rate_band != ALL_PASS_RATES:
            raise UserError(
                f"--pass_rate_band {args.pass_rate_band}: needs --pass_rates FILE, which"
                " `rejection_sample` and `evaluate` write with several samples a problem"
            )
        return problems
    band = read_band(args.pass_rate_band)
    assert band is not None  # The arguments are checked when they are made.
    rates = read_pass_rates(args.pass_rates)
    selection = problems_in_band(problems, rates, band)
    _print_other_source(args, rates)
    number = len(selection.kept) + len(selection.outside) + selection.unmeasured
    left_out = []
    if selection.outside:
        least = min(selection.outside)
        most = max(selection.outside)
        left_out.append(f"{len(selection.outside)} have other rates, {least:.2f} .. {most:.2f}")
    if selection.unmeasured:
        left_out.append(f"{selection.unmeasured} are not in {args.pass_rates}")
    kept = len(selection.kept) or "none"
    reasons = "".join(f"; {reason}" for reason in left_out)
    line = f"--pass_rate_band {args.pass_rate_band} keeps {kept} of {number} training problems"
    if not selection.kept:
        raise UserError(f"{line}{reasons}: choose another band, or measure this --task's problems")
    print(f"{line}{reasons}", file=sys.stderr)
    return selection.kept


def _print_other_source(args: RLArgs, rates: PassRates) -> None:
    """Print where pass rates were measured on another task, or of another model than the run starts
    from."""
    start = args.sft_base or args.model
    if rates.tasks and args.task not in rates.tasks:
        print(
            f"--pass_rates {args.pass_rates}: measured on --task {', '.join(rates.tasks)}, and this"
            f" run's is {args.task}",
            file=sys.stderr,
        )
    if rates.model and Path(rates.model) != Path(start):
        print(
            f"--pass_rates {args.pass_rates}: measured of {rates.model}, and this run starts from"
            f" {start}",
            file=sys.stderr,
        )


def print_left_out(number: int, kept: int, noun: str) -> None:
    """Print how many of `number` rows are left out because a test problem asks the same. Raises
    `UserError` where none is kept."""
    if not number:
        raise UserError(f"the task's data hold no {noun}")
    if not kept:
        raise UserError(
            f"every one of {number} {noun} asks what a test problem asks: none is left to train on"
        )
    if kept < number:
        print(
            f"{number - kept} of {number} {noun} ask what a test problem asks: they are left out",
            file=sys.stderr,
        )


def print_shared_questions(
    problems: Problems, held_out: Mapping[str, Sequence[Problem]], noun: str
) -> None:
    """Print how many of the problems to train on ask what a test problem of --eval_tasks asks.
    `Endless` ones cannot be compared."""
    if isinstance(problems, Endless):
        return
    for prefix, test_problems in held_out.items():
        # Greedy evaluations are of the same problems.
        if prefix.rpartition("/")[2] == GREEDY:
            continue
        number = number_shared(problems, test_problems)
        if number:
            print(
                f"{number} of {len(problems)} {noun} ask what a test problem of --eval_tasks"
                f" {prefix} asks: they are trained on, so its accuracy is not of unseen questions",
                file=sys.stderr,
            )


def trained_test_questions(problems: Problems, tested: Sequence[Problem]) -> str:
    """Why a run's evaluations do not ask unseen questions: how many of the problems to train on ask
    what they ask; "" where none does. Of `Endless` problems the first ones are compared."""
    compared: Sequence[Problem]
    if isinstance(problems, Endless):
        compared = [problems[index] for index in range(COMPARED_ENDLESS)]
    else:
        compared = problems
    number = number_shared(compared, tested)
    if not number:
        return ""
    return (
        f"{number} of {len(compared)} training problems ask what a test problem asks: are"
        " evaluations on the training split, or was the test split not left out?"
    )
