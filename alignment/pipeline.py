"""Stages in a row from one TOML file: data kept from a model's own answers, SFT, RL, and the
accuracy after each.

uv run -m alignment.pipeline --file alignment/pipelines/r1_tiny.toml

A stage is a command with its flags; `{name}` in a flag is the result of the stage of that name (a
model, or a file):

    preset = "tiny"

    [stages.kept]
    command = "rejection_sample"
    model = "{rl}"

    [stages.student]
    command = "sft"
    demonstrations = ["{kept}"]"""

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from alignment.args import (
    RULES,
    EvaluateArgs,
    PipelineArgs,
    RejectionArgs,
    RLArgs,
    SFTArgs,
    flags_of,
    parse,
)
from alignment.system.errors import RunStopped, UserError, run_command
from alignment.system.files import lock_run_folder, read_json, read_toml, write_json
from alignment.system.processes import last_line, start_command
from alignment.system.terminal import make_console, make_table

COMMANDS = {"rejection_sample": RejectionArgs, "sft": SFTArgs, "train_rl": RLArgs}
SET_BY_PIPELINE = {
    "rejection_sample": {"output"},
    "sft": {"sft_base"},
    "train_rl": {"run_name", "resume"},
}
COLUMNS = {  # Heading -> the cell, from an evaluation's record.
    "stage": "{stage}",
    "accuracy": "{avg_all_rewards:.3f}",
    "95 %": "{avg_all_rewards_ci[0]:.3f} .. {avg_all_rewards_ci[1]:.3f}",
    "format": "{avg_format_rewards:.3f}",
    "tokens": "{response_length:.1f}",
}


class Stage(NamedTuple):
    """A command with its flags, its `result` (a model or a file), and `done`, a path that exists
    once it has ended well."""

    name: str
    command: str
    flags: tuple[str, ...]
    result: str
    done: Path


def read_stages(file: Path, folder: Path) -> list[Stage]:
    """The stages of a file, each followed by an evaluation of its model. Raises `UserError`, naming
    the stage."""
    values = read_toml(file, "--file")
    shared = {key: value for key, value in values.items() if not isinstance(value, dict)}
    shared.setdefault("preset", "tiny")
    tables = values.get("stages")
    if not isinstance(tables, dict) or not tables:
        raise UserError(f"--file {file}: has no [stages.NAME]")
    stages: list[Stage] = []
    results: dict[str, str] = {}
    for name, table in tables.items():
        place = f"--file {file}: stage {name}"
        command = _checked_command(name, table, place)
        given = {
            key: _filled(value, results, place)
            for key, value in {**shared, **table}.items()
            if key != "command"
        }
        made = _stages(name, command, given, folder, place)
        stages += made
        results[name] = made[0].result
    return stages


def _checked_command(name: str, table: object, place: str) -> str:
    """The command of a stage. Raises `UserError` for a bad name, another command, or an argument
    that the pipeline sets."""
    plain = (
        re.fullmatch(r"\w[\w-]*", name) and name != "logs" and not name.startswith("evaluation_of_")
    )
    if not plain or not isinstance(table, dict):
        raise UserError(
            f"{place}: must be a table with a plain name, neither logs nor evaluation_of_..."
        )
    if (command := table.get("command")) not in COMMANDS:
        raise UserError(f"{place}: command {command!r}: must be one of {', '.join(COMMANDS)}")
    if taken := table.keys() & (SET_BY_PIPELINE[command] | {"output_dir"}):
        raise UserError(f"{place}: {', '.join(sorted(taken))}: the pipeline sets it itself")
    return command


def _stages(
    name: str, command: str, given: Mapping[str, object], folder: Path, place: str
) -> list[Stage]:
    """The stage and, where it makes a model, the evaluation of that model."""
    model, file, evaluation = folder / name, folder / f"{name}.jsonl", f"evaluation_of_{name}"
    result, done, own = {
        "rejection_sample": (file, file, {"output": str(file)}),
        "sft": (model, model, {"sft_base": str(model)}),
        "train_rl": (model / "final", model / "summary.json", {"run_name": name}),
    }[command]
    stage = Stage(
        name, command, _checked_flags(command, {**given, **own}, folder, place), str(result), done
    )
    if command == "rejection_sample":
        return [stage]
    shared = {
        key: value
        for key, value in given.items()
        if key in EvaluateArgs.__dataclass_fields__ and key != "sft_base"
    }
    if shared.get("reward") not in RULES:
        shared.pop("reward", None)  # an evaluation scores by a rule: here the task's own
    flags = _checked_flags(
        "evaluate", {**shared, "model": str(result), "run_name": evaluation}, folder, place
    )
    return [
        stage,
        Stage(evaluation, "evaluate", flags, str(result), folder / evaluation / "summary.json"),
    ]


