"""Paired comparisons of arms, sets of arguments trained with several seeds and asked the same
questions, with intervals and verdicts. Arrays: A arms, S seeds, Q questions, E evaluations, C
contrasts. Nothing here reads a file."""

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize, stats
from scipy.special import nctdtrinc, ndtr, ndtri, stdtrit

from alignment.ablation.design import ALPHA
from alignment.ablation.places import Places, arms_in_two_places, hidden_shift
from alignment.core.power import CHANCE

Scores = Mapping[int, np.ndarray]
"""The scores of an arm: for each seed, one score a question [Q], in the same order for all arms."""

MOST_SEEDS = 200  # the largest number of further seeds that is recommended
LIKE_THESE = (  # the end of a verdict that runs which end elsewhere, unseen, could undo
    " in runs like these"
)


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
    chance of CHANCE, by variances that were measured between seeds and between questions (Cohen
    1988); NaN without a second seed. `hidden` is the largest shift of the difference that so few
    seeds may hide (`hidden_shift`): where it could undo the verdict, this is one of runs like
    these, `firm` is False, and the verdict's words say so."""

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
    arms: tuple[str, ...] = ()
    detectable: float = math.nan
    hidden: float = math.nan
    firm: bool = False


@dataclass(frozen=True)
class _Estimate:
    """A mean difference; a seed's variance by its own seeds, and by all arms' (`dof`); and the
    mean's by the questions."""

    contrast: Contrast
    seeds: int
    mean: float
    own: float
    by_sides: float
    dof: int
    questions: float
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
    of `tie` or more (two one-sided tests, Schuirmann 1987), else "undecided". A difference of zero
    makes no tie false, and one of `tie` makes no winner false but the wrong one, so differences are
    tested at `alpha` and each side of a tie at half of it.

    Runs may end in two places: they learn or they do not. Where an arm's do (`arms_in_two_places`),
    its comparisons are undecided, and where those of two arms do, so is every comparison that a
    place as far away, unseen, could undo. What no seed has shown is bounded by `hidden_shift`: a
    verdict that this could undo is one "in runs like these". A verdict that the bend of a curve
    could undo is undecided."""
    if len(questions := {len(scores) for arm in arms.values() for scores in arm.values()}) > 1:
        raise ValueError(f"the arms were asked different numbers of questions: {sorted(questions)}")
    contrasts = pairs(list(arms)) if contrasts is None else contrasts
    estimates = list(_estimates(arms, contrasts, groups))
    known, family = [e for e in estimates if isinstance(e, _Estimate)], len(contrasts)
    # comparisons with and without unstable arms err separately
    if len({bool(e.unstable) for e in known}) == 2:
        alpha /= 2
    p = _p_values(known, [abs(e.mean) for e in known], family)
    p_tie = _p_values(known, [tie - abs(e.mean) for e in known], family)
    rule = _rule(arms, tie, alpha, family, bends or {})
    settled = (_verdict(e, *p_values, rule) for e, *p_values in zip(known, p, p_tie, strict=True))
    return [next(settled) if isinstance(e, _Estimate) else e for e in estimates]


def half_width_of_mean(by_seed: Scores, groups: Sequence[Hashable] | None = None) -> float:
    """Half of the 95 % interval of an arm's mean, over seeds and questions as `compare` has it; 0
    where it has one seed."""
    [e] = _estimates({"arm": by_seed}, [Contrast("arm", "", {"arm": 1.0})], groups)
    return (
        half_width(e.own / e.seeds, e.seeds - 1, e.questions) if isinstance(e, _Estimate) else 0.0
    )


def _estimates(
    arms: Mapping[str, Scores], contrasts: Sequence[Contrast], groups: Sequence[Hashable] | None
):
    """An estimate for each contrast; where its arms share fewer than two seeds, a comparison
    without an interval."""
    means = {
        arm: {seed: float(x.mean()) for seed, x in by_seed.items()} for arm, by_seed in arms.items()
    }
    variances = seed_variances(means)
    stable = {arm: by_seed for arm, by_seed in means.items() if arm not in variances.unstable}
    of_stable = seed_variances(stable) if variances.unstable else variances
    moments = functools.lru_cache(maxsize=None)(lambda seeds: _moments(arms, seeds, groups))
    for contrast in contrasts:
        seeds = tuple(sorted(set.intersection(*(set(arms[arm]) for arm in contrast.weights))))
        if len(seeds) < 2:
            mean = (
                sum(w * float(arms[arm][seeds[0]].mean()) for arm, w in contrast.weights.items())
                if seeds
                else math.nan
            )
            verdict = (
                f"undecided: {len(seeds)} shared seed{'' if len(seeds) == 1 else 's'}, 2 are needed"
            )
            unknown = (math.nan, math.nan, 1.0, "undecided", verdict, 2 - len(seeds))
            yield Comparison(
                contrast.a, contrast.b, len(seeds), mean, *unknown, tuple(contrast.weights)
            )
            continue
        unstable = tuple(variances.unstable & set(contrast.weights))
        names, mean_A, between_seeds_AA, between_questions_AA = moments(seeds)
        weights_A = np.array([contrast.weights.get(name, 0.0) for name in names])
        chosen = variances if unstable else of_stable
        own, questions = (
            float(weights_A @ cov_AA @ weights_A)
            for cov_AA in (between_seeds_AA, between_questions_AA)
        )
        mean, by_sides = float(weights_A @ mean_A), variance_of_sides(chosen, contrast.weights)
        yield _Estimate(
            contrast, len(seeds), mean, own, by_sides, chosen.dof, max(0.0, questions), unstable
        )


@dataclass(frozen=True)
class SeedVariances:
    """The variance of an arm's mean score between seeds: common to all arms, and an unbiased
    estimate by arm, 0 or more. `unstable` names the arms whose variance is larger than the others'
    by more than chance."""

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
    names, seeds = (
        [arm for arm in means if means[arm]],
        sorted({seed for by_seed in means.values() for seed in by_seed}),
    )
    y_AS = np.array([[means[arm].get(seed, math.nan) for seed in seeds] for arm in names]).reshape(
        len(names), len(seeds)
    )
    arm_N, seed_N = np.nonzero(~np.isnan(y_AS))
    design = np.hstack([np.eye(len(names))[arm_N], np.eye(len(seeds))[seed_N]])
    fit, _, rank, _ = np.linalg.lstsq(design, y_AS[arm_N, seed_N], rcond=None)
    dof = int(len(arm_N) - rank)
    if dof <= 0:
        return SeedVariances(0.0, 0, dict.fromkeys(means, 0.0), frozenset())
    common = float(((y_AS[arm_N, seed_N] - design @ fit) ** 2).sum() / dof)
    i, j = np.triu_indices(len(names), 1)
    differences = y_AS[i] - y_AS[j]
    freedom = (~np.isnan(differences)).sum(axis=1) - 1
    i, j, differences, freedom = (x[freedom > 0] for x in (i, j, differences, freedom))
    root = np.sqrt(freedom)
    sums = (np.eye(len(names))[i] + np.eye(len(names))[j]) * root[:, None]
    own_A = np.linalg.lstsq(sums, np.nanvar(differences, axis=1, ddof=1) * root, rcond=None)[0]
    # Each arm's share of the degrees of freedom of the common variance.
    share_A = (np.sum(~np.isnan(y_AS), axis=1) - 1) * (1 - 1 / len(names))
    rest_A = np.maximum(dof - share_A, 1e-9)
    others_A = np.maximum((common * dof - own_A * share_A) / rest_A, 1e-12 * common + 1e-300)
    known_A = (share_A > 0) & (dof > share_A) & (len(names) > 2)
    p_A = stats.f.sf(own_A / others_A, np.maximum(share_A, 1e-9), rest_A)
    unstable = np.flatnonzero(known_A & (p_A < 0.025 / len(names)))
    by_arm = {name: max(0.0, float(own)) for name, own in zip(names, own_A, strict=True)}
    return SeedVariances(
        common, dof, dict.fromkeys(means, common) | by_arm, frozenset(names[k] for k in unstable)
    )


def variance_of_sides(variances: SeedVariances, weights: Mapping[str, float]) -> float:
    """The variance of a seed's weighted sum over arms, in which each side of the contrast has at
    least the common variance."""
    sides = [[(w**2, arm) for arm, w in weights.items() if w * sign > 0] for sign in (1, -1)]
    return sum(
        max(sum(w * variances.by_arm[arm] for w, arm in s), variances.common * sum(w for w, _ in s))
        for s in sides
    )


def _moments(arms: Mapping[str, Scores], seeds: tuple[int, ...], groups: Sequence[Hashable] | None):
    """The arms that have all `seeds`, their means [A], and two covariances [A, A]: of their means
    between seeds, and what the choice of questions adds to the covariance of their means over seeds
    and questions. The spread between questions has the sampling noise of S answers a question,
    which the spread between seeds has already: it is subtracted. A mean of Q right or wrong answers
    moves in steps of 1 / Q, so two seeds may agree by rounding: a rounding error's variance, 1 / 12
    of a squared step for the difference of two arms, is added."""
    names = [name for name, by_seed in arms.items() if set(seeds) <= set(by_seed)]
    answers_ASQ = np.array([[arms[name][seed] for seed in seeds] for name in names], dtype=float)
    y_ASQ = answers_ASQ
    # one value a group of questions, with the mean over groups that the questions have
    if groups is not None:
        places = {label: place for place, label in enumerate(dict.fromkeys(groups))}
        member_QG = np.eye(len(places))[[places[label] for label in groups]]
        mean = answers_ASQ.mean(axis=2, keepdims=True)
        y_ASQ = mean + (answers_ASQ - mean) @ member_QG * (member_QG.shape[1] / member_QG.shape[0])
    count, questions = y_ASQ.shape[1:]
    mean_A, by_seed_AS, by_question_AQ = y_ASQ.mean((1, 2)), y_ASQ.mean(2), y_ASQ.mean(1)
    centred_AQ = by_question_AQ - mean_A[:, None]
    residuals = (y_ASQ - by_seed_AS[:, :, None] - centred_AQ[:, None, :]).reshape(len(names), -1)
    rounding_AA = np.eye(len(names)) / (24 * answers_ASQ.shape[2] ** 2)
    between_seeds_AA = np.cov(by_seed_AS).reshape(len(names), -1) + rounding_AA
    freedom = max(1, questions - 1)
    noise_AA = residuals @ residuals.T / ((count - 1) * freedom)
    return (
        names,
        mean_A,
        between_seeds_AA,
        (centred_AQ @ centred_AQ.T / freedom - noise_AA / count) / questions,
    )


def _p_values(
    estimates: Sequence[_Estimate], distances: Sequence[float], family: int
) -> list[float]:
    """The probability that an estimate errs by its distance, either way, by both tests of
    `compare`."""
    rows = list(zip(distances, estimates, strict=True))
    if family == 1:
        return [min(1.0, 2 * tail(d, e.own / e.seeds, e.seeds - 1, e.questions)) for d, e in rows]
    together = holm([2 * tail(d, e.by_sides / e.seeds, e.dof, e.questions) for d, e in rows])
    alone = [
        2 * tail(d, max(e.own, e.by_sides) / e.seeds, e.seeds - 1, e.questions) for d, e in rows
    ]
    return [max(p, min(1.0, own)) for p, own in zip(together, alone, strict=True)]


def tail(distance: float, variance: float, dof: int, questions: float) -> float:
    """The probability that an error exceeds `distance`. The error is Student's t times the root of
    `variance`, plus a normal error of variance `questions`: given the chi square of its variance, a
    normal one."""
    inflation, weights = _inverse_chi_square(dof)
    return float(
        ndtr(-distance / np.maximum(np.sqrt(variance * inflation + questions), 1e-12)) @ weights
    )


@functools.lru_cache(maxsize=256)
def _inverse_chi_square(dof: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of dof / chi square and their weights: the trapezoidal rule in the logarithm of chi
    square."""
    log = np.linspace(*np.log([stats.chi2.ppf(1e-10, dof), stats.chi2.isf(1e-10, dof)]), 161)
    weights = np.exp(stats.chi2.logpdf(np.exp(log), dof) + log)
    return dof / np.exp(log), weights / weights.sum()


