"""Child processes on other machines, of which another process here takes the part."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from alignment.system.processes import ChildProcess, ProcessLost, answer_requests
from alignment.system.remote import Machine, ProcessHost

HERE, PATH = f"{__name__}:serve", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])


def serve(descriptor: int) -> None:
    answer_requests(descriptor, VERBS)


def fail(message: str) -> None:
    print("the last line", flush=True)
    os._exit(3)


def parts(number: int) -> list[bytes]:
    return [bytes([part]) * number for part in range(3)]


def send_parts(number: int, connection: Connection) -> None:
    for part in parts(number):
        connection.send_bytes(part)


VERBS = {
    "start": lambda *arguments: arguments,
    "who": lambda started, _: (
        started,
        os.getpid(),
        os.getppid(),
        os.environ.get("GIVEN"),
        os.environ.get("RANK"),
    ),
    "receive": lambda _, connection, number: all(
        connection.recv_bytes() == part for part in parts(number)
    ),
    "fail": lambda started, connection: fail("now"),
    "raise": lambda started, connection: 1 / 0,
    "sleep": lambda started, connection: time.sleep(600),
    "stop": lambda started: None,
}


def be_a_machine() -> None:
    """Host processes until standard input ends."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        host = ProcessHost("b (rank 2)", 3.0, store.getsockname())
        print(json.dumps(host.machine), flush=True)
        sys.stdin.read()


@contextmanager
def hosting():
    """The process that hosts, and the machine that it is."""
    environment = {**os.environ, "PYTHONPATH": PATH, "RANK": "2", "GIVEN": "by the machine"}
    line = [sys.executable, "-c", f"from {__name__} import be_a_machine; be_a_machine()"]
    with subprocess.Popen(
        line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, Machine(*json.loads(process.stdout.readline()))
        process.kill()


@pytest.fixture(scope="module")
def host():
    with hosting() as found:
        yield found


@pytest.fixture
def engine(host):
    before = set(psutil.Process().children(recursive=True))
    started = host[1].start("engine", HERE, {**os.environ, "GIVEN": "by rank 0"})
    started.ask(60, "start", "a", 1)
    yield started
    started.close()
    wait_for_end(*set(psutil.Process().children(recursive=True)) - before)


def wait_for_end(*processes: psutil.Process) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


def test_a_process_runs_on_the_machine_in_its_environment_with_what_rank_0_changes(engine, host):
    started, pid, parent, given, rank = engine.ask(60, "who")
    assert (started, given, rank) == (("a", 1), "by rank 0", None) and parent == host[0].pid
    engine.close()
    wait_for_end(*[psutil.Process(pid)] if psutil.pid_exists(pid) else [])


@pytest.mark.parametrize("number", [0, 1, 2**20 + 1, 2**24])
def test_what_is_sent_arrives_whole(number, engine):
    assert engine.ask(60, "receive", number, send=partial(send_parts, number))


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("fail", "failed: the process ended with exit code 3\nthe last line"),
        ("raise", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_how_a_process_ends_is_told(verb, words, engine):
    with pytest.raises(ProcessLost, match=f"^the engine {words}"):
        engine.ask(60, verb)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [True, False])
def test_a_killed_process_is_lost_when_it_is_asked_and_when_not(asked, engine):
    pid = engine.ask(60, "who")[1]
    threading.Timer(0.5 if asked else 0, os.kill, (pid, signal.SIGKILL)).start()
    time.sleep(0 if asked else 2)
    start = time.monotonic()
    with pytest.raises(
        ProcessLost, match="^the engine failed: the process was killed by SIGKILL, often a sign"
    ):
        engine.ask(60, "sleep")
    assert time.monotonic() - start < 5


def test_a_process_that_hangs_is_killed_though_it_has_not_read_what_was_sent(engine):
    process = psutil.Process(engine.ask(60, "who")[1])
    process.suspend()
    with pytest.raises(ProcessLost, match="^the engine gave no answer within 1 s"):
        engine.ask(1, "receive", 2**26, send=partial(send_parts, 2**26))
    wait_for_end(process)


@pytest.mark.slow
def test_a_lost_machine_is_named_and_ends_its_processes():
    with hosting() as (host, machine):
        engine = machine.start("engine", HERE, os.environ)
        engine.ask(60, "start")
        process = psutil.Process(engine.ask(60, "who")[1])
        host.kill()
        with pytest.raises(
            ProcessLost,
            match=r"^the engine ended with exit code 1\nthe connection to b \(rank 2\) has ended",
        ):
            engine.ask(60, "sleep")
        wait_for_end(process)
        with pytest.raises(
            ProcessLost,
            match=(
                r"^the engine ended with exit code 1\nb \(rank 2\) does not answer at 127.0.0.1,"
                r" port \d+"
            ),
        ):
            machine.start("engine", HERE, os.environ).ask(60, "start")


def test_who_does_not_know_the_key_starts_nothing(host):
    process, machine = host
    with pytest.raises(ProcessLost, match="does not answer"):
        machine._replace(key="another").start("engine", HERE, os.environ).ask(60, "start")
    with socket.create_connection(("127.0.0.1", machine.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        # whom a stranger does not keep waiting
        machine.start("engine", HERE, os.environ).ask(60, "start")
    assert len(psutil.Process(process.pid).children()) <= 1


def test_the_end_of_the_caller_ends_the_process(host):
    """Also where it is killed, and says nothing more."""
    caller = ChildProcess(
        "caller",
        f"{__name__}:call",
        {**os.environ, "PYTHONPATH": PATH, "MACHINE": json.dumps(host[1])},
    )
    process = psutil.Process(caller.receive())
    caller.process.kill()
    wait_for_end(process)


def call(descriptor: int) -> None:
    engine = Machine(*json.loads(os.environ["MACHINE"])).start("engine", HERE, os.environ)
    engine.ask(60, "start")
    Connection(descriptor).send(engine.ask(60, "who")[1])
    engine.ask(600, "sleep")
