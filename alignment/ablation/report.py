"""The report of a study: verdicts in the terminal, and as one page of verdicts, curves, samples and commands."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib import colormaps
from matplotlib import pyplot as plt
from rich.console import Console

from alignment.ablation import verdicts
from alignment.ablation.statistics import Comparison, Scores, interquartile_mean
from alignment.ablation.study import Run, Study, shell_command
from alignment.ablation.verdicts import choices, decide, decide_factors, final_scores, half_width
from alignment.runs.summary import first_change
from alignment.system.files import write_atomically
from alignment.system.terminal import make_table, printable

SHOWN_PAIRS = 15  # in the Markdown summary; the page has all
WINNERS = 4  # differences that the headline names


def report(study: Study, folder: Path, console: Console) -> None:
    """Print the verdicts as tables, one for each varied argument of a full grid, else one of the pairs of arms; and write the
    report to `folder`."""
    factors = {f"final accuracy: {name}, averaged over all else": rows for name, rows in decide_factors(study).items()}
    for title, comparisons in (factors or {"final accuracy": decide(study)}).items():
        rows = [
            (f"{c.a} - {c.b}", f"{c.difference:+.3f}", f"{c.low:+.3f} .. {c.high:+.3f}", str(c.seeds), c.verdict)
            for c in _ranked(comparisons)
        ]
        console.print(make_table(title, ("", "difference", "95 % interval", "seeds", "verdict"), rows))
    for name in study.missing:
        console.print(f"missing: {name}", style="red", markup=False)
    for file in write_report(study, folder):
        console.print(f"report: {file}", markup=False, soft_wrap=True)


def write_report(study: Study, folder: Path) -> tuple[Path, Path]:
    """Write report.html, one page without other files, and report.md. Returns both paths."""
    facts = {**contents(study), "figures": figures(study), "shown": SHOWN_PAIRS}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    html, markdown = folder / "report.html", folder / "report.md"
    for file in (html, markdown):
        options = {"autoescape": file == html, "trim_blocks": True, "lstrip_blocks": True}
        environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **options)
        environment.filters["p"] = lambda p: "< 0.0001" if p < 1e-4 else f"{p:.2g}"
        write_atomically(file, environment.get_template(f"{file.name}.j2").render(facts))
    return html, markdown


def contents(study: Study) -> dict[str, object]:
    """The values that the templates of both pages use."""
    factors, pairs, arms = decide_factors(study), decide(study), arm_rows(study)
    any_run, varied = study.runs[0] if study.runs else None, choices(study.varied)
    question = f"Does {' or '.join(varied)} make a difference to held-out accuracy?" if varied else "What did training change?"
    return {
        "question": question,
        "headline": headline(factors, pairs),
        "factors": factors,
        "pairs": _ranked(pairs),
        "pairs_area": _ranked(decide(study, verdicts.areas(study))),
        "over_tasks": verdicts.over_tasks(study),
        "arms": sorted(arms, key=lambda arm: -arm["mean"] if arm["seeds"] else math.inf),
        "study": study,
        "commands": [(run.path.name, shell_command(run.command)) for run in study.runs],
        "versions": any_run.versions if any_run else {},
        "states": sorted({run.versions.get("code", "unknown") for run in study.runs}),
        "questions": len(set(verdicts.question_groups([any_run]) or any_run.scores.questions)) if any_run else 0,
    }


def arm_rows(study: Study) -> list[dict]:
    """For each arm: its seeds, accuracies, their means and margin, the parts of its gain, its arguments and a sample."""
    scores = final_scores(study)
    accuracy = {arm: [float(s.mean()) for s in by_seed.values()] for arm, by_seed in scores.items()}
    return [
        {
            "name": arm,
            "seeds": sorted(runs),
            "accuracies": accuracy[arm],
            "mean": float(np.mean(accuracy[arm])) if runs else math.nan,
            "iqm": interquartile_mean(accuracy[arm]) if runs else math.nan,
            "margin": half_width(study, arm, scores[arm]),
            "split": np.mean([verdicts.split_of_gain(run) for run in runs.values()], axis=0) if runs else [math.nan] * 3,
            "settings": study.varied[arm],
            "sample": sample_of(runs),
        }
        for arm, runs in study.arms.items()
    ]


def _ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return sorted(comparisons, key=lambda c: (not c.decided, -abs(c.difference) if c.seeds else 0))


def headline(factors: Mapping[str, Sequence[Comparison]], pairs: Sequence[Comparison]) -> list[str]:
    """A line for each varied argument, or one for the pairs of arms: the largest differences, then the numbers of ties and of
    undecided pairs."""
    lines = []
    for name, comparisons in (factors or {"the arms": pairs}).items():
        decided = [c for c in _ranked(comparisons) if c.decided]
        winners = [f"{c.verdict} ({abs(c.difference):.3f})" for c in decided if c.kind == "greater"]
        ties, undecided = len(decided) - len(winners), len(comparisons) - len(decided)
        shown = winners[:WINNERS] + ([f"{len(winners) - WINNERS} more differences"] if len(winners) > WINNERS else [])
        counts = [(ties, "tie"), (undecided, "undecided")]
        rest = [f"{count} of {len(comparisons)} pairs {label}" for count, label in counts if count]
        lines.append(f"{name}: {'; '.join([*(shown or ['no difference shown']), *rest])}")
    return lines


def sample_of(runs: Mapping[int, Run]) -> dict[str, str] | None:
    """A question of the first seed's evaluations with its first and last answer, preferably one whose reward changed."""
    if not runs:
        return None
    run = runs[min(runs)]
    old, new = first_change(run.path, run.evals)
    texts = {"question": new["question"], "truth": new["ground_truth"], "before": old["text"], "after": new["text"]}
    return {key: printable(text)[:600] for key, text in texts.items()}


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
            margins = [half_width(study, arm, at[step]) for step in steps]
            axes.errorbar(steps, means, yerr=margins, color=colours[arm], label=arm, capsize=2, lw=1.2)
    axes.set(xlabel="rollout step", ylabel="accuracy", ylim=(0, None))
    axes.grid(alpha=0.3)


def _draw_final(axes, colours: dict, study: Study) -> None:
    """Draw a point for each seed, and each arm's mean with its interval."""
    scores = {arm: by_seed for arm, by_seed in reversed(final_scores(study).items()) if by_seed}
    for y, (arm, by_seed) in enumerate(scores.items()):
        values, margin = [s.mean() for s in by_seed.values()], half_width(study, arm, by_seed)
        axes.plot(values, [y] * len(values), "o", color=colours[arm], alpha=0.45, ms=4)
        axes.errorbar(np.mean(values), y, xerr=margin, color=colours[arm], marker="D", ms=5, capsize=3)
    axes.set_yticks(range(len(scores)), list(scores))
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