def half_width(variance: float, dof: int, questions: float, level: float = 0.05) -> float:
    """Half the length of the interval that `tail` leaves with a probability of `level`."""
    longest = stats.t.isf(level / 2, dof) * math.sqrt(variance) - ndtri(level / 2) * math.sqrt(
        questions
    )

    def excess(half):
        return 2 * tail(half, variance, dof, questions) - level

    return float(optimize.brentq(excess, 0.0, 2 * longest, xtol=1e-6 * longest)) if longest else 0.0


def _rule(
    arms: Mapping[str, Scores],
    tie: float,
    alpha: float,
    family: int,
    bends: Mapping[str, tuple[float, float]],
) -> _Rule:
    """What verdicts on these arms are held against. Scores of questions that are all from 0 to 1
    are taken for shares, whose means stay there; other scores, and a measure of a whole run, which
    is the same for every question, have no bounds."""
    present = {arm: by_seed for arm, by_seed in arms.items() if by_seed}
    means = {
        arm: [float(scores.mean()) for scores in by_seed.values()]
        for arm, by_seed in present.items()
    }
    every = [scores for by_seed in present.values() for scores in by_seed.values()]
    are_shares = all(scores.min() >= 0 and scores.max() <= 1 for scores in every)
    of_questions = any(scores.min() < scores.max() for scores in every)
    bounds = (0.0, 1.0) if are_shares and of_questions else (-math.inf, math.inf)
    floors = {arm: _sampling_variance(by_seed) for arm, by_seed in present.items()}
    places = arms_in_two_places(means, floors, tie)
    below = {arm: float(np.mean(of_arm)) - bounds[0] for arm, of_arm in means.items()}
    above = {arm: bounds[1] - float(np.mean(of_arm)) for arm, of_arm in means.items()}
    return _Rule(tie, alpha, family, places, below, above, bends)


