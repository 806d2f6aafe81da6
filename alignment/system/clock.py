"""A clock for the phases of a training step, and functions that run in background threads."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Clock:
    """The seconds of each phase of the current step. `with clock("update"):` adds those of its
    block to the phase "update"."""

    def __init__(self):
        # A `PeakMeter`, which a run sets where it measures the memory of each phase too.
        self.meter: Any = None
        self.restart()

    def restart(self) -> None:
        """Begin a new step, whose phases have taken no seconds yet."""
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """Count the memory that is used from now on as that of `phase`."""
        if self.meter is not None:
            self.meter.begin(phase)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to those of `phase`, and count its memory as that of
        `phase`."""
        self.begin(phase)
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def elapsed(self) -> float:
        """The seconds since the step began."""
        return time.perf_counter() - self.start


@contextmanager
def run_in_background(
    work: Callable[[], None], while_waiting: AbstractContextManager
) -> Iterator[None]:
    """Run `work` in a thread while the block runs. After the block, wait for the thread inside the
    context `while_waiting`, such as a clock that counts the seconds.

    Raises the error of the block or, if the block had none, that of `work`."""
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(work)
        yield
        with while_waiting:
            future.result()


def start_in_background(work: Callable) -> Future:
    """Start `work` in a daemon thread, which ends when the program ends. Returns the future of its
    result or error. (The threads of a `ThreadPoolExecutor` would keep the program from ending.)"""
    future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
