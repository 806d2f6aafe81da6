"""Evaluate a model on verifiable problems.

    uv run -m alignment.evaluate --model checkpoints/tiny_sft --num_samples 4
    uv run -m alignment.evaluate \\
        --compare checkpoints/tiny_sft checkpoints/tiny_grpo_clip_seed0/final
    uv run --extra datasets -m alignment.evaluate \\
        --model checkpoints/RUN --eval_tasks math500 aime24 --num_samples 16
"""

import dataclasses
import importlib
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from alignment.args import EvaluateArgs, parse
from alignment.builders.base_models import (
    check_model_path,
    check_tokenizer_files,
    has_chat_template,
    resolve_model,
)
from alignment.builders.checks import check, check_length, check_rules
from alignment.builders.data_checks import check_test_split
from alignment.builders.devices import roles_of
from alignment.builders.held_out import GREEDY, task_arguments, with_greedy
from alignment.data.pass_rates import pass_rate_rows
from alignment.data.prompts import CHAT
from alignment.data.tasks import find_task
from alignment.data.tasks.own_data import read_examples
from alignment.evaluation import benchmarks
from alignment.evaluation.audit import AUDITED_FORMATS, write_audit
from alignment.evaluation.partial_prompts import write_partial_prompts
from alignment.runs.held_out import evaluation_words
from alignment.runs.results import EvaluationResult
from alignment.runs.run_folder import RunFolder, claim_run_folder, refuse_taken_name
from alignment.system.errors import RunStopped, UserError, run_command
from alignment.system.files import write_json, write_jsonl
from alignment.system.signals import Interrupted, deferrable_signals
from alignment.system.terminal import count_parts, make_console, printable
from alignment.system.versions import versions


def __getattr__(name: str):
    """`evaluate_vllm`, which lives in `alignment.evaluation.accuracy` and loads torch."""
    if name != "evaluate_vllm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from alignment.evaluation.accuracy import evaluate_vllm

    return evaluate_vllm


class EvaluateModule(ModuleType):
    """The type of this module, which `from alignment import evaluate` names: it can be called."""

    def __call__(self, args: EvaluateArgs) -> EvaluationResult:
        """Evaluate models as this command does (`alignment.api.evaluate`)."""
        # by name, since that module imports this one
        return importlib.import_module("alignment.api").evaluate(args)


sys.modules[__name__].__class__ = EvaluateModule


@dataclass(frozen=True)
class CheckedEvaluation:
    """What there is to evaluate: each model on the tasks, by name."""

    models: Sequence[str]
    tasks: Mapping[str, EvaluateArgs]


def main() -> None:
    args = parse(EvaluateArgs)
    console = make_console(args.quiet)
    checked = check_evaluation(args, console)
    if args.preview:
        from alignment.preview import preview_problems

        for task_args in checked.tasks.values():
            preview_problems(task_args, checked.models[0])
        return
    evaluate_and_report(args, checked, console)


def check_evaluation(args: EvaluateArgs, console: Console) -> CheckedEvaluation:
    """What the arguments ask for. Raises `UserError` where it cannot be evaluated; prints what a
    user may not expect of it."""
    models = models_of(args)
    tasks = arguments_by_task(args)
    if args.audit_base:
        tasks = audited_arguments(tasks, models)
    roles_of(args)  # Devices that cannot be are refused before a model loads.
    refuse_taken_name(args.output_dir, args.run_name)
    for model in models:
        check_model_path(model, "--model")
    for task_args in tasks.values():
        task = check(task_args)
        for model in models:
            check_tokenizer_files(task, model)
            check_length(task_args, model)
        problems = check_test_split(task, args.dataset_path, args.max_problems)
        check_rules(task_args, task, problems)
    if args.reward != EvaluateArgs.reward and not (args.audit_base or args.eval_rule):
        rules = {task_args.evaluation_rule for task_args in tasks.values()}
        for rule in rules - {args.reward}:
            console.print(
                f"--reward {args.reward} is a training reward: this grades by {rule}", markup=False
            )
    if args.num_samples > 1 and args.evaluation_temperature == 0:
        console.print(
            "warning: temperature 0 makes all samples alike: pass@k is pass@1",
            style="yellow",
        )
    for model in models:
        # says what is wrong with the second before an hour is spent on the first
        resolve_model(model, args.output_dir)
    return CheckedEvaluation(models, tasks)


def models_of(args: EvaluateArgs) -> Sequence[str]:
    """The models to evaluate: those of --compare, else the checkpoints and the final model of a
    run's folder, else --model itself."""
    if args.compare:
        return args.compare
    run_folder = Path(args.model).expanduser()
    folders = [*sorted(run_folder.glob("step_*")), run_folder / "final"]
    models = [str(folder) for folder in folders if (folder / "config.json").is_file()]
    return models or (args.model,)