def _sampling_variance(by_seed: Scores) -> float:
    """The variance of a run's mean that the sampling of its answers explains, by the spread of
    answers to a question; and that of rounding, as in `_moments`."""
    y_SQ = np.array(list(by_seed.values()), dtype=float)
    seeds, questions = y_SQ.shape
    rounding = 1 / (24 * questions**2)
    if seeds < 2 or questions < 2:
        return rounding
    residuals_SQ = y_SQ - y_SQ.mean(axis=1, keepdims=True) - y_SQ.mean(axis=0) + y_SQ.mean()
    return float((residuals_SQ**2).sum()) / ((seeds - 1) * (questions - 1)) / questions + rounding


def _verdict(e: _Estimate, p: float, p_tie: float, rule: _Rule) -> Comparison:
    """The comparison of an estimate, from its p-values: of no difference, of no tie."""
    a, b = e.contrast.a, e.contrast.b
    half = half_width(e.own / e.seeds, e.seeds - 1, e.questions)
    low, high = e.mean - half, e.mean + half
    down, up = (_hidden(e, rule, sign) for sign in (-1, 1))
    more, kind, firm, hidden = None, "undecided", False, max(down, up)
    if p < rule.alpha:
        hidden = down if e.mean > 0 else up
        kind, verdict = "greater", f"{a} > {b}" if e.mean > 0 else f"{b} > {a}"
        firm = low > down or high < -up
    elif p_tie < rule.alpha:
        kind, verdict = "tie", f"tie within {rule.tie:g}"
        firm = low - down > -rule.tie and high + up < rule.tie
    else:
        more, needs = _needs(e, rule.tie, rule.alpha, rule.family)
        reason = (
            f"{e.seeds} seeds cannot bear an arm as unstable as"
            f" {' and '.join(sorted(e.unstable))}; "
            if e.unstable
            else ""
        )
        verdict = f"undecided: {reason}{needs}"
    if objection := _objection(e, rule, kind, (low, high)):
        more, kind, firm, verdict = None, "undecided", False, f"undecided: {objection}"
    if kind != "undecided" and not firm:
        verdict += LIKE_THESE
    found = _would_find(e, rule.alpha, rule.family)
    return Comparison(
        a,
        b,
        e.seeds,
        e.mean,
        low,
        high,
        p,
        kind,
        verdict,
        more,
        tuple(e.contrast.weights),
        found,
        hidden,
        firm,
    )


