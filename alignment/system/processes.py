"""Child processes: fresh interpreters that end with their parent and are killed together with
everything they started. `ChildProcess` calls one of our functions with a pipe to the parent;
`start_command` runs one of our commands with a log file.

Each child has a session, and so a process group, of its own: Ctrl-C reaches the parent alone, and
one signal kills the child with everything it started."""

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
from typing import IO, Any, Literal

from alignment.system.errors import RunStopped, in_one_line
from alignment.system.garbage import collect_as_usual
from alignment.system.signals import deferred_signals

# A child may die while a process that it forked holds its pipe open. So a parent that waits for a
# message checks once in so many seconds whether the child is alive.
POLL_SECONDS = 0.5
START_SECONDS = (
    1800  # A child gets at least so long to load a model, whatever --sampler_timeout is.
)
GRACE_SECONDS = 10  # A child that is closed gets so long to free its device before it is killed.

ROOT = Path(__file__).parents[2]


def trim_heap() -> None:
    """Return the freed memory that glibc's malloc keeps to the operating system. With another C
    library this does nothing."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def send_nothing(connection: Connection) -> None:
    """Send nothing after the arguments of a request: the default of `ChildProcess.ask`."""


class ProcessLost(RunStopped):
    """A child process died, hung, or failed to answer a request. The message says which, and holds
    the last lines of the child's log."""


class RequestRaised(ProcessLost):
    """A request to a child process raised an exception there, which `error_line` holds in one
    line."""

    def __init__(self, name: str, error_line: str):
        super().__init__(f"the {name} failed: {error_line}")
        self.error_line = error_line


