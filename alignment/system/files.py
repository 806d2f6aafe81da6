"""Files and folders that appear whole or not at all, checksums of a folder's files, and the lock of
a run folder."""

import errno
import glob
import hashlib
import json
import os
import shutil
import socket
import stat
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from alignment.system.errors import UserError

MANIFEST = "manifest.sha256.json"
LOCK = ".lock"


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden sibling folder to fill. After success it is flushed to disk and renamed to
    `path`, else removed. Never overwrites: raises OSError if `path` exists by then and is not an
    empty folder, and where the block finds the disk full. Its files get the mode of files that are
    made here (`written_by_library`)."""
    path = Path(path)
    _remove_of_killed_processes(path)
    temporary = _temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        with written_by_library(temporary, path):
            yield temporary
        with naming(path):
            for file in temporary.rglob("*"):
                flush(file)
            flush(temporary)
        temporary.rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_of_killed_processes(path: Path) -> None:
    """Remove the temporary folders for `path` of processes of this machine that are gone."""
    prefix = f".{path.name}."
    namespace = glob.escape(_process_namespace())
    for folder in path.parent.glob(f"{glob.escape(prefix)}*@{namespace}.*.tmp"):
        pid = folder.name.removeprefix(prefix).partition("@")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a whole text file, or nothing."""
    temporary = _temporary_path(path)
    try:
        with naming(path):
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write a whole JSON file, or nothing."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_jsonl(path: Path, records: Iterable[object]) -> None:
    """Write a whole file of one JSON value a line, or nothing."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def _temporary_path(path: Path) -> Path:
    return path.with_name(
        f".{path.name}.{os.getpid()}@{_process_namespace()}.{uuid.uuid4().hex}.tmp"
    )


def _process_namespace() -> str:
    """The name of the machine, and of the container in it, within which a process id names one
    process."""
    with suppress(OSError):
        return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def remove_unfinished(folder: Path) -> None:
    """Remove all temporary files and folders of killed processes. The caller must hold the folder's
    lock."""
    for path in folder.rglob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def manifested(folder: Path) -> Iterator[None]:
    """Write a manifest after the block: size and SHA-256 of every file that it added. Raises
    OSError where the disk is full."""
    before = set(folder.rglob("*"))
    with written_by_library(folder):
        yield
    added = [file for file in sorted(folder.rglob("*")) if file.is_file() and file not in before]
    manifest: dict[str, dict[str, int | str]] = {}
    for file in added:
        name = file.relative_to(folder).as_posix()
        manifest[name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    with naming(folder / MANIFEST):
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


class ManifestEntry(NamedTuple):
    """What a manifest says of a file."""

    name: str  # Its path in the folder.
    size: int  # In bytes.
    sha256: str


def damage(folder: Path) -> str | None:
    """The first difference between a folder and its manifest, or None if every file has the size
    and SHA-256 given there."""
    try:
        entries = [
            ManifestEntry(name, int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in read_json(folder / MANIFEST).items()
        ]
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


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises `UserError` with its holder's host and process. The kernel
    frees a dead process's lock."""
    owner = folder / ".lock_owner"
    # A soft lock would outlive a killed process.
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
        with naming(owner):
            owner.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield


def read_toml(file: Path, flag: str) -> dict:
    """The table of the TOML file that `flag` names. Raises `UserError` if it does not exist or
    holds anything else."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{flag} {file}: there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {file}: must be a TOML file ({error})") from None


def read_json(file: Path) -> dict:
    """The object of a JSON file. Raises `UserError` if it holds anything else, FileNotFoundError if
    it does not exist."""
    value = json_object(file.read_bytes())
    if value is None:
        raise UserError(f"{file} is damaged: it does not hold a JSON object")
    return value


def json_object(text: bytes | bytearray) -> dict | None:
    """The object of a JSON text; None for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return value


