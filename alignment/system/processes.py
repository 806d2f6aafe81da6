"""Child processes: fresh interpreters that end with their parent and are killed together with
everything they started. `ChildProcess` calls one of our functions with a pipe to the parent;
`start_command` runs one of our commands with a log file. Each child has a session of its own:
Ctrl-C reaches the parent only, and its process group can be killed."""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from alignment.system.errors import RunStopped, in_one_line
from alignment.system.signals import deferred_signals

# Between two checks whether a child is alive, where it may die without closing its pipe.
POLL_SECONDS = 0.5
# Lower bound of the time limit for an engine to load a model, whatever --sampler_timeout is.
START_SECONDS = 1800
GRACE_SECONDS = 10  # For an engine to free its device before it is killed.

ROOT = Path(__file__).parents[2]


def trim_heap() -> None:
    """Give the system back what malloc keeps of freed memory, where it is glibc's."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def send_nothing(connection: Connection) -> None:
    """What `ChildProcess.ask` sends beside the arguments where it is given nothing."""


class ProcessLost(RunStopped):
    """A child process died, hung, or failed to answer a request. The argument says how, with its
    last words."""


class ChildProcess:
    """A process that calls `entry`, "module:function", with the descriptor of its end of the pipe
    `connection`. Unlike `multiprocessing`'s spawn it does not import the caller's `__main__` again
    and gets the environment it is given. Closing it, dropping it or the parent's exit sends None
    through the pipe, and kills the process group after `grace_seconds`; where these are 0 it is
    killed at once and nothing is sent. With `log` a temporary file keeps its output for
    `exit_report`; with None it is this process's, else nobody's. `pipe`, with its other end
    elsewhere, may be given."""

    timeout_flag = "--sampler_timeout"  # The flag that sets the time limit of `ask`

    def __init__(
        self,
        name: str,
        entry: str,
        environment: Mapping[str, str],
        log: bool | None = True,
        grace_seconds: float = GRACE_SECONDS,
        pipe: Connection | None = None,
    ):
        self.name = name
        if pipe is None:
            self.connection, child_end = Pipe()
        else:
            self.connection = pipe
            child_end = pipe
        self._owes_answer = False
        # It lives as long as this object.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._log_start = 0
        descriptor = child_end.fileno()
        output = {True: self._log, False: subprocess.DEVNULL, None: None}[log]
        self.process = _start(
            ["call", entry, str(descriptor)], environment, output, pass_fds=(descriptor,)
        )
        if pipe is None:
            child_end.close()
        self._end = weakref.finalize(
            self, _end, self.process, self.connection, os.getpid(), grace_seconds
        )

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called; the process may have died."""
        return self._end.alive

    def receive(self) -> Any:
        """The next message. Raises EOFError where the process has ended, even if a fork of it holds
        its end of the pipe."""
        while not self.connection.poll(POLL_SECONDS):
            # It is dead, and has sent nothing more.
            if self.process.poll() is not None and not self.connection.poll():
                raise EOFError
        return self.connection.recv()

    def ask(
        self,
        seconds: float,
        verb: str,
        *arguments,
        send: Callable[[Connection], None] = send_nothing,
    ) -> Any:
        """The answer of a process that runs `answer_requests`; `send` sends more than the
        arguments. Raises `ProcessLost` where it fails, dies, or takes longer than `seconds`. After
        any failure the sides are out of step: the process is ended."""
        if not self.is_open:
            raise RuntimeError(f"the {self.name} is closed")
        with self.time_limit(seconds) as hung:
            self._owes_answer = True
            try:
                # Where the process has ended before, its last message may say why.
                with suppress(BrokenPipeError):
                    self.connection.send((verb, arguments))
                    send(self.connection)
                failure, answer = self.receive()
            except (EOFError, OSError, ValueError, TypeError, pickle.UnpicklingError):
                report = f"the {self.name} was closed"
                if self.is_open:
                    report = self.exit_report()
                if hung.is_set():
                    report = (
                        f"the {self.name} gave no answer within {seconds:g} s ({self.timeout_flag})"
                    )
                raise ProcessLost(report) from None
            except BaseException:  # Ctrl-C too
                self.close()
                raise
            finally:
                self._owes_answer = False
        if failure:
            self.close()
            raise ProcessLost(f"the {self.name} failed: {failure}")
        return answer

    def close(self) -> None:
        """End the process and everything it started, at once where it owes an answer. A second call
        does nothing."""
        if self._owes_answer:
            self.kill()
        self._end()

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it forked, without waiting for their end."""
        _kill_group(self.process)

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[threading.Event]:
        """Kill the process if the block, which may send or receive, takes longer. Yields an event
        that is set where it did."""
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            self.kill()

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
        timer.daemon = True
        timer.start()
        try:
            yield timed_out
        finally:
            timer.cancel()

    def last_logged(self, prefix: str) -> str:
        """What follows `prefix` in the last line of the log that begins with it, or ""."""
        descriptor = self._log.fileno()
        # By `pread`, since the process writes where the file's shared position is.
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        for line in reversed(text.splitlines()):
            if line.startswith(prefix):
                return line.removeprefix(prefix)
        return ""

    def clear_log(self) -> None:
        """Leave everything written so far out of `exit_report`."""
        self._log_start = os.fstat(self._log.fileno()).st_size

    def exit_report(self) -> str:
        """Close the process and return how it ended with the last ten lines of its log."""
        self.close()
        code = self.process.returncode
        end = f"ended with exit code {code}"
        if code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            end += ", often a sign that memory ran out"
        self._log.seek(self._log_start)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join([f"the {self.name} {end}", *lines[-10:]])


def _end(
    process: subprocess.Popen, connection: Connection, owner: int, grace_seconds: float
) -> None:
    """End the child's process group; kill it if it does not end within `grace_seconds`."""
    if os.getpid() != owner:  # a fork of the owner dropped its copy of the `ChildProcess`
        return
    with suppress(OSError):
        if grace_seconds:
            connection.send(None)
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_seconds)
    end_command(process)


