"""Command-line flags, which are fields of dataclasses of arguments:

    group_size: int = flag(8, group="rollouts", above=0)
    \"\"\"Responses sampled for each prompt.\"\"\"

`flag` declares which values the flag may have, and other facts about it; the docstring below the
field is its help. `check_flags` compares the values to the declarations. It does so for every
command, and also where Python code makes the arguments.
"""

import dataclasses
import functools
import os
import types
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from alignment.core.flag import Extra, Flag, flag
from alignment.system.errors import UserError
from alignment.system.nearest import did_you_mean
from alignment.system.registry import name_here

__all__ = [
    "DataclassInstance",
    "Extra",
    "Flag",
    "LARGEST_SEED",
    "NOUNS",
    "OWN_SETTINGS",
    "check_choices",
    "check_flag",
    "check_flags",
    "check_packages",
    "defaults_of_flags",
    "fields_of_flags",
    "flag",
    "flags_of_class",
    "hints_of_flags",
    "idle_flags",
    "names_of_flags",
    "refuse_idle_values",
    "refused",
    "require",
    "required_flags",
]

LARGEST_SEED = 2**31 - 1  # the largest that all libraries with random numbers take
# The field that holds the values of flags which only some losses, advantages, rewards or samplers
# have (`alignment.config.settings`). It is no flag itself.
OWN_SETTINGS = "own_settings"
NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
"""Type of a flag's value -> what an error calls it."""


