"""Manifests: the sizes and checksums of a folder's files, by which damage is found."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from alignment.system.errors import UserError
from alignment.system.files import add_path_to_errors, guard_library_write, read_json

MANIFEST = "manifest.sha256.json"
ENDS = 2**20  # Bytes of each end of a file of weights that its digest reads.


@contextmanager
def write_manifest(folder: Path) -> Iterator[None]:
    """After the block write a manifest into `folder`: the size and SHA-256 of every file that the
    block added there. Raises OSError if the disk is full."""
    before = set(folder.rglob("*"))
    with guard_library_write(folder):
        yield
    added = [file for file in sorted(folder.rglob("*")) if file.is_file() and file not in before]
    manifest: dict[str, dict[str, int | str]] = {}
    for file in added:
        name = file.relative_to(folder).as_posix()
        manifest[name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    with add_path_to_errors(folder / MANIFEST):
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


class ManifestEntry(NamedTuple):
    """What a manifest says about one file."""

    name: str  # Its path relative to the folder.
    size: int  # In bytes.
    sha256: str


def find_damage(folder: Path) -> str | None:
    """A sentence on the first difference between a folder and its manifest; None if every file of
    the manifest has the size and SHA-256 given there."""
    entries = []
    try:
        for name, entry in read_json(folder / MANIFEST).items():
            entries.append(ManifestEntry(name, int(entry["bytes"]), str(entry["sha256"])))
    except (UserError, OSError, ValueError, OverflowError, KeyError, TypeError):
        return f"its {MANIFEST} is missing or damaged"
    for entry in entries:
        file = folder / entry.name
        try:
            if file.is_dir():
                return f"{entry.name or folder.name} is a folder, where its {MANIFEST} has a file"
            if file.stat().st_size != entry.size:
                return f"{entry.name} has {file.stat().st_size} bytes instead of {entry.size}"
            if sha256(file) != entry.sha256:
                return f"{entry.name} has changed since it was written"
        except FileNotFoundError:
            return f"{entry.name} is missing"
        # A disk error, or a damaged manifest with an impossible file name.
        except (OSError, ValueError) as error:
            return f"{entry.name} cannot be read ({error})"
    return None


def digest_of_weights(folder: Path) -> str:
    """SHA-256 of the names and sizes of a model's weight files, and of the first and last MiB of
    each, which training changes. So models of any size take no time."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(ENDS))
            opened.seek(max(size - ENDS, 0))
            digest.update(opened.read(ENDS))
    return digest.hexdigest()


def sha256(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
