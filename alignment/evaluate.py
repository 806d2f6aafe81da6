"""Evaluate a model on verifiable problems.

uv run -m alignment.evaluate --model checkpoints/tiny_sft --num_samples 4
uv run -m alignment.evaluate --compare checkpoints/tiny_sft checkpoints/tiny_grpo_clip_seed0/final"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from alignment.args import EvaluateArgs, parse
from alignment.checks import check, check_model_path, check_test_split, resolve_model, roles_of
from alignment.runs.run_folder import RunFolder, claim_run_folder, refuse_taken_name
from alignment.system.errors import run_command
from alignment.system.files import write_json
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
    models = args.compare or (args.model,)
    task = check(args)
    roles_of(args)
    refuse_taken_name(args.output_dir, args.run_name)
    for model in models:
        check_model_path(model, "--model")
    check_test_split(task, args.dataset_path, args.max_problems)
    console = make_console()
    if args.reward not in (args.evaluation_rule, EvaluateArgs.reward):
        console.print(f"--reward {args.reward} is a training reward: this grades by {args.evaluation_rule}", markup=False)
    if args.num_samples > 1 and args.sampling_temperature == 0:
        console.print("warning: --sampling_temperature 0 makes all samples alike: pass@k is pass@1", style="yellow")
    for model in models:
        resolve_model(model, args.output_dir)  # says what is wrong with the second before an hour is spent on the first
    if args.preview:
        from alignment.preview import preview_problems

        return preview_problems(args, models[0])
    evaluations = [evaluate_model(args, model, console) for model in models]
    default = "_".join(["compare" if args.compare else "evaluate", *map(label, models), args.task.replace(":", ".")])[:150]
    path = claim_run_folder(args.output_dir, args.run_name, default, dataclasses.asdict(args), {"all": args.seed})
    report(RunFolder(path, 0, args.trackers), models, evaluations, console)
    console.print(f"every completion: {path}/completions/", markup=False, soft_wrap=True)


def evaluate_model(args: EvaluateArgs, model: str, console: Console) -> Evaluation:
    """Load a model, sample its answers to the problems, and grade them."""
    from alignment.models import evaluation, make_sampler
    from alignment.policy.loading import load_tokenizer
    from alignment.sampling.sampler import engine_name

    model_path = resolve_model(model, args.output_dir)
    tokenizer = load_tokenizer(model_path)
    problems, evaluate = evaluation(args, tokenizer, args.num_samples)
    sampler = make_sampler(args, model_path, (roles_of(args).eval,), tokenizer)
    status = f"sampling {len(problems)} problems x {args.num_samples} with {engine_name(args.sampler)}"
    with closing(sampler), count_parts(status, len(problems) * args.num_samples, console, "response") as ended:
        return evaluate(sampler, ended)


def label(model: str) -> str:
    """What to call a model: its folder, with the run's where that is "final" or a checkpoint."""
    path = Path(model)
    return f"{path.parent.name}_{path.name}" if path.parent.name else path.name


def report(run: RunFolder, models: Sequence[str], evaluations: Sequence[Evaluation], console: Console) -> None:
    """Write the evaluations to their folder, and print them; of two also their difference."""
    from alignment.evaluation import accuracy

    for number, (model, evaluation) in enumerate(zip(models, evaluations, strict=True)):
        run.log_eval({"step": number, "model": model, **evaluation.record}, evaluation.groups)
        console.print(model, style="bold", markup=False)
        accuracy.print_evaluation(evaluation, console)
    if len(models) == 1:
        write_json(run.path / "summary.json", evaluations[0].record)
    else:
        comparison = accuracy.paired_difference(*(evaluation.groups for evaluation in evaluations))
        names, difference = list(map(label, models)), {"difference": comparison.difference, "interval": comparison.interval}
        write_json(run.path / "summary.json", {"compare": models, **difference})
        accuracy.print_comparison(comparison, names, console)
        page = accuracy.write_comparison(comparison, names, run.path)
        console.print(f"all of them, side by side: {page}", markup=False, soft_wrap=True)
    run.close()


if __name__ == "__main__":
    run_command(main)
