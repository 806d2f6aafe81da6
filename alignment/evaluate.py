"""Evaluate a model on verifiable problems.

uv run -m alignment.evaluate --model checkpoints/tiny_sft --num_samples 4
uv run -m alignment.evaluate --compare checkpoints/tiny_sft checkpoints/tiny_grpo_clip_seed0/final
uv run --extra datasets -m alignment.evaluate --model checkpoints/RUN --eval_tasks math500 aime24 --num_samples 16
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from alignment.args import EvaluateArgs, parse
from alignment.checks import check, check_model_path, check_test_split, resolve_model, roles_of
from alignment.evaluation import benchmarks
from alignment.runs.run_folder import RunFolder, claim_run_folder, models_of, refuse_taken_name, versions
from alignment.system.errors import run_command
from alignment.system.files import write_json
from alignment.system.registry import find
from alignment.system.terminal import count_parts, make_console

if TYPE_CHECKING:
    from alignment.evaluation.accuracy import Evaluation


def __getattr__(name: str):
    """`evaluate_vllm`, which lives in `alignment.evaluation.accuracy` and loads torch."""
    if name != "evaluate_vllm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from alignment.evaluation.accuracy import evaluate_vllm

    return evaluate_vllm


def main() -> None:
    args = parse(EvaluateArgs)
    models = args.compare or tuple(models_of(Path(args.model).expanduser())) or (args.model,)
    tasks = by_task(args)
    checked = [check(of_task) for of_task in tasks.values()]
    roles_of(args)
    refuse_taken_name(args.output_dir, args.run_name)
    for model in models:
        check_model_path(model, "--model")
    for task in checked:
        check_test_split(task, args.dataset_path, args.max_problems)
    console = make_console()
    for rule in {of_task.evaluation_rule for of_task in tasks.values()} - {args.reward}:
        if args.reward != EvaluateArgs.reward:
            console.print(f"--reward {args.reward} is a training reward: this grades by {rule}", markup=False)
    if args.num_samples > 1 and args.sampling_temperature == 0:
        console.print("warning: --sampling_temperature 0 makes all samples alike: pass@k is pass@1", style="yellow")
    for model in models:
        resolve_model(model, args.output_dir)  # says what is wrong with the second before an hour is spent on the first
    if args.preview:
        from alignment.preview import preview_problems

        for of_task in tasks.values():
            preview_problems(of_task, models[0])
        return
    run, done = None, []
    for model, name, evaluation in evaluate_models(args, models, tasks, console):
        run = run or open_run_folder(args)
        run.log_eval({"step": len(done), "model": model, "task": name, **evaluation.record}, evaluation.groups)
        done.append((model, name, evaluation))
    report(run, args, tasks, done, console)
    console.print(f"every completion: {run.path}/completions/", markup=False, soft_wrap=True)


def by_task(args: EvaluateArgs) -> dict[str, EvaluateArgs]:
    """The arguments of the evaluation on each of --eval_tasks or, without any, on --task. Raises `UserError` for a task that
    does not exist."""
    paths = {name: f"{benchmarks.__name__}:{name}" if name in benchmarks.BENCHMARKS else name for name in args.eval_tasks}
    for name in paths:
        find("--eval_tasks", name, benchmarks.BENCHMARKS)
    return {name: dataclasses.replace(args, task=path, eval_tasks=()) for name, path in paths.items()} or {args.task: args}


def evaluate_models(
    args: EvaluateArgs, models: Sequence[str], tasks: Mapping[str, EvaluateArgs], console: Console
) -> Iterator[tuple[str, str, Evaluation]]:
    """Load each model, sample its answers to the problems of each task, and grade them: (model, task, evaluation)."""
    from alignment.models import evaluation, make_sampler
    from alignment.policy.loading import context_length, load_config, load_tokenizer
    from alignment.sampling.sampler import encode_prompts, engine_name

    for model in models:
        model_path = resolve_model(model, args.output_dir)
        tokenizer = load_tokenizer(model_path)
        parts = {name: evaluation(of_task, tokenizer, args.num_samples) for name, of_task in tasks.items()}
        prompts = [problem.prompt for problems, _ in parts.values() for problem in problems]
        encode_prompts(tokenizer, prompts, context_length(load_config(model_path)), args.max_new_tokens)  # refuses long ones
        with closing(make_sampler(args, model_path, (roles_of(args).eval,), tokenizer)) as sampler:
            for name, (problems, evaluate) in parts.items():
                status = f"sampling {len(problems)} problems x {args.num_samples} with {engine_name(args.sampler)}"
                with count_parts(status, len(problems) * args.num_samples, console, "response") as ended:
                    yield model, name, evaluate(sampler, ended)


def open_run_folder(args: EvaluateArgs) -> RunFolder:
    """A new folder, once there is something to write; evaluations of several tasks make no curve for trackers."""
    names = ["compare" if args.compare else "evaluate", *map(label, args.compare or (args.model,))]
    default = "_".join([*names, *(args.eval_tasks or (args.task,))]).replace(":", ".")[:150]
    path = claim_run_folder(args.output_dir, args.run_name, default, dataclasses.asdict(args), {"all": args.seed})
    return RunFolder(path, 0, () if args.eval_tasks else args.trackers)


def label(model: str) -> str:
    """What to call a model: its folder, with the run's where that is "final" or a checkpoint."""
    path = Path(model)
    return f"{path.parent.name}_{path.name}" if path.parent.name else path.name


def report(
    run: RunFolder,
    args: EvaluateArgs,
    tasks: Mapping[str, EvaluateArgs],
    done: Sequence[tuple[str, str, Evaluation]],
    console: Console,
) -> None:
    """Print the evaluations, and write summary.json: of two models their difference; of benchmarks, and of a run's checkpoints,
    one table of all, and files in the shapes of other programs."""
    from alignment.evaluation import accuracy

    path, names = run.path, [label(model) for model, *_ in done]
    if args.eval_tasks or not args.compare and len(done) > 1:
        entries = benchmarks.ENTRIES if args.eval_tasks else {}
        accuracy.print_figures(done, {name: entry["problems"] for name, entry in entries.items()}, console)
        rules = {name: of_task.evaluation_rule for name, of_task in tasks.items()}
        accuracy.write_results(path, done, {"args": vars(args), "rules": rules, "versions": versions(), "entries": entries})
    else:
        for model, _, evaluation in done:
            console.print(model, style="bold", markup=False)
            accuracy.print_evaluation(evaluation, console)
        write_json(path / "summary.json", done[0][2].record)
    if args.compare:
        comparison = accuracy.paired_difference(*(evaluation.groups for *_, evaluation in done))
        difference = {"difference": comparison.difference, "interval": comparison.interval}
        write_json(path / "summary.json", {"compare": args.compare, **difference})
        accuracy.print_comparison(comparison, names, console)
        page = accuracy.write_comparison(comparison, names, path)
        console.print(f"all of them, side by side: {page}", markup=False, soft_wrap=True)
    run.close()


if __name__ == "__main__":
    run_command(main)
