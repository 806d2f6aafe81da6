"""Function calls in processes that can be killed, with limits on work, time and memory. A worker
imports its modules once and forks a child for each call, so killing a call costs no new imports.
Messages are JSON: the parent never unpickles what a worker sends.

Work is counted in calls of Python functions. This number, unlike a time, is the same on an idle and
on a busy machine. Clocks only guard against what makes no such calls: a computation in C, or an
endless wait.

`sys.settrace` counts, which doubles the time. So each call first runs without counting, for the
time in which the fastest machine could just make the allowed number of calls. A call that ends
within that time is within the limit; any other is started again, and counted."""

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

from alignment.system.garbage import collect_as_usual
from alignment.system.processes import ChildProcess

# Calls of Python functions in a second of CPU time: more than any processor makes. Sympy was
# measured at 1 to 3 million.
CALLS_PER_SECOND = 6_000_000
# Seconds between two checks of a call. A call that has used no CPU time between two checks, and
# sleeps at the second, is killed.
LOOK_SECONDS = 0.4
CLOCK_SECONDS = 300.0  # Wall-clock time after which a call is killed, whatever it does.
START_SECONDS = 120.0  # Wall-clock time for the imports of a new worker, on a busy machine.
# Address space of a call, of which the worker's imports take about a quarter. Linux only.
MEMORY_BYTES = 2 << 30


class CallFailed(Exception):
    """A call gave no answer. The argument is the reason: "work" (more function calls than allowed),
    "time-out", "memory", or "died" (it was killed, crashed in C, or raised an exception)."""


class LimitedWorkers:
    """A pool of at most `size` threads (default: one for each core). Each thread has a worker
    process, which starts at the thread's first call. Any thread, daemonic process or process pool
    may use it; a forked child of this process starts workers of its own."""

    def __init__(self, modules: Sequence[str], size: int | None = None):
        self.modules = tuple(modules)
        self.size = size or usable_cores()
        self._start_empty()
        # A forked child must not use the workers' pipes, which belong to its parent.
        os.register_at_fork(after_in_child=self._start_empty)

    def _start_empty(self) -> None:
        self._threads = ThreadPoolExecutor(self.size, "limited_workers")
        # Thread id -> worker. At its next call a thread replaces a worker that has ended.
        self.workers: dict[int, _Worker] = {}

    def submit(
        self, function: str, arguments: Sequence, seconds: float, calls: int | None = None
    ) -> Future:
        """Call `function`, given as "module:function". The future has its answer, or raises
        `CallFailed` where it makes more than `calls` calls of Python functions (None: no limit) or
        uses more than `seconds` of CPU time."""

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
        """This thread's worker; a new one if it has none or if its worker has ended."""
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
        # The hash seed decides the order of sets, and with it the number of function calls.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        super().__init__(
            "worker", f"{__name__}:serve", environment, output="discard", grace_seconds=0
        )
        self._seconds_to_start = START_SECONDS  # 0 once the worker has answered.
        self._send(modules)

    def call(self, function: str, arguments: Sequence, seconds: float, calls: int | None) -> Any:
        """The answer of the call. Raises `CallFailed`. Closes the worker where the worker itself,
        and not just its call, has died or hangs."""
        self._send([function, arguments, seconds, calls])
        failure = "time-out"
        try:
            # The worker makes two attempts, an uncounted and a counted one (`_limited_call`).
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
        collect_as_usual()
        while True:
            pipe.send_bytes(_limited_call(*json.loads(pipe.recv_bytes())))


def _limited_call(function: str, arguments: Sequence, seconds: float, calls: int | None) -> bytes:
    """The reply to a call, [failure, answer] as JSON."""
    if calls is not None:
        # No machine makes more than `calls` calls in this time, so nothing has to be counted.
        uncounted_seconds = max(calls / CALLS_PER_SECOND, 0.001)
        reply = _call_in_fork(function, arguments, uncounted_seconds, None)
        if reply != _OUT_OF_CPU_TIME:
            return reply
    reply = _call_in_fork(function, arguments, seconds, calls)
    if reply == _OUT_OF_CPU_TIME:
        return _TIMED_OUT
    return reply


_TIMED_OUT = b'["time-out", null]'
_OUT_OF_CPU_TIME = b'["out of CPU time", null]'  # never sent to the parent


def _call_in_fork(function: str, arguments: Sequence, seconds: float, calls: int | None) -> bytes:
    """The reply of a forked child that makes the call; `_OUT_OF_CPU_TIME` where `seconds` of CPU
    time were not enough. Kills the child once it has answered or met a limit."""
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
    endings = {-signal.SIGPROF: _OUT_OF_CPU_TIME, -signal.SIGALRM: _TIMED_OUT}
    return reply or endings.get(os.waitstatus_to_exitcode(status), b'["died", null]')


def _answer(
    function: str, arguments: Sequence, seconds: float, calls: int | None, sender: Connection
) -> None:
    """Make a call in this process, send the answer, and end the process: this never returns."""
    try:
        # The timers kill this process even if its parents are gone: SIGPROF after CPU time, SIGALRM
        # by the clock.
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
    """Have this process reply "work" and end when it makes one more call of a Python function than
    `calls`."""
    remaining = calls

    def count(frame, event, argument) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            sender.send_bytes(b'["work", null]')
            os._exit(0)

    sys.settrace(count)


def _wait(receiver: Connection, child: int) -> bool:
    """Wait for a child. True once it has answered or ended; false if it sleeps and uses no CPU
    time. A child that waits for a busy processor is runnable, which is not asleep."""
    process = psutil.Process(child)
    used_before = -1.0  # Seconds of CPU time.
    while not receiver.poll(LOOK_SECONDS):
        times = process.cpu_times()
        used = times.user + times.system
        if used == used_before and process.status() == psutil.STATUS_SLEEPING:
            return False
        used_before = used
    return True
