"""Would `--until_decided` need fewer seeds if its looks shared the 5 % in another way?

    uv run -m benchmarks.spending_rates

`equal shares` is the rule: each of K looks, after S to M seeds, has the K-th part of the chance of
a false verdict (Bonferroni). Beside it are `one level`, by which all looks together have that
chance, found by simulated t tests of equal arms; the increments of Lan and DeMets' (1983) spending
functions, which approximate O'Brien and Fleming's and Pocock's bounds, at the share of M that the
seeds so far are; and the levels that spend as much where the looks' correlation is counted. By
simulation of two arms, or of all pairs of several, whose runs have normal noise: how many tables
have a false verdict, and how many seeds a comparison takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import tyro
from scipy import stats
from scipy.special import stdtr

from alignment.ablation.design import ALPHA, SEED_STD
from alignment.ablation.statistics import ScoredTables, halves_of_tables
from alignment.core.power import score_std

QUESTIONS = 512
TIE = 0.03
CALIBRATION = 400_000  # tables of equal arms by which levels are found
LOOK_DRAWS = 100_000  # the same, of one level


@dataclass(frozen=True)
class SpendingSetting:
    """Arms of which the first is better, and the numbers of seeds after which verdicts are made."""

    arms: int
    looks: range
    difference: float


def obrien_fleming(share: np.ndarray) -> np.ndarray:
    """The part of ALPHA that is spent up to a share of the seeds: 2 - 2 Phi(z / sqrt(t)), z the
    normal quantile of 1 - ALPHA / 2 (Lan and DeMets 1983)."""
    return 2 - 2 * stats.norm.cdf(stats.norm.ppf(1 - ALPHA / 2) / np.sqrt(share))


def pocock(share: np.ndarray) -> np.ndarray:
    """The same: ALPHA ln(1 + (e - 1) t)."""
    return ALPHA * np.log(1 + (np.e - 1) * share)


def bonferroni(looks: range) -> np.ndarray:
    """The level of each look: an equal share."""
    return np.full(len(looks), ALPHA / len(looks))


def increments(spent: Callable[[np.ndarray], np.ndarray]) -> Callable[[range], np.ndarray]:
    """The levels whose sum up to a look is what is spent up to it."""

    def levels(looks: range) -> np.ndarray:
        return np.diff(spent(np.array(looks) / looks[-1]), prepend=0.0)

    return levels


def correlated(spent: Callable[[np.ndarray], np.ndarray]) -> Callable[[range], np.ndarray]:
    """The levels with which the chance to have crossed one of them up to a look is what is spent
    up to it, of t tests of two equal arms."""

    def levels(looks: range) -> np.ndarray:
        rng = np.random.default_rng(1)
        differences_NS = rng.normal(size=(CALIBRATION, looks[-1]))
        is_left_N = np.full(CALIBRATION, True)
        found = []
        for seeds, target in zip(looks, spent(np.array(looks) / looks[-1]), strict=True):
            so_far_NS = differences_NS[:, :seeds]
            t_N = so_far_NS.mean(1) / np.sqrt(so_far_NS.var(1, ddof=1) / seeds)
            p_N = 2 * stats.t.sf(np.abs(t_N), seeds - 1)
            crossed = int(target * CALIBRATION) - int((~is_left_N).sum())
            level = np.partition(p_N[is_left_N], max(0, crossed))[max(0, crossed)]
            is_left_N &= p_N >= level
            found.append(level)
        return np.array(found)

    return levels


@functools.cache
def level_of_looks(looks: range, family: int = 1) -> float:
    """The chance of a false verdict that each look may have, where verdicts are made after each
    number of seeds in `looks`, so that all of them together have `ALPHA`. As with Pocock's
    bounds of group sequential tests every look has the same level, which exceeds ALPHA / looks
    because looks at the same seeds err together.

    It is found from simulated paired t tests of equal arms: `ALPHA / family` is the chance that the
    smallest of their p values is below the level / `family`, as Holm's first step has it."""
    tested = [seeds for seeds in looks if seeds > 1]
    if len(tested) < 2:
        return ALPHA
    rng = np.random.default_rng(0)
    smallest_N = np.ones(LOOK_DRAWS)
    sum_N = np.zeros(LOOK_DRAWS)
    squares_N = np.zeros(LOOK_DRAWS)
    for seeds in range(1, tested[-1] + 1):
        differences_N = rng.normal(size=LOOK_DRAWS)
        sum_N += differences_N
        squares_N += differences_N**2
        if seeds < tested[0]:
            continue
        variance_N = (squares_N - sum_N**2 / seeds) / (seeds - 1)
        t_N = np.abs(sum_N) / np.sqrt(seeds * variance_N)
        np.minimum(smallest_N, 2 * stdtr(seeds - 1, -t_N), out=smallest_N)
    level = family * float(np.quantile(smallest_N, ALPHA / family))
    return max(level, ALPHA / len(tested))  # Bonferroni's level, which holds whatever the noise


