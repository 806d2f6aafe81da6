"""Seconds of each phase of a step, and work in a thread beside a block of code."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager


class Clock:
    """Adds up the seconds of the phases of one step after another. `with clock("update"):` counts a block."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def elapsed(self) -> float:
        return time.perf_counter() - self.start


@contextmanager
def run_in_background(work: Callable[[], None], waiting: AbstractContextManager) -> Iterator[None]:
    """Run `work` in a thread beside the block; after the block, wait for its end inside the context `waiting`. Raises the
    error of either, that of the block if both fail."""
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(work)
        yield
        with waiting:
            result.result()