class ChildProcess:
    """A child process that calls the function `entry`, "module:function", with the file descriptor
    of its end of a pipe. The parent's end is `connection`. Unlike the spawn method of
    `multiprocessing`, it does not import the parent's `__main__`, and it gets the given
    environment.

    The child ends when `close` is called, this object is garbage-collected, or the parent exits. It
    then receives None through the pipe, and its process group is killed if it has not ended after
    `grace_seconds`. If `grace_seconds` is 0, it is killed at once and receives nothing.

    `output` says what becomes of its standard output and errors: a temporary file keeps them for
    `exit_report`, the child inherits those of this process, or they are discarded. If a `pipe` is
    given, the child gets this one, and its other end belongs to another process."""

    timeout_flag = "--sampler_timeout"  # The flag that sets the time limit of `ask`, for messages.

    def __init__(
        self,
        name: str,
        entry: str,
        environment: Mapping[str, str],
        output: Literal["keep", "inherit", "discard"] = "keep",
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
        # This object keeps the file open, so no `with` closes it.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._log_start = 0
        descriptor = child_end.fileno()
        outputs = {"keep": self._log, "inherit": None, "discard": subprocess.DEVNULL}
        self.process = _start(
            ["call", entry, str(descriptor)], environment, outputs[output], pass_fds=(descriptor,)
        )
        if pipe is None:
            child_end.close()
        # `close`, the garbage collector and the parent's exit all call it; it runs once.
        self._finalizer = weakref.finalize(
            self, _end_child, self.process, self.connection, os.getpid(), grace_seconds
        )

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called; the process may have died."""
        return self._finalizer.alive

    def receive(self) -> Any:
        """The next message. Raises EOFError if the process has ended, even if a process that it
        forked holds its end of the pipe open."""
        while not self.connection.poll(POLL_SECONDS):
            # The process may have sent its last message after the first poll, and then ended.
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
        """The answer to a request, of a process that runs `answer_requests`. `send` writes to the
        pipe what follows the arguments, such as tensors.

        Raises `RequestRaised` if the request raises an exception there, and another `ProcessLost`
        if the process dies, or takes longer than `seconds`. Any error closes the process: an answer
        could still come, and would be read as that to the next request."""
        if not self.is_open:
            raise RuntimeError(f"the {self.name} is closed")
        with self.time_limit(seconds) as timed_out:
            self._owes_answer = True
            try:
                # The process may have ended before this request. Then sending fails, but its last
                # message, which may say why it ended, can still be received.
                with suppress(BrokenPipeError):
                    self.connection.send((verb, arguments))
                    send(self.connection)
                failure, answer = self.receive()
            except (EOFError, OSError, ValueError, TypeError, pickle.UnpicklingError):
                report = f"the {self.name} was closed"
                if self.is_open:
                    report = self.exit_report()
                if timed_out.is_set():
                    report = (
                        f"the {self.name} gave no answer within {seconds:g} s ({self.timeout_flag})"
                    )
                raise ProcessLost(report) from None
            except BaseException:  # also Ctrl-C
                self.close()
                raise
            finally:
                self._owes_answer = False
        if failure:
            self.close()
            raise RequestRaised(self.name, failure)
        return answer

    def close(self) -> None:
        """End the process and everything it started, without the grace period if it has not
        answered a request. A second call does nothing."""
        if self._owes_answer:
            self.kill()
        self._finalizer()

    def kill(self) -> None:
        """Send SIGKILL to the process and everything it forked, without waiting for their end."""
        _kill_group(self.process)

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[threading.Event]:
        """Kill the process if the block takes longer than `seconds`: a block that sends or receives
        then fails instead of waiting for ever. Yields an event that is set if this happened."""
        timed_out = threading.Event()

        def kill_late() -> None:
            timed_out.set()
            self.kill()

        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), kill_late)
        timer.daemon = True
        timer.start()
        try:
            yield timed_out
        finally:
            timer.cancel()

    def last_logged(self, prefix: str) -> str:
        """The rest of the last line of the log that begins with `prefix`; "" if there is none."""
        descriptor = self._log.fileno()
        # The child writes at the file position that it shares with this process; `pread` does not
        # move it.
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
        for line in reversed(text.splitlines()):
            if line.startswith(prefix):
                return line.removeprefix(prefix)
        return ""

    def clear_log(self) -> None:
        """Make `exit_report` leave out everything that the log holds now."""
        self._log_start = os.fstat(self._log.fileno()).st_size

    def exit_report(self) -> str:
        """Close the process. Returns a line on how it ended, and the last ten lines of its log."""
        self.close()
        code = self.process.returncode
        ending = f"ended with exit code {code}"
        if code < 0:
            ending = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            ending += ", often a sign that memory ran out"
        self._log.seek(self._log_start)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return "\n".join([f"the {self.name} {ending}", *lines[-10:]])


def _end_child(
    process: subprocess.Popen, connection: Connection, parent: int, grace_seconds: float
) -> None:
    """Ask a child to end, by None through its pipe; after `grace_seconds` kill its process group.
    `parent` is the id of the process that started it."""
    if os.getpid() != parent:  # a process that the parent forked dropped its copy of the object
        return
    with suppress(OSError):
        if grace_seconds:
            connection.send(None)
    connection.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_seconds)
    end_command(process)


def no_advice(error: Exception) -> str:
    """No advice on any error: the default of `answer_requests`."""
    return ""


def answer_requests(
    descriptor: int,
    verbs: Mapping[str, Callable],
    advice: Callable[[Exception], str] = no_advice,
) -> None:
    """Answer the requests of a parent's `ChildProcess.ask`, which come through the pipe of this
    file descriptor, until one fails or None comes instead of a request.

    A request is (verb, arguments), and `verbs` has the function of each verb. The first request
    calls `verbs["start"](*arguments)`, which returns an object, such as an engine. Each later one
    calls `verbs[verb](object, connection, *arguments)`, and None calls `verbs["stop"](object)`.

    An answer is (failure, what the function returned). The failure is None, or the error in one
    line, followed by `advice(error)`."""
    connection = Connection(descriptor)
    try:
        _, arguments = connection.recv()
        served = verbs["start"](*arguments)
        collect_as_usual()
        connection.send((None, None))
        for verb, arguments in iter(connection.recv, None):
            connection.send((None, verbs[verb](served, connection, *arguments)))
        verbs["stop"](served)
    except Exception as error:
        with suppress(OSError):  # the parent may have closed the pipe, which was the error
            connection.send((f"{in_one_line(error)}{advice(error)}", None))
        raise  # so that the log has the traceback


def start_command(
    module: str,
    flags: Sequence[str],
    log: Path,
    folder: Path | None = None,
    threads: int | None = None,
) -> subprocess.Popen:
    """Start `python -m module flags` in `folder`, with `threads` OpenMP threads, and append its
    output to the file `log`. Raises `Interrupted` if a signal arrives meanwhile; the command is
    then killed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with log.open("ab") as output, ExitStack() as on_interrupt:
        # A signal waits until there is a process to kill, and then raises here.
        with deferred_signals():
            process = _start(["run", module, *flags], environment, output, cwd=folder)
            on_interrupt.callback(end_command, process)
        on_interrupt.pop_all()  # no signal came: forget the callback
    return process


def end_command(process: subprocess.Popen) -> None:
    """Kill a command with everything it started, and wait for its end."""
    _kill_group(process)
    process.wait()


def last_line(log: Path) -> str:
    """The last line of a log, blank lines at its end aside."""
    lines = log.read_text(errors="replace").strip().splitlines()
    if not lines:
        return "it said nothing"
    return lines[-1]


def _kill_group(process: subprocess.Popen) -> None:
    """Send SIGKILL to a child's process group, whose id is that of the child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO | int | None, **options
) -> subprocess.Popen:
    """Start child.py with these arguments, and `options` for `Popen`. `output` gets its standard
    output and errors. It finds the modules that this process finds, also a user's own module that a
    flag names."""
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