def _hidden(e: _Estimate, rule: _Rule, sign: int, most: float = math.inf) -> float:
    """How far places that no seed has shown may shift the contrast down (`sign` -1) or up (1): arms
    of a positive weight then fall or rise, the others move the other way, none by more than
    `most`."""
    rooms = []
    for arm, weight in e.contrast.weights.items():
        room = rule.room_above if weight * sign > 0 else rule.room_below
        rooms.append(abs(weight) * min(most, room[arm]))
    return hidden_shift(rooms, e.seeds, rule.unseen)


def _objection(e: _Estimate, rule: _Rule, kind: str, interval: tuple[float, float]) -> str:
    """Why a verdict of this kind cannot be, or an undecided comparison needs no more seeds; ""
    where nothing is against it."""
    low, high = interval
    apart = [arm for arm in e.contrast.weights if arm in rule.places]
    if apart:
        return "; ".join(f"runs of {arm} end in two places, {rule.places[arm]}" for arm in apart)
    if kind == "undecided":
        return ""
    limit = rule.tie if kind == "tie" else 0.0
    bends = [
        (weight, rule.bends.get(arm, (0.0, 0.0))) for arm, weight in e.contrast.weights.items()
    ]
    bend_low = sum(min(weight * of_arm[0], weight * of_arm[1]) for weight, of_arm in bends)
    bend_high = sum(max(weight * of_arm[0], weight * of_arm[1]) for weight, of_arm in bends)
    if not _stands(kind, low + bend_low, high + bend_high, limit):
        shift = _span(bend_low, bend_high)
        reason = f"a bend of the learning curves between evaluations may shift it by {shift}"
        return f"evaluate more often, on more questions: {reason}"
    if len(rule.places) > 1:
        gap = max(places.gap for places in rule.places.values())
        down, up = (_hidden(e, rule, sign, gap) for sign in (-1, 1))
        if not _stands(kind, low - down, high + up, limit):
            reason = f"{e.seeds} seeds may have missed those of others"
            return f"runs of {' and '.join(rule.places)} end in two places, and {reason}"
    return ""


