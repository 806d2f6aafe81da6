"""Commands that tests run in their own process."""

import sys
from collections.abc import Callable

import pytest

from alignment.system.errors import run_command


def exit_code(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *argv: str) -> int:
    """The exit code of a command's `main` with these words as its command line, the program's name
    first."""
    monkeypatch.setattr(sys, "argv", list(argv))
    try:
        run_command(main)
    except SystemExit as stop:
        return stop.code
    return 0
