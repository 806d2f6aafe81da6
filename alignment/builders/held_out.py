"""The evaluations of a command by name, each with the arguments that it is made by."""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from alignment.args import Args, EvaluateArgs, RLArgs, SFTArgs
from alignment.data.tasks import TASKS, DataConfig
from alignment.evaluation import benchmarks
from alignment.system.registry import find

AnyArgs = TypeVar("AnyArgs", bound=Args)
TrainingArgs = TypeVar("TrainingArgs", bound=RLArgs | SFTArgs)
OWN_ROWS = ("file:", "hf:")
GREEDY = "greedy"


def task_arguments(args: AnyArgs, names: Sequence[str]) -> dict[str, AnyArgs]:
    """The arguments of an evaluation on each task of --eval_tasks. Raises `UserError` for an
    unknown task."""
    tasks: dict[str, AnyArgs] = {}
    for name in names:
        changes = {}
        path = name
        if not name.startswith(OWN_ROWS):
            find("--eval_tasks", name, {**benchmarks.BENCHMARKS, **TASKS})
            if args.task.startswith(OWN_ROWS):
                # The columns and the test split that are named are those of --task.
                changes = vars(DataConfig())
        if name in benchmarks.BENCHMARKS:
            path = f"{benchmarks.__name__}:{name}"
        tasks[name] = dataclasses.replace(args, task=path, eval_tasks=(), **changes)
    return tasks


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
