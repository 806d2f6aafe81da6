"""The evaluations of a command by name, each with the arguments that it is made by."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from alignment.args import Args, EvaluateArgs, RLArgs, SFTArgs
from alignment.data.tasks import TASKS, DataConfig, refuse_bare_path
from alignment.evaluation import benchmarks
from alignment.system.errors import UserError
from alignment.system.registry import find

AnyArgs = TypeVar("AnyArgs", bound=Args)
TrainingArgs = TypeVar("TrainingArgs", bound=RLArgs | SFTArgs)
OWN_ROWS = ("file:", "hf:")
GREEDY = "greedy"


def task_arguments(args: AnyArgs, names: Sequence[str]) -> dict[str, AnyArgs]:
    """The arguments of an evaluation on each task of --eval_tasks. Raises `UserError` for an
    unknown task, and where it cannot be told which of them --test_split is of."""
    _check_owner_of_test_split(args, names)
    has_own_rows = any(name.startswith(OWN_ROWS) for name in (args.task, *names))
    tasks: dict[str, AnyArgs] = {}
    for name in names:
        changes = {}
        if args.task.startswith(OWN_ROWS) and name != args.task:
            changes["test_split"] = ""
        path = name
        if not name.startswith(OWN_ROWS):
            known = {**benchmarks.BENCHMARKS, **TASKS}
            if name not in known:
                refuse_bare_path("--eval_tasks", name)
            find("--eval_tasks", name, known)
            if has_own_rows:
                # The columns that are named are those of the user's own rows.
                changes = vars(DataConfig())
        if name in benchmarks.BENCHMARKS:
            path = f"{benchmarks.__name__}:{name}"
        tasks[name] = dataclasses.replace(args, task=path, eval_tasks=(), **changes)
    return tasks


def _check_owner_of_test_split(args: Args, names: Sequence[str]) -> None:
    """Raise `UserError` where --test_split could be that of several tasks. It is that of --task,
    where this names rows of the user's own, else that of the only one of `names` which does."""
    if not args.test_split or args.task.startswith(OWN_ROWS):
        return
    owners = [name for name in dict.fromkeys(names) if name.startswith(OWN_ROWS)]
    if len(owners) > 1:
        raise UserError(
            f"--test_split {args.test_split}: --eval_tasks {' '.join(owners)} are several, and it"
            " is the test split of one: evaluate them one at a time"
        )


def greedy_arguments(args: AnyArgs) -> AnyArgs:
    """The arguments of the evaluation by one greedy response a problem."""
    samples = "num_samples" if isinstance(args, EvaluateArgs) else "eval_samples"
    return dataclasses.replace(args, eval_temperature=0.0, eval_greedy=False, **{samples: 1})


def with_greedy(tasks: dict[str, AnyArgs], separator: str) -> dict[str, AnyArgs]:
    """The evaluations by name, and with --eval_greedy a greedy one after each."""
    evaluations: dict[str, AnyArgs] = {}
    for name, args in tasks.items():
        evaluations[name] = args
        if args.eval_greedy:
            evaluations[f"{name}{separator}{GREEDY}".strip(separator)] = greedy_arguments(args)
    return evaluations


def held_out_arguments(args: TrainingArgs) -> dict[str, TrainingArgs]:
    """The evaluations during training, by the prefix of their metrics: that of --task, whose prefix
    is "" and which comes first, those of --eval_tasks, and the greedy ones. Raises `UserError` for
    an unknown task."""
    tasks = {"": args}
    for name, task_args in task_arguments(args, args.eval_tasks).items():
        tasks[name.replace(":", ".")] = task_args
    return with_greedy(tasks, "/")
