"""The power of a design before it is run: the differences and ties that its seeds would show, by simulation of the rule."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from alignment.ablation.design import ALPHA

DRAWS = 4_000
CHANCE = 0.8


class Power(NamedTuple):
    """The smallest difference that would be found with a chance of CHANCE, infinite with one seed, and the chance that no
    difference would be called a tie."""

    difference: float
    tie: float


def score_std(seed_std: float, questions: int, accuracy: float = 0.5) -> float:
    """The standard deviation of a run's accuracy on `questions` questions, with that of its luck in training, `seed_std`."""
    return math.sqrt(seed_std**2 + accuracy * (1 - accuracy) / questions)


def power(weights_A: Sequence[float], family: int, looks: range, std: float, tie: float) -> Power:
    """The power of a contrast with these weights of all arms, one of `family` contrasts, after each number of seeds in `looks`,
    which share the error rate.

    `std` is `score_std`, alike for all arms. Effects of an arm on single questions, alike in all seeds, are left out:
    nobody knows them beforehand."""
    if looks[0] < 2 or family < 1:
        return Power(math.inf, 0.0)
    scores_NAS = np.random.default_rng(0).normal(scale=std, size=(DRAWS, len(weights_A), looks[-1]))
    alpha, weights = ALPHA / len(looks), np.array(weights_A)
    errors, halves = np.array([_look(scores_NAS[:, :, :seeds], weights, family, alpha) for seeds in looks]).swapaxes(0, 1)

    def shortfall(difference: float) -> float:
        return float((errors + difference > halves).any(axis=0).mean()) - CHANCE

    found = optimize.brentq(shortfall, 0.0, float(halves.max() - errors.min()), xtol=1e-6)
    return Power(found, float((np.abs(errors) + halves < tie).any(axis=0).mean()))


def _look(scores_NAS: np.ndarray, weights_A: np.ndarray, family: int, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """For N simulated tables, the error of the contrast and how large a difference must be for a verdict: the rule of
    `statistics.compare` for the contrast with the smallest p value, where no run is missing."""
    arms, seeds = scores_NAS.shape[1:]
    residuals = scores_NAS - scores_NAS.mean(1, keepdims=True) - scores_NAS.mean(2, keepdims=True)
    squares_NA = ((residuals + scores_NAS.mean((1, 2), keepdims=True)) ** 2).sum(2)
    dof = (arms - 1) * (seeds - 1)
    common_N1 = squares_NA.sum(1, keepdims=True) / dof
    own_NA = np.maximum(0, (arms * squares_NA / (seeds - 1) - common_N1) / (arms - 2)) if arms > 2 else common_N1
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