def arguments_by_task(args: EvaluateArgs) -> dict[str, EvaluateArgs]:
    """The arguments for each of --eval_tasks, else for --task, and with --eval_greedy those of a
    greedy evaluation after each. Raises `UserError` for an unknown task."""
    tasks = task_arguments(args, args.eval_tasks) or {args.task: args}
    return with_greedy(tasks, ", ")


def audited_arguments(
    tasks: Mapping[str, EvaluateArgs], models: Sequence[str]
) -> dict[str, EvaluateArgs]:
    """The arguments for each task in each format of the audit. Raises `UserError` for a task whose
    answers do not go into a box.

    Where the model has no chat template, or the task no worked solutions, the format that needs
    them is left out, which is said."""
    audited = {}
    for name, args in tasks.items():
        task = find_task(args.task, args.data)
        if "r1_zero" not in task.rules:
            raise UserError(
                f"--audit_base: --task {name} is graded by {' or '.join(task.rules)}, so that its"
                " answers have one format only"
            )
        demonstrations = task.demonstrations("train", args.dataset_path, args.seed)
        for audited_format in AUDITED_FORMATS:
            if audited_format.prompt == CHAT and False in map(has_chat_template, models):
                print(f"{name}: not in a chat, since the model has no chat template")
                continue
            if audited_format.examples > len(demonstrations):
                print(f"{name}: not few-shot, since the task has no worked solutions")
                continue
            audited[f"{name}, {audited_format.name}"] = dataclasses.replace(
                args,
                prompt=audited_format.prompt,
                reward=audited_format.reward,
                examples=audited_format.examples,
                audit_base=False,
            )
    return audited


def default_name(args: EvaluateArgs, tasks: Mapping[str, EvaluateArgs]) -> str:
    """What the folder is called where --run_name is empty: what is done, with which models, on
    which tasks."""
    if args.audit_base:
        return "_".join(["audit", label(args.model), *(args.eval_tasks or [args.task])])
    names = ["evaluate", label(args.model)]
    if args.compare:
        names = ["compare", *map(label, args.compare)]
    elif args.partial_prompts:
        names[0] = "partial_prompts"
    return "_".join([*names, *tasks])


def evaluate_and_report(args: EvaluateArgs, checked: CheckedEvaluation, console: Console) -> Path:
    """Evaluate each model, print the results and write the run's folder, which is returned. Where a
    signal, a lost sampler or a full disk ends it, what was evaluated is printed all the same, and
    written as far as it can be, but for the summary of a finished one."""
    models = checked.models
    tasks = checked.tasks
    default = default_name(args, tasks)
    run = None
    rows = []
    groups = []
    stop = None
    try:
        with closing(evaluate_models(args, models, tasks, console)) as evaluations:
            for model, task, evaluation in evaluations:
                rows.append({"step": len(rows), "model": model, "task": task, **evaluation.record})
                if args.audit_base:
                    rows[-1] |= format_facts(task, tasks[task])
                groups.append(evaluation.groups)
                # not before there is something to write
                if run is None:
                    path = claim_run_folder(
                        args.output_dir,
                        args.run_name,
                        default,
                        args.recorded_values,
                        {"all": args.seed},
                        args.automatic,
                    )
                    # evaluations of several tasks make no curve for trackers
                    has_curve = not (args.eval_tasks or args.audit_base or args.eval_greedy)
                    trackers = args.trackers if has_curve else ()
                    run = RunFolder(path, 0, trackers)
                run.log_eval(rows[-1], groups[-1])
    except (Interrupted, RunStopped, OSError) as error:
        stop = error
    if rows and not args.audit_base and not args.partial_prompts:
        print_evaluations(args, rows, console)
    wanted = len(models) * len(tasks)
    is_whole = len(rows) == wanted and not any("left_out" in row for row in rows)
    is_complete = is_whole and not isinstance(stop, OSError)
    is_report = not args.audit_base and not args.partial_prompts
    if is_complete and is_report:
        write_report(args, tasks, path, rows, groups, console)
    if run is not None and args.partial_prompts:
        for line in write_partial_prompts(run.path, rows, args.partial_prompts):
            console.print(line, markup=False, soft_wrap=True)
    if run is not None and args.audit_base:
        table = write_audit(run.path, rows, is_complete)
        console.print(printable(table), markup=False, highlight=False, soft_wrap=True)
        print_left_out(rows, wanted, console)
    if run is not None:
        run.close()
        console.print(f"every completion: {path}/completions/", markup=False, soft_wrap=True)
    if stop is not None:
        raise stop
    return path


