"""Answers to the test problems, scored and summarised: averages, intervals, pass@k, majority votes;
and paired differences."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import multimode
from typing import Any, NamedTuple

import torch
from rich.console import Console

from alignment.core.power import detectable_difference, score_std, wilson_interval
from alignment.core.records import (
    Group,
    Problem,
    SamplingConfig,
    Score,
    flatten_completions,
    flatten_scores,
)
from alignment.rewards.r1_zero import r1_zero_reward_fn
from alignment.rewards.rules import (
    RewardFn,
    extracted_answer,
    grading_report,
    has_votes,
    score_groups,
)
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import (
    OnResponseEnd,
    Sampler,
    StoppableSampler,
    put_to_sleep,
)
from alignment.system.errors import UserError
from alignment.system.files import write_atomically, write_json, write_jsonl
from alignment.system.signals import received_signal
from alignment.system.templates import fill_template
from alignment.system.terminal import printable

AVERAGES = {
    "avg_format_rewards": "format_reward",
    "avg_answer_rewards": "answer_reward",
    "avg_all_rewards": "reward",
}
CATEGORIES = ("format and answer", "format only", "neither")
TEMPLATES = Path(__file__).parent
SHOWN = 200  # problems of each kind on the page of a comparison
Interval = tuple[float, float]


class Evaluation(NamedTuple):
    """Scored groups, all of the same number of completions, and the `record` that is logged of
    them: averages in [0, 1], their 95 % intervals and further figures (`summarise`)."""

    groups: tuple[Group, ...]
    record: Mapping[str, Any]


def evaluate_vllm(
    vllm_model: Sampler | StoppableSampler,
    reward_fn: Callable[[str, str], Score],
    problems: Sequence[Problem],
    eval_sampling_params: SamplingConfig,
    rules: Sequence[str] = ("r1_zero", "r1_zero_strict"),
    on_response_end: OnResponseEnd | None = None,
) -> Evaluation:
    """Sample from any `Sampler`, vLLM's or another, score the completions, and return the
    evaluation, one group for each problem.

    Its record has the mean reward under each of `rules`, too. Where a signal stops a
    `StoppableSampler`, the evaluation is of the first problems only, and its record counts those
    "left_out". Raises `UserError` without a problem."""
    if not problems:
        raise UserError("nothing to evaluate: the task has no problem in its test split")
    start = time.perf_counter()
    prompts = [problem.prompt for problem in problems]
    completions = vllm_model.sample(prompts, eval_sampling_params, on_response_end)
    # Only a signal may leave problems unanswered; `score_groups` refuses any other lack.
    answered = problems[: len(completions)] if received_signal() else problems
    groups = score_groups(answered, completions, reward_fn)
    evaluation = summarise(groups, time.perf_counter() - start, rules, reward_fn)
    left_out = len(problems) - len(answered)
    if left_out:
        return evaluation._replace(record={**evaluation.record, "left_out": left_out})
    return evaluation


def summarise(
    groups: Sequence[Group],
    seconds: float,
    rules: Sequence[str] = (),
    rule: RewardFn = r1_zero_reward_fn,
) -> Evaluation:
    """Figures, categories, lengths and grading of groups scored by `rule`, all of one size."""
    by_metric = figures(groups, rule)
    if len(groups[0].completions) > 1 and has_votes(rule):
        groups = [with_votes(group, rule) for group in groups]
    completions = flatten_completions(groups)
    finished = sum(completion.finish_reason == "stop" for completion in completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    record: dict[str, Any] = {}
    for metric, figure_of_metric in by_metric.items():
        if not metric.startswith("avg@"):  # avg@k has the value of avg_all_rewards
            record[metric] = figure_of_metric["value"]
    record |= {f"{name}_ci": by_metric[name]["interval"] for name in AVERAGES}
    record["categories"] = Counter(map(category, flatten_scores(groups)))
    record["response_length"] = tokens / len(completions)
    record["finished"] = finished / len(completions)
    record |= grading_report(groups, rules)
    record["problems"] = len(groups)
    record["seconds"] = seconds
    record["figures"] = by_metric
    return Evaluation(tuple(groups), record)


def figures(
    groups: Sequence[Group], rule: RewardFn = r1_zero_reward_fn
) -> dict[str, dict[str, Any]]:
    """The `figure` of each metric, for groups of k samples scored by `rule`: `AVERAGES`; avg@k, the
    mean reward; pass@j for j = 1, 2, 4, ... and j = k; maj@k of a rule that `has_votes`."""
    k = len(groups[0].completions)
    scores_by_metric = {name: _score_rows(groups, part) for name, part in AVERAGES.items()}
    scores_by_metric[f"avg@{k}"] = scores_by_metric["avg_all_rewards"]
    correct_P = []
    for group in groups:
        right_scores = [score for score in group.scores if score["reward"] == 1]
        correct_P.append(len(right_scores))
    powers_of_two = [2**exponent for exponent in range(k.bit_length())]
    # pass@j and maj@k are one number a problem. `figure` takes k numbers a problem, so that number
    # is repeated k times.
    for j in sorted({k, *powers_of_two}):
        scores_by_metric[f"pass@{j}"] = [[pass_at_k(k, correct, j)] * k for correct in correct_P]
    if has_votes(rule):
        scores_by_metric[f"maj@{k}"] = [[majority_share(group, rule)] * k for group in groups]
    return {metric: figure(scores_PG) for metric, scores_PG in scores_by_metric.items()}


def _score_rows(groups: Sequence[Group], part: str) -> list[list[float]]:
    """One part of each score, such as "reward": a row for each group, of its completions."""
    rows = []
    for group in groups:
        rows.append([score[part] for score in group.scores])
    return rows


def figure(scores_PG: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean of scores in [0, 1], its 95 % interval, its standard error over problems, and the
    smallest difference between two models of about this mean that such an evaluation of both would
    detect with a power of 80 %."""
    p, n = effective_sample(scores_PG)
    # About two more successes and two more failures (z^2 / 2 of each; Agresti and Coull 1998), so
    # that the smallest difference is above 0 even where all scores are equal.
    z2 = 1.96**2
    shrunk = (p * n + z2 / 2) / (n + z2)
    return {
        "value": p,
        "interval": list(clustered_interval(scores_PG)),
        "std_error": score_std(seed_std=0.0, questions=n, accuracy=p),
        "smallest_difference": detectable_difference(
            score_std(seed_std=0.0, questions=n + z2, accuracy=shrunk)
        ),
    }


