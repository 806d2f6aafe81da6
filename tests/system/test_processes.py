"""Child processes: what they are given, and that none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from alignment.system.processes import ChildProcess, end_command, last_line, start_command

SERVE = """
import json, os, subprocess, sys, time
from multiprocessing.connection import Connection

def echo(descriptor):
    connection = Connection(descriptor)
    for message in iter(connection.recv, None):
        connection.send((message, os.environ.get("GIVEN"), os.environ.get("HOME")))

def hang(descriptor):
    print("before", flush=True)
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    connection = Connection(descriptor)
    connection.send(helper.pid)
    time.sleep(600)

def fail(descriptor):
    sys.exit("the last line")

def command():
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    threads = os.environ["OMP_NUM_THREADS"]
    print(json.dumps([os.getpid(), helper.pid, sys.argv[1:], os.getcwd(), threads]), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    command()
"""


@pytest.fixture
def child(tmp_path):
    """Starts a `ChildProcess` of a module that only its PYTHONPATH names."""
    (tmp_path / "served.py").write_text(SERVE)
    children = []

    def start(function: str, **options) -> ChildProcess:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "GIVEN": "yes"}
        children.append(ChildProcess("helper", f"served:{function}", environment, **options))
        return children[-1]

    yield start
    for made in children:
        made.close()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for_end(*pids: int) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_child_answers_in_the_environment_it_is_given_and_ends_in_peace(child):
    made = child("echo")
    made.connection.send("hello")
    assert made.connection.recv() == ("hello", "yes", None)
    assert made.is_open and made.process.poll() is None
    made.close()
    assert not made.is_open and made.process.returncode == 0
    made.close()


def test_an_interrupt_or_the_end_of_a_job_is_left_to_the_parent(child):
    made = child("echo")
    made.connection.send(1)
    made.connection.recv()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(made.process.pid, number)
    made.connection.send(2)
    assert made.connection.recv()[0] == 2


def test_a_time_limit_kills_the_child_with_what_it_started(child):
    made = child("hang")
    helper = made.connection.recv()
    with made.time_limit(0.2) as timed_out, pytest.raises((EOFError, OSError)):
        made.connection.recv()
    assert timed_out.is_set()
    wait_for_end(made.process.pid, helper)
    assert (
        made.exit_report()
        == "the helper was killed by SIGKILL, often a sign that memory ran out\nbefore"
    )


def test_a_child_without_grace_is_killed_at_once(child):
    made = child("hang", output="discard", grace_seconds=0)
    made.connection.recv()
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 2 and made.process.returncode == -signal.SIGKILL


def test_the_report_holds_exit_code_and_last_lines_but_nothing_that_was_cleared(child):
    made = child("fail")
    made.process.wait()
    made.clear_log()
    assert made.exit_report() == "the helper ended with exit code 1"
    made = child("fail")
    made.process.wait()
    assert made.exit_report() == "the helper ended with exit code 1\nthe last line"


@pytest.fixture
def started(tmp_path, monkeypatch, wait_for):
    """A command in a folder of its own, and what it has printed."""
    (tmp_path / "served.py").write_text(SERVE)
    log = tmp_path / "logs" / "command.log"
    process = start_command("served", ["--a", "b c"], log, folder=tmp_path, threads=3)
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    yield process, json.loads(last_line(log))
    end_command(process)


def test_a_command_runs_as_with_python_m_in_its_folder(started, tmp_path):
    process, (pid, _, flags, folder, threads) = started
    assert (pid, flags, folder, threads) == (
        process.pid,
        ["--a", "b c"],
        str(tmp_path.resolve()),
        "3",
    )
    assert os.getpgid(pid) == pid != os.getpgrp()


def test_a_command_is_ended_with_what_it_started(started):
    process, (pid, helper, *_) = started
    end_command(process)
    assert process.returncode == -signal.SIGKILL
    wait_for_end(pid, helper)


def test_a_command_dies_with_its_parent(tmp_path, wait_for):
    (tmp_path / "served.py").write_text(SERVE)
    log = tmp_path / "log"
    script = f"""
from pathlib import Path
from alignment.system.processes import start_command
start_command("served", [], Path({str(log)!r}), Path({str(tmp_path)!r}), threads=1).wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    pid, helper, *_ = json.loads(last_line(log))
    parent.kill()
    parent.wait()
    wait_for_end(pid, helper)


def test_a_command_reads_signals_as_usual(started):
    process, _ = started
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
