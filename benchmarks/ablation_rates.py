"""How often the verdicts of an ablation are false, and how often its intervals hold the truth, by
simulation.

uv run -m benchmarks.ablation_rates --only "4 arms, 3 seeds"

The answers come from a model of runs (`sample`), not from the model of the estimator. Beside ours
stand the usual percentile bootstrap over seeds and questions, each pair by itself, and Welch's t
test over seeds with Holm's correction.
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
    outcomes: tuple[tuple[tuple[float, float], ...], ...] = ()
    """For each arm of the first ones the probabilities of outcomes, such as not learning, and what
    each adds to the accuracy; the rest of the probability is that of no change. Arms fail apart,
    but for `shared_outcomes`: there a seed's outcome, drawn from the first arm's, strikes all
    arms."""
    shared_outcomes: bool = False


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
    seeds = setting.last_seeds or setting.seeds
    outcomes_AS = np.zeros((len(setting.accuracies), seeds), dtype=int)
    for arm, outcomes in enumerate(setting.outcomes):
        chances = [probability for probability, _ in outcomes]
        outcomes_AS[arm] = rng.choice(
            1 + len(outcomes), seeds, p=[max(0.0, 1 - sum(chances)), *chances]
        )
    return (
        np.tile(outcomes_AS[:1], (len(outcomes_AS), 1)) if setting.shared_outcomes else outcomes_AS
    )


def outcome_table(setting: Setting) -> np.ndarray:
    """For each arm its outcomes' probabilities and what they add to its accuracy, [2, A, K]; the
    first is no change."""
    several = (
        (setting.outcomes[:1] * len(setting.accuracies))
        if setting.shared_outcomes
        else setting.outcomes
    )
    table = np.zeros((2, len(setting.accuracies), 1 + max(map(len, several), default=0)))
    for arm, outcomes in enumerate(several):
        for place, outcome in enumerate(outcomes, start=1):
            table[:, arm, place] = outcome
    table[0, :, 0] = 1 - table[0].sum(axis=1)
    return table


def outcome_shifts(setting: Setting) -> np.ndarray:
    """What each arm's outcomes add to its accuracy [A, K]."""
    return outcome_table(setting)[1]


