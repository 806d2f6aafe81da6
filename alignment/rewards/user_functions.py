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
    parameters = inspect.signature(function).parameters
    return _part_as_trl(name, function, parameters) if "completions" in parameters else _part_of_pairs(name, function)


def _part_of_pairs(name: str, function: Callable) -> PartFn:
    def reward(response: str, ground_truth: str) -> object:
        result = function(response, ground_truth)
        return result["reward"] if isinstance(result, Mapping) else result

    def part(problems: Sequence[Problem], texts: Sequence[str], scores: Sequence[Score]) -> list[float]:
        pairs = [(text, problem.ground_truth) for problem, text in zip(problems, texts, strict=True)]
        return _as_numbers(name, call_user_function(name, lambda: [reward(*pair) for pair in pairs]), len(texts))

    return part


def _part_as_trl(name: str, function: Callable, parameters: Mapping[str, inspect.Parameter]) -> PartFn:
    """The rewards by f(prompts=..., completions=..., **columns) -> list of numbers or None."""
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())

    def part(problems: Sequence[Problem], texts: Sequence[str], scores: Sequence[Score]) -> list[float]:
        columns = {key: values for key, values in _trl_columns(problems, texts).items() if takes_all or key in parameters}
        return _as_numbers(name, call_user_function(name, lambda: list(function(**columns))), len(texts))

    return part


def _trl_columns(problems: Sequence[Problem], texts: Sequence[str]) -> dict[str, list[str]]:
    return {
        "prompts": [problem.prompt for problem in problems],
        "completions": list(texts),
        "question": [problem.question for problem in problems],
        "ground_truth": [problem.ground_truth for problem in problems],
        "answer": [problem.ground_truth for problem in problems],
        "id": [problem.id for problem in problems],
    }


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
