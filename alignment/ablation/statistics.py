"""Paired comparisons of arms, sets of arguments trained with several seeds and asked the same
questions, with intervals and verdicts. Arrays: A arms, S seeds, Q questions, E evaluations, C
contrasts. Nothing here reads a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, NamedTuple, cast

import numpy as np
from scipy import optimize, stats
from scipy.special import nctdtrinc, ndtr, ndtri, stdtrit

from alignment.ablation.design import ALPHA
from alignment.ablation.flips import seeds_for_exact, sign_flip_p
from alignment.ablation.places import Places, arms_in_two_places, hidden_shift, unseen_share
from alignment.core.power import POWER

Scores = Mapping[int, np.ndarray]
"""The scores of an arm: for each seed, one score a question [Q], in the same order for all arms."""

MOST_SEEDS = 200  # the largest number of further seeds that is recommended
# the end of a verdict that runs which end elsewhere, unseen, could undo
LIKE_THESE = " in runs like these"
Kind = Literal["greater", "tie", "undecided"]


class Contrast(NamedTuple):
    """The two sides of a comparison: weights of the arms, which add up to 1 on side a and to -1 on
    side b."""

    a: str
    b: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """The difference a - b with its 95 % interval, NaN without a second seed, and its verdict.
    `kind`: "greater" (one side is), "tie", or "undecided". `p` is the p value of no difference,
    adjusted for the number of comparisons. `more_seeds` estimates the further seeds that would
    settle an undecided one; None if over MOST_SEEDS or settled. `arms` are both sides' arms.
    `detectable` is about the smallest difference that so many seeds and questions find with a
    chance of POWER, by variances that were measured between seeds and between questions (Cohen
    1988); NaN without a second seed. `hidden` is the largest shift of the difference that so few
    seeds may hide (`hidden_shift`): where it could undo the verdict, this is one of runs like
    these, `firm` is False, and the verdict's words say so. `p_exact` is the p value of the exact
    test by the signs of the seeds' differences (`sign_flip_p`), adjusted for the number of
    comparisons; `exact` says that it supports a winner too. Where it does not, the verdict assumes
    that a run is its arm's mean plus noise, and `exact_seeds` is about the number of seeds that
    would do without: None for a tie, which no number shows without it, and for an undecided
    comparison. `is_small` says of a winner that its difference is shown to be below the margin of a
    tie, too, which its words then say. `unseen_share` is the largest share of an arm's runs that
    may end where no seed has shown it, by this table's arms."""

    a: str
    b: str
    seeds: int
    difference: float
    low: float
    high: float
    p: float
    kind: Kind
    verdict: str
    more_seeds: int | None = None
    arms: tuple[str, ...] = ()
    detectable: float = math.nan
    hidden: float = math.nan
    firm: bool = False
    p_exact: float = math.nan
    exact: bool = False
    exact_seeds: int | None = None
    is_small: bool = False
    unseen_share: float = math.nan


@dataclass(frozen=True)
class _Estimate:
    """The mean difference of a contrast over `seeds` seeds, and the variances that its error has.

    Of one seed's difference: `own_variance` by the contrast's own seeds, with `seeds` - 1 degrees
    of freedom, and `sides_variance` by all arms', with `dof`. Of the mean: `question_variance`, by
    the choice of questions. `unstable` names its arms that vary more than the others. The mean is
    that of `differences_S`, one of each seed."""

    contrast: Contrast
    seeds: int
    mean: float
    differences_S: np.ndarray
    own_variance: float
    sides_variance: float
    dof: int
    question_variance: float
    unstable: tuple[str, ...]


@dataclass(frozen=True)
class _Rule:
    """What a verdict is held against: the width of a tie, the chance of a false one, the number of
    contrasts, by arm the places of those whose runs end in two, how far a run's score can fall and
    rise, and the bend of the learning curves."""

    tie: float
    alpha: float
    family: int
    places: Mapping[str, Places]
    room_below: Mapping[str, float]
    room_above: Mapping[str, float]
    bends: Mapping[str, tuple[float, float]]

    @property
    def unseen(self) -> float:
        """The chance that an arm's place goes unseen: all arms share that of a false verdict."""
        return self.alpha / len(self.room_below)


def pairs(arms: Sequence[str]) -> list[Contrast]:
    """The contrast of every two arms."""
    return [Contrast(a, b, {a: 1.0, b: -1.0}) for a, b in combinations(arms, 2)]


