"""The exact test by the signs of seeds' differences: numbers worked by hand, scipy's, and rates."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from alignment.ablation.flips import fewest_exact_seeds, seeds_for_exact, sign_flip_p
from alignment.ablation.report import headline
from alignment.ablation.statistics import Contrast, compare
from alignment.ablation.summary import assumption


def test_the_p_value_is_the_share_of_signs_as_far_from_zero():
    # Sums of +-1 +-2 +-3 in size: 6, 4, 2, 0, each by two of the eight assignments.
    assert sign_flip_p([1, 2, 3]) == 2 / 8
    assert sign_flip_p([-1, 2, 3]) == 4 / 8
    assert sign_flip_p([1, 2, -3]) == 1.0
    assert sign_flip_p([-3, -2, -1]) == 2 / 8
    # A seed without a difference counts with both signs.
    assert sign_flip_p([0, 1, 1]) == 4 / 8
    assert sign_flip_p([0.0, 0.0]) == 1.0
    # 0.1 + 0.2 is not 0.3 in floating point; the signs + + - and - - + have sums of size 0.
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=7))
def test_it_is_that_of_every_assignment_and_of_scipy(differences):
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    by_hand = np.mean([size >= abs(sum(differences)) for size in sums])
    assert sign_flip_p(differences) == pytest.approx(by_hand, abs=1e-12)
    scipys = stats.permutation_test(
        (np.array(differences, dtype=float),), np.mean, permutation_type="samples"
    )
    assert sign_flip_p(differences) == pytest.approx(min(1.0, scipys.pvalue), abs=1e-12)


def test_many_seeds_are_flipped_at_random_and_come_near_students_t():
    differences = np.random.default_rng(0).normal(0.5, 1, 40)
    p = sign_flip_p(differences)
    assert p == sign_flip_p(differences)
    assert p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.01)


def test_the_fewest_seeds():
    # 2^-5 = 0.03125 and 2^-4 = 0.0625; of three comparisons 3 * 2^-6 = 0.047 and 3 * 2^-5 = 0.094;
    # of six 6 * 2^-7 = 0.047.
    assert [fewest_exact_seeds(0.05, family) for family in (1, 3, 6)] == [6, 7, 8]
    # Equal differences need no more than that; further seeds are asked for at the least.
    assert seeds_for_exact(0.1, 0.0, 3, 0.05, 1) == 6
    assert seeds_for_exact(0.1, 0.0, 6, 0.05, 1) == 7
    # A mean of half a standard deviation: t(0.025, n - 1) < 0.5 sqrt(n) from n = 18 on, where
    # t = 2.110 < 2.121; of 17 seeds t = 2.120 > 2.062.
    assert seeds_for_exact(0.5, 1.0, 3, 0.05, 1) == 18
    assert seeds_for_exact(0.0, 1.0, 3, 0.05, 1) == 200


def arm(*means: float, questions: int = 1000) -> dict[int, np.ndarray]:
    return {seed: np.full(questions, mean) for seed, mean in enumerate(means)}


def test_five_seeds_support_no_winner_and_six_do():
    a = (0.70, 0.71, 0.72, 0.73, 0.74, 0.75)
    b = (0.50, 0.50, 0.51, 0.52, 0.50, 0.52)
    (five,) = compare({"a": arm(*a[:5]), "b": arm(*b[:5])}, 0.03)
    assert five.kind == "greater" and five.p_exact == 2 / 32
    assert not five.exact and five.exact_seeds == 6
    (six,) = compare({"a": arm(*a), "b": arm(*b)}, 0.03)
    assert six.exact and six.p_exact == 2 / 64 and six.exact_seeds is None
    # Its words stay those of the normal test.
    assert six.verdict == five.verdict == "a > b in runs like these"
    assert headline({}, [six]) == ["the arms: a > b in runs like these (0.217)"]
    [line] = headline({}, [five])
    assert line.endswith("(0.214; if a run is its mean plus noise, without that about 6 seeds)")
    assert assumption([six]) == ""
    assert "1 difference, which the signs of so few seeds cannot show" in assumption([five, six])


def test_three_arms_share_the_error_rate_by_holm():
    """Of seven seeds whose differences all have one sign: p = 2 / 128, times 3, 2 and 1, never
    falling."""
    rng = np.random.default_rng(0)
    arms = {
        name: arm(*(mean + rng.uniform(0, 0.01, 7)))
        for name, mean in zip("abc", (0.3, 0.5, 0.7), strict=True)
    }
    assert [c.p_exact for c in compare(arms, 0.03)] == [3 / 64] * 3
    assert all(c.exact for c in compare(arms, 0.03))
    six = {name: {seed: by_seed[seed] for seed in range(6)} for name, by_seed in arms.items()}
    assert not any(c.exact for c in compare(six, 0.03))
    assert {c.exact_seeds for c in compare(six, 0.03)} == {7}


def test_a_tie_is_never_exact_and_a_level_is_flipped_seed_by_seed():
    rng = np.random.default_rng(1)
    equal = {name: arm(*(0.5 + rng.uniform(0, 0.002, 8))) for name in "ab"}
    (tie,) = compare(equal, 0.03)
    assert tie.kind == "tie" and not tie.exact and tie.exact_seeds is None
    assert assumption([tie]).endswith(
        "1 difference below the margin, which no number of seeds shows without that"
    )
    assert headline({}, [tie])[0].endswith("1 of 1 pairs tie (if a run is its mean plus noise)")
    # Means of two arms a side: the differences by seed are 0.1 + 0.3, 0.1 - 0.1 and 0.1 + 0.1,
    # halved; signs + + + and + - + have a sum of 0.3, + + - and + - - one of 0.1.
    arms = {
        "a1": arm(0.6, 0.6, 0.6),
        "a2": arm(0.8, 0.4, 0.6),
        "b1": arm(0.5, 0.5, 0.5),
        "b2": arm(0.5, 0.5, 0.5),
    }
    level = Contrast("a", "b", {"a1": 0.5, "a2": 0.5, "b1": -0.5, "b2": -0.5})
    (c,) = compare(arms, 0.03, [level])
    assert c.difference == pytest.approx(0.1) and c.p_exact == 4 / 8
    assert math.isnan(compare({"a": arm(0.5), "b": arm(0.6)}, 0.03)[0].p_exact)


@pytest.mark.parametrize("noise", ["cauchy", "coin", "rare"])
def test_equal_arms_are_seldom_told_apart_whatever_their_noise(noise):
    """4,000 tables of two arms of seven seeds whose seeds differ in their noise too: at 5 % the
    test rejects 6 / 128 = 4.7 % at most, by its steps."""
    rng = np.random.default_rng(2)
    draw = {
        "cauchy": lambda size: rng.standard_cauchy(size),
        "coin": lambda size: rng.choice([-1.0, 1.0], size) + rng.normal(0, 0.01, size),
        "rare": lambda size: -1.0 * (rng.random(size) < 0.1) + rng.normal(0, 0.01, size),
    }[noise]
    scales_S = np.array([1, 1, 1, 1, 1, 5, 20])
    differences = scales_S * (draw((4000, 7)) - draw((4000, 7)))
    rate = np.mean([sign_flip_p(row) < 0.05 for row in differences])
    assert rate <= 6 / 128 + 2.5 * math.sqrt(0.05 * 0.95 / 4000)
