"""How often are the verdicts of an ablation false, and how often do its intervals hold the truth?

    uv run -m benchmarks.ablation_rates --processes 2
    uv run -m benchmarks.ablation_rates --only "4 arms, 3 seeds"

By simulation: shares of simulated tables, for each setting, as a Markdown table; all settings take
one to two hours on one idle core. The answers come from a model of runs (`sample`), not from the
model of the estimator. Beside ours stand the usual percentile bootstrap over seeds and questions,
each pair by itself, and Welch's t test over seeds with Holm's correction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
import tyro
from scipy import stats

from alignment.ablation.design import ALPHA
from alignment.ablation.schedule import State, next_runs
from alignment.ablation.statistics import (
    Comparison,
    Contrast,
    PlannedContrast,
    Scores,
    area_under_curve,
    compare,
    holm,
    pairs,
    power,
)
from alignment.core.power import score_std

TIE = 0.03
DRAWS = 300  # of the usual bootstrap
COLLAPSE_CHANCE = 0.1
COLLAPSED = 0.1  # what a collapse leaves of an accuracy


@dataclass(frozen=True)
class Outcome:
    """Where a run may end, such as without having learned."""

    probability: float
    shift: float
    """What it adds to the accuracy."""


@dataclass(frozen=True)
class Setting:
    """The truth of a simulated ablation: an accuracy for each arm, and what differs between its
    runs."""

    name: str
    accuracies: tuple[float, ...]
    seeds: int
    noise: tuple[float, ...]
    """Standard deviation of each arm's accuracy between seeds."""
    shape: str = "normal"
    questions: int = 512
    cluster: int = 1
    """Questions that share their difficulty and the arms' taste for them."""
    taste: float = 0.06
    """Standard deviation of the effect of an arm on a question."""
    shared: float = 0.02
    """Standard deviation of the effect of a seed on all arms."""
    missing: float = 0.0
    """Chance that a run is missing."""
    unequal: bool = False
    """Whether every third arm has two seeds fewer."""
    evaluations: int = 1
    """Evaluations of a learning curve; its area is compared where there are several."""
    grid: tuple[int, ...] = ()
    """Levels of the factors whose arms these are, the last one fastest; every pair of its levels is
    compared."""
    last_seeds: int = 0
    """--max_seeds of --until_decided; 0: one look."""
    clusters_known: bool = False
    outcomes: tuple[tuple[Outcome, ...], ...] = ()
    """Of each of the first arms; the rest of the probability is that of no change. Arms fail apart,
    but for `shared_outcomes`."""
    shared_outcomes: bool = False
    """Whether a seed's outcome, drawn from the first arm's, strikes all arms."""

    @property
    def most_seeds(self) -> int:
        return self.last_seeds or self.seeds


# --- the model ------------------------------------------------------------------------------------


def deviations(rng: np.random.Generator, shape: str, size: tuple[int, ...]) -> np.ndarray:
    """Effects of a seed on one arm, of mean 0 and standard deviation 1 (a collapse aside)."""
    if shape == "heavy tails":
        return rng.standard_t(3, size) / np.sqrt(3)
    if shape == "skew":
        return 1 - rng.exponential(size=size)
    # the standard deviation grows from seed to seed, to five times the first one's
    if shape == "drift":
        growth_S = np.linspace(1, 5, size[-1])
        return growth_S * rng.normal(size=size) / np.sqrt((growth_S**2).mean())
    return rng.normal(size=size)


def sample_outcomes(rng: np.random.Generator, setting: Setting) -> np.ndarray:
    """Which outcome each run has [A, S]: its place among its arm's `outcomes`, 0 for no change."""
    arms = len(setting.accuracies)
    outcomes_AS = np.zeros((arms, setting.most_seeds), dtype=int)
    for arm, outcomes in enumerate(setting.outcomes):
        chances = [outcome.probability for outcome in outcomes]
        no_change = max(0.0, 1 - sum(chances))
        outcomes_AS[arm] = rng.choice(
            1 + len(outcomes), setting.most_seeds, p=[no_change, *chances]
        )
    if setting.shared_outcomes:
        return np.tile(outcomes_AS[:1], (arms, 1))
    return outcomes_AS


@dataclass(frozen=True)
class OutcomeTable:
    """What may become of each arm's runs; the first outcome is no change."""

    chances_AK: np.ndarray
    shifts_AK: np.ndarray


def outcome_table(setting: Setting) -> OutcomeTable:
    """The outcomes of each arm; an arm with fewer than another has outcomes without a chance."""
    arms = len(setting.accuracies)
    outcomes_by_arm = setting.outcomes
    if setting.shared_outcomes:
        outcomes_by_arm = setting.outcomes[:1] * arms
    most_outcomes = max(map(len, outcomes_by_arm), default=0)
    chances_AK = np.zeros((arms, 1 + most_outcomes))
    shifts_AK = np.zeros((arms, 1 + most_outcomes))
    for arm, outcomes in enumerate(outcomes_by_arm):
        for place, outcome in enumerate(outcomes, start=1):
            chances_AK[arm, place] = outcome.probability
            shifts_AK[arm, place] = outcome.shift
    chances_AK[:, 0] = 1 - chances_AK.sum(axis=1)
    return OutcomeTable(chances_AK, shifts_AK)


