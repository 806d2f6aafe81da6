"""The tables of notation and the patterns: every name has one meaning, every pattern a use."""

import re
from itertools import chain
from pathlib import Path

from alignment.rewards.grading import patterns
from alignment.rewards.grading.notation import TABLES
from alignment.rewards.grading.rewrites import REWRITES
from alignment.rewards.grading.text import normalise


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


def test_every_rewrite_has_the_groups_that_its_replacement_names():
    for pattern, replacement in REWRITES:
        if isinstance(replacement, str):
            groups = [int(group) for group in re.findall(r"(?<!\\)(?:\\\\)*\\([0-9])", replacement)]
            assert max(groups, default=0) <= pattern.groups, pattern.pattern


def test_rewrites_by_hand():
    assert normalise(r"x \leq 10{,}000") == "x ≤ 10000"
    assert normalise(r"\left(1 234 567, \dfrac12\right)") == r"(1234567, \frac{1}{2} )"
    assert normalise("The final answer is: **½**.") == r"\frac{1}{2}"


def test_a_pattern_holds_those_that_it_is_made_of():
    assert patterns.SCALED.fullmatch("1,500.5 millions of euros").groups() == (
        "1,500.5",
        "million",
        "of euros",
    )
    assert patterns.VARIABLE.pattern in patterns.LABEL.pattern
    assert patterns.NUMBER.pattern in patterns.SCALAR.pattern


def test_every_pattern_is_used():
    folder = Path(patterns.__file__).parent
    code = "".join(file.read_text("utf-8") for file in folder.glob("*.py"))
    names = [name for name, value in vars(patterns).items() if isinstance(value, re.Pattern)]
    assert len(names) > 40
    unused = [
        name for name in names if not re.search(rf"patterns\.{name}\b|{{{name}\.pattern}}", code)
    ]
    assert unused == []
