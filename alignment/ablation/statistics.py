"""Paired comparisons of arms over training seeds and questions, with intervals and verdicts.

An arm is a set of arguments, trained with several seeds; all runs answer the same questions. Arrays: S seeds, Q questions,
E evaluations. Nothing here reads a file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
from scipy import stats
from scipy.special import digamma, polygamma

from alignment.ablation.design import ALPHA

Scores = Mapping[int, np.ndarray]
"""The scores of an arm: for each seed, one score a question [Q], in the same order for all arms."""

DRAWS = 4_000
MOST_SEEDS = 200  # the largest number of further seeds that is recommended


@dataclass(frozen=True)
class Contrast:
    """The two sides of a comparison: weights of the arms, which add up to 1 on side a and to -1 on side b."""

    a: str
    b: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """The difference a - b with its 95 % interval and its verdict.

    kind: "greater" (one side is), "tie", or "undecided". `p` is the p value of no difference, adjusted for the number of
    comparisons. `more_seeds` estimates the further seeds that would settle an undecided comparison; None where no number up to
    MOST_SEEDS would, or where it is settled. Without a second seed the interval is NaN.
    """

    a: str
    b: str
    seeds: int
    difference: float
    low: float
    high: float
    p: float
    kind: Literal["greater", "tie", "undecided"]
    verdict: str
    more_seeds: int | None = None

    @property
    def decided(self) -> bool:
        """Whether the kind is not "undecided"."""
        return self.kind != "undecided"


@dataclass(frozen=True)
class _Estimate:
    """A mean difference, its standard error over seeds with degrees of freedom, and the effect of each question [Q]."""

    contrast: Contrast
    seeds: int
    mean: float
    error: float
    dof: float
    questions: np.ndarray


def pairs(arms: Sequence[str]) -> list[Contrast]:
    """The contrast of every two arms."""
    return [Contrast(a, b, {a: 1.0, b: -1.0}) for a, b in combinations(arms, 2)]


def compare(
    arms: Mapping[str, Scores], tie: float, contrasts: Sequence[Contrast] | None = None, alpha: float = ALPHA, seed: int = 0
) -> list[Comparison]:
    """A comparison for every contrast (by default every pair of arms), paired by seed and question. The chance that any
    verdict is false is at most `alpha`, half of it for differences and half for ties.

    The interval is a hierarchical bootstrap. It resamples the many questions. Resampling a few seeds would make intervals far
    too short, so it draws their mean from Student's t, the exact sampling distribution for normal seed effects, with the
    variance of `seed_variances`. The sampling noise in the spread between questions is removed from the question level, since
    the seed level has it already.

    Verdicts: "a > b" where the test excludes zero, "tie within d" where it excludes differences of `tie` or more (two one-sided
    tests, Schuirmann 1987), both after Holm's correction (1979, Scand. J. Stat. 6); else "undecided".
    Raises ValueError where two arms have different questions.
    """
    questions = {len(scores) for arm in arms.values() for scores in arm.values()}
    if len(questions) > 1:
        raise ValueError(f"the arms were asked different numbers of questions: {sorted(questions)}")
    contrasts = pairs(list(arms)) if contrasts is None else contrasts
    variances = seed_variances({arm: {s: float(x.mean()) for s, x in scores.items()} for arm, scores in arms.items()})
    differences = [_differences(arms, contrast) for contrast in contrasts]
    compared = list(zip(contrasts, differences, strict=True))
    estimates = [_estimate(contrast, d, variances) for contrast, d in compared if len(d) > 1]
    settled = iter(_settle(estimates, tie, alpha / 2, len(contrasts), seed))
    return [next(settled) if len(d) > 1 else _without_interval(contrast, d) for contrast, d in compared]


def _settle(estimates: Sequence[_Estimate], tie: float, alpha: float, family: int, seed: int) -> list[Comparison]:
    """The comparisons of estimates. The chance of a false difference is at most `alpha`, and so is that of a false tie."""
    if not estimates:
        return []
    rng, weights = np.random.default_rng(seed), _resampled_questions(len(estimates[0].questions), seed)
    by_question = (weights @ np.stack([e.questions for e in estimates], axis=1)).T
    resampled = list(zip(estimates, by_question, strict=True))
    p = holm([2 * min(_tail(e, effects, 0), _tail(e, effects, 0, above=False)) for e, effects in resampled])
    p_tie = holm([max(_tail(e, effects, -tie), _tail(e, effects, tie, above=False)) for e, effects in resampled])
    # Even quantiles in random order are draws of t without chance in the number of extreme ones.
    quantiles = (np.arange(DRAWS) + 0.5) / DRAWS
    draws = [e.mean + effects + rng.permutation(stats.t.ppf(quantiles, e.dof)) * e.error for e, effects in resampled]
    return [_verdict(*row, tie, alpha, family) for row in zip(estimates, draws, zip(p, p_tie, strict=True), strict=True)]


def _differences(arms: Mapping[str, Scores], contrast: Contrast) -> np.ndarray:
    """The weighted sum of the arms' scores [S, Q], for the seeds that all arms of the contrast have."""
    shared = sorted(set.intersection(*(set(arms[arm]) for arm in contrast.weights)))
    rows = [sum(weight * arms[arm][seed] for arm, weight in contrast.weights.items()) for seed in shared]
    return np.stack(rows) if rows else np.empty((0, 0))


