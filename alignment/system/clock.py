"""Seconds of each phase of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of the phases of one step after another. `with clock("update"):` counts a block."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Begin a new step."""
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.start
