"""One page that says what an ablation found: verdicts first, then the curves, samples and commands behind them.

uv run -m alignment.report --runs checkpoints/sweep_tiny_loss_type_group_size
"""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from scipy import stats

from alignment.ablation.statistics import ALPHA, Comparison, Contrast, Scores, area_under_curve, compare, interquartile_mean
from alignment.runs.run_records import Run, read_run
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl, write_atomically
from alignment.system.terminal import printable

UNTOLD = {"seed", "run_name", "output_dir", "resume"}  # arguments in which the runs of one arm differ
SHOWN_PAIRS = 15  # in the Markdown summary; the page has all
WINNERS = 4  # differences that the headline names
CURVES = {
    "response_length": "response tokens",
    "entropy": "entropy, nats a token",
    "clip_fraction": "share of clipped tokens",
    "grad_norm": "gradient norm",
}


@dataclass(frozen=True)
class Study:
    """Runs by arm and seed, and what was planned."""

    arms: Mapping[str, Mapping[int, Run]]
    varied: Mapping[str, Mapping[str, object]]
    """For each arm, the arguments in which arms differ."""
    missing: tuple[str, ...]
    tie: float
    hold: str
    warnings: tuple[str, ...]
    command: str
    alpha: float = ALPHA
    """Chance that any verdict of a table is false."""

    @property
    def runs(self) -> list[Run]:
        """All runs, arm by arm."""
        return [run for arm in self.arms.values() for run in arm.values()]


# --- reading ----------------------------------------------------------------------------------------------------


def read_study(folders: Sequence[Path], tie: float = 0.03) -> Study:
    """The finished runs of a sweep's folder, or of run folders grouped by their arguments. Raises `UserError` for others."""
    if len(folders) == 1 and (folders[0] / "sweep.json").exists():
        return _read_sweep(folders[0])
    runs = [read_run(folder) for folder in folders]
    names = {key for run in runs for key in run.args if key not in UNTOLD}
    differing = sorted(name for name in names if len({json.dumps(run.args.get(name)) for run in runs}) > 1)
    arms: dict[str, dict[int, Run]] = {}
    varied: dict[str, dict[str, object]] = {}
    for run in runs:
        values = {name: run.args.get(name) for name in differing}
        arm = ", ".join(f"{name} {value}" for name, value in values.items()) or "all runs"
        if run.seed in arms.setdefault(arm, {}):
            raise UserError(f"{run.path} and {arms[arm][run.seed].path} have the same arguments and seed")
        varied[arm] = values
        if run.finished:
            arms[arm][run.seed] = run
    missing = tuple(run.path.name for run in runs if not run.finished)
    return Study(arms, varied, missing, tie, "", (), "")


def _read_sweep(folder: Path) -> Study:
    facts = read_json(folder / "sweep.json")
    kinds = {"arms": dict, "seeds": list, "command": list, "warnings": list, "tie": float, "alpha": float, "hold": str}
    planned = facts.get("arms")
    whole = all(isinstance(facts.get(key), kind) for key, kind in kinds.items())
    if not (whole and planned and all(isinstance(arm, dict) for arm in planned.values())):
        raise UserError(f"{folder / 'sweep.json'} is damaged: it needs {', '.join(kinds)}")
    seeds, command = facts["seeds"], shell(["", *map(str, facts["command"])])
    tie, hold, warnings, alpha = facts["tie"], facts["hold"], tuple(map(str, facts["warnings"])), facts["alpha"]
    arms: dict[str, dict[int, Run]] = {arm: {} for arm in planned}
    expected = {(arm, seed) for arm in planned for seed in seeds if type(seed) is int}
    for place in sorted(folder.glob("*_seed*")):
        arm, _, seed = place.name.rpartition("_seed")
        if arm not in arms or not seed.isdigit():
            continue
        expected.add((arm, int(seed)))
        if (place / "args.json").exists() and (run := read_run(place)).finished:
            arms[arm][int(seed)] = run
    differing = [name for name in next(iter(planned.values())) if len({json.dumps(a.get(name)) for a in planned.values()}) > 1]
    varied = {arm: {name: args.get(name) for name in differing} for arm, args in planned.items()}
    missing = tuple(f"{arm}_seed{seed}" for arm, seed in sorted(expected) if seed not in arms[arm])
    return Study(arms, varied, missing, tie, hold, warnings, command, alpha)