def sample(
    rng: np.random.Generator, setting: Setting, outcomes_AS: np.ndarray | None = None
) -> dict[str, dict[int, np.ndarray]]:
    """Answers [Q] by arm and seed, with these outcomes of runs or with drawn ones. Right or wrong:
    questions differ in difficulty, arms in which questions they are good at, seeds in luck that all
    arms share and in luck of one run; each answer is a Bernoulli draw."""
    if outcomes_AS is None:
        outcomes_AS = sample_outcomes(rng, setting)
    accuracy_A = np.array(setting.accuracies)
    shifts_AK = outcome_table(setting).shifts_AK
    # effects are smaller where little can change
    reached_AK = np.clip(accuracy_A[:, None] + shifts_AK, 0, 1)
    room_A1 = 2 * np.minimum(reached_AK, 1 - reached_AK).min(axis=1)[:, None]

    question_AQ = sample_question_effects(rng, setting, room_A1)
    arms, seeds = outcomes_AS.shape
    luck_AS = np.array(setting.noise)[:, None] * deviations(rng, setting.shape, (arms, seeds))
    shared_luck_AS = room_A1 * setting.shared * rng.normal(size=seeds)
    outcome_AS = shifts_AK[np.arange(arms)[:, None], outcomes_AS]
    run_AS = luck_AS + shared_luck_AS + outcome_AS
    p_ASQ = accuracy_A[:, None, None] + question_AQ[:, None, :] + run_AS[:, :, None]
    if "collapses" in setting.shape:
        has_collapsed_AS = rng.random((arms, seeds)) < collapse_chances(setting)[:, None]
        p_ASQ = p_ASQ * np.where(has_collapsed_AS, COLLAPSED, 1.0)[:, :, None]

    if setting.evaluations > 1:
        scores_ASQ = curve_areas(rng, p_ASQ, setting)
    else:
        scores_ASQ = (rng.random(p_ASQ.shape) < p_ASQ).astype(float)
    present_AS = rng.random((arms, seeds)) >= setting.missing
    if setting.unequal:
        present_AS[::3, max(2, seeds - 2) :] = False
    scores: dict[str, dict[int, np.ndarray]] = {}
    for arm in range(arms):
        present = [seed for seed in range(seeds) if present_AS[arm, seed]]
        scores[str(arm)] = {seed: scores_ASQ[arm, seed] for seed in present}
    return scores