def compare(
    arms: Mapping[str, Scores],
    tie: float,
    contrasts: Sequence[Contrast] | None = None,
    alpha: float = ALPHA,
    groups: Sequence[Hashable] | None = None,
    bends: Mapping[str, tuple[float, float]] | None = None,
) -> list[Comparison]:
    """A comparison for every contrast (by default every pair of arms), paired by seed and question.
    The chance that any verdict is false is at most `alpha`, and that of a false tie at most half of
    it, of runs like those seen. `groups` labels every question; those of one label count as one
    observation. `bends` has by arm the least and the largest amount by which its mean may lie above
    what was given (0 by default), for scores that stand between evaluations. Raises ValueError
    where two arms have different questions.

    The interval is the paired t interval: from the standard deviation of the contrast's own
    differences by seed, and the variance that the choice of questions adds (`_moments`). A single
    verdict rests on its t test. One of several needs two:
    1. The contrast by itself: Student's t with its seeds less one. It bounds the errors that one
      unstable arm can cause.
    2. All contrasts together: Holm's correction (1979, Scand. J. Stat. 6) of t tests with the
      degrees of freedom of all arms.
    Neither side's variance then counts for less than all arms' common one, nor for less than its
    own seeds say, so a verdict never contradicts its interval. Unstable arms are left out of the
    common one; comparisons with and without share `alpha`.

    Verdicts: "a > b" where both tests exclude zero, "tie within d" where both exclude differences
    of `tie` or more (two one-sided tests, Schuirmann 1987), "a > b, by less than d" where they
    exclude both, else "undecided". A difference of zero
    makes no tie false, and one of `tie` makes no winner false but the wrong one, so differences are
    tested at `alpha` and each side of a tie at half of it.

    Runs may end in two places: they learn or they do not. Where an arm's do (`arms_in_two_places`),
    its comparisons are undecided, and where those of two arms do, so is every comparison that a
    place as far away, unseen, could undo. What no seed has shown is bounded by `hidden_shift`: a
    verdict that this could undo is one "in runs like these". A verdict that the bend of a curve
    could undo is undecided.

    Beside these tests, which take a run for its arm's mean plus normal noise, stands one by the
    signs of the seeds' differences (`sign_flip_p`, Holm's correction over the table). If two arms
    are the same, it errs with a chance of `alpha` at most, whatever their runs' noise; two values
    of an argument, if exchanging them changes no run's chances. It changes no verdict:
    `Comparison.exact` says whether it supports a winner."""
    _refuse_different_questions(arms)
    if contrasts is None:
        contrasts = pairs(list(arms))
    family = len(contrasts)
    estimates = _estimate_contrasts(arms, contrasts, groups)
    known = [estimate for estimate in estimates if isinstance(estimate, _Estimate)]
    # Comparisons with and without unstable arms err separately, so they halve the chance.
    both_kinds = len({bool(estimate.unstable) for estimate in known}) == 2
    alpha_of_each = alpha / 2 if both_kinds else alpha
    rule = _rule(arms, tie, alpha_of_each, family, bends or {})

    decided = iter(_decide_all(known, rule, alpha))
    comparisons = []
    for estimate in estimates:
        is_undecided = isinstance(estimate, Comparison)
        comparisons.append(estimate if is_undecided else next(decided))
    return comparisons


def _decide_all(estimates: Sequence[_Estimate], rule: _Rule, alpha: float) -> list[Comparison]:
    """The comparisons of a table's estimates, in order. `alpha` is the table's chance of a false
    verdict, whatever share of it `rule` has."""
    distances = [abs(estimate.mean) for estimate in estimates]
    p_no_difference = _p_values(estimates, distances, rule.family)
    p_no_tie = _p_values(estimates, [rule.tie - distance for distance in distances], rule.family)
    p_exact = holm([sign_flip_p(estimate.differences_S) for estimate in estimates])
    comparisons = []
    for place, estimate in enumerate(estimates):
        comparison = _decide(estimate, p_no_difference[place], p_no_tie[place], rule)
        comparisons.append(
            _with_exact_test(comparison, estimate, p_exact[place], alpha, rule.family)
        )
    return comparisons


def _with_exact_test(
    comparison: Comparison, estimate: _Estimate, p_exact: float, alpha: float, family: int
) -> Comparison:
    """The comparison with what the exact test says of it. `p_exact` is adjusted for the family. It
    is held against the whole `alpha`: all comparisons of the table have one exact test each, of
    unstable arms too."""
    exact = comparison.kind == "greater" and p_exact < alpha
    exact_seeds = None
    if comparison.kind == "greater" and not exact:
        exact_seeds = seeds_for_exact(
            estimate.mean, estimate.own_variance, estimate.seeds, alpha, family
        )
    return replace(comparison, p_exact=p_exact, exact=exact, exact_seeds=exact_seeds)


def _refuse_different_questions(arms: Mapping[str, Scores]) -> None:
    """Raise ValueError where two runs have different numbers of questions."""
    numbers = set()
    for by_seed in arms.values():
        numbers |= {len(scores) for scores in by_seed.values()}
    if len(numbers) > 1:
        raise ValueError(f"the arms were asked different numbers of questions: {sorted(numbers)}")


def half_width_of_mean(by_seed: Scores, groups: Sequence[Hashable] | None = None) -> float:
    """Half of the 95 % interval of an arm's mean, over seeds and questions as `compare` has it; 0
    where it has one seed."""
    [estimate] = _estimate_contrasts({"arm": by_seed}, [Contrast("arm", "", {"arm": 1.0})], groups)
    if isinstance(estimate, Comparison):
        return 0.0
    return _half_width(estimate)


def _half_width(estimate: _Estimate) -> float:
    """Half of the 95 % interval of the mean, by the contrast's own seeds and the questions."""
    variance_of_mean = estimate.own_variance / estimate.seeds
    return half_width(variance_of_mean, estimate.seeds - 1, estimate.question_variance)


