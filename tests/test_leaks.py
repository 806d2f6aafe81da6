"""What `leaks` sees of a test that leaves something behind."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from alignment.core import losses
from tests.leaks import State


@pytest.fixture
def faults():
    """A function that gives the lines on what has changed since the test began."""
    before = State.now()
    return lambda: State.now().since(before)


def test_nothing_is_left_by_a_test_that_does_nothing(faults):
    assert faults() == []


def test_a_variable_and_a_handler(faults, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setattr(sys, "excepthook", print)
    first, second = faults()
    assert first.startswith("sys.excepthook was ")
    assert second.startswith("the variable OMP_NUM_THREADS was ") and second.endswith("'77'")
    monkeypatch.undo()
    assert faults() == []


def test_an_attribute_of_a_module_and_of_a_class(faults, monkeypatch):
    monkeypatch.setattr(losses, "LOSSES", {})
    monkeypatch.setattr(losses.LossInputs, "__doc__", "dunders are Python's own")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    named = [line.partition(" was ")[0] for line in faults()]
    assert sorted(named) == ["alignment.core.losses.LOSSES", "os.getpid"]


def test_a_module_that_was_imported_again(faults, monkeypatch):
    monkeypatch.delitem(sys.modules, "alignment.core.losses")
    assert faults() == ["the module alignment.core.losses is another one, or gone"]


def test_a_thread_and_a_process_until_they_end(faults):
    event = threading.Event()
    thread = threading.Thread(target=event.wait, name="sleeper")
    thread.start()
    process = subprocess.Popen(["sleep", "60"])
    # A process that has just begun may have no command line yet.
    while not psutil.Process(process.pid).cmdline():
        time.sleep(0.01)
    thread_line, process_line = faults()
    assert thread_line == "a thread still runs: sleeper"
    assert process_line == f"a process still runs: {process.pid} sleep 60"
    event.set()
    thread.join()
    process.kill()
    process.wait()
    assert faults() == []


def test_a_file(faults):
    file = Path(tempfile.gettempdir(), "left_by_a_test")
    file.touch()
    assert faults() == [f"a new file or folder: {file}"]
    file.unlink()