def category(score: Score) -> str:
    """The category of a score, one of `CATEGORIES`."""
    if not score["format_reward"]:
        return "neither"
    return "format and answer" if score["answer_reward"] else "format only"


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, include a correct one: 1 - C(n - c, k)
    / C(n, k).

    It is unbiased for the chance that k fresh samples do (Chen et al. 2021, arXiv:2107.03374,
    eq. 1)."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_share(group: Group, rule: RewardFn = r1_zero_reward_fn) -> float:
    """1 where the most frequent answer, as `rule` finds it, is right, 0 where it is wrong; where
    several are equally frequent, the share of them that is right.

    Answers are compared as written; a response without an answer has no vote (Wang et al. 2023,
    arXiv:2203.11171)."""
    answers = answers_of(group, rule)
    leaders = set(multimode(answer for answer in answers if answer is not None))
    if not leaders:
        return 0.0
    right = set()
    for answer, score in zip(answers, group.scores, strict=True):
        if score["reward"] == 1:
            right.add(answer)
    return len(leaders & right) / len(leaders)


def answers_of(group: Group, rule: RewardFn) -> list[str | None]:
    """The answer of each completion, as `rule` finds it; None where it has none."""
    answers = []
    for completion in group.completions:
        answers.append(extracted_answer(rule, group.problem, completion.text))
    return answers


def with_votes(group: Group, rule: RewardFn) -> Group:
    """The group whose scores have a "vote", which maj@N of fewer samples needs: the number of the
    answer among the problem's, by first appearance from 0; -1 without an answer."""
    numbers: dict[str | None, int] = {None: -1}
    scores = []
    for answer, score in zip(answers_of(group, rule), group.scores, strict=True):
        number = numbers.setdefault(answer, len(numbers) - 1)
        scores.append({**score, "vote": float(number)})
    return replace(group, scores=tuple(scores))