def _estimate_contrasts(
    arms: Mapping[str, Scores], contrasts: Sequence[Contrast], groups: Sequence[Hashable] | None
) -> list[_Estimate | Comparison]:
    """An estimate for each contrast; where its arms share fewer than two seeds, a comparison
    without an interval."""
    means: dict[str, dict[int, float]] = {}
    for arm, by_seed in arms.items():
        means[arm] = {seed: float(scores.mean()) for seed, scores in by_seed.items()}
    variances = seed_variances(means)
    stable_variances = variances
    if variances.unstable:
        stable_means = {arm: means[arm] for arm in means if arm not in variances.unstable}
        stable_variances = seed_variances(stable_means)

    # contrasts whose arms have the same seeds share their moments
    @functools.cache
    def moments(seeds: tuple[int, ...]) -> _Moments:
        return _moments(arms, seeds, groups)

    estimates: list[_Estimate | Comparison] = []
    for contrast in contrasts:
        seeds = _shared_seeds(arms, contrast)
        if len(seeds) < 2:
            estimates.append(_compare_without_interval(arms, contrast, seeds))
            continue
        unstable = tuple(variances.unstable & set(contrast.weights))
        own_variances = variances if unstable else stable_variances
        estimates.append(_estimate(contrast, len(seeds), moments(seeds), own_variances, unstable))
    return estimates


def _shared_seeds(arms: Mapping[str, Scores], contrast: Contrast) -> tuple[int, ...]:
    """The seeds that all arms of the contrast have, in order."""
    seeds_of_arms = [set(arms[arm]) for arm in contrast.weights]
    return tuple(sorted(set.intersection(*seeds_of_arms)))


def _compare_without_interval(
    arms: Mapping[str, Scores], contrast: Contrast, seeds: Sequence[int]
) -> Comparison:
    """The undecided comparison of arms that share one seed, or none, which has no difference."""
    difference = math.nan
    if seeds:
        [seed] = seeds
        difference = 0.0
        for arm, weight in contrast.weights.items():
            difference += weight * float(arms[arm][seed].mean())
    plural = "" if len(seeds) == 1 else "s"
    return Comparison(
        contrast.a,
        contrast.b,
        len(seeds),
        difference,
        low=math.nan,
        high=math.nan,
        p=1.0,
        kind="undecided",
        verdict=f"undecided: {len(seeds)} shared seed{plural}, 2 are needed",
        more_seeds=2 - len(seeds),
        arms=tuple(contrast.weights),
    )


def _estimate(
    contrast: Contrast,
    seeds: int,
    moments: _Moments,
    variances: SeedVariances,
    unstable: tuple[str, ...],
) -> _Estimate:
    """The contrast's weighted sum of the arms' means, with its variances: w' C w of a covariance
    C."""
    weights_A = np.array([contrast.weights.get(arm, 0.0) for arm in moments.arms])
    own_variance = float(weights_A @ moments.between_seeds_AA @ weights_A)
    # an estimate, which chance may make negative
    question_variance = float(weights_A @ moments.between_questions_AA @ weights_A)
    return _Estimate(
        contrast,
        seeds,
        mean=float(weights_A @ moments.mean_A),
        differences_S=weights_A @ moments.by_seed_AS,
        own_variance=own_variance,
        sides_variance=variance_of_sides(variances, contrast.weights),
        dof=variances.dof,
        question_variance=max(0.0, question_variance),
        unstable=unstable,
    )


@dataclass(frozen=True)
class SeedVariances:
    """The variance of an arm's mean score between seeds: common to all arms, and an unbiased
    estimate by arm, 0 or more. `dof` is the common one's degrees of freedom. `unstable` names the
    arms whose variance is larger than the others' by more than chance."""

    common: float
    dof: int
    by_arm: Mapping[str, float]
    unstable: frozenset[str]


def seed_variances(means: Mapping[str, Mapping[int, float]]) -> SeedVariances:
    """The variances of a mean score between seeds, from the mean of each run. The model of the
    means is y_as = arm + seed + noise. The common variance is the mean square of its residuals. An
    arm's own comes from the differences of two arms, which have no seed effect and the sum of both
    variances: least squares over all pairs. An arm is unstable where an F test of its variance
    against the others' rejects at 2.5 % / arms; one table in twenty of equally noisy arms names
    one."""
    arms = [arm for arm, by_seed in means.items() if by_seed]
    y_AS = _tabulate([means[arm] for arm in arms])
    dof, squares = _fit_arms_and_seeds(y_AS)
    if dof <= 0:
        return SeedVariances(0.0, 0, dict.fromkeys(means, 0.0), frozenset())
    common = float(squares / dof)
    own_A = _variances_by_pairs(y_AS)
    is_unstable_A = _test_instability(y_AS, own_A, common, dof)

    by_arm = dict.fromkeys(means, common)
    for arm, own in zip(arms, own_A, strict=True):
        by_arm[arm] = max(0.0, float(own))
    unstable = frozenset(arms[k] for k in np.flatnonzero(is_unstable_A))
    return SeedVariances(common, dof, by_arm, unstable)


def _tabulate(means: Sequence[Mapping[int, float]]) -> np.ndarray:
    """The means by seed as a table [A, S] over all seeds in order, NaN where an arm lacks one."""
    every_seed: set[int] = set()
    for by_seed in means:
        every_seed.update(by_seed)
    seeds = sorted(every_seed)
    y_AS = np.full((len(means), len(seeds)), math.nan)
    for row, by_seed in enumerate(means):
        y_AS[row] = [by_seed.get(seed, math.nan) for seed in seeds]
    return y_AS


