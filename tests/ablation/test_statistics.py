"""The statistics under the verdicts: numbers worked by hand or told by textbooks, and rates found by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from alignment.ablation.statistics import (
    Contrast,
    area_under_curve,
    common_variance,
    compare,
    detectable_difference,
    holm,
    interquartile_mean,
    seed_variances,
)

# --- hand-worked ----------------------------------------------------------------------------------------


def test_holm():
    # 0.01 * 3 = 0.03; 0.02 * 2 = 0.04; 0.03 * 1 = 0.03, but never below what came before.
    assert holm([0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04], abs=1e-12)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_never_lowers(p):
    adjusted = holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    assert [a for _, a in sorted(zip(p, adjusted, strict=True))] == sorted(adjusted)


def test_area_under_curve():
    # Steps 0, 10, 30 with accuracies 0, 1, 0.5: (10 * 0.5 + 20 * 0.75) / 30 = 2/3.
    np.testing.assert_allclose(area_under_curve([0, 10, 30], np.array([[0.0], [1.0], [0.5]])), [2 / 3], atol=1e-12)
    np.testing.assert_allclose(area_under_curve([5], np.array([[0.25, 1.0]])), [0.25, 1.0])


def test_interquartile_mean():
    assert interquartile_mean([0, 1, 2, 100]) == pytest.approx(1.5)  # the middle two of four
    assert interquartile_mean([7]) == 7


def test_variances_that_differ_by_chance_only_are_taken_for_one():
    prior_dof, variance = common_variance([0.8, 1.0, 1.2], [4, 4, 2])
    assert math.isinf(prior_dof)
    assert variance == pytest.approx((0.8 * 4 + 1.0 * 4 + 1.2 * 2) / 10)


def test_what_a_seed_does_to_all_arms_is_taken_away():
    # Means a: 1, 3; b: 1, 3.4. Without the arms' own means -1, 1 and -1.2, 1.2; seeds -1.1, 1.1; residuals +-0.1 for both.
    # Squares 0.02 for each arm, over (1/2 + 1/2) * 1/2 degrees of freedom.
    found = seed_variances({"a": {0: 1.0, 1: 3.0}, "b": {0: 1.0, 1: 3.4}})
    assert found["a"] == pytest.approx((0.04, 0.5)) and found["b"] == pytest.approx((0.04, 0.5))
    # So the variance of a difference is that of the differences 0 and -0.4 themselves.
    assert found["a"][0] + found["b"][0] == pytest.approx(np.var([0.0, -0.4], ddof=1))


def test_an_arm_without_a_second_seed_has_no_variance():
    assert seed_variances({"a": {0: 1.0}, "b": {0: 1.0}}) == {"a": (0.0, 0.0), "b": (0.0, 0.0)}
    assert seed_variances({"a": {}, "b": {0: 1.0, 1: 2.0}})["b"] == (0.0, 0.0)  # beside which seed effects cannot be told


def test_shrinkage_finds_the_scaled_f_distribution_that_variances_come_from():
    rng = np.random.default_rng(0)
    true = 8 * 0.04 / rng.chisquare(8, 20_000)  # prior with 8 degrees of freedom around 0.04
    sampled = true * rng.chisquare(3, 20_000) / 3
    prior_dof, variance = common_variance(sampled, np.full(20_000, 3))
    assert prior_dof == pytest.approx(8, rel=0.1)
    assert variance == pytest.approx(0.04, rel=0.03)


def test_too_few_variances_say_nothing_of_a_common_one():
    assert common_variance([1.0, 2.0], [2, 2]) == (0.0, 0.0)


# --- comparisons ----------------------------------------------------------------------------------------


def constant(accuracy: float, seeds: int, questions: int = 200) -> dict[int, np.ndarray]:
    return {seed: np.full(questions, accuracy) for seed in range(seeds)}


def noisy(rng, accuracy: float, seeds: int, questions: int = 200, spread: float = 0.02) -> dict[int, np.ndarray]:
    return {seed: (rng.random(questions) < accuracy + rng.normal(0, spread)).astype(float) for seed in range(seeds)}


def test_one_pair_is_students_t_over_seeds():
    """Without spread over questions the interval is the textbook's: mean +- t(2, 0.975) * s / sqrt(3)."""
    means = np.array([0.10, 0.14, 0.18])
    a = {seed: np.full(50, 0.5 + mean) for seed, mean in enumerate(means)}
    (c,) = compare({"a": a, "b": constant(0.5, 3, 50)}, tie=0.01)
    half = stats.t.ppf(0.975, 2) * 0.04 / math.sqrt(3)
    assert c.difference == pytest.approx(0.14)
    assert (c.low, c.high) == pytest.approx((0.14 - half, 0.14 + half), abs=0.006)
    assert c.p == pytest.approx(2 * stats.t.sf(0.14 / (0.04 / math.sqrt(3)), 2), abs=0.003)


def test_verdicts():
    rng = np.random.default_rng(1)
    arms = {"good": noisy(rng, 0.8, 5), "bad": noisy(rng, 0.4, 5)}
    (c,) = compare(arms, tie=0.03)
    assert c.verdict == "good > bad" and c.decided and c.more_seeds is None
    (c,) = compare({"bad": arms["bad"], "good": arms["good"]}, tie=0.03)
    assert c.verdict == "good > bad" and c.difference < 0 and c.kind == "greater"
    (c,) = compare({"a": noisy(rng, 0.5, 8, 4000, 0.001), "b": noisy(rng, 0.5, 8, 4000, 0.001)}, tie=0.05)
    assert c.verdict == "tie within 0.05"
    (c,) = compare({"a": noisy(rng, 0.55, 3), "b": noisy(rng, 0.5, 3)}, tie=0.03)
    assert c.verdict == f"undecided: about {c.more_seeds} more seeds" and c.more_seeds > 1


