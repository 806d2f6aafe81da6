"""Words of a command line to arguments, and back; --help, --print_config, and what is said of
mistakes."""

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from alignment.config.commands import Args
from alignment.config.flag import DataclassInstance, flags_of_class
from alignment.config.presets import from_preset, preset_tables
from alignment.config.words import check_words
from alignment.system.errors import UserError
from alignment.system.files import read_json
from alignment.system.terminal import make_console

ArgumentsType = TypeVar("ArgumentsType", bound=DataclassInstance)
CommandType = TypeVar("CommandType", bound=Args)
GROUPS = (
    "sweep",
    "model",
    "data",
    "algorithm",
    "rollouts",
    "optimisation",
    "devices",
    "evaluation",
    "run",
)
"""The sections of --help, after what matters first."""


def command_line(args: Args) -> list[str]:
    """The flags that give these arguments on top of their preset."""
    preset = vars(from_preset(type(args), args.preset))
    changed = {name: value for name, value in vars(args).items() if value != preset[name]}
    return flags_of({"preset": args.preset, **changed})


def flags_of(values: Mapping[str, object]) -> list[str]:
    """The words of a command line that give these arguments; several values are a tuple or a
    list."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
            continue
        several = value if isinstance(value, tuple | list) else (value,)
        flags += [f"--{name}", *map(str, several)]
    return flags


def parse(cls: type[ArgumentsType], argv: list[str] | None = None) -> ArgumentsType:
    """Read the command line: the preset's values, if any, overridden by flags. Raises `UserError`
    for unknown or bad ones."""
    words = sys.argv[1:] if argv is None else argv
    if issubclass(cls, Args) and "resume" in flags_of_class(cls):
        words = _with_flags_of_run(cls, words)
        if argv is None:
            # args.json and reports have the whole command.
            sys.argv[1:] = words
    options: dict[str, Any] = {"use_underscores": True}
    if issubclass(cls, Args):
        # The preset decides the other flags' defaults.
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--preset", default=Args.preset)
        options["default"] = from_preset(cls, parser.parse_known_args(words)[0].preset)
    if {"-h", "--help"} & set(words):
        _print_help(cls, options)
        sys.exit(0)
    is_printed = "--print_config" in words and "preset" in flags_of_class(cls)
    if is_printed:
        words = [word for word in words if word != "--print_config"]
    args = tyro.cli(cls, args=check_words(cls, words), **options)
    if is_printed:
        make_console().print(as_toml(args), markup=False, highlight=False, soft_wrap=True)
        sys.exit(0)
    return args


def _print_help(cls: type, options: Mapping[str, Any]) -> None:
    """Print the flags of a command by groups, without those that play no part in it."""
    unused = getattr(cls, "UNUSED_FLAGS", ())
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        actions = tyro.extras.get_parser(cls, **options)._actions
    shown = {action.dest: action for action in actions if action.dest not in (*unused, "help")}
    declared = flags_of_class(cls)
    for name, action in shown.items():
        # The metavar says already that there may be several.
        if action.nargs == "*":
            action.nargs = None
        if declared[name].choices:
            action.metavar = _choices_in_help(action.metavar, declared[name].choices)
        action.option_strings = [
            *action.option_strings,
            *(f"--{alias}" for alias in declared[name].aliases),
        ]

    console = make_console()
    formatter = argparse.HelpFormatter("", max_help_position=30, width=min(console.width, 100))
    formatter.add_text(f"usage: python -m alignment.{Path(sys.argv[0]).stem} [-h] [flags]")
    about = cls.__doc__ or ""
    if "preset" in shown:
        about += (
            " `python -m alignment.presets` lists presets; --print_config prints all arguments as a"
            " preset's file."
        )
    formatter.add_text(about)
    for title, names in _help_sections(cls, list(shown)).items():
        formatter.start_section(title)
        formatter.add_arguments([shown[name] for name in names])
        formatter.end_section()
    console.print(formatter.format_help(), markup=False, highlight=False, soft_wrap=True)


def _help_sections(cls: type, shown: Sequence[str]) -> dict[str, list[str]]:
    """Title -> names of its flags, each in one section only. A command without a task has few
    flags, and one section."""
    if "task" not in shown:
        return {"flags": list(shown)}
    first = [name for name in getattr(cls, "FIRST_FLAGS", ()) if name in shown]
    sections = {"what matters first": first}
    rest = [name for name in shown if name not in first]
    declared = flags_of_class(cls)
    for group in (*GROUPS, ""):
        names = [name for name in rest if declared[name].group == group]
        sections[group or "flags"] = names
    return sections


def _choices_in_help(metavar: str, choices: Sequence[str]) -> str:
    """The values of a flag as --help shows them. tyro writes STR for one and [STR [STR ...]] for
    several."""
    listed = "{" + ",".join(choices) + "}"
    if metavar.startswith("[STR"):
        return f"[{listed} [...]]"
    return metavar.replace("STR", listed)


def as_toml(args: DataclassInstance) -> str:
    """All arguments but --preset as a preset's file has them: shared ones at its top, a command's
    own in its table."""
    tables = preset_tables(type(args))[-1:]
    shared_names = flags_of_class(Args)
    shared: list[str] = []
    own: list[str] = []
    for name, value in vars(args).items():
        if name == "preset" or value is None or value == ():
            continue
        line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
        if tables and name not in shared_names:
            own.append(line)
        else:
            shared.append(line)
    return "\n".join([*shared, *(f"\n[{table}]" for table in tables), *own])


def _with_flags_of_run(cls: type[Args], words: list[str]) -> list[str]:
    """A command line with the flags of the run's args.json for a folder after --resume. Raises
    `UserError` if it has none."""
    if "--resume" not in words:
        return words
    place = words.index("--resume")
    after = words[place + 1 : place + 2]
    if not after or after[0].startswith("--"):
        return words
    folder = Path(after[0])
    file = folder / "args.json"
    given = read_json(file).get("args") if file.is_file() else None
    if not isinstance(given, dict):
        raise UserError(f"--resume {folder}: must be a run's folder, which has an args.json")
    values: dict[str, Any] = {}
    for name in flags_of_class(cls).keys() & given.keys():
        value = given[name]
        values[name] = tuple(value) if isinstance(value, list) else value
    values |= {"output_dir": str(folder.parent), "run_name": folder.name, "resume": True}
    return [*command_line(cls(**values)), *words[:place], *words[place + 2 :]]


def as_command(cls: type[CommandType], other: Args) -> CommandType:
    """The arguments of another command that shares `other`'s preset and every value both have in
    common."""
    return from_preset(
        cls, other.preset, **{f.name: getattr(other, f.name) for f in dataclasses.fields(Args)}
    )
