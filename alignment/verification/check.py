"""A line of `verify`: what is measured, and what it may be at most."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Check:
    """A quantity, and the limit that it may not exceed."""

    what: str
    limit: float
    """Infinite where nothing is promised: the quantity is measured, not checked."""
    quantity: Callable[[], float | torch.Tensor | list[str]]
    """Returns the quantity, or the names of what differs, whose number is the quantity. Raises
    `RunStopped` where a run would."""
    at_best: str = ""
    """How far a run is reproducible where the quantity is not 0: "to rounding", or "statistical",
    in the distribution of its results."""
    of_results: bool = True
    """Whether a run's results may be others where the check fails; a wrong plan changes none."""
    note: str = ""
    """With which settings, where they are not the run's own."""
    not_checked: str = ""
    """Why nothing is measured; empty where something is."""
