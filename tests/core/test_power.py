"""The smallest difference, by hand and by how often it is found."""

import numpy as np
import pytest

from alignment.core.power import POWER, detectable_difference, score_std


def test_the_smallest_difference_of_two_scores():
    """Of 100 answers, half of them right: a standard deviation of 0.05, and (1.959964 + 0.841621)
    sqrt(2) of it."""
    assert score_std(0.0, 100) == 0.05
    assert detectable_difference(0.05) == pytest.approx(0.198102, abs=1e-6)
    assert detectable_difference(score_std(0.0, 400)) == pytest.approx(0.198102 / 2, abs=1e-6)
    assert detectable_difference(0.05, alpha=0.01) > detectable_difference(0.05)


def test_it_is_found_as_often_as_it_says():
    n, p, trials = 600, 0.4, 20_000
    rng = np.random.default_rng(0)
    q = p + detectable_difference(score_std(0.0, n, p))
    a, b = rng.binomial(n, p, trials) / n, rng.binomial(n, q, trials) / n
    found = np.abs(b - a) > 1.959964 * np.sqrt((a * (1 - a) + b * (1 - b)) / n)
    # Three standard errors of 20,000 trials are 0.0085; q's own variance, which is not p's, makes
    # up the rest.
    assert found.mean() == pytest.approx(POWER, abs=0.02)
