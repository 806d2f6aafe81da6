"""Presets: named sets of arguments, a TOML file each."""

from pathlib import Path
from typing import Any, TypeVar

from alignment.config.flag import OWN_SETTINGS, defaults_of_flags, flags_of_class
from alignment.config.settings import arguments_of, changed_values, chooser, is_own
from alignment.config.words import refuse_unknown_argument
from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.registry import did_you_mean

Config = TypeVar("Config")
PRESETS = Path(__file__).parents[1] / "presets"
CLAIMS = {file.stem: file for file in sorted((PRESETS.parent / "claims").glob("*.toml"))}


class PresetArguments(type):
    """The type of classes of arguments that begin from a preset. Where Python code makes one, as
    `RLArgs(preset="tiny", num_steps=5)`, what it does not name has the preset's value, as on the
    command line: a field's own default counts only where the preset is silent."""

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
        return from_preset(arguments_class, preset, **values)


def from_preset(cls: type[Config], name: str, **overrides) -> Config:
    """The arguments of a command as the preset states them, with `overrides`. A preset file holds
    shared values at its top and a table for each command ("sft", "evaluate", "train_rl"); its table
    [about] is for people. A setting that only one loss has, say, is a key in quotes, "loss.alpha",
    in the file, and a name like that among `overrides`."""
    names = preset_names()
    if name not in names:
        listed = ", ".join(names) + did_you_mean(name, names)
        raise UserError(f"--preset {name}: there is no such preset; choose one of {listed}")
    content = read_toml(PRESETS / f"{name}.toml", "--preset")
    values: dict[str, Any] = {"preset": name}
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
    return arguments_of(cls, {**defaults, **changed_values(cls, known_values, overrides)})


def preset_tables(cls: type) -> list[str]:
    """The tables of a preset's file that a command reads, its own last."""
    tables = []
    for kind in reversed(cls.__mro__):
        if "TABLE" in kind.__dict__:  # Not one that it inherits.
            tables.append(kind.__dict__["TABLE"])
    return tables


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))
