"""Child processes on other machines, where a rank starts them with the connection from rank 0's
machine as their pipe. Here, a child process passes the bytes on, and is asked, closed and killed
like any other; when it ends, so does the remote. Both sides prove that they know a key, which
torchrun's store hands to rank 0; then they exchange pickles, unencrypted."""

import json
import os
import re
import secrets
import select
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

from alignment.system.processes import POLL_SECONDS, ChildProcess

CONNECT_SECONDS = 10
TORCHRUN = re.compile(
    r"((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
)


class Machine(NamedTuple):
    """Another machine, where a rank waits for connections."""

    name: str
    address: str
    port: int
    key: str
    seconds: float  # After which a machine that does not acknowledge what it is sent is lost.

    def start(self, name: str, entry: str, environment: Mapping[str, str]) -> ChildProcess:
        """As `ChildProcess`, but on this machine, whose own environment gets the variables that
        differ from this process's."""
        changes = dict(environment.items() - os.environ.items())
        process = json.dumps([self, entry, changes])
        own_environment = {**os.environ, "ALIGNMENT_REMOTE_PROCESS": process}
        return ChildProcess(name, f"{__name__}:forward", own_environment)


def forward(descriptor: int) -> None:
    """Pass on what this process's parent and a process on another machine write, until that one
    closes its end."""
    machine_fields, *request = json.loads(os.environ["ALIGNMENT_REMOTE_PROCESS"])
    machine = Machine(*machine_fields)
    # `descriptor` itself stays open until the exit code is there to be read.
    pipe = socket.socket(fileno=os.dup(descriptor))
    try:
        remote = socket.create_connection((machine.address, machine.port), CONNECT_SECONDS)
        connection = Connection(os.dup(remote.fileno()))
        if not connection.poll(CONNECT_SECONDS):
            raise TimeoutError("it says nothing")
        remote.settimeout(None)
        answer_challenge(connection, machine.key.encode())
        deliver_challenge(connection, machine.key.encode())
    except (OSError, EOFError, AuthenticationError) as error:
        sys.exit(
            f"{machine.name} does not answer at {machine.address}, port {machine.port}: {error}"
        )
    notice_silence(remote, machine.seconds)
    connection.send(request)
    threading.Thread(target=_copy, args=(pipe, remote), daemon=True).start()
    _copy(remote, pipe)
    sys.exit(
        f"the connection to {machine.name} has ended, or it was silent for {machine.seconds:g} s"
        " (--rank_timeout)"
    )


def notice_silence(remote: socket.socket, seconds: float) -> None:
    """Have a connection end where the other machine is silent for so many seconds, and be reset
    where this process ends."""
    probe = max(1, int(seconds / 3))
    options = {
        "TCP_NODELAY": 1,
        "TCP_USER_TIMEOUT": int(1000 * seconds),
        "TCP_KEEPIDLE": probe,
        "TCP_KEEPINTVL": probe,
    }
    for option, value in options.items():
        remote.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    remote.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The end of this process must not wait behind what a process that hangs has not read.
    remote.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Write to `target` what comes from `source`, and throw away what it does not take."""
    with suppress(OSError):
        while chunk := source.recv(2**20):
            with suppress(OSError):
                target.sendall(chunk)


def host_processes(name: str, seconds: float, store: tuple[str, int]) -> Machine:
    """Start processes for those who know the returned machine's key, at that of its addresses from
    which it reaches `store`."""
    with socket.create_connection(store) as route:
        own_address = route.getsockname()[0]
        server = socket.create_server((own_address, 0), family=route.family)
    address, port = server.getsockname()[:2]
    machine = Machine(name, address, port, secrets.token_hex(), seconds)
    key = machine.key.encode()

    def accept() -> None:
        while True:
            connection = Connection(server.accept()[0].detach())
            threading.Thread(target=_host, args=(connection, key), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return machine


def _host(connection: Connection, key: bytes) -> None:
    """Start the process that the other side asks for; kill it when that hangs up. One that ends
    first sends its exit report."""
    with connection, suppress(OSError, EOFError, AuthenticationError):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        entry, changes = connection.recv()
        environment = {
            variable: value
            for variable, value in os.environ.items()
            if not TORCHRUN.fullmatch(variable)
        }
        pipe = Connection(os.dup(connection.fileno()))
        child = ChildProcess("process", entry, environment | changes, grace_seconds=0, pipe=pipe)
        caller = select.poll()
        caller.register(connection, select.POLLRDHUP)
        while child.process.poll() is None and not caller.poll(1000 * POLL_SECONDS):
            pass
        connection.send((child.exit_report(), None))
