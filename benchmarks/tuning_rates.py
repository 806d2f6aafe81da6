"""How often are the verdicts of tuned arms false, the choice of their values included?

    uv run -m benchmarks.tuning_rates

By simulation: each arm has an accuracy for each value of its grid, takes the value with the best
mean on tuning seeds and validation questions (`choose`), and is compared on fresh seeds and other
questions (`compare`). Beside the truth of the values that were taken stand that of the best values
of the grid, and of the best values of all, which a grid may miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tyro

from alignment.ablation.design import ALPHA
from alignment.ablation.statistics import compare, pairs
from alignment.ablation.summary import survives_choice
from alignment.ablation.tuning import Candidate, Choice, Tuning
from benchmarks.ablation_rates import TIE, Outcome, Setting, false_verdict, sample

SEED_NOISE = 0.02  # standard deviation of a run's accuracy between seeds
TASTE = 0.06  # of the effect of an arm's value on a question
VALIDATION_QUESTIONS = 150
TEST_QUESTIONS = 350


@dataclass(frozen=True)
class TunedSetting:
    """The truth of arms that are tuned."""

    name: str
    accuracies: tuple[tuple[float, ...], ...]
    """Of each arm, of each value of its grid."""
    optima: tuple[float, ...] = ()
    """The best accuracy of each arm, of any value; by default the best of its grid."""
    seeds: int = 5
    tune_seeds: int = 2
    outcomes: dict[int, tuple[Outcome, ...]] = field(default_factory=dict)
    """By place in the grid, where runs of that value may end otherwise."""


def settings() -> list[TunedSetting]:
    """All settings of the table."""
    flat = (0.495, 0.5, 0.495)
    chosen = [TunedSetting("same best value, flat", (flat, flat))]
    for shape, (near, far) in {
        "flat": (0.495, 0.48),
        "middling": (0.47, 0.40),
        "sharp": (0.42, 0.25),
    }.items():
        low = (0.5, near, far)
        high = (far, near, 0.5)
        middle = (near, 0.5, near)
        chosen.append(TunedSetting(f"other best values, {shape}", (low, high)))
        four = (low, high, middle, low)
        chosen.append(TunedSetting(f"4 arms, other best values, {shape}", four))
        chosen.append(
            TunedSetting(f"other best values, {shape}, 1 seed", (low, high), tune_seeds=1)
        )
        chosen.append(TunedSetting(f"other best values, {shape}, 10 seeds", (low, high), seeds=10))
    chosen.append(TunedSetting("9 values, no difference", ((0.5,) * 9,) * 2))
    missed = (0.40, 0.44, 0.47)
    chosen.append(
        TunedSetting("grid misses one arm's best", ((0.47, 0.5, 0.47), missed), (0.5, 0.5))
    )
    chosen.append(TunedSetting("grid misses both arms' best", (missed, missed), (0.5, 0.5)))
    # The largest value reaches most where a run does not collapse: 0.53 - 0.4 / 4 = 0.43.
    risky = ((0.47, 0.5, 0.53), (0.47, 0.5, 0.53))
    collapse = {2: (Outcome(0.25, -0.4),)}
    chosen.append(TunedSetting("a value collapses in 1 of 4", risky, outcomes=collapse))
    better = ((0.55, 0.6, 0.55), (0.5, 0.47, 0.40))
    chosen.append(TunedSetting("one 0.1 better, other best values", better))
    return chosen


def expected(setting: TunedSetting) -> np.ndarray:
    """The expected accuracy of each arm with each value [A, V], over all runs."""
    expected_AV = np.array(setting.accuracies)
    for place, outcomes in setting.outcomes.items():
        for outcome in outcomes:
            expected_AV[:, place] += outcome.probability * outcome.shift
    return expected_AV


def validation_accuracies(
    rng: np.random.Generator, setting: TunedSetting, tables: int
) -> np.ndarray:
    """The validation accuracy of each arm with each value by tuning seed [N, A, V, S]: the truth,
    with errors by seeds, by questions, and by the sampling of answers."""
    truth_AV = np.array(setting.accuracies)
    shape_NAVS = (tables, *truth_AV.shape, setting.tune_seeds)
    runs_NAVS = truth_AV[..., None] + SEED_NOISE * rng.normal(size=shape_NAVS)
    for place, outcomes in setting.outcomes.items():
        for outcome in outcomes:
            happens_NAS = rng.random((*shape_NAVS[:2], setting.tune_seeds)) < outcome.probability
            runs_NAVS[:, :, place] += outcome.shift * happens_NAS
    taste_NAV = TASTE / np.sqrt(VALIDATION_QUESTIONS) * rng.normal(size=shape_NAVS[:3])
    seen_NAVS = np.clip(runs_NAVS + taste_NAV[..., None], 0, 1)
    return rng.binomial(VALIDATION_QUESTIONS, seen_NAVS) / VALIDATION_QUESTIONS


def most_lost(accuracies_AVS: np.ndarray) -> dict[str, float]:
    """`Tuning.most_lost` of one table, of arms by number."""
    choices = {}
    for arm, accuracies_VS in enumerate(accuracies_AVS):
        candidates = []
        for place, accuracies_S in enumerate(accuracies_VS):
            candidates.append(Candidate({"value": place}, dict(enumerate(accuracies_S.tolist()))))
        choices[str(arm)] = Choice(tuple(candidates), int(accuracies_VS.mean(axis=-1).argmax()))
    seeds = tuple(range(accuracies_AVS.shape[-1]))
    return Tuning(choices, seeds, VALIDATION_QUESTIONS, {}).most_lost(ALPHA)


COLUMNS = (
    "false",
    "coverage",
    "false of the grid's best",
    "coverage of the grid's best",
    "the same, unnamed",
    "false of the best of all",
    "decided",
    "decided, unnamed",
    "best value taken",
    "accuracy lost",
    "validation too high by",
    "at the edge",
)
"""False tables have a verdict that is false of the values that were taken; coverage is that of
their difference. Of the grid's best, and of the best of all: held against the difference that arms
with these values have. Unnamed: without the words that a verdict is of the values taken
(`survives_choice`). Accuracy lost: of an arm, by another value than the grid's best. Validation
too high by: of the accuracy that an arm was chosen by."""


def rates(setting: TunedSetting, tables: int, seed: int) -> list[float]:
    """The values of `COLUMNS` over simulated tables."""
    rng = np.random.default_rng(seed)
    means_NAVS = validation_accuracies(rng, setting, tables)
    means_NAV = means_NAVS.mean(axis=-1)
    taken_NA = means_NAV.argmax(axis=-1)
    expected_AV = expected(setting)
    best_A = expected_AV.max(axis=1)
    optima_A = np.array(setting.optima or best_A)
    arms, values = expected_AV.shape
    arm_A = np.arange(arms)
    rows = []
    for table in range(tables):
        lost = most_lost(means_NAVS[table])
        rows.append(verdict_cells(rng, setting, taken_NA[table], [best_A, optima_A], lost))
    taken_accuracy_NA = expected_AV[arm_A, taken_NA]
    chosen_mean_NA = np.take_along_axis(means_NAV, taken_NA[..., None], axis=-1)[..., 0]
    is_edge_NA = (taken_NA == 0) | (taken_NA == values - 1)
    return [
        *np.mean(rows, axis=0).tolist(),
        float(np.mean(taken_accuracy_NA == best_A)),
        float(np.mean(best_A - taken_accuracy_NA)),
        float(np.mean(chosen_mean_NA - taken_accuracy_NA)),
        float(np.mean(is_edge_NA)),
    ]


def verdict_cells(
    rng: np.random.Generator,
    setting: TunedSetting,
    taken_A: np.ndarray,
    truths: Sequence[np.ndarray],
    lost: Mapping[str, float],
) -> list[float]:
    """The first eight of `COLUMNS` for one table: arms with the values that they took, on fresh
    seeds and questions, held against those values' truth and against the two `truths`."""
    arms = len(taken_A)
    accuracies = tuple(setting.accuracies[arm][taken_A[arm]] for arm in range(arms))
    outcomes = tuple(setting.outcomes.get(int(place), ()) for place in taken_A)
    fresh = Setting(
        "",
        accuracies,
        setting.seeds,
        (SEED_NOISE,) * arms,
        questions=TEST_QUESTIONS,
        taste=TASTE,
        outcomes=outcomes,
    )
    compared = compare(sample(rng, fresh), TIE, pairs([str(arm) for arm in range(arms)]))
    taken_accuracy_A = expected(setting)[np.arange(arms), taken_A]
    is_false = np.zeros((3, len(compared)), dtype=bool)
    covers = np.zeros((3, len(compared)), dtype=bool)
    for row, truth_A in enumerate([taken_accuracy_A, *truths]):
        for place, comparison in enumerate(compared):
            true = round(float(truth_A[int(comparison.a)] - truth_A[int(comparison.b)]), 12)
            is_false[row, place] = false_verdict(comparison, true) != ""
            covers[row, place] = comparison.low <= true <= comparison.high
    is_decided = np.array([comparison.kind != "undecided" for comparison in compared])
    is_unnamed = np.array([survives_choice(comparison, lost, TIE) for comparison in compared])
    return [
        float(is_false[0].any()),
        float(covers[0].mean()),
        float(is_false[1].any()),
        float(covers[1].mean()),
        float((is_false[1] & is_unnamed).any()),
        float(is_false[2].any()),
        float(is_decided.mean()),
        float((is_decided & is_unnamed).mean()),
    ]


def main(tables: int = 1000, only: str = "", seed: int = 0) -> None:
    """Print the rates of all settings whose name has `only` in it, as Markdown.

    Args:
        tables: Simulated tables of each setting.
        only: A part of the settings' names; all settings where it is empty.
        seed: Of the simulation.
    """
    standard_error = 100 * np.sqrt(0.05 * 0.95 / tables)
    print(f"{tables} tables each; one standard error of 5 % is {standard_error:.1f} points\n")
    print(f"| setting | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|", flush=True)
    for setting in settings():
        if only in setting.name:
            cells = [f"{100 * value:.1f}" for value in rates(setting, tables, seed)]
            print(f"| {setting.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