def _fit_arms_and_seeds(y_AS: np.ndarray) -> tuple[int, float]:
    """The degrees of freedom and the sum of squared residuals of the model y_as = arm + seed +
    noise, by least squares over the N runs that there are."""
    arms, seeds = y_AS.shape
    arm_N, seed_N = np.nonzero(~np.isnan(y_AS))
    y_N = y_AS[arm_N, seed_N]
    # a column for each arm and each seed: 1 in the rows of its runs
    design = np.hstack([np.eye(arms)[arm_N], np.eye(seeds)[seed_N]])
    effects, _, rank, _ = np.linalg.lstsq(design, y_N, rcond=None)
    residuals_N = y_N - design @ effects
    return int(len(y_N) - rank), (residuals_N**2).sum()


def _variances_by_pairs(y_AS: np.ndarray) -> np.ndarray:
    """Each arm's own variance [A], which may be negative: over the pairs P of arms, the least
    squares fit of variance(y_i - y_j) = variance_i + variance_j, weighted by its degrees of
    freedom."""
    arms = len(y_AS)
    first_P, second_P = np.triu_indices(arms, 1)
    differences_PS = y_AS[first_P] - y_AS[second_P]
    dof_P = (~np.isnan(differences_PS)).sum(axis=1) - 1
    # a pair needs two shared seeds
    known_P = dof_P > 0
    variance_P = np.nanvar(differences_PS[known_P], axis=1, ddof=1)
    in_pair_PA = np.eye(arms)[first_P[known_P]] + np.eye(arms)[second_P[known_P]]
    # least squares weight an equation by the square of its factor
    factor_P = np.sqrt(dof_P[known_P])
    return np.linalg.lstsq(in_pair_PA * factor_P[:, None], variance_P * factor_P, rcond=None)[0]


def _test_instability(y_AS: np.ndarray, own_A: np.ndarray, common: float, dof: int) -> np.ndarray:
    """Whether each arm's own variance exceeds the others' by an F test [A]: False where the arm has
    one seed, and of two arms, whose variances are equal by construction."""
    arms = len(y_AS)
    # An arm's share of the common variance's degrees of freedom; the rest are the other arms'.
    dof_A = (np.sum(~np.isnan(y_AS), axis=1) - 1) * (1 - 1 / arms)
    other_dof_A = np.maximum(dof - dof_A, 1e-9)
    # Sums of squares add up: common dof = own dof_a + others (dof - dof_a).
    others_A = (common * dof - own_A * dof_A) / other_dof_A
    others_A = np.maximum(others_A, 1e-12 * common + 1e-300)
    p_A = stats.f.sf(own_A / others_A, np.maximum(dof_A, 1e-9), other_dof_A)
    is_testable_A = (dof_A > 0) & (dof > dof_A) & (arms > 2)
    return is_testable_A & (p_A < 0.025 / arms)


def variance_of_sides(variances: SeedVariances, weights: Mapping[str, float]) -> float:
    """The variance of a seed's weighted sum over arms, in which each side of the contrast has at
    least the common variance."""
    total = 0.0
    for sign in (1, -1):
        side = {arm: weight for arm, weight in weights.items() if weight * sign > 0}
        by_arms = sum(weight**2 * variances.by_arm[arm] for arm, weight in side.items())
        by_common = variances.common * sum(weight**2 for weight in side.values())
        total += max(by_arms, by_common)
    return total


@dataclass(frozen=True)
class _Moments:
    """Means and covariances of the arms that have certain seeds: the means over seeds and questions
    [A], and of each seed [A, S]; the covariance of one seed's means between seeds [A, A]; and what
    the choice of questions adds to the covariance of the means [A, A]."""

    arms: Sequence[str]
    mean_A: np.ndarray
    by_seed_AS: np.ndarray
    between_seeds_AA: np.ndarray
    between_questions_AA: np.ndarray


def _moments(
    arms: Mapping[str, Scores], seeds: tuple[int, ...], groups: Sequence[Hashable] | None
) -> _Moments:
    """The moments of the arms that have all `seeds`.

    The spread between questions has the sampling noise of S answers a question, which the spread
    between seeds has already: it is subtracted. A mean of Q right or wrong answers moves in steps
    of 1 / Q, so two seeds may agree by rounding: a rounding error's variance, 1 / 12 of a squared
    step for the difference of two arms, is added."""
    names = [name for name, by_seed in arms.items() if set(seeds) <= set(by_seed)]
    answers_ASQ = np.array([_list_scores(arms[name], seeds) for name in names], dtype=float)
    y_ASQ = answers_ASQ
    if groups is not None:
        y_ASQ = _merge_groups(answers_ASQ, groups)
    n_arms, n_seeds, n_questions = y_ASQ.shape

    # y = arm + seed's deviation + question's deviation + noise
    mean_A = y_ASQ.mean((1, 2))
    by_seed_AS = y_ASQ.mean(2)
    by_question_AQ = y_ASQ.mean(1)
    centred_AQ = by_question_AQ - mean_A[:, None]
    noise_ASQ = y_ASQ - by_seed_AS[:, :, None] - centred_AQ[:, None, :]
    noise_AN = noise_ASQ.reshape(n_arms, -1)

    # half of 1 / 12 of a squared step for one arm: a difference has it twice
    rounding_AA = np.eye(n_arms) / (24 * answers_ASQ.shape[2] ** 2)
    between_seeds_AA = np.cov(by_seed_AS).reshape(n_arms, -1) + rounding_AA

    # covariances of a question's mean over seeds: as it is seen, less the noise in it
    question_dof = max(1, n_questions - 1)
    noise_AA = noise_AN @ noise_AN.T / ((n_seeds - 1) * question_dof)
    question_AA = centred_AQ @ centred_AQ.T / question_dof - noise_AA / n_seeds
    return _Moments(names, mean_A, by_seed_AS, between_seeds_AA, question_AA / n_questions)


