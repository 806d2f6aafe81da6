"""Seconds of each phase of a step, and work in a thread beside a block of code."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Clock:
    """Adds up the seconds of the phases of one step after another. `with clock("update"):` counts a
    block."""

    def __init__(self):
        self.meter: Any = None  # A `PeakMeter`, where a phase's memory is measured, too.
        self.restart()

    def restart(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """Measure the memory of a phase from here on."""
        if self.meter is not None:
            self.meter.begin(phase)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.begin(phase)
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def elapsed(self) -> float:
        return time.perf_counter() - self.start


@contextmanager
def run_in_background(work: Callable[[], None], waiting: AbstractContextManager) -> Iterator[None]:
    """Run `work` in a thread beside the block, then wait for it inside `waiting`. Raises the
    block's error, else `work`'s."""
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(work)
        yield
        with waiting:
            result.result()


def start_in_background(work: Callable) -> Future:
    """Start `work` in a thread of its own, which does not keep the program from ending. Returns the
    future of what it returns or raises."""
    result = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