def _filled(value: object, results: Mapping[str, str], place: str) -> object:
    """A flag's value with the results of earlier stages in place of `{name}`. Raises `UserError`
    for an unknown name."""
    if isinstance(value, list):
        return [_filled(item, results, place) for item in value]
    if not isinstance(value, str):
        return value
    if unknown := [name for name in re.findall(r"\{(\w[\w-]*)\}", value) if name not in results]:
        raise UserError(
            f"{place}: {{{unknown[0]}}} is no earlier stage (there are:"
            f" {', '.join(results) or 'none'})"
        )
    return re.sub(r"\{(\w[\w-]*)\}", lambda match: results[match[1]], value)


def _checked_flags(
    command: str, given: Mapping[str, object], folder: Path, place: str
) -> tuple[str, ...]:
    """The flags of a stage. Raises `UserError` where the stage's command would refuse them."""
    cls = COMMANDS.get(command, EvaluateArgs)
    if unknown := [key for key in given if key not in cls.__dataclass_fields__]:
        raise UserError(f"{place}: {command} has no argument {unknown[0]}")
    flags = flags_of({**given, "output_dir": str(folder)})
    try:
        parse(cls, flags)
    except (UserError, SystemExit) as error:
        raise UserError(
            f"{place}:"
            f" {error if isinstance(error, UserError) else 'a value is malformed (see above)'}"
        ) from None
    return tuple(flags)


def run(stages: list[Stage], folder: Path, console: Console) -> None:
    """Run the stages that are not done yet. Raises `RunStopped` where a stage fails; the same
    command goes on from there."""
    for number, stage in enumerate(stages, start=1):
        if stage.done.exists():
            console.print(f"{number} of {len(stages)}, {stage.name}: done already", markup=False)
            continue
        resumed = (
            ("--resume",)
            if stage.command == "train_rl" and (folder / stage.name / "args.json").exists()
            else ()
        )
        if stage.command == "evaluate":
            # the folder of a stopped evaluation, which cannot resume
            shutil.rmtree(folder / stage.name, ignore_errors=True)
        log = folder / "logs" / f"{stage.name}.log"
        with console.status(
            Text(f"{number} of {len(stages)}, {stage.name}: {stage.command} (its output: {log})")
        ):
            process = start_command(f"alignment.{stage.command}", (*stage.flags, *resumed), log)
            try:
                process.wait()
            finally:  # also where a signal ends the wait
                process.terminate()  # nothing, where it has ended
                process.wait()
        if process.returncode:
            end = f"stage {stage.name} ended with exit code {process.returncode}: {last_line(log)}"
            raise RunStopped(
                f"{end}; all of its output: {log}. The same command goes on from there"
            )
        console.print(f"{number} of {len(stages)}, {stage.name}: done", markup=False)


def main() -> None:
    args = parse(PipelineArgs)
    console = make_console()
    folder = Path(args.output_dir) / (args.run_name or Path(args.file).stem)
    stages = read_stages(Path(args.file), folder)
    if args.dry_run:
        for stage in stages:
            console.print(
                f"uv run -m alignment.{stage.command} {shlex.join(stage.flags)}",
                markup=False,
                soft_wrap=True,
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    with lock_run_folder(folder):
        file, facts = (
            folder / "pipeline.json",
            {"stages": [[s.name, s.command, *s.flags] for s in stages]},
        )
        if file.exists() and read_json(file) != facts:
            raise UserError(f"{folder} holds a pipeline of other stages; give another --run_name")
        write_json(file, facts)
        run(stages, folder, console)
    evaluations = [stage for stage in stages if stage.command == "evaluate"]
    records = [
        {"stage": s.name.removeprefix("evaluation_of_"), "model": s.result, **read_json(s.done)}
        for s in evaluations
    ]
    rows = [[cell.format_map(record) for cell in COLUMNS.values()] for record in records]
    console.print(
        make_table(
            f"{folder.name}: accuracy after each stage",
            tuple(COLUMNS),
            rows,
            numbers=tuple(COLUMNS)[1:],
        )
    )
    write_json(folder / "summary.json", records)


if __name__ == "__main__":
    run_command(main)