def _list_scores(by_seed: Scores, seeds: Sequence[int]) -> list[np.ndarray]:
    """The scores of these seeds [S][Q], in their order."""
    return [by_seed[seed] for seed in seeds]


def _merge_groups(answers_ASQ: np.ndarray, groups: Sequence[Hashable]) -> np.ndarray:
    """One value for each group of questions [A, S, G], by which the mean over groups is that over
    questions: the run's mean, and G / Q times the sum of the group's deviations from it."""
    labels = {label: place for place, label in enumerate(dict.fromkeys(groups))}
    member_QG = np.eye(len(labels))[[labels[label] for label in groups]]
    n_questions, n_groups = member_QG.shape
    mean_AS1 = answers_ASQ.mean(axis=2, keepdims=True)
    return mean_AS1 + (answers_ASQ - mean_AS1) @ member_QG * (n_groups / n_questions)


def _p_values(
    estimates: Sequence[_Estimate], distances: Sequence[float], family: int
) -> list[float]:
    """The probability that an estimate errs by its distance, either way, by both tests of
    `compare`."""
    alone = []  # of the contrast by itself
    by_sides = []  # of all arms together, not adjusted
    for estimate, distance in zip(estimates, distances, strict=True):
        variance = estimate.own_variance
        if family > 1:
            variance = max(variance, estimate.sides_variance)
        questions = estimate.question_variance
        own_tail = tail(distance, variance / estimate.seeds, estimate.seeds - 1, questions)
        alone.append(min(1.0, 2 * own_tail))
        sides_variance = estimate.sides_variance / estimate.seeds
        by_sides.append(2 * tail(distance, sides_variance, estimate.dof, questions))
    if family == 1:
        return alone
    return [max(p, own) for p, own in zip(holm(by_sides), alone, strict=True)]


def tail(distance: float, variance: float, dof: int, questions: float) -> float:
    """The probability that an error exceeds `distance`. The error is Student's t times the root of
    `variance`, plus a normal error of variance `questions`: given the chi square of its variance, a
    normal one."""
    inflation, weights = _inverse_chi_square(dof)
    std = np.maximum(np.sqrt(variance * inflation + questions), 1e-12)
    return float(ndtr(-distance / std) @ weights)


