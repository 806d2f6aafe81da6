"""The words of a command line, checked before they are read: each flag with its values, and a line
for the first mistake."""

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from alignment.config.flag import (
    DataclassInstance,
    check_choices,
    flags_of_class,
    hints_of_flags,
    required_flags,
)
from alignment.config.settings import choices_of
from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.nearest import did_you_mean

# How alike two flags are, from 0 to 1, of which one is named for the other.
CLOSE = 0.75
OTHER_NAMES = Path(__file__).parents[1] / "other_names.toml"


@dataclass(frozen=True)
class GivenFlag:
    """A flag of a command line: the argument that it names, as it was spelled, and its values."""

    name: str
    spelling: str
    values: tuple[str, ...]


def check_words(cls: type[DataclassInstance], words: Sequence[str]) -> list[str]:
    """The words with each flag under its own name in place of an alias. Raises `UserError` for an
    unknown flag, a value of another type, a value that is missing, and a flag that must be
    given."""
    hints = hints_of_flags(cls)
    given = split_words(cls, words)
    for flag in given:
        check_values(flag.name, hints[flag.name], flag.values)
    for name in required_flags(cls):
        if name not in [flag.name for flag in given]:
            raise UserError(f"--{name}: must be given; --help says what it is")
    checked: list[str] = []
    for flag in given:
        checked += [flag.spelling, *flag.values]
    return checked


