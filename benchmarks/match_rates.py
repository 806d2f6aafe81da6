"""How often `--match` calls two arms different, or a tie, that are equal at every amount, by
simulation.

uv run -m benchmarks.match_rates --tables 1000

Both arms follow one learning curve in tokens, of which arm "b" takes more a step, so that its
evaluations come at other amounts. A verdict at equal tokens is false where it says that they
differ."""

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

CURVES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "slow, concave": lambda x: 0.15 + 0.9 * (1 - np.exp(-x)),
    "concave": lambda x: 0.15 + 0.7 * (1 - np.exp(-2 * x)),
    "fast, concave": lambda x: 0.15 + 0.6 * (1 - np.exp(-4 * x)),
    "root": lambda x: 0.15 + 0.5 * np.sqrt(x / 1.6),
    "sigmoid": lambda x: 0.15 + 0.6 / (1 + np.exp(-8 * (x - 0.8))),
    "convex, then flat": lambda x: 0.15 + 0.5 * np.minimum(1.6, x) ** 2 / 2.56,
    "straight, then flat": lambda x: 0.15 + 0.6 * np.minimum(1.2, x) / 1.2,
}
"""Accuracy by tokens, in units of what arm "a" takes in all."""


@dataclass(frozen=True)
class MatchSetting:
    """A curve's name, the tokens a step of arm "b" over those of "a", steps between evaluations,
    seeds, and what "b" is better by."""

    curve: str
    ratio: float
    interval: int
    seeds: int = 5
    gain: float = 0.0


def settings() -> list[MatchSetting]:
    return [MatchSetting(curve, 1.5, interval) for curve in CURVES for interval in (40, 20, 10, 5)]


def make_run(
    rng: np.random.Generator,
    setting: MatchSetting,
    arm: str,
    seed: int,
    luck: float,
    easy_Q: np.ndarray,
) -> Run:
    """A run with evaluations of right and wrong answers along the curve, lifted by its `luck`."""
    ratio = setting.ratio if arm == "b" else 1.0
    tokens = ratio * TOKENS * (1 + 0.03 * rng.normal(size=STEPS))
    metrics = tuple(
        {"step": step, "tokens_sampled": taken} for step, taken in enumerate(tokens, start=1)
    )
    steps = tuple(sorted({*range(0, STEPS + 1, setting.interval), STEPS}))
    args = {"seed": seed, "task": "", "group_size": 1}
    run = Run(
        Path(f"{arm}{seed}"),
        args,
        (),
        {},
        metrics,
        tuple({"step": step} for step in steps),
        True,
        "",
    )
    amounts_E = run.amounts_until("tokens", run.evals) / (TOKENS * STEPS)
    level_E = CURVES[setting.curve](amounts_E) + luck + (setting.gain if arm == "b" else 0.0)
    room_E = 2 * np.minimum(level_E, 1 - level_E)
    p_EQ = np.clip(level_E[:, None] + room_E[:, None] * easy_Q, 0, 1)
    answers_EQ = (rng.random(p_EQ.shape) < p_EQ).astype(float)
    names = tuple(map(str, range(len(easy_Q))))
    run.__dict__["scores"] = EvalScores(steps, names, answers_EQ, names)  # as if read from files
    return run


def compare_once(rng: np.random.Generator, setting: MatchSetting) -> Comparison:
    """The comparison of one simulated study of both arms at equal tokens."""
    easy_Q = rng.uniform(-0.25, 0.25, QUESTIONS)
    shared_S = 0.01 * rng.normal(size=setting.seeds)
    arms = {
        arm: {
            seed: make_run(rng, setting, arm, seed, shared_S[seed] + 0.01 * rng.normal(), easy_Q)
            for seed in range(setting.seeds)
        }
        for arm in "ab"
    }
    study = Study(
        arms, {"a": {"arm": "a"}, "b": {"arm": "b"}}, (), 0.03, "", (), "", match="tokens"
    )
    (comparison,) = decide(study)
    return comparison


def match_rates(setting: MatchSetting, tables: int, seed: int = 0) -> dict[str, float]:
    """How often "b" is called other than it is, better as it is, tied, and in need of
    evaluations."""
    rng = np.random.default_rng((seed, setting.interval))
    found = [compare_once(rng, setting) for _ in range(tables)]
    right = [c.kind == "greater" and setting.gain > 0 and c.difference < 0 for c in found]
    return {
        "false": float(
            np.mean(
                [
                    c.kind == "greater" and not is_right
                    for c, is_right in zip(found, right, strict=True)
                ]
            )
        ),
        "right": float(np.mean(right)),
        "tie": float(np.mean([c.kind == "tie" for c in found])),
        "evaluate more often": float(np.mean(["evaluate more often" in c.verdict for c in found])),
    }


def main(tables: int = 1000, seed: int = 0, gain: float = 0.0) -> None:
    """Print the rates of all settings as Markdown."""
    columns = ("curve", "steps between evaluations", "false", "right", "tie", "evaluate more often")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for setting in settings():
        setting = MatchSetting(setting.curve, setting.ratio, setting.interval, setting.seeds, gain)
        cells = [f"{100 * rate:.1f} %" for rate in match_rates(setting, tables, seed).values()]
        print(
            f"| {setting.curve} | {setting.interval} of {STEPS} | {' | '.join(cells)} |", flush=True
        )


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
