"""A child process of our own: a fresh interpreter behind one pipe, which ends with its parent and whose end can be told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

POLL_SECONDS = 0.5  # how soon a death on one side is noticed on the other where the pipe does not tell
START_SECONDS = 1800  # at least, for an engine to load a model, whatever --sampler_timeout says
GRACE_SECONDS = 10  # for an engine to free its device before it is killed

# What the child runs. A parent that was killed cannot stop it, so it watches over its parent, from before the imports,
# which take many seconds. The parent's id tells more than the pipe, which forks of the parent may hold open.
SCRIPT = f"""
import importlib, os, signal, sys, threading, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: when to end is the parent's to say

def die_with(parent):
    while os.getppid() == parent:
        time.sleep({POLL_SECONDS})
    os.killpg(os.getpgrp(), signal.SIGKILL)

descriptor, parent = map(int, sys.argv[2:])
threading.Thread(target=die_with, args=(parent,), daemon=True).start()
module, function = sys.argv[1].split(":")
getattr(importlib.import_module(module), function)(descriptor)
"""


class Child:
    """A process that runs `entry`, "module:function", which is called with the descriptor of its end of the pipe.

    Not `multiprocessing`'s spawn, which would import the caller's __main__ once more and take its environment from this
    process at that moment. A session of its own keeps Ctrl-C away and makes its whole process group killable. It is told to
    end, by None on the pipe, when it is closed, dropped, or at exit, and killed where it does not.
    """

    def __init__(self, name: str, entry: str, environment: Mapping[str, str]):
        self.name = name
        self.connection, theirs = Pipe()
        self._log, self._log_start = tempfile.TemporaryFile(), 0
        root = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SCRIPT, entry, str(theirs.fileno()), str(os.getpid())],
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self.process, self.connection, os.getpid())

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet; it may have died."""
        return self._end.alive

    def has_ended(self) -> bool:
        """Whether it is dead and has left nothing in the pipe."""
        return self.process.poll() is not None and not self.connection.poll()

    def close(self) -> None:
        """End it and whatever it started. Calling it twice is fine."""
        self._end()

    def kill(self) -> None:
        """End it, and what it has forked, at once, whatever they are doing."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[threading.Event]:
        """Kill it where the block takes longer, wherever it hangs: before it has read a request, or before it has sent the
        whole answer. The event tells whether that was so."""
        hung = threading.Event()

        def end_it() -> None:
            hung.set()
            self.kill()

        watch = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end_it)
        watch.daemon = True
        watch.start()
        try:
            yield hung
        finally:
            watch.cancel()

    def forget_log(self) -> None:
        """What it wrote so far has nothing to do with its end."""
        self._log_start = os.fstat(self._log.fileno()).st_size

    def exit_report(self) -> str:
        """Close it; how it ended and the last lines that it wrote."""
        self.close()
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = ", often a sign that memory ran out" if code == -signal.SIGKILL else ""
        self._log.seek(self._log_start)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join([f"the {self.name} {how}{hint}", *lines[-10:]])


def _end(process: subprocess.Popen, connection: Connection, owner: int) -> None:
    """End the child's process group, in peace if it answers in time."""
    if os.getpid() != owner:  # a fork of the owner, such as a pool's worker, dropped its copy
        return
    with suppress(OSError):
        connection.send(None)
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
