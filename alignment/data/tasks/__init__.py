"""Tasks: where problems and worked solutions come from. `TASKS` names them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from alignment.core.records import Problem
from alignment.data.tasks import arithmetic, countdown, gsm8k
from alignment.system.errors import UserError

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Task:
    """One source of verifiable problems.

    `problems(split, dataset_path)` gives a split's problems, the same every time; those for training may be `Endless`.
    `demonstrations(split, dataset_path, seed)` lists problems of that split with responses to them, for SFT. `prompt` is the
    template that its problems are asked with, `rules` the grading rules that fit, of which the first is what counts.
    """

    name: str
    problems: Callable[[Split, str], Sequence[Problem]]
    demonstrations: Callable[[Split, str, int], list[tuple[Problem, str]]]
    prompt: str
    rules: tuple[str, ...] = ("r1_zero", "r1_zero_strict")
    stop: tuple[str, ...] = ("</answer>",)


TASKS: Mapping[str, Task] = {
    "arithmetic": Task("arithmetic", arithmetic.problems, arithmetic.demonstrations, "tiny"),
    "gsm8k": Task("gsm8k", gsm8k.problems, gsm8k.demonstrations, "r1_zero"),
    "countdown": Task("countdown", countdown.problems, countdown.demonstrations, "countdown_en", ("countdown",)),
    "countdown_small": Task(
        "countdown_small", countdown.small_problems, countdown.small_demonstrations, "tiny", ("countdown",)
    ),
}


def find_task(name: str) -> Task:
    """The task of that name. Raises `UserError` for any other."""
    if name not in TASKS:
        raise UserError(f"--task {name}: there is no such task; choose one of {', '.join(TASKS)}")
    return TASKS[name]
