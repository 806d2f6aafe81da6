"""Stages in a row from one TOML file: data kept from a model's own answers, SFT, RL, and the
accuracy after each.

uv run -m alignment.pipeline --file r1_tiny

A stage is a command with its flags; `{name}` in a flag is the result of the stage of that name (a
model, or a file), or else the file NAME.jsonl beside the pipeline's own:

    preset = "tiny"

    [stages.kept]
    command = "rejection_sample"
    model = "{rl}"

    [stages.student]
    command = "sft"
    demonstrations = ["{kept}"]"""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from alignment.args import (
    RULES,
    Args,
    EvaluateArgs,
    PipelineArgs,
    RejectionArgs,
    RLArgs,
    SFTArgs,
    flags_of,
    parse,
)
from alignment.config.flag import defaults_of_flags
from alignment.system.errors import RunStopped, UserError, run_command
from alignment.system.files import read_json, read_toml, write_json
from alignment.system.locks import lock_run_folder
from alignment.system.manifests import sha256
from alignment.system.nearest import did_you_mean, did_you_mean_path
from alignment.system.processes import last_line, start_command
from alignment.system.terminal import make_console, make_table

# A training command's flag -> the flag of `evaluate` that means the same.
SAME_OF_EVALUATE = {"eval_samples": "num_samples", "eval_max_new_tokens": "max_new_tokens"}
COMMANDS = {"rejection_sample": RejectionArgs, "sft": SFTArgs, "train_rl": RLArgs}
SET_BY_PIPELINE = {
    "rejection_sample": {"output"},
    "sft": {"sft_base"},
    "train_rl": {"run_name", "resume"},
}
# heading -> the cell, from an evaluation's record
COLUMNS = {
    "stage": "{stage}",
    "accuracy": "{avg_all_rewards:.3f}",
    "95 %": "{avg_all_rewards_ci[0]:.3f} .. {avg_all_rewards_ci[1]:.3f}",
    "format": "{avg_format_rewards:.3f}",
    "tokens": "{response_length:.1f}",
}


class Output(NamedTuple):
    """What a stage writes: its `result`, and `done`, a path that exists once it has ended well;
    and the arguments that make it write there."""

    result: Path
    done: Path
    arguments: Mapping[str, object]


PIPELINES = {
    file.stem: file for file in sorted((Path(__file__).parent / "pipelines").glob("*.toml"))
}
"""Name -> file of the pipelines that come with the package."""


class Stage(NamedTuple):
    """A command with its flags, its `result` (a model or a file), and `done`, a path that exists
    once it has ended well."""

    name: str
    command: str
    flags: tuple[str, ...]
    result: str
    done: Path


def pipeline_file(name: str) -> Path:
    """The file that --file names: a path, or one of `PIPELINES`."""
    if name in PIPELINES and not Path(name).exists():
        return PIPELINES[name]
    if not Path(name).exists():
        raise UserError(
            f"--file {name}: there is no such file, and no such pipeline; the package has"
            f" {', '.join(PIPELINES)}{did_you_mean(name, PIPELINES) or did_you_mean_path(name)}"
        )
    return Path(name)


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
    results = {path.stem: str(path) for path in file.parent.glob("*.jsonl")}
    for name, table in tables.items():
        place = f"--file {file}: stage {name}"
        command = _checked_command(name, table, place)
        arguments: dict[str, object] = {}
        for key, value in {**shared, **table}.items():
            if key != "command":
                arguments[key] = _fill_in_results(value, results, place)
        stage, *evaluations = _make_stages(name, command, arguments, folder, place)
        stages += [stage, *evaluations]
        results[name] = stage.result
    return stages


def _checked_command(name: str, table: object, place: str) -> str:
    """The command of a stage. Raises `UserError` for a bad name, another command, or an argument
    that the pipeline sets."""
    is_reserved = name == "logs" or name.startswith("evaluation_of_")
    is_plain = re.fullmatch(r"\w[\w-]*", name) and not is_reserved
    if not is_plain or not isinstance(table, dict):
        raise UserError(
            f"{place}: must be a table with a plain name, neither logs nor evaluation_of_..."
        )
    command = table.get("command")
    if command not in COMMANDS:
        raise UserError(f"{place}: command {command!r}: must be one of {', '.join(COMMANDS)}")
    taken = table.keys() & (SET_BY_PIPELINE[command] | {"output_dir"})
    if taken:
        raise UserError(f"{place}: {', '.join(sorted(taken))}: the pipeline sets it itself")
    return command


