"""What a mistyped name or path was probably meant to be."""

import pytest

from alignment.system.nearest import did_you_mean, did_you_mean_path


def test_the_nearest_name_is_given_where_one_is_near():
    assert did_you_mean("smolm2", ["tiny", "smollm2"]) == " (did you mean smollm2?)"
    assert did_you_mean("gpt2", ["tiny", "smollm2"]) == ""


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("runs/first/trian.jsonl", "runs/first/train.jsonl"),
        ("runs/frist/train.jsonl", "runs/first/train.jsonl"),
        ("rums/frist/trian.jsonl", "runs/first/train.jsonl"),
        ("runs/frist", "runs/first"),
        ("file:runs/first/train.jsonl", "runs/first/train.jsonl, without file:"),
        ("runs/first/train.jsonl", ""),  # it is there
        ("runs/zzz/train.jsonl", ""),
        ("runs/first/train.jsonl/more", ""),
        ("x" * 5000, ""),
        ("", ""),
    ],
)
def test_the_nearest_path_has_each_missing_part_replaced(path, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "train.jsonl").write_text("")
    expected = f" (did you mean {meant}?)" if meant else ""
    assert did_you_mean_path(path) == expected