# --- what it says -----------------------------------------------------------------------------------------------


def final_scores(study: Study) -> dict[str, Scores]:
    """Each arm's outcome: for each seed, every question's reward in the last evaluation."""
    return {arm: {seed: run.scores[2][-1] for seed, run in runs.items()} for arm, runs in study.arms.items()}


def areas(study: Study) -> dict[str, Scores]:
    """Each arm's area under the learning curve, for each seed and question."""
    return {
        arm: {seed: area_under_curve(run.scores[0], run.scores[2]) for seed, run in runs.items()}
        for arm, runs in study.arms.items()
    }


def decide(study: Study) -> list[Comparison]:
    """Every pair of arms of one task by final accuracy. Raises `UserError` where they did not answer the same questions."""
    return _decide(study, final_scores(study))


def _decide(study: Study, scores: Mapping[str, Scores]) -> list[Comparison]:
    found, tasks = [], {arm: str(study.varied[arm].get("task", "")) for arm in study.arms}
    for task in dict.fromkeys(tasks.values()):
        arms = {arm: runs for arm, runs in study.arms.items() if tasks[arm] == task}
        if len({run.scores[1] for runs in arms.values() for run in runs.values()}) > 1:
            raise UserError("the runs were evaluated on different questions, so they cannot be compared")
        found += compare({arm: scores[arm] for arm in arms}, study.tie, alpha=study.alpha / len(set(tasks.values())))
    return found


def over_tasks(study: Study) -> dict[str, float]:
    """Where the task varies: the interquartile mean over tasks and seeds of each arm's final accuracy, tasks aside."""
    pooled: dict[str, list[float]] = {}
    for arm, by_seed in final_scores(study).items():
        if "task" in study.varied[arm]:
            rest = ", ".join(_level(name, value) for name, value in study.varied[arm].items() if name != "task")
            pooled.setdefault(rest or "all arms", []).extend(float(scores.mean()) for scores in by_seed.values())
    return {arm: interquartile_mean(values) for arm, values in pooled.items() if values}


def decide_factors(study: Study) -> dict[str, list[Comparison]]:
    """For each argument that varies in a full grid, its values compared over all else: each is the mean of its arms."""
    scores, found = final_scores(study), {}
    arms = {arm: values for arm, values in study.varied.items() if not arm.startswith("control_")}
    names = choices(arms)
    levels = {name: list(dict.fromkeys(_level(name, values[name]) for values in arms.values())) for name in names}
    cells = {tuple(_level(name, values[name]) for name in names) for values in arms.values()}
    whole = len(cells) == len(arms) == math.prod(map(len, levels.values()))
    if len(names) < 2 or not whole or "task" in names or not all(scores[arm] for arm in arms):
        return {}  # no full grid, or arms of different tasks, which have no questions in common
    for name in names:
        of = {level: [arm for arm in arms if _level(name, arms[arm][name]) == level] for level in levels[name]}
        contrasts = [
            Contrast(a, b, {arm: 1 / len(of[a]) for arm in of[a]} | {arm: -1 / len(of[b]) for arm in of[b]})
            for a, b in combinations(levels[name], 2)
        ]
        found[name] = compare({arm: scores[arm] for arm in arms}, study.tie, contrasts, study.alpha)
    return found


