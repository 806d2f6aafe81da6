"""Files and folders that appear whole or not at all."""

import pytest

from alignment.system.files import atomic_folder, write_atomically


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
