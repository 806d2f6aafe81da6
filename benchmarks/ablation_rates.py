"""How often the verdicts of an ablation are false, and how often its intervals hold the truth, by simulation.

uv run -m benchmarks.ablation_rates --repeats 1000

Beside ours stands what is usually done: the percentile bootstrap over seeds and questions, each pair by itself.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from alignment.ablation.design import ALPHA
from alignment.ablation.statistics import Comparison, compare

TIE = 0.03
DRAWS = 500  # of the usual bootstrap
SCENARIOS = {
    # name: (true accuracy of each arm, seeds, standard deviation between seeds of each arm)
    "2 arms alike, 3 seeds": ([0.5] * 2, 3, [0.02] * 2),
    "4 arms alike, 2 seeds": ([0.5] * 4, 2, [0.02] * 4),
    "4 arms alike, 3 seeds": ([0.5] * 4, 3, [0.02] * 4),
    "12 arms alike, 3 seeds": ([0.5] * 12, 3, [0.02] * 12),
    "4 arms alike, 3 seeds, no spread between seeds": ([0.5] * 4, 3, [0.0] * 4),
    "4 arms alike, 3 seeds, half of them four times as noisy": ([0.5] * 4, 3, [0.01, 0.04] * 2),
    "4 arms alike, 3 seeds, one of them eight times as noisy": ([0.5] * 4, 3, [0.01, 0.01, 0.01, 0.08]),
    "4 arms, two better by 0.08, 3 seeds": ([0.5, 0.5, 0.58, 0.58], 3, [0.02] * 4),
    "12 arms, half better by 0.08, 5 seeds": ([0.5] * 6 + [0.58] * 6, 5, [0.02] * 12),
    "2 arms 0.03 apart, 8 seeds": ([0.5, 0.53], 8, [0.01] * 2),
}
LOOKS = {
    # name: (true accuracies, first and last number of seeds, standard deviation between seeds)
    "2 arms alike": ([0.5] * 2, 2, 8, [0.02] * 2),
    "3 arms alike": ([0.5] * 3, 2, 8, [0.02] * 3),
    "3 arms, one better by 0.05": ([0.5, 0.5, 0.55], 2, 8, [0.02] * 3),
}


def sample(rng: np.random.Generator, accuracies, seeds: int, spreads, questions: int) -> dict[str, dict[int, np.ndarray]]:
    """Right or wrong answers: questions differ in difficulty, arms in which questions they are good at, seeds in luck."""
    difficulty = rng.uniform(-0.3, 0.3, questions)
    arms = {}
    for i, (accuracy, spread) in enumerate(zip(accuracies, spreads, strict=True)):
        taste = rng.uniform(-0.1, 0.1, questions)
        arms[str(i)] = {
            s: (rng.random(questions) < accuracy + difficulty + taste + rng.normal(0, spread)).astype(float)
            for s in range(seeds)
        }
    return arms


def percentile(arms, seed_weights: np.ndarray, question_weights: np.ndarray) -> list[tuple[str, str, float, float]]:
    """The usual bootstrap: seeds and questions resampled with replacement, the 2.5 % and 97.5 % quantiles."""
    found = []
    for a, b in combinations(arms, 2):
        differences_SQ = np.stack([arms[a][s] - arms[b][s] for s in arms[a]])
        means = ((question_weights @ differences_SQ.T) * seed_weights).sum(axis=1)
        found.append((a, b, *np.quantile(means, [ALPHA / 2, 1 - ALPHA / 2])))
    return found


def is_false(c: Comparison, true: float) -> bool:
    """Whether a verdict says what is not so."""
    if ">" in c.verdict:
        return true == 0 or (c.verdict.split(" > ")[0] == c.a) != (true > 0)
    return c.verdict.startswith("tie") and abs(true) >= TIE


def replication(accuracies, seeds: int, spreads, questions: int, seed: tuple[int, int]) -> np.ndarray:
    """Of one simulated ablation: pairs whose interval holds the truth, whether any verdict is false, pairs decided, pairs;
    and of the usual bootstrap: pairs whose interval holds the truth, whether any finds a difference that there is not."""
    rng = np.random.default_rng(seed)
    arms = sample(rng, accuracies, seeds, spreads, questions)
    found = compare(arms, TIE)
    true = [accuracies[int(c.a)] - accuracies[int(c.b)] for c in found]
    usual = percentile(
        arms,
        rng.multinomial(seeds, [1 / seeds] * seeds, DRAWS) / seeds,
        rng.multinomial(questions, [1 / questions] * questions, DRAWS) / questions,
    )
    return np.array(
        [
            sum(c.low <= t <= c.high for c, t in zip(found, true, strict=True)),
            any(is_false(c, t) for c, t in zip(found, true, strict=True)),
            sum(c.decided for c in found),
            len(found),
            sum(low <= t <= high for (_, _, low, high), t in zip(usual, true, strict=True)),
            any(t == 0 and not low <= 0 <= high for (_, _, low, high), t in zip(usual, true, strict=True)),
        ]
    )


def looked_at(accuracies, first: int, last: int, spreads, questions: int, seed: tuple[int, int]) -> np.ndarray:
    """Of what `--until_decided` ends with, a look after every seed, at a share of the error rate each: whether any verdict
    is false, pairs decided, pairs, and the seeds that it took."""
    arms = sample(np.random.default_rng(seed), accuracies, last, spreads, questions)
    for seeds in range(first, last + 1):
        so_far = {arm: {s: scores for s, scores in by_seed.items() if s < seeds} for arm, by_seed in arms.items()}
        found = compare(so_far, TIE, alpha=ALPHA / (last - first + 1))
        if all(c.decided for c in found):
            break
    false = any(is_false(c, accuracies[int(c.a)] - accuracies[int(c.b)]) for c in found)
    return np.array([false, sum(c.decided for c in found), len(found), seeds])


def total(of, scenario: Sequence, repeats: int, questions: int, seed: int, name: str, console: Console) -> np.ndarray:
    """The sum of `of` over replications, on all cores."""
    seeds = [(seed, i) for i in range(repeats)]
    with ProcessPoolExecutor(initializer=os.nice, initargs=(5,)) as pool:
        done = pool.map(functools.partial(of, *scenario, questions), seeds, chunksize=5)
        return sum(track(done, name, total=repeats, console=console, transient=True))


def main(repeats: int = 1000, questions: int = 512, seed: int = 0) -> None:
    console = Console(width=150)
    error = 1.96 * math.sqrt(ALPHA * (1 - ALPHA) / repeats)
    stated = f"{repeats} replications, {questions} questions; stated: coverage 95 %, false verdicts at most 5 % (± {error:.1%})"
    table = Table(title=stated)
    for heading in ("scenario", "coverage", "families with a false verdict", "pairs decided", "percentile bootstrap: coverage",
                    "families with a false difference"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for name, scenario in SCENARIOS.items():
        held, false, decided, pairs, usual_held, usual_false = total(
            replication, scenario, repeats, questions, seed, name, console
        )
        table.add_row(name, f"{held / pairs:.1%}", f"{false / repeats:.1%}", f"{decided / pairs:.0%}",
                      f"{usual_held / pairs:.1%}", f"{usual_false / repeats:.1%}")  # fmt: skip
    console.print(table)
    table = Table(title="seeds added until every pair is decided")
    for heading in ("scenario", "seeds", "families with a false verdict", "pairs decided", "seeds used, mean"):
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for name, scenario in LOOKS.items():
        false, decided, pairs, used = total(looked_at, scenario, repeats, questions, seed, name, console)
        seeds = f"{scenario[1]} to {scenario[2]}"
        table.add_row(name, seeds, f"{false / repeats:.1%}", f"{decided / pairs:.0%}", f"{used / repeats:.1f}")
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
