"""Reward functions of the user's own. Each runs in a process of its own, which is killed if a call
takes too long."""

import asyncio
import dataclasses
import functools
import inspect
import json
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, get_type_hints

from alignment.core.records import Completion, Problem, Score
from alignment.system.errors import HOST_MEMORY, RunStopped, UsersCodeFailed
from alignment.system.processes import (
    START_SECONDS,
    ChildProcess,
    ProcessLost,
    RequestRaised,
    answer_requests,
)
from alignment.system.registry import import_object
from alignment.system.remote import TORCHRUN_VARIABLE

# Parameters by which a function is known to have the signature of TRL's reward functions.
TRL_NAMES = ("prompts", "completions", "completion_ids")
# What a `Score` has.
SCORE_KEYS = ("reward", "format_reward", "answer_reward")
# How Python's error of memory, and torch's of a GPU's, begin (`in_one_line`).
OUT_OF_MEMORY = ("MemoryError:", "OutOfMemoryError:")


# The values of rewards' own settings, by name.
Settings = tuple[tuple[str, object], ...]


class UsersFunction:
    """The user's function `name`, as package.module:function.

    The first call starts the function's process. Later calls go to the same process, so that the
    function may keep state; threads take turns. Every method raises `UsersCodeFailed` if the
    function raises an exception, or returns something else than it should, and `RunStopped` if it
    takes longer than `seconds`, is killed or runs out of memory, which may not happen again; the
    message has the line of the user's file that failed, if one did.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, inspect.Parameter],
        settings: Mapping[str, object] | None = None,
        flag: str = "--reward",
    ):
        """`settings` are the values that its own settings are made of; None where it has none.
        Errors name the `flag`."""
        self.name = name
        self._flag = flag
        self._settings = settings
        self.seconds = 60.0
        self._child: ChildProcess | None = None
        self._turn = threading.Lock()
        # A cache: reports score again what was scored in training.
        self.score = functools.lru_cache(2**14)(self._score)
        self._parameters = parameters
        self._takes_all = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        # Like TRL's: f(completions, ...) or f(**columns). All others are f(response, ground_truth).
        names_trl = not parameters.keys().isdisjoint(TRL_NAMES)
        self._is_like_trl = names_trl or (self._takes_all and len(parameters) == 1)

    def __call__(self, *arguments, **columns):
        """Call the function, and await the coroutine if it returns one. Arrays, tensors and
        iterators in the result become lists."""
        with self._turn:
            try:
                child = self._running_child()
                return child.ask(self.seconds, "call", arguments, columns)
            except RequestRaised as failed:
                line = failed.error_line
                if line.startswith(OUT_OF_MEMORY) or HOST_MEMORY in line:
                    raise RunStopped(self._in_words(str(failed))) from None
                raise self._fault(str(failed)) from None
            except ProcessLost as lost:
                raise RunStopped(self._in_words(str(lost))) from None

    def close(self) -> None:
        """End the function's process. The next call starts another one."""
        with self._turn:
            if self._child is not None:
                self._child.close()

    def _running_child(self) -> ChildProcess:
        """The function's process, started if none runs."""
        if self._child is None or not self._child.is_open:
            # Without torchrun's variables, by which libraries of the function would think that
            # their process is one of the ranks.
            environment = {
                name: value
                for name, value in os.environ.items()
                if not TORCHRUN_VARIABLE.fullmatch(name)
            }
            self._child = ChildProcess(
                "function", f"{__name__}:serve", environment, output="inherit"
            )
            self._child.timeout_flag = "--reward_timeout"
            self._child.ask(START_SECONDS, "start", self.name, self._settings)
        return self._child

    def _score(self, response: str, ground_truth: str) -> Score:
        """The score of a response, from a function f(response, ground_truth) -> score."""
        score = self(response, ground_truth)
        if not isinstance(score, Mapping) or not score.keys() >= set(SCORE_KEYS):
            keys = "reward, format_reward and answer_reward"
            raise self._fault(f"gave {score!r}; a rule gives {keys}")
        return {key: self._number(value) for key, value in score.items()}

    def share(self, response: str, ground_truth: str) -> Score:
        """The score of a response in an evaluation, whose intervals are of shares of 1."""
        score = self.score(response, ground_truth)
        for key in SCORE_KEYS:
            if not 0 <= score[key] <= 1:
                raise self._fault(
                    f"gave {key} {score[key]:g} in an evaluation, whose scores are from 0 to 1;"
                    " map it to these in a rule for --eval_rule (rewards of training may be any"
                    " numbers)"
                )
        return score

    def rewards(
        self, problems: Sequence[Problem], completions: Sequence[Completion], _: Sequence[Score]
    ) -> list[float | None]:
        """One reward for each completion; None if the reward does not apply to it.

        The function is f(response, ground_truth) -> number or score, or has the signature of TRL's
        reward functions, f(prompts=..., completions=..., **columns) -> list. The scores by the
        run's rule, which other rewards may use, are ignored.
        """
        pairs = zip(problems, completions, strict=True)
        if not self._is_like_trl:
            answers = [self(completion.text, problem.ground_truth) for problem, completion in pairs]
            return [self._reward_of(answer) for answer in answers]
        rows = [_row(problem, completion) for problem, completion in pairs]
        names = [name for name in rows[0] if self._takes_all or name in self._parameters]
        columns = {name: _column(rows, name) for name in names}
        values = self(**columns)
        if not isinstance(values, list) or len(values) != len(completions):
            given = f"{len(values)} rewards" if isinstance(values, list) else repr(values)
            raise self._fault(
                f"gave {given} for {len(completions)} completions, and must give a list of as many"
                " numbers"
            )
        rewards: list[float | None] = []
        for value in values:
            rewards.append(None if value is None else self._number(value))
        return rewards

    def _reward_of(self, answer: object) -> float:
        """The reward from what the function returned, a number or a score."""
        if isinstance(answer, dict) and "reward" in answer:
            answer = answer["reward"]
        return self._number(answer)

    def _number(self, value: object) -> float:
        # Not `math.isfinite`, which fails for an int beyond the floats. NaN is not <= either.
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            return value
        raise self._fault(f"gave {repr(value)[:100]}, which is no number")

    def _fault(self, fault: str) -> UsersCodeFailed:
        return UsersCodeFailed(self._in_words(fault))

    def _in_words(self, fault: str) -> str:
        return f"{self._flag} {self.name}: {fault}"