def _make_stages(
    name: str, command: str, arguments: Mapping[str, object], folder: Path, place: str
) -> list[Stage]:
    """The stage and, where it makes a model, the evaluation of that model."""
    output = _output_of(name, command, folder)
    flags, checked = _checked(command, {**arguments, **output.arguments}, folder, place)
    if isinstance(checked, RLArgs):
        _refuse_model_without_warm_start(arguments, checked, place)
    stage = Stage(name, command, flags, str(output.result), output.done)
    if command == "rejection_sample":
        return [stage]
    evaluation_name = f"evaluation_of_{name}"
    evaluation_arguments = _arguments_of_evaluation(checked, arguments, place)
    evaluation_arguments["model"] = stage.result
    evaluation_arguments["run_name"] = evaluation_name
    evaluation_flags, _ = _checked("evaluate", evaluation_arguments, folder, place)
    evaluation = Stage(
        evaluation_name,
        "evaluate",
        evaluation_flags,
        stage.result,
        folder / evaluation_name / "summary.json",
    )
    return [stage, evaluation]


def _arguments_of_evaluation(
    checked: Args, arguments: Mapping[str, object], place: str
) -> dict[str, object]:
    """What the evaluation of a stage's model has of the stage's `arguments`, and of their preset,
    which `checked` has too. Raises `UserError` where it would ask other questions than the stage's
    own evaluations."""
    if arguments.get("validation_share"):
        raise UserError(
            f"{place}: validation_share: the pipeline evaluates each model on the whole test split;"
            " leave it and eval_split out, or run train_rl with them by itself"
        )
    own = {
        key: value for key, value in arguments.items() if key in EvaluateArgs.__dataclass_fields__
    }
    own.pop("sft_base", None)
    if own.get("reward") not in RULES:
        # an evaluation scores by a rule: here the task's own
        own.pop("reward", None)
    defaults = defaults_of_flags(type(checked))
    for key, name in SAME_OF_EVALUATE.items():
        if key not in defaults:
            continue
        value = getattr(checked, key)
        is_given = key in arguments or value != defaults[key]
        if is_given and value:  # 0 of --eval_max_new_tokens is that of training
            own[name] = value
    return own


def _refuse_model_without_warm_start(
    arguments: Mapping[str, object], checked: RLArgs, place: str
) -> None:
    """Raise `UserError` where a stage of RL names a model and no --sft_base, and its preset has a
    warm start, from which it would begin instead."""
    if "model" in arguments and "sft_base" not in arguments and checked.sft_base:
        raise UserError(
            f"{place}: model = {arguments['model']!r}: RL begins from sft_base, here the preset's"
            f' {checked.sft_base}; give the model as sft_base, such as sft_base = "{{cold}}" for'
            ' the result of the stage cold, or also sft_base = "" to begin from model itself'
        )


def _output_of(name: str, command: str, folder: Path) -> Output:
    """Where the stage of that name writes."""
    if command == "rejection_sample":
        file = folder / f"{name}.jsonl"
        return Output(file, file, {"output": str(file)})
    model = folder / name
    if command == "sft":
        return Output(model, model, {"sft_base": str(model)})
    return Output(model / "final", model / "summary.json", {"run_name": name})


def _fill_in_results(value: object, results: Mapping[str, str], place: str) -> object:
    """A flag's value with the results of earlier stages in place of `{name}`. Raises `UserError`
    for an unknown name."""
    if isinstance(value, list):
        return [_fill_in_results(item, results, place) for item in value]
    if not isinstance(value, str):
        return value

    def result(match: re.Match[str]) -> str:
        name = match[1]
        if name not in results:
            earlier = ", ".join(results) or "none"
            raise UserError(f"{place}: {{{name}}} is no earlier stage (there are: {earlier})")
        return results[name]

    return re.sub(r"\{(\w[\w-]*)\}", result, value)