def no_advice(error: Exception) -> str:
    return ""


def answer_requests(
    descriptor: int,
    verbs: Mapping[str, Callable],
    advice: Callable[[Exception], str] = no_advice,
) -> None:
    """Answer requests from the pipe `descriptor` with (failure, answer), until one fails or is
    None.

    `verbs["start"]` makes an object of the first request's arguments. "stop" and all other verbs
    take that object first; others then take the pipe and their arguments. A failure is the error on
    one line, and then the `advice` on it."""
    connection = Connection(descriptor)
    try:
        _, arguments = connection.recv()
        served = verbs["start"](*arguments)
        connection.send((None, None))
        for verb, arguments in iter(connection.recv, None):
            connection.send((None, verbs[verb](served, connection, *arguments)))
        verbs["stop"](served)
    except Exception as error:
        with suppress(OSError):  # the parent may be the one that broke off
            connection.send((f"{in_one_line(error)}{advice(error)}", None))
        raise  # so that the log tells where


def start_command(
    module: str,
    flags: Sequence[str],
    log: Path,
    folder: Path | None = None,
    threads: int | None = None,
) -> subprocess.Popen:
    """Start `python -m module flags` in `folder`, with `threads` OpenMP threads; the file `log`
    gets its output appended. Raises `Interrupted`, with nothing left running, where a signal
    arrives while it starts."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("ab") as output, ExitStack() as interrupted:
        with deferred_signals():
            process = _start(["run", module, *flags], environment, output, cwd=folder)
            interrupted.callback(end_command, process)
        interrupted.pop_all()
    return process


def end_command(process: subprocess.Popen) -> None:
    """Kill a command and everything in its process group, and wait for its end."""
    _kill_group(process)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = log.read_text(errors="replace").strip().splitlines()
    if not lines:
        return "it said nothing"
    return lines[-1]


def _kill_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO | int | None, **options
) -> subprocess.Popen:
    """Start child.py with these arguments and `Popen`'s options, output and errors in one file. It
    can import what this process can, such as a module of the user's own that a flag names."""
    folders = [str(ROOT), environment.get("PYTHONPATH")]
    folders += [folder or os.getcwd() for folder in sys.path]
    path = os.pathsep.join(folder for folder in folders if folder)
    child = str(Path(__file__).with_name("child.py"))
    return subprocess.Popen(
        [sys.executable, "-P", child, str(os.getpid()), *arguments],
        env={**environment, "PYTHONPATH": path},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        **options,
    )
