"""A task with many right answers: name an even number between two others."""

from alignment.core.records import Problem
from alignment.data.tasks import Task

LOWS = range(1, 61)


def problems(split, dataset_path):
    """Every tenth problem is a test problem."""
    return [problem(low) for low in LOWS if (low % 10 == 0) == (split == "test")]


def problem(low):
    # The command fills in `prompt`, by the task's template or --prompt.
    return Problem(
        f"evens/{low}",
        f"Name an even number above {low} and below {low + 9}.",
        "",
        f"{low} {low + 9}",
    )


def demonstrations(split, dataset_path, seed):
    """What SFT learns from: the smallest answer, worked out."""
    return [(p, solution(int(p.ground_truth.split()[0]))) for p in problems(split, dataset_path)]


def solution(low):
    answer = low + 2 - low % 2
    return f" {answer} = 2 * {answer // 2} </think> <answer> {answer} </answer>"


task = Task(
    "evens", problems, demonstrations, prompt="tiny", rules=("my_package.evens_rule:even_between",)
)
