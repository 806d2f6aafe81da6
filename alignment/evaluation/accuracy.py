"""Answers to the test problems, scored and summarised: averages, intervals, pass@k, majority votes; and paired differences."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from rich.console import Console
from rich.text import Text

from alignment.core.records import Group, Problem, SamplingConfig, Score
from alignment.rewards.r1_zero import extract_answer
from alignment.rewards.rules import grading_report, score_groups
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import OnResponseEnd, Sampler
from alignment.system.errors import UserError
from alignment.system.files import write_atomically, write_jsonl
from alignment.system.terminal import make_table, printable

AVERAGES = {"avg_format_rewards": "format_reward", "avg_answer_rewards": "answer_reward", "avg_all_rewards": "reward"}
CATEGORIES = ("format and answer", "format only", "neither")
SHOWN = 200  # problems of each kind on the page of a comparison
Interval = tuple[float, float]


@dataclass(frozen=True)
class Evaluation:
    """Scored groups of one size, and their `record`: averages in [0, 1], their 95 % intervals, and what docs/files.md lists."""

    groups: tuple[Group, ...]
    record: Mapping[str, Any]


def evaluate_vllm(
    vllm_model: Sampler,
    reward_fn: Callable[[str, str], Score],
    problems: Sequence[Problem],
    eval_sampling_params: SamplingConfig,
    rules: Sequence[str] = ("r1_zero", "r1_zero_strict"),
    on_response_end: OnResponseEnd | None = None,
) -> Evaluation:
    """The evaluation of completions sampled from any `Sampler`, vLLM's or another, one group for each problem. The evaluation's
    record also has the mean reward under each of `rules`. Raises `UserError` without a problem."""
    if not problems:
        raise UserError("nothing to evaluate: the task has no problem in its test split")
    start = time.perf_counter()
    completions = vllm_model.sample([problem.prompt for problem in problems], eval_sampling_params, on_response_end)
    groups = score_groups(problems, completions, reward_fn)
    return summarise(groups, time.perf_counter() - start, rules)


def summarise(groups: Sequence[Group], seconds: float, rules: Sequence[str] = ()) -> Evaluation:
    """Averages, intervals, categories, pass@k and maj@k of scored groups, all of one size."""
    k = len(groups[0].completions)
    scores_PG = {name: [[score[key] for score in group.scores] for group in groups] for name, key in AVERAGES.items()}
    powers_of_two = sorted({k, *(2**i for i in range(k.bit_length()))})
    correct = [sum(score["reward"] == 1 for score in group.scores) for group in groups]
    completions = [completion for group in groups for completion in group.completions]
    record = {
        **{name: sum(map(sum, rows)) / (k * len(rows)) for name, rows in scores_PG.items()},
        **{f"{name}_ci": list(clustered_interval(rows)) for name, rows in scores_PG.items()},
        "categories": Counter(map(category, (score for group in groups for score in group.scores))),
        **{f"pass@{j}": sum(pass_at_k(k, c, j) for c in correct) / len(correct) for j in powers_of_two},
        f"maj@{k}": sum(map(majority_share, groups)) / len(groups),
        "response_length": sum(len(c.token_ids) for c in completions) / len(completions),
        "finished": sum(c.finish_reason == "stop" for c in completions) / len(completions),
        **grading_report(groups, rules),
        "problems": len(groups),
        "seconds": seconds,
    }
    return Evaluation(tuple(groups), record)


def category(score: Score) -> str:
    """The category of a score, one of `CATEGORIES`."""
    return CATEGORIES[2 if not score["format_reward"] else 0 if score["answer_reward"] else 1]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, include a correct one: 1 - C(n - c, k) / C(n, k). Unbiased for the
    chance that k fresh samples do (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_share(group: Group) -> float:
    """1 where the most frequent answer is right, 0 where it is wrong; among equally frequent answers, the share that is right.
    Answers are compared as written; a response without an answer has no vote (Wang et al. 2023, arXiv:2203.11171)."""
    answers = [extract_answer(completion.text) for completion in group.completions]
    votes = Counter(answer for answer in answers if answer is not None)
    right = {answer for answer, score in zip(answers, group.scores, strict=True) if score["reward"] == 1}
    leaders = {answer for answer, count in votes.items() if count == max(votes.values())}
    return len(leaders & right) / len(leaders) if leaders else 0.0


def clustered_interval(scores_PG: Sequence[Sequence[float]], z: float = 1.96) -> Interval:
    """95 % interval of the mean of scores in [0, 1], where a problem's are correlated: Wilson's (Wilson 1927), which keeps its
    coverage near 0 and 1, with the effective number of independent samples p(1 - p) / variance of the mean, estimated from the
    variance between problems (Kish 1965, design effect). Where all scores are equal, each problem counts once."""
    scores = torch.tensor(scores_PG, dtype=torch.float64)
    problems, p = scores.shape[0], scores.mean().item()
    between = scores.mean(dim=1).var(correction=1).item() / problems if problems > 1 else 0.0
    n = min(p * (1 - p) / between, float(scores.numel())) if between > 0 else float(problems)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the averages with their intervals, the categories, and pass@k and maj@k where samples allow."""
    record, samples = evaluation.record, len(evaluation.groups[0].completions)
    rows = [(name, f"{record[name]:.4f}", "{:.4f} .. {:.4f}".format(*record[f"{name}_ci"])) for name in AVERAGES]
    if samples > 1:
        rows += [(name, f"{value:.4f}") for name, value in record.items() if name.startswith(("pass@", "maj@"))]
    rows += [(name, str(record["categories"].get(name, 0))) for name in CATEGORIES]
    rows += [("mean response tokens", f"{record['response_length']:.1f}")]
    title, numbers = f"{record['problems']} problems in {record['seconds']:.1f} s", ("value", "95 % interval")
    console.print(make_table(title, ("", *numbers), rows, numbers))


