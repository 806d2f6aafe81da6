"""How often does `--match tokens` call arms different, or a tie, that are equal at every amount?

    uv run -m benchmarks.match_rates --tables 1000

By simulation: both arms follow one learning curve in tokens, of which arm "b" takes more a step, so
that its evaluations come at other amounts. Shares of simulated studies, for each curve and each
number of steps between evaluations. A verdict at equal tokens is false where it says that the arms
differ; with --gain, by which "b" is better at every amount, where it says so of "a".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from alignment.ablation.statistics import Comparison
from alignment.ablation.study import EvalScores, Run, Study
from alignment.ablation.verdicts import decide

STEPS = 80
QUESTIONS = 512
TOKENS = 100  # a step of arm "a"


# --- curves ---------------------------------------------------------------------------------------

Curve = Callable[[np.ndarray], np.ndarray]


def slow_concave(x: np.ndarray) -> np.ndarray:
    return 0.15 + 0.9 * (1 - np.exp(-x))


def concave(x: np.ndarray) -> np.ndarray:
    return 0.15 + 0.7 * (1 - np.exp(-2 * x))


def fast_concave(x: np.ndarray) -> np.ndarray:
    return 0.15 + 0.6 * (1 - np.exp(-4 * x))


def root(x: np.ndarray) -> np.ndarray:
    return 0.15 + 0.5 * np.sqrt(x / 1.6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.15 + 0.6 / (1 + np.exp(-8 * (x - 0.8)))


def convex_then_flat(x: np.ndarray) -> np.ndarray:
    return 0.15 + 0.5 * np.minimum(1.6, x) ** 2 / 2.56


def straight_then_flat(x: np.ndarray) -> np.ndarray:
    return 0.15 + 0.6 * np.minimum(1.2, x) / 1.2


CURVES: Mapping[str, Curve] = {
    "slow, concave": slow_concave,
    "concave": concave,
    "fast, concave": fast_concave,
    "root": root,
    "sigmoid": sigmoid,
    "convex, then flat": convex_then_flat,
    "straight, then flat": straight_then_flat,
}
"""Accuracy by tokens, in units of what arm "a" takes in all."""


@dataclass(frozen=True)
class MatchSetting:
    """Two arms on one curve."""

    curve: str
    """Of `CURVES`."""
    ratio: float
    """The tokens a step of arm "b" over those of "a"."""
    interval: int
    """Steps between evaluations."""
    seeds: int = 5
    gain: float = 0.0
    """What "b" is better by at every amount."""


def all_settings(gain: float) -> list[MatchSetting]:
    """Every curve, from few evaluations to many."""
    settings = []
    for curve in CURVES:
        for interval in (40, 20, 10, 5):
            settings.append(MatchSetting(curve, 1.5, interval, gain=gain))
    return settings


# --- simulation -----------------------------------------------------------------------------------


def make_run(
    rng: np.random.Generator,
    setting: MatchSetting,
    arm: str,
    seed: int,
    luck: float,
    easy_Q: np.ndarray,
) -> Run:
    """A run with evaluations of right and wrong answers along the curve, lifted by its `luck`;
    `easy_Q` says how much easier each question is than the others."""
    ratio = 1.0
    gain = 0.0
    if arm == "b":
        ratio = setting.ratio
        gain = setting.gain
    tokens_S = ratio * TOKENS * (1 + 0.03 * rng.normal(size=STEPS))
    metrics = []
    for step, taken in enumerate(tokens_S, start=1):
        metrics.append({"step": step, "tokens_sampled": taken})
    evaluated_steps = tuple(sorted({*range(0, STEPS + 1, setting.interval), STEPS}))
    run = Run(
        Path(f"{arm}{seed}"),
        {"seed": seed, "task": "", "group_size": 1},
        (),
        {},
        tuple(metrics),
        tuple({"step": step} for step in evaluated_steps),
        True,
        "",
    )
    amounts_E = run.amounts_until("tokens", run.evals) / (TOKENS * STEPS)
    level_E = CURVES[setting.curve](amounts_E) + luck + gain
    # questions differ less where nearly all are right, or wrong
    room_E = 2 * np.minimum(level_E, 1 - level_E)
    p_EQ = np.clip(level_E[:, None] + room_E[:, None] * easy_Q, 0, 1)
    answers_EQ = (rng.random(p_EQ.shape) < p_EQ).astype(float)
    names = tuple(map(str, range(len(easy_Q))))
    scores = EvalScores(evaluated_steps, names, answers_EQ, names)
    run.__dict__["scores"] = scores  # as if read from files
    return run


def compare_once(rng: np.random.Generator, setting: MatchSetting) -> Comparison:
    """The comparison of one simulated study of both arms at equal tokens."""
    easy_Q = rng.uniform(-0.25, 0.25, QUESTIONS)
    shared_luck_S = 0.01 * rng.normal(size=setting.seeds)
    arms: dict[str, dict[int, Run]] = {"a": {}, "b": {}}
    for arm, runs in arms.items():
        for seed in range(setting.seeds):
            luck = shared_luck_S[seed] + 0.01 * rng.normal()
            runs[seed] = make_run(rng, setting, arm, seed, luck, easy_Q)
    changes = {"a": {"arm": "a"}, "b": {"arm": "b"}}
    study = Study(arms, changes, (), 0.03, "", (), "", match="tokens")
    (comparison,) = decide(study)
    return comparison


def match_rates(setting: MatchSetting, tables: int, seed: int = 0) -> dict[str, float]:
    """How often "b" is called other than it is, better as it is, tied, and in need of
    evaluations."""
    rng = np.random.default_rng((seed, setting.interval))
    counts = dict.fromkeys(("false", "right", "tie", "evaluate more often"), 0)
    for _ in range(tables):
        comparison = compare_once(rng, setting)
        differs = comparison.kind == "greater"
        # a difference is that of "a" less "b"
        is_right = differs and setting.gain > 0 and comparison.difference < 0
        counts["right"] += is_right
        counts["false"] += differs and not is_right
        counts["tie"] += comparison.kind == "tie"
        counts["evaluate more often"] += "evaluate more often" in comparison.verdict
    return {name: float(count / tables) for name, count in counts.items()}


def main(tables: int = 1000, seed: int = 0, gain: float = 0.0) -> None:
    """Print the rates of all settings as Markdown.

    Args:
        tables: Simulated studies of each setting.
        seed: Of the simulation.
        gain: What arm "b" is better by at every amount.
    """
    columns = ("curve", "steps between evaluations", "false", "right", "tie", "evaluate more often")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for setting in all_settings(gain):
        rates = match_rates(setting, tables, seed)
        cells = [setting.curve, f"{setting.interval} of {STEPS}"]
        cells += [f"{100 * rate:.1f} %" for rate in rates.values()]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
