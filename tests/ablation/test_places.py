"""Runs that end in two places: what is found, what is said of it, and what so few seeds may
hide."""

import math

import numpy as np
import pytest

from alignment.ablation.places import arms_in_two_places, cut, hidden_shift, unseen_share
from alignment.ablation.schedule import State, next_runs
from alignment.ablation.statistics import LIKE_THESE, compare
from benchmarks.ablation_rates import COIN, RARE, Setting, rates


def scores(*means: float, questions: int = 400) -> dict[int, np.ndarray]:
    """A run for each mean: half of the questions are this much easier or harder than it."""
    sides = np.where(np.arange(questions) % 2, 0.1, -0.1)
    return {seed: mean + sides for seed, mean in enumerate(means)}


# --- one arm --------------------------------------------------------------------------------------


def test_the_cut_is_where_the_gap_is_largest_beside_the_spread_within():
    found = cut([0.82, 0.10, 0.80, 0.12], floor=0.0)
    assert (found.runs_low, found.runs) == (2, 4)
    assert (found.low, found.high, found.gap) == pytest.approx((0.11, 0.81, 0.70))
    assert found.p < 0.01 and str(found) == "2 of 4 near 0.11, 2 near 0.81"


def test_three_runs_have_the_p_value_of_their_two_gaps():
    # Of three normal values in order, x < y < z, the ratio of (z - y) to (y - x) is r or more, or
    # 1 / r or less, with a chance of 6 / pi * atan(sqrt(3) / (2 r + 1)): the angle of a circle of
    # which each order of three has a sixth.
    for r in (2.0, 10.0, 30.0):
        exact = 6 / math.pi * math.atan(math.sqrt(3) / (2 * r + 1))
        assert cut([0.0, 0.1, 0.1 + 0.1 * r], floor=0.0).p == pytest.approx(exact, rel=0.1)


def test_what_sampling_explains_is_no_place():
    """Two pairs that agree by chance: their spread is no less than that of the answers."""
    means = [0.500, 0.501, 0.560, 0.561]
    assert cut(means, floor=0.0).p < 0.01 < 0.3 < cut(means, floor=0.02**2).p


def test_equal_and_few_runs_are_in_one_place():
    assert cut([0.5] * 6, 0.0).p == cut([0.1, 0.9], 0.0).p == 1.0


def test_normal_noise_seldom_ends_in_two_places():
    rng = np.random.default_rng(0)
    tables = 1000
    for seeds in (3, 5, 10):
        named = 0
        for _ in range(tables):
            # arms of very different noise
            means = {str(arm): rng.normal(0.5, 10.0**-arm, seeds) for arm in range(4)}
            named += bool(arms_in_two_places(means, dict.fromkeys(means, 0.0), 0.0))
        assert named / tables < 0.02 + 2.5 * math.sqrt(0.02 * 0.98 / tables)


def test_all_arms_together_show_what_each_alone_does_not():
    """Two runs in one place and one elsewhere: each arm's two gaps differ by 30, as those of 1 in
    20 normal samples."""
    means = {arm: [0.15, 0.85, 0.85 + 0.7 / 30] for arm in "abcd"}
    floors = dict.fromkeys(means, 0.0)
    assert set(arms_in_two_places(means, floors, 0.03)) == set("abcd")
    assert arms_in_two_places({"a": means["a"]}, floors, 0.03) == {}


def test_places_within_a_tie_are_one():
    means = {"a": [0.50, 0.5001, 0.52, 0.5201, 0.5202]}
    assert arms_in_two_places(means, {"a": 0.0}, 0.03) == {}
    assert set(arms_in_two_places(means, {"a": 0.0}, 0.01)) == {"a"}


# --- what is said of it ---------------------------------------------------------------------------


@pytest.mark.parametrize("other", [0.95, 0.65, 0.10])
def test_an_arm_in_two_places_gets_neither_winner_nor_tie(other):
    falling = scores(0.85, 0.86, 0.15, 0.84, 0.85, 0.16, 0.85, 0.86, 0.84)
    steady = scores(*(other + 0.01 * (seed % 3) for seed in range(9)))
    (c,) = compare({"falling": falling, "steady": steady}, tie=0.5)
    assert (c.kind, c.more_seeds, c.firm) == ("undecided", None, False)
    assert (
        c.verdict == "undecided: runs of falling end in two places, 2 of 9 near 0.155, 7 near 0.85"
    )
    states = [State(arm, seed, "done") for arm in ("falling", "steady") for seed in range(9)]
    assert next_runs(states, [c], max_seeds=20) == []  # more seeds would not decide it


