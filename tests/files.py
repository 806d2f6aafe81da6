"""Files that tests compare."""

import hashlib
from pathlib import Path


def digest(file: Path) -> str:
    """The SHA-256 of a file. Where the bytes of two models were unequal, pytest would look for each
    difference, and not end in an hour."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