class DataclassInstance(Protocol):
    """An instance of any dataclass, for type checkers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def fields_of_flags(arguments: Any) -> list[dataclasses.Field]:
    """The fields that are flags, of a class of arguments or an instance of one."""
    return [field for field in dataclasses.fields(arguments) if field.name != OWN_SETTINGS]


def flags_of_class(arguments: Any) -> Mapping[str, Flag]:
    """The declarations of all flags, by name. `arguments` is a class of arguments, or an instance
    of one."""
    return _declarations(arguments if isinstance(arguments, type) else type(arguments))


@functools.cache
def _declarations(arguments: type) -> Mapping[str, Flag]:
    declarations = {}
    for field in fields_of_flags(arguments):
        declarations[field.name] = field.metadata.get("flag", Flag())
    return types.MappingProxyType(declarations)


@functools.cache
def hints_of_flags(arguments: type) -> dict[str, Any]:
    """The types of all flags of a class of arguments, by name."""
    hints = get_type_hints(arguments)
    return {field.name: hints[field.name] for field in fields_of_flags(arguments)}


def required_flags(arguments: type) -> list[str]:
    """The flags of a class of arguments that have no default."""
    fields = fields_of_flags(arguments)
    return [field.name for field in fields if field.default is dataclasses.MISSING]


def defaults_of_flags(arguments: type) -> dict[str, Any]:
    """The defaults of all flags of a class of arguments, by name."""
    return {field.name: field.default for field in fields_of_flags(arguments)}


def names_of_flags(arguments: Any, property_name: str) -> frozenset[str]:
    """The names of the flags whose declaration has this property of a `Flag` true, such as
    "bookkeeping"."""
    flags = flags_of_class(arguments)
    return frozenset(name for name, facts in flags.items() if getattr(facts, property_name))


def idle_flags(arguments: type, values: Mapping[str, Any]) -> dict[str, str]:
    """The flags of a class of arguments that play no part beside these values of its flags, each
    with the flag that it needs, which has its default there."""
    defaults = defaults_of_flags(arguments)
    idle = {}
    for name, facts in flags_of_class(arguments).items():
        other = facts.only_with
        if other and values[other] == defaults[other]:
            idle[name] = other
    return idle


def refuse_idle_values(arguments: Any, given: Collection[str]) -> None:
    """Raise `UserError` for a flag that plays no part and has another value than its default, if it
    is `given`, and the flag that it needs is not.

    A preset may state such a value, which counts once another flag asks for it. Who gives both
    flags, as in --sampler_correction none --correction_cap 5, knows that one plays no part."""
    cls = type(arguments)
    defaults = defaults_of_flags(cls)
    unused = getattr(cls, "UNUSED_FLAGS", ())
    for name, other in idle_flags(cls, vars(arguments)).items():
        if name in given and other not in given and name not in unused:
            wanted = f"left out, or go with --{other}"
            require(arguments, name, getattr(arguments, name) == defaults[name], wanted)


def require(arguments: Any, name: str, condition: bool, wanted: str) -> None:
    """Raise `UserError`, "--name value: must be {wanted}", unless the condition is true."""
    if not condition:
        raise refused(name, getattr(arguments, name), wanted)


def refused(name: str, value: object, wanted: str) -> UserError:
    """The error "--name value: must be {wanted}"."""
    if isinstance(value, tuple):
        shown = " ".join(map(str, value))
    else:
        shown = "''" if value == "" else str(value)
    return UserError(f"--{name} {shown}: must be {wanted}")


def check_flags(arguments: Any) -> None:
    """Raise `UserError` for a value that is of another type than its flag, not one of its choices,
    or out of its bounds. A tuple of numbers, which only a sweep has, is not checked for bounds
    here: each arm checks its number."""
    hints = hints_of_flags(type(arguments))
    for name, facts in flags_of_class(arguments).items():
        value = getattr(arguments, name)
        check_kind(name, hints[name], value)
        check_flag(name, facts, value)


def check_kind(name: str, hint: Any, value: object) -> None:
    """Raise `UserError` for a value that is not of its flag's type, as Python code may give one: a
    text for a number, a list for a tuple. An int is taken for a float."""
    if get_origin(hint) is tuple:
        _check_tuple(name, get_args(hint)[0], value)
        return
    members = (hint,)
    if get_origin(hint) in (Union, types.UnionType):
        members = get_args(hint)
    if value is None and type(None) in members:
        return
    kind = members[0]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            check_choices(name, [value], [str(choice) for choice in get_args(kind)])
        return
    accepted = (int, float) if kind is float else (kind,)
    # by `type`, since isinstance(True, int) holds
    if type(value) in accepted:
        return
    example = ""
    if isinstance(value, os.PathLike):
        example = f", such as {os.fspath(value)!r}"
    raise UserError(f"--{name} {value!r}: must be {NOUNS[kind]}{example}")


def _check_tuple(name: str, part: Any, value: object) -> None:
    """Raise `UserError` for what is no tuple whose elements are all of the type `part`."""
    if not isinstance(value, tuple):
        elements = value if isinstance(value, list | set) else (value,)
        raise UserError(f"--{name} {value!r}: must be a tuple, such as {tuple(elements)!r}")
    for element in value:
        check_kind(name, part, element)


def check_flag(name: str, facts: Flag, value: Any) -> None:
    """Raise `UserError` as `check_flags`, of one flag."""
    if facts.choices:
        values = value if isinstance(value, tuple) else (value,)
        check_choices(name, values, facts.choices, facts.takes_own)
    if facts.names_folder and not is_plain_folder_name(str(value)):
        raise refused(name, value, "a plain folder name without slashes, of at most 150 bytes")
    if not facts.has_bound or value is None or isinstance(value, tuple):
        return
    if not facts.admits(value):
        raise refused(name, value, facts.bound_in_words(type(value)))


def is_plain_folder_name(name: str) -> bool:
    """Whether every file system takes it as the name of one folder; empty names none, and will
    do."""
    is_plain = name not in (".", "..") and Path(name).name == name
    return is_plain and len(name.encode(errors="surrogateescape")) <= 150


def check_choices(
    name: str, values: Iterable[object], choices: Iterable[str], takes_own: bool = False
) -> None:
    """Raise `UserError`, which suggests the nearest choice, for a value that is not a choice. With
    `takes_own` a value may be package.module:name, which is not imported here."""
    choices = list(choices)
    own = ", or name one of your own as package.module:name" if takes_own else ""
    for value in values:
        is_own = takes_own and ":" in str(value)
        if value not in choices and not is_own:
            nearest = name_here(f"--{name}", str(value)) or did_you_mean(str(value), choices)
            raise UserError(f"--{name} {value}: choose one of {', '.join(choices)}{own}{nearest}")


def check_packages(arguments: Any) -> None:
    """Raise `UserError` for a value that needs a package that is not installed."""
    for name, facts in flags_of_class(arguments).items():
        value = getattr(arguments, name)
        needs = facts.needs
        if needs is None or not needs.is_needed_for(value) or find_spec(needs.package):
            continue
        words = f"--{name}" if value is True else f"--{name} {value}"
        raise UserError(
            f"{words} needs {needs.package}: start with `uv run --extra {needs.extra} ...`"
        )
