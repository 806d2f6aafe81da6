"""How often the verdicts of an ablation are false, and how often its intervals hold the truth, by simulation.

uv run -m benchmarks.ablation_rates --repeats 1000

Beside ours stands what is usually done: the percentile bootstrap over seeds and questions, each pair by itself.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from alignment.ablation import ALPHA, Comparison, compare

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
    "4 arms, two better by 0.08, 3 seeds": ([0.5, 0.5, 0.58, 0.58], 3, [0.02] * 4),
    "12 arms, half better by 0.08, 5 seeds": ([0.5] * 6 + [0.58] * 6, 5, [0.02] * 12),
    "2 arms 0.03 apart, 8 seeds": ([0.5, 0.53], 8, [0.01] * 2),
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


def main(repeats: int = 1000, questions: int = 512, seed: int = 0) -> None:
    console = Console(width=150)
    table = Table(title=f"{repeats} replications, {questions} questions; stated: coverage 95 %, false verdicts at most 5 %")
    for heading in ("scenario", "coverage", "families with a false verdict", "pairs decided", "percentile bootstrap: coverage",
                    "families with a false difference"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for name, (accuracies, seeds, spreads) in SCENARIOS.items():
        rng = np.random.default_rng(seed)
        seed_weights = rng.multinomial(seeds, [1 / seeds] * seeds, DRAWS) / seeds
        question_weights = rng.multinomial(questions, [1 / questions] * questions, DRAWS) / questions
        held = false = decided = pairs = usual_held = usual_false = 0
        for _ in track(range(repeats), name, console=console, transient=True):
            arms = sample(rng, accuracies, seeds, spreads, questions)
            found = compare(arms, TIE)
            true = [accuracies[int(c.a)] - accuracies[int(c.b)] for c in found]
            held += sum(c.low <= t <= c.high for c, t in zip(found, true, strict=True))
            false += any(is_false(c, t) for c, t in zip(found, true, strict=True))
            decided += sum(c.decided for c in found)
            pairs += len(found)
            usual = percentile(arms, seed_weights, question_weights)
            usual_held += sum(low <= t <= high for (_, _, low, high), t in zip(usual, true, strict=True))
            usual_false += any(t == 0 and not low <= 0 <= high for (_, _, low, high), t in zip(usual, true, strict=True))
        error = 1.96 * math.sqrt(ALPHA * (1 - ALPHA) / repeats)
        table.add_row(name, f"{held / pairs:.1%}", f"{false / repeats:.1%} (± {error:.1%})", f"{decided / pairs:.0%}",
                      f"{usual_held / pairs:.1%}", f"{usual_false / repeats:.1%}")  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
