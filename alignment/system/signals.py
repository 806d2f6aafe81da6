"""Ctrl-C and SIGTERM: the first signal stops a command where nothing is half done, the second one
at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `uv run` passes on the signal that its process group has got already: both are one request
REPEAT_SECONDS = 1.0
# Whether signals are held back; the number of the first that has arrived, or None, and when it did;
# for how long one is held back at most, the timer of that, and whether that time is over.
_state = SimpleNamespace(
    deferred=False, received=None, received_at=0.0, grace=None, timer=None, is_overdue=False
)


class Interrupted(BaseException):
    """A signal ended the command. No subclass of Exception, so that code that handles errors does
    not catch it."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block a first signal raises `Interrupted`, if need be after a deferral; a second
    one ends the process."""
    _state.deferred, _state.received, _state.grace, _state.is_overdue = False, None, None, False
    previous = {}
    with suppress(ValueError):  # raised outside the main thread, which alone may set handlers
        previous = {number: signal.signal(number, _on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def defer_signals() -> None:
    """Hold signals back until `deliver_signals`, because the work that begins must not stop half
    done."""
    _state.deferred = True


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold signals back during the block. Raises `Interrupted` at its end if one arrived within;
    not in an inner block."""
    if _state.deferred:  # by an outer block, which another thread may end meanwhile
        yield
        return
    known, _state.deferred = _state.received, True
    try:
        yield
    finally:
        _state.deferred = False
        if known is None:
            deliver_signals()


@contextmanager
def deferred_signals_for(seconds: float) -> Iterator[None]:
    """As `deferred_signals`, but a signal that arrives within the block is delivered after so many
    seconds if it has not ended by then."""
    _state.grace = seconds
    try:
        with deferred_signals():
            yield
    finally:
        _state.grace = None
        if _state.timer is not None:
            _state.timer.cancel()
            _state.timer = None


def signals_are_deferred() -> bool:
    return _state.deferred


def received_signal() -> Interrupted | None:
    """The exception of the signal that has arrived since `interruptible` began."""
    return None if _state.received is None else Interrupted(_state.received)


def deliver_signals() -> None:
    """End the deferral of signals. Raises `Interrupted` if one has arrived."""
    _state.deferred = False
    if _state.received is not None:
        raise Interrupted(_state.received)


def _on_signal(number: int, frame) -> None:
    if _state.is_overdue:
        _state.is_overdue = False
        if _state.deferred and _state.grace is not None:
            deliver_signals()
        return
    if _state.received is not None:
        if time.monotonic() - _state.received_at > REPEAT_SECONDS:
            os._exit(128 + number)
        return
    _state.received, _state.received_at = number, time.monotonic()
    if not _state.deferred:
        raise Interrupted(number)
    if _state.grace is not None:
        _state.timer = threading.Timer(_state.grace, _send_again, [number])
        _state.timer.daemon = True
        _state.timer.start()


def _send_again(number: int) -> None:
    """Have the main thread, which alone handles signals, deliver the one that it holds back."""
    if _state.deferred and _state.grace is not None:
        _state.is_overdue = True
        os.kill(os.getpid(), number)
