"""Learning rates, a linear warm-up and then a schedule (--lr_schedule), and the steps after which
the reference is reset.

Importing this module loads no torch, so that arguments can read `SCHEDULES` at once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# What a falling schedule leaves of the peak at the last update: a tenth, as in Hoffmann et al. 2022
# (arXiv:2203.15556, appendix B, whose note finds it slightly better than to fall to 0).
FALL = 0.9


def _constant(done: int, updates: int) -> float:
    return 1.0


def _linear(done: int, updates: int) -> float:
    return 1 - FALL * done / updates


def _cosine(done: int, updates: int) -> float:
    """Half a cosine (SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, without restarts)."""
    return 1 - FALL * (1 - math.cos(math.pi * done / updates)) / 2


# --lr_schedule -> the share of the peak, from (updates done after the warm-up, those in all).
SCHEDULES: Mapping[str, Callable[[int, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}


def last_reset(step: int, interval: int) -> int:
    """The last step, up to `step`, after which the reference took the policy's weights
    (--reference_reset_interval); 0: none, so that it has those which training started from."""
    if not interval:
        return 0
    return step - step % interval


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of each update of a run. It is a function of the update's number alone, so
    that a resumed run goes on with the rates that it would have had."""

    peak: float
    warmup_steps: int
    schedule: str
    """A key of `SCHEDULES`."""
    updates: int
    """All updates of the run, the last of which has the schedule's end."""

    def of_update(self, number: int) -> float:
        """The rate of an update, of which the first is number 1. It rises linearly to the peak at
        update `warmup_steps`, then follows the schedule."""
        if number <= self.warmup_steps:
            return self.peak * (number / self.warmup_steps)
        updates = max(1, self.updates - self.warmup_steps)
        return self.peak * SCHEDULES[self.schedule](number - self.warmup_steps, updates)
