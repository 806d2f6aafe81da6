"""Presets: named sets of arguments, a TOML file each."""

from pathlib import Path
from typing import TypeVar

from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.registry import did_you_mean

Config = TypeVar("Config")
PRESETS = Path(__file__).parents[1] / "presets"
CLAIMS = {file.stem: file for file in sorted((PRESETS.parent / "claims").glob("*.toml"))}


def from_preset(cls: type[Config], name: str, **overrides) -> Config:
    """The arguments of a command as the preset states them, with `overrides`. A preset file holds
    shared values at its top and a table for each command ("sft", "evaluate", "train_rl"); its table
    [about] is for people."""
    if name not in (names := preset_names()):
        listed = ", ".join(names) + did_you_mean(name, names)
        raise UserError(f"--preset {name}: there is no such preset; choose one of {listed}")
    values = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in read_toml(PRESETS / f"{name}.toml", "--preset").items()
    }
    shared = {key: value for key, value in values.items() if not isinstance(value, dict)}
    own = {
        key: value for table in preset_tables(cls) for key, value in values.get(table, {}).items()
    }
    return cls(**{"preset": name, **shared, **own, **overrides})


def preset_tables(cls: type) -> list[str]:
    """The tables of a preset's file that a command reads, its own last."""
    return [kind.__dict__["TABLE"] for kind in reversed(cls.__mro__) if "TABLE" in kind.__dict__]


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))
