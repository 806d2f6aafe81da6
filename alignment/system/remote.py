"""Child processes on other machines.

On the other machine, a rank's `ProcessHost` listens for connections and starts a process for each:
the connection is that process's pipe. On rank 0's machine, `Machine.start` starts a local child
process that runs `forward`: it connects to the other machine and copies bytes between its own pipe
and the connection. Rank 0 asks, closes and kills this local child like any other `ChildProcess`;
when it ends, the process on the other machine is killed.

Both sides of a connection prove that they know a key, which rank 0 reads from torchrun's store.
Then they exchange pickles, unencrypted."""

import json
import os
import re
import secrets
import select
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

from alignment.system.processes import POLL_SECONDS, ChildProcess

CONNECT_SECONDS = 10
# The environment variables that torchrun sets for each rank.
TORCHRUN_VARIABLE = re.compile(
    r"((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
)


class Machine(NamedTuple):
    """Another machine, where a `ProcessHost` listens for connections."""

    name: str
    address: str
    port: int
    key: str
    # A machine that acknowledges nothing for so long is lost.
    seconds: float

    def start(self, name: str, entry: str, environment: Mapping[str, str]) -> ChildProcess:
        """Like `ChildProcess(name, entry, environment)`, but `entry` runs on this machine. Its
        environment is this machine's own, with those variables of `environment` that differ from
        the calling process's."""
        changes = dict(environment.items() - os.environ.items())
        process = json.dumps([self, entry, changes])
        own_environment = {**os.environ, "ALIGNMENT_REMOTE_PROCESS": process}
        return ChildProcess(name, f"{__name__}:forward", own_environment)


def forward(descriptor: int) -> None:
    """Copy bytes between this process's parent, at the pipe `descriptor`, and a process on another
    machine, until that process closes the connection."""
    machine_fields, *request = json.loads(os.environ["ALIGNMENT_REMOTE_PROCESS"])
    machine = Machine(*machine_fields)
    # A duplicate, so that the pipe closes only when this process exits: the parent, which reads the
    # exit code when the pipe closes, finds one.
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
    # Each direction has a thread of its own.
    threading.Thread(target=_copy, args=(pipe, remote), daemon=True).start()
    _copy(remote, pipe)
    sys.exit(
        f"the connection to {machine.name} has ended, or it was silent for {machine.seconds:g} s"
        " (--rank_timeout)"
    )


def notice_silence(remote: socket.socket, seconds: float) -> None:
    """Set up a connection so that it fails once the other machine acknowledges nothing for so many
    seconds, and is reset as soon as this process ends."""
    # An idle connection is probed three times in that period.
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
    # To linger for 0 s is to reset the connection when it is closed. Otherwise the other side would
    # learn of the close only after it has read all bytes sent before, and one that hangs never
    # does.
    linger_for_0_seconds = struct.pack("ii", 1, 0)
    remote.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_0_seconds)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes from `source` to `target` until `source` ends; drop those that come after `target`
    is closed."""
    with suppress(OSError):
        while chunk := source.recv(2**20):
            with suppress(OSError):
                target.sendall(chunk)


class ProcessHost:
    """Listens, in a thread, for connections from rank 0, and starts a process for each.

    `machine` has what rank 0 needs to connect. Its address is the one with which this machine
    connects to torchrun's `store`, which is on rank 0's machine."""

    def __init__(self, name: str, seconds: float, store: tuple[str, int]):
        with socket.create_connection(store) as route:
            own_address = route.getsockname()[0]
            self._server = socket.create_server((own_address, 0), family=route.family)
        address, port = self._server.getsockname()[:2]
        self.machine = Machine(name, address, port, secrets.token_hex(), seconds)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no longer; processes that were started go on."""
        # closing a socket does not end an `accept` that waits for it
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _accept(self) -> None:
        key = self.machine.key.encode()
        with suppress(OSError):  # what `accept` raises once the socket is shut down
            while True:
                connection = Connection(self._server.accept()[0].detach())
                threading.Thread(target=_host, args=(connection, key), daemon=True).start()


def _host(connection: Connection, key: bytes) -> None:
    """Start the process that the other side asks for, with the connection as its pipe. Kill it when
    the other side closes the connection; if the process ends first, send its exit report."""
    with connection, suppress(OSError, EOFError, AuthenticationError):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        entry, changes = connection.recv()
        environment = {
            variable: value
            for variable, value in os.environ.items()
            if not TORCHRUN_VARIABLE.fullmatch(variable)
        }
        pipe = Connection(os.dup(connection.fileno()))
        child = ChildProcess("process", entry, environment | changes, grace_seconds=0, pipe=pipe)
        hang_up = select.poll()
        hang_up.register(connection, select.POLLRDHUP)
        while child.process.poll() is None and not hang_up.poll(1000 * POLL_SECONDS):
            pass
        # `exit_report` kills the child if it still runs. A request that waits for an answer gets
        # the report as its failure: (failure, answer).
        connection.send((child.exit_report(), None))
