"""Rewards by functions of the user's own, called as ours or as TRL's; their results are checked."""

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from alignment.core.records import Problem, Score
from alignment.system.errors import RunStopped

Result = TypeVar("Result")
PartFn = Callable[[Sequence[Problem], Sequence[str], Sequence[Score]], list[float]]
"""(problems, responses, their scores by the task's rule) -> rewards, one for each response."""


def part_of_function(name: str, function: Callable) -> PartFn:
    """The rewards by a function f(response, ground_truth), which returns a number or a score, or by one with an argument
    `completions`, which is called as TRL calls it. Raises `TypeError` or `ValueError` for a callable without a signature."""
    rewards = _as_trl if "completions" in inspect.signature(function).parameters else _pair_by_pair

    def part(problems: Sequence[Problem], texts: Sequence[str], scores: Sequence[Score]) -> list[float]:
        return _as_numbers(name, call_user_function(name, lambda: rewards(function, problems, texts)), len(texts))

    return part


def _pair_by_pair(function: Callable, problems: Sequence[Problem], texts: Sequence[str]) -> list:
    results = [function(text, problem.ground_truth) for problem, text in zip(problems, texts, strict=True)]
    return [result["reward"] if isinstance(result, Mapping) else result for result in results]


def _as_trl(function: Callable, problems: Sequence[Problem], texts: Sequence[str]) -> list:
    """The rewards by f(prompts=..., completions=..., **columns) -> list of numbers or None."""
    fields = {"prompts": "prompt", "question": "question", "ground_truth": "ground_truth", "answer": "ground_truth", "id": "id"}
    columns = {key: [getattr(problem, field) for problem in problems] for key, field in fields.items()}
    columns["completions"] = list(texts)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return list(function(**{key: values for key, values in columns.items() if takes_all or key in parameters}))


def call_user_function(name: str, call: Callable[[], Result]) -> Result:
    """What `call` returns. Raises `RunStopped`, naming file and line, for whatever the user's code raises."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunStopped(f"--reward {name}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})") from None


def _as_numbers(name: str, values: Sequence[object], wanted: int) -> list[float]:
    """The values as numbers, None as 0. Raises `RunStopped` for another count than `wanted`, and for a value that is not
    finite or no number."""
    if len(values) != wanted:
        raise RunStopped(f"--reward {name}: gave {len(values)} rewards for {wanted} completions")
    numbers = []
    for value in values:
        try:
            numbers.append(0.0 if value is None else float(value))
        except (TypeError, ValueError):
            numbers.append(math.nan)
        if not math.isfinite(numbers[-1]):
            raise RunStopped(f"--reward {name}: gave {value!r}, which is no number")
    return numbers
