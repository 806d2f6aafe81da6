"""Words of a command line to arguments, and back; --help, --print_config, and what is said of
mistakes."""

import argparse
import dataclasses
import json
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast

import tyro

from alignment.config.commands import Args
from alignment.config.data import SFTShareFlags
from alignment.config.flag import (
    DataclassInstance,
    defaults_of_flags,
    flags_of_class,
    hints_of_flags,
    idle_flags,
    refuse_idle_values,
)
from alignment.config.presets import from_preset, preset_tables, values_of_preset
from alignment.config.settings import (
    arguments_of,
    changed_values,
    choices_of,
    flag_values,
    flags_of_value,
    given_values,
    is_own,
    root_flag,
    unchecked_arguments,
)
from alignment.config.words import check_words, given_words, single_values, split_own_words
from alignment.core.args_file import was_auto
from alignment.system.errors import UserError
from alignment.system.files import read_json
from alignment.system.terminal import make_console, print_from_the_top
from alignment.system.versions import version_line

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
LONGEST_LIST = 65  # characters of a list of choices in one line of --help


def command_line(args: Args) -> list[str]:
    """The flags that give these arguments on top of their preset; on top of the default one where
    theirs cannot be read, as where the file that a run began from is gone."""
    cls = type(args)
    try:
        preset = _flag_values_of_preset(cls, args.preset)
    except UserError:
        preset = _flag_values_of_preset(cls, cls.preset)
    values = flag_values(args) | {"preset": preset["preset"]}
    changed = {}
    for name, value in values.items():
        root = root_flag(name)
        # The preset's settings of a loss, say, go with that loss alone.
        is_presets = name in preset and value == preset[name] and values[root] == preset[root]
        if not is_presets:
            changed[name] = value
    for name, other in idle_flags(cls, values).items():
        if name in changed:
            changed[other] = values[other]  # Given too, it says that the other plays no part.
    return flags_of({"preset": preset["preset"], **changed})


def _flag_values_of_preset(cls: type[Args], name: str) -> dict[str, Any]:
    return flag_values(unchecked_arguments(cls, values_of_preset(cls, name, {})))


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
    if "--version" in words:
        print(version_line())
        sys.exit(0)
    run: Args | None = None
    if issubclass(cls, Args) and "resume" in flags_of_class(cls):
        run, words = _split_resumed_run(cls, words)
        if argv is None and run is not None:
            # args.json and reports have the whole command.
            sys.argv[1:] = [*command_line(run), *words]
    # Own words are those of settings of the chosen loss, say, as --loss.x: tyro does not know them.
    words, own_words = split_own_words(cls, words)
    options: dict[str, Any] = {"use_underscores": True}
    asks_for_help = bool({"-h", "--help"} & set(words))
    before: Mapping[str, Any] = {}
    if issubclass(cls, Args):
        before = _values_before(cls, words, run)
        own = {} if asks_for_help else single_values(own_words)
        drafted = _with_chosen_settings(cls, before, words, own)
        options["default"] = unchecked_arguments(cls, drafted)
    if asks_for_help:
        _print_help(cls, options, words)
        sys.exit(0)
    is_printed = "--print_config" in words and "preset" in flags_of_class(cls)
    if is_printed:
        words = [word for word in words if word != "--print_config"]
    words = _with_values_of_switches(cls, words)
    args = tyro.cli(cls, args=check_words(cls, words), **options)
    if issubclass(cls, Args):
        # The preset as its file is known by: a path is whole.
        given = given_values(args) | {"preset": before["preset"]}
        values = changed_values(cls, before, given)
        args = cast(ArgumentsType, arguments_of(cls, values))
        refuse_idle_values(args, [name for name in values if given_words(words, name)])
    elif own_words:
        args = dataclasses.replace(args, own_settings=tuple(own_words.items()))
    if is_printed:
        make_console().print(as_toml(args), markup=False, highlight=False, soft_wrap=True)
        sys.exit(0)
    return args