def evaluate_models(
    args: EvaluateArgs,
    models: Sequence[str],
    tasks: Mapping[str, EvaluateArgs],
    console: Console,
) -> Generator[tuple[str, str, Any]]:
    """Load each model, sample its answers to the problems of each task, and grade them. Yields
    (model, task, `Evaluation`)."""
    from alignment.builders.evaluations import prepare_evaluation
    from alignment.builders.run_plan import plan_evaluation
    from alignment.builders.samplers import make_sampler, stoppable
    from alignment.builders.warm_start import encode_problems
    from alignment.model.loading import load_tokenizer
    from alignment.sampling.sampler import engine_name

    other_rules = ("flexible",) if args.audit_base else ()
    for model in models:
        console.print(f"loading {model}", markup=False, soft_wrap=True)
        model_path = resolve_model(model, args.output_dir)
        tokenizer = load_tokenizer(model_path)
        evaluations = {}
        for name, task_args in tasks.items():
            samples = task_args.num_samples
            evaluations[name] = prepare_evaluation(task_args, tokenizer, samples, other_rules)
        for evaluation in evaluations.values():
            # refuses long ones
            longest = evaluation.sampling.max_new_tokens
            encode_problems(evaluation.problems, model_path, tokenizer, longest)
        engine = plan_evaluation(args, model_path)
        with closing(make_sampler(engine, tokenizer, console=console)) as sampler:
            for name, evaluation in evaluations.items():
                number = len(evaluation.problems)
                status = (
                    f"sampling {number} problems x {evaluation.sampling.n} with"
                    f" {engine_name(args.sampler)}"
                )
                # A signal waits from the last response on, until the caller has kept the answers.
                with deferrable_signals():
                    with count_parts(status, evaluation.responses, console, "response") as ended:
                        result = evaluation.evaluate(
                            stoppable(sampler, engine.config.device), ended
                        )
                    yield model, name, result


def format_facts(name: str, args: EvaluateArgs) -> dict[str, str]:
    """The columns of the audit's table that say which of its evaluations a row is."""
    task, _, format_name = name.rpartition(", ")
    return {
        "task": task,
        "format": format_name,
        "prompt": args.prompt,
        "rule": args.evaluation_rule,
    }


def label(model: str) -> str:
    """What to call a model: its folder, with the run's where that is "final" or a checkpoint."""
    path = Path(model)
    return f"{path.parent.name}_{path.name}" if path.parent.name else path.name


def print_evaluations(args: EvaluateArgs, rows: list, console: Console) -> None:
    """Print one table, and how many problems its rows are of, where that is not all."""
    from alignment.evaluation import accuracy

    accuracy.print_table(rows, entries_of(args), console)
    console.print(f"evaluations are {evaluation_words(vars(args))}", markup=False, soft_wrap=True)
    print_left_out(rows, len(rows), console)


def print_left_out(rows: Sequence[Mapping[str, Any]], wanted: int, console: Console) -> None:
    """Print which evaluations are of the first problems alone, and how many of those that were
    `wanted` were not begun."""
    lines = []
    for row in rows:
        left_out = row.get("left_out")
        if left_out:
            audited_format = f" in the format {row['format']}" if "format" in row else ""
            lines.append(
                f"{row['model']} was evaluated on the first {row['problems']} of"
                f" {row['problems'] + left_out} problems{audited_format}"
            )
    if len(rows) < wanted:
        lines.append(f"{len(rows)} of {wanted} evaluations were made")
    for line in lines:
        console.print(f"stopped: {line}", style="yellow", markup=False, soft_wrap=True)


def entries_of(args: EvaluateArgs) -> Mapping[str, Any]:
    """What is published of the benchmarks, where the tasks are named as such."""
    if not args.eval_tasks:
        return {}
    greedy = {f"{name}, {GREEDY}": entry for name, entry in benchmarks.ENTRIES.items()}
    return {**benchmarks.ENTRIES, **greedy}


def write_report(
    args: EvaluateArgs,
    tasks: Mapping[str, EvaluateArgs],
    path: Path,
    rows: list,
    groups: list,
    console: Console,
) -> None:
    """Write summary.json: the difference of two models, or all records, also in other programs'
    shapes."""
    from alignment.evaluation import accuracy

    if args.compare:
        comparison = accuracy.paired_difference(*groups)
        summary = {
            "compare": args.compare,
            "difference": comparison.difference,
            "interval": comparison.interval,
        }
        write_json(path / "summary.json", summary)
        names = [label(model) for model in args.compare]
        accuracy.write_comparison(comparison, names, path, console)
        return
    if args.num_samples > 1:
        lines: list[dict] = []
        for row, groups_of_row in zip(rows, groups, strict=True):
            if tasks[row["task"]].num_samples > 1:  # A greedy response measures no rate.
                lines += pass_rate_rows(groups_of_row, row["task"], row["model"])
        write_jsonl(path / "pass_rates.jsonl", lines)
    summary = {"evaluations": rows} if len(rows) > 1 else rows[0]
    write_json(path / "summary.json", summary)
    settings = {
        "args": args.recorded_values,
        "rules": {name: task_args.evaluation_rule for name, task_args in tasks.items()},
        "sampled": tasks,
        "examples": args.examples or len(read_examples(args.few_shot)),
        "versions": versions(),
        "entries": entries_of(args),
    }
    accuracy.write_results(path, rows, settings)


if __name__ == "__main__":
    run_command(main)