@functools.lru_cache(maxsize=2)
def _resampled_questions(questions: int, seed: int) -> np.ndarray:
    """The weight of each question in each resample, float32 [DRAWS, Q]; the same resamples for all contrasts pair them."""
    counts = np.random.default_rng((seed, questions)).multinomial(questions, np.full(questions, 1 / questions), size=DRAWS)
    return (counts / questions).astype(np.float32)


def _estimate(contrast: Contrast, differences_SQ: np.ndarray, variances: Mapping[str, tuple[float, float]]) -> _Estimate:
    seeds, questions = differences_SQ.shape
    mean, by_seed, by_question = differences_SQ.mean(), differences_SQ.mean(axis=1), differences_SQ.mean(axis=0)
    residual = differences_SQ - by_seed[:, None] - by_question[None, :] + mean
    noise = (residual**2).sum() / ((seeds - 1) * max(1, questions - 1))
    spread = by_question.var(ddof=1) if questions > 1 else 0.0
    share = math.sqrt(max(0.0, 1 - noise / (seeds * spread))) if spread > 0 else 0.0
    effects = (share * (by_question - mean)).astype(np.float32)
    terms = [(weight**2 * variances[arm][0], variances[arm][1]) for arm, weight in contrast.weights.items()]
    total = sum(variance for variance, _ in terms)
    # Satterthwaite 1946, Biometrics Bulletin 2(6): the degrees of freedom of a sum of variances.
    dof = total**2 / sum(variance**2 / dof for variance, dof in terms) if total else sum(dof for _, dof in terms)
    return _Estimate(contrast, seeds, float(mean), math.sqrt(total / seeds), dof, effects)


def seed_variances(means: Mapping[str, Mapping[int, float]]) -> dict[str, tuple[float, float]]:
    """Each arm's variance between seeds, after removing effects of a seed common to all arms, and its degrees of freedom.

    The model of the means is y_as = arm + seed. The squares of its residuals add up to (1 - 1 / arms) of a variance for each
    seed but one. These variances, of very few seeds each, are shrunk towards their common value as far as the data support one
    (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3(1), section 4), which makes verdicts possible at three seeds; an arm noisier
    than the others keeps most of its own variance. The degrees of freedom are the arm's own or, where larger, at most half of
    those of all residuals, an arm's share in the difference of two.
    """
    seeds = sorted({seed for by_seed in means.values() for seed in by_seed})
    centred = {arm: {s: y - float(np.mean(list(by.values()))) for s, y in by.items()} for arm, by in means.items() if by}
    present = {seed: [by[seed] for by in centred.values() if seed in by] for seed in seeds}
    effect = {seed: float(np.mean(values)) if len(values) > 1 else 0.0 for seed, values in present.items()}
    raw = {}
    for arm, by_seed in centred.items():
        shares = [1 - 1 / len(present[seed]) for seed in by_seed if len(present[seed]) > 1]
        dof = sum(shares) * (len(by_seed) - 1) / len(by_seed)
        squares = sum((y - effect[seed]) ** 2 for seed, y in by_seed.items() if len(present[seed]) > 1)
        raw[arm] = (squares / dof, dof) if dof > 0 else (0.0, 0.0)
    pooled = sum(dof for _, dof in raw.values())
    prior_dof, prior = common_variance([v for v, _ in raw.values()], [d for _, d in raw.values()])
    return {
        arm: (_shrunk(variance, dof, prior, prior_dof), min(dof + prior_dof, max(dof, pooled / 2)))
        for arm, (variance, dof) in raw.items()
    }


def _shrunk(variance: float, dof: float, prior: float, prior_dof: float) -> float:
    if math.isinf(prior_dof):
        return prior
    return (prior_dof * prior + dof * variance) / (prior_dof + dof) if prior_dof + dof else 0.0


