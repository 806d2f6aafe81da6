"""Child processes on other machines. Behind torchrun the first rank of each machine starts them for rank 0.

A process has the connection from rank 0's machine as its pipe. There, a child process of rank 0 passes the bytes on: rank 0
asks, kills and closes that one like any other, and when it ends so does the process. Both sides of a connection prove that they
know the machine's key, which torchrun's store hands to rank 0; then it carries pickles, unencrypted.
"""

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

TORCHRUN = re.compile(r"((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")
CONNECT_SECONDS = 10


class Machine(NamedTuple):
    """Another machine, where a rank waits for connections."""

    name: str
    addresses: list[str]  # One of which can be reached from rank 0's machine.
    port: int
    key: str
    seconds: float  # A machine from which nothing comes back for so long is lost.

    def start(self, name: str, entry: str, environment: Mapping[str, str]) -> ChildProcess:
        """As `ChildProcess`, but on this machine, whose own environment gets the variables that differ from this process's."""
        process = json.dumps([self, entry, dict(environment.items() - os.environ.items())])
        return ChildProcess(name, f"{__name__}:forward", {**os.environ, "ALIGNMENT_REMOTE_PROCESS": process})

    def connect(self) -> socket.socket:
        """A connection whose sides know each other. Ends this process where the machine does not answer."""
        for address in self.addresses:
            with suppress(OSError, EOFError, AuthenticationError):
                opened = socket.create_connection((address, self.port), CONNECT_SECONDS)
                connection = Connection(os.dup(opened.fileno()))
                if connection.poll(CONNECT_SECONDS):
                    opened.settimeout(None)
                    answer_challenge(connection, self.key.encode())
                    deliver_challenge(connection, self.key.encode())
                    return opened
        sys.exit(f"{self.name} does not answer at {' or '.join(self.addresses)}, port {self.port}")


def forward(descriptor: int) -> None:
    """Pass on what this process's parent and a process on another machine write, until that one closes its end."""
    machine, *request = json.loads(os.environ["ALIGNMENT_REMOTE_PROCESS"])
    pipe, machine = socket.socket(fileno=descriptor), Machine(*machine)
    remote, probe = machine.connect(), max(1, int(machine.seconds / 3))
    options = {socket.TCP_NODELAY: 1, socket.TCP_USER_TIMEOUT: int(1000 * machine.seconds)}
    for option, value in (options | {socket.TCP_KEEPIDLE: probe, socket.TCP_KEEPINTVL: probe}).items():
        remote.setsockopt(socket.IPPROTO_TCP, option, value)
    remote.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The end of this process resets the connection: it must not wait behind what a process that hangs has not read.
    remote.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    Connection(os.dup(remote.fileno())).send(request)
    threading.Thread(target=_copy, args=(pipe, remote), daemon=True).start()
    sys.exit(f"the connection to {machine.name} has ended: {_copy(remote, pipe)}")


def _copy(source: socket.socket, target: socket.socket) -> str:
    """Write to `target` what comes from `source`, and throw away what it does not take; returns why nothing more comes."""
    try:
        while chunk := source.recv(2**20):
            with suppress(OSError):
                target.sendall(chunk)
    except OSError as error:
        return str(error)
    return "it was closed"


def host_processes(name: str, seconds: float, store: tuple[str, int]) -> Machine:
    """Start processes, in threads of this one and until it ends, for those who know the key of the machine that is returned.
    Of this machine's addresses rank 0 is told the one that leads to the `store`, and the host's name."""
    dual = socket.has_dualstack_ipv6()
    server = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual)
    with socket.create_connection(store) as route:
        addresses = [route.getsockname()[0], socket.gethostname()]
    machine = Machine(name, addresses, server.getsockname()[1], secrets.token_hex(), seconds)

    def accept() -> None:
        while True:
            opened, _ = server.accept()
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else tensors wait for acknowledgements
            threading.Thread(target=_host, args=(Connection(opened.detach()), machine.key.encode()), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return machine


def _host(connection: Connection, key: bytes) -> None:
    """Start the process that the other side asks for, and kill it when that side hangs up. A process that has ended before
    says how by its last message, the failure of a request."""
    with connection, suppress(OSError, EOFError, AuthenticationError):
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        entry, changes = connection.recv()
        own = {variable: value for variable, value in os.environ.items() if not TORCHRUN.fullmatch(variable)}
        environment = {**own, **changes, "PYTHONPATH": os.pathsep.join(sys.path)}
        child = ChildProcess("process", entry, environment, grace_seconds=0, pipe=Connection(os.dup(connection.fileno())))
        caller = select.poll()
        caller.register(connection, select.POLLRDHUP)
        while child.process.poll() is None and not caller.poll(1000 * POLL_SECONDS):
            pass
        connection.send((child.exit_report(), None))