def read_jsonl(file: Path, have_steps: bool = False) -> list[dict]:
    """The objects of a JSON-lines file, less an unfinished last line; [] if the file is missing.

    Raises `UserError` with file and line for a line that holds no object or, with `have_steps`, one
    without a step."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    records: list[dict] = []
    for number, line in enumerate(lines, start=1):
        record = json_object(line)
        if record is not None:
            if have_steps and type(record.get("step")) is not int:
                raise UserError(f"{file}:{number}: has no step; the file is damaged")
            records.append(record)
        elif number < len(lines):
            # A finished line ends with a line break, so that the last one is empty.
            raise UserError(f"{file}:{number}: not a JSON object; the file is damaged")
    return records


def read_text(file: Path) -> str:
    """The text of a user's file. Raises `UserError` if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def fill_template(file: Path, **facts: object) -> str:
    """The text of a Jinja template, which must get every fact and may include those beside it. HTML
    is escaped. Lines of blocks leave no trace, except in plain text, which says itself where a line
    ends."""
    import jinja2  # here, because few commands fill one

    is_plain_text = ".txt." in file.name
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(file.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=not is_plain_text,
        lstrip_blocks=not is_plain_text,
        autoescape=".html." in file.name,
    )
    return environment.get_template(file.name).render(facts)


def flush(path: Path) -> None:
    """Write a file, or a folder's list of files, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give `path` to an OSError of the block that names no file: a full disk fails the write to a
    file that is open already."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def written_by_library(path: Path, shown: Path | None = None) -> Iterator[None]:
    """A block in which a library writes the file `path`, or files in the folder `path`. Raises
    OSError, which names `shown` (`path`), in place of the errors of safetensors and tokenizers,
    libraries in Rust, when they cannot write a file.

    Then the files get at least the mode that the umask gives a new file: safetensors makes its own
    through temporary files, which are their owner's alone (0600)."""
    shown = shown or path
    try:
        with naming(shown):
            yield
    # An OSError may have a file of the hidden folder, or a message that names it.
    except OSError as error:
        if error.errno is None:
            message = str(error).replace(str(path), str(shown))
            if shown != path:
                message = f"{shown} could not be written: {message}"
            raise OSError(message) from None
        error.filename = str(error.filename).replace(str(path), str(shown))
        raise
    except Exception as error:
        if is_disk_fault(error):
            raise OSError(f"{shown} could not be written: {error}") from None
        raise
    if path.is_dir():
        folder = path
        written = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    else:
        folder = path.parent
        written = [path]
    least_mode = mode_of_new_file(folder)
    for file in written:
        mode = file.stat().st_mode
        if mode | least_mode != mode:
            with suppress(OSError):  # of a file system that has no modes
                file.chmod(mode | least_mode)


NEEDED_BYTES = 2**20  # Room on a disk without which nothing is begun.


def try_writing(folder: Path, name: str = "room") -> None:
    """Write a file of `NEEDED_BYTES` into `folder`, or into the nearest folder above it that
    exists, and remove it. Raises OSError with the folder's name where that fails: it is read-only,
    its disk is full, or a quota is reached; or with the whole path where a file or folder of that
    `name` would have too long a one while it is written."""
    absolute = folder.absolute()
    # A link to nowhere is there, though it does not `exist`: no folder can be made in its place.
    nearest = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    file = _temporary_path(nearest / name)
    try:
        with naming(folder):
            # Zeros take no room on a disk that compresses.
            file.write_bytes(os.urandom(NEEDED_BYTES))
            flush(file)
    except OSError as error:
        too_long = error.errno == errno.ENAMETOOLONG
        error.filename = str(folder / name) if too_long else str(folder)
        raise
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def is_disk_fault(error: BaseException) -> bool:
    """Whether an error is the file system's, such as that of a full disk, also where a library in
    Rust reports it."""
    if isinstance(error, OSError):
        return error.errno is not None
    return isinstance(error, SafetensorError) or "(os error" in str(error)


def mode_of_new_file(folder: Path) -> int:
    """The permission bits of a file that is made in `folder` now: a process can read its umask by
    changing it alone, which would reach other threads, and a folder may have rules of its own
    (POSIX default ACLs)."""
    file = _temporary_path(folder / "mode")
    try:
        file.touch()
        return stat.S_IMODE(file.stat().st_mode)
    finally:
        file.unlink(missing_ok=True)
