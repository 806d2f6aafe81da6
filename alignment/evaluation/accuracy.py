"""Answers to the test problems, scored and summarised: averages, intervals, pass@k, majority votes;
and paired differences."""

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import multimode
from typing import Any, NamedTuple

import torch
from rich.console import Console

from alignment.core.power import detectable_difference, score_std
from alignment.core.records import Group, Problem, SamplingConfig, Score
from alignment.rewards.r1_zero import extract_answer
from alignment.rewards.rules import grading_report, score_groups
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import OnResponseEnd, Sampler, put_to_sleep
from alignment.system.errors import UserError
from alignment.system.files import fill_template, write_atomically, write_json, write_jsonl
from alignment.system.signals import received_signal
from alignment.system.terminal import printable

AVERAGES = {
    "avg_format_rewards": "format_reward",
    "avg_answer_rewards": "answer_reward",
    "avg_all_rewards": "reward",
}
CATEGORIES = ("format and answer", "format only", "neither")
HERE = Path(__file__).parent  # of the templates
SHOWN = 200  # problems of each kind on the page of a comparison
Interval = tuple[float, float]


class Evaluation(NamedTuple):
    """Scored groups of one size, and their `record`: averages in [0, 1], their 95 % intervals, and
    what docs/files.md lists."""

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
    """The evaluation of completions sampled from any `Sampler`, vLLM's or another, one group for
    each problem. The evaluation's record also has the mean reward under each of `rules`. Raises
    `UserError` without a problem. Where a signal has stopped a `StoppableSampler`, it is the
    evaluation of the first problems, and its record says how many others are "left_out"."""
    if not problems:
        raise UserError("nothing to evaluate: the task has no problem in its test split")
    start = time.perf_counter()
    completions = vllm_model.sample(
        [problem.prompt for problem in problems], eval_sampling_params, on_response_end
    )
    answered = problems[: len(completions)] if received_signal() else problems
    evaluation = summarise(
        score_groups(answered, completions, reward_fn), time.perf_counter() - start, rules
    )
    if left_out := len(problems) - len(answered):
        return evaluation._replace(record={**evaluation.record, "left_out": left_out})
    return evaluation


def summarise(groups: Sequence[Group], seconds: float, rules: Sequence[str] = ()) -> Evaluation:
    """Figures, categories, lengths and grading of scored groups, all of one size."""
    found, completions = (
        figures(groups),
        [completion for group in groups for completion in group.completions],
    )
    record = {
        metric: figure["value"] for metric, figure in found.items() if not metric.startswith("avg@")
    }
    record |= {f"{name}_ci": found[name]["interval"] for name in AVERAGES}
    record |= {"categories": Counter(category(score) for group in groups for score in group.scores)}
    record |= {"response_length": sum(len(c.token_ids) for c in completions) / len(completions)}
    record |= {"finished": sum(c.finish_reason == "stop" for c in completions) / len(completions)}
    record |= grading_report(groups, rules) | {
        "problems": len(groups),
        "seconds": seconds,
        "figures": found,
    }
    return Evaluation(tuple(groups), record)


