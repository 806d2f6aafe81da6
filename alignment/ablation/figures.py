"""The figures of a report, as SVG."""

import io
from collections.abc import Callable

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib import pyplot as plt

from alignment.ablation.statistics import Scores
from alignment.ablation.study import Study
from alignment.ablation.verdicts import final_scores, half_widths

CURVES = {
    "response_length": "response tokens",
    "entropy": "entropy, nats a token",
    "clip_fraction": "share of clipped tokens",
    "grad_norm": "gradient norm",
}


def figures(study: Study) -> dict[str, Markup]:
    """The figures by title."""
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "alignment", "svg.fonttype": "none", "font.size": 9})
    drawn = {"Held-out accuracy over training": _svg(_draw_learning, study)}
    drawn["Final held-out accuracy"] = _svg(_draw_final, study)
    for key, label in CURVES.items():
        if any(key in record for run in study.runs for record in run.metrics):
            drawn[label[0].upper() + label[1:]] = _svg(_draw_metric, study, key, label)
    return drawn


def _svg(draw: Callable, study: Study, *args) -> Markup:
    figure, axes = plt.subplots(figsize=(9.5, 3.8), layout="constrained")
    turbo, most = colormaps["turbo"], max(1, len(study.arms) - 1)
    draw(axes, {arm: turbo(0.05 + 0.9 * i / most) for i, arm in enumerate(study.arms)}, study, *args)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(fontsize=8, loc="outside right upper", frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = text.getvalue()
    return Markup(svg[svg.index("<svg") :])


def _draw_learning(axes, colours: dict, study: Study) -> None:
    """Draw each arm's mean over seeds at each evaluation, with its 95 % interval."""
    for arm, runs in study.arms.items():
        at: dict[int, Scores] = {}  # by step: arms may be evaluated at different steps
        for run in runs.values():
            for step, scores in zip(run.scores.steps, run.scores.rewards_EQ, strict=True):
                at.setdefault(step, {})[run.seed] = scores
        if runs:
            steps = [step for step in sorted(at) if len(at[step]) == len(runs)]
            means = [np.mean([scores.mean() for scores in at[step].values()]) for step in steps]
            margins = [half_widths(study, {arm: at[step]})[arm] for step in steps]
            axes.errorbar(steps, means, yerr=margins, color=colours[arm], label=arm, capsize=2, lw=1.2)
    axes.set(xlabel="rollout step", ylabel="accuracy", ylim=(0, None))
    axes.grid(alpha=0.3)


def _draw_final(axes, colours: dict, study: Study) -> None:
    """Draw a point for each seed, and each arm's mean with its interval."""
    scores = final_scores(study)
    accuracy = {arm: [s.mean() for s in by_seed.values()] for arm, by_seed in scores.items() if by_seed}
    margins = half_widths(study, scores)
    for y, (arm, values) in enumerate(reversed(accuracy.items())):
        axes.plot(values, [y] * len(values), "o", color=colours[arm], alpha=0.45, ms=4)
        axes.errorbar(np.mean(values), y, xerr=margins[arm], color=colours[arm], marker="D", ms=5, capsize=3)
    axes.set_yticks(range(len(accuracy)), list(reversed(accuracy)))
    axes.set(xlabel="accuracy")
    axes.grid(axis="x", alpha=0.3)


def _draw_metric(axes, colours: dict, study: Study, key: str, label: str) -> None:
    for arm, runs in study.arms.items():
        curves = [{r["step"]: r[key] for r in run.metrics if r.get(key) is not None} for run in runs.values()]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if steps:
            axes.plot(steps, [np.mean([c[step] for c in curves]) for step in steps], color=colours[arm], label=arm, lw=1)
    axes.set(xlabel="rollout step", ylabel=label)
    axes.grid(alpha=0.3)
