"""Ranks that compute together: their calls, and what rank 0 says when one is lost."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ranked_object
import torch

from alignment.system.ranks import close_ranks
from alignment.system.signals import Interrupted, deferred_signals, interruptible

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}",
    "OMP_NUM_THREADS": "1",
}


def run(what: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ranked_object", what]
    return subprocess.run(
        command, env={**ENVIRONMENT, **environment}, capture_output=True, text=True
    )


def test_every_rank_makes_the_calls_of_rank_0():
    *lines, end = run("none").stdout.splitlines()
    torch.manual_seed(7)
    # 10 + 11 + 12; then 3 x 33, 3 x 99; 0 + 1 + 2; 3 x 3, and 3 x 9 where nobody looks, 3 x 27
    assert lines == [
        f"3 33.0 [99.0, 297.0] {torch.rand(1).item()}",
        "3.0",
        "81.0",
    ]
    assert end == "threads at the end: 1"  # one that is within the store would abort the process


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("error", r"rank 1 of 3 on \S+ failed: ValueError: rank 1 cannot do this"),
        (
            "kill",
            (
                r"rank 1 of 3 on \S+ was lost: the process of rank 1 was killed by SIGKILL, often a"
                r" sign that memory ran out"
            ),
        ),
        (
            "hang",
            (
                r"rank 1 of 3 on \S+ did not take part in a computation within 5 s"
                r" \(--rank_timeout\), or has ended"
            ),
        ),
        (
            "stop",
            (
                r"rank 1 of 3 on \S+ (has given no sign of life for|did not take part in a"
                r" computation within) 5 s \(.*\).*"
            ),
        ),
    ],
)
def test_a_lost_rank_is_named_within_its_deadline_and_nothing_is_left_running(what, line, capsys):
    """Rank 0 is this process."""
    before = set(psutil.Process().children(recursive=True))
    try:
        ranked_object.main(what)
    finally:
        close_ranks()
    first, second = capsys.readouterr().out.splitlines()
    # the next call says the same
    assert re.fullmatch(rf"{line} \[soon\]", first) and second == first
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_signal_for_any_rank_is_rank_0s():
    ended = run("end")
    assert ended.returncode == -15 and ended.stderr == ""


def test_a_signal_waits_for_the_end_of_the_outermost_call_and_comes_once():
    """A call that the ranks do not finish together would leave the others in the middle of a
    collective."""
    reached = []
    with interruptible():
        with pytest.raises(Interrupted), deferred_signals():
            with deferred_signals():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            reached.append("after the inner call")
        with deferred_signals():  # such as the call that saves what the signal has stopped
            reached.append("another call")
    assert reached == ["after the inner call", "another call"]