def _stands(kind: str, low: float, high: float, limit: float) -> bool:
    """Whether a verdict of this kind is that of all differences between `low` and `high`."""
    if kind == "greater":
        return low > 0 or high < 0
    return -limit < low and high < limit


def _span(low: float, high: float) -> str:
    """The larger of two shifts, in words."""
    most = max(-low, high)
    return f"up to {most:.2g}" if math.isfinite(most) else "an unknown amount"


def _needs(e: _Estimate, tie: float, alpha: float, family: int) -> tuple[int | None, str]:
    """The further seeds that would settle the comparison at the present estimates, None above
    MOST_SEEDS; and that in words."""
    more = np.arange(1, MOST_SEEDS + 1)
    # the degrees of freedom grow with the seeds
    together = -stdtrit(e.dof * (1 + more / (e.seeds - 1)), alpha / family / 2)
    alone = -stdtrit(e.seeds - 1 + more, alpha / 2)
    by_questions = -ndtri(alpha / family / 2) * math.sqrt(e.questions)
    of_family = np.maximum(
        together * math.sqrt(e.by_sides), alone * math.sqrt(max(e.own, e.by_sides))
    )
    errors = (of_family if family > 1 else alone * math.sqrt(e.own)) / np.sqrt(e.seeds + more)
    # the last: with any number of seeds
    half = np.append(np.hypot(errors, by_questions), by_questions)
    enough = (abs(e.mean) > half) | (abs(e.mean) + half < tie)
    if not enough.any():
        return None, "more questions are needed, not more seeds"
    if (first := int(enough.argmax()) + 1) > MOST_SEEDS:
        return None, f"more than {MOST_SEEDS} more seeds"
    return first, f"about {first} more seed{'s' if first > 1 else ''}"


