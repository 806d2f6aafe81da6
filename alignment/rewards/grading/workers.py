"""Grading in processes that can be killed: a pool of workers with a time and a memory limit each.

A worker is a program of its own, started without fork and without the caller's `__main__`, so it works from any thread,
from a daemonic process, and inside other pools. It talks JSON over a socket, nothing is unpickled.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from alignment.rewards.grading.ask_math_verify import may_ask

MATH_VERIFY_SECONDS = 1.5  # of computing, for math-verify on one pair; a busy machine gets some more time by the clock
CLOCK = 1.2  # seconds by the clock for each of computing
GRACE_SECONDS = 0.15  # after which a worker that does not report its child's end is ended itself
CHUNK_SECONDS = 60.0  # for a chunk of pairs, each of which takes a few milliseconds at most
START_SECONDS = 120.0  # for the imports of a new worker, on a machine that is busy
MEMORY_BYTES = 2 << 30  # address space of a worker, of which its imports take about a quarter; Linux only

Outcome = tuple[bool, str]


class Failed(Exception):
    """The request was not answered; the argument says why: "time-out", "memory" or "died" (killed, or crashed in C)."""


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self) -> None:
        self.pipe, child = Pipe()
        root = str(Path(__file__).parents[3])
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
        """The reply. Raises `Failed`; the worker itself is gone then only if `alive` is false."""
        if not self.ready:
            self._receive(START_SECONDS)
            self.ready = True
        try:
            self.pipe.send_bytes(json.dumps({**request, "seconds": seconds}).encode())
        except OSError:
            self.close()
            raise Failed("died") from None
        reply = self._receive(seconds * CLOCK + GRACE_SECONDS)
        if "failure" in reply:
            raise Failed(reply["failure"])
        return reply

    def _receive(self, seconds: float) -> dict:
        try:
            if self.pipe.poll(seconds):
                return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.close()
            raise Failed("died") from None
        self.close()
        raise Failed("time-out")

    @property
    def alive(self) -> bool:
        return not self.pipe.closed

    def close(self) -> None:
        with suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.pipe.close()


class _Pool:
    """At most `size` workers, each waited for by a thread of this process. One is started where no other is idle."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.threads = ThreadPoolExecutor(size, "grading")
        self.idle: list[_Worker] = []  # the last one to rest is the first to work again: it is ready
        self.workers: set[_Worker] = set()

    def submit(self, request: dict, seconds: float) -> Future[dict]:
        """The reply to come, or `Failed`. The seconds count from when a worker takes the request up."""
        return self.threads.submit(self._ask, request, seconds)

    def warm_up(self) -> None:
        """Start a worker, if there is none yet, without waiting for its imports."""
        if not self.workers:
            self.threads.submit(lambda: self._rest(self._take()))

    def _take(self) -> _Worker:
        try:
            return self.idle.pop()
        except IndexError:
            worker = _Worker()
            self.workers.add(worker)
            return worker

    def _rest(self, worker: _Worker) -> None:
        if worker.alive:
            self.idle.append(worker)
        else:
            self.workers.discard(worker)

    def _ask(self, request: dict, seconds: float) -> dict:
        worker = self._take()
        try:
            return worker.ask(request, seconds)
        finally:
            self._rest(worker)

    def close(self) -> None:
        """End all workers; requests under way fail."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self.workers):
            worker.process.kill()
        self.threads.shutdown(wait=True)
        for worker in list(self.workers):
            worker.close()
        self.workers.clear()
        self.idle.clear()


_pool: _Pool | None = None
_pool_lock = threading.Lock()


def pool() -> _Pool:
    """This process's workers."""
    global _pool
    with _pool_lock:
        if _pool is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            _pool = _Pool(cores)
            atexit.register(_pool.close)
        return _pool


