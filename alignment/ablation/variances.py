"""How much the mean scores of arms vary between seeds: in common, by arm, and for which arm by more than chance."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class SeedVariances:
    """The variance of an arm's mean score between seeds: common to all arms, and an unbiased estimate by arm, 0 or more.
    `unstable` names the arms whose variance is larger than the others' by more than chance."""

    common: float
    dof: int
    by_arm: Mapping[str, float]
    unstable: frozenset[str]


def seed_variances(means: Mapping[str, Mapping[int, float]]) -> SeedVariances:
    """The variances of a mean score between seeds, from the mean of each run.

    The model of the means is y_as = arm + seed + noise. The common variance is the mean square of its residuals. An arm's own
    variance comes from the differences of two arms, which have no seed effect and the sum of both variances: the least squares
    solution over all pairs. An arm is unstable where an F test of its variance against the others' rejects at 2.5 % / arms;
    about one table in twenty of equally noisy arms names one."""
    names, seeds = [arm for arm in means if means[arm]], sorted({seed for by_seed in means.values() for seed in by_seed})
    y_AS = np.array([[means[arm].get(seed, math.nan) for seed in seeds] for arm in names]).reshape(len(names), len(seeds))
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
    return SeedVariances(common, dof, dict.fromkeys(means, common) | by_arm, frozenset(names[k] for k in unstable))


def variance_of_sides(variances: SeedVariances, weights: Mapping[str, float]) -> float:
    """The variance of a seed's weighted sum over arms, where neither side of the contrast counts for less than with the common
    variance."""
    sides = [[(w**2, arm) for arm, w in weights.items() if w * sign > 0] for sign in (1, -1)]
    return sum(max(sum(w * variances.by_arm[arm] for w, arm in s), variances.common * sum(w for w, _ in s)) for s in sides)
