"""The tables of notation: every name has one meaning."""

import re
from itertools import chain
from pathlib import Path

from alignment.rewards.grading import text
from alignment.rewards.grading.text import PATTERNS, TABLES


def occurs_once(names) -> bool:
    names = list(names)
    return len(names) > 1 and len(set(names)) == len(names) and all(names)


def test_every_name_has_one_meaning():
    assert occurs_once(
        chain.from_iterable((unit, *names.split()) for unit, names in TABLES["units"].items())
    )
    assert occurs_once(chain.from_iterable(names.split() for names in TABLES["signs"].values()))
    assert occurs_once(
        chain.from_iterable(
            {**TABLES["greek"], **TABLES["greek_capitals"], **TABLES["characters"]}.values()
        )
    )
    assert occurs_once(chain(TABLES["everything"], *TABLES["phrases"].values()))
    assert all(occurs_once(words.split()) for words in TABLES.values() if isinstance(words, str))


def test_every_table_is_of_one_type():
    types = {
        "phrases": list,
        "closing": list,
        **dict.fromkeys(("scales", "denominators", "base_words"), int),
    }
    for name, table in TABLES.items():
        if isinstance(table, dict):
            assert {type(value) for value in table.values()} == {types.get(name, str)}, name


def test_hand_checked_entries():
    assert (
        TABLES["cardinals"].split().index("nineteen") == 19
        and len(TABLES["cardinals"].split()) == 28
    )
    assert TABLES["signs"]["≤"].split()[0] == "le" and "−" in TABLES["characters"]["-"]
    assert (
        "metre" in TABLES["units"]["m"].split() and TABLES["unit_abbreviations"]["mph"] == "mile/h"
    )


def test_every_rewrite_is_a_pattern_and_a_replacement_for_its_groups():
    for rule in (*TABLES["rewrites"], *TABLES["math_spelling"], *TABLES["prm800k_spelling"]):
        pattern, replacement = map(str, rule)
        groups = [int(group) for group in re.findall(r"(?<!\\)(?:\\\\)*\\([0-9])", replacement)]
        assert max(groups, default=0) <= re.compile(pattern).groups, rule


def test_a_pattern_holds_those_that_it_names():
    assert PATTERNS.scaled.fullmatch("1,500.5 millions of euros").groups() == (
        "1,500.5",
        "million",
        "of euros",
    )
    assert PATTERNS.variable.pattern in PATTERNS.label.pattern and "(?&" not in "".join(
        p.pattern for p in vars(PATTERNS).values()
    )


def test_every_pattern_is_used():
    package = Path(text.__file__).parents[1]
    used = "".join(
        file.read_text("utf-8")
        for file in (*package.rglob("*.py"), package / "grading" / "patterns.toml")
    )
    words = {"verbs", "scales", "greek"}  # tables that patterns are made of
    assert [
        name
        for name in vars(PATTERNS).keys() - words
        if not re.search(rf"(PATTERNS\.|\(\?&){name}\b", used)
    ] == []
