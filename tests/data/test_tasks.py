"""Tasks by name, and of the user's own."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from alignment.args import EvaluateArgs
from alignment.builders.held_out import task_arguments
from alignment.core.records import Problem
from alignment.data.tasks import TASKS, Task, check_fields, find_task
from alignment.system.errors import UserError


def test_a_task_is_one_of_the_table_or_the_users_own(monkeypatch):
    own = Task(
        "sums",
        lambda split, path: [Problem("1", "1 + 1?", "", "2")],
        lambda split, path, seed: [],
        "tiny",
        ("m:rule",),
    )
    monkeypatch.setitem(sys.modules, "users_task", SimpleNamespace(sums=own, number=7))
    assert find_task("gsm8k") is TASKS["gsm8k"] and find_task("users_task:sums") is own
    with pytest.raises(
        UserError,
        match="--task users_task:number: cannot be imported .*it is of type int, not Task",
    ):
        find_task("users_task:number")
    with pytest.raises(
        UserError,
        match=(
            "^--task gsm: there is no such task .did you mean gsm8k\\?.; choose one of arithmetic,"
            " gsm8k, svamp, countdown, "
        ),
    ):
        find_task("gsm")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", "</answer>"),
        ("stop", ("",)),
        ("stop", (7,)),
        ("rules", "r1_zero"),
        ("rules", ()),
        ("stop", None),
    ],
)
def test_rules_and_stop_strings_are_texts(field, value):
    """Of the text "</answer>" alone each letter would end a response."""
    task = dataclasses.replace(TASKS["arithmetic"], **{field: value})
    with pytest.raises(
        UserError, match=f"^--task arithmetic: its {field} are .*, and must be a tuple of texts"
    ):
        check_fields(task)
    check_fields(dataclasses.replace(TASKS["arithmetic"], stop=(), rules=["r1_zero"]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows/train.jsonl", "write file:rows/train.jsonl"),
        ("rows/none.csv", "write file:rows/none.csv"),
        ("rows/notes", "write file:rows/notes"),
        ("rows/folder", "write hf:rows/folder, or file: and a file in it"),
    ],
)
def test_a_path_without_file_before_it_is_told_so(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows" / "folder").mkdir(parents=True)
    (tmp_path / "rows" / "train.jsonl").write_text("{}\n")
    (tmp_path / "rows" / "notes").write_text("{}\n")
    with pytest.raises(UserError, match=f"^--task {name}: .*{said}"):
        find_task(name)
    with pytest.raises(UserError, match=f"^--eval_tasks {name}: .*{said}"):
        task_arguments(EvaluateArgs(), [name])