@dataclass(frozen=True)
class PairedDifference:
    """B - A, with its 95 % interval, and the problems on which the mean rewards differ, a row of comparison.jsonl each: the
    mean reward of each side, and both sides' first completions."""

    a: float
    b: float
    difference: float
    interval: Interval
    won: tuple[dict, ...]
    lost: tuple[dict, ...]


def paired_difference(a: Sequence[Group], b: Sequence[Group]) -> PairedDifference:
    """The difference of two sides' groups of the same problems in the same order. Its interval is made of those of the two
    means, allowing for the correlation r between problems' mean rewards (Newcombe 1998, Statistics in Medicine 17:2635, method
    10): with d = b - a, and lower and upper bounds l and u, d - sqrt((b - l_b)^2 - 2 r (b - l_b)(u_a - a) + (u_a - a)^2), and
    likewise above. Unlike the normal interval it has a width where all answers of both sides score alike."""
    rewards = [[[score["reward"] for score in group.scores] for group in groups] for groups in (a, b)]
    (low_a, high_a), (low_b, high_b) = map(clustered_interval, rewards)
    means_a, means_b = (torch.tensor([sum(row) / len(row) for row in rows], dtype=torch.float64) for rows in rewards)
    mean_a, mean_b = means_a.mean().item(), means_b.mean().item()
    varies = means_a.std() > 0 and means_b.std() > 0
    r = torch.corrcoef(torch.stack([means_a, means_b]))[0, 1].item() if varies else 0.0
    reach = lambda one, other: math.sqrt(max(0.0, one * one - 2 * r * one * other + other * other))
    difference = mean_b - mean_a
    low = difference - reach(mean_b - low_b, high_a - mean_a)
    high = difference + reach(high_b - mean_b, mean_a - low_a)
    outcomes = []
    for of_a, of_b, reward_a, reward_b in zip(a, b, means_a.tolist(), means_b.tolist(), strict=True):
        problem, texts = of_a.problem, {"a_text": of_a.completions[0].text, "b_text": of_b.completions[0].text}
        facts = {"problem": problem.id, "question": problem.question, "ground_truth": problem.ground_truth}
        outcomes.append({**facts, "a": reward_a, "b": reward_b, **texts})
    won, lost = (tuple(o for o in outcomes if sign * (o["b"] - o["a"]) > 0) for sign in (1, -1))
    return PairedDifference(mean_a, mean_b, difference, (low, high), won, lost)


def write_comparison(comparison: PairedDifference, names: Sequence[str], folder: Path) -> Path:
    """Write comparison.jsonl, a line for each problem won or lost, and comparison.html, which is returned."""
    kinds = (("won", comparison.won), ("lost", comparison.lost))
    write_jsonl(folder / "comparison.jsonl", [{"outcome": kind, **outcome} for kind, side in kinds for outcome in side])
    source = Path(__file__).with_name("comparison.html.j2").read_text(encoding="utf-8")
    template = jinja2.Template(source, autoescape=True, undefined=jinja2.StrictUndefined)
    file = folder / "comparison.html"
    write_atomically(file, template.render(comparison=comparison, names=names, kinds=kinds, shown=SHOWN))
    return file


def print_comparison(comparison: PairedDifference, names: Sequence[str], console: Console) -> None:
    """Print the difference with its interval, and the first problem that was won and the first that was lost."""
    (low, high), won, lost = comparison.interval, comparison.won, comparison.lost
    difference = f"{names[1]} - {names[0]}: {comparison.difference:+.4f} (95 %: {low:+.4f} .. {high:+.4f})"
    console.print(f"{difference}; {len(won)} problems won, {len(lost)} lost", style="bold", markup=False)
    firsts = [(kind, outcome) for kind, side in (("won", won), ("lost", lost)) for outcome in side[:1]]
    rows = [(f"{kind}: {outcome['question']}", outcome["a_text"], outcome["b_text"]) for kind, outcome in firsts]
    table = make_table("", ("", *names), [[Text(printable(cell)) for cell in row] for row in rows])
    table.show_lines = True
    console.print(table)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a run's policy before the first step, after every `interval` steps, and after the last."""

    evaluate: Callable[[Sampler], Evaluation]
    interval: int
    sampler: Sampler
    run: Any
    policy: Any
    check: Callable[[Sequence[Group]], object] | None
    """Compares the sampler's log-probs with the trainer's, where no rollout of this sampler is compared with them already."""

    def run_if_due(self, step: int) -> None:
        """Evaluate after `step` steps, unless that is logged already: a run may stop between a step and its evaluation."""
        if step in self.run.folder.evaluated or step % self.interval and step < self.run.config.num_steps:
            return
        self.run.clock.begin("evaluation")
        if self.sampler.policy_version != step:
            load_proven(self.sampler, self.policy.weights(), step)
        evaluation = self.evaluate(self.sampler)
        if self.check is not None:
            self.check(evaluation.groups)
        self.run.folder.log_eval({"step": step, **evaluation.record}, evaluation.groups)
