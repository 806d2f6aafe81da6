"""What benchmarks measure with: peers that take turns, seconds, and commands that must succeed."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
"""The checkout, in which `-m benchmarks.NAME` and `-m alignment.NAME` find their modules."""

Result = TypeVar("Result")


def take_turns(
    peers: Mapping[str, Callable[[], Result]], rounds: int, warm_up: int = 1
) -> dict[str, list[Result]]:
    """What each peer returned in each of `rounds`, in which every peer has one turn.

    By turns, so that what else the machine does falls on all peers alike. `warm_up` rounds come
    first and are not counted: much is loaded, compiled or allocated on first use.
    """
    results: dict[str, list[Result]] = {name: [] for name in peers}
    for number in range(warm_up + rounds):
        for name, peer in peers.items():
            result = peer()
            if number >= warm_up:
                results[name].append(result)
    return results


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each peer's values."""
    return {name: statistics.median(own) for name, own in values.items()}


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def output_of(
    command: Sequence[str],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a command printed to stdout. Raises `SystemExit`, with all that it printed, where it
    fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}")
    return done.stdout