@functools.lru_cache(maxsize=256)
def _inverse_chi_square(dof: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of dof / chi square and their weights: the trapezoidal rule in the logarithm of chi
    square."""
    lowest, highest = np.log([stats.chi2.ppf(1e-10, dof), stats.chi2.isf(1e-10, dof)])
    log = np.linspace(lowest, highest, 161)
    weights = np.exp(stats.chi2.logpdf(np.exp(log), dof) + log)
    return dof / np.exp(log), weights / weights.sum()


def half_width(variance: float, dof: int, questions: float, level: float = 0.05) -> float:
    """Half the length of the interval that `tail` leaves with a probability of `level`."""
    # the sum of both errors' half widths, which is never below that of their sum
    by_seeds = -stdtrit(dof, level / 2) * math.sqrt(variance)
    by_questions = -ndtri(level / 2) * math.sqrt(questions)
    longest = by_seeds + by_questions
    if not longest:
        return 0.0

    def excess(half: float) -> float:
        return 2 * tail(half, variance, dof, questions) - level

    return _find_root(excess, 0.0, 2 * longest, tolerance=1e-6 * longest)


def _find_root(
    function: Callable[[float], float], low: float, high: float, tolerance: float
) -> float:
    """Where a function that changes its sign between `low` and `high` is zero (Brent 1973)."""
    # scipy returns a tuple only with full_output=True
    return float(cast(float, optimize.brentq(function, low, high, xtol=tolerance)))


def _rule(
    arms: Mapping[str, Scores],
    tie: float,
    alpha: float,
    family: int,
    bends: Mapping[str, tuple[float, float]],
) -> _Rule:
    """What verdicts on these arms are held against."""
    present = {arm: by_seed for arm, by_seed in arms.items() if by_seed}
    means: dict[str, list[float]] = {}
    for arm, by_seed in present.items():
        means[arm] = [float(scores.mean()) for scores in by_seed.values()]
    floors = {arm: _sampling_variance(by_seed) for arm, by_seed in present.items()}
    least, most = _bounds_of_means(present)
    room_below = {}
    room_above = {}
    for arm, means_of_arm in means.items():
        mean = float(np.mean(means_of_arm))
        room_below[arm] = mean - least
        room_above[arm] = most - mean
    return _Rule(
        tie,
        alpha,
        family,
        places=arms_in_two_places(means, floors, tie),
        room_below=room_below,
        room_above=room_above,
        bends=bends,
    )


def _bounds_of_means(arms: Mapping[str, Scores]) -> tuple[float, float]:
    """The least and the largest mean that a run can have. Scores of questions that are all from 0
    to 1 are taken for shares, whose means stay there; other scores, and a measure of a whole run,
    which is the same for every question, have no bounds."""
    runs: list[np.ndarray] = []
    for by_seed in arms.values():
        runs += by_seed.values()
    are_shares = all(scores.min() >= 0 and scores.max() <= 1 for scores in runs)
    differ_by_question = any(scores.min() < scores.max() for scores in runs)
    if are_shares and differ_by_question:
        return 0.0, 1.0
    return -math.inf, math.inf


def _sampling_variance(by_seed: Scores) -> float:
    """The variance of a run's mean that the sampling of its answers explains, by the spread of
    answers to a question; and that of rounding, as in `_moments`."""
    y_SQ = np.array(list(by_seed.values()), dtype=float)
    seeds, questions = y_SQ.shape
    rounding = 1 / (24 * questions**2)
    if seeds < 2 or questions < 2:
        return rounding
    residuals_SQ = y_SQ - y_SQ.mean(axis=1, keepdims=True) - y_SQ.mean(axis=0) + y_SQ.mean()
    variance_of_answer = float((residuals_SQ**2).sum()) / ((seeds - 1) * (questions - 1))
    return variance_of_answer / questions + rounding


def _decide(estimate: _Estimate, p: float, p_tie: float, rule: _Rule) -> Comparison:
    """The comparison of an estimate, from its p-values: of no difference, of no tie."""
    a, b, _ = estimate.contrast
    half = _half_width(estimate)
    low = estimate.mean - half
    high = estimate.mean + half
    down = _hidden(estimate, rule, -1)
    up = _hidden(estimate, rule, 1)
    hidden = max(down, up)
    kind: Kind = "undecided"
    firm = False
    is_small = False
    more_seeds = None
    is_tie = p_tie < rule.alpha
    firm_tie = low - down > -rule.tie and high + up < rule.tie
    if p < rule.alpha:
        kind = "greater"
        first, second = (a, b) if estimate.mean > 0 else (b, a)
        verdict = f"{first} > {second}"
        hidden = down if estimate.mean > 0 else up
        firm = low > down or high < -up
        # A verdict is firm, or it is not, in all that it says.
        is_small = is_tie and (firm_tie or not firm)
        is_small = is_small and not _objection(estimate, rule, "tie", low, high)
        if is_small:
            verdict += _margin_words(rule.tie)
            hidden = max(down, up)
    elif is_tie:
        kind = "tie"
        verdict = f"tie within {rule.tie:g}"
        firm = firm_tie
    else:
        need = _need(estimate, rule)
        more_seeds = need.seeds
        verdict = f"undecided: {_unstable_reason(estimate)}{need.words}"
    objection = _objection(estimate, rule, kind, low, high)
    if kind != "undecided" and not firm:
        verdict += LIKE_THESE
    comparison = Comparison(
        a,
        b,
        estimate.seeds,
        estimate.mean,
        low,
        high,
        p,
        kind,
        verdict,
        more_seeds,
        arms=tuple(estimate.contrast.weights),
        detectable=_detectable(estimate, rule),
        hidden=hidden,
        firm=firm,
        is_small=is_small,
        unseen_share=unseen_share(estimate.seeds, rule.unseen),
    )
    return as_undecided(comparison, objection) if objection else comparison


def _margin_words(tie: float) -> str:
    """What a winner says of a difference that is shown to be below the margin of a tie."""
    return f", by less than {tie:g}"


def without_margin(comparison: Comparison, tie: float) -> Comparison:
    """The comparison without the words that its difference is below the margin `tie`."""
    verdict = comparison.verdict.replace(_margin_words(tie), "")
    return replace(comparison, verdict=verdict, is_small=False)


def as_undecided(comparison: Comparison, reason: str) -> Comparison:
    """The comparison without a verdict, for a reason that no further seed changes."""
    return replace(
        comparison,
        kind="undecided",
        verdict=f"undecided: {reason}",
        more_seeds=None,
        firm=False,
        exact=False,
        exact_seeds=None,
        is_small=False,
    )


def _unstable_reason(estimate: _Estimate) -> str:
    """The beginning of an undecided verdict that names unstable arms; "" where there are none."""
    if not estimate.unstable:
        return ""
    arms = " and ".join(sorted(estimate.unstable))
    return f"{estimate.seeds} seeds cannot bear an arm as unstable as {arms}; "


def _hidden(estimate: _Estimate, rule: _Rule, sign: int, most: float = math.inf) -> float:
    """How far places that no seed has shown may shift the contrast down (`sign` -1) or up (1): arms
    of a positive weight then fall or rise, the others move the other way, none by more than
    `most`."""
    rooms = []
    for arm, weight in estimate.contrast.weights.items():
        room = rule.room_above if weight * sign > 0 else rule.room_below
        rooms.append(abs(weight) * min(most, room[arm]))
    return hidden_shift(rooms, estimate.seeds, rule.unseen)


def _objection(estimate: _Estimate, rule: _Rule, kind: Kind, low: float, high: float) -> str:
    """Why a verdict of this kind cannot be, or an undecided comparison needs no more seeds; ""
    where nothing is against it."""
    in_two_places = [arm for arm in estimate.contrast.weights if arm in rule.places]
    if in_two_places:
        reasons = [f"runs of {arm} end in two places, {rule.places[arm]}" for arm in in_two_places]
        return "; ".join(reasons)
    if kind == "undecided":
        return ""
    limit = rule.tie if kind == "tie" else 0.0

    bend_low, bend_high = _bend_of_contrast(estimate.contrast, rule.bends)
    if not _stands(kind, low + bend_low, high + bend_high, limit):
        shift = _describe_larger(bend_low, bend_high)
        reason = f"a bend of the learning curves between evaluations may shift it by {shift}"
        return f"evaluate more often, on more questions: {reason}"

    if len(rule.places) > 1:
        gap = max(places.gap for places in rule.places.values())
        down = _hidden(estimate, rule, -1, gap)
        up = _hidden(estimate, rule, 1, gap)
        if not _stands(kind, low - down, high + up, limit):
            reason = f"{estimate.seeds} seeds may have missed those of others"
            return f"runs of {' and '.join(rule.places)} end in two places, and {reason}"
    return ""


def _bend_of_contrast(
    contrast: Contrast, bends: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """The least and the largest amount by which the contrast may lie above what was measured."""
    least = 0.0
    most = 0.0
    for arm, weight in contrast.weights.items():
        arm_low, arm_high = bends.get(arm, (0.0, 0.0))
        least += min(weight * arm_low, weight * arm_high)
        most += max(weight * arm_low, weight * arm_high)
    return least, most


def _stands(kind: Kind, low: float, high: float, limit: float) -> bool:
    """Whether a verdict of this kind is that of all differences between `low` and `high`."""
    if kind == "greater":
        return low > 0 or high < 0
    return -limit < low and high < limit


def _describe_larger(low: float, high: float) -> str:
    """The larger of two shifts, in words."""
    most = max(-low, high)
    return f"up to {most:.2g}" if math.isfinite(most) else "an unknown amount"


class _Need(NamedTuple):
    """What would settle a comparison: further seeds, None above MOST_SEEDS, and that in words."""

    seeds: int | None
    words: str


def _need(estimate: _Estimate, rule: _Rule) -> _Need:
    """What would settle the comparison at the present estimates."""
    more = np.arange(1, MOST_SEEDS + 1)
    adjusted_alpha = rule.alpha / rule.family
    # half the length of the interval after so many more seeds, by each test of a verdict
    quantile_alone = _later_quantiles(estimate.seeds - 1, estimate.seeds, rule.alpha)
    if rule.family == 1:
        by_seeds = quantile_alone * math.sqrt(estimate.own_variance)
    else:
        quantile_together = _later_quantiles(estimate.dof, estimate.seeds, adjusted_alpha)
        together = quantile_together * math.sqrt(estimate.sides_variance)
        largest = max(estimate.own_variance, estimate.sides_variance)
        by_seeds = np.maximum(together, quantile_alone * math.sqrt(largest))
    errors = by_seeds / np.sqrt(estimate.seeds + more)
    by_questions = -ndtri(adjusted_alpha / 2) * math.sqrt(estimate.question_variance)
    # the last: with any number of seeds
    half = np.append(np.hypot(errors, by_questions), by_questions)
    is_enough = (abs(estimate.mean) > half) | (abs(estimate.mean) + half < rule.tie)
    if not is_enough.any():
        return _Need(None, "more questions are needed, not more seeds")
    first = int(is_enough.argmax()) + 1
    if first > MOST_SEEDS:
        return _Need(None, f"more than {MOST_SEEDS} more seeds")
    plural = "s" if first > 1 else ""
    return _Need(first, f"about {first} more seed{plural}")


@functools.lru_cache(maxsize=256)  # It takes longer than all else that a comparison computes.
def _later_quantiles(dof: float, seeds: int, level: float) -> np.ndarray:
    """Student's t that is exceeded with a probability of `level`, either way, after 1 to MOST_SEEDS
    seeds more than `seeds` of `dof` degrees of freedom, which grow with the seeds."""
    more = np.arange(1, MOST_SEEDS + 1)
    return -stdtrit(dof * (1 + more / (seeds - 1)), level / 2)


def _detectable(estimate: _Estimate, rule: _Rule) -> float:
    """`Comparison.detectable`: of each test of a verdict the noncentrality of t at that chance,
    times the error of the mean."""

    def by_seeds(variance: float, dof: int, level: float) -> float:
        noncentrality = nctdtrinc(dof, 1 - POWER, -stdtrit(dof, level / 2))
        return noncentrality * math.sqrt(variance / estimate.seeds)

    adjusted_alpha = rule.alpha / rule.family
    if rule.family == 1:
        smallest = by_seeds(estimate.own_variance, estimate.seeds - 1, rule.alpha)
    else:
        together = by_seeds(estimate.sides_variance, estimate.dof, adjusted_alpha)
        largest = max(estimate.own_variance, estimate.sides_variance)
        smallest = max(together, by_seeds(largest, estimate.seeds - 1, rule.alpha))
    quantiles = ndtri(POWER) - ndtri(adjusted_alpha / 2)
    return math.hypot(smallest, quantiles * math.sqrt(estimate.question_variance))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number: the k-th smallest of m times m - k + 1, never falling
    (Holm 1979)."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(np.minimum(1, p[order] * factors))
    return adjusted.tolist()


def area_under_curve(steps: Sequence[float], scores_EQ: np.ndarray) -> np.ndarray:
    """Each question's mean score [Q] over training: trapezia between evaluations, over the steps
    between first and last."""
    if len(steps) == 1:
        return scores_EQ[0]
    area_Q = np.trapezoid(scores_EQ, x=np.asarray(steps, dtype=float), axis=0)
    return np.asarray(area_Q / (steps[-1] - steps[0]))


def interquartile_mean(scores: Sequence[float]) -> float:
    """The mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264), for scores of many tasks
    or runs."""
    return float(stats.trim_mean(np.asarray(scores, dtype=float), 0.25))


DRAWS = 4_000  # of simulated tables, from which a design's power is counted


class Power(NamedTuple):
    """The smallest difference found with a chance of POWER, infinite with one seed; the chance
    that none is called a tie."""

    difference: float
    tie: float


@dataclass(frozen=True)
class PlannedContrast:
    """A contrast with these weights of all arms, one of `family` contrasts, which is decided after
    each number of seeds in `looks`; these share the error rate `alpha`. Of every arm's mean, `std`
    is the standard deviation of one seed (`score_std`), and `question_std` that by the choice of
    questions, whatever the seeds: 0 without effects of arms on single questions."""

    weights_A: Sequence[float]
    family: int
    looks: range
    std: float
    tie: float
    question_std: float = 0.0
    alpha: float = ALPHA


def power(planned: PlannedContrast) -> Power:
    """The power of a contrast. A look at one seed shows nothing, but has its share of `alpha`."""
    weights_A = planned.weights_A
    family = planned.family
    looks = planned.looks
    std = planned.std
    tie = planned.tie
    if looks[-1] < 2 or family < 1:
        return Power(math.inf, 0.0)
    weights = np.array(weights_A)
    alpha_of_look = planned.alpha / len(looks)
    looks = range(max(looks[0], 2), looks.stop)
    rng = np.random.default_rng(0)
    scores_NAS = rng.normal(scale=std, size=(DRAWS, len(weights_A), looks[-1]))
    analyses = []
    for seeds in looks:
        tables = ScoredTables(scores_NAS[:, :, :seeds], weights, family, alpha_of_look)
        analyses.append(halves_of_tables(tables))
    # The choice of questions shifts every look alike, by an error that verdicts allow for.
    by_questions = planned.question_std * float(np.linalg.norm(weights))
    shift_N = by_questions * rng.normal(size=DRAWS)
    errors_LN = np.array([analysis.error_N for analysis in analyses]) + shift_N
    halves_LN = np.array([analysis.half_N for analysis in analyses])
    halves_LN = np.hypot(halves_LN, -ndtri(alpha_of_look / family / 2) * by_questions)

    def shortfall(difference: float) -> float:
        is_shown_N = (errors_LN + difference > halves_LN).any(axis=0)
        return float(is_shown_N.mean()) - POWER

    largest = float(halves_LN.max() - errors_LN.min())
    smallest = _find_root(shortfall, 0.0, largest, tolerance=1e-6)
    is_tie_N = (np.abs(errors_LN) + halves_LN < tie).any(axis=0)
    return Power(smallest, float(is_tie_N.mean()))


class ScoredTables(NamedTuple):
    """N simulated tables, each with a mean score of every arm and seed [N, A, S], a contrast's
    weights of the arms [A], the number of contrasts in its table, and the chance of a false
    verdict."""

    scores_NAS: np.ndarray
    weights_A: np.ndarray
    family: int
    alpha: float


class AnalysedTables(NamedTuple):
    """Of N simulated tables: the contrast's error (of equal arms its mean), and half of its
    interval, which a difference must exceed for a verdict."""

    error_N: np.ndarray
    half_N: np.ndarray


def halves_of_tables(tables: ScoredTables) -> AnalysedTables:
    """Analyse simulated tables by the rule of `compare`, Holm's first step of its correction."""
    scores_NAS, weights_A, family, alpha = tables
    arms, seeds = scores_NAS.shape[1:]
    contrast_NS = np.einsum("nas,a->ns", scores_NAS, weights_A)
    error_N = contrast_NS.mean(1)
    own_N = contrast_NS.var(1, ddof=1)
    quantile_alone = stats.t.isf(alpha / 2, seeds - 1)
    if family == 1:
        return AnalysedTables(error_N, quantile_alone * np.sqrt(own_N / seeds))
    dof = (arms - 1) * (seeds - 1)
    sides_N = _simulated_variance_of_sides(scores_NAS, weights_A)
    together_N = stats.t.isf(alpha / family / 2, dof) * np.sqrt(sides_N / seeds)
    alone_N = quantile_alone * np.sqrt(np.maximum(sides_N, own_N) / seeds)
    return AnalysedTables(error_N, np.maximum(together_N, alone_N))


