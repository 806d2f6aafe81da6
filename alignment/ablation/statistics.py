"""Which choice made the difference: paired comparisons of arms over training seeds and questions, ending in verdicts.

An arm is a set of arguments that was trained with several seeds; each run answers the same questions. Arrays: S seeds,
Q questions, E evaluations. Nothing here reads a file.
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
"""An arm's outcome: for each seed the score of every question [Q], in one order for all arms."""

DRAWS = 4_000
MOST_SEEDS = 200  # beyond which no number of seeds is recommended


@dataclass(frozen=True)
class Contrast:
    """What is compared with what: the weights of the arms on either side, which add up to 1 and -1."""

    a: str
    b: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """Two sides: the difference a - b with its 95 % interval, and what may be said of it.

    kind: "greater" (one side is), "tie", or "undecided". `p` is of no difference, adjusted for the number of comparisons.
    `more_seeds` is about how many further seeds would settle it, None where it is settled or where no number would.
    Without a second seed there is no interval.
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
        """Whether the verdict is one."""
        return self.kind != "undecided"


@dataclass(frozen=True)
class _Estimate:
    """A mean difference, the standard error that seeds give it with its degrees of freedom, and what each question adds [Q]."""

    contrast: Contrast
    seeds: int
    mean: float
    error: float
    dof: float
    questions: np.ndarray


def pairs(arms: Sequence[str]) -> list[Contrast]:
    """Every two arms."""
    return [Contrast(a, b, {a: 1.0, b: -1.0}) for a, b in combinations(arms, 2)]


def compare(
    arms: Mapping[str, Scores], tie: float, contrasts: Sequence[Contrast] | None = None, alpha: float = ALPHA, seed: int = 0
) -> list[Comparison]:
    """Every contrast (by default every pair of arms), paired by seed and question. The chance that any verdict is false is
    at most `alpha`, half of it for differences and half for ties.

    The interval is a hierarchical bootstrap. Questions, of which there are many, are resampled. Of seeds there are few, and
    resampling three of them gives intervals that are far too short; their mean is drawn from Student's t instead, the
    exact sampling distribution for normal seed effects (`seed_variances` says with which variance). The part of the
    questions' spread that is sampling noise is taken out of the question level, where it would count twice.

    Verdicts: "a > b" where zero is excluded, "tie within d" where a difference of `tie` or more is (two one-sided tests,
    Schuirmann 1987), each after Holm's correction (1979, Scand. J. Stat. 6); else "undecided".
    Raises ValueError where two arms have different questions.
    """
    questions = {len(scores) for arm in arms.values() for scores in arm.values()}
    if len(questions) > 1:
        raise ValueError(f"the arms were asked different numbers of questions: {sorted(questions)}")
    contrasts = pairs(list(arms)) if contrasts is None else contrasts
    variances = seed_variances({arm: {s: float(x.mean()) for s, x in scores.items()} for arm, scores in arms.items()})
    differences = [_differences(arms, contrast) for contrast in contrasts]
    told = [d.shape[0] > 1 for d in differences]
    estimates = [_estimate(c, d, variances) for c, d, known in zip(contrasts, differences, told, strict=True) if known]
    settled = iter(_settle(estimates, tie, alpha / 2, len(contrasts), seed))
    return [next(settled) if known else _unknown(c, d) for c, d, known in zip(contrasts, differences, told, strict=True)]


def _settle(estimates: Sequence[_Estimate], tie: float, alpha: float, family: int, seed: int) -> list[Comparison]:
    """The verdicts, each kind of them false with a chance of at most `alpha`."""
    if not estimates:
        return []
    rng, weights = np.random.default_rng(seed), _resampled_questions(len(estimates[0].questions), seed)
    by_question = (weights @ np.stack([e.questions for e in estimates], axis=1)).T
    each = list(zip(estimates, by_question, strict=True))
    p = holm([2 * min(_tail(e, drawn, 0), _tail(e, drawn, 0, above=False)) for e, drawn in each])
    p_tie = holm([max(_tail(e, drawn, -tie), _tail(e, drawn, tie, above=False)) for e, drawn in each])
    # Even quantiles in random order: draws of t without the chance in how many of them are far out.
    evenly = (np.arange(DRAWS) + 0.5) / DRAWS
    draws = [e.mean + drawn + rng.permutation(stats.t.ppf(evenly, e.dof)) * e.error for e, drawn in each]
    return [_verdict(*found, tie, alpha, family) for found in zip(estimates, draws, p, p_tie, strict=True)]


def _differences(arms: Mapping[str, Scores], contrast: Contrast) -> np.ndarray:
    """The weighted sum of the arms [S, Q] over the seeds that all of them have."""
    shared = sorted(set.intersection(*(set(arms[arm]) for arm in contrast.weights)))
    rows = [sum(weight * arms[arm][seed] for arm, weight in contrast.weights.items()) for seed in shared]
    return np.stack(rows) if rows else np.empty((0, 0))


@functools.lru_cache(maxsize=2)
def _resampled_questions(questions: int, seed: int) -> np.ndarray:
    """[DRAWS, Q]: how much each question counts in each resample, as float32 (one sample for all pairs, which pairs them)."""
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
    """Each arm's variance between seeds, once what a seed does to all arms is taken away, with its degrees of freedom.

    Arms with seed means y_as: the residuals of y_as = arm + seed, whose squares add up to (1 - 1 / arms) of a variance for
    each seed but one. These variances, of very few seeds each, are shrunk towards their common value as far as the data say
    that there is one (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3(1), section 4), which is what makes verdicts possible at
    three seeds; an arm that is noisier than the others keeps most of its own variance. The degrees of freedom stay below
    those that all residuals together have, for an arm's share of a difference between two.
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

    (0, 0) where there are too few estimates to tell; infinite degrees, and the pooled variance, where they differ no more
    than chance has it.
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
    """The chance that the difference lies on the other side of `value`: below it, or with `above` false, above it."""
    distance = (e.mean + by_question - value) * (1 if above else -1)
    if e.error == 0:
        return float((distance <= 0).mean())
    return float(stats.t.sf(distance / e.error, e.dof).mean())