# (flag, name, its settings) -> the function.
_FUNCTIONS: dict[tuple[str, str, Settings], UsersFunction] = {}


def users_function(
    name: str, seconds: float | None = None, settings: Settings = (), flag: str = "--reward"
) -> UsersFunction:
    """The `UsersFunction` of that name with those of `settings` that its `settings_class` has, the
    same object each time for one `flag`, which its errors name. `seconds`, if given, becomes the
    time limit of its calls.

    Raises `UserError` if the function cannot be imported, and `ValueError` if it has no signature.
    """
    function: Any = import_object(flag, name)
    parameters = dict(inspect.signature(function).parameters)
    cls = settings_class(function)
    own: dict[str, object] | None = None
    if cls is not None:
        parameters.pop("settings")
        own = fields_among(cls, settings)
    key = (flag, name, tuple((own or {}).items()))
    if key not in _FUNCTIONS:
        _FUNCTIONS[key] = UsersFunction(name, parameters, own, flag)
    _FUNCTIONS[key].seconds = seconds or _FUNCTIONS[key].seconds
    return _FUNCTIONS[key]


def settings_class(function: Callable) -> type | None:
    """The dataclass of a reward function's own settings, by which its parameter `settings` is
    annotated; None without such a parameter."""
    try:
        if "settings" not in inspect.signature(function).parameters:
            return None
        hint = get_type_hints(function).get("settings")
    except (TypeError, ValueError, NameError):  # no signature, or an annotation of no type
        return None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def fields_among(cls: type, settings: Settings) -> dict[str, object]:
    """Those of `settings` that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in settings if name in names}


def close_functions() -> None:
    """End the processes of all functions, and with them the functions' state."""
    for function in _FUNCTIONS.values():
        function.close()
    _FUNCTIONS.clear()


def _row(problem: Problem, completion: Completion) -> dict[str, object]:
    """The arguments that TRL's trainer would pass to a reward function for one completion: the
    prompt, the completion, and the columns of the data set."""
    row: dict[str, object] = {
        "answer": problem.ground_truth,
        "id": problem.id,
        "question": problem.question,
        "ground_truth": problem.ground_truth,
    }
    for name, value in problem.columns.items():
        if name not in ("prompt", "completion"):
            row[name] = value
    row["prompts"] = problem.prompt
    row["completions"] = completion.text
    if problem.turns:
        # For a chat TRL passes lists of messages, not texts.
        row["prompts"] = [{"role": role, "content": text} for role, text in problem.turns]
        row["completions"] = [{"role": "assistant", "content": completion.text}]
    row["completion_ids"] = list(completion.token_ids)
    return row


def _column(rows: Sequence[Mapping[str, object]], name: str) -> list[object]:
    return [row.get(name) for row in rows]


def serve(descriptor: int) -> None:
    """Run the process of a `UsersFunction`: answer its requests from the pipe `descriptor` until it
    closes the pipe."""
    verbs = {"start": _load, "call": _call, "stop": _close}
    with suppress(Exception):  # `answer_requests` has sent it to the other end
        answer_requests(descriptor, verbs)


class _Loaded(NamedTuple):
    """The user's function, and the event loop that runs all of its coroutines."""

    function: Callable
    loop: asyncio.Runner


def _load(name: str, settings: Mapping[str, Any] | None) -> _Loaded:
    function = pkgutil.resolve_name(name)
    cls = settings_class(function)
    if cls is not None:
        function = functools.partial(function, settings=cls(**settings or {}))
    return _Loaded(function, asyncio.Runner())


def _close(loaded: _Loaded) -> None:
    loaded.loop.close()


def _call(loaded: _Loaded, _, arguments: Sequence, columns: Mapping) -> object:
    """Call the function. The second argument is the pipe, which only other verbs of
    `answer_requests` use."""
    try:
        result = loaded.function(*arguments, **columns)
        if inspect.iscoroutine(result):
            result = loaded.loop.run(result)
        # As plain numbers, strings, lists and dicts: the other end lacks the user's classes.
        return json.loads(json.dumps(result, default=_as_list))
    except SystemExit as error:
        # As an `Exception`, which `answer_requests` reports.
        raise RuntimeError(f"it has called sys.exit({error})") from None


def _as_list(value: Any) -> list:
    """The list of an array's, a tensor's or an iterator's elements."""
    return value.tolist() if hasattr(value, "tolist") else list(value)