def test_where_two_arms_fall_apart_those_that_may_have_not_yet_are_undecided():
    def lucky(level: float, seeds: int) -> dict[int, np.ndarray]:
        return scores(*(level + 0.01 * (seed % 3) for seed in range(seeds)))

    apart = (0.15, 0.16, 0.85, 0.86, 0.84, 0.16)
    steady = {name: lucky(0.85, 6) for name in ("c", "d", "e", "f", "g", "high")} | {
        "low": lucky(0.45, 6)
    }
    arms = {"a": scores(*apart), "b": scores(*apart[::-1])} | steady
    found = {(c.a, c.b): c for c in compare(arms, tie=0.03)}
    reason = "runs of a and b end in two places, and 6 seeds may have missed those of others"
    assert found["high", "low"].verdict == f"undecided: {reason}"
    (alone,) = (c for c in compare(steady, tie=0.03) if (c.a, c.b) == ("high", "low"))
    assert alone.verdict == "high > low" + LIKE_THESE


def test_a_verdict_is_firm_where_enough_seeds_show_no_other_place():
    def of(seeds: int):
        a, b = (
            scores(*(level + 0.002 * (seed % 3) for seed in range(seeds))) for level in (0.8, 0.3)
        )
        return compare({"a": a, "b": b}, tie=0.03)[0]

    few, many = of(3), of(12)
    assert few.verdict == "a > b in runs like these" and not few.firm
    assert many.verdict == "a > b" and many.firm and many.hidden < 0.5 < few.hidden


def test_a_tie_is_firm_only_with_many_seeds():
    """Both at 0.5, where a run can lose or gain 0.5: of 300 seeds 1.2 % of runs go unseen, which
    shift it by less than 0.03."""

    def of(seeds: int):
        a, b = (
            scores(*(0.5 + 0.002 * ((seed + first) % 3) for seed in range(seeds)), questions=20)
            for first in (0, 1)
        )
        return compare({"a": a, "b": b}, tie=0.03)[0]

    assert (
        of(8).verdict == "tie within 0.03 in runs like these"
        and of(300).verdict == "tie within 0.03"
    )


def test_a_measure_without_bounds_has_no_firm_verdict():
    lengths = [
        {seed: np.full(10_000, mean + 0.01 * seed) for seed in range(40)} for mean in (3.0, 9.0)
    ]
    (c,) = compare({"short": lengths[0], "long": lengths[1]}, tie=1.0)
    assert c.verdict == "long > short in runs like these" and math.isinf(c.hidden)


# --- what few seeds may hide ----------------------------------------------------------------------


def test_the_share_that_goes_unseen():
    assert unseen_share(5, 0.025) == pytest.approx(1 - 0.025**0.2) and unseen_share(
        1, 0.025
    ) == pytest.approx(0.975)
    rng = np.random.default_rng(0)
    share = unseen_share(4, 0.05)
    assert np.mean((rng.random((100_000, 4)) > share).all(axis=1)) == pytest.approx(0.05, abs=0.003)


def test_a_hidden_shift_is_the_largest_of_all_that_go_unseen():
    assert hidden_shift([0.85], 5, 0.025) == pytest.approx(0.85 * unseen_share(5, 0.025))
    assert hidden_shift([], 5, 0.025) == hidden_shift([0.0], 5, 0.025) == 0.0
    rooms, seeds, chance = np.array([0.85, 0.5, 0.2]), 6, 0.0125
    # Every third probability follows from the other two: (1 - p) (1 - q) (1 - r) = chance ** (1 /
    # seeds).
    kept = np.linspace(chance ** (1 / seeds), 1, 400)
    p, q = np.meshgrid(kept, kept)
    r = chance ** (1 / seeds) / (p * q)
    shifts = ((1 - np.stack([p, q, r], axis=-1)) @ rooms)[r <= 1]
    assert hidden_shift(rooms, seeds, chance) == pytest.approx(shifts.max(), abs=1e-4)


# --- rates ----------------------------------------------------------------------------------------

NOISE = (0.02,) * 2
SETTINGS = {
    "a coin, 3 seeds": Setting("", (0.5,) * 2, 3, NOISE, questions=256, outcomes=(COIN,)),
    "a coin, 8 seeds": Setting("", (0.5,) * 2, 8, NOISE, questions=256, outcomes=(COIN,)),
    "a coin until decided": Setting(
        "", (0.5,) * 2, 3, NOISE, questions=256, outcomes=(COIN,), last_seeds=6
    ),
    "a rare loss": Setting("", (0.5,) * 2, 10, (0.004,) * 2, questions=1024, outcomes=(RARE,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_verdicts_are_true_as_they_stand_where_runs_end_in_places(name):
    tables = 200
    found = rates(SETTINGS[name], tables, seed=1)
    false, (of_all, firm, places) = found[0], found[11:14]
    most = 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / tables)
    assert false <= most and firm <= most
    if name == "a coin, 8 seeds":
        assert of_all <= most and places > 0.95
    if name in ("a coin, 3 seeds", "a rare loss"):
        assert of_all > 0.1  # which is why a verdict of few seeds is one of runs like these
