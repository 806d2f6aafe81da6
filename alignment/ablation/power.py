"""The power of a design before it is run: the differences and ties that its seeds would show, by simulation of the rule."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from alignment.ablation.design import ALPHA

DRAWS = 4_000


class Power(NamedTuple):
    """The smallest difference of two arms that would be found with the stated chance, infinite with one seed, and the chance
    that two arms alike would be called a tie."""

    difference: float
    tie: float


def power(
    arms: int, seeds: int, questions: int, seed_std: float, *, accuracy: float = 0.5, tie: float, last_seeds: int = 0,
    chance: float = 0.8,
) -> Power:  # fmt: skip
    """The power of `arms` arms with `seeds` seeds, or with a look after every seed up to `last_seeds`, which share the error
    rate.

    `seed_std` is the standard deviation of an arm's accuracy between seeds, questions aside; each question has one answer.
    Effects of an arm on single questions, alike in all seeds, are not known beforehand and left out.
    """
    if seeds < 2 or arms < 2:
        return Power(math.inf, 0.0)
    looks = range(seeds, max(seeds, last_seeds) + 1)
    std = math.sqrt(seed_std**2 + accuracy * (1 - accuracy) / questions)
    scores_NAS = np.random.default_rng(0).normal(scale=std, size=(DRAWS, arms, looks[-1]))
    errors_LN, halves_LN = zip(*(_look(scores_NAS[:, :, :count], ALPHA / len(looks)) for count in looks), strict=True)
    errors, halves = np.array(errors_LN), np.array(halves_LN)

    def shortfall(difference: float) -> float:
        return float(((errors + difference) > halves).any(axis=0).mean()) - chance

    upper = float(halves.max() - errors.min())
    return Power(optimize.brentq(shortfall, 0.0, upper, xtol=1e-6), float((np.abs(errors) + halves < tie).any(axis=0).mean()))


def _look(scores_NAS: np.ndarray, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """For N simulated tables, the error of the difference of the first two arms, and half the length of the interval on which
    its verdict rests: that of `statistics.compare` for the pair with the smallest p value, where no run is missing."""
    arms, seeds = scores_NAS.shape[1:]
    residuals = scores_NAS - scores_NAS.mean(1, keepdims=True) - scores_NAS.mean(2, keepdims=True)
    residuals += scores_NAS.mean((1, 2), keepdims=True)
    squares_NA = (residuals**2).sum(2)
    dof = (arms - 1) * (seeds - 1)
    common_N = squares_NA.sum(1) / dof
    own_N2 = (arms * squares_NA[:, :2] / (seeds - 1) - common_N[:, None]) / (arms - 2) if arms > 2 else common_N[:, None]
    by_arms_N = np.broadcast_to(np.maximum(own_N2, common_N[:, None]), (len(common_N), 2)).sum(1)
    difference_NS = scores_NAS[:, 0] - scores_NAS[:, 1]
    largest_N = np.maximum(by_arms_N, difference_NS.var(1, ddof=1))
    together = stats.t.isf(alpha / (arms * (arms - 1)), dof) * np.sqrt(by_arms_N / seeds)
    alone = stats.t.isf(alpha / 2, seeds - 1) * np.sqrt(largest_N / seeds)
    return difference_NS.mean(1), np.maximum(together, alone)
