"""Presets: named sets of arguments, a TOML file each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from alignment.config.flag import (
    OWN_SETTINGS,
    defaults_of_flags,
    flags_of_class,
    refuse_idle_values,
)
from alignment.config.settings import arguments_of, changed_values, chooser, is_own
from alignment.config.words import refuse_unknown_argument
from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.nearest import did_you_mean

Config = TypeVar("Config")
SUFFIX = ".toml"
PRESETS = Path(__file__).parents[1] / "presets"
CLAIMS = {file.stem: file for file in sorted((PRESETS.parent / "claims").glob("*.toml"))}


COMMAND_TABLES = {"about"}
"""The tables that a preset's file may have: one for people, and one for each command."""


class PresetArguments(type):
    """The type of classes of arguments that begin from a preset. Where Python code makes one, as
    `RLArgs(preset="tiny", num_steps=5)`, what it does not name has the preset's value, as on the
    command line: a field's own default counts only where the preset is silent."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]):
        super().__init__(name, bases, namespace)
        if "TABLE" in namespace:
            COMMAND_TABLES.add(namespace["TABLE"])

    def __call__(cls, *positional, **given):
        # unannotated, so that type checkers take the parameters of the dataclass
        if positional:
            raise UserError(f"{cls.__name__} takes its arguments by name: {cls.__name__}(task=...)")
        arguments_class: Any = cls
        values = {**given, **dict(given.get(OWN_SETTINGS, ()))}
        values.pop(OWN_SETTINGS, None)
        for name in values:
            if not is_own(name):
                refuse_unknown_argument(arguments_class, name)
        names_own = any(is_own(name) for name in given)
        names_all = flags_of_class(arguments_class).keys() <= given.keys()
        # as `dataclasses.replace` and `arguments_of` do
        if names_all and not names_own:
            return super().__call__(**given)
        preset = values.get("preset", arguments_class.preset)
        arguments = from_preset(arguments_class, preset, **values)
        refuse_idle_values(arguments, values)
        return arguments


def from_preset(cls: type[Config], name: str, **overrides) -> Config:
    """The arguments of a command as the preset states them, with `overrides`. `name` is one of
    `preset_names`, or the path of a file of the user's own, which ends in .toml.

    A preset file holds shared values at its top and a table for each command ("sft", "evaluate",
    "train_rl"); its table [about] is for people. A setting that only one loss has, say, is a key in
    quotes, "loss.alpha", in the file, and a name like that among `overrides`. Raises `UserError` as
    `values_of_preset`, and for values that a command cannot take."""
    return arguments_of(cls, values_of_preset(cls, name, overrides))


def values_of_preset(cls: type, name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values of flags that `from_preset` makes arguments of. Raises `UserError` for a file that
    is not there or no TOML, and for a key or table that no command has."""
    file = preset_file(name)
    content = read_toml(file, "--preset")
    is_own_file = name.endswith(SUFFIX)
    if is_own_file:
        refuse_unknown_keys(cls, name, content)
    # Runs that this one starts may have another working directory.
    changes = {**overrides, "preset": str(file.resolve()) if is_own_file else name}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if not isinstance(value, dict):
            values[key] = value
    for table in preset_tables(cls):
        values |= content.get(table, {})
    # TOML has lists alone
    for key, value in values.items():
        if isinstance(value, list):
            values[key] = tuple(value)
    declared = flags_of_class(cls)
    # Of the settings at the file's top a command has those that it has the flag for.
    known_values = {}
    for key, value in values.items():
        if not is_own(key) or chooser(key) in declared:
            known_values[key] = value
    defaults = defaults_of_flags(cls)
    return {**defaults, **changed_values(cls, known_values, changes)}


def preset_file(name: str) -> Path:
    """The file of a preset, by its name or by its path. Raises `UserError` for an unknown name."""
    if name.endswith(SUFFIX):
        return Path(name)
    names = preset_names()
    if name not in names:
        listed = f"{', '.join(names)}, or a file FILE{SUFFIX}"
        nearest = did_you_mean(name, names)
        raise UserError(
            f"--preset {name}: there is no such preset{nearest}; choose one of {listed}"
        )
    return PRESETS / f"{name}{SUFFIX}"


def preset_title(preset: str) -> str:
    """What folders of runs are called after a preset: its name, or that of its file."""
    return Path(preset).stem if preset.endswith(SUFFIX) else preset


def refuse_unknown_keys(cls: type, name: str, content: Mapping[str, Any]) -> None:
    """Raise `UserError` for a table of a preset's file that is no command's, and for a key, of
    those that the command `cls` reads, which is no flag."""
    keys = []
    for key, value in content.items():
        if not isinstance(value, dict):
            keys.append(key)
        elif key not in COMMAND_TABLES:
            nearest = did_you_mean(key, COMMAND_TABLES)
            raise UserError(f"--preset {name}: [{key}] is no command's table{nearest}")
        elif key in preset_tables(cls):
            keys += value
    for key in keys:
        if is_own(key):
            continue
        try:
            refuse_unknown_argument(cls, key)
        except UserError as error:
            raise UserError(f"--preset {name}: {error}") from None


def preset_tables(cls: type) -> list[str]:
    """The tables of a preset's file that a command reads, its own last."""
    tables = []
    for kind in reversed(cls.__mro__):
        if "TABLE" in kind.__dict__:  # Not one that it inherits.
            tables.append(kind.__dict__["TABLE"])
    return tables


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))