def common_variance(variances: Sequence[float], dofs: Sequence[float]) -> tuple[float, float]:
    """Degrees of freedom and value of the variance that many estimates share (Smyth 2004, section 6.2).

    (0, 0) for fewer than three estimates; infinite degrees, and the pooled variance, where the estimates differ no more than
    by chance.
    """
    known = [(v, d) for v, d in zip(variances, dofs, strict=True) if v > 0 and d > 0]
    if len(known) < 3:
        return 0.0, 0.0
    variance, dof = np.array(known).T
    logs = np.log(variance) - digamma(dof / 2) + np.log(dof / 2)
    excess = logs.var(ddof=1) - polygamma(1, dof / 2).mean()
    if excess <= 0:
        return math.inf, float((variance * dof).sum() / dof.sum())
    prior_dof = 2 * _inverse_trigamma(excess)
    return prior_dof, float(np.exp(logs.mean() + digamma(prior_dof / 2) - np.log(prior_dof / 2)))


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value, by Newton's method on 1/trigamma, which is nearly linear (Smyth 2004, appendix)."""
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = polygamma(1, x)
        x += trigamma * (1 - trigamma / value) / polygamma(2, x)
    return float(x)


def _tail(e: _Estimate, by_question: np.ndarray, value: float, above: bool = True) -> float:
    """The probability that the difference is at most `value`, or with `above` false, at least."""
    distance = (e.mean + by_question - value) * (1 if above else -1)
    if e.error == 0:
        return float((distance <= 0).mean())
    return float(stats.t.sf(distance / e.error, e.dof).mean())


def _verdict(
    e: _Estimate, draws: np.ndarray, p_values: tuple[float, float], tie: float, alpha: float, family: int
) -> Comparison:
    p, p_tie = p_values
    low, high = np.quantile(draws, [0.025, 0.975])
    a, b = e.contrast.a, e.contrast.b
    more, kind = None, "undecided"
    if p < alpha:
        kind, verdict = "greater", f"{a} > {b}" if e.mean > 0 else f"{b} > {a}"
    elif p_tie < alpha:
        kind, verdict = "tie", f"tie within {tie:g}"
    elif more := _seeds_to_settle(e, tie, alpha / family):
        verdict = f"undecided: about {more} more seed{'s' if more > 1 else ''}"
    else:
        verdict = "undecided: more questions are needed, not more seeds"
    return Comparison(a, b, e.seeds, e.mean, float(low), float(high), p, kind, verdict, more)


def _seeds_to_settle(e: _Estimate, tie: float, alpha: float) -> int | None:
    """The number of further seeds that would settle the comparison at the present estimates; None above MOST_SEEDS."""
    by_questions = stats.norm.isf(alpha / 2) * float(e.questions.std()) / math.sqrt(len(e.questions))
    more = np.arange(1, MOST_SEEDS + 1)
    errors = e.error * np.sqrt(e.seeds / (e.seeds + more))
    half = np.hypot(stats.t.isf(alpha / 2, e.dof * (1 + more / e.seeds)) * errors, by_questions)
    enough = (abs(e.mean) > half) | (abs(e.mean) + half < tie)
    return int(more[enough][0]) if enough.any() else None


def _without_interval(contrast: Contrast, differences: np.ndarray) -> Comparison:
    nan, seeds = math.nan, differences.shape[0]
    mean = float(differences.mean()) if differences.size else nan
    verdict = f"undecided: {seeds} shared seed{'' if seeds == 1 else 's'}, 2 are needed"
    return Comparison(contrast.a, contrast.b, seeds, mean, nan, nan, 1.0, "undecided", verdict, 2 - seeds)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number: the k-th smallest of m times m - k + 1, never falling (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, float(p_values[i]) * (len(p_values) - rank)))
        adjusted[i] = running
    return adjusted


# --- scores and planning --------------------------------------------------------------------------------------


def area_under_curve(steps: Sequence[int], scores_EQ: np.ndarray) -> np.ndarray:
    """Each question's mean score [Q] over training: trapezia between evaluations, over the steps between first and last."""
    if len(steps) == 1:
        return scores_EQ[0]
    return np.trapezoid(scores_EQ, x=np.asarray(steps, dtype=float), axis=0) / (steps[-1] - steps[0])


def interquartile_mean(scores: Sequence[float]) -> float:
    """The mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264), for scores of many tasks or runs."""
    return float(stats.trim_mean(np.asarray(scores, dtype=float), 0.25))


def detectable_difference(arms: int, seeds: int, questions: int, seed_std: float) -> float:
    """The smallest difference between two of `arms` arms that would get a verdict with a chance of 80 %.

    `seed_std` is the standard deviation of an arm's accuracy between seeds, questions aside; each question has one answer,
    which is right half the time. Differences between arms that vary from question to question, alike in all seeds, are not
    known beforehand and left out.
    Infinite with one seed.
    """
    if seeds < 2 or arms < 2:
        return math.inf
    error = math.sqrt(2 * (seed_std**2 + 0.25 / questions) / seeds)
    dof = (arms - 1) * (seeds - 1)
    return error * float(stats.t.isf(ALPHA / (arms * (arms - 1)), dof) + stats.t.isf(0.2, dof))
