"""How often are verdicts on other measures than accuracy false, and how often do intervals hold the
truth?

    uv run -m benchmarks.measure_rates

By simulation of runs that learn: each question's chance rises over the evaluations of a run, with
luck of the run and of each evaluation; answers are Bernoulli draws. The arms of a table are equal,
or the first learns faster; the true difference is that of the means of many runs on fresh
questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tyro

from alignment.ablation.measures import best_checkpoint, majority_at_k, pass_at_k, share_until
from alignment.ablation.statistics import Scores, area_under_curve, compare
from benchmarks.ablation_rates import false_verdict

QUESTIONS = 256
SAMPLES = 8  # of a question in an evaluation
EVALUATIONS = 8
TOKENS = np.linspace(0, 1, EVALUATIONS)  # sampled by each evaluation
LUCK = 0.03  # standard deviation of a run's accuracy between seeds, and of an evaluation's
TASTE = 0.06  # of what an arm adds to a question
TRUTH_RUNS = 4000  # of each arm, by which a true difference is counted
TEXTS = [str(question) for question in range(QUESTIONS)]


@dataclass(frozen=True)
class MeasureSetting:
    """Arms, of which the first learns `gain` times as fast, and their seeds."""

    arms: int
    seeds: int
    gain: float = 1.0

    @property
    def name(self) -> str:
        words = f"{self.arms} arms, {self.seeds} seeds"
        return words if self.gain == 1 else f"{words}, one {self.gain:g} x as fast"


Answers = np.ndarray
"""Rewards of the samples of every question in every evaluation of a run [E, Q, N]."""


def _average(answers_EQN: Answers) -> np.ndarray:
    return answers_EQN[-1].mean(axis=-1)


def _pass_at_4(answers_EQN: Answers) -> np.ndarray:
    return pass_at_k(answers_EQN[-1], 4)


def _pass_at_8(answers_EQN: Answers) -> np.ndarray:
    return pass_at_k(answers_EQN[-1], 8)


def _majority_of_4(answers_EQN: Answers) -> np.ndarray:
    """By votes of which a wrong one is one of two other answers, by the sample's number."""
    rewards_QN = answers_EQN[-1]
    wrong_N = 1 + np.arange(rewards_QN.shape[1]) % 2
    return majority_at_k(rewards_QN, np.where(rewards_QN == 1, 0, wrong_N), 4)


def _area(answers_EQN: Answers) -> np.ndarray:
    return area_under_curve(TOKENS.tolist(), answers_EQN[..., 0])


def _best(answers_EQN: Answers) -> np.ndarray:
    return best_checkpoint(answers_EQN[..., 0], TEXTS)


def _naive_best(answers_EQN: Answers) -> np.ndarray:
    values_EQ = answers_EQN[..., 0]
    return values_EQ[values_EQ.mean(axis=1).argmax()]


def _tokens(answers_EQN: Answers) -> np.ndarray:
    return share_until(TOKENS, answers_EQN[..., 0], 0.35, 1.0)


MEASURES: dict[str, Callable[[Answers], np.ndarray]] = {
    "avg@8": _average,
    "pass@4": _pass_at_4,
    "pass@8": _pass_at_8,
    "maj@4": _majority_of_4,
    "area": _area,
    "best": _best,
    "best, chosen and scored by the same questions": _naive_best,
    "tokens_to@0.35": _tokens,
}
"""Measures of answers; entropy, a number of a whole run, is drawn from a distribution."""


def answers_of_arm(rng: np.random.Generator, rate: float, easy_Q: np.ndarray, seeds: int):
    """The answers of an arm's runs [S, E, Q, N], which learn at a rate. `easy_Q` is what a question
    adds to the chance of a right answer."""
    rise_E = 0.1 + 0.4 * (1 - np.exp(-3 * rate * TOKENS))
    taste_Q = np.sqrt(3) * TASTE * rng.uniform(-1, 1, len(easy_Q))
    run_S = LUCK * rng.normal(size=seeds)
    evaluation_SE = LUCK * rng.normal(size=(seeds, EVALUATIONS))
    level_SE = rise_E + run_S[:, None] + evaluation_SE
    # a question's own part grows with the accuracy, so that chances stay within 0 and 1
    chance_SEQ = level_SE[..., None] + 2 * rise_E[:, None] * (easy_Q + taste_Q)
    shape = (*chance_SEQ.shape, SAMPLES)
    return (rng.random(shape) < np.clip(chance_SEQ, 0, 1)[..., None]).astype(float)


