"""Files and folders that appear whole or not at all, readers of the formats we use, and the faults
of a disk in words."""

import errno
import glob
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

import psutil
from safetensors import SafetensorError

from alignment.system.errors import UserError
from alignment.system.nearest import did_you_mean_path

NEEDED_BYTES = 2**20  # A command that writes to a folder needs so much room on its disk to start.


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `path` for the block to fill. After the block it is flushed to
    disk and renamed to `path`; if the block raises, it is removed.

    Raises OSError if `path` exists by then and is not an empty folder, so that nothing is ever
    overwritten, or if the disk is full. The files may be read by everyone who may read a new file
    beside `path` (`guard_library_write`)."""
    path = Path(path)
    _remove_leftovers(path)
    temporary = _temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        with guard_library_write(temporary, path):
            yield temporary
        with add_path_to_errors(path):
            for file in temporary.rglob("*"):
                flush(file)
            flush(temporary)
        temporary.rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    """Remove the hidden folders that processes of this machine made for `path` before they were
    killed."""
    prefix = f".{path.name}."
    namespace = glob.escape(_process_namespace())
    for folder in path.parent.glob(f"{glob.escape(prefix)}*@{namespace}.*.tmp"):
        pid = folder.name.removeprefix(prefix).partition("@")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all."""
    temporary = _temporary_path(path)
    try:
        with add_path_to_errors(path):
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file that appears whole or not at all."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def write_jsonl(path: Path, records: Iterable[object]) -> None:
    """Write a JSON-lines file that appears whole or not at all."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def _temporary_path(path: Path) -> Path:
    """A new hidden path beside `path`. Its name says which process uses it."""
    return path.with_name(
        f".{path.name}.{os.getpid()}@{_process_namespace()}.{uuid.uuid4().hex}.tmp"
    )


def _process_namespace() -> str:
    """Where this process's id is unique: the name of the machine, and on Linux the id of the
    container's process namespace."""
    with suppress(OSError):
        return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def remove_unfinished(folder: Path) -> None:
    """Remove all temporary files and folders in `folder`. The caller must hold the folder's lock,
    so that they can only be those of killed processes."""
    for path in folder.rglob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_writable_file(file: Path, flag: str, example: str) -> None:
    """Raise `UserError` where the file that `flag` names cannot be written: it is a folder, or in
    none that exists."""
    if not file.parent.is_dir() or file.is_dir():
        raise UserError(f"{flag} {file}: name a file in a folder that exists, such as {example}")


def read_toml(file: Path, flag: str) -> dict:
    """The content of a TOML file, which is the value of `flag`. Raises `UserError`, which names the
    flag, if there is no such file or it is not TOML."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        nearest = did_you_mean_path(file)
        raise UserError(f"{flag} {file}: there is no such file{nearest}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {file}: must be a TOML file ({error})") from None


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises `UserError` if the file does not hold a JSON object,
    FileNotFoundError if there is none."""
    value = json_object(file.read_bytes())
    if value is None:
        raise UserError(f"{file} is damaged: it does not hold a JSON object")
    return value


def json_object(text: bytes | bytearray) -> dict | None:
    """The object in a JSON text; None if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return value


def read_jsonl(file: Path, require_steps: bool = False) -> list[dict]:
    """The objects in a JSON-lines file; [] if there is no such file. A last line without a line
    break, which a killed process may have left unfinished, is skipped if it is no object.

    Raises `UserError`, with file and line, for any other line that is no object, and with
    `require_steps` also for an object without an integer "step"."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    records: list[dict] = []
    for number, line in enumerate(lines, start=1):
        record = json_object(line)
        if record is not None:
            if require_steps and type(record.get("step")) is not int:
                raise UserError(f"{file}:{number}: has no step; the file is damaged")
            records.append(record)
        # The last of `lines` follows the last line break: it is empty or an unfinished line.
        elif number < len(lines):
            raise UserError(f"{file}:{number}: not a JSON object; the file is damaged")
    return records


# The first bytes of files that are no text, what such a file is, and what to do.
_NO_TEXT = {
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"BZh": "compressed by bzip2: unpack it",
    b"\xfd7zXZ": "compressed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"PK\x03\x04": "a zip archive, as Excel's files are: unpack it, or save the table as CSV",
    b"PAR1": "Parquet: end its name in .parquet",
    b"ARROW1": "Arrow: save it as .parquet",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
}


def read_text(file: Path) -> str:
    """The text of a user's file, without a byte order mark, its lines ended by \\n. Raises
    `UserError`, with the line, if it is not UTF-8 or has a zero byte."""
    content = file.read_bytes()
    for first_bytes, kind in _NO_TEXT.items():
        if content.startswith(first_bytes):
            raise UserError(f"{file}: not UTF-8 text, but {kind}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"{error.reason} at byte {error.start}"
        raise UserError(f"{file}: not UTF-8 text ({reason}, line {line})") from None
    zero = text.find("\0")
    if zero >= 0:
        line = text.count("\n", 0, zero) + 1
        raise UserError(f"{file}:{line}: has a zero byte: if it is UTF-16, save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def flush(path: Path) -> None:
    """Make the operating system write a file, or a folder's list of files, to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Make every OSError of the block name a file: `path` if it names none. This is so where a full
    disk fails a write to a file that is open already."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def guard_library_write(path: Path, shown: Path | None = None) -> Iterator[None]:
    """Guard a block in which a library writes the file `path`, or files in the folder `path`.

    Libraries in Rust, such as safetensors and tokenizers, raise errors of their own if they cannot
    write a file; the block then raises OSError instead. The error names `shown`, by default `path`:
    a user does not know the hidden folder `path` that is renamed to `shown` later.

    After the block, the files have at least the permissions that the umask gives a new file.
    safetensors writes temporary files, which their owner alone may read, and renames them."""
    shown = shown or path
    try:
        with add_path_to_errors(shown):
            yield
    except OSError as error:
        # The error's file name, or its message, may contain `path`.
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
            with suppress(OSError):  # Some file systems have no permissions.
                file.chmod(mode | least_mode)


def try_writing(folder: Path, name: str = "room") -> None:
    """Test whether `folder` can be written, before a run depends on it: write a file of
    `NEEDED_BYTES` there, or, if the folder does not exist yet, in the nearest folder above it, and
    remove the file.

    Raises OSError if this fails, because the folder is read-only, its disk is full or a quota is
    reached; the error names `folder`. It names `folder / name` if the name is too long for the
    temporary file or folder that a file or folder `name` begins as."""
    absolute = folder.absolute()
    # `lexists` also finds a broken link, in whose place no folder can be made; `exists` would not.
    nearest = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    file = _temporary_path(nearest / name)
    try:
        with add_path_to_errors(folder):
            # Random bytes, because a disk that compresses would need no room for zeros.
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
    """Whether an error comes from the file system, such as that of a full disk. Libraries in Rust
    report it as another exception, with "(os error 28)" in its message."""
    if isinstance(error, OSError):
        return error.errno is not None
    return isinstance(error, SafetensorError) or "(os error" in str(error)


def mode_of_new_file(folder: Path) -> int:
    """The permission bits of a new file in `folder`, found by making one.

    The umask alone does not say it, since a folder may have rules of its own (POSIX default ACLs).
    Also, a process can read its umask only by changing it, which would affect its other threads."""
    file = _temporary_path(folder / "mode")
    try:
        file.touch()
        return stat.S_IMODE(file.stat().st_mode)
    finally:
        file.unlink(missing_ok=True)
