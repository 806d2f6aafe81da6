"""What this process carries out for its user: a command, or a call from a Python program, which
stands for the command that would do the same."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from alignment.system.errors import UserError


@dataclass(frozen=True)
class Command:
    """The words of a command, the interpreter first, and the instant at which it began, in seconds
    since the epoch."""

    words: tuple[str, ...]
    began: float


_one_call = threading.Lock()
_called: Command | None = None


def current_command() -> Command:
    """The command that records name: that of the process, or of the call that is under way."""
    if _called is not None:
        return _called
    words = (Path(sys.executable).name, *sys.argv)
    return Command(words, psutil.Process().create_time())


@contextmanager
def calling(module: str, flags: Sequence[str]) -> Iterator[None]:
    """Within the block this process stands for the command `module` of this package with these
    flags. Raises `UserError` within another such block: calls share signals and random numbers."""
    global _called
    if not _one_call.acquire(blocking=False):
        raise UserError(
            "another call is under way in this process, and two would share its random numbers:"
            " wait for it, or make this one in a process of its own"
        )
    try:
        words = (Path(sys.executable).name, f"{module}.py", *flags)
        _called = Command(words, time.time())
        yield
    finally:
        _called = None
        _one_call.release()
