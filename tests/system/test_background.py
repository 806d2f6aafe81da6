"""Work that runs in the background of a block."""

import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from alignment.system.clock import Clock, run_in_background, start_in_background
from alignment.system.errors import RunStopped


def test_work_runs_beside_the_block_and_has_ended_after_it():
    meet, clock, done = threading.Barrier(2, timeout=30), Clock(), []

    def work():
        meet.wait()  # broken, were the block to wait for the work, or the work for the block
        time.sleep(0.05)
        done.append("work")

    with run_in_background(work, clock("sync")):
        meet.wait()
    assert done == ["work"]


def test_only_the_wait_after_the_block_is_counted():
    def counted(work: float, block: float) -> float:
        clock = Clock()
        with run_in_background(partial(time.sleep, work), clock("sync")):
            time.sleep(block)
        return clock.seconds["sync"]

    assert counted(work=0.0, block=0.3) < 0.3  # it had ended long before
    assert counted(work=0.3, block=0.0) > 0.1


def test_an_error_of_the_work_or_the_block_is_raised_when_the_work_has_ended():
    def lost():
        raise RunStopped("lost twice")

    said = []
    with pytest.raises(RunStopped, match="lost twice"), run_in_background(lost, Clock()("sync")):
        said.append("block")
    assert said == ["block"]

    def slow():
        time.sleep(0.05)
        said.append("work")

    with pytest.raises(OSError, match="full"), run_in_background(slow, Clock()("sync")):
        raise OSError("full")
    assert said == ["block", "work"]
    with pytest.raises(OSError, match="full"), run_in_background(lost, Clock()("sync")):
        raise OSError("full")


def test_what_was_started_gives_its_result_or_its_error():
    go_on = threading.Event()
    result = start_in_background(lambda: go_on.wait(30) and 3)
    assert not result.done()
    go_on.set()
    assert result.result(30) == 3

    def lost():
        raise RunStopped("lost")

    with pytest.raises(RunStopped, match="lost"):
        start_in_background(lost).result(30)


def test_a_program_ends_while_what_it_started_goes_on():
    code = (
        "import time; from alignment.system.clock import start_in_background;"
        " start_in_background(lambda: time.sleep(60))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
