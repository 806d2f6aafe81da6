"""Presets: named sets of arguments, a TOML file each."""

from pathlib import Path
from typing import Any, TypeVar

from alignment.config.flag import flags_of_class
from alignment.config.settings import arguments_of, changed_values, chooser, is_own
from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.registry import did_you_mean

Config = TypeVar("Config")
PRESETS = Path(__file__).parents[1] / "presets"
CLAIMS = {file.stem: file for file in sorted((PRESETS.parent / "claims").glob("*.toml"))}


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
            values[key] = tuple(value) if isinstance(value, list) else value
    for table in preset_tables(cls):
        values |= content.get(table, {})
    declared = flags_of_class(cls)
    # Of the settings at the file's top a command has those that it has the flag for.
    values = {
        key: value for key, value in values.items() if not is_own(key) or chooser(key) in declared
    }
    return arguments_of(cls, changed_values(cls, values, overrides))


def preset_tables(cls: type) -> list[str]:
    """The tables of a preset's file that a command reads, its own last."""
    return [kind.__dict__["TABLE"] for kind in reversed(cls.__mro__) if "TABLE" in kind.__dict__]


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))