def _forget() -> None:
    """A forked child shares its parent's sockets, so it starts workers of its own."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


# --- what the workers are asked ---------------------------------------------------------------------------


def ask_math_verify(answer: str, truth: str) -> Outcome:
    """math-verify's verdict on two normalised texts, and "math-verify", "unread" where it is not asked, or the failure:
    "time-out", "memory" or "died"."""
    return (
        _outcome(pool().submit({"math_verify": (answer, truth)}, MATH_VERIFY_SECONDS))
        if may_ask(answer, truth)
        else (False, "unread")
    )


def math_verify_many(pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
    """math-verify's own verdict on answers as they were written, with what it took them for; for audits."""
    asked = [pool().submit({"peer": pair}, MATH_VERIFY_SECONDS) if max(map(len, pair)) <= 1000 else None for pair in pairs]
    return [(False, "too long to ask") if reply is None else _outcome(reply) for reply in asked]


def decide_many(pairs: Sequence[tuple[str, str]], fast: bool) -> list[Outcome]:
    """The stages short of math-verify on many pairs, in order, spread over the workers."""
    size = max(64, -(-len(pairs) // (4 * pool().size)))
    chunks = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    asked = [pool().submit({"decide": chunk, "fast": fast}, CHUNK_SECONDS) for chunk in chunks]
    return [outcome for chunk, reply in zip(chunks, asked, strict=True) for outcome in _outcomes(chunk, reply, fast)]


def _outcomes(chunk: Sequence[tuple[str, str]], reply: Future[dict], fast: bool) -> list[Outcome]:
    try:
        return [(equal, stage) for equal, stage in reply.result()["outcomes"]]
    except Failed as failure:
        if len(chunk) == 1:
            return [(False, str(failure))]
        return [outcome for pair in chunk for outcome in decide_many([pair], fast)]  # find the one that did it


def _outcome(reply: Future[dict]) -> Outcome:
    try:
        return reply.result()["equal"], reply.result()["stage"]
    except Failed as failure:
        return False, str(failure)


# --- the worker's end ---------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Answer requests until the parent is gone, each in a forked child: ending it costs no new imports."""
    for number in (signal.SIGINT, signal.SIGTERM):  # when to end is the parent's to say, by closing the socket or by SIGKILL
        signal.signal(number, signal.SIG_IGN)
    import math_verify  # noqa: F401  takes seconds, which are not to count as the first request's

    from alignment.rewards import r1_zero  # noqa: F401

    pipe = Connection(descriptor)
    pipe.send_bytes(b"{}")
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_in_child(request))


def _in_child(request: dict) -> bytes:
    """The reply of a child of this process, which is killed when its time is up, or what became of it."""
    receiver, sender = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        # The kernel ends this process when it has computed for so long, and soon after its time by the clock, whatever
        # becomes of the parents meanwhile.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] * CLOCK + 5)
        _limit_memory()
        try:
            sender.send_bytes(json.dumps(_answer(request)).encode())
        except MemoryError:
            sender.send_bytes(b'{"failure": "memory"}')
        finally:
            os._exit(0)
    sender.close()
    reply = b""
    late = not receiver.poll(request["seconds"] * CLOCK)
    with suppress(EOFError):
        reply = b"" if late else receiver.recv_bytes()
    receiver.close()
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF)
    return reply or (b'{"failure": "time-out"}' if late else b'{"failure": "died"}')


def _answer(request: dict) -> dict:
    from alignment.rewards import r1_zero
    from alignment.rewards.grading.ask_math_verify import math_verify_equal, math_verify_reading

    if "math_verify" in request:
        return {"equal": math_verify_equal(*request["math_verify"]), "stage": "math-verify"}
    if "peer" in request:
        equal, stage = math_verify_reading(*request["peer"])
        return {"equal": equal, "stage": stage}
    verdicts = (r1_zero._decide(answer, truth, request["fast"]) for answer, truth in request["decide"])
    return {"outcomes": [(verdict.equal, verdict.stage) for verdict in verdicts]}


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))
