"""Tasks: where problems and worked solutions come from. `TASKS` lists them all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from alignment.core.records import Problem
from alignment.data.tasks import arithmetic, countdown, gsm8k
from alignment.system.registry import find

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Task:
    """One source of verifiable problems.

    `problems(split, dataset_path)` returns the problems of a split, the same ones every time; training problems may be
    `Endless`. `demonstrations(split, dataset_path, seed)` returns (problem, response) pairs of that split, for SFT. `prompt`
    names the prompt template. `rules` name the rules that can grade a response, each one of `RULES` or a function of the
    user's own, package.module:function; evaluations are by the first. `stop` are the strings that end a response.
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
    """The task `name` of `TASKS`, or the user's own, as package.module:name. Raises `UserError` for any other name."""
    return find("--task", name, TASKS)
