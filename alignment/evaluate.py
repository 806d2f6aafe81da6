"""Evaluate a model on verifiable problems.

uv run -m alignment.evaluate --model checkpoints/tiny_sft --num_samples 4
uv run -m alignment.evaluate --compare checkpoints/tiny_sft checkpoints/tiny_grpo_clip_seed0/final
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from alignment.args import Args, EvaluateArgs, parse
from alignment.comparison import PairedDifference, paired_difference, write_comparison
from alignment.drgrpo_grader import extract_answer
from alignment.errors import UserError, door
from alignment.models import load_tokenizer, resolve_model, roles_of, sampler_kind
from alignment.prompts import prompted
from alignment.records import Group, Problem, Sampling, Score
from alignment.rewards import evaluation_reward, grading_report, score_groups
from alignment.samplers import Sampler, make_sampler, refuse_missing_engine
from alignment.tasks import Task, find_task
from alignment.tracking import RunFolder, claim_run_folder, printable, refuse_taken_name

AVERAGES = {"avg_format_rewards": "format_reward", "avg_answer_rewards": "answer_reward", "avg_all_rewards": "reward"}
CATEGORIES = ("format and answer", "format only", "neither")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found. Averages are shares in [0, 1], each with its 95 % interval."""

    groups: tuple[Group, ...]
    averages: Mapping[str, float]
    intervals: Mapping[str, Interval]
    categories: Mapping[str, int]
    pass_at_k: Mapping[int, float]
    maj_at_k: float
    response_length: float
    finished: float
    seconds: float
    rules: tuple[str, ...]

    def record(self) -> dict[str, object]:
        """All of it as plain data, but for the completions."""
        return {
            **self.averages,
            **{f"{name}_ci": list(interval) for name, interval in self.intervals.items()},
            "categories": dict(self.categories),
            **{f"pass@{k}": value for k, value in self.pass_at_k.items()},
            f"maj@{len(self.groups[0].completions)}": self.maj_at_k,
            "response_length": self.response_length,
            "finished": self.finished,
            **grading_report(self.groups, self.rules),
            "problems": len(self.groups),
            "seconds": self.seconds,
        }


def evaluate_vllm(
    vllm_model: Sampler,
    reward_fn: Callable[[str, str], Score],
    problems: Sequence[Problem],
    eval_sampling_params: Sampling,
    rules: Sequence[str] = ("r1_zero", "r1_zero_strict"),
) -> Evaluation:
    """Sample every problem, score every completion, and summarise. Any `Sampler` will do, vLLM or not. The means under all
    `rules` are told beside it.

    Raises `UserError` where there is nothing to evaluate.
    """
    if not problems:
        raise UserError("nothing to evaluate: the task has no problem in its test split")
    start = time.perf_counter()
    completions = vllm_model.sample([problem.prompt for problem in problems], eval_sampling_params)
    groups = score_groups(problems, completions, reward_fn)
    return summarise(groups, time.perf_counter() - start, rules)


def summarise(groups: Sequence[Group], seconds: float, rules: Sequence[str] = ()) -> Evaluation:
    """Averages, intervals, categories, pass@k and maj@k of scored groups, all of one size."""
    k = len(groups[0].completions)
    scores_PG = {name: [[score[key] for score in group.scores] for group in groups] for name, key in AVERAGES.items()}
    correct = [sum(score["reward"] == 1 for score in group.scores) for group in groups]
    drawn = [completion for group in groups for completion in group.completions]
    return Evaluation(
        groups=tuple(groups),
        averages={name: sum(map(sum, rows)) / (k * len(rows)) for name, rows in scores_PG.items()},
        intervals={name: clustered_interval(rows) for name, rows in scores_PG.items()},
        categories=Counter(map(category, (score for group in groups for score in group.scores))),
        pass_at_k={j: sum(pass_at_k(k, c, j) for c in correct) / len(correct) for j in _powers_of_two(k)},
        maj_at_k=sum(map(majority_share, groups)) / len(groups),
        response_length=sum(len(c.token_ids) for c in drawn) / len(drawn),
        finished=sum(c.finish_reason == "stop" for c in drawn) / len(drawn),
        seconds=seconds,
        rules=tuple(rules),
    )


