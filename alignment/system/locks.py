"""The lock of a run folder, which one process at a time holds."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from alignment.system.errors import UserError
from alignment.system.files import add_path_to_errors

LOCK = ".lock"


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock during the block. Raises `UserError` if another process holds it, with
    the id and the host of that process. The kernel releases the lock of a process that dies."""
    owner = folder / ".lock_owner"
    # A soft lock, which is a file that exists, would outlive a killed process.
    lock = FileLock(folder / LOCK, blocking=False, fallback_to_soft=False)
    try:
        acquired = lock.acquire()
    except Timeout:
        name = ""
        if owner.exists():
            name = owner.read_text(encoding="utf-8").strip()
        holder = name or "another process"
        raise UserError(f"{folder} is in use by {holder}: wait for it or stop it") from None
    with acquired:
        with add_path_to_errors(owner):
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