def _would_find(e: _Estimate, alpha: float, family: int) -> float:
    """`Comparison.detectable`: of each test of a verdict the noncentrality of t at that chance,
    times the error of the mean."""
    own, by_sides = (e.own, e.seeds - 1, alpha), (e.by_sides, e.dof, alpha / family)
    tests = [own] if family == 1 else [by_sides, (max(e.own, e.by_sides), *own[1:])]
    by_seeds = max(
        nctdtrinc(dof, 1 - CHANCE, -stdtrit(dof, level / 2)) * math.sqrt(v / e.seeds)
        for v, dof, level in tests
    )
    return math.hypot(
        by_seeds, (ndtri(CHANCE) - ndtri(alpha / family / 2)) * math.sqrt(e.questions)
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number: the k-th smallest of m times m - k + 1, never falling
    (Holm 1979)."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(np.minimum(1, p[order] * np.arange(len(p), 0, -1)))
    return adjusted.tolist()


def area_under_curve(steps: Sequence[int], scores_EQ: np.ndarray) -> np.ndarray:
    """Each question's mean score [Q] over training: trapezia between evaluations, over the steps
    between first and last."""
    if len(steps) == 1:
        return scores_EQ[0]
    return np.trapezoid(scores_EQ, x=np.asarray(steps, dtype=float), axis=0) / (
        steps[-1] - steps[0]
    )


def interquartile_mean(scores: Sequence[float]) -> float:
    """The mean of the middle half (Agarwal et al. 2021, arXiv:2108.13264), for scores of many tasks
    or runs."""
    return float(stats.trim_mean(np.asarray(scores, dtype=float), 0.25))


DRAWS = 4_000


class Power(NamedTuple):
    """The smallest difference found with a chance of CHANCE, infinite with one seed; the chance
    that none is called a tie."""

    difference: float
    tie: float


def power(weights_A: Sequence[float], family: int, looks: range, std: float, tie: float) -> Power:
    """The power of a contrast with these weights of all arms, one of `family` contrasts, after each
    number of seeds in `looks`, which share the error rate. `std` is `score_std`, of every arm.
    Unknown effects of arms on single questions are left out."""
    if looks[0] < 2 or family < 1:
        return Power(math.inf, 0.0)
    scores_NAS = np.random.default_rng(0).normal(scale=std, size=(DRAWS, len(weights_A), looks[-1]))
    alpha, weights = ALPHA / len(looks), np.array(weights_A)
    errors, halves = np.array(
        [_look(scores_NAS[:, :, :seeds], weights, family, alpha) for seeds in looks]
    ).swapaxes(0, 1)

    def shortfall(difference):
        return float((errors + difference > halves).any(axis=0).mean()) - CHANCE

    found = optimize.brentq(shortfall, 0.0, float(halves.max() - errors.min()), xtol=1e-6)
    return Power(found, float((np.abs(errors) + halves < tie).any(axis=0).mean()))


def _look(
    scores_NAS: np.ndarray, weights_A: np.ndarray, family: int, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """For N simulated tables, the contrast's error, and the difference that makes a verdict, by the
    rule of `compare`."""
    arms, seeds = scores_NAS.shape[1:]
    residuals = scores_NAS - scores_NAS.mean(1, keepdims=True) - scores_NAS.mean(2, keepdims=True)
    squares_NA = ((residuals + scores_NAS.mean((1, 2), keepdims=True)) ** 2).sum(2)
    dof = (arms - 1) * (seeds - 1)
    common_N1 = squares_NA.sum(1, keepdims=True) / dof
    own_NA = (
        np.maximum(0, (arms * squares_NA / (seeds - 1) - common_N1) / (arms - 2))
        if arms > 2
        else common_N1
    )
    sides_2A = np.stack([np.clip(weights_A, 0, None), np.clip(weights_A, None, 0)]) ** 2
    by_arms_N2 = np.broadcast_to(own_NA, squares_NA.shape) @ sides_2A.T
    by_sides_N = np.maximum(by_arms_N2, common_N1 * sides_2A.sum(1)).sum(1)
    contrast_NS = np.einsum("nas,a->ns", scores_NAS, weights_A)
    error_N, own_N = contrast_NS.mean(1), contrast_NS.var(1, ddof=1)
    alone = stats.t.isf(alpha / 2, seeds - 1)
    if family == 1:
        return error_N, alone * np.sqrt(own_N / seeds)
    together_N = stats.t.isf(alpha / family / 2, dof) * np.sqrt(by_sides_N / seeds)
    return error_N, np.maximum(together_N, alone * np.sqrt(np.maximum(by_sides_N, own_N) / seeds))