def category(score: Score) -> str:
    """Which of `CATEGORIES` a score falls in."""
    if not score["format_reward"]:
        return CATEGORIES[2]
    return CATEGORIES[0] if score["answer_reward"] else CATEGORIES[1]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a correct one: 1 - C(n - c, k) / C(n, k).

    Unbiased for the chance that k fresh samples do (Chen et al. 2021, arXiv:2107.03374, eq. 1).
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_share(group: Group) -> float:
    """1 where the most frequent answer is right, 0 where it is wrong; between equally frequent answers, the share right.

    Answers are compared as written; responses without one have no vote (Wang et al. 2023, arXiv:2203.11171).
    """
    votes = Counter(answer for completion in group.completions if (answer := extract_answer(completion.text)) is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    right = {extract_answer(c.text) for c, score in zip(group.completions, group.scores, strict=True) if score["reward"] == 1}
    leaders = [answer for answer, count in votes.items() if count == most]
    return sum(answer in right for answer in leaders) / len(leaders)


def clustered_interval(scores_PG: Sequence[Sequence[float]], z: float = 1.96) -> Interval:
    """95 % interval of the mean of scores in [0, 1], of which those of one problem belong together.

    Wilson's interval (Wilson 1927), which stays honest near 0 and 1, with the number of samples that would be as
    informative were they independent: p(1 - p) / variance of the mean, the variance being taken between problems (Kish
    1965, design effect). Where scores do not vary at all, each problem counts once.
    """
    scores = torch.tensor(scores_PG, dtype=torch.float64)
    problems, p = scores.shape[0], scores.mean().item()
    between = scores.mean(dim=1).var(correction=1).item() / problems if problems > 1 else 0.0
    n = min(p * (1 - p) / between, float(scores.numel())) if between > 0 else float(problems)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def eval_problems(task: Task, args: Args) -> list[Problem]:
    """The first --max_problems of the task's test split (0: all of it)."""
    problems = task.problems("test", args.dataset_path)
    return problems[: args.max_problems] if args.max_problems else problems


def eval_sampling(task: Task, args: Args, n: int = 1, max_new_tokens: int = 0) -> Sampling:
    """How evaluation samples are drawn. The same seed every time, so that two evaluations differ by their models alone."""
    return Sampling(
        n=n,
        temperature=args.sampling_temperature,
        top_p=args.sampling_top_p,
        top_k=args.sampling_top_k,
        max_new_tokens=max_new_tokens or args.max_new_tokens,
        stop=task.stop,
        seed=args.seed,
    )


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


def _powers_of_two(most: int) -> list[int]:
    return sorted({1, most, *(2**i for i in range(1, most.bit_length()) if 2**i <= most)})


def evaluate_model(args: EvaluateArgs, model: str, console: Console) -> Evaluation:
    """Load a model, have it answer the problems, and grade the answers."""
    refuse_missing_engine(args)
    task = find_task(args.task)
    rule = evaluation_reward(args.reward, task.rules)
    questions = eval_problems(task, args)
    roles = roles_of(args)
    model_path = resolve_model(model, args.output_dir)
    tokenizer = load_tokenizer(model_path)
    problems = prompted(questions, args.prompt or task.prompt, tokenizer)
    sampler = make_sampler(args, model_path, tokenizer, roles.eval, roles)
    try:
        with console.status(f"sampling {len(problems)} problems x {args.num_samples} with {sampler_kind(args)}"):
            return evaluate_vllm(sampler, rule, problems, eval_sampling(task, args, args.num_samples), task.rules)
    finally:
        sampler.close()


def label(model: str) -> str:
    """What to call a model: its folder, with the run's where that is "final" or a checkpoint."""
    path = Path(model)
    return f"{path.parent.name}_{path.name}" if path.parent.name else path.name


def main() -> None:
    args = parse(EvaluateArgs)
    console = Console()
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
    door(main)
