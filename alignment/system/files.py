"""Files and folders that appear whole or not at all, and folders that one process at a time works in."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from safetensors import SafetensorError

from alignment.system.errors import UserError

MANIFEST = "manifest.sha256.json"
LOCK = ".lock"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a hidden sibling folder to fill; on success it is flushed to disk and renamed to `path`, else removed.

    Nothing is overwritten: raises OSError where `path` has come to exist meanwhile, unless it is an empty folder.
    """
    path = Path(path)
    _remove_left_behind(path)
    building = _building(path)
    building.mkdir(parents=True)
    try:
        yield building
        for file in building.rglob("*"):
            flush(file)
        flush(building)
        building.rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a whole text file, or nothing."""
    building = _building(path)
    try:
        building.write_text(text, encoding="utf-8")
        flush(building)
        building.replace(path)
    finally:
        building.unlink(missing_ok=True)


def _building(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}@{_place()}.{uuid.uuid4().hex}.tmp")


def _place() -> str:
    """Where process ids mean the same: this machine, or this container of it."""
    with suppress(OSError):
        return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _remove_left_behind(path: Path) -> None:
    """Remove what killed processes of this machine were about to name `path`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*@{glob.escape(_place())}.*.tmp"):
        pid = left.name.removeprefix(f".{path.name}.").partition("@")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes were about to write. Only for who holds the folder."""
    for left in folder.rglob(".*.tmp"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


@contextmanager
def manifested(folder: Path) -> Iterator[None]:
    """Note size and SHA-256 of every file that is written to `folder` meanwhile, in its manifest."""
    before = _files(folder)
    yield
    facts = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _checksum(file)}
        for file in sorted(_files(folder) - before)
    }
    (folder / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that has a manifest, or None: each file has the size and SHA-256 that are noted there."""
    try:
        expected = read_json(folder / MANIFEST)
        sizes = {name: (int(facts["bytes"]), str(facts["sha256"])) for name, facts in expected.items()}
    except (UserError, OSError, ValueError, OverflowError, KeyError, TypeError):
        return f"its {MANIFEST} is missing or damaged"
    for name, (size, checksum) in sizes.items():
        file = folder / name
        try:
            if file.is_dir():
                return f"{name or folder.name} is a folder, where its {MANIFEST} has a file"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _checksum(file) != checksum:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:  # a disk that cannot read it, a name that is none
            return f"{name} cannot be read ({error})"
    return None


def _files(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if file.is_file()}


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises `UserError` naming host and process where another holds it.

    The kernel gives the lock back when its process ends, however that ends, so a lock file that nobody holds is stale.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"{folder} is in use by {lock.read().strip() or 'another process'}: wait for it or stop it"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        yield


def read_json(file: Path) -> dict:
    """The object of a JSON file. Raises `UserError` for anything else, FileNotFoundError where there is no file."""
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged: it does not hold a JSON object")
    return found


def read_jsonl(file: Path) -> list[dict]:
    """The objects of a JSON-lines file, but for a last line that a killed process left unfinished; none if it is missing.

    Raises `UserError`, naming file and line, for any other line that is no object.
    """
    if not file.exists():
        return []
    lines, records = file.read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):  # a whole line ends with a line break, after which an empty one comes last
                break
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{file}:{number}: not a JSON object; the file is damaged")
        records.append(record)
    return records


def read_records(file: Path) -> list[dict]:
    """The records of metrics.jsonl or evals.jsonl, each of a step. Raises `UserError`, naming the line, for others."""
    records = read_jsonl(file)
    for number, record in enumerate(records, start=1):
        if type(record.get("step")) is not int:
            raise UserError(f"{file}:{number}: has no step; the file is damaged")
    return records


def flush(path: Path) -> None:
    """Have the disk take a file or a folder's list of files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def full_disk_is_an_os_error(folder: Path) -> Iterator[None]:
    """Raise OSError for what libraries in Rust, safetensors and tokenizers, raise where a file cannot be written."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetensorError) or "(os error" in str(error):
            raise OSError(f"{folder} could not be written: {error}") from None
        raise
