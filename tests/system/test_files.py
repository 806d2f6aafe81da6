"""Files and folders that appear whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import numpy
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from alignment.system import files
from alignment.system.errors import in_words
from alignment.system.files import (
    atomic_folder,
    guard_library_write,
    write_atomically,
    write_json,
    write_jsonl,
)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), atomic_folder(tmp_path / "out") as building:
        (building / "half").write_text("x")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with atomic_folder(tmp_path / "out") as building:
        (building / "whole").write_text("x")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]
    write_atomically(tmp_path / "note", "a")
    write_atomically(tmp_path / "note", "b")
    assert (tmp_path / "note").read_text() == "b"


@pytest.fixture(params=["022", "027", "002", "077"])
def umask(request):
    """The umask that new files get, as a number."""
    before = os.umask(int(request.param, 8))
    yield int(request.param, 8)
    os.umask(before)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_that_a_library_makes_get_the_mode_that_the_umask_says(tmp_path, umask):
    """safetensors makes a file that its owner alone may read, whatever the umask."""
    tensors = {"a": numpy.zeros(3)}
    save_file(tensors, tmp_path / "alone")
    assert mode(tmp_path / "alone") == 0o600
    with guard_library_write(tmp_path / "file"):
        save_file(tensors, tmp_path / "file")
    with atomic_folder(tmp_path / "model") as building:
        (building / "trainer").mkdir()
        for name in ("weights", "trainer/moments"):
            save_file(tensors, building / name)
        (building / "script").write_text("x")
        (building / "script").chmod(0o700)
    write_json(tmp_path / "json", {})
    for made in ("file", "model/weights", "model/trainer/moments", "json"):
        assert mode(tmp_path / made) == 0o666 & ~umask, made
    assert mode(tmp_path / "model" / "script") == 0o700 | 0o666 & ~umask
    assert mode(tmp_path / "model") == mode(tmp_path / "model" / "trainer") == 0o777 & ~umask
    assert mode(tmp_path / "alone") == 0o600  # of which nobody has said that it is ours
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "file", "model", "json"}


@pytest.mark.parametrize("write", [write_atomically, lambda path, text: write_jsonl(path, [text])])
def test_a_full_disk_names_the_file(write, tmp_path, monkeypatch):
    def full(descriptor):
        # of a file that is open, so that the system names none
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write(tmp_path / "evals.jsonl", "x")
    assert in_words(caught.value) == f"{tmp_path / 'evals.jsonl'}: no space left on device"
    with pytest.raises(OSError) as caught, atomic_folder(tmp_path / "final") as building:
        (building / "a").write_text("x")
    assert in_words(caught.value) == f"{tmp_path / 'final'}: no space left on device"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "/data/run: disk quota exceeded"),
        (
            OSError(errno.EACCES, "Permission denied", "/data/run/a"),
            "/data/run/a: permission denied",
        ),
        (
            SafetensorError("I/O error: No space left on device (os error 28)"),
            "/data/run could not be written: I/O error: No",
        ),
        (
            Exception("No space left on device (os error 28)"),
            "/data/run could not be written: No space left",
        ),
        (OSError("no such file of a library"), "no such file of a library"),
    ],
)
def test_whatever_a_library_raises_of_the_disk_is_an_os_error_with_the_path(error, said):
    with pytest.raises(OSError) as caught, guard_library_write(Path("/data/run")):
        raise error
    assert in_words(caught.value).startswith(said)


def test_other_errors_of_a_library_stay_what_they_are():
    with pytest.raises(KeyError), guard_library_write(Path("/data/run")):
        raise KeyError


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), SafetensorError("full (os error 28)")]
)
def test_the_path_that_is_named_is_the_folders_own_and_not_the_hidden_one(error, tmp_path):
    with (
        pytest.raises(OSError) as caught,
        atomic_folder(tmp_path / "step_000003") as building,
        guard_library_write(building / "weights"),
    ):
        raise error
    said = in_words(caught.value)
    assert (
        f"{tmp_path}/step_000003/weights: full" in said
        or f"{tmp_path}/step_000003/weights could not be written: full" in said
    )
    assert said.startswith(f"{tmp_path}/step_000003") and ".tmp" not in said


def test_a_link_to_nowhere_is_no_place_to_write(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "folder")
    for folder in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(OSError) as caught:
            files.try_writing(folder)
        assert caught.value.filename == str(folder)
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "folder").mkdir()
    files.try_writing(tmp_path / "link")
    assert list((tmp_path / "gone" / "folder").iterdir()) == []


def test_a_name_that_is_too_long_while_it_is_written_is_found_first(tmp_path):
    with pytest.raises(OSError) as caught:
        files.try_writing(tmp_path, "n" * 240)
    assert caught.value.filename == str(tmp_path / ("n" * 240))
    files.try_writing(tmp_path, "n" * 100)
