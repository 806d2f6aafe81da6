"""Runs that end in two places, such as runs that learn or do not: arms in which this is seen, and
how much of it so few seeds may hide. Arrays: A arms, N draws, S seeds, K cuts. Nothing here reads a
file."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

LEVEL = 0.01
"""The chance, by each of two tests, that an arm of a table with normal noise is said to end in two
places."""
SHOWN_LEVEL = 0.1  # an arm's own p value below which it is named where all arms together reject
DRAWS = 20_000  # of normal samples, from which p values are counted
FEWEST = 3  # seeds whose gaps can be compared


@dataclass(frozen=True)
class Places:
    """The best cut of an arm's runs into two places: the number of runs in the lower one, of all,
    both places' mean scores, and the probability that a gap stands out as much in as many runs with
    normal noise."""

    runs_low: int
    runs: int
    low: float
    high: float
    p: float

    @property
    def gap(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        runs_high = self.runs - self.runs_low
        return (
            f"{self.runs_low} of {self.runs} near {self.low:.3g}, {runs_high} near {self.high:.3g}"
        )


def cut(means_S: Sequence[float], floor: float) -> Places:
    """The cut of runs with these mean scores. The gap between neighbours is divided by the standard
    deviation within the places, of variance `floor` or more; the cut with the largest ratio is
    taken. With fewer than FEWEST runs, or equal ones, p is 1."""
    y_S = np.sort(np.asarray(means_S, dtype=float))
    if len(y_S) < FEWEST or y_S[0] == y_S[-1]:
        return Places(0, len(y_S), float(y_S.mean()), float(y_S.mean()), 1.0)
    ratio_K = _gap_ratios(y_S[None], floor)[0]
    place = int(ratio_K.argmax())
    null_N = _null_ratios(len(y_S))
    exceeding = len(null_N) - int(np.searchsorted(null_N, ratio_K[place], side="left"))
    low_S, high_S = np.split(y_S, [place + 1])
    # counts from draws have one added, so that p is never 0 (Davison and Hinkley 1997)
    p = (1 + exceeding) / (1 + len(null_N))
    return Places(place + 1, len(y_S), float(low_S.mean()), float(high_S.mean()), p)


def arms_in_two_places(
    means: Mapping[str, Sequence[float]], floors: Mapping[str, float], least_gap: float
) -> dict[str, Places]:
    """The arms whose runs end in two places, with these. Two tests of LEVEL each: by arm, with
    Bonferroni's correction; and of all arms together, by Fisher's sum of log p values (1932), which
    then names the arms of a p value below SHOWN_LEVEL. Places that are `least_gap` or less apart
    are one."""
    cuts: dict[str, Places] = {}
    for arm, means_S in means.items():
        if len(means_S) < FEWEST:
            continue
        places = cut(means_S, floors[arm])
        cuts[arm] = replace(places, p=1.0) if places.gap <= least_gap else places
    if not cuts:
        return {}
    log_p = sum(math.log(places.p) for places in cuts.values())
    p_together = stats.chi2.sf(-2 * log_p, 2 * len(cuts))
    level = SHOWN_LEVEL if p_together < LEVEL else LEVEL / len(cuts)
    return {arm: places for arm, places in cuts.items() if places.p < level}


def _gap_ratios(y_NS: np.ndarray, floor: float) -> np.ndarray:
    """For each cut of sorted samples: the gap over the standard deviation within both parts, [N, K]
    with K = S - 1."""
    seeds = y_NS.shape[1]
    centred_NS = y_NS - y_NS.mean(axis=1, keepdims=True)
    below_K = np.arange(1, seeds)
    sum_below_NK = centred_NS.cumsum(axis=1)[:, :-1]
    # The sum of squares is that between the parts plus that within them. With a mean of 0 the part
    # above sums to minus the part below: between = sum^2 / k + sum^2 / (S - k).
    between_NK = sum_below_NK**2 * (1 / below_K + 1 / (seeds - below_K))
    total_N1 = (centred_NS**2).sum(axis=1, keepdims=True)
    within_NK = np.maximum(0.0, total_N1 - between_NK) / (seeds - 2)
    return np.diff(y_NS, axis=1) / np.sqrt(np.maximum(within_NK, max(floor, 1e-18)))


@functools.lru_cache(maxsize=256)
def _null_ratios(seeds: int) -> np.ndarray:
    """The largest ratio of DRAWS samples of a normal distribution, sorted."""
    y_NS = np.sort(np.random.default_rng(seeds).normal(size=(DRAWS, seeds)), axis=1)
    return np.sort(_gap_ratios(y_NS, 0.0).max(axis=1))


def unseen_share(seeds: int, chance: float) -> float:
    """The largest share of an arm's runs that may end elsewhere than so many seeds have shown, with
    a probability of `chance` or more: (1 - share)^S = chance."""
    return 1 - chance ** (1 / seeds)


def hidden_shift(rooms_A: Sequence[float], seeds: int, chance: float) -> float:
    """The largest shift of a mean difference by places that none of so many seeds has shown, with a
    probability of `chance` or more. An arm whose runs end elsewhere with probability p shifts it by
    p times its room, the furthest that a run can move it, and goes unseen with probability (1 -
    p)^S; arms fail apart. So the maximum of sum(p room) where sum(S log(1 - p)) is log(chance): 1 -
    p is the smaller of 1 and level / room (the derivatives are equal), for one level."""
    rooms = np.sort([room for room in rooms_A if room > 0])[::-1]
    if not len(rooms):
        return 0.0
    if np.isinf(rooms[0]):
        return math.inf
    # The arms with p above 0 are those with the largest rooms: the level for each number of them,
    # of which the largest holds where every room exceeds its level.
    number = np.arange(1, len(rooms) + 1)
    log_level = (np.cumsum(np.log(rooms)) + math.log(chance) / seeds) / number
    arms = int(number[np.log(rooms) > log_level].max())
    level = math.exp(log_level[arms - 1])
    return float((rooms[:arms] - level).sum())
