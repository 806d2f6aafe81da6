"""An exact test of seeds' differences by their signs. If two arms are the same, each seed's
difference is as likely to have the other sign, whatever the noise between runs is like. Arrays: S
seeds, F flips. Nothing here reads a file."""

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats
from scipy.special import stdtrit

MOST_SEEDS_LISTED = 15  # of which all 2^(S - 1) assignments of signs are tried
RANDOM_FLIPS = 20_000  # assignments of signs that are tried of more seeds
MOST_SEEDS_PLANNED = 200  # the largest number of seeds that `seeds_for_exact` names
# Two assignments of signs whose sums differ by rounding alone count as equal.
RELATIVE_ROUNDING = 1e-9


def sign_flip_p(differences_S: Sequence[float] | np.ndarray) -> float:
    """The p value of "each difference is as likely to have the other sign": the share of all
    assignments of signs whose mean is as far from zero as the one that was seen (Fisher 1935, The
    Design of Experiments, section 21). It is 2^(1 - S) or more. Of more than MOST_SEEDS_LISTED
    seeds it is a share of random assignments, which counts the one that was seen (Phipson and
    Smyth 2010)."""
    differences = np.asarray(differences_S, dtype=float)
    seeds = len(differences)
    if seeds > MOST_SEEDS_LISTED:
        result = stats.permutation_test(
            (differences,),
            np.mean,
            permutation_type="samples",
            n_resamples=RANDOM_FLIPS,
            vectorized=True,
            rng=np.random.default_rng(seeds),
        )
        return float(result.pvalue)
    sums_F = np.abs(_signs(seeds) @ differences)
    least = abs(differences.sum()) - RELATIVE_ROUNDING * float(np.abs(differences).sum())
    return float(np.mean(sums_F >= least))


@functools.lru_cache(maxsize=MOST_SEEDS_LISTED)
def _signs(seeds: int) -> np.ndarray:
    """Every assignment of signs [F, S] whose first sign is positive; the others are these with all
    signs reversed, and have means of the same size."""
    number_F1 = np.arange(2 ** (seeds - 1))[:, None]
    place_S = np.arange(seeds)
    return 1.0 - 2.0 * (number_F1 >> place_S & 1)[:, ::-1]


def fewest_exact_seeds(alpha: float, family: int) -> int:
    """The fewest seeds S of which the test can reject one of `family` hypotheses by Holm's
    correction: family 2^(1 - S) < alpha."""
    seeds = 1
    while family * 2.0 ** (1 - seeds) >= alpha:
        seeds += 1
    return seeds


def seeds_for_exact(mean: float, variance: float, seeds: int, alpha: float, family: int) -> int:
    """About how many seeds in all would make the exact test reject, if further seeds vary like
    these: more than `seeds`, at least `fewest_exact_seeds`, and as many as Student's t needs, to
    which the test comes near. `variance` is that of one seed's difference. At most
    MOST_SEEDS_PLANNED."""
    fewest = max(seeds + 1, fewest_exact_seeds(alpha, family))
    numbers = np.arange(fewest, max(fewest, MOST_SEEDS_PLANNED) + 1)
    quantiles = -stdtrit(numbers - 1, alpha / family / 2)
    is_enough = abs(mean) > quantiles * math.sqrt(variance) / np.sqrt(numbers)
    if not is_enough.any():
        return int(numbers[-1])
    return int(numbers[is_enough.argmax()])