def _with_values_of_switches(cls: type, words: Sequence[str]) -> list[str]:
    """The words of a command line, with True after a flag without a value that takes several of
    true and false, as a sweep's do: without one it would have none, and be as if not given."""
    hints = hints_of_flags(cls)
    whole = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        whole.append(word)
        name = word.removeprefix("--").replace("-", "_")
        is_switch = word.startswith("--") and hints.get(name) == tuple[bool, ...]
        if is_switch and following.startswith("--"):
            whole.append("True")
    return whole


def _with_chosen_settings(
    cls: type, values: Mapping[str, Any], words: Sequence[str], own: Mapping[str, object]
) -> dict[str, Any]:
    """A preset's `values`, with the settings of losses, say, that the command line has: those that
    its other `words` leave of the preset, and its `own` ones."""
    chosen: dict[str, object] = dict(own)
    for _, choice in choices_of(cls):
        for value in given_words(words, choice.flag):
            chosen[choice.flag] = value
    drafted = {name: value for name, value in values.items() if not is_own(name)}
    for name, value in changed_values(cls, values, chosen).items():
        if is_own(name):
            drafted[name] = value
    return drafted


def _print_help(cls: type, options: Mapping[str, Any], words: Sequence[str]) -> None:
    """Print the flags of a command by groups, without those that play no part in it. The settings
    of the loss, advantage, reward and sampler that the `words` of the command line or else the
    preset choose have sections of their own."""
    unused = getattr(cls, "UNUSED_FLAGS", ())
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        actions = tyro.extras.get_parser(cls, **options)._actions
    hidden = {*unused, "help"}
    shown = {action.dest: action for action in actions if action.dest not in hidden}
    declared = flags_of_class(cls)
    for name, action in shown.items():
        # The metavar says already that there may be several.
        if action.nargs == "*":
            action.nargs = None
        if declared[name].values_in_words:
            action.help = f"{action.help} {declared[name].values_in_words}."
        if declared[name].choices:
            action.metavar = _choices_in_help(action.metavar, declared[name].choices)
        aliases = [f"--{alias}" for alias in declared[name].aliases]
        action.option_strings = [*action.option_strings, *aliases]

    console = make_console()
    formatter = argparse.HelpFormatter("", max_help_position=30, width=min(console.width, 100))
    formatter.add_text(f"usage: python -m alignment.{Path(sys.argv[0]).stem} [-h] [flags]")
    about = cls.__doc__ or ""
    if "preset" in shown:
        # Those of a sweep, say, are none of a preset's keys.
        shape = "a preset's file" if issubclass(cls, Args) else "TOML"
        about += (
            " `python -m alignment.presets` lists presets; --print_config prints all arguments as"
            f" {shape}."
        )
    formatter.add_text(about)
    for title, names in _help_sections(cls, list(shown)).items():
        formatter.start_section(title)
        formatter.add_arguments([shown[name] for name in names])
        formatter.end_section()
    for title, actions in _actions_of_settings(cls, options.get("default"), words).items():
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    print_from_the_top(formatter.format_help(), console)


def _actions_of_settings(
    cls: type, preset: object, words: Sequence[str]
) -> dict[str, list[argparse.Action]]:
    """Title -> what --help shows of the settings that a command's loss, advantage, reward or
    sampler has of its own; those with none are left out."""
    sections: dict[str, list[argparse.Action]] = {}
    for prefix, choice in choices_of(cls):
        chosen = given_words(words, choice.flag) or [getattr(preset, choice.flag, "")]
        for value in filter(None, chosen):
            actions = []
            for settings in filter(None, choice.classes(value)):
                actions += _actions_of_class(prefix, settings)
            if flags_of_value(prefix, value):
                sections[f"--{choice.flag} {value}"] = actions
    return sections


