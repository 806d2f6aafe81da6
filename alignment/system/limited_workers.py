"""Function calls in processes that can be killed. A worker imports its modules once and forks a
child for each call, whose work and memory it limits: ending a call costs no new imports. Messages
are JSON: the parent never unpickles what a worker sends.

Work is counted in calls of Python functions, so that what is within the limit on an idle machine is
within it on a busy one. Clocks only guard against what makes no such calls: a computation in C, a
wait without end. Counting, by `sys.settrace`, doubles the time, so a call first runs uncounted for
as short a time as even a fast machine needs for the allowed number."""

import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import psutil

from alignment.system.processes import ChildProcess

# Of Python functions in a second of CPU time: more than a processor makes. Sympy made 1 to 3
# million.
CALLS_PER_SECOND = 6_000_000
# Between two looks at a call; one that sleeps at both and has computed nothing in between is ended.
LOOK_SECONDS = 0.4
CLOCK_SECONDS = 300.0  # by the clock, after which a call or a worker is ended whatever it does
START_SECONDS = 120.0  # for the imports of a new worker, on a busy machine
# address space of a call, of which a worker's imports take about a quarter; Linux only
MEMORY_BYTES = 2 << 30


class CallFailed(Exception):
    """A call gave no answer; the argument is "work" (more calls of functions than allowed),
    "time-out", "memory" or "died" (killed, crashed in C, or an exception)."""


class LimitedWorkers:
    """At most `size` threads (default: one a core), each with a worker process that starts with its
    first call. Any thread, daemonic process or pool may use them; a forked child of this process
    starts workers of its own."""

    def __init__(self, modules: Sequence[str], size: int | None = None):
        self.modules = tuple(modules)
        self.size = size or usable_cores()
        self._start_empty()
        # The workers' pipes belong to the parent.
        os.register_at_fork(after_in_child=self._start_empty)

    def _start_empty(self) -> None:
        self._threads = ThreadPoolExecutor(self.size, "limited_workers")
        # By thread. A thread replaces an ended worker with its next call.
        self.workers: dict[int, _Worker] = {}

    def submit(
        self, function: str, arguments: Sequence, seconds: float, calls: int | None = None
    ) -> Future:
        """The future answer of `function`, "module:function", or `CallFailed`. It may call `calls`
        Python functions, of any number if None; `seconds` of CPU time, which begin with the call,
        are a guard."""

        def call_worker() -> Any:
            return self._worker().call(function, arguments, seconds, calls)

        return self._threads.submit(call_worker)

    def warm_up(self) -> None:
        """Start a worker if there is none, without waiting for its imports."""
        if not any(worker.is_open for worker in list(self.workers.values())):
            self._threads.submit(self._worker)

    def close(self) -> None:
        """End all workers; calls that are running fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self.workers.values()):
            if worker.is_open:
                worker.kill()
        self._threads.shutdown(wait=True)
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    def _worker(self) -> "_Worker":
        """This thread's worker: a new one where it has none, or an ended one."""
        thread = threading.get_ident()
        worker = self.workers.get(thread)
        if worker is None or not worker.is_open:
            worker = _Worker(self.modules)
            self.workers[thread] = worker
        return worker


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Worker(ChildProcess):
    """The parent's end of one worker process."""

    def __init__(self, modules: Sequence[str]):
        # The order of sets, and with it the number of calls, depends on the seed of hashes.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        super().__init__(
            "worker", f"{__name__}:serve", environment, output="discard", grace_seconds=0
        )
        self._seconds_to_start = START_SECONDS  # 0 once the worker has answered.
        self._send(modules)

    def call(self, function: str, arguments: Sequence, seconds: float, calls: int | None) -> Any:
        """The answer. Raises `CallFailed`, and closes the worker if the worker itself died or
        hangs."""
        self._send([function, arguments, seconds, calls])
        failure = "time-out"
        try:
            if self.connection.poll(self._seconds_to_start + 2 * CLOCK_SECONDS):
                self._seconds_to_start = 0
                call_failure, answer = json.loads(self.connection.recv_bytes())
                if call_failure:
                    raise CallFailed(call_failure)
                return answer
        except (EOFError, OSError):
            failure = "died"
        self.close()
        raise CallFailed(failure)

    def _send(self, message: Sequence) -> None:
        with suppress(OSError):  # a worker that is dead fails when its answer is read
            self.connection.send_bytes(json.dumps(message).encode())


def serve(descriptor: int) -> None:
    """Import the modules that the parent names, then answer its calls until it closes the pipe."""
    pipe = Connection(descriptor)
    with suppress(EOFError):
        for module in json.loads(pipe.recv_bytes()):
            importlib.import_module(module)
        while True:
            pipe.send_bytes(_limited_call(*json.loads(pipe.recv_bytes())))


def _limited_call(function: str, arguments: Sequence, seconds: float, calls: int | None) -> bytes:
    """The reply to a call, [failure, answer]. One that ends within the first, uncounted attempt
    made fewer than `calls` calls."""
    if calls is not None:
        reply = _call_in_fork(function, arguments, max(calls / CALLS_PER_SECOND, 0.001), None)
        if reply != _COMPUTES:
            return reply
    reply = _call_in_fork(function, arguments, seconds, calls)
    if reply == _COMPUTES:
        return _TIMED_OUT
    return reply


_TIMED_OUT = b'["time-out", null]'
_COMPUTES = b'["computes", null]'


def _call_in_fork(function: str, arguments: Sequence, seconds: float, calls: int | None) -> bytes:
    """The reply of a forked child; `_COMPUTES` where `seconds` of CPU time were not enough. The
    child is killed when it has answered or a limit is met."""
    receiver, sender = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _answer(function, arguments, seconds, calls, sender)
    sender.close()
    reply = b""
    if _wait(receiver, child):
        with suppress(EOFError):
            reply = receiver.recv_bytes()
    else:
        reply = _TIMED_OUT
    receiver.close()
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    endings = {-signal.SIGPROF: _COMPUTES, -signal.SIGALRM: _TIMED_OUT}
    return reply or endings.get(os.waitstatus_to_exitcode(status), b'["died", null]')


def _answer(
    function: str, arguments: Sequence, seconds: float, calls: int | None, sender: Connection
) -> None:
    """Send the answer of a call, and end this process."""
    try:
        # The timers end this process even if all of its parents are gone.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
        with suppress(ValueError, OSError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
        resolved = pkgutil.resolve_name(function)
        if calls is not None:
            _limit_calls(calls, sender)
        answer = resolved(*arguments)
        sys.settrace(None)
        sender.send_bytes(json.dumps([None, answer]).encode())
    except MemoryError:
        sys.settrace(None)
        sender.send_bytes(b'["memory", null]')
    finally:
        os._exit(0)


def _limit_calls(calls: int, sender: Connection) -> None:
    """Let this process end, with the reply "work", at the call of a Python function that is one too
    many."""
    remaining = calls

    def count(frame, event, argument) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            sender.send_bytes(b'["work", null]')
            os._exit(0)

    sys.settrace(count)


def _wait(receiver: Connection, child: int) -> bool:
    """Whether a child has answered or ended, once it has; false where it sleeps without end. One
    that waits for a busy processor does not sleep."""
    process = psutil.Process(child)
    used_before = -1.0  # Seconds of CPU time.
    while not receiver.poll(LOOK_SECONDS):
        times = process.cpu_times()
        used = times.user + times.system
        if used == used_before and process.status() == psutil.STATUS_SLEEPING:
            return False
        used_before = used
    return True