def sample(
    rng: np.random.Generator, setting: Setting, outcomes_AS: np.ndarray | None = None
) -> dict:
    """Answers by arm and seed, with these outcomes of runs or with drawn ones. Right or wrong:
    questions differ in difficulty, arms in which questions they are good at, seeds in luck that all
    arms share and in luck of one run; each answer is a Bernoulli draw."""
    outcomes_AS = sample_outcomes(rng, setting) if outcomes_AS is None else outcomes_AS
    arms, seeds = len(setting.accuracies), setting.last_seeds or setting.seeds
    groups = -(-setting.questions // setting.cluster)
    accuracy_A = np.array(setting.accuracies)
    reached_AK = np.clip(accuracy_A[:, None] + outcome_shifts(setting), 0, 1)
    # effects are smaller where little can change
    room_A = 2 * np.minimum(reached_AK, 1 - reached_AK).min(axis=1)[:, None]
    by_question_AQ = rng.uniform(-0.3, 0.3, groups) + np.sqrt(3) * setting.taste * rng.uniform(
        -1, 1, (arms, groups)
    )
    by_question_AQ = np.repeat(room_A * by_question_AQ, setting.cluster, axis=1)[
        :, : setting.questions
    ]
    run_AS = np.array(setting.noise)[:, None] * deviations(rng, setting.shape, (arms, seeds))
    run_AS = run_AS + room_A * setting.shared * rng.normal(size=seeds)
    run_AS = run_AS + outcome_shifts(setting)[np.arange(arms)[:, None], outcomes_AS]
    p_ASQ = accuracy_A[:, None, None] + by_question_AQ[:, None, :] + run_AS[:, :, None]
    if "collapses" in setting.shape:
        share_A = np.where(
            np.arange(arms) == arms - 1, 0.1, 0.0 if setting.shape == "one arm collapses" else 0.1
        )
        p_ASQ = p_ASQ * np.where(rng.random((arms, seeds)) < share_A[:, None], 0.1, 1.0)[:, :, None]
    if setting.evaluations > 1:
        y_ASQ = curve_areas(rng, p_ASQ, setting)
    else:
        y_ASQ = (rng.random(p_ASQ.shape) < p_ASQ).astype(float)
    present = rng.random((arms, seeds)) >= setting.missing
    if setting.unequal:
        present[::3, max(2, seeds - 2) :] = False
    return {str(a): {s: y_ASQ[a, s] for s in range(seeds) if present[a, s]} for a in range(arms)}


def curve_areas(rng: np.random.Generator, p_ASQ: np.ndarray, setting: Setting) -> np.ndarray:
    """Areas [A, S, Q] under curves that rise to `p_ASQ`, with a random walk in each run between its
    evaluations."""
    steps = np.arange(setting.evaluations)
    walk_EAS = (
        0.5
        * np.mean(setting.noise)
        * np.cumsum(rng.normal(size=(len(steps), *p_ASQ.shape[:2])), axis=0)
    )
    level_EASQ = p_ASQ * (steps / steps[-1])[:, None, None, None] + walk_EAS[..., None]
    answers = (rng.random(level_EASQ.shape) < level_EASQ).astype(float)
    return area_under_curve(list(steps), answers.reshape(len(steps), -1)).reshape(p_ASQ.shape)


def contrasts(setting: Setting) -> list[Contrast]:
    """Every pair of arms, or of a grid, every pair of levels of the last factor, each level by the
    mean of its arms."""
    if not setting.grid:
        return pairs([str(a) for a in range(len(setting.accuracies))])
    levels, arms = setting.grid[-1], len(setting.accuracies)
    share = levels / arms
    return [
        Contrast(
            f"level {a}",
            f"level {b}",
            {
                str(i): share if i % levels == a else -share
                for i in range(arms)
                if i % levels in (a, b)
            },
        )
        for a, b in combinations(range(levels), 2)
    ]


def seen_outcomes(
    arms: Mapping[str, Scores], outcomes_AS: np.ndarray, seeds: int
) -> list[set[int]]:
    """For each arm the outcomes of its runs among the first seeds."""
    return [
        {int(outcomes_AS[int(arm), seed]) for seed in by_seed if seed < seeds}
        for arm, by_seed in arms.items()
    ]


def true_difference(
    setting: Setting, contrast: Contrast, seen: Sequence[set[int]] | None = None
) -> float:
    """The difference of expected accuracies, over seeds and questions: of all runs, or of runs
    whose outcome was seen."""
    chances_AK, shifts_AK = outcome_table(setting)
    if seen is not None:
        seen_AK = [[outcome in of_arm for outcome in range(chances_AK.shape[1])] for of_arm in seen]
        chances_AK = np.where(seen_AK, chances_AK, 0.0)
    # 0 for an arm without a run, which gets no verdict
    total_A = np.maximum(chances_AK.sum(axis=1), 1e-300)
    expected = np.array(setting.accuracies) + (chances_AK * shifts_AK).sum(axis=1) / total_A
    if setting.shape == "one arm collapses":
        expected[-1] *= 0.9 + 0.1 * 0.1
    value = sum(weight * expected[int(arm)] for arm, weight in contrast.weights.items())
    return round(float(value) / (2 if setting.evaluations > 1 else 1), 12)


# --- the methods ----------------------------------------------------------------------------------


def ours(arms: Mapping[str, Scores], setting: Setting) -> tuple[list[Comparison], int]:
    """The comparisons of one look, or of the last look of --until_decided, and the seeds of the arm
    with the most."""
    groups = (
        [q // setting.cluster for q in range(setting.questions)] if setting.clusters_known else None
    )
    if not setting.last_seeds:
        return compare(arms, TIE, contrasts(setting), groups=groups), setting.seeds
    states = [State(arm, seed, "done") for arm in arms for seed in range(setting.seeds)]
    while True:
        seen = {arm: {s.seed: arms[arm][s.seed] for s in states if s.arm == arm} for arm in arms}
        compared = compare(
            seen, TIE, contrasts(setting), alpha=ALPHA / (setting.last_seeds - setting.seeds + 1)
        )
        added = next_runs(states, compared, setting.last_seeds)
        if not added:
            return compared, max(map(len, seen.values()))
        states += [replace(state, status="done") for state in added]


def weights_of(compared: Sequence[Contrast], arms: Mapping[str, Scores]) -> np.ndarray:
    """The weights of the arms in each contrast [C, A]."""
    return np.array([[contrast.weights.get(arm, 0.0) for arm in arms] for contrast in compared])


def welch(arms: Mapping[str, Scores], weights_CA: np.ndarray) -> np.ndarray:
    """Whether Welch's t test over seeds, with Holm's correction, finds a difference, for each
    contrast."""
    values = [np.array([x.mean() for x in by_seed.values()]) for by_seed in arms.values()]
    several = np.array([len(v) > 1 for v in values])
    mean_A = np.array([v.mean() if len(v) else 0.0 for v in values])
    error_A = np.array([v.var(ddof=1) / len(v) if len(v) > 1 else 0.0 for v in values])
    errors_CA = weights_CA**2 * error_A
    total_C = np.maximum(errors_CA.sum(axis=1), 1e-300)
    dof_C = total_C**2 / np.maximum(
        (errors_CA**2 / [max(1, len(v) - 1) for v in values]).sum(axis=1), 1e-300
    )
    p_C = 2 * stats.t.sf(np.abs(weights_CA @ mean_A) / np.sqrt(total_C), np.maximum(dof_C, 1))
    return np.array(holm(np.where((weights_CA != 0) @ ~several, 1.0, p_C))) < ALPHA


def percentile(
    rng: np.random.Generator, arms, weights_CA: np.ndarray, resamples_DQ: np.ndarray
) -> np.ndarray:
    """The usual bootstrap: seeds and questions resampled with replacement, the 2.5 % and 97.5 %
    quantiles [2, C]."""
    seeds = sorted({seed for by_seed in arms.values() for seed in by_seed})
    seeds_DS = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), DRAWS).astype(float)
    mean_DA = np.zeros((DRAWS, len(arms)))
    for a, by_seed in enumerate(arms.values()):
        if by_seed:
            own_DS = seeds_DS[:, [seeds.index(seed) for seed in by_seed]] + 1e-9
            mean_DA[:, a] = ((resamples_DQ @ np.array(list(by_seed.values())).T) * own_DS).sum(
                1
            ) / own_DS.sum(1)
    return np.quantile(mean_DA @ weights_CA.T, [ALPHA / 2, 1 - ALPHA / 2], axis=0)


