"""The statistics under the verdicts: numbers worked by hand or told by textbooks, and rates found
by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from alignment.ablation.statistics import (
    Contrast,
    PlannedContrast,
    Power,
    area_under_curve,
    compare,
    half_width,
    holm,
    interquartile_mean,
    power,
    seed_variances,
    tail,
    variance_of_sides,
)
from alignment.core.power import score_std

# --- hand-worked ----------------------------------------------------------------------------------


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
    np.testing.assert_allclose(
        area_under_curve([0, 10, 30], np.array([[0.0], [1.0], [0.5]])), [2 / 3], atol=1e-12
    )
    np.testing.assert_allclose(area_under_curve([5], np.array([[0.25, 1.0]])), [0.25, 1.0])


def test_interquartile_mean():
    assert interquartile_mean([0, 1, 2, 100]) == pytest.approx(1.5)  # the middle two of four
    assert interquartile_mean([7]) == 7


def test_what_a_seed_does_to_all_arms_is_taken_away():
    # Means a: 1, 3; b: 1, 3.4. Without the arms' own means -1, 1 and -1.2, 1.2; seeds -1.1, 1.1;
    # residuals +-0.1 for both. Squares 0.04 over one degree of freedom (4 runs less 2 arms less 1
    # seed).
    found = seed_variances({"a": {0: 1.0, 1: 3.0}, "b": {0: 1.0, 1: 3.4}})
    assert found.common == pytest.approx(0.04) and found.dof == 1
    # So the variance of a difference is that of the differences 0 and -0.4 themselves.
    assert found.by_arm["a"] + found.by_arm["b"] == pytest.approx(np.var([0.0, -0.4], ddof=1))


def test_each_arm_has_its_own_variance_and_no_side_less_than_the_common_one():
    # Differences over seeds 0, 1: a - b: 0, 0 (variance 0); a - c and b - c: 0, -2 (variance 2). So
    # a and b have 0, c has 2. Residuals: c -2/3 and 2/3, a and b half as much: squares 8/9 + 4 *
    # 1/9 = 4/3 over 2 degrees of freedom.
    found = seed_variances({"a": {0: 0.0, 1: 0.0}, "b": {0: 5.0, 1: 5.0}, "c": {0: 1.0, 1: 3.0}})
    assert found.common == pytest.approx(2 / 3) and found.dof == 2
    assert found.by_arm == pytest.approx({"a": 0.0, "b": 0.0, "c": 2.0}, abs=1e-12)
    assert variance_of_sides(found, {"a": 1, "b": -1}) == pytest.approx(2 / 3 + 2 / 3)
    assert variance_of_sides(found, {"a": 1, "c": -1}) == pytest.approx(2 / 3 + 2)
    # The mean of a and c: (0 + 2) / 4, which is more than 2/3 * (1 + 1) / 4.
    assert variance_of_sides(found, {"a": 0.5, "c": 0.5, "b": -1}) == pytest.approx(0.5 + 2 / 3)
    # c's sum of squares is its 2 times 2/3 of a degree of freedom, which is all there is: F is
    # infinite.
    assert found.unstable == {"c"}


def test_runs_that_are_missing_are_missing_from_both_variances():
    # b has no seed 2. The pairs a - b over seeds 0, 1 (differences 0, 2: variance 2) and a - c over
    # 0, 1, 2 (0, 0, 3: 3). Least squares with weights 1 and 2 can fit b - c too: differences 0, -2
    # (variance 2), weight 1. a + b = 2, a + c = 3, b + c = 2: a = 1.5, b = 0.5, c = 1.5.
    means = {"a": {0: 0.0, 1: 2.0, 2: 3.0}, "b": {0: 0.0, 1: 0.0}, "c": {0: 0.0, 1: 2.0, 2: 0.0}}
    found = seed_variances(means)
    assert found.dof == 3  # 8 runs less 3 arms less 2 seeds
    assert found.by_arm == pytest.approx({"a": 1.5, "b": 0.5, "c": 1.5})


def test_an_arm_without_a_second_seed_has_no_variance():
    assert seed_variances({"a": {0: 1.0}, "b": {0: 1.0}}).by_arm == {"a": 0.0, "b": 0.0}
    # beside which seed effects cannot be told
    assert seed_variances({"a": {}, "b": {0: 1.0, 1: 2.0}}).by_arm["b"] == 0.0


def test_equal_arms_are_rarely_called_unstable_and_a_wild_one_often():
    rng = np.random.default_rng(0)
    flagged = {}
    for spread in (1, 10):
        found = [
            seed_variances(
                {
                    str(a): dict(enumerate(rng.normal(scale=spread if a == 0 else 1, size=3)))
                    for a in range(4)
                }
            )
            for _ in range(500)
        ]
        flagged[spread] = (
            np.mean(["0" in f.unstable for f in found]),
            np.mean([bool(f.unstable) for f in found]),
        )
    assert flagged[1][1] < 0.1 and flagged[10][0] > 0.6


@given(st.floats(0.05, 40), st.sampled_from([1, 2, 5, 11, 44]))
def test_without_a_choice_of_questions_the_error_is_students_t(distance, dof):
    assert tail(distance, 0.25, dof, 0.0) == pytest.approx(
        stats.t.sf(2 * distance, dof), rel=1e-4, abs=1e-9
    )


def test_a_tail_of_seeds_and_questions_is_that_of_their_sum():
    rng = np.random.default_rng(0)
    draws = 0.3 * rng.standard_t(2, 400_000) + 0.5 * rng.normal(size=400_000)
    for distance in (0.0, 0.4, 1.5, 4.0):
        assert tail(distance, 0.09, 2, 0.25) == pytest.approx((draws > distance).mean(), abs=0.002)
    assert half_width(0.09, 2, 0.25) == pytest.approx(np.quantile(np.abs(draws), 0.95), rel=0.01)
    assert half_width(0.0, 2, 0.0) == 0


# --- comparisons ----------------------------------------------------------------------------------


def constant(accuracy: float, seeds: int, questions: int = 200) -> dict[int, np.ndarray]:
    return {seed: np.full(questions, accuracy) for seed in range(seeds)}


def noisy(
    rng, accuracy: float, seeds: int, questions: int = 200, spread: float = 0.02
) -> dict[int, np.ndarray]:
    return {
        seed: (rng.random(questions) < accuracy + rng.normal(0, spread)).astype(float)
        for seed in range(seeds)
    }


def test_one_pair_is_students_t_over_seeds():
    """Without spread over questions the interval is the textbook's: mean +- t(2, 0.975) * s /
    sqrt(3)."""
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
    assert (
        c.verdict == "good > bad in runs like these"
        and c.kind == "greater"
        and c.more_seeds is None
    )
    (c,) = compare({"bad": arms["bad"], "good": arms["good"]}, tie=0.03)
    assert c.verdict == "good > bad in runs like these" and c.difference < 0 and c.kind == "greater"
    (c,) = compare(
        {"a": noisy(rng, 0.5, 8, 4000, 0.001), "b": noisy(rng, 0.5, 8, 4000, 0.001)}, tie=0.05
    )
    assert c.verdict == "tie within 0.05 in runs like these"
    (c,) = compare({"a": noisy(rng, 0.55, 3), "b": noisy(rng, 0.5, 3)}, tie=0.03)
    assert c.verdict == f"undecided: about {c.more_seeds} more seeds" and c.more_seeds > 1


def test_a_difference_that_is_shown_and_small_says_both():
    """Differences by seed of 0.010 and 0.012, a mean of 0.011 with a standard error of about
    0.0004: above 0 and below 0.03. With a margin of 0.005 it is a winner and no more."""
    rng = np.random.default_rng(0)
    answers = (rng.random((8, 5000)) < 0.5).astype(float)
    arms = {"a": {}, "b": {}}
    for seed in range(8):
        right = np.flatnonzero(answers[seed] == 0)[: 50 + 10 * (seed % 2)]
        better = answers[seed].copy()
        better[right] = 1
        arms["a"][seed], arms["b"][seed] = better, answers[seed]
    [small] = compare(arms, 0.03)
    assert small.kind == "greater" and small.is_small
    assert small.verdict == "a > b, by less than 0.03 in runs like these"
    [large] = compare(arms, 0.005)
    assert large.verdict == "a > b in runs like these" and not large.is_small
    [turned] = compare({"b": arms["b"], "a": arms["a"]}, 0.03)
    assert turned.verdict == small.verdict and turned.difference == -small.difference


def test_the_difference_that_would_be_found_is_that_of_a_noncentral_t_and_of_questions():
    """Of one pair: a t test of 3 seeds finds it with a chance of 80 %; a spread over questions adds
    its normal error."""
    a = {seed: np.full(5_000, 0.5 + mean) for seed, mean in enumerate((0.10, 0.14, 0.18))}
    (c,) = compare({"a": a, "b": constant(0.5, 3, 5_000)}, tie=0.01)
    error = 0.04 / math.sqrt(3)
    assert stats.nct.sf(4.302653, 2, c.detectable / error) == pytest.approx(0.8, abs=1e-4)
    assert c.detectable == pytest.approx(5.65 * error, rel=2e-3)
    # by how much each question is easier for a: a variance of 0.01 over 5,000 questions
    better = np.tile([0.1, -0.1], 2_500)
    (both,) = compare(
        {"a": {seed: scores + better for seed, scores in a.items()}, "b": constant(0.5, 3, 5_000)},
        tie=0.01,
    )
    by_questions = (1.959964 + 0.841621) * 0.1 / math.sqrt(4_999)
    assert both.detectable == pytest.approx(math.hypot(c.detectable, by_questions), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_a_difference_that_would_be_found_is_found_with_a_chance_of_80_percent(number):
    """Of `number` arms with the same spread, the first is better by what a table without
    differences says it would find."""
    rng = np.random.default_rng(0)

    def arms(gain):
        return {str(arm): noisy(rng, 0.5 + gain * (arm == 0), 6, 400) for arm in range(number)}

    shows = np.median([compare(arms(0.0), 0.0)[0].detectable for _ in range(200)])
    found = np.mean([compare(arms(shows), 0.0)[0].kind == "greater" for _ in range(400)])
    assert 0.7 < found < 0.9


def test_a_single_seed_gets_no_verdict():
    (c,) = compare({"a": constant(1.0, 1), "b": constant(0.0, 1)}, tie=0.03)
    assert (
        c.kind == "undecided"
        and math.isnan(c.low)
        and math.isnan(c.detectable)
        and c.more_seeds == 1
    )
    (c,) = compare({"a": constant(1.0, 1), "b": {}}, tie=0.03)
    assert c.kind == "undecided" and c.more_seeds == 2


def test_arms_are_paired_by_seed():
    """A difference that every seed shows is seen through a spread between seeds that is much
    larger."""
    rng = np.random.default_rng(2)
    level = rng.normal(0.5, 0.2, 6)
    a = {seed: np.full(50, level[seed] + 0.05 + rng.normal(0, 0.005)) for seed in range(6)}
    b = {seed: np.full(50, level[seed]) for seed in range(6)}
    assert compare({"a": a, "b": b}, tie=0.01)[0].verdict == "a > b in runs like these"
    b = {seed: b[(seed + 1) % 6] for seed in range(6)}
    assert compare({"a": a, "b": b}, tie=0.01)[0].kind == "undecided"


def test_only_shared_seeds_count():
    rng = np.random.default_rng(3)
    a, b = noisy(rng, 0.6, 4), noisy(rng, 0.6, 3)
    (c,) = compare({"a": a, "b": b}, tie=0.03)
    (same,) = compare({"a": {seed: a[seed] for seed in range(3)}, "b": b}, tie=0.03)
    assert c.seeds == 3 and c.difference == same.difference


def test_a_contrast_of_several_arms_is_the_difference_of_their_means():
    rng = np.random.default_rng(5)
    arms = {
        name: noisy(rng, accuracy, 3)
        for name, accuracy in (("a", 0.7), ("b", 0.8), ("c", 0.4), ("d", 0.5))
    }
    contrast = Contrast("good", "bad", {"a": 0.5, "b": 0.5, "c": -0.5, "d": -0.5})
    (c,) = compare(arms, 0.03, [contrast])
    mean = {name: np.mean([x.mean() for x in arm.values()]) for name, arm in arms.items()}
    assert c.difference == pytest.approx((mean["a"] + mean["b"] - mean["c"] - mean["d"]) / 2)
    assert c.verdict == "good > bad in runs like these"
    (pair,) = (p for p in compare(arms, 0.03) if (p.a, p.b) == ("a", "c"))
    assert c.high - c.low < pair.high - pair.low  # four arms say more than two


def test_an_unstable_arm_is_named_where_it_leaves_a_comparison_undecided():
    rng = np.random.default_rng(2)
    arms = {name: {s: np.full(100, 0.5 + rng.normal(0, 0.01)) for s in range(3)} for name in "abcd"}
    arms["wild"] = {0: np.full(100, 0.2), 1: np.full(100, 0.9), 2: np.full(100, 0.6)}
    found = {(c.a, c.b): c for c in compare(arms, tie=0.03)}
    assert found["a", "wild"].verdict.startswith(
        "undecided: 3 seeds cannot bear an arm as unstable as wild; more than 200 more"
    )
    assert "wild" not in found["a", "b"].verdict
    (alone,) = (
        c
        for c in compare({name: arms[name] for name in "abcd"}, tie=0.03)
        if (c.a, c.b) == ("a", "b")
    )
    # intervals know nothing of other arms
    assert (found["a", "b"].low, found["a", "b"].high) == (
        alone.low,
        alone.high,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 6), st.floats(0, 0.2))
def test_a_verdict_never_contradicts_its_interval(seed, arms, seeds, spread):
    rng = np.random.default_rng(seed)
    scores = {
        str(a): noisy(rng, rng.choice([0.5, 0.6]), seeds, 60, rng.choice([0.0, spread]))
        for a in range(arms)
    }
    for c in compare(scores, tie=0.15):
        if c.kind == "greater":
            assert c.low > 0 or c.high < 0
        if c.kind == "tie":
            assert c.low > -0.15 and c.high < 0.15


def test_copies_of_a_question_add_nothing():
    """Every question four times, with the same answers: by group, the interval is that of the
    questions once."""
    rng = np.random.default_rng(6)
    once = {name: noisy(rng, 0.5, 3, 50) for name in "ab"}
    copied = {name: {s: np.repeat(x, 4) for s, x in arm.items()} for name, arm in once.items()}
    (c,), (d,) = compare(once, 0.03), compare(copied, 0.03, groups=[q // 4 for q in range(200)])
    assert (d.low, d.high) == pytest.approx((c.low, c.high), abs=1e-3)  # a finer rounding error
    (ungrouped,) = compare(copied, 0.03)
    assert ungrouped.high - ungrouped.low < c.high - c.low


def test_seeds_that_agree_by_rounding_do_not_make_an_interval_a_point():
    # Both seeds differ by one answer of 100. Only rounding, 1 / 12 of a squared step, is left:
    # 12.706 * 0.01 * sqrt(1/24).
    a = {seed: np.arange(100) < 3 for seed in (0, 1)}
    b = {seed: np.arange(100) < 2 for seed in (0, 1)}
    a, b = ({s: np.roll(x, 7 * s).astype(float) for s, x in arm.items()} for arm in (a, b))
    (c,) = compare({"a": a, "b": b}, 0.05)
    assert c.high - c.difference >= 12.706 * 0.01 * math.sqrt(1 / 24) - 1e-6


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


# --- planning -------------------------------------------------------------------------------------


def two_arms(seeds: int, last: int = 0, std: float = 0.03, tie: float = 0.03) -> Power:
    return power(PlannedContrast((1, -1), 1, range(seeds, max(seeds, last) + 1), std, tie))


def test_the_power_of_two_arms_is_that_of_students_t():
    # 0.0004 between seeds and 0.25 / 500 for questions: 0.03. The error of a difference over 3
    # seeds is 0.03 * sqrt(2 / 3); noncentral t with 2 degrees of freedom.
    assert score_std(0.02, 500) == pytest.approx(0.03, abs=1e-12)
    noncentrality = two_arms(3).difference / (0.03 * math.sqrt(2 / 3))
    assert stats.nct.sf(stats.t.isf(0.025, 2), 2, noncentrality) == pytest.approx(0.8, abs=0.02)
    assert math.isinf(two_arms(1).difference)
    assert two_arms(6).difference < two_arms(3).difference


def test_a_mean_of_two_arms_a_side_is_easier_to_tell_apart_than_an_arm():
    alone, averaged = (
        power(PlannedContrast((1, -1, 0, 0), 6, range(5, 6), 0.03, 0.03)),
        power(PlannedContrast((0.5, 0.5, -0.5, -0.5), 1, range(5, 6), 0.03, 0.03)),
    )
    assert averaged.difference < alone.difference / math.sqrt(2)


def test_looks_share_the_error_rate_and_seeds_win_it_back():
    assert two_arms(10).difference < two_arms(3, last=10).difference < two_arms(3).difference


def test_a_look_at_one_seed_shows_nothing_and_has_its_share():
    """Looks of 1 to 10 seeds are those of 2 to 10 at a tenth of the error rate, for a ninth."""
    from_one = two_arms(1, last=10).difference
    assert two_arms(2, last=10).difference < from_one < 1.1 * two_arms(2, last=10).difference


def test_a_tie_needs_seeds():
    chances = [two_arms(seeds, std=0.012).tie for seeds in (2, 3, 5, 10)]
    assert chances == sorted(chances) and chances[0] < 0.3 and chances[-1] > 0.9
