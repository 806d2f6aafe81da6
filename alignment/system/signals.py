"""Ctrl-C and SIGTERM: a command stops where nothing is half done, and at the second signal at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The user, or the machine's owner, wants the command to end. Not an Exception, so that nothing takes it for an error."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


AGAIN = 1.0  # seconds; a signal to a whole process group reaches a command under `uv run` twice at once

_deferred = False
_received: int | None = None
_received_at = 0.0


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first signal raise `Interrupted` wherever the program is, short of what is held; a second one ends it."""
    global _deferred, _received
    _deferred, _received = False, None
    before = {}
    with suppress(ValueError):  # only a program's main thread may
        before = {number: signal.signal(number, _on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def defer_signals() -> None:
    """From here on a signal waits for `deliver_signals`: what begins now must not be left half done."""
    global _deferred
    _deferred = True


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold signals back for so long; what came meanwhile is raised at the end."""
    defer_signals()
    try:
        yield
    finally:
        deliver_signals()


def signals_are_deferred() -> bool:
    """Whether something is half done."""
    return _deferred


def deliver_signals() -> None:
    """Nothing is half done any more. Raises `Interrupted` where a signal has come meanwhile."""
    global _deferred
    _deferred = False
    if _received is not None:
        raise Interrupted(_received)


def _on_signal(number: int, frame) -> None:
    global _received, _received_at
    if _received is not None:
        if time.monotonic() - _received_at > AGAIN:
            os._exit(128 + number)
        return
    _received, _received_at = number, time.monotonic()
    if not _deferred:
        raise Interrupted(number)
