"""What verdicts may be on: a number of each run for every question, which `compare` takes. Arrays:
E evaluations, Q questions, N samples of a question. It loads scipy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import comb

from alignment.ablation.study import MEASURE_KINDS, Measure, Run, read_measure
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl

LAST_STEPS = 10  # of training, over which entropy is averaged


def evaluation_values(run: Run, measure: str) -> np.ndarray:
    """The measure's value for every question in every evaluation [E, Q], of those measures that an
    evaluation has: pass@k, and of all others accuracy. Raises `UserError` where a question has
    fewer samples than that needs."""
    kind, number = read_measure(measure)
    if kind == "avg" and run.scores.samples != number:
        raise UserError(
            f"--measure {measure}: {run.path} has {run.scores.samples} samples a question"
        )
    if kind not in OF_SAMPLES:
        return run.scores.rewards_EQ
    scores = run.scores
    if scores.samples < number:
        raise UserError(
            f"--measure {measure}: evaluations have {scores.samples} samples a question"
        )
    values = []
    for rewards_QN, votes_QN in zip(scores.rewards_of_samples, scores.votes, strict=True):
        if kind == "maj" and np.isnan(votes_QN).any():
            raise UserError(
                f"--measure {measure}: {run.path} has no votes, as evaluations of one sample,"
                " those by a rule of your own and those of older versions"
            )
        values.append(OF_SAMPLES[kind](rewards_QN, votes_QN, int(number)))
    return np.array(values)


def pass_at_k(rewards_QN: np.ndarray, k: int) -> np.ndarray:
    """For each question the chance that k of its n samples, drawn without replacement, include one
    of the c that are right [Q]: 1 - C(n - c, k) / C(n, k), which is unbiased for k fresh samples
    (Chen et al. 2021, arXiv:2107.03374, eq. 1). k is at most n."""
    samples = rewards_QN.shape[1]
    wrong_Q = samples - (rewards_QN == 1).sum(axis=1)
    return np.asarray(1 - comb(wrong_Q, k) / comb(samples, k))


def majority_at_k(rewards_QN: np.ndarray, votes_QN: np.ndarray, k: int) -> np.ndarray:
    """For each question the mean, over all sets of k of its n samples, of the share of the most
    frequent answers that is right [Q]. A set is k fresh samples, so this is unbiased for maj@k.
    `votes_QN` numbers a question's answers; -1 is none, which has no vote. An answer is right where
    a sample with it is."""
    values = []
    for rewards_N, votes_N in zip(rewards_QN, votes_QN, strict=True):
        right = []
        wrong = []
        for vote in np.unique(votes_N[votes_N >= 0]):
            is_this_N = votes_N == vote
            counts = right if (rewards_N[is_this_N] == 1).any() else wrong
            counts.append(int(is_this_N.sum()))
        none = int((votes_N < 0).sum())
        values.append(_majority_share(tuple(sorted(right)), tuple(sorted(wrong)), none, k))
    return np.array(values)


@functools.cache
def _majority_share(right: tuple[int, ...], wrong: tuple[int, ...], none: int, k: int) -> float:
    """`majority_at_k` of a question whose right and wrong answers came so many times each, and
    `none` times no answer."""
    total = 0.0
    for most in range(1, k + 1):  # votes of a leading answer
        # (samples with an answer, leading right answers, leading wrong ones) -> sets of samples
        sets = {(0, 0, 0): 1}
        for counts, leads in ((right, (1, 0)), (wrong, (0, 1))):
            for count in counts:
                sets = _with_answer(sets, count, most, leads)
        for (samples, right_leaders, wrong_leaders), number in sets.items():
            if right_leaders and samples <= k:
                share = right_leaders / (right_leaders + wrong_leaders)
                total += number * math.comb(none, k - samples) * share
    return total / math.comb(sum(right) + sum(wrong) + none, k)


Sets = Mapping[tuple[int, int, int], int]


def _with_answer(sets: Sets, count: int, most: int, leads: tuple[int, int]) -> dict:
    """The sets of samples with 0 to `most` of another answer's `count` samples; with `most` it is
    one of the leaders."""
    added: dict[tuple[int, int, int], int] = {}
    for (samples, right, wrong), number in sets.items():
        for taken in range(min(count, most) + 1):
            is_leader = taken == most
            key = (samples + taken, right + leads[0] * is_leader, wrong + leads[1] * is_leader)
            added[key] = added.get(key, 0) + number * math.comb(count, taken)
    return added


OF_SAMPLES: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "pass": lambda rewards_QN, votes_QN, k: pass_at_k(rewards_QN, k),
    "maj": majority_at_k,
}
"""A measure's kind -> its values [Q] in an evaluation, of those measures that several samples of a
question make."""


def best_checkpoint(values_EQ: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """The values [Q] of the best evaluation, without the bias of choosing it: every second question
    is scored in the evaluation that is best on the others, and these in that which is best on it.
    Questions of one text are together."""
    if values_EQ.shape[1] < 2:
        raise UserError("--measure best needs two questions or more")
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    is_odd_Q = np.array([places[text] % 2 == 1 for text in texts])
    values_Q = np.empty(values_EQ.shape[1])
    for is_chosen_by_Q in (is_odd_Q, ~is_odd_Q):
        best = int(values_EQ[:, is_chosen_by_Q].mean(axis=1).argmax())
        values_Q[~is_chosen_by_Q] = values_EQ[best, ~is_chosen_by_Q]
    return values_Q


def selection_bias(run: Run) -> float:
    """How much higher the run's best accuracy is than that of `best_checkpoint`: what choosing and
    scoring by the same questions adds."""
    values_EQ = run.scores.rewards_EQ
    chosen = best_checkpoint(values_EQ, run.scores.texts)
    return float(values_EQ.mean(axis=1).max() - chosen.mean())


def share_until(
    amounts_E: np.ndarray, values_EQ: np.ndarray, target: float, most: float
) -> np.ndarray:
    """The share of the amount `most` that a run takes until its mean first reaches `target`, on
    straight lines between evaluations; 1 where it does not. As values of questions [Q], whose mean
    is that share: a question above the target at that point has a smaller one, by its distance over
    the slope of the mean (the delta method), so that their spread is what the choice of questions
    adds."""
    questions = values_EQ.shape[1]
    mean_E = values_EQ.mean(axis=1)
    if mean_E[0] >= target:
        return np.full(questions, min(1.0, float(amounts_E[0] / most)))
    for place in range(1, len(mean_E)):
        if mean_E[place] < target:
            continue
        rise = mean_E[place] - mean_E[place - 1]
        run_length = amounts_E[place] - amounts_E[place - 1]
        part = (target - mean_E[place - 1]) / rise
        reached = amounts_E[place - 1] + part * run_length
        if reached >= most:
            break
        values_Q = (1 - part) * values_EQ[place - 1] + part * values_EQ[place]
        return (reached - (values_Q - target) * run_length / rise) / most
    return np.ones(questions)


def last_mean(run: Run, key: str) -> float:
    """The mean of a metric over the last `LAST_STEPS` steps."""
    values = [record[key] for record in run.metrics[-LAST_STEPS:] if record.get(key) is not None]
    if not values:
        raise UserError(f"--measure {key}: {run.path} has no such metric")
    numbers = np.array(values, dtype=float)
    if np.isnan(numbers).all():
        return math.nan
    return float(np.nanmean(numbers))


@dataclass(frozen=True)
class RunMeasures:
    """What a measure of a whole run needs beside the run: its name, and the most sampled tokens
    that all runs have taken."""

    measure: str
    tokens: float


def _best(run: Run, given: RunMeasures) -> np.ndarray:
    return best_checkpoint(run.scores.rewards_EQ, run.scores.texts)


def _tokens_to(run: Run, given: RunMeasures) -> np.ndarray:
    target = read_measure(given.measure).number
    amounts_E = run.amounts_until("tokens", run.evals)
    return share_until(amounts_E, run.scores.rewards_EQ, target, given.tokens)


def _greedy(run: Run, given: RunMeasures) -> np.ndarray:
    """The rewards [Q] of the run's greedy answers in its last evaluation (--eval_greedy). Raises
    `UserError` where it has none."""
    name = f"eval_greedy_{run.evals[-1]['step']:06d}.jsonl"
    lines = read_jsonl(run.path / "completions" / name)
    if not lines:
        raise UserError(
            f"--measure greedy: {run.path} has no greedy answers; train with --eval_greedy"
        )
    rewards = {line["problem"]: float(line["score"]["reward"]) for line in lines}
    return np.array([rewards[question] for question in run.scores.questions])


def _entropy(run: Run, given: RunMeasures) -> np.ndarray:
    return np.full(len(run.scores.questions), last_mean(run, "entropy"))


OF_RUNS: dict[str, Callable[[Run, RunMeasures], np.ndarray]] = {
    "best": _best,
    "tokens_to": _tokens_to,
    "greedy": _greedy,
    "entropy": _entropy,
}
"""A measure's kind -> the values [Q] of a run, of those measures that are of no single
evaluation."""


def measure_words(measure: str) -> tuple[str, str]:
    """The measure as a title, and as part of a sentence."""
    kind, _ = read_measure(measure)
    words: Measure = MEASURE_KINDS[kind]
    return words.title.format(measure), words.description.format(measure)
