"""What benchmarks of faults share: the environment of a run that is harmed, its processes that are
still alive, and the line of its logs that says what happened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from benchmarks.measuring import ROOT


def run_environment(**variables: str) -> dict[str, str]:
    """The environment of a command that runs in a folder of its own: one thread a process, the
    checkout's modules, and `variables`."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}


def live_processes(**variables: str) -> list[psutil.Process]:
    """The processes that have all of these variables in their environment and are not dead."""
    live = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            is_dead = process.status() == psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if not is_dead and variables.items() <= environment.items():
            live.append(process)
    return live


def read_lines(logs: Iterable[Path]) -> list[str]:
    """The lines of all logs, one log after another."""
    lines = []
    for log in logs:
        lines += log.read_text(errors="replace").splitlines()
    return lines


def first_message(lines: Sequence[str], beginnings: Sequence[str]) -> str:
    """The first message that begins with the first of `beginnings` that any line has; the last line
    where no line has one, and "" where there is no line."""
    for beginning in beginnings:
        for line in lines:
            if beginning in line:
                return line[line.index(beginning) :]
    if lines:
        return lines[-1]
    return ""
