"""TODO."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from alignment.core.rollout import Rollout, SampledStep


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self):
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

    def report(self, rollout: Rollout, drawn: SampledStep, updates: dict[str, float | None]) -> dict[str, float]:
        """Seconds by phase, and tokens a second: those sampled, and those, prompts included, that updates computed."""
        sampled = sum(rollout.lengths)
        return {
            **{f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()},
            "seconds": self.elapsed(),
            "tokens_per_second_sample": sampled / drawn.seconds["sample"],
            "tokens_per_second_update": updates["update_tokens"] / self.seconds["update"],
        }
