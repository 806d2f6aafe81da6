"""Tasks: where problems and worked solutions come from. `TASKS` names them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from alignment.errors import UserError
from alignment.records import Problem
from alignment.tasks import arithmetic, gsm8k

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Task:
    """One source of verifiable problems.

    `problems(split, dataset_path)` lists a split's problems, the same list every time. `demonstrations(dataset_path,
    split, seed)` lists (prompt, response) pairs for SFT, made from problems of that split only.
    """

    name: str
    problems: Callable[[Split, str], list[Problem]]
    demonstrations: Callable[[Split, str, int], list[tuple[str, str]]]
    stop: tuple[str, ...] = ("</answer>",)


TASKS: Mapping[str, Task] = {
    "arithmetic": Task("arithmetic", arithmetic.problems, arithmetic.demonstrations),
    "gsm8k": Task("gsm8k", gsm8k.problems, gsm8k.demonstrations),
}


def find_task(name: str) -> Task:
    """The task of that name. Raises `UserError` for any other."""
    if name not in TASKS:
        raise UserError(f"--task {name}: there is no such task; choose one of {', '.join(TASKS)}")
    return TASKS[name]