def _simulated_variance_of_sides(scores_NAS: np.ndarray, weights_A: np.ndarray) -> np.ndarray:
    """`variance_of_sides` of N tables [N] without a gap, for which `seed_variances` has a closed
    form: with the mean square m_a of an arm's residuals over S - 1, an arm's own variance is (A m_a
    - common) / (A - 2)."""
    arms, seeds = scores_NAS.shape[1:]
    residuals = scores_NAS - scores_NAS.mean(1, keepdims=True) - scores_NAS.mean(2, keepdims=True)
    residuals = residuals + scores_NAS.mean((1, 2), keepdims=True)
    squares_NA = (residuals**2).sum(2)
    common_N1 = squares_NA.sum(1, keepdims=True) / ((arms - 1) * (seeds - 1))
    own_NA = np.broadcast_to(common_N1, squares_NA.shape)
    if arms > 2:
        own_NA = np.maximum(0, (arms * squares_NA / (seeds - 1) - common_N1) / (arms - 2))
    squared_weights_2A = np.stack([np.clip(weights_A, 0, None), np.clip(weights_A, None, 0)]) ** 2
    by_arms_N2 = own_NA @ squared_weights_2A.T
    by_common_N2 = common_N1 * squared_weights_2A.sum(1)
    return np.maximum(by_arms_N2, by_common_N2).sum(1)