def figures(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Shares of success: `AVERAGES`; avg@k, the mean reward of k samples; pass@j for powers of two
    j and k; maj@k. Each has its value, 95 % interval and standard error over problems, and the
    smallest difference that two models near it, evaluated alike, show with a chance of 80 %: not 0,
    because it counts two more successes and failures (Agresti and Coull 1998)."""
    k, z2, found = len(groups[0].completions), 1.96**2, {}
    rows = {
        name: [[score[key] for score in group.scores] for group in groups]
        for name, key in AVERAGES.items()
    }
    rows[f"avg@{k}"] = rows["avg_all_rewards"]
    correct = [sum(score["reward"] == 1 for score in group.scores) for group in groups]
    for j in sorted({k, *(2**i for i in range(k.bit_length()))}):
        rows[f"pass@{j}"] = [[pass_at_k(k, c, j)] * k for c in correct]
    rows[f"maj@{k}"] = [[majority_share(group)] * k for group in groups]
    for metric, scores_PG in rows.items():
        p, n = effective_sample(scores_PG)
        smallest = detectable_difference(score_std(0.0, n + z2, (p * n + z2 / 2) / (n + z2)))
        spread = {
            "interval": list(clustered_interval(scores_PG)),
            "std_error": score_std(0.0, n, p),
        }
        found[metric] = {"value": p, **spread, "smallest_difference": smallest}
    return found


def category(score: Score) -> str:
    """The category of a score, one of `CATEGORIES`."""
    return CATEGORIES[2 if not score["format_reward"] else 0 if score["answer_reward"] else 1]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, include a correct one: 1 - C(n - c, k)
    / C(n, k). Unbiased for the chance that k fresh samples do (Chen et al. 2021, arXiv:2107.03374,
    eq. 1)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_share(group: Group) -> float:
    """1 where the most frequent answer is right, 0 where it is wrong; among equally frequent
    answers, the share that is right. Answers are compared as written; a response without an answer
    has no vote (Wang et al. 2023, arXiv:2203.11171)."""
    answers = [extract_answer(completion.text) for completion in group.completions]
    leaders = set(multimode(answer for answer in answers if answer is not None))
    right = {
        answer for answer, score in zip(answers, group.scores, strict=True) if score["reward"] == 1
    }
    return len(leaders & right) / len(leaders) if leaders else 0.0


def effective_sample(scores_PG: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean p, and the effective number of independent samples: p(1 - p) / variance of the mean,
    estimated from the variance between problems (Kish 1965, design effect). Where all scores are
    equal, each problem counts once."""
    scores = torch.tensor(scores_PG, dtype=torch.float64)
    problems, p = scores.shape[0], scores.mean().item()
    between = scores.mean(dim=1).var(correction=1).item() / problems if problems > 1 else 0.0
    return p, min(p * (1 - p) / between, float(scores.numel())) if between > 0 else float(problems)


def clustered_interval(scores_PG: Sequence[Sequence[float]], z: float = 1.96) -> Interval:
    """Wilson's 95 % interval (Wilson 1927) of the mean of scores in [0, 1], of which a problem's
    are correlated."""
    p, n = effective_sample(scores_PG)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def print_table(
    rows: Sequence[Mapping[str, Any]], benchmarks: Mapping[str, Mapping], console: Console
) -> None:
    """Print one table of all evaluations, `rows` being records with their model and task."""
    text = fill_template(
        HERE / "evaluations.txt.j2", rows=rows, categories=CATEGORIES, benchmarks=benchmarks
    )
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class PairedDifference:
    """B - A, with its 95 % interval, and the problems on which mean rewards differ, as rows of
    comparison.jsonl."""

    a: float
    b: float
    difference: float
    interval: Interval
    won: tuple[dict, ...]
    lost: tuple[dict, ...]


def paired_difference(a: Sequence[Group], b: Sequence[Group]) -> PairedDifference:
    """The difference of two sides' groups of the same problems in the same order. Its interval is
    made of those of the two means, allowing for the correlation r between problems' mean rewards
    (Newcombe 1998, Statistics in Medicine 17:2635, method 10): with d = b - a, and lower and upper
    bounds l and u, d - sqrt((b - l_b)^2 - 2 r (b - l_b)(u_a - a) + (u_a - a)^2), and likewise
    above. Unlike the normal interval it has a width where all answers of both sides score alike."""
    rewards = [
        [[score["reward"] for score in group.scores] for group in groups] for groups in (a, b)
    ]
    (low_a, high_a), (low_b, high_b) = map(clustered_interval, rewards)
    means_a, means_b = (
        torch.tensor([sum(row) / len(row) for row in rows], dtype=torch.float64) for rows in rewards
    )
    mean_a, mean_b = means_a.mean().item(), means_b.mean().item()
    r = (
        torch.corrcoef(torch.stack([means_a, means_b]))[0, 1].item()
        if means_a.std() > 0 and means_b.std() > 0
        else 0.0
    )

    def reach(one, other):
        return math.sqrt(max(0.0, one * one - 2 * r * one * other + other * other))

    difference = mean_b - mean_a
    interval = (
        difference - reach(mean_b - low_b, high_a - mean_a),
        difference + reach(high_b - mean_b, mean_a - low_a),
    )
    outcomes = []
    for of_a, of_b, reward_a, reward_b in zip(
        a, b, means_a.tolist(), means_b.tolist(), strict=True
    ):
        problem, texts = (
            of_a.problem,
            {"a_text": of_a.completions[0].text, "b_text": of_b.completions[0].text},
        )
        facts = {
            "problem": problem.id,
            "question": problem.question,
            "ground_truth": problem.ground_truth,
        }
        outcomes.append({**facts, "a": reward_a, "b": reward_b, **texts})
    won, lost = (tuple(o for o in outcomes if sign * (o["b"] - o["a"]) > 0) for sign in (1, -1))
    return PairedDifference(mean_a, mean_b, difference, interval, won, lost)


def write_comparison(
    comparison: PairedDifference, names: Sequence[str], folder: Path, console: Console
) -> Path:
    """Print the difference, the first problem won and the first lost; write comparison.jsonl and
    comparison.html, returned."""
    kinds = (("won", comparison.won), ("lost", comparison.lost))
    write_jsonl(
        folder / "comparison.jsonl",
        [{"outcome": kind, **outcome} for kind, outcomes in kinds for outcome in outcomes],
    )
    page, facts = (
        folder / "comparison.html",
        {"comparison": comparison, "names": names, "kinds": kinds},
    )
    write_atomically(page, fill_template(HERE / "comparison.html.j2", shown=SHOWN, **facts))
    text = fill_template(HERE / "comparison.txt.j2", page=page, **facts)
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
    return page


def write_results(
    folder: Path, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> None:
    """Write each model's rows in the shapes of lm-evaluation-harness (in lm_eval/) and of lighteval
    (in lighteval/results/)."""
    now = datetime.now(UTC)
    for model, place in itertools.product(
        dict.fromkeys(row["model"] for row in rows), ("lm_eval", "lighteval/results")
    ):
        file = folder / place / Path(model).name / f"results_{now:%Y-%m-%dT%H-%M-%S.%f}.json"
        file.parent.mkdir(parents=True)
        facts = {
            "model": model,
            "rows": [row for row in rows if row["model"] == model],
            "time": now.timestamp(),
            **settings,
        }
        write_json(
            file, json.loads(fill_template(HERE / f"{place.partition('/')[0]}.json.j2", **facts))
        )


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a run's policy before the first step, after every `interval` steps, and after the
    last."""

    evaluate: Callable[[Sampler], Evaluation]
    interval: int
    sampler: Sampler
    run: Any
    policy: Any
    # Compares log-probs with the trainer's, where no rollout's are compared.
    check: Callable[[Sequence[Group]], object] | None

    def run_if_due(self, step: int) -> None:
        """Evaluate after `step` steps, unless that is logged already: a run may stop between a step
        and its evaluation."""
        if (
            step in self.run.folder.evaluated
            or step % self.interval
            and step < self.run.config.num_steps
        ):
            return
        self.run.clock.begin("evaluation")
        if self.sampler.policy_version != step:
            load_proven(self.sampler, self.policy.weights(), step)
        evaluation = self.evaluate(self.sampler)
        if self.check is not None:
            # This sampler only evaluates, so new weights come before its next completions; the
            # trainer computes meanwhile.
            put_to_sleep(self.sampler, keep_weights=False)
            self.check(evaluation.groups)
        self.run.folder.log_eval({"step": step, **evaluation.record}, evaluation.groups)
