"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a hidden sibling folder to fill; on success it is flushed to disk and renamed to `path`, else removed.

    Nothing is overwritten: raises OSError where `path` has come to exist meanwhile.
    """
    path = Path(path)
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        for file in building.rglob("*"):
            _flush(file)
        building.rename(path)
        _flush(path.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a whole text file, or nothing."""
    building = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    building.write_text(text, encoding="utf-8")
    _flush(building)
    building.replace(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
