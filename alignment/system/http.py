"""What HTTP servers and their clients share: addresses, the secret that both sides know, sockets that notice a lost machine."""

import hmac
import os
import re
import socket
from collections.abc import Callable, MutableMapping

from alignment.system.errors import UserError
from alignment.system.terminal import printable

REFERENCE_TOKEN = "ALIGNMENT_REFERENCE_TOKEN"

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # a machine that is gone is noticed in two minutes
KEEPALIVE_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _KEEPALIVE.items() if hasattr(socket, name)
]


def check_reference_url(url: str) -> None:
    """Raise `UserError` for an address that is not a reference server's."""
    match = re.fullmatch(r"http://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})/?", url)
    if match is None or not 0 < int(match[1]) < 65536:
        raise UserError(f"--reference_url {printable(url)}: must be http://HOST:PORT, as the reference server prints it")


def reference_token() -> str:
    """The secret that server and trainer share, "" where there is none. An environment variable, because flags are shown in
    process lists. Raises `UserError` for what cannot stand in a header."""
    token = os.environ.get(REFERENCE_TOKEN, "")
    if not re.fullmatch(r"[!-~]*", token):
        raise UserError(f"{REFERENCE_TOKEN}: must be printable ASCII without spaces")
    return token


class TokenCheck:
    """ASGI middleware that gives `refusal` to requests without the token, whatever else they say."""

    def __init__(self, app: Callable, token: str, refusal: Callable):
        self.app, self.expected, self.refusal = app, f"Bearer {token}".encode(), refusal

    async def __call__(self, scope: MutableMapping, receive: Callable, send: Callable) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_known = scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected)
        await (self.app if is_known else self.refusal)(scope, receive, send)