def choices(varied: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The arguments that were chosen to vary: not the prompts of a step where they only follow from the group size."""
    names = [name for name in next(iter(varied.values()), {}) if len({json.dumps(v[name]) for v in varied.values()}) > 1]
    if {"group_size", "prompts_per_rollout"} <= set(names):
        prompts = {v["group_size"]: set() for v in varied.values()}
        for values in varied.values():
            prompts[values["group_size"]].add(values["prompts_per_rollout"])
        if all(len(found) == 1 for found in prompts.values()):
            names.remove("prompts_per_rollout")
    return names


def _level(name: str, value: object) -> str:
    return value if isinstance(value, str) else f"{name} {value}"


def split_of_gain(run: Run) -> tuple[float, float, float]:
    """(gain, format's part, answers' part) of the accuracy between the first and the last evaluation.

    Accuracy is format rate f times accuracy among the well-formed c; the change of f counts at the mean c, that of c at the
    mean f, so the two add up to the gain.
    """
    first, last = run.evals[0], run.evals[-1]
    f, a = zip(*((e["avg_format_rewards"], e["avg_all_rewards"]) for e in (first, last)), strict=True)
    c = [x / y if y else 0.0 for x, y in zip(a, f, strict=True)]
    by_format, by_answers = (f[1] - f[0]) * (c[0] + c[1]) / 2, (c[1] - c[0]) * (f[0] + f[1]) / 2
    return a[1] - a[0], by_format, by_answers


def half_widths(values_AS: Sequence[Sequence[float]]) -> list[float]:
    """Half the 95 % interval of each arm's mean over seeds, with the standard deviation that all arms share; 0 where no arm
    has two seeds."""
    several = [values for values in values_AS if len(values) > 1]
    if not several:
        return [0.0] * len(values_AS)
    dof = sum(len(values) - 1 for values in several)
    variance = sum(np.var(values, ddof=1) * (len(values) - 1) for values in several) / dof
    return [float(stats.t.isf(0.025, dof) * math.sqrt(variance / max(1, len(values)))) for values in values_AS]


# --- showing it -------------------------------------------------------------------------------------------------


def print_verdicts(study: Study, console: Console) -> None:
    """The verdicts as a table in the terminal: the choices over all else first, where there is a grid, else the pairs."""
    factors = {f"final accuracy: {name}, averaged over all else": found for name, found in decide_factors(study).items()}
    for title, comparisons in (factors or {"final accuracy": decide(study)}).items():
        table = Table(title=title)
        for heading in ("", "difference", "95 % interval", "seeds", "verdict"):
            table.add_column(heading, overflow="fold")
        for c in _ranked(comparisons):
            interval = f"{c.low:+.3f} .. {c.high:+.3f}"
            table.add_row(f"{c.a} - {c.b}", f"{c.difference:+.3f}", interval, str(c.seeds), c.verdict)
        console.print(table)
    for name in study.missing:
        console.print(f"missing: {name}", style="red", markup=False)


def write_report(study: Study, folder: Path) -> tuple[Path, Path]:
    """Write report.html, which needs nothing beside it, and report.md. Returns both."""
    facts = contents(study)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    html, markdown = folder / "report.html", folder / "report.md"
    for file, more in ((html, {"figures": figures(study)}), (markdown, {"shown": SHOWN_PAIRS})):
        options = {"autoescape": file == html, "trim_blocks": True, "lstrip_blocks": True}
        environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **options)
        environment.filters["p"] = p_text
        write_atomically(file, environment.get_template(f"{file.name}.j2").render(facts, **more))
    return html, markdown


def p_text(p: float) -> str:
    """A p value to two digits, as far as it matters."""
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def contents(study: Study) -> dict[str, object]:
    """What both forms of the report say."""
    factors, pairs = decide_factors(study), decide(study)
    scores = final_scores(study)
    accuracy = {arm: [float(s.mean()) for s in by_seed.values()] for arm, by_seed in scores.items()}
    margins = dict(zip(accuracy, half_widths(list(accuracy.values())), strict=True))
    arms = [
        {
            "name": arm,
            "seeds": sorted(runs),
            "accuracies": accuracy[arm],
            "mean": float(np.mean(accuracy[arm])) if runs else math.nan,
            "iqm": interquartile_mean(accuracy[arm]) if runs else math.nan,
            "margin": margins[arm],
            "split": np.mean([split_of_gain(run) for run in runs.values()], axis=0) if runs else [math.nan] * 3,
            "settings": study.varied[arm],
            "sample": sample_of(runs),
        }
        for arm, runs in study.arms.items()
    ]
    any_run = study.runs[0] if study.runs else None
    return {
        "question": question(study),
        "headline": headline(factors, pairs),
        "factors": factors,
        "pairs": _ranked(pairs),
        "pairs_area": _ranked(_decide(study, areas(study))),
        "over_tasks": over_tasks(study),
        "arms": sorted(arms, key=lambda arm: -arm["mean"] if arm["seeds"] else math.inf),
        "grid": grid_of(study, {arm["name"]: arm["mean"] for arm in arms}),
        "study": study,
        "commands": [(run.path.name, shell(run.command)) for run in study.runs],
        "versions": any_run.versions if any_run else {},
        "states": sorted({run.versions.get("code", "unknown") for run in study.runs}),
        "questions": len(any_run.scores[1]) if any_run else 0,
    }


def _ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return sorted(comparisons, key=lambda c: (not c.decided, -abs(c.difference) if c.seeds else 0))


def question(study: Study) -> str:
    """`Which loss_type and group_size make the difference?`"""
    names = choices(study.varied)
    return f"Does {' or '.join(names)} make a difference to held-out accuracy?" if names else "What did training change?"


def headline(factors: Mapping[str, Sequence[Comparison]], pairs: Sequence[Comparison]) -> list[str]:
    """The decided comparisons in a sentence each, or that there are none."""
    said = []
    for name, found in (factors or {"the arms": pairs}).items():
        decided = [c for c in _ranked(found) if c.decided]
        winners = [f"{c.verdict} ({abs(c.difference):.3f})" for c in decided if c.kind == "greater"]
        ties, undecided = len(decided) - len(winners), len(found) - len(decided)
        shown = winners[:WINNERS] + ([f"{len(winners) - WINNERS} more differences"] if len(winners) > WINNERS else [])
        rest = [f"{count} of {len(found)} pairs {what}" for count, what in ((ties, "tie"), (undecided, "undecided")) if count]
        said.append(f"{name}: {'; '.join([*(shown or ['no difference shown']), *rest])}")
    return said


def grid_of(study: Study, means: Mapping[str, float]) -> dict[str, object] | None:
    """Final accuracy by loss and group size, where both vary."""
    if not all({"loss_type", "group_size"} <= set(values) for values in study.varied.values()):
        return None
    cells: dict[tuple, list[float]] = {}
    for arm, values in study.varied.items():
        if not arm.startswith("control_"):
            cells.setdefault((values["loss_type"], values["group_size"]), []).append(means[arm])
    losses, sizes = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    return {"losses": losses, "sizes": sizes, "cells": {key: float(np.mean(value)) for key, value in cells.items()}}


def sample_of(runs: Mapping[int, Run]) -> dict[str, str] | None:
    """One question of the first seed's last evaluation, with the answers before and after training."""
    if not runs:
        return None
    run = runs[min(runs)]
    before, after = (_completions(run, record["step"]) for record in (run.evals[0], run.evals[-1]))
    changed = [b for b in before if b in after and before[b]["score"]["reward"] != after[b]["score"]["reward"]]
    chosen = (changed or list(after))[0]
    texts = {"question": after[chosen]["question"], "truth": after[chosen]["ground_truth"]}
    texts |= {"before": before.get(chosen, after[chosen])["text"], "after": after[chosen]["text"]}
    return {key: printable(text)[:600] for key, text in texts.items()}


def _completions(run: Run, step: int) -> dict[str, dict]:
    return {record["problem"]: record for record in read_jsonl(run.path / "completions" / f"eval_{step:06d}.jsonl")}


def shell(command: Sequence[str]) -> str:
    """A recorded command as one would type it."""
    words = [word for word in command if word != "--resume"]  # without what a second attempt added
    if len(words) > 1 and words[1].endswith(".py"):
        words = ["uv", "run", "-m", f"alignment.{Path(words[1]).stem}", *words[2:]]
    return shlex.join(words)


# --- figures ----------------------------------------------------------------------------------------------------


def figures(study: Study) -> dict[str, Markup]:
    """The pictures as SVG, by title."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "alignment", "svg.fonttype": "none", "font.size": 9})
    drawn = {"Held-out accuracy over training": _svg(_draw_learning, study)}
    drawn["Final held-out accuracy"] = _svg(_draw_final, study)
    for key, label in CURVES.items():
        if any(key in record for run in study.runs for record in run.metrics):
            drawn[label[0].upper() + label[1:]] = _svg(_draw_metric, study, key, label)
    return drawn


def _svg(draw, *args) -> Markup:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9.5, 3.8), layout="constrained")
    draw(axes, *args)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(fontsize=8, loc="outside right upper", frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = text.getvalue()
    return Markup(svg[svg.index("<svg") :])


def _colours(study: Study) -> dict[str, object]:
    from matplotlib import colormaps

    names = list(study.arms)
    return {name: colormaps["turbo"](0.05 + 0.9 * i / max(1, len(names) - 1)) for i, name in enumerate(names)}


def _draw_learning(axes, study: Study) -> None:
    """Means over seeds with 95 % intervals whose standard deviation all arms share, at each evaluation."""
    colours = _colours(study)
    at: dict[int, dict[str, list[float]]] = {}  # accuracies by step and arm: arms may be evaluated at different steps
    for arm, runs in study.arms.items():
        for run in runs.values():
            for step, scores in zip(run.scores[0], run.scores[2], strict=True):
                at.setdefault(step, {}).setdefault(arm, []).append(scores.mean())
    for arm, runs in study.arms.items():
        if not runs:
            continue
        steps = [step for step in sorted(at) if len(at[step].get(arm, ())) == len(runs)]
        means = [np.mean(at[step][arm]) for step in steps]
        margins = [dict(zip(at[step], half_widths(list(at[step].values())), strict=True))[arm] for step in steps]
        axes.errorbar(steps, means, yerr=margins, color=colours[arm], label=arm, capsize=2, lw=1.2)
    axes.set(xlabel="rollout step", ylabel="accuracy", ylim=(0, None))
    axes.grid(alpha=0.3)


def _draw_final(axes, study: Study) -> None:
    """A point for each seed, the mean and its interval for each arm."""
    scores, colours = final_scores(study), _colours(study)
    accuracy = {arm: [s.mean() for s in by_seed.values()] for arm, by_seed in scores.items() if by_seed}
    margins = dict(zip(accuracy, half_widths(list(accuracy.values())), strict=True))
    for y, (arm, values) in enumerate(reversed(accuracy.items())):
        axes.plot(values, [y] * len(values), "o", color=colours[arm], alpha=0.45, ms=4)
        axes.errorbar(np.mean(values), y, xerr=margins[arm], color=colours[arm], marker="D", ms=5, capsize=3)
    axes.set_yticks(range(len(accuracy)), list(reversed(accuracy)))
    axes.set(xlabel="accuracy")
    axes.grid(axis="x", alpha=0.3)


def _draw_metric(axes, study: Study, key: str, label: str) -> None:
    """Means over seeds at each step."""
    colours = _colours(study)
    for arm, runs in study.arms.items():
        curves = [{r["step"]: r[key] for r in run.metrics if r.get(key) is not None} for run in runs.values()]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if steps:
            axes.plot(steps, [np.mean([c[step] for c in curves]) for step in steps], color=colours[arm], label=arm, lw=1)
    axes.set(xlabel="rollout step", ylabel=label)
    axes.grid(alpha=0.3)
