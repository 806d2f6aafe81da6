"""What a mistyped name or path was probably meant to be."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

FILE_PREFIX = "file:"


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """ " (did you mean NAME?)" with the nearest of `names`; empty where none is as alike as
    `cutoff`, from 0 to 1."""
    nearest = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    if not nearest:
        return ""
    return f" (did you mean {nearest[0]}?)"


def did_you_mean_path(path: str | Path) -> str:
    """ " (did you mean PATH?)" with the nearest existing path, each of whose missing parts is
    replaced by the nearest name beside it; empty where there is none. A path that begins with
    `file:`, as --task takes it, is meant without where that is there."""
    without_prefix = str(path).removeprefix(FILE_PREFIX)
    if without_prefix != str(path) and os.path.lexists(without_prefix):
        return f" (did you mean {without_prefix}, without {FILE_PREFIX}?)"
    candidate = Path(path)
    try:
        while not candidate.expanduser().exists():
            candidate = _with_nearest_part(candidate)
    except (OSError, LookupError, ValueError, RuntimeError):  # no such name, or no readable folder
        return ""
    if candidate in (Path(path), Path()):
        return ""
    return f" (did you mean {candidate}?)"


def _with_nearest_part(path: Path) -> Path:
    """The path with its first missing part replaced by the nearest name that is there. Raises
    LookupError where none is near."""
    missing = path
    while not missing.parent.expanduser().exists():
        missing = missing.parent
    names = os.listdir(missing.parent.expanduser())
    nearest = difflib.get_close_matches(missing.name, names, n=1)
    if not nearest:
        raise LookupError(f"no name near {missing}")
    return missing.with_name(nearest[0]) / path.relative_to(missing)