# --- rates ----------------------------------------------------------------------------------------


def false_verdict(c: Comparison, true: float) -> str:
    """By a true difference, the kind of a verdict that is false, or "" for a true one or none."""
    wrong = c.kind == "greater" and (true == 0 or (c.difference > 0) != (true > 0))
    return "greater" if wrong else "tie" if c.kind == "tie" and abs(true) >= TIE - 1e-9 else ""


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
)
"""False tables have a verdict that is false as it stands: one in runs like these of the outcomes
that were seen, another of all runs. False of all runs are those with a verdict that is false of all
runs, whatever its words."""


def rates(setting: Setting, tables: int, seed: int) -> list[float]:
    """The values of `COLUMNS` over simulated tables."""
    compared = contrasts(setting)
    true = [true_difference(setting, c) for c in compared]
    noisy = str(int(np.argmax(setting.noise))) if len(set(setting.noise)) > 1 else ""
    rng = np.random.default_rng((seed, setting.seeds, len(setting.accuracies)))
    resamples = (
        rng.multinomial(setting.questions, np.full(setting.questions, 1 / setting.questions), DRAWS)
        / setting.questions
    )
    rows = []
    for _ in range(tables):
        outcomes_AS = sample_outcomes(rng, setting)
        arms = sample(rng, setting, outcomes_AS)
        found, seeds = ours(arms, setting)
        like_these = [
            true_difference(setting, c, seen_outcomes(arms, outcomes_AS, seeds)) for c in compared
        ]
        meant = [t if c.firm else seen for c, t, seen in zip(found, true, like_these, strict=True)]
        falsehoods = [false_verdict(c, t) for c, t in zip(found, meant, strict=True)]
        of_all = [false_verdict(c, t) for c, t in zip(found, true, strict=True)]
        held = [
            (c.low <= t <= c.high, noisy in c.arms)
            for c, t in zip(found, true, strict=True)
            if c.seeds > 1
        ]
        rejected = welch(arms, weights := weights_of(compared, arms))
        low, high = percentile(rng, arms, weights, resamples)
        rows.append(
            [
                any(falsehoods),
                "tie" in falsehoods,
                np.mean([h for h, _ in held]) if held else np.nan,
                (
                    np.mean([h for h, is_noisy in held if is_noisy])
                    if any(n for _, n in held)
                    else np.nan
                ),
                np.mean([c.kind != "undecided" for c in found]),
                np.mean(["unstable" in c.verdict for c in found]),
                seeds,
                any(r and t == 0 for r, t in zip(rejected, true, strict=True)),
                np.mean(rejected),
                np.mean((low <= true) & (true <= high)),
                any(t == 0 and not a <= 0 <= b for a, b, t in zip(low, high, true, strict=True)),
                any(of_all),
                any(false and c.firm for c, false in zip(found, of_all, strict=True)),
                any("two places" in c.verdict for c in found),
            ]
        )
    values = np.array(rows, dtype=float)
    return [
        float(np.nanmean(column)) if not np.isnan(column).all() else np.nan for column in values.T
    ]