def effective_sample(scores_PG: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean p of the scores, and their effective number n: so many independent scores of 0 or 1
    would have a mean of the same variance v, so n = p(1 - p) / v. The estimate of v is from the
    variance between problems (Kish 1965, design effect).

    n is at most the number of scores. Where the problems' means are all equal, v is 0, and n is the
    number of problems."""
    scores = torch.tensor(scores_PG, dtype=torch.float64)
    problems = scores.shape[0]
    p = scores.mean().item()
    variance = 0.0
    if problems > 1:
        variance = scores.mean(dim=1).var(correction=1).item() / problems
    if not variance > 0:
        return p, float(problems)
    return p, min(p * (1 - p) / variance, float(scores.numel()))


def clustered_interval(scores_PG: Sequence[Sequence[float]], z: float = 1.96) -> Interval:
    """Wilson's 95 % interval of the mean of scores in [0, 1]. Its n is that of `effective_sample`,
    since the scores of one problem are correlated."""
    return wilson_interval(*effective_sample(scores_PG), z)


def print_table(
    rows: Sequence[Mapping[str, Any]], benchmarks: Mapping[str, Mapping], console: Console
) -> None:
    """Print one table of all evaluations; each of `rows` is a record with its model and task."""
    text = fill_template(
        TEMPLATES / "evaluations.txt.j2", rows=rows, categories=CATEGORIES, benchmarks=benchmarks
    )
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class PairedDifference:
    """The mean rewards of two sides A and B, their difference B - A with its 95 % interval, and the
    problems on which they differ, as rows of comparison.jsonl."""

    a: float
    b: float
    difference: float
    interval: Interval
    won: tuple[dict, ...]  # Problems on which B has the higher mean reward.
    lost: tuple[dict, ...]  # Problems on which A has it.


def paired_difference(a: Sequence[Group], b: Sequence[Group]) -> PairedDifference:
    """The difference of two sides' groups, which are of the same problems in the same order.

    Its interval combines the intervals [l_a, u_a] and [l_b, u_b] of the two means, with r the
    correlation of the problems' mean rewards (Newcombe 1998, Statistics in Medicine 17:2635, method
    10). With d = b - a, the lower bound is
    d - sqrt((b - l_b)^2 - 2 r (b - l_b)(u_a - a) + (u_a - a)^2), and the upper bound
    d + sqrt((u_b - b)^2 - 2 r (u_b - b)(a - l_a) + (a - l_a)^2). Unlike the normal interval it
    keeps a width where all answers of both sides score alike."""
    rewards_a = _score_rows(a, "reward")
    rewards_b = _score_rows(b, "reward")
    low_a, high_a = clustered_interval(rewards_a)
    low_b, high_b = clustered_interval(rewards_b)
    means_a_P = torch.tensor([sum(row) / len(row) for row in rewards_a], dtype=torch.float64)
    means_b_P = torch.tensor([sum(row) / len(row) for row in rewards_b], dtype=torch.float64)
    mean_a = means_a_P.mean().item()
    mean_b = means_b_P.mean().item()
    r = 0.0
    if means_a_P.std() > 0 and means_b_P.std() > 0:
        r = torch.corrcoef(torch.stack([means_a_P, means_b_P]))[0, 1].item()

    def combined_width(width_b: float, width_a: float) -> float:
        squared = width_b * width_b - 2 * r * width_b * width_a + width_a * width_a
        return math.sqrt(max(0.0, squared))  # Rounding may make it negative.

    difference = mean_b - mean_a
    low = difference - combined_width(mean_b - low_b, high_a - mean_a)
    high = difference + combined_width(high_b - mean_b, mean_a - low_a)
    won = []
    lost = []
    for group_a, group_b, reward_a, reward_b in zip(
        a, b, means_a_P.tolist(), means_b_P.tolist(), strict=True
    ):
        outcome = {
            "problem": group_a.problem.id,
            "question": group_a.problem.question,
            "ground_truth": group_a.problem.ground_truth,
            "a": reward_a,
            "b": reward_b,
            "a_text": group_a.completions[0].text,
            "b_text": group_b.completions[0].text,
        }
        if reward_b > reward_a:
            won.append(outcome)
        elif reward_b < reward_a:
            lost.append(outcome)
    return PairedDifference(mean_a, mean_b, difference, (low, high), tuple(won), tuple(lost))


def write_comparison(
    comparison: PairedDifference, names: Sequence[str], folder: Path, console: Console
) -> Path:
    """Print the difference, the first problem won and the first lost; write comparison.jsonl, and
    comparison.html, whose path is returned."""
    kinds = (("won", comparison.won), ("lost", comparison.lost))
    rows = []
    for kind, outcomes in kinds:
        rows += [{"outcome": kind, **outcome} for outcome in outcomes]
    write_jsonl(folder / "comparison.jsonl", rows)
    page = folder / "comparison.html"
    facts = {"comparison": comparison, "names": names, "kinds": kinds}
    write_atomically(page, fill_template(TEMPLATES / "comparison.html.j2", shown=SHOWN, **facts))
    text = fill_template(TEMPLATES / "comparison.txt.j2", page=page, **facts)
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
    return page


def write_results(
    folder: Path, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> None:
    """Write each model's rows in the shapes of lm-evaluation-harness (in lm_eval/) and of lighteval
    (in lighteval/results/)."""
    now = datetime.now(UTC)
    template_of_folder = {
        folder / "lm_eval": TEMPLATES / "lm_eval.json.j2",
        folder / "lighteval" / "results": TEMPLATES / "lighteval.json.j2",
    }
    for model in dict.fromkeys(row["model"] for row in rows):
        facts = {
            "model": model,
            "rows": [row for row in rows if row["model"] == model],
            "time": now.timestamp(),
            **settings,
        }
        for results_folder, template in template_of_folder.items():
            file = results_folder / Path(model).name / f"results_{now:%Y-%m-%dT%H-%M-%S.%f}.json"
            file.parent.mkdir(parents=True)
            write_json(file, json.loads(fill_template(template, **facts)))


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a run's policy before the first step, after every `eval_interval` steps, and after
    the last."""

    evaluate: Callable[[Sampler], Evaluation]
    eval_interval: int
    sampler: Sampler
    run: Any
    policy: Any
    # Compares the sampler's log-probs of an evaluation with the trainer's. None where this sampler
    # draws the rollouts too, since each update compares the log-probs of these.
    check: Callable[[Sequence[Group]], object] | None
    # What is evaluated beside that, by the prefix of its metrics: other tasks, greedy responses.
    others: Mapping[str, Callable[[Sampler], Evaluation]] = field(default_factory=dict)

    def run_if_due(self, step: int) -> None:
        """Evaluate after `step` steps if an evaluation is due there and not logged already. A run
        that stopped between a step and its evaluation makes it up on resume."""
        is_due = step % self.eval_interval == 0 or step >= self.run.config.num_steps
        if not is_due or step in self.run.folder.evaluated:
            return
        self.run.clock.begin("evaluation")
        if self.sampler.policy_version != step:
            load_proven(self.sampler, self.policy.weights(), step)
        evaluation = self.evaluate(self.sampler)
        others = {prefix: evaluate(self.sampler) for prefix, evaluate in self.others.items()}
        if self.check is not None:
            # The trainer, which computes log-probs for the check, gets the sampler's memory. The
            # sampler may lose its weights: it gets new ones before the next evaluation.
            put_to_sleep(self.sampler, keep_weights=False)
            self.check(evaluation.groups)
        groups = {prefix: other.groups for prefix, other in others.items()}
        record = {"step": step, **joined_record(evaluation, others)}
        self.run.folder.log_eval(record, evaluation.groups, groups)


def joined_record(evaluation: Evaluation, others: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The record of an evaluation with those of `others`, each metric with its prefix and a slash
    before its name."""
    record = dict(evaluation.record)
    for prefix, other in others.items():
        record |= {f"{prefix}/{name}": value for name, value in other.record.items()}
    return record