def sample_question_effects(
    rng: np.random.Generator, setting: Setting, room_A1: np.ndarray
) -> np.ndarray:
    """What a question's difficulty, and the arms' taste for it, add to accuracies [A, Q]; a cluster
    of questions shares them."""
    clusters = -(-setting.questions // setting.cluster)
    difficulty_C = rng.uniform(-0.3, 0.3, clusters)
    # a uniform number between -1 and 1 has a standard deviation of 1 / sqrt(3)
    taste_AC = np.sqrt(3) * setting.taste * rng.uniform(-1, 1, (len(room_A1), clusters))
    cluster_AC = room_A1 * (difficulty_C + taste_AC)
    return np.repeat(cluster_AC, setting.cluster, axis=1)[:, : setting.questions]


def collapse_chances(setting: Setting) -> np.ndarray:
    """The chance of each arm's runs to collapse [A]."""
    chances_A = np.full(len(setting.accuracies), COLLAPSE_CHANCE)
    if setting.shape == "one arm collapses":
        chances_A[:-1] = 0.0
    return chances_A


def curve_areas(rng: np.random.Generator, p_ASQ: np.ndarray, setting: Setting) -> np.ndarray:
    """Areas [A, S, Q] under curves that rise to `p_ASQ`, with a random walk in each run between its
    evaluations."""
    evaluations = np.arange(setting.evaluations)
    arms, seeds, _ = p_ASQ.shape
    steps_EAS = rng.normal(size=(len(evaluations), arms, seeds))
    walk_EAS = 0.5 * np.mean(setting.noise) * np.cumsum(steps_EAS, axis=0)
    rise_E111 = (evaluations / evaluations[-1])[:, None, None, None]
    p_EASQ = p_ASQ * rise_E111 + walk_EAS[..., None]
    answers_EASQ = (rng.random(p_EASQ.shape) < p_EASQ).astype(float)
    answers_EN = answers_EASQ.reshape(len(evaluations), -1)
    return area_under_curve(list(evaluations), answers_EN).reshape(p_ASQ.shape)


def contrasts(setting: Setting) -> list[Contrast]:
    """Every pair of arms, or of a grid, every pair of levels of the last factor, each level by the
    mean of its arms."""
    arms = len(setting.accuracies)
    if not setting.grid:
        return pairs([str(arm) for arm in range(arms)])
    levels = setting.grid[-1]
    return [
        level_contrast(arms, levels, one, other) for one, other in combinations(range(levels), 2)
    ]


def level_contrast(arms: int, levels: int, one: int, other: int) -> Contrast:
    """The mean of the arms at one level of the last factor, less that at another."""
    share = levels / arms
    weights = {}
    for arm in range(arms):
        level = arm % levels  # the last factor's levels are the fastest
        if level == one:
            weights[str(arm)] = share
        elif level == other:
            weights[str(arm)] = -share
    return Contrast(f"level {one}", f"level {other}", weights)


def seen_outcomes(
    arms: Mapping[str, Scores], outcomes_AS: np.ndarray, seeds: int
) -> list[set[int]]:
    """For each arm the outcomes of its runs among the first seeds."""
    seen = []
    for arm, by_seed in arms.items():
        own_S = outcomes_AS[int(arm)]
        seen.append({int(own_S[seed]) for seed in by_seed if seed < seeds})
    return seen


def true_difference(
    setting: Setting, contrast: Contrast, seen: Sequence[set[int]] | None = None
) -> float:
    """The difference of expected accuracies, over seeds and questions: of all runs, or of runs
    whose outcome was seen."""
    table = outcome_table(setting)
    chances_AK = table.chances_AK
    if seen is not None:
        chances_AK = np.zeros_like(table.chances_AK)
        for arm, outcomes in enumerate(seen):
            places = sorted(outcomes)
            chances_AK[arm, places] = table.chances_AK[arm, places]
    # 0 for an arm without a run, which gets no verdict
    total_A = np.maximum(chances_AK.sum(axis=1), 1e-300)
    shift_A = (chances_AK * table.shifts_AK).sum(axis=1) / total_A
    expected_A = np.array(setting.accuracies) + shift_A
    if setting.shape == "one arm collapses":
        expected_A[-1] *= (1 - COLLAPSE_CHANCE) + COLLAPSE_CHANCE * COLLAPSED
    value = sum(weight * expected_A[int(arm)] for arm, weight in contrast.weights.items())
    if setting.evaluations > 1:
        # the area under a straight line from 0 is half of where it ends
        value = value / 2
    return round(float(value), 12)


# --- the methods ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The comparisons of a table that is decided, or that may grow no more."""

    compared: list[Comparison]
    seeds: int
    """Of the arm with the most."""


def ours(arms: Mapping[str, Scores], setting: Setting) -> Look:
    """The comparisons of one look, or of the last look of --until_decided."""
    groups = None
    if setting.clusters_known:
        groups = [question // setting.cluster for question in range(setting.questions)]
    if not setting.last_seeds:
        compared = compare(arms, TIE, contrasts(setting), groups=groups)
        return Look(compared, setting.seeds)
    # the looks share the level
    alpha = ALPHA / (setting.last_seeds - setting.seeds + 1)
    states = [State(arm, seed, "done") for arm, seed in product(arms, range(setting.seeds))]
    while True:
        seen: dict[str, dict[int, np.ndarray]] = {arm: {} for arm in arms}
        for state in states:
            seen[state.arm][state.seed] = arms[state.arm][state.seed]
        compared = compare(seen, TIE, contrasts(setting), alpha=alpha)
        added = next_runs(states, compared, setting.last_seeds)
        if not added:
            return Look(compared, max(map(len, seen.values())))
        states += [replace(state, status="done") for state in added]


def weights_of(compared: Sequence[Contrast], arms: Mapping[str, Scores]) -> np.ndarray:
    """The weights of the arms in each contrast [C, A]."""
    weights_CA = np.zeros((len(compared), len(arms)))
    for row, contrast in enumerate(compared):
        weights_CA[row] = [contrast.weights.get(arm, 0.0) for arm in arms]
    return weights_CA


def welch(arms: Mapping[str, Scores], weights_CA: np.ndarray) -> np.ndarray:
    """Whether Welch's t test over seeds, with Holm's correction, finds a difference, for each
    contrast [C]."""
    seeds_A = np.array([len(by_seed) for by_seed in arms.values()])
    mean_A = np.zeros(len(arms))
    squared_error_A = np.zeros(len(arms))
    for arm, by_seed in enumerate(arms.values()):
        means_S = np.array([scores.mean() for scores in by_seed.values()])
        if len(means_S):
            mean_A[arm] = means_S.mean()
        if len(means_S) > 1:
            squared_error_A[arm] = means_S.var(ddof=1) / len(means_S)
    # Welch and Satterthwaite: dof = (sum e^2)^2 / sum (e^2)^2 / (n - 1)
    errors_CA = weights_CA**2 * squared_error_A
    total_C = np.maximum(errors_CA.sum(axis=1), 1e-300)
    by_dof_C = (errors_CA**2 / np.maximum(1, seeds_A - 1)).sum(axis=1)
    dof_C = total_C**2 / np.maximum(by_dof_C, 1e-300)
    t_C = np.abs(weights_CA @ mean_A) / np.sqrt(total_C)
    p_C = 2 * stats.t.sf(t_C, np.maximum(dof_C, 1))
    # an arm with a single seed has no error, so its contrasts are never rejected
    is_untested_C = (weights_CA != 0) @ (seeds_A <= 1)
    return np.array(holm(np.where(is_untested_C, 1.0, p_C))) < ALPHA


def percentile(
    rng: np.random.Generator, arms, weights_CA: np.ndarray, resamples_DQ: np.ndarray
) -> np.ndarray:
    """The usual bootstrap: seeds and questions resampled with replacement, the 2.5 % and 97.5 %
    quantiles [2, C]."""
    seeds = sorted(set().union(*arms.values()))
    chances_S = np.full(len(seeds), 1 / len(seeds))
    seeds_DS = rng.multinomial(len(seeds), chances_S, DRAWS).astype(float)
    mean_DA = np.zeros((DRAWS, len(arms)))
    for arm, by_seed in enumerate(arms.values()):
        if by_seed:
            # an arm without any of the seeds that were drawn counts all alike
            own_DS = seeds_DS[:, [seeds.index(seed) for seed in by_seed]] + 1e-9
            scores_SQ = np.array(list(by_seed.values()))
            means_DS = resamples_DQ @ scores_SQ.T
            mean_DA[:, arm] = (means_DS * own_DS).sum(1) / own_DS.sum(1)
    return np.quantile(mean_DA @ weights_CA.T, [ALPHA / 2, 1 - ALPHA / 2], axis=0)


# --- rates ----------------------------------------------------------------------------------------


def false_verdict(comparison: Comparison, true: float) -> str:
    """By a true difference, the kind of a verdict that is false, or "" for a true one or none."""
    has_other_sign = (comparison.difference > 0) != (true > 0)
    if comparison.kind == "greater" and (true == 0 or has_other_sign):
        return "greater"
    says_less_than_margin = comparison.kind == "tie" or comparison.is_small
    if says_less_than_margin and abs(true) >= TIE - 1e-9:
        return "tie"
    return ""


COLUMNS = (
    "false tables",
    "with a false tie",
    "coverage",
    "coverage, noisy arm",
    "decided",
    "unstable",
    "seeds",
    "Welch + Holm: false tables",
    "decided",
    "bootstrap: coverage",
    "false tables",
    "false of all runs",
    "the same, firm",
    "two places",
    "false, by signs too",
    "false, if mean plus noise",
    "decided by signs too",
)
"""False tables have a verdict that is false as it stands: one in runs like these of the outcomes
that were seen, another of all runs. False of all runs are those with a verdict that is false of all
runs, whatever its words. The last three: tables with a winner that is false of all runs, and that
the exact test of seeds' signs supports; with a false verdict that it does not support, whose words
are "if a run is its mean plus noise"; and the share of comparisons with a winner that it
supports."""


def rates(setting: Setting, tables: int, seed: int, others: bool = True) -> list[float]:
    """The values of `COLUMNS` over simulated tables; those of the other methods, which take most of
    the time, are NaN without `others`."""
    compared = contrasts(setting)
    true_C = [true_difference(setting, contrast) for contrast in compared]
    rng = np.random.default_rng((seed, setting.seeds, len(setting.accuracies)))
    chances_Q = np.full(setting.questions, 1 / setting.questions)
    resamples_DQ = rng.multinomial(setting.questions, chances_Q, DRAWS) / setting.questions
    rows = []
    for _ in range(tables):
        outcomes_AS = sample_outcomes(rng, setting)
        arms = sample(rng, setting, outcomes_AS)
        look = ours(arms, setting)
        seen = seen_outcomes(arms, outcomes_AS, look.seeds)
        true_of_seen_C = [true_difference(setting, contrast, seen) for contrast in compared]
        cells_of_others = [np.nan] * 4
        if others:
            weights_CA = weights_of(compared, arms)
            rejected_C = welch(arms, weights_CA)
            low_C, high_C = percentile(rng, arms, weights_CA, resamples_DQ)
            cells_of_others = [
                *welch_cells(rejected_C, np.array(true_C)),
                *bootstrap_cells(low_C, high_C, np.array(true_C)),
            ]
        rows.append(
            [
                *verdict_cells(look.compared, true_C, true_of_seen_C),
                *coverage_cells(look.compared, true_C, noisy_arm(setting)),
                *decision_cells(look),
                *cells_of_others,
                *all_runs_cells(look.compared, true_C),
                any("two places" in comparison.verdict for comparison in look.compared),
                *exact_cells(look.compared, true_C),
            ]
        )
    values = np.array(rows, dtype=float)
    means = []
    for column in values.T:
        if np.isnan(column).all():
            means.append(np.nan)
        else:
            means.append(float(np.nanmean(column)))
    return means


def mean_or_nan(values: Sequence[float] | np.ndarray) -> float:
    if len(values) == 0:
        return np.nan
    return float(np.mean(values))


def noisy_arm(setting: Setting) -> str:
    """The arm with the most noise between seeds; "" where all have the same."""
    if len(set(setting.noise)) == 1:
        return ""
    return str(int(np.argmax(setting.noise)))


def verdict_cells(
    compared: Sequence[Comparison], true_C: Sequence[float], true_of_seen_C: Sequence[float]
) -> list[float]:
    """Whether a verdict is false as it stands: a firm one is of all runs, another of runs with the
    outcomes that were seen; and whether it is a false tie."""
    false_kinds = []
    for comparison, true, true_of_seen in zip(compared, true_C, true_of_seen_C, strict=True):
        meant = true_of_seen
        if comparison.firm:
            meant = true
        false_kinds.append(false_verdict(comparison, meant))
    return [any(false_kinds), "tie" in false_kinds]


def coverage_cells(
    compared: Sequence[Comparison], true_C: Sequence[float], noisy: str
) -> list[float]:
    """The share of intervals that hold the truth: of all, and of those of the noisy arm."""
    covers = []
    covers_of_noisy = []
    for comparison, true in zip(compared, true_C, strict=True):
        if comparison.seeds <= 1:  # which has no interval
            continue
        covers.append(comparison.low <= true <= comparison.high)
        if noisy in comparison.arms:
            covers_of_noisy.append(covers[-1])
    return [mean_or_nan(covers), mean_or_nan(covers_of_noisy)]


def decision_cells(look: Look) -> list[float]:
    """The shares of comparisons that are decided, and that are unstable; and the seeds."""
    is_decided = [comparison.kind != "undecided" for comparison in look.compared]
    is_unstable = ["unstable" in comparison.verdict for comparison in look.compared]
    return [mean_or_nan(is_decided), mean_or_nan(is_unstable), look.seeds]


def welch_cells(rejected_C: np.ndarray, true_C: np.ndarray) -> list[float]:
    """Whether Welch's test finds a difference where there is none; the share where it finds one."""
    return [bool((rejected_C & (true_C == 0)).any()), mean_or_nan(rejected_C)]


def bootstrap_cells(low_C: np.ndarray, high_C: np.ndarray, true_C: np.ndarray) -> list[float]:
    """The share of intervals that hold the truth; whether one excludes 0 where 0 is the truth."""
    covers_C = (low_C <= true_C) & (true_C <= high_C)
    return [mean_or_nan(covers_C), bool((~covers_C & (true_C == 0)).any())]


def all_runs_cells(compared: Sequence[Comparison], true_C: Sequence[float]) -> list[float]:
    """Whether a verdict is false of all runs, whatever its words; and whether a firm one is."""
    is_false = []
    is_false_and_firm = []
    for comparison, true in zip(compared, true_C, strict=True):
        is_false.append(false_verdict(comparison, true) != "")
        is_false_and_firm.append(is_false[-1] and comparison.firm)
    return [any(is_false), any(is_false_and_firm)]


def exact_cells(compared: Sequence[Comparison], true_C: Sequence[float]) -> list[float]:
    """Whether a verdict is false of all runs that the exact test supports; whether one is that it
    does not; and the share of comparisons with a winner that it supports."""
    is_false_and_exact = []
    is_false_by_noise = []
    for comparison, true in zip(compared, true_C, strict=True):
        is_false = false_verdict(comparison, true) != ""
        is_false_and_exact.append(is_false and comparison.exact)
        is_false_by_noise.append(is_false and not comparison.exact)
    is_exact = [comparison.exact for comparison in compared]
    return [any(is_false_and_exact), any(is_false_by_noise), mean_or_nan(is_exact)]


# --- settings -------------------------------------------------------------------------------------

BASE = 0.01  # standard deviation of a quiet arm between seeds


@dataclass(frozen=True)
class Noise:
    """A kind of noise between seeds."""

    name: str
    spreads: tuple[float, ...]
    """Standard deviation of each arm."""
    shape: str = "normal"


def noises(arms: int) -> list[Noise]:
    """Each kind of noise, for so many arms."""
    kinds = [Noise("equal noise", (2 * BASE,) * arms)]
    for times in (2, 4, 8, 20):
        spreads = (BASE,) * (arms - 1) + (times * BASE,)
        kinds.append(Noise(f"one arm {times} x", spreads))
    quiet_and_noisy = (BASE, 4 * BASE) * arms
    kinds.append(Noise("half 4 x", quiet_and_noisy[:arms]))
    for shape in ("heavy tails", "skew", "a seed in ten collapses"):
        kinds.append(Noise(shape, (2 * BASE,) * arms, shape))
    return kinds


def chosen_noises(arms: int, *names: str) -> list[Noise]:
    return [noise for noise in noises(arms) if noise.name in names]


def equal_arms(name: str, arms: int, seeds: int, noise: float = 2 * BASE) -> Setting:
    """Arms that are equal, with the same noise between seeds."""
    return Setting(name, (0.5,) * arms, seeds, (noise,) * arms)


def settings() -> Iterator[Setting]:
    """All settings of the table."""
    for arms, seeds in product((2, 3, 4, 8, 12), (2, 3, 5, 10)):
        for noise in noises(arms):
            plain = equal_arms(f"{arms} arms, {seeds} seeds, {noise.name}", arms, seeds)
            yield replace(plain, noise=noise.spreads, shape=noise.shape)
    for arms, seeds, accuracy in product((2, 4), (2, 3, 5), (0.02, 0.98)):
        name = f"{arms} arms, {seeds} seeds, accuracy {accuracy}"
        yield Setting(name, (accuracy,) * arms, seeds, noise=(0.002,) * arms)
    for arms, seeds in product((4, 8), (2, 3, 5, 10)):
        accuracies = tuple(0.5 + 0.35 * (arm // 2) / ((arms - 1) // 2) for arm in range(arms))
        spreads = tuple(0.01 + 0.1 * (accuracy - 0.5) for accuracy in accuracies)
        yield Setting(f"{arms} arms, {seeds} seeds, noise by accuracy", accuracies, seeds, spreads)
    for grid, seeds in product(((2, 2), (2, 3), (3, 4), (2, 2, 2)), (2, 3, 5)):
        arms = int(np.prod(grid))
        for noise in chosen_noises(arms, "equal noise", "one arm 8 x", "half 4 x"):
            name = f"grid {grid_label(grid)}, {seeds} seeds, {noise.name}"
            plain = equal_arms(name, arms, seeds)
            yield replace(plain, noise=noise.spreads, shape=noise.shape, grid=grid)
    for seeds in (3, 5):
        yield from varied_settings(seeds)
    yield from margin_settings()
    yield from sequential_settings()
    for seeds in (2, 3, 4, 5, 6, 8, 12):
        plain = equal_arms(f"places: coin, 2 arms, {seeds} seeds", 2, seeds)
        yield replace(plain, outcomes=(COIN,))
    yield from coin_settings()
    for seeds in (5, 8, 10, 16, 60):
        name = f"places: .3 lost in 1 of 10, 2 arms, {seeds} seeds"
        plain = equal_arms(name, 2, seeds, noise=0.004)
        yield replace(plain, outcomes=(RARE,), questions=2048)
    for seeds in (5, 10):
        yield from outcome_settings(seeds)
    for seeds in (6, 7, 10):
        yield from exact_settings(seeds)
    # of the arms that go on; the last one stops early
    for noise in (2 * BASE, 8 * BASE):
        name = f"until decided, 4 arms, 3 to 8 seeds, one 0.3 worse, noise {noise:g}"
        accuracies = (0.5,) * 3 + (0.2,)
        yield Setting(name, accuracies, 3, (noise,) * 3 + (2 * BASE,), last_seeds=8)


def grid_label(grid: Sequence[int]) -> str:
    return " x ".join(map(str, grid))


def varied_settings(seeds: int) -> Iterator[Setting]:
    """Settings that vary one thing about four arms."""

    def plain(what: str) -> Setting:
        return equal_arms(f"4 arms, {seeds} seeds, {what}", 4, seeds)

    yield replace(plain("questions in fours"), cluster=4, taste=0.12)
    yield replace(plain("fours, known"), cluster=4, taste=0.12, clusters_known=True)
    yield replace(plain("a run in ten missing"), missing=0.1)
    yield replace(plain("unequal seeds"), unequal=True)
    one_noisy = (0.01,) * 3 + (0.08,)
    yield replace(plain("unequal seeds, one 8 x"), unequal=True, noise=one_noisy)
    yield replace(plain("areas"), evaluations=5)
    yield replace(plain("no noise between seeds"), noise=(0.0,) * 4)
    yield replace(plain("one arm collapses"), shape="one arm collapses")
    yield replace(plain("two 0.08 better"), accuracies=(0.46, 0.46, 0.54, 0.54))


def margin_settings() -> Iterator[Setting]:
    """Settings with differences equal to the margin of a tie."""
    for arms, seeds, times in product((2, 4, 8), (5, 10), (1, 4, 20)):
        name = f"{arms} arms, {seeds} seeds, at the margin, one arm {times} x"
        accuracies = (0.485,) * (arms - 1) + (0.515,)
        spreads = (0.004,) * (arms - 1) + (0.004 * times,)
        yield Setting(name, accuracies, seeds, spreads, questions=2048)


def sequential_settings() -> Iterator[Setting]:
    """Settings of --until_decided."""
    for arms, first, last in ((2, 2, 8), (3, 2, 8), (3, 3, 10), (4, 3, 6)):
        design = f"until decided, {arms} arms, {first} to {last} seeds"
        for noise in chosen_noises(arms, "equal noise", "one arm 8 x"):
            plain = equal_arms(f"{design}, {noise.name}", arms, first)
            yield replace(plain, noise=noise.spreads, shape=noise.shape, last_seeds=last)
        plain = equal_arms(f"{design}, one 0.05 better", arms, first)
        yield replace(plain, accuracies=(0.5,) * (arms - 1) + (0.55,), last_seeds=last)


# learns or does not, at the other arms' mean
COIN = (Outcome(0.5, -0.35), Outcome(0.5, 0.35))
RARE = (Outcome(0.1, -0.3),)
THREE = (Outcome(1 / 3, -0.35), Outcome(1 / 3, 0.35))
GAIN = (Outcome(0.1, 0.5),)
NEAR = (Outcome(0.5, -0.05), Outcome(0.5, 0.05))


def coin_settings() -> Iterator[Setting]:
    """Settings in which runs learn or do not, in one arm or in all."""
    for seeds in (3, 6):
        plain = equal_arms(f"places: coin in one of 4 arms, {seeds} seeds", 4, seeds)
        yield replace(plain, outcomes=(COIN,))
        plain = equal_arms(f"places: coin in 4 of 4 arms, {seeds} seeds", 4, seeds)
        yield replace(plain, outcomes=(COIN,) * 4)
    for first, last in ((2, 8), (3, 10)):
        name = f"places: coin until decided, 2 arms, {first} to {last} seeds"
        yield replace(equal_arms(name, 2, first), outcomes=(COIN,), last_seeds=last)


def outcome_settings(seeds: int) -> Iterator[Setting]:
    """Settings in which runs end in several places, by other chances than a coin's."""
    plain = equal_arms(f"places: three, 2 arms, {seeds} seeds", 2, seeds)
    yield replace(plain, outcomes=(THREE,))
    name = f"places: loss rates differ, equal means, 4 arms, {seeds} seeds"
    losses = ((Outcome(0.05, -0.3),), (Outcome(0.15, -0.3),), (Outcome(0.3, -0.3),), ())
    accuracies = (0.515, 0.545, 0.59, 0.5)
    yield replace(equal_arms(name, 4, seeds), accuracies=accuracies, outcomes=losses)
    plain = equal_arms(f"places: bad seeds that all arms share, 4 arms, {seeds} seeds", 4, seeds)
    yield replace(plain, outcomes=(RARE,), shared_outcomes=True)
    plain = equal_arms(f"places: 1 of 10 learns, 2 arms, {seeds} seeds", 2, seeds)
    yield replace(plain, accuracies=(0.2, 0.25), outcomes=(GAIN,))
    plain = equal_arms(f"places: coin, unequal seeds, 4 arms, {seeds} seeds", 4, seeds)
    yield replace(plain, outcomes=(COIN,), unequal=True)
    plain = equal_arms(f"places: grid 2 x 2, one coin, {seeds} seeds", 4, seeds)
    yield replace(plain, outcomes=(COIN,), grid=(2, 2))
    plain = equal_arms(f"places: .1 apart, 2 arms, {seeds} seeds", 2, seeds, noise=BASE)
    yield replace(plain, outcomes=(NEAR,))
    for shape in ("heavy tails", "skew", "drift"):
        plain = equal_arms(f"places: none, {shape}, 4 arms, {seeds} seeds", 4, seeds)
        yield replace(plain, shape=shape)


def exact_settings(seeds: int) -> Iterator[Setting]:
    """Settings in which the exact test can have a say: equal arms whose runs are no mean plus
    normal noise, some of which are not the same all the same, and arms that differ."""
    for arms in (2, 3):

        def plain(what: str, arms: int = arms) -> Setting:
            return equal_arms(f"signs: {what}, {arms} arms, {seeds} seeds", arms, seeds)

        for shape in ("normal", "heavy tails", "skew", "drift", "a seed in ten collapses"):
            yield replace(plain(shape), shape=shape)
        yield replace(plain("coin in all"), outcomes=(COIN,) * arms)
        yield replace(plain("coin in one"), outcomes=(COIN,))
        yield replace(plain(".3 lost in 1 of 10, all"), outcomes=(RARE,) * arms)
        # the same mean, by fewer runs that lose
        one_loses = (0.53,) + (0.5,) * (arms - 1)
        yield replace(plain(".3 lost in 1 of 10, one"), accuracies=one_loses, outcomes=(RARE,))
        yield replace(plain("no taste for questions"), taste=0)
        one_better = (0.6,) + (0.5,) * (arms - 1)
        yield replace(plain("one 0.1 better"), accuracies=one_better)
    plain_grid = replace(equal_arms(f"signs: grid 2 x 2, {seeds} seeds", 4, seeds), grid=(2, 2))
    yield plain_grid
    # what the last factor adds has another sign at each level of the first
    crossed = (0.54, 0.5, 0.5, 0.54)
    name = f"signs: crossed grid 2 x 2, {seeds} seeds"
    yield replace(plain_grid, name=name, accuracies=crossed)
    name = f"signs: crossed grid 2 x 2, one coin, {seeds} seeds"
    yield replace(plain_grid, name=name, accuracies=crossed, outcomes=(COIN,))


@dataclass(frozen=True)
class PrintedPower:
    """A setting whose first contrast is the smallest difference that the design prints."""

    design: str
    setting: Setting
    difference: float


def printed_power() -> list[PrintedPower]:
    """The smallest differences of designs of several arms, of --until_decided and of grids."""
    score_deviation = score_std(2 * BASE, 512)
    rows = []
    for arms, seeds in ((2, 3), (4, 3), (4, 5), (12, 3), (12, 5)):
        weights = (1, -1) + (0,) * (arms - 2)
        family = arms * (arms - 1) // 2
        looks = range(seeds, seeds + 1)
        difference = power(PlannedContrast(weights, family, looks, score_deviation, TIE)).difference
        setting = one_arm_apart(arms, seeds, difference)
        rows.append(PrintedPower(f"{arms} arms, {seeds} seeds", setting, difference))
    for arms, seeds, last in ((2, 2, 8), (3, 3, 10)):
        weights = (1, -1) + (0,) * (arms - 2)
        family = arms * (arms - 1) // 2
        looks = range(seeds, last + 1)
        difference = power(PlannedContrast(weights, family, looks, score_deviation, TIE)).difference
        setting = replace(one_arm_apart(arms, seeds, difference), last_seeds=last)
        rows.append(PrintedPower(f"{arms} arms, {seeds} to {last} seeds", setting, difference))
    for grid, seeds in (((2, 2), 3), ((3, 4), 3), ((2, 2, 2), 5)):
        arms = int(np.prod(grid))
        setting = replace(equal_arms("", arms, seeds), taste=0, grid=grid)
        compared = contrasts(setting)
        weights = [compared[0].weights.get(str(arm), 0.0) for arm in range(arms)]
        looks = range(seeds, seeds + 1)
        planned = PlannedContrast(weights, len(compared), looks, score_deviation, TIE)
        difference = power(planned).difference
        # the arms at the first level of the last factor
        accuracies = tuple(0.5 + difference * (arm % grid[-1] == 0) for arm in range(arms))
        setting = replace(setting, accuracies=accuracies)
        rows.append(PrintedPower(f"grid {grid_label(grid)}, {seeds} seeds", setting, difference))
    return rows


def one_arm_apart(arms: int, seeds: int, difference: float) -> Setting:
    """Arms of which the first is better than all others, which are equal."""
    accuracies = (0.5 + difference / 2,) + (0.5 - difference / 2,) * (arms - 1)
    return Setting("", accuracies, seeds, (2 * BASE,) * arms, taste=0)


def detection_rate(setting: Setting, tables: int, seed: int) -> float:
    """How often the first contrast gets a verdict that its side a is greater."""
    rng = np.random.default_rng(seed)
    detected = []
    for _ in range(tables):
        first = ours(sample(rng, setting), setting).compared[0]
        detected.append(first.kind == "greater" and first.difference > 0)
    return float(np.mean(detected))


def format_cell(label: str, value: float) -> str:
    """A value of `COLUMNS` in the printed table."""
    if label == "seeds":
        return f"{value:.1f}"
    if np.isnan(value):
        return ""
    return f"{100 * value:.1f} %"


def main(
    tables: int = 5000, only: str = "", seed: int = 0, processes: int = 1, with_power: bool = True
) -> None:
    """Print the rates of all settings whose name has `only` in it, as Markdown.

    Args:
        tables: Simulated tables of each setting.
        only: A part of the settings' names; all settings where it is empty.
        seed: Of the simulation.
        processes: Settings that are simulated at a time.
        with_power: Print how often the differences that designs print are detected, too.
    """
    chosen = [setting for setting in settings() if only in setting.name]
    start = time.monotonic()
    standard_error = 100 * np.sqrt(0.05 * 0.95 / tables)
    print(f"{tables} tables each; one standard error of 5 % is {standard_error:.1f} points\n")
    print(f"| setting | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|", flush=True)
    with ProcessPoolExecutor(processes, initializer=os.nice, initargs=(5,)) as pool:
        jobs = [pool.submit(rates, setting, tables, seed) for setting in chosen]
        for setting, job in zip(chosen, jobs, strict=True):
            values = zip(COLUMNS, job.result(), strict=True)
            cells = [format_cell(label, value) for label, value in values]
            print(f"| {setting.name} | {' | '.join(cells)} |", flush=True)
        if with_power:
            print_power(pool, tables, seed)
    print(f"\n{(time.monotonic() - start) / 60:.0f} minutes")


def print_power(pool: ProcessPoolExecutor, tables: int, seed: int) -> None:
    """Print how often the differences that designs print are detected."""
    print("\n| design | smallest difference printed | found in (80 % stated) |\n|---|---|---|")
    rows = printed_power()
    jobs = [pool.submit(detection_rate, row.setting, tables, seed) for row in rows]
    for row, job in zip(rows, jobs, strict=True):
        rate = 100 * job.result()
        print(f"| {row.design} | {row.difference:.3f} | {rate:.1f} % |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