def _checked(
    command: str, arguments: Mapping[str, object], folder: Path, place: str
) -> tuple[tuple[str, ...], Args]:
    """The flags of a stage, and its arguments with those of their preset. Raises `UserError` where
    the stage's command would refuse them."""
    cls = COMMANDS.get(command, EvaluateArgs)
    unknown = [key for key in arguments if key not in cls.__dataclass_fields__]
    if unknown:
        raise UserError(f"{place}: {command} has no argument {unknown[0]}")
    flags = flags_of({**arguments, "output_dir": str(folder)})
    try:
        checked = parse(cls, flags)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except SystemExit:
        raise UserError(f"{place}: a value is malformed (see above)") from None
    return tuple(flags), checked


def run(stages: list[Stage], folder: Path, console: Console) -> None:
    """Run the stages that are not done yet. Raises `RunStopped` where a stage fails; the same
    command goes on from there."""
    for number, stage in enumerate(stages, start=1):
        if stage.done.exists():
            console.print(f"{number} of {len(stages)}, {stage.name}: done already", markup=False)
            continue
        flags = stage.flags
        if stage.command == "train_rl" and (folder / stage.name / "args.json").exists():
            flags = (*flags, "--resume")
        if stage.command == "evaluate":
            # the folder of a stopped evaluation, which cannot resume
            shutil.rmtree(folder / stage.name, ignore_errors=True)
        log = folder / "logs" / f"{stage.name}.log"
        status = f"{number} of {len(stages)}, {stage.name}: {stage.command} (its output: {log})"
        with console.status(Text(status)):
            process = start_command(f"alignment.{stage.command}", flags, log)
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
    file = pipeline_file(args.file)
    folder = Path(args.output_dir) / (args.run_name or file.stem)
    stages = read_stages(file, folder)
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
        file = folder / "pipeline.json"
        description = describe(stages, folder)
        if file.exists():
            refuse_other_pipeline(read_json(file), description, folder)
        write_json(file, description)
        run(stages, folder, console)
    summarise([stage for stage in stages if stage.command == "evaluate"], folder, console)


def describe(stages: Sequence[Stage], folder: Path) -> dict[str, Any]:
    """What pipeline.json has: the `stages` with their flags, and the SHA-256 of the `files` that
    these name, but for those that stages write."""
    digests: dict[str, str] = {}
    for stage in stages:
        for flag in stage.flags:
            name = flag.removeprefix("file:")
            # Unlike Path.is_file, it takes any text.
            if os.path.isfile(name) and folder.resolve() not in Path(name).resolve().parents:
                digests[name] = sha256(Path(name))
    listed = [[stage.name, stage.command, *stage.flags] for stage in stages]
    return {"stages": listed, "files": digests}


def refuse_other_pipeline(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise `UserError` where a folder's pipeline had other stages, or files of other contents: a
    stage that is done would stand for what it never saw."""
    if before.get("stages") != now["stages"]:
        raise UserError(f"{folder} holds a pipeline of other stages; give another --run_name")
    # Older folders have no digests.
    recorded = before.get("files", now["files"])
    for file, digest in now["files"].items():
        if recorded.get(file) != digest:
            raise UserError(
                f"{file} has changed since the pipeline in {folder} began; give another --run_name"
            )


def summarise(evaluations: Sequence[Stage], folder: Path, console: Console) -> None:
    """Print a table of the evaluations, and write their records to summary.json."""
    records = []
    rows = []
    for stage in evaluations:
        name = stage.name.removeprefix("evaluation_of_")
        record = {"stage": name, "model": stage.result, **read_json(stage.done)}
        records.append(record)
        rows.append([cell.format_map(record) for cell in COLUMNS.values()])
    headings = tuple(COLUMNS)
    title = f"{folder.name}: accuracy after each stage"
    console.print(make_table(title, headings, rows, numbers=headings[1:]))
    write_json(folder / "summary.json", records)


if __name__ == "__main__":
    run_command(main)
