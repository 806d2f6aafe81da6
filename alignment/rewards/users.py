"""Reward functions of the user's own, each in a process of its own, which ends where a call takes
too long."""

import asyncio
import functools
import inspect
import json
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from alignment.core.records import Completion, Problem, Score
from alignment.system.errors import RunStopped
from alignment.system.processes import START_SECONDS, ChildProcess, ProcessLost, answer_requests
from alignment.system.registry import import_object
from alignment.system.remote import TORCHRUN

TRL_NAMES = ("prompts", "completions", "completion_ids")


RULE_KEYS = ("reward", "format_reward", "answer_reward")


class UsersFunction:
    """The function `name`, package.module:function, in a process that the first call starts and
    that keeps the function's state.

    A call may take `seconds`; threads take turns. Every method raises `RunStopped`, with the line
    of the user's file where there is one, for a function that fails, takes longer, or returns
    something else than it should.
    """

    def __init__(self, name: str, parameters: Mapping[str, inspect.Parameter]):
        self.name = name
        self.seconds = 60.0
        self._child: ChildProcess | None = None
        self._turn = threading.Lock()
        # Reports ask again for what was trained on.
        self.score = functools.lru_cache(2**14)(self._score)
        self._parameters = parameters
        self._takes_all = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        names_trl = not parameters.keys().isdisjoint(TRL_NAMES)
        self._as_trl = names_trl or (self._takes_all and len(parameters) == 1)

    def __call__(self, *arguments, **columns):
        """What the function returns, with lists for arrays, tensors and iterators; a coroutine is
        awaited."""
        with self._turn:
            try:
                child = self._running_child()
                return child.ask(self.seconds, "call", arguments, columns)
            except ProcessLost as lost:
                raise self._fault(str(lost)) from None

    def close(self) -> None:
        """End its process. The next call starts another one."""
        with self._turn:
            if self._child is not None:
                self._child.close()

    def _running_child(self) -> ChildProcess:
        """The process of the function, started where none runs."""
        if self._child is None or not self._child.is_open:
            # The function's libraries would take torchrun's variables for their own.
            environment = {
                name: value for name, value in os.environ.items() if not TORCHRUN.fullmatch(name)
            }
            self._child = ChildProcess(
                "function", f"{__name__}:serve", environment, output="inherit"
            )
            self._child.timeout_flag = "--reward_timeout"
            self._child.ask(START_SECONDS, "start", self.name)
        return self._child

    def _score(self, response: str, ground_truth: str) -> Score:
        """The score by a rule, f(response, ground_truth)."""
        score = self(response, ground_truth)
        if not isinstance(score, Mapping) or not score.keys() >= set(RULE_KEYS):
            keys = "reward, format_reward and answer_reward"
            raise self._fault(f"gave {score!r}; a rule gives {keys}")
        return {key: self._number(value) for key, value in score.items()}

    def rewards(
        self, problems: Sequence[Problem], completions: Sequence[Completion], _: Sequence[Score]
    ) -> list[float | None]:
        """One reward for each completion; None where the reward does not apply to it.

        The function is f(response, ground_truth) -> number or score, or
        f(prompts=..., completions=..., **columns) -> list, as TRL calls it.
        """
        pairs = zip(problems, completions, strict=True)
        if not self._as_trl:
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
        return [None if value is None else self._number(value) for value in values]

    def _reward_of(self, answer: object) -> float:
        """The reward of a score, or a number."""
        if isinstance(answer, dict):
            answer = answer.get("reward", answer)
        return self._number(answer)

    def _number(self, value: object) -> float:
        # Rewards are floats: a whole number beyond them is no reward, and has no `isfinite`.
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
            return value
        raise self._fault(f"gave {repr(value)[:100]}, which is no number")

    def _fault(self, fault: str) -> RunStopped:
        return RunStopped(f"--reward {self.name}: {fault}")


_FUNCTIONS: dict[str, UsersFunction] = {}


def users_function(name: str, seconds: float | None = None) -> UsersFunction:
    """The user's function of that name, always the same one, whose calls may from now on take
    `seconds`.

    Raises `UserError` where it cannot be imported, and `ValueError` for one without a signature.
    """
    if name not in _FUNCTIONS:
        function: Any = import_object("--reward", name)
        _FUNCTIONS[name] = UsersFunction(name, inspect.signature(function).parameters)
    _FUNCTIONS[name].seconds = seconds or _FUNCTIONS[name].seconds
    return _FUNCTIONS[name]


def close_functions() -> None:
    """End the processes of all functions, and with them the functions' state."""
    for function in _FUNCTIONS.values():
        function.close()
    _FUNCTIONS.clear()


def _row(problem: Problem, completion: Completion) -> dict[str, object]:
    """What TRL gives a reward function of one completion: the columns of the problem's row among
    it, as they are."""
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
        # A chat: lists of messages in place of texts.
        row["prompts"] = [{"role": role, "content": text} for role, text in problem.turns]
        row["completions"] = [{"role": "assistant", "content": completion.text}]
    row["completion_ids"] = list(completion.token_ids)
    return row


def _column(rows: Sequence[Mapping[str, object]], name: str) -> list[object]:
    return [row.get(name) for row in rows]


def serve(descriptor: int) -> None:
    """Be the process of a `UsersFunction`, until its end closes the pipe."""
    verbs = {"start": _load, "call": _call, "stop": _close}
    with suppress(Exception):  # the other end has been told
        answer_requests(descriptor, verbs)


class _Loaded(NamedTuple):
    """The user's function, and the one loop for its coroutines."""

    function: Callable
    loop: asyncio.Runner


def _load(name: str) -> _Loaded:
    return _Loaded(pkgutil.resolve_name(name), asyncio.Runner())


def _close(loaded: _Loaded) -> None:
    loaded.loop.close()


def _call(loaded: _Loaded, _, arguments: Sequence, columns: Mapping) -> object:
    try:
        result = loaded.function(*arguments, **columns)
        if inspect.iscoroutine(result):
            result = loaded.loop.run(result)
        # Plain numbers, texts, lists and dicts.
        return json.loads(json.dumps(result, default=_as_list))
    except SystemExit as error:
        raise RuntimeError(f"it has called sys.exit({error})") from None


def _as_list(value: Any) -> list:
    """An array, a tensor or an iterator as a list."""
    return value.tolist() if hasattr(value, "tolist") else list(value)
