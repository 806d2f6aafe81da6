"""Words of a command line to arguments, and back; --help, --print_config, and what is said of
mistakes."""

import argparse
import dataclasses
import json
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro
from tyro._errors import ParseErrorEvent, on_parse_error

from alignment.config.commands import Args
from alignment.config.flag import flags_of_class, hints_of_flags
from alignment.config.presets import from_preset, preset_tables
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_toml
from alignment.system.registry import did_you_mean
from alignment.system.terminal import make_console

Config = TypeVar("Config")
OTHER_NAMES = Path(__file__).parents[1] / "other_names.toml"
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
        else:
            flags += [
                f"--{name}",
                *map(str, value if isinstance(value, tuple | list) else (value,)),
            ]
    return flags


def parse(cls: type[Config], argv: list[str] | None = None) -> Config:
    """Read the command line: the preset's values, if any, overridden by flags. Raises `UserError`
    for unknown or bad ones."""
    words = sys.argv[1:] if argv is None else argv
    if hasattr(cls, "resume"):
        words = _with_flags_of_run(cls, words)
        # args.json and reports have the whole command
        sys.argv[1:] = words if argv is None else sys.argv[1:]
    options: dict = {"use_underscores": True}
    if issubclass(cls, Args):
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--preset", default=Args.preset)
        # which decides the others' defaults
        options["default"] = from_preset(cls, parser.parse_known_args(words)[0].preset)
    if {"-h", "--help"} & set(words):
        _print_help(cls, options)
        sys.exit(0)
    printed = "--print_config" in words and "preset" in cls.__dataclass_fields__
    words = [word for word in words if not (printed and word == "--print_config")]
    with on_parse_error(partial(_refuse, cls, words)):
        args = tyro.cli(cls, args=words, **options)
    if printed:
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


def as_toml(args) -> str:
    """All arguments but --preset as a preset's file has them: shared ones at its top, a command's
    own in its table."""
    values = {
        key: value
        for key, value in vars(args).items()
        if key != "preset" and value not in (None, ())
    }
    lines = {
        key: f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
    }
    tables = preset_tables(type(args))[-1:]
    own = [line for key, line in lines.items() if tables and key not in Args.__dataclass_fields__]
    return "\n".join(
        [
            *(line for line in lines.values() if line not in own),
            *(f"\n[{table}]" for table in tables),
            *own,
        ]
    )


def _with_flags_of_run(cls: type[Config], words: list[str]) -> list[str]:
    """A command line with the flags of the run's args.json for a folder after --resume. Raises
    `UserError` if it has none."""
    place = words.index("--resume") + 1 if "--resume" in words else len(words)
    if place == len(words) or words[place].startswith("--"):
        return words
    folder = Path(words[place])
    given = read_json(file).get("args") if (file := folder / "args.json").is_file() else None
    if not isinstance(given, dict):
        raise UserError(f"--resume {folder}: must be a run's folder, which has an args.json")
    known = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in given.items()
        if name in cls.__dataclass_fields__
    }
    run = cls(
        **{**known, "output_dir": str(folder.parent), "run_name": folder.name, "resume": True}
    )
    return [*command_line(run), *words[: place - 1], *words[place + 1 :]]


def _refuse(cls: type, words: Sequence[str], mistake: ParseErrorEvent) -> None:
    """Raise `UserError` for a mistake that tyro found: with what the flag must be, that it must be
    given, or the nearest flag, or ours for a name of TRL or verl."""
    if argument := getattr(mistake, "argument", None):
        raise UserError(_wrong_value(cls, words, mistake, argument))
    if missing := getattr(mistake, "missing_arguments", ()):
        name = missing[0].arg.field.intern_name
        raise UserError(f"--{name}: must be given; --help says what it is")
    raise UserError(_unknown_flag(cls, mistake.tokens[0].partition("=")[0]))


def _wrong_value(cls: type, words: Sequence[str], mistake: Any, argument: Any) -> str:
    name = argument.field.intern_name
    kind = argument.lowered.metavar
    if hasattr(mistake, "value"):
        hint = hints_of_flags(cls)[name]
        literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        choices = [str(choice) for literal in literals[:1] for choice in get_args(literal)]
        choices = choices or mistake.choices
        nearest = did_you_mean(mistake.value, choices)
        return f"--{name} {mistake.value}: choose one of {', '.join(choices)}{nearest}"
    if "INT" in kind:
        wanted = "a whole number"
    elif "FLOAT" in kind:
        wanted = "a number"
    else:
        wanted = kind
    value = re.search(rf"--{name}[ =](.*?)( --|$)", " ".join(words))
    given = value[1] if value else "(no value)"
    return f"--{name} {given}: must be {wanted}"


def _unknown_flag(cls: type, given: str) -> str:
    name = given.lstrip("-+").replace("-", "_")
    for remedy, names in read_toml(OTHER_NAMES, given).items():
        if name in names:
            return f"{given}: there is no such flag; {remedy}"
    hints = hints_of_flags(cls)
    negations = [f"no_{flag}" for flag, hint in hints.items() if hint is bool]
    known = sorted({"help", *hints, *negations})
    nearest = did_you_mean(f"--{name}", [f"--{flag}" for flag in known]) or "; --help lists all"
    return f"{given}: there is no such flag{nearest}"


def as_command(cls: type[Config], other: Args) -> Config:
    """The arguments of another command that shares `other`'s preset and every value both have in
    common."""
    return from_preset(
        cls, other.preset, **{f.name: getattr(other, f.name) for f in dataclasses.fields(Args)}
    )
