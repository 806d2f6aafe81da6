"""Evaluate a model on verifiable problems.

uv run -m alignment.evaluate --model checkpoints/tiny_sft --num_samples 4
uv run -m alignment.evaluate --compare checkpoints/tiny_sft checkpoints/tiny_grpo_clip_seed0/final
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alignment.args import EvaluateArgs, parse
from alignment.core.records import SamplingConfig
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.evaluation.accuracy import CATEGORIES, Evaluation, eval_problems, evaluate_vllm
from alignment.evaluation.comparison import PairedDifference, paired_difference, write_comparison
from alignment.policy.loading import load_tokenizer, resolve_model, roles_of, sampler_kind
from alignment.rewards.reward import evaluation_reward
from alignment.runs.run_folder import RunFolder, claim_run_folder, refuse_taken_name
from alignment.sampling.sampler import make_sampler, refuse_missing_engine
from alignment.system.errors import run_command
from alignment.system.terminal import make_console, printable


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the averages with their intervals, the categories, and pass@k and maj@k where samples allow."""
    table = Table(title=f"{len(evaluation.groups)} problems in {evaluation.seconds:.1f} s")
    for heading in ("", "value", "95 % interval"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in evaluation.averages.items():
        low, high = evaluation.intervals[name]
        table.add_row(name, f"{value:.4f}", f"{low:.4f} .. {high:.4f}")
    samples = len(evaluation.groups[0].completions)
    if samples > 1:
        for k, value in evaluation.pass_at_k.items():
            table.add_row(f"pass@{k}", f"{value:.4f}", "")
        table.add_row(f"maj@{samples}", f"{evaluation.maj_at_k:.4f}", "")
    for name in CATEGORIES:
        table.add_row(name, str(evaluation.categories.get(name, 0)), "")
    table.add_row("mean response tokens", f"{evaluation.response_length:.1f}", "")
    console.print(table)


def evaluate_model(args: EvaluateArgs, model: str, console: Console) -> Evaluation:
    """Load a model, have it answer the problems, and grade the answers."""
    refuse_missing_engine(args)
    task = find_task(args.task)
    rule = evaluation_reward(args.reward, task.rules)
    questions = eval_problems(task, args.dataset_path, args.max_problems)
    roles = roles_of(args)
    model_path = resolve_model(model, args.output_dir)
    tokenizer = load_tokenizer(model_path)
    problems = prompted(questions, args.prompt or task.prompt, tokenizer)
    config = SamplingConfig(
        n=args.num_samples,
        temperature=args.sampling_temperature,
        top_p=args.sampling_top_p,
        top_k=args.sampling_top_k,
        max_new_tokens=args.max_new_tokens,
        stop=task.stop,
        seed=args.seed,
    )
    sampler = make_sampler(args, model_path, tokenizer, roles.eval, roles)
    try:
        with console.status(f"sampling {len(problems)} problems x {args.num_samples} with {sampler_kind(args)}"):
            return evaluate_vllm(sampler, rule, problems, config, task.rules)
    finally:
        sampler.close()


def label(model: str) -> str:
    """What to call a model: its folder, with the run's where that is "final" or a checkpoint."""
    path = Path(model)
    return f"{path.parent.name}_{path.name}" if path.parent.name else path.name


def main() -> None:
    args = parse(EvaluateArgs)
    console = make_console()
    refuse_taken_name(args)
    models = args.compare or (args.model,)
    for model in models:
        resolve_model(model, args.output_dir)  # before the first of two is asked for an hour
    evaluations = [evaluate_model(args, model, console) for model in models]
    names = list(map(label, models))
    run = RunFolder(claim_run_folder(args, "_".join(["compare" if args.compare else "evaluate", *names, args.task])[:150]))
    for number, (model, evaluation) in enumerate(zip(models, evaluations, strict=True)):
        run.log_completions("eval", number, evaluation.groups)
        run.log_eval({"step": number, "model": model, **evaluation.record()})
        console.print(model, style="bold", markup=False)
        print_evaluation(evaluation, console)
    if args.compare:
        found = paired_difference(*(e.groups for e in evaluations), *(e.intervals["avg_all_rewards"] for e in evaluations))
        run.log_summary({"compare": list(models), "difference": found.difference, "interval": list(found.interval)})
        print_comparison(found, names, console)
        console.print(f"all of them, side by side: {write_comparison(found, names, run.path)}", markup=False, soft_wrap=True)
    else:
        run.log_summary(evaluations[0].record())
    run.close()
    console.print(f"every completion: {run.path}/completions/", markup=False, soft_wrap=True)


def print_comparison(found: PairedDifference, names: Sequence[str], console: Console) -> None:
    """Print the difference with its interval, and the first problem that was won and the first that was lost."""
    low, high = found.interval
    console.print(
        f"{names[1]} - {names[0]}: {found.difference:+.4f} (95 %: {low:+.4f} .. {high:+.4f}); {len(found.won)} problems won,"
        f" {len(found.lost)} lost",
        style="bold",
        markup=False,
    )
    table = Table(show_lines=True)
    for heading in ("", *names):
        table.add_column(heading, overflow="fold")
    for kind, outcomes in (("won", found.won), ("lost", found.lost)):
        for outcome in outcomes[:1]:
            cells = (f"{kind}: {outcome.question}", outcome.a_text, outcome.b_text)
            table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)


if __name__ == "__main__":
    run_command(main)