# --- settings -------------------------------------------------------------------------------------

BASE = 0.01  # standard deviation of a quiet arm between seeds


def noises(arms: int) -> Iterator[tuple[str, tuple[float, ...], str]]:
    """Name, standard deviations and shape of each kind of noise."""
    yield "equal noise", (2 * BASE,) * arms, "normal"
    for times in (2, 4, 8, 20):
        yield f"one arm {times} x", (BASE,) * (arms - 1) + (times * BASE,), "normal"
    yield "half 4 x", tuple(BASE * (4 if a % 2 else 1) for a in range(arms)), "normal"
    for shape in ("heavy tails", "skew", "a seed in ten collapses"):
        yield shape, (2 * BASE,) * arms, shape


def settings() -> Iterator[Setting]:
    """All settings of the table."""
    for arms, seeds in product((2, 3, 4, 8, 12), (2, 3, 5, 10)):
        for noise, spreads, shape in noises(arms):
            yield Setting(
                f"{arms} arms, {seeds} seeds, {noise}", (0.5,) * arms, seeds, spreads, shape
            )
    for arms, seeds, accuracy in product((2, 4), (2, 3, 5), (0.02, 0.98)):
        yield Setting(
            f"{arms} arms, {seeds} seeds, accuracy {accuracy}",
            (accuracy,) * arms,
            seeds,
            (0.002,) * arms,
        )
    for arms, seeds in product((4, 8), (2, 3, 5, 10)):
        accuracies = tuple(0.5 + 0.35 * (a // 2) / ((arms - 1) // 2) for a in range(arms))
        spreads = tuple(0.01 + 0.1 * (accuracy - 0.5) for accuracy in accuracies)
        yield Setting(f"{arms} arms, {seeds} seeds, noise by accuracy", accuracies, seeds, spreads)
    for grid, seeds in product(((2, 2), (2, 3), (3, 4), (2, 2, 2)), (2, 3, 5)):
        arms, label = int(np.prod(grid)), " x ".join(map(str, grid))
        for noise, spreads, shape in [
            n for n in noises(arms) if n[0] in ("equal noise", "one arm 8 x", "half 4 x")
        ]:
            yield Setting(
                f"grid {label}, {seeds} seeds, {noise}",
                (0.5,) * arms,
                seeds,
                spreads,
                shape,
                grid=grid,
            )
    yield from other_settings()


def other_settings() -> Iterator[Setting]:
    """Settings that vary one thing about four arms, differences equal to the margin of a tie, and
    --until_decided."""
    for seeds in (3, 5):
        plain = Setting("", (0.5,) * 4, seeds, (2 * BASE,) * 4)
        yield replace(
            plain, name=f"4 arms, {seeds} seeds, questions in fours", cluster=4, taste=0.12
        )
        yield replace(
            plain,
            name=f"4 arms, {seeds} seeds, fours, known",
            cluster=4,
            taste=0.12,
            clusters_known=True,
        )
        yield replace(plain, name=f"4 arms, {seeds} seeds, a run in ten missing", missing=0.1)
        yield replace(plain, name=f"4 arms, {seeds} seeds, unequal seeds", unequal=True)
        yield replace(
            plain,
            name=f"4 arms, {seeds} seeds, unequal seeds, one 8 x",
            unequal=True,
            noise=(0.01,) * 3 + (0.08,),
        )
        yield replace(plain, name=f"4 arms, {seeds} seeds, areas", evaluations=5)
        yield replace(
            plain, name=f"4 arms, {seeds} seeds, no noise between seeds", noise=(0.0,) * 4
        )
        yield replace(
            plain, name=f"4 arms, {seeds} seeds, one arm collapses", shape="one arm collapses"
        )
        yield replace(
            plain,
            name=f"4 arms, {seeds} seeds, two 0.08 better",
            accuracies=(0.46, 0.46, 0.54, 0.54),
        )
    for arms, seeds, times in product((2, 4, 8), (5, 10), (1, 4, 20)):
        spreads = (0.004,) * (arms - 1) + (0.004 * times,)
        accuracies = (0.485,) * (arms - 1) + (0.515,)
        yield Setting(
            f"{arms} arms, {seeds} seeds, at the margin, one arm {times} x",
            accuracies,
            seeds,
            spreads,
            questions=2048,
        )
    for arms, first, last in ((2, 2, 8), (3, 2, 8), (3, 3, 10), (4, 3, 6)):
        for noise, spreads, shape in [
            n for n in noises(arms) if n[0] in ("equal noise", "one arm 8 x")
        ]:
            name = f"until decided, {arms} arms, {first} to {last} seeds, {noise}"
            yield Setting(name, (0.5,) * arms, first, spreads, shape, last_seeds=last)
        name = f"until decided, {arms} arms, {first} to {last} seeds, one 0.05 better"
        yield Setting(
            name, (0.5,) * (arms - 1) + (0.55,), first, (2 * BASE,) * arms, last_seeds=last
        )
    yield from outcome_settings()
    for noise in (2 * BASE, 8 * BASE):  # of the arms that go on; the last one stops early
        name = f"until decided, 4 arms, 3 to 8 seeds, one 0.3 worse, noise {noise:g}"
        yield Setting(name, (0.5,) * 3 + (0.2,), 3, (noise,) * 3 + (2 * BASE,), last_seeds=8)


COIN = ((0.5, -0.35), (0.5, 0.35))  # learns or does not, at the other arms' mean
RARE = ((0.1, -0.3),)


def outcome_settings() -> Iterator[Setting]:
    """Settings in which runs end in several places."""
    for seeds in (2, 3, 4, 5, 6, 8, 12):
        yield Setting(
            f"places: coin, 2 arms, {seeds} seeds",
            (0.5,) * 2,
            seeds,
            (2 * BASE,) * 2,
            outcomes=(COIN,),
        )
    for seeds in (3, 6):
        yield Setting(
            f"places: coin in one of 4 arms, {seeds} seeds",
            (0.5,) * 4,
            seeds,
            (2 * BASE,) * 4,
            outcomes=(COIN,),
        )
        yield Setting(
            f"places: coin in 4 of 4 arms, {seeds} seeds",
            (0.5,) * 4,
            seeds,
            (2 * BASE,) * 4,
            outcomes=(COIN,) * 4,
        )
    for first, last in ((2, 8), (3, 10)):
        name = f"places: coin until decided, 2 arms, {first} to {last} seeds"
        yield Setting(name, (0.5,) * 2, first, (2 * BASE,) * 2, outcomes=(COIN,), last_seeds=last)
    for seeds in (5, 8, 10, 16, 60):
        quiet = (0.004,) * 2
        yield Setting(
            f"places: .3 lost in 1 of 10, 2 arms, {seeds} seeds",
            (0.5,) * 2,
            seeds,
            quiet,
            outcomes=(RARE,),
            questions=2048,
        )
    for seeds in (5, 10):
        three = ((1 / 3, -0.35), (1 / 3, 0.35))
        yield Setting(
            f"places: three, 2 arms, {seeds} seeds",
            (0.5,) * 2,
            seeds,
            (2 * BASE,) * 2,
            outcomes=(three,),
        )
        uneven = (((0.05, -0.3),), ((0.15, -0.3),), ((0.3, -0.3),), ())
        base = (0.515, 0.545, 0.59, 0.5)
        yield Setting(
            f"places: loss rates differ, equal means, 4 arms, {seeds} seeds",
            base,
            seeds,
            (2 * BASE,) * 4,
            outcomes=uneven,
        )
        shared = Setting(
            f"places: bad seeds that all arms share, 4 arms, {seeds} seeds",
            (0.5,) * 4,
            seeds,
            (2 * BASE,) * 4,
        )
        yield replace(shared, outcomes=(RARE,), shared_outcomes=True)
        gain = ((0.1, 0.5),)
        yield Setting(
            f"places: 1 of 10 learns, 2 arms, {seeds} seeds",
            (0.2, 0.25),
            seeds,
            (2 * BASE,) * 2,
            outcomes=(gain,),
        )
        unequal = Setting(
            f"places: coin, unequal seeds, 4 arms, {seeds} seeds",
            (0.5,) * 4,
            seeds,
            (2 * BASE,) * 4,
            unequal=True,
        )
        yield replace(unequal, outcomes=(COIN,))
        yield Setting(
            f"places: grid 2 x 2, one coin, {seeds} seeds",
            (0.5,) * 4,
            seeds,
            (2 * BASE,) * 4,
            outcomes=(COIN,),
            grid=(2, 2),
        )
        near = ((0.5, -0.05), (0.5, 0.05))
        yield Setting(
            f"places: .1 apart, 2 arms, {seeds} seeds",
            (0.5,) * 2,
            seeds,
            (BASE,) * 2,
            outcomes=(near,),
        )
        for shape in ("heavy tails", "skew", "drift"):
            yield Setting(
                f"places: none, {shape}, 4 arms, {seeds} seeds",
                (0.5,) * 4,
                seeds,
                (2 * BASE,) * 4,
                shape,
            )


def printed_power() -> Iterator[tuple[str, Setting, float]]:
    """Settings whose first contrast is the smallest difference that the design prints, and that
    difference."""
    for arms, seeds, last in (
        (2, 3, 3),
        (4, 3, 3),
        (4, 5, 5),
        (12, 3, 3),
        (12, 5, 5),
        (2, 2, 8),
        (3, 3, 10),
    ):
        weights, family, looks = (
            (1, -1) + (0,) * (arms - 2),
            arms * (arms - 1) // 2,
            range(seeds, last + 1),
        )
        difference = power(weights, family, looks, score_std(2 * BASE, 512), TIE).difference
        accuracies = (0.5 + difference / 2,) + (0.5 - difference / 2,) * (arms - 1)
        until = f" to {last}" if last > seeds else ""
        setting = Setting(
            "", accuracies, seeds, (2 * BASE,) * arms, taste=0, last_seeds=last if until else 0
        )
        yield f"{arms} arms, {seeds}{until} seeds", setting, difference
    for grid, seeds in (((2, 2), 3), ((3, 4), 3), ((2, 2, 2), 5)):
        arms = int(np.prod(grid))
        setting = Setting("", (0.5,) * arms, seeds, (2 * BASE,) * arms, taste=0, grid=grid)
        compared = contrasts(setting)
        weights = [compared[0].weights.get(str(a), 0.0) for a in range(arms)]
        difference = power(
            weights, len(compared), range(seeds, seeds + 1), score_std(2 * BASE, 512), TIE
        ).difference
        accuracies = tuple(0.5 + difference * (a % grid[-1] == 0) for a in range(arms))
        yield (
            f"grid {' x '.join(map(str, grid))}, {seeds} seeds",
            replace(setting, accuracies=accuracies),
            difference,
        )


def found_pairs(setting: Setting, tables: int, seed: int) -> float:
    """How often the first contrast gets a verdict that its side a is greater."""
    rng = np.random.default_rng(seed)
    found = [ours(sample(rng, setting), setting)[0][0] for _ in range(tables)]
    return float(np.mean([c.kind == "greater" and c.difference > 0 for c in found]))


def main(
    tables: int = 5000, only: str = "", seed: int = 0, processes: int = 1, with_power: bool = True
) -> None:
    """Print the rates of all settings whose name has `only` in it, as Markdown."""
    chosen = [setting for setting in settings() if only in setting.name]
    start = time.monotonic()
    print(
        f"{tables} tables each; one standard error of 5 % is"
        f" {100 * np.sqrt(0.05 * 0.95 / tables):.1f} points\n"
    )
    print(f"| setting | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|", flush=True)
    with ProcessPoolExecutor(processes, initializer=os.nice, initargs=(5,)) as pool:
        jobs = [pool.submit(rates, setting, tables, seed) for setting in chosen]
        for setting, job in zip(chosen, jobs, strict=True):
            cells = [
                f"{v:.1f}" if label == "seeds" else "" if np.isnan(v) else f"{100 * v:.1f} %"
                for label, v in zip(COLUMNS, job.result(), strict=True)
            ]
            print(f"| {setting.name} | {' | '.join(cells)} |", flush=True)
        if with_power:
            print(
                "\n| design | smallest difference printed | found in (80 % stated) |\n|---|---|---|"
            )
            rows = list(printed_power())
            for (name, _, difference), job in [
                (row, pool.submit(found_pairs, row[1], tables, seed)) for row in rows
            ]:
                print(f"| {name} | {difference:.3f} | {100 * job.result():.1f} % |", flush=True)
    print(f"\n{(time.monotonic() - start) / 60:.0f} minutes")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