def split_own_words(
    cls: type, words: Sequence[str]
) -> tuple[list[str], dict[str, tuple[object, ...]]]:
    """The words of a command line without the settings that only a loss, an advantage, a reward or
    a sampler has, such as --loss.alpha 0.3; and these, each with its values as text: True or False
    for --loss.alpha or --no_loss.alpha alone. Raises `UserError` for a value after the latter."""
    prefixes = "|".join(prefix for prefix, _ in choices_of(cls))
    others: list[str] = []
    own: dict[str, tuple[object, ...]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = re.fullmatch(rf"--(no[_-])?((?:{prefixes})\.[^=]+)(?:=(.*))?", word, re.DOTALL)
        if not prefixes or match is None:
            others.append(word)
            continue
        negation, name, value = match.groups()
        values = [] if value is None else [value]
        while rest and not rest[0].startswith("--") and value is None:
            values.append(rest.pop(0))
        if negation and values:
            given = " ".join(values)
            raise UserError(
                f"--no_{name} {given}: takes no value; write --no_{name} alone, or --{name} {given}"
            )
        own[name.replace("-", "_")] = tuple(values) or (negation is None,)
    return others, own


def single_values(own: Mapping[str, tuple[object, ...]]) -> dict[str, object]:
    """The value of each setting of a command line. Raises `UserError` for several values."""
    for name, values in own.items():
        if len(values) > 1:
            raise UserError(f"--{name} {' '.join(map(str, values))}: takes one value")
    return {name: values[0] for name, values in own.items()}


def given_words(words: Sequence[str], flag: str) -> list[str]:
    """The values that a command line gives a flag, as far as they can be told from its words
    alone."""
    given: list[str] = []
    is_value = False
    for word in words:
        spelling, separator, value = word.partition("=")
        if word.startswith("--"):
            is_value = spelling.removeprefix("--").replace("-", "_") == flag
            if is_value:
                given = [value] if separator else []
        elif is_value:
            given.append(word)
    return given


def split_words(cls: type[DataclassInstance], words: Sequence[str]) -> list[GivenFlag]:
    """The flags of a command line. Raises `UserError` for a word that is no flag and no flag's
    value."""
    hints = hints_of_flags(cls)
    names = names_by_spelling(cls, hints)
    given: list[GivenFlag] = []
    rest = list(words)
    while rest:
        spelled, separator, value = rest.pop(0).partition("=")
        spelling = "--" + spelled.removeprefix("--").replace("-", "_")
        before = given[-1] if given else None
        if before and hints[before.name] is bool and spelled.lower() in ("true", "false"):
            raise UserError(_no_value(before.name, spelled))
        if not spelled.startswith("--") or spelling not in names:
            raise UserError(_unknown_flag(cls, spelled))
        name = names[spelling]
        values = [value] if separator else []
        most = _most_values(hints[name])
        while rest and not rest[0].startswith("--") and not separator:
            if most is not None and len(values) == most:
                break
            values.append(rest.pop(0))
        is_negation = spelling == f"--no_{name}" and hints[name] is bool
        own_spelling = spelling if is_negation else f"--{name}"
        given.append(GivenFlag(name, own_spelling, tuple(values)))
    return given


def names_by_spelling(cls: type[DataclassInstance], hints: Mapping[str, Any]) -> dict[str, str]:
    """What may be written -> the argument that it names."""
    names: dict[str, str] = {}
    for name, facts in flags_of_class(cls).items():
        for spelling in (name, *facts.aliases):
            names[f"--{spelling}"] = name
        if hints[name] is bool:
            names[f"--no_{name}"] = name
    return names


def refuse_unknown_argument(cls: type[DataclassInstance], name: str) -> None:
    """Raise `UserError` for a keyword of Python code that is no field of these arguments, with the
    hint that the command line gives for such a flag."""
    hints = hints_of_flags(cls)
    if name in hints:
        return
    field = names_by_spelling(cls, hints).get(f"--{name}")
    if field is None:
        raise UserError(_unknown_flag(cls, f"--{name}"))
    written = f"{field}=..."
    if name == f"no_{field}":
        written = f"{field}=False"
    raise UserError(f"{cls.__name__}({name}=...): write {written}")


def _most_values(hint: Any) -> int | None:
    """How many values a flag takes at most; None: any number."""
    if hint is bool:
        return 0
    return None if get_origin(hint) is tuple else 1


def check_values(name: str, hint: Any, values: Sequence[str]) -> None:
    """Raise `UserError` for values that a flag of this type cannot have."""
    if hint is bool:
        if values:
            raise UserError(_no_value(name, values[0]))
        return
    part = get_args(hint)[0] if get_origin(hint) is tuple else hint
    members = get_args(part) if get_origin(part) in (Union, types.UnionType) else (part,)
    kinds = [member for member in members if member is not type(None)]
    is_optional = len(kinds) < len(members)
    if not values and get_origin(hint) is not tuple:
        raise UserError(f"--{name} (no value): must be {_noun(kinds[0])}")
    for value in values:
        if is_optional and value == "None":
            continue
        if get_origin(kinds[0]) is Literal:
            check_choices(name, [value], [str(choice) for choice in get_args(kinds[0])])
        elif not _is_readable(value, kinds[0]):
            raise UserError(f"--{name} {' '.join(values)}: must be {_noun(kinds[0])}")


def _no_value(name: str, value: str) -> str:
    """What is said of a value, such as True or False, for a flag that takes none."""
    return f"--{name} {value}: takes no value; write --{name} or --no_{name}"


def _is_readable(value: str, kind: type) -> bool:
    if kind not in (int, float):
        return True
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _noun(kind: Any) -> str:
    return {int: "a whole number", float: "a number"}.get(kind, "given a value")


def _unknown_flag(cls: type[DataclassInstance], given: str) -> str:
    name = given.lstrip("-+").replace("-", "_")
    for remedy, names in read_toml(OTHER_NAMES, given).items():
        if name in names or name.lower() in names:
            return f"{given}: there is no such flag; {remedy}"
    if given.isalnum() and not given.isdigit():
        return f"{given}: there is no such flag; a value follows its flag, as in --FLAG {given}"
    known = sorted({"--help", *names_by_spelling(cls, hints_of_flags(cls))})
    nearest = did_you_mean(f"--{name}", known, CLOSE) or "; --help lists all"
    return f"{given}: there is no such flag{nearest}"
