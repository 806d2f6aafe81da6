"""Grading in processes that can be killed: a pool of workers with a time and a memory limit each.

A worker is a program of its own, started without fork and without the caller's `__main__`, so it works from any thread,
from a daemonic process, and inside other pools. It talks JSON over a socket, nothing is unpickled.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

WITNESS_SECONDS = 2.0  # for math-verify on one pair
CHUNK_SECONDS = 60.0  # for a chunk of pairs, each of which takes a few milliseconds at most
START_SECONDS = 120.0  # for the imports of a new worker, on a machine that is busy
MEMORY_BYTES = 2 << 30  # address space of a worker, of which its imports take about a quarter; Linux only

Outcome = tuple[bool, str]


class TimeOut(Exception):
    """The worker did not answer in time, and was killed."""


class Died(Exception):
    """The worker ended by itself: out of memory in a C library, or killed from outside."""


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self) -> None:
        self.pipe, child = Pipe()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        code = "import sys; from alignment.grading.workers import serve; serve(int(sys.argv[1]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(child.fileno())],
            pass_fds=[child.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )
        child.close()
        self.ready = False

    def ask(self, request: dict, seconds: float) -> dict:
        """The worker's answer. Raises `TimeOut` or `Died`; the worker is gone then."""
        try:
            if not self.ready:
                self._receive(START_SECONDS)
                self.ready = True
            self.pipe.send_bytes(json.dumps({**request, "seconds": seconds}).encode())
            return self._receive(seconds)
        except (TimeOut, Died):
            self.close()
            raise
        except OSError:
            self.close()
            raise Died from None

    def _receive(self, seconds: float) -> dict:
        if not self.pipe.poll(seconds):
            raise TimeOut
        try:
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise Died from None

    def close(self) -> None:
        with suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.pipe.close()


class _Pool:
    """As many workers as there are cores, started when first needed; a request waits until one is free."""

    def __init__(self) -> None:
        self.size = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.lock = threading.Lock()
        self.free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self.workers: set[_Worker] = set()
        for _ in range(self.size):
            self.free.put(None)

    def ask(self, request: dict, seconds: float) -> dict:
        """One request to one worker. Raises `TimeOut` or `Died`; its place in the pool is free again in any case."""
        worker = self.free.get()
        try:
            if worker is None:
                worker = _Worker()
                with self.lock:
                    self.workers.add(worker)
            return worker.ask(request, seconds)
        except BaseException:
            if worker is not None:
                worker.close()
                with self.lock:
                    self.workers.discard(worker)
            worker = None
            raise
        finally:
            self.free.put(worker)

    def close(self) -> None:
        with self.lock:
            for worker in self.workers:
                worker.close()
            self.workers.clear()


_pool: _Pool | None = None
_pool_lock = threading.Lock()


def pool() -> _Pool:
    """This process's workers."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = _Pool()
            atexit.register(_pool.close)
        return _pool


def _forget() -> None:
    """A forked child shares its parent's sockets, so it starts workers of its own."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


# --- what the workers are asked ---------------------------------------------------------------------------


def witness(answer: str, truth: str) -> Outcome:
    """math-verify's verdict on two normalised texts, and "math-verify", "unread" where it is not asked, or the failure:
    "time-out", "memory" or "died"."""
    from alignment.grading.witness import may_ask

    if not (may_ask(answer) and may_ask(truth)):
        return False, "unread"
    try:
        reply = pool().ask({"witness": [answer, truth]}, WITNESS_SECONDS)
    except TimeOut:
        return False, "time-out"
    except Died:
        return False, "died"
    return reply["equal"], reply["stage"]


def decide_many(pairs: Sequence[tuple[str, str]], fast: bool) -> list[Outcome]:
    """The stages short of math-verify on many pairs, in order, spread over the workers."""
    size = max(64, -(-len(pairs) // (4 * pool().size)))
    chunks = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    with ThreadPoolExecutor(pool().size) as threads:
        return [outcome for outcomes in threads.map(lambda chunk: _decide_chunk(chunk, fast), chunks) for outcome in outcomes]


def witness_many(pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
    """`witness` on many pairs, in order, as many at a time as there are workers."""
    with ThreadPoolExecutor(pool().size) as threads:
        return list(threads.map(lambda pair: witness(*pair), pairs))


def math_verify_many(pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
    """math-verify's own verdict on answers as they were written, with what it took them for; for audits."""

    def ask(pair: tuple[str, str]) -> Outcome:
        if max(map(len, pair)) > 1000:
            return False, "too long to ask"
        try:
            reply = pool().ask({"peer": list(pair)}, WITNESS_SECONDS)
        except (TimeOut, Died) as failure:
            return False, "time-out" if isinstance(failure, TimeOut) else "died"
        return reply["equal"], reply["stage"]

    with ThreadPoolExecutor(pool().size) as threads:
        return list(threads.map(ask, pairs))


def _decide_chunk(chunk: Sequence[tuple[str, str]], fast: bool) -> list[Outcome]:
    try:
        reply = pool().ask({"decide": list(chunk), "fast": fast}, CHUNK_SECONDS)
        return [(equal, stage) for equal, stage in reply["outcomes"]]
    except (TimeOut, Died) as failure:
        if len(chunk) == 1:
            return [(False, "time-out" if isinstance(failure, TimeOut) else "died")]
        return [outcome for pair in chunk for outcome in _decide_chunk([pair], fast)]  # find the one that did it


# --- the worker's end ---------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Answer requests until the parent is gone."""
    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import math_verify  # noqa: F401  takes seconds, which are not to count as the first request's

    from alignment import drgrpo_grader
    from alignment.grading.witness import math_verify_equal, math_verify_reading

    pipe = Connection(descriptor)
    pipe.send_bytes(b"{}")
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        # Whatever happens to the parent meanwhile, the kernel ends this process soon after its time is up.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 5)
        try:
            if "witness" in request:
                reply = {"equal": math_verify_equal(*request["witness"]), "stage": "math-verify"}
            elif "peer" in request:
                equal, stage = math_verify_reading(*request["peer"])
                reply = {"equal": equal, "stage": stage}
            else:
                verdicts = (drgrpo_grader._decide(a, t, request["fast"]) for a, t in request["decide"])
                reply = {"outcomes": [(verdict.equal, verdict.stage) for verdict in verdicts]}
        except MemoryError:
            reply = {"equal": False, "stage": "memory"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(json.dumps(reply).encode())


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