def _verdict(e: _Estimate, draws: np.ndarray, p: float, p_tie: float, tie: float, alpha: float, family: int) -> Comparison:
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
    """How many more seeds would settle the comparison if the estimates stayed as they are."""
    by_questions = stats.norm.isf(alpha / 2) * float(e.questions.std()) / math.sqrt(len(e.questions))
    more = np.arange(1, MOST_SEEDS + 1)
    errors = e.error * np.sqrt(e.seeds / (e.seeds + more))
    half = np.hypot(stats.t.isf(alpha / 2, e.dof * (1 + more / e.seeds)) * errors, by_questions)
    enough = (abs(e.mean) > half) | (abs(e.mean) + half < tie)
    return int(more[enough][0]) if enough.any() else None


def _unknown(contrast: Contrast, differences: np.ndarray) -> Comparison:
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


# --- what is compared -----------------------------------------------------------------------------------------


def area_under_curve(steps: Sequence[int], scores_EQ: np.ndarray) -> np.ndarray:
    """Each question's mean score [Q] over training: trapezia between evaluations, over the steps between first and last."""
    if len(steps) == 1:
        return scores_EQ[0]
    return np.trapezoid(scores_EQ, x=np.asarray(steps, dtype=float), axis=0) / (steps[-1] - steps[0])


def interquartile_mean(scores: Sequence[float]) -> float:
    """The mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264), for scores of many tasks or runs."""
    return float(stats.trim_mean(np.asarray(scores, dtype=float), 0.25))


def detectable_difference(
    arms: int, seeds: int, questions: int, seed_std: float, accuracy: float = 0.5, alpha: float = ALPHA, power: float = 0.8
) -> float:
    """The smallest difference between two of `arms` arms that would get a verdict with a chance of `power`.

    `seed_std` is the standard deviation of an arm's accuracy between seeds, questions aside; each question is answered
    once. What arms differ in from question to question, in all seeds alike, comes on top, and is not known beforehand.
    Infinite with one seed.
    """
    if seeds < 2 or arms < 2:
        return math.inf
    error = math.sqrt(2 * (seed_std**2 + accuracy * (1 - accuracy) / questions) / seeds)
    dof = (arms - 1) * (seeds - 1)
    return error * float(stats.t.isf(alpha / (arms * (arms - 1)), dof) + stats.t.isf(1 - power, dof))
