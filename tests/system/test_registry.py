"""Entries by name: from a table, or imported."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from alignment.system.errors import UserError
from alignment.system.registry import find


@dataclass(frozen=True)
class Animal:
    sound: str


TABLE = {"cow": Animal("moo"), "sheep": Animal("baa")}
FUNCTIONS = {"double": lambda x: 2 * x}
USERS = {"goat": Animal("meh"), "halve": lambda x: x / 2, "number": 7}


@pytest.fixture(autouse=True)
def users_module(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "users_zoo", SimpleNamespace(**USERS))
    (tmp_path / "broken_zoo.py").write_text("raise SystemExit(3)")
    (tmp_path / "small_zoo.py").write_text(
        "import math\nfrom json import loads\ndef halve(x):\n    return x / 2\nnumber = _own = 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_entry_is_found_in_the_table_or_imported():
    assert find("--animal", "cow", TABLE) is TABLE["cow"]
    assert find("--animal", "users_zoo:goat", TABLE) == Animal("meh")
    assert find("--function", "users_zoo:halve", FUNCTIONS)(3) == 1.5


def test_a_function_becomes_an_entry_where_the_registry_wraps():
    assert find("--animal", "users_zoo:halve", TABLE, wrap=lambda f: Animal(str(f(4)))) == Animal(
        "2.0"
    )
    assert find("--animal", "users_zoo:goat", TABLE, wrap=lambda f: Animal("wrapped")) == Animal(
        "meh"
    )
    assert (
        find("--function", "users_zoo:halve", FUNCTIONS, wrap=lambda f: lambda x: f(f(x)))(4) == 1
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wolf",
            (
                "--farm_animal wolf: there is no such farm animal; choose one of cow, sheep, or"
                " name one of your own as"
            ),
        ),
        ("shep", "there is no such farm animal \\(did you mean sheep\\?\\); choose one of cow"),
        ("no_zoo:goat", "--farm_animal no_zoo:goat: cannot be imported \\(ModuleNotFoundError"),
        ("no_zoo.py:goat", "; name the module without .py: no_zoo:goat$"),
        ("users_zoo:cat", "cannot be imported \\(AttributeError"),
        ("small_zoo:haave", "\\(did you mean halve\\?\\); small_zoo has halve, number$"),
        ("users_zoo:number", "cannot be imported \\(TypeError: it is of type int, not Animal"),
        ("users_zoo:halve", "cannot be imported \\(TypeError: it is of type function, not Animal"),
        ("broken_zoo:goat", "cannot be imported \\(SystemExit: 3"),
        ("", "there is no such farm animal"),
        (":goat", "there is no such farm animal"),
        ("users_zoo:", "cannot be imported"),
    ],
)
def test_other_names_are_mistakes_of_the_user(name, message):
    with pytest.raises(UserError, match=message):
        find("--farm_animal", name, TABLE)


def test_what_is_no_function_cannot_be_wrapped():
    with pytest.raises(UserError, match="it is of type int, not a function"):
        find("--animal", "users_zoo:number", TABLE, wrap=lambda f: Animal("x"))
