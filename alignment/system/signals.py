"""Ctrl-C and SIGTERM: the first signal stops a command where nothing is half done, the second one at once."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal ended the command. No subclass of Exception, so that code that handles errors does not catch it."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


REPEAT_SECONDS = 1.0  # `uv run` passes on the signal that its process group has got already: both are one request

_deferred = False
_received: int | None = None
_received_at = 0.0


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block a first signal raises `Interrupted`, if need be after a deferral; a second one ends the process."""
    global _deferred, _received
    _deferred, _received = False, None
    previous = {}
    with suppress(ValueError):  # raised outside the main thread, which alone may set handlers
        previous = {number: signal.signal(number, _on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def defer_signals() -> None:
    """Hold signals back until `deliver_signals`, because the work that begins must not stop half done."""
    global _deferred
    _deferred = True


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold signals back during the block. Raises `Interrupted` at its end if one arrived within; not in an inner block."""
    global _deferred
    if _deferred:  # by an outer block, which another thread may end meanwhile
        yield
        return
    known, _deferred = _received, True
    try:
        yield
    finally:
        _deferred = False
        if known is None:
            deliver_signals()


def signals_are_deferred() -> bool:
    return _deferred


def received_signal() -> Interrupted | None:
    """The exception of the signal that has arrived since `interruptible` began."""
    return None if _received is None else Interrupted(_received)


def deliver_signals() -> None:
    """End the deferral of signals. Raises `Interrupted` if one has arrived."""
    global _deferred
    _deferred = False
    if _received is not None:
        raise Interrupted(_received)


def _on_signal(number: int, frame) -> None:
    global _received, _received_at
    if _received is not None:
        if time.monotonic() - _received_at > REPEAT_SECONDS:
            os._exit(128 + number)
        return
    _received, _received_at = number, time.monotonic()
    if not _deferred:
        raise Interrupted(number)