def _actions_of_class(prefix: str, settings: type) -> list[argparse.Action]:
    """What --help shows of the fields of a dataclass of settings."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        actions = tyro.extras.get_parser(settings, use_underscores=True)._actions
    shown = [action for action in actions if action.dest != "help"]
    for action in shown:
        options = []
        for option in action.option_strings:
            # --no_name becomes --no_prefix.name, and --name becomes --prefix.name.
            prefixed = option.replace("--", f"--{prefix}.", 1)
            options.append(prefixed.replace(f"--{prefix}.no_", f"--no_{prefix}."))
        action.option_strings = options
    return shown


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
    several. A long list goes on in a further line."""
    listed = "{" + ",".join(choices) + "}"
    if len(listed) > LONGEST_LIST:
        lines = textwrap.wrap("{" + ", ".join(choices) + "}", LONGEST_LIST)
        listed = "\n      ".join(line.replace(", ", ",") for line in lines)
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
    values = given_values(args)
    if isinstance(args, Args):
        values = flag_values(args)
    defaults = defaults_of_flags(type(args))
    for name, value in values.items():
        # TOML has no None, which is always the default; an empty list is not that of trackers.
        is_empty_default = value == () == defaults.get(name)
        if name == "preset" or value is None or is_empty_default:
            continue
        key = name
        if is_own(name):
            key = f'"{name}"'
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        if tables and root_flag(name) not in shared_names:
            own.append(line)
        else:
            shared.append(line)
    headings = [f"\n[{table}]" for table in tables]
    return "\n".join([*shared, *headings, *own])


def _split_resumed_run(
    cls: type[CommandType], words: Sequence[str]
) -> tuple[CommandType | None, list[str]]:
    """The arguments of the run whose folder follows --resume, by its args.json, and the other words
    of a command line; None and all words without such a folder. Raises `UserError` where the folder
    has no args.json."""
    split: list[str] = []
    for word in words:
        folder = word.removeprefix("--resume=")
        split += [word] if folder == word else ["--resume", folder]
    if "--resume" not in split:
        return None, split
    place = split.index("--resume")
    after = split[place + 1 : place + 2]
    if not after or after[0].startswith("--"):
        return None, split
    return args_of_run(cls, after[0]), [*split[:place], *split[place + 2 :]]


def _values_before(cls: type[Args], words: Sequence[str], run: Args | None) -> dict[str, Any]:
    """The values that the flags of a command line override: those of the run that it resumes, whose
    preset may be gone or another by now, else those of its preset."""
    presets = given_words(words, "preset")
    if run is None:
        return values_of_preset(cls, presets[0] if presets else cls.preset, {})
    values = given_values(run)
    if presets:
        # Compared with the run's, as all that is given.
        values["preset"] = values_of_preset(cls, presets[0], {})["preset"]
    return values


def args_of_run(cls: type[CommandType], folder: str | PathLike[str], **changes) -> CommandType:
    """The arguments that resume the run of a folder, with `changes`: those of its args.json, and
    for what is newer than that file the fields' own defaults, as the run had them. Raises
    `UserError` if it has no args.json."""
    path = Path(folder)
    file = path / "args.json"
    record = read_json(file) if file.is_file() else {}
    given = record.get("args")
    if not isinstance(given, dict):
        raise UserError(f"--resume {path}: must be a run's folder, which has an args.json")
    values = defaults_of_flags(cls)
    for name, value in given.items():
        if was_auto(record, name):
            continue
        if name in values or is_own(name):
            values[name] = tuple(value) if isinstance(value, list) else value
    values |= {"output_dir": str(path.parent), "run_name": path.name, "resume": True}
    return arguments_of(cls, changed_values(cls, values, changes))


def as_command(cls: type[CommandType], other: Args) -> CommandType:
    """The arguments of another command that shares `other`'s preset and every value both have in
    common."""
    shared_names = {**flags_of_class(Args), **flags_of_class(SFTShareFlags)}
    shared = {}
    for name, value in given_values(other).items():
        if root_flag(name) in shared_names:
            shared[name] = value
    return from_preset(cls, other.preset, **shared)