def test_a_single_seed_gets_no_verdict():
    (c,) = compare({"a": constant(1.0, 1), "b": constant(0.0, 1)}, tie=0.03)
    assert not c.decided and math.isnan(c.low) and c.more_seeds == 1
    (c,) = compare({"a": constant(1.0, 1), "b": {}}, tie=0.03)
    assert not c.decided and c.more_seeds == 2


def test_arms_are_paired_by_seed():
    """A difference that every seed shows is seen through a spread between seeds that is much larger."""
    rng = np.random.default_rng(2)
    level = rng.normal(0.5, 0.2, 6)
    a = {seed: np.full(50, level[seed] + 0.05 + rng.normal(0, 0.005)) for seed in range(6)}
    b = {seed: np.full(50, level[seed]) for seed in range(6)}
    assert compare({"a": a, "b": b}, tie=0.01)[0].verdict == "a > b"
    b = {seed: b[(seed + 1) % 6] for seed in range(6)}
    assert not compare({"a": a, "b": b}, tie=0.01)[0].decided


def test_only_shared_seeds_count():
    rng = np.random.default_rng(3)
    a, b = noisy(rng, 0.6, 4), noisy(rng, 0.6, 3)
    (c,) = compare({"a": a, "b": b}, tie=0.03)
    (same,) = compare({"a": {seed: a[seed] for seed in range(3)}, "b": b}, tie=0.03)
    assert c.seeds == 3 and c.difference == same.difference


def test_a_contrast_of_several_arms_is_the_difference_of_their_means():
    rng = np.random.default_rng(5)
    arms = {name: noisy(rng, accuracy, 3) for name, accuracy in (("a", 0.7), ("b", 0.8), ("c", 0.4), ("d", 0.5))}
    contrast = Contrast("good", "bad", {"a": 0.5, "b": 0.5, "c": -0.5, "d": -0.5})
    (c,) = compare(arms, 0.03, [contrast])
    mean = {name: np.mean([x.mean() for x in arm.values()]) for name, arm in arms.items()}
    assert c.difference == pytest.approx((mean["a"] + mean["b"] - mean["c"] - mean["d"]) / 2)
    assert c.verdict == "good > bad"
    (pair,) = (p for p in compare(arms, 0.03) if (p.a, p.b) == ("a", "c"))
    assert c.high - c.low < pair.high - pair.low  # four arms say more than two


def test_arms_with_other_questions_are_refused():
    with pytest.raises(ValueError, match="questions"):
        compare({"a": constant(1, 2, 5), "b": constant(1, 2, 5), "c": constant(1, 2, 6)}, tie=0.03)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_names_and_order_of_arms_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    a, b = noisy(rng, 0.5, 3, 50), noisy(rng, 0.6, 3, 50)
    (one,), (other,) = compare({"a": a, "b": b}, tie=0.03), compare({"b": b, "a": a}, tie=0.03)
    assert one.difference == pytest.approx(-other.difference)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=0.02)


# --- rates by simulation (1,000 and more replications: benchmarks/ablation_rates.py) -------------------------


def rates(arms: list[float], seeds: int, repeats: int, questions: int = 256) -> tuple[float, float]:
    """Share of families with a false verdict, and share of intervals that hold the true difference."""
    rng = np.random.default_rng(4)
    false, held, compared = 0, 0, 0
    for _ in range(repeats):
        difficulty = rng.uniform(-0.3, 0.3, questions)
        scores = {
            str(i): {s: (rng.random(questions) < p + difficulty + rng.normal(0, 0.02)).astype(float) for s in range(seeds)}
            for i, p in enumerate(arms)
        }
        found = compare(scores, tie=0.02)
        true = {(c.a, c.b): arms[int(c.a)] - arms[int(c.b)] for c in found}
        held += sum(c.low <= true[c.a, c.b] <= c.high for c in found)
        compared += len(found)
        false += any(_is_false(c, true[c.a, c.b]) for c in found)
    return false / repeats, held / compared


def _is_false(c, true: float) -> bool:
    if ">" in c.verdict:
        winner = c.verdict.split(" > ")[0]
        return true == 0 or (winner == c.a) != (true > 0)
    return c.verdict.startswith("tie") and abs(true) >= 0.02


def test_without_a_difference_false_verdicts_are_rare():
    false, held = rates([0.5, 0.5, 0.5, 0.5], seeds=3, repeats=200)
    assert false <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)
    assert held >= 0.93


def test_a_known_difference_is_in_the_interval_as_often_as_stated():
    false, held = rates([0.5, 0.5, 0.6], seeds=3, repeats=200)
    assert false <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)
    assert held >= 0.93


# --- planning ---------------------------------------------------------------------------------------------


def test_detectable_difference():
    # Two arms, 3 seeds, 500 questions: error sqrt(2 * (0.0004 + 0.25 / 500) / 3); t with 2 degrees of freedom.
    error = math.sqrt(2 * (0.0004 + 0.0005) / 3)
    expected = error * (stats.t.isf(0.025, 2) + stats.t.isf(0.2, 2))
    assert detectable_difference(2, 3, 500, 0.02) == pytest.approx(expected, rel=1e-12)
    assert math.isinf(detectable_difference(2, 1, 500, 0.02))
    assert detectable_difference(2, 6, 500, 0.02) < expected
