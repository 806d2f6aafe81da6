"""The stated rates, by simulation in small (in full: benchmarks/ablation_rates.py)."""

import math

import numpy as np
import pytest

from alignment.ablation.schedule import next_runs
from alignment.ablation.statistics import half_width_of_mean
from benchmarks.ablation_rates import Setting, detection_rate, ours, printed_power, rates, sample
from benchmarks.match_rates import MatchSetting, match_rates

QUIET, TABLES = 0.01, 400


def setting(arms: int, seeds: int, noise: tuple[float, ...], **other) -> Setting:
    return Setting("", other.pop("accuracies", (0.5,) * arms), seeds, noise, questions=256, **other)


SETTINGS = {
    "2 arms": setting(2, 3, (0.02,) * 2),
    "4 arms": setting(4, 3, (0.02,) * 4),
    "one arm 8 x": setting(4, 3, (QUIET,) * 3 + (8 * QUIET,)),
    "8 arms, one 8 x": setting(8, 3, (QUIET,) * 7 + (8 * QUIET,)),
    "2 seeds, one arm 20 x": setting(4, 2, (QUIET,) * 3 + (20 * QUIET,)),
    "half 4 x": setting(6, 5, (QUIET, 4 * QUIET) * 3),
    "heavy tails": setting(4, 5, (0.02,) * 4, shape="heavy tails"),
    "a factor of a grid": setting(4, 2, (0.02,) * 4, grid=(2, 2)),
    "few right answers": setting(2, 3, (0.002,) * 2, accuracies=(0.02,) * 2),
    "at the margin": setting(2, 8, (0.005,) * 2, accuracies=(0.5, 0.53)),
    "missing runs": setting(4, 5, (0.02,) * 4, missing=0.1),
    "known groups of questions": setting(
        3, 5, (0.01,) * 3, cluster=4, taste=0.12, clusters_known=True
    ),
    "until decided": setting(2, 2, (0.02,) * 2, last_seeds=8),
    "until decided, one arm far worse": setting(
        3, 3, (0.02,) * 3, accuracies=(0.5, 0.5, 0.2), last_seeds=6
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_false_tables_are_at_most_one_in_twenty_and_intervals_hold_the_truth(name):
    false, false_tie, coverage, of_noisy_arm, *_ = rates(
        SETTINGS[name], TABLES, seed=2, others=False
    )
    assert false <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / TABLES)
    assert false_tie <= 0.025 + 2.5 * math.sqrt(0.025 * 0.975 / TABLES)
    margin = 2.5 * math.sqrt(0.05 * 0.95 / TABLES)
    if not SETTINGS[name].last_seeds:  # the last look is one that the data chose
        assert 0.93 - margin <= coverage <= 0.98 + margin
        assert math.isnan(of_noisy_arm) or 0.93 - margin <= of_noisy_arm <= 0.98 + margin


def test_an_arm_that_cannot_win_stops_early(monkeypatch):
    """The arm that is far worse is often decided against both others by the fourth seed (Student's
    t asks much of three), and gets none of those that the equal ones still get: less than half as
    many, of three at most."""
    added, rng = [], np.random.default_rng(0)

    def counting(*given):
        return (added.extend(states := next_runs(*given)), states)[1]

    monkeypatch.setattr("benchmarks.ablation_rates.next_runs", counting)
    for _ in range(50):
        ours(
            sample(rng, SETTINGS["until decided, one arm far worse"]),
            SETTINGS["until decided, one arm far worse"],
        )
    seeds = {arm: sum(state.arm == arm for state in added) / 50 for arm in "012"}
    assert min(seeds["0"], seeds["1"]) > 2 * seeds["2"] > 0


def test_an_arms_own_interval_holds_its_truth_beside_an_unstable_arm():
    rng, held = np.random.default_rng(0), []
    for _ in range(TABLES):
        arms = sample(rng, SETTINGS["one arm 8 x"])
        means = [
            np.mean([scores.mean() for scores in by_seed.values()]) for by_seed in arms.values()
        ]
        held.append(
            [
                abs(m - 0.5) <= half_width_of_mean(arm)
                for m, arm in zip(means, arms.values(), strict=True)
            ]
        )
    margin = 2.5 * math.sqrt(0.05 * 0.95 / TABLES)
    assert all(0.95 - margin <= coverage <= 0.98 + margin for coverage in np.mean(held, axis=0))


def test_a_difference_at_the_margin_is_seldom_called_a_tie():
    at_margin = setting(3, 5, (0.004, 0.004, 0.03), accuracies=(0.485, 0.485, 0.515))
    false_tie = rates(at_margin, TABLES, seed=2, others=False)[1]
    assert false_tie <= 0.025 + 2.5 * math.sqrt(0.025 * 0.975 / TABLES)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1, 2, 5, 7])
def test_the_printed_power_is_the_power(index):
    at_smallest_difference = printed_power()[index].setting
    rate = detection_rate(at_smallest_difference, TABLES, seed=3)
    assert abs(rate - 0.8) <= 0.05 + 2 * math.sqrt(0.16 / TABLES)


@pytest.mark.parametrize("curve", ["sigmoid", "straight, then flat"])
@pytest.mark.parametrize("interval", [40, 20, 10])
def test_arms_that_are_equal_at_equal_tokens_seldom_differ_however_far_apart_they_are_evaluated(
    curve, interval
):
    """On straight lines alone 75 to 100 % of these tables differ with two evaluations after the
    first."""
    tables = 60
    found = match_rates(MatchSetting(curve, 1.5, interval), tables)
    assert found["false"] <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / tables)


def test_a_difference_at_equal_tokens_is_found_where_curves_are_evaluated_often():
    assert match_rates(MatchSetting("concave", 1.5, 5, gain=0.1), 30)["right"] > 0.9
