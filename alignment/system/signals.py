"""Ctrl-C and SIGTERM: the first signal stops a command where nothing is half done, the second one
at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `uv run` passes on the signal that its process group has got already: both are one request.
REPEAT_SECONDS = 1.0


@dataclass
class _State:
    """What this process does with signals, and what has arrived."""

    deferred: bool = False  # Whether signals are held back.
    received: int | None = None  # The number of the first that has arrived.
    received_at: float = 0.0  # When it did, in seconds of `time.monotonic`.
    grace: float | None = None  # For how many seconds one is held back at most; None: for ever.
    timer: threading.Timer | None = None  # Ends that time.
    is_overdue: bool = False  # Whether that time is over, so that it is delivered.
    ends_process: bool = True  # Whether a second signal ends the process, or is delivered at once.


_state = _State()


class Interrupted(BaseException):
    """A signal ended the command. No subclass of Exception, so that code that handles errors does
    not catch it."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.is_reported = False  # Whether a last line has said so already.


@contextmanager
def interruptible_call() -> Iterator[None]:
    """As `interruptible`, in a program of the user's: a second signal raises `Interrupted` at once,
    deferred or not, and nothing is remembered after the block. Outside the main thread, where
    Python delivers no signals, the block runs undisturbed."""
    try:
        with interruptible(ends_process=False):
            yield
    finally:
        _forget_signals()


def _forget_signals() -> None:
    """Hold back no signal, and remember none."""
    _state.deferred = False
    _state.received = None
    _state.grace = None
    _state.is_overdue = False


@contextmanager
def interruptible(ends_process: bool = True) -> Iterator[None]:
    """Within the block a first signal raises `Interrupted`, if need be after a deferral; a second
    one ends the process, or with `ends_process` False the deferral."""
    _forget_signals()
    _state.ends_process = ends_process
    previous = {}
    with suppress(ValueError):  # raised outside the main thread, which alone may set handlers
        previous = {number: signal.signal(number, _on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def deferrable_signals() -> Iterator[Callable[[], None]]:
    """Yield `defer_signals`. A signal interrupts the block until that is called; from then on it
    waits for the end of the block, which raises `Interrupted`.

    Where the block itself raises, signals stay held back: what handles the error saves, and must
    not stop half done."""
    yield defer_signals
    deliver_signals()


def defer_signals() -> None:
    """Hold signals back to the end of the `deferrable_signals` block, or of the command where there
    is none, because the work that begins must not stop half done."""
    _state.deferred = True


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold signals back during the block. Raises `Interrupted` at its end if one arrived within;
    not in an inner block."""
    if _state.deferred:  # by an outer block, which another thread may end meanwhile
        yield
        return
    received_before = _state.received
    _state.deferred = True
    try:
        yield
    finally:
        _state.deferred = False
        if received_before is None:
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
    """Whether signals are held back now."""
    return _state.deferred


def received_signal() -> Interrupted | None:
    """The exception of the signal that has arrived since `interruptible` began."""
    if _state.received is None:
        return None
    return Interrupted(_state.received)


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
            if _state.ends_process:
                os._exit(128 + number)
            raise Interrupted(number)
        return
    _state.received = number
    _state.received_at = time.monotonic()
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