def draw_table(
    rng: np.random.Generator, setting: MeasureSetting
) -> dict[str, dict[str, dict[int, np.ndarray]]]:
    """By measure, the scores of a table's arms and seeds. All arms answer the same questions."""
    easy_Q = rng.uniform(-0.3, 0.3, QUESTIONS)
    tables: dict[str, dict[str, dict[int, np.ndarray]]] = {name: {} for name in MEASURES}
    tables |= {"entropy": {}, "entropy, heavy tails": {}}
    for arm in range(setting.arms):
        rate = setting.gain if arm == 0 else 1.0
        answers_SEQN = answers_of_arm(rng, rate, easy_Q, setting.seeds)
        for name, measure in MEASURES.items():
            tables[name][str(arm)] = {s: measure(run) for s, run in enumerate(answers_SEQN)}
        normal_S = 1 / rate + 0.1 * rng.normal(size=setting.seeds)
        heavy_S = 1 / rate + 0.1 * rng.standard_t(3, size=setting.seeds) / np.sqrt(3)
        for name, values_S in (("entropy", normal_S), ("entropy, heavy tails", heavy_S)):
            runs = {seed: np.full(QUESTIONS, value) for seed, value in enumerate(values_S)}
            tables[name][str(arm)] = runs
    return tables


def true_differences(setting: MeasureSetting) -> dict[str, float]:
    """By measure, the expected difference of the first arm to another, by many runs, each of
    questions of its own."""
    if setting.gain == 1:
        return dict.fromkeys((*MEASURES, "entropy", "entropy, heavy tails"), 0.0)
    rng = np.random.default_rng(1)
    sums = dict.fromkeys(MEASURES, 0.0)
    for _ in range(TRUTH_RUNS):
        easy_Q = rng.uniform(-0.3, 0.3, QUESTIONS)
        for rate, sign in ((setting.gain, 1), (1.0, -1)):
            [answers_EQN] = answers_of_arm(rng, rate, easy_Q, 1)
            for name, measure in MEASURES.items():
                sums[name] += sign * float(measure(answers_EQN).mean())
    truth = {name: total / TRUTH_RUNS for name, total in sums.items()}
    entropy = 1 / setting.gain - 1
    return truth | {"entropy": entropy, "entropy, heavy tails": entropy}


COLUMNS = ("difference", "false tables", "coverage", "decided", "found by signs")


def rates(setting: MeasureSetting, tables: int, seed: int) -> dict[str, list[float]]:
    """By measure the values of `COLUMNS`; coverage is of the comparisons with the first arm."""
    rng = np.random.default_rng(seed)
    truth = true_differences(setting)
    rows: dict[str, list[list[float]]] = {name: [] for name in truth}
    for _ in range(tables):
        for name, arms in draw_table(rng, setting).items():
            rows[name].append(_cells(arms, truth[name]))
    return {name: np.mean(of_measure, axis=0).tolist() for name, of_measure in rows.items()}


def _cells(arms: Mapping[str, Scores], difference: float) -> list[float]:
    """The values of `COLUMNS` for one table."""
    is_false = []
    covers = []
    is_decided = []
    is_exact = []
    for comparison in compare(arms, 0.03):
        true = difference if comparison.a == "0" else 0.0
        is_false.append(false_verdict(comparison, true) != "")
        is_decided.append(comparison.kind != "undecided")
        is_exact.append(comparison.exact)
        if comparison.a == "0":
            covers.append(comparison.low <= true <= comparison.high)
    return [
        difference,
        any(is_false),
        float(np.mean(covers)),
        float(np.mean(is_decided)),
        float(np.mean(is_exact)),
    ]


def main(tables: int = 1000, seed: int = 0, only: str = "") -> None:
    """Print the rates of every measure, as Markdown.

    Args:
        tables: Simulated tables of each setting.
        seed: Of the simulation.
        only: The measures whose names have this in them.
    """
    for name in list(MEASURES):
        if only not in name:
            del MEASURES[name]
    standard_error = 100 * np.sqrt(0.05 * 0.95 / tables)
    print(f"{tables} tables each; one standard error of 5 % is {standard_error:.1f} points\n")
    header = f"| measure | setting | {' | '.join(COLUMNS)} |\n|---|---{'|---' * len(COLUMNS)}|"
    print(header, flush=True)
    settings = (
        MeasureSetting(2, 5),
        MeasureSetting(2, 7),
        MeasureSetting(4, 3),
        MeasureSetting(2, 5, gain=1.5),
    )
    for setting in settings:
        for name, (difference, *shares) in rates(setting, tables, seed).items():
            cells = [f"{difference:+.3f}", *(f"{100 * share:.1f}" for share in shares)]
            print(f"| {name} | {setting.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
