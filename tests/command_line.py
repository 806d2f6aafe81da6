"""Commands that tests run in their own process."""

import sys
from collections.abc import Callable, Sequence

import pytest

from alignment import train_rl
from alignment.args import RLArgs, parse
from alignment.builders.checks import check_rl
from alignment.system.errors import run_command
from alignment.system.terminal import make_console


def exit_code(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *argv: str) -> int:
    """The exit code of a command's `main` with these words as its command line, the program's name
    first."""
    monkeypatch.setattr(sys, "argv", list(argv))
    try:
        run_command(main)
    except SystemExit as stop:
        return stop.code
    return 0


class Ended:
    """A run of a sweep that has ended well."""

    def wait(self, seconds: float | None = None) -> int:
        return 0


def train_here(module: str, flags: Sequence[str], log, folder, threads) -> Ended:
    """In place of `start_command`: trains a run of a sweep in this process."""
    assert module == "alignment.train_rl"
    args = parse(RLArgs, list(flags))
    check_rl(args)
    train_rl.train(args, make_console())
    return Ended()
