"""What the reference server and its clients share: names, the token, and what a server serves. Importing it loads no torch."""

import os
import re
from dataclasses import dataclass

from alignment.system.errors import UserError
from alignment.system.terminal import printable

TOKEN_VARIABLE = "ALIGNMENT_REFERENCE_TOKEN"
SERVICE = "alignment.reference_server"
WEIGHTS_HEADER = "Reference-Weights"
KEY = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass(frozen=True)
class ServedModel:
    """The model that a reference server loads from the folder `path`, and the limits of the server. `name` is the model's name
    in /info (by default its path), `dtype` the name of a torch dtype."""

    path: str
    device: str
    dtype: str
    max_pending: int
    max_upload_bytes: int = 1 << 32
    name: str = ""
    deterministic: bool = False


def check_url(url: str) -> None:
    """Raise `UserError` for an address that is not a reference server's."""
    match = re.fullmatch(r"http://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})/?", url)
    if match is None or not 0 < int(match[1]) < 65536:
        raise UserError(f"--reference_url {printable(url)}: must be http://HOST:PORT, as the reference server prints it")


def reference_token() -> str:
    """The secret that server and trainer share, "" where there is none. An environment variable, because flags are shown in
    process lists. Raises `UserError` for what cannot stand in a header."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not re.fullmatch(r"[!-~]*", token):
        raise UserError(f"{TOKEN_VARIABLE}: must be printable ASCII without spaces")
    return token