def one_level(looks: range) -> np.ndarray:
    """The level of each look, that of two arms."""
    return np.full(len(looks), level_of_looks(looks))


RULES: Mapping[str, Callable[[range], np.ndarray]] = {
    "one level": one_level,
    "equal shares": bonferroni,
    "O'Brien-Fleming, increments": increments(obrien_fleming),
    "Pocock, increments": increments(pocock),
    "O'Brien-Fleming, correlated": correlated(obrien_fleming),
    "Pocock, correlated": correlated(pocock),
}


def rates(setting: SpendingSetting, levels: np.ndarray, tables: int, seed: int) -> list[float]:
    """The shares of tables with a false verdict, and of comparisons of the first arm that find it
    better, and the mean seeds of a comparison of the first arm, and of others (NaN: none)."""
    rng = np.random.default_rng(seed)
    std = score_std(SEED_STD, QUESTIONS)
    scores_NAS = rng.normal(scale=std, size=(tables, setting.arms, setting.looks[-1]))
    scores_NAS[:, 0] += setting.difference
    pairs = list(combinations(range(setting.arms), 2))
    is_false_N = np.full(tables, False)
    seeds_used: dict[bool, list[float]] = {True: [], False: []}
    found = []
    for a, b in pairs:
        weights_A = np.zeros(setting.arms)
        weights_A[[a, b]] = 1.0, -1.0
        true = setting.difference if a == 0 else 0.0
        used_N = np.full(tables, float(setting.looks[-1]))
        is_open_N = np.full(tables, True)
        is_found_N = np.full(tables, False)
        for seeds, level in zip(setting.looks, levels, strict=True):
            drawn = ScoredTables(scores_NAS[:, :, :seeds], weights_A, len(pairs), max(level, 1e-12))
            mean_N, half_N = halves_of_tables(drawn)
            is_greater_N = is_open_N & (np.abs(mean_N) > half_N)
            is_tie_N = is_open_N & ~is_greater_N & (np.abs(mean_N) + half_N < TIE)
            is_right_N = np.sign(mean_N) == np.sign(true)
            is_false_N |= is_greater_N & ~is_right_N
            is_false_N |= is_tie_N & (abs(true) >= TIE)
            is_found_N |= is_greater_N & is_right_N
            is_decided_N = is_greater_N | is_tie_N
            used_N[is_decided_N] = seeds
            is_open_N &= ~is_decided_N
        seeds_used[a == 0].append(float(used_N.mean()))
        if a == 0:
            found.append(float(is_found_N.mean()))
    others = float(np.mean(seeds_used[False])) if seeds_used[False] else np.nan
    return [
        float(is_false_N.mean()),
        float(np.mean(found)),
        float(np.mean(seeds_used[True])),
        others,
    ]


def main(tables: int = 20_000, seed: int = 0) -> None:
    """Print false tables, found differences and seeds of every rule, as Markdown.

    Args:
        tables: Simulated tables of each setting.
        seed: Of the simulation.
    """
    standard_error = 100 * np.sqrt(ALPHA * (1 - ALPHA) / tables)
    print(f"{tables} tables each; one standard error of 5 % is {standard_error:.2f} points\n")
    print("| arms | looks | difference | rule | false tables | found | seeds | of equal pairs |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for looks in (range(2, 9), range(3, 11), range(5, 16)):
        for rule, find_levels in RULES.items():
            levels_of_two = find_levels(looks)
            for arms in (2, 4):
                levels = levels_of_two
                if rule == "one level":
                    levels = np.full(len(looks), level_of_looks(looks, arms * (arms - 1) // 2))
                for difference in (0.0, 0.05, 0.1, 0.3):
                    setting = SpendingSetting(arms, looks, difference)
                    false, found, seeds, others = rates(setting, levels, tables, seed)
                    print(
                        f"| {arms} | {looks[0]} to {looks[-1]} | {difference:g} | {rule} |"
                        f" {100 * false:.1f} | {100 * found:.1f} | {seeds:.2f} | {others:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
