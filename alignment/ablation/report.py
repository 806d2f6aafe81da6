"""The report of a study: verdicts in the terminal; a page with curves, samples and commands;
figures and tables for a paper."""

import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from alignment.ablation import verdicts
from alignment.ablation.measures import selection_bias
from alignment.ablation.referee import referee_answers
from alignment.ablation.statistics import Comparison, interquartile_mean
from alignment.ablation.study import MEASURE_KINDS, Run, Study, read_measure, shell_command
from alignment.ablation.summary import (
    IF_NOISE,
    caution,
    choice_caution,
    detectable_words,
    interval_words,
    print_verdicts,
    ranked,
    verdicts_of,
)
from alignment.ablation.tuning import Tuning
from alignment.ablation.verdicts import choices, decide, decide_factors, final_scores, half_width
from alignment.args import REPRODUCIBILITY_SETTING
from alignment.runs.held_out import evaluation_words, further_accuracies
from alignment.runs.run_folder import reproducibility
from alignment.runs.summary import first_change
from alignment.system.files import read_jsonl, write_atomically
from alignment.system.templates import fill_template
from alignment.system.terminal import counted, printable

SHOWN_PAIRS = 30  # in the Markdown summary and the figure; the page has all
WINNERS = 4  # differences that the headline names
TIE_ASSUMPTION = f" ({IF_NOISE})"  # that the exact test of seeds' signs cannot support
HERE = Path(__file__).parent  # of the templates
PAGES = ("report.html", "report.md", "report.tex", "comparisons.csv", "arms.csv", "curves.csv")
INK = "#010101"  # of text and axes; the SVGs take the page's colour instead, light or dark


def report(study: Study, folder: Path, console: Console) -> None:
    """Print a table of verdicts for each varied argument of a full grid, else one of the pairs of
    arms; write the report."""
    print_verdicts(verdicts_of(study), console)
    console.print(f"report: {write_report(study, folder)[0]}", markup=False, soft_wrap=True)


def _flatten(tables: Mapping[str, Sequence[Comparison]]) -> list[Comparison]:
    """The comparisons of all tables."""
    comparisons: list[Comparison] = []
    for table in tables.values():
        comparisons += table
    return comparisons


def write_report(study: Study, folder: Path) -> list[Path]:
    """Write report.html, one page without other files, and for a paper Markdown, LaTeX, CSV, SVG
    and PDF. Returns `PAGES`."""
    values = contents(study)
    drawn = figures(study, _flatten(values["factors"]) or values["pairs"])
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {}
    for title, figure in drawn.items():
        files[title] = _save(figure, folder / "figures", title)
    values["figures"] = files
    values |= {
        "shown": SHOWN_PAIRS,
        "printable": printable,
        "counted": counted,
        "file_name": _file_name,
        "p_value": _format_p_value,
        "interval": interval_words,
        "detectable": detectable_words,
    }
    values["methods"] = " ".join(fill_template(HERE / "methods.txt.j2", **values).split())
    for page in PAGES:
        write_atomically(folder / page, fill_template(HERE / f"{page}.j2", **values))
    return [folder / page for page in PAGES]


def _format_p_value(p: float) -> str:
    if math.isnan(p):
        return "none"
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def contents(study: Study) -> dict[str, Any]:
    """The values that the templates use. `run` is the only run of a study without a comparison,
    else None."""
    factors = decide_factors(study)
    pairs = decide(study)
    every_comparison = [*_flatten(factors), *pairs]
    arms = arm_rows(study)
    varied = choices(study.varied)
    run = None
    completions = []
    if len(arms) == len(study.runs) == 1:
        [run] = study.runs
        last_step = run.evals[-1]["step"]
        completions = read_jsonl(run.path / "completions" / f"eval_{last_step:06d}.jsonl")
    decided_tables = _flatten(factors) or pairs
    kind, _ = read_measure(study.measure)
    has_area = MEASURE_KINDS[kind].has_curve and kind != "area"
    area_pairs = decide(study, whole_curve=True) if has_area else []
    bias = None
    if kind == "best":
        bias = float(np.mean([selection_bias(of_study) for of_study in study.runs]))
    referee = [] if run or not study.runs else referee_answers(study, decided_tables)
    words = {reproducibility(of_study.path, REPRODUCIBILITY_SETTING) for of_study in study.runs}
    answers = dict.fromkeys(evaluation_words(of_study.args) for of_study in study.runs)
    return {
        "study": study,
        "run": run,
        "answers": " or ".join(answers),
        "question": _question(study),
        "varied": varied,
        "levels": {name: _levels(study, name) for name in varied},
        "compared": verdicts.outcome(study),
        "threshold": 100 * verdicts.alpha_of_table(study),
        "number_of_tasks": len(verdicts.arms_of_tasks(study.varied)),
        "family": verdicts.largest_family(study),
        "headline": headline(factors, pairs),
        "factors": factors,
        "caution": caution(every_comparison),
        "censored": verdicts.censored_words(study),
        "choice_caution": choice_caution(study, every_comparison, area_pairs),
        "pairs": ranked(pairs),
        "pair_tables": verdicts.named_tables(ranked(pairs)),
        "referee": referee,
        "area_tables": verdicts.named_tables(ranked(area_pairs)),
        "measured": measured(study),
        "selection_bias": bias,
        "chosen_by": study.tuning.measure if study.tuning is not None else "",
        "over_tasks": verdicts.over_tasks(study),
        "completions": completions,
        "further": further_accuracies(run.evals) if run else {},
        "evaluation_words": evaluation_words,
        "fewest": min((len(runs) for runs in study.arms.values() if runs), default=0),
        "arms": sorted(arms, key=_rank_of_arm),
        "commands": [(run.path.name, shell_command(run.command)) for run in study.runs],
        "reproducibility": sorted(words),
        "questions": _count_questions(study),
    }


def _question(study: Study) -> str:
    """What the study asks, as its page's title."""
    varied = choices(study.varied)
    if not varied:
        return "What did training change?"
    subject = "held-out accuracy" if study.measure == "accuracy" else f"the {measured(study)}"
    return f"Does {' or '.join(varied)} make a difference to {subject}?"


def _rank_of_arm(row: Mapping[str, Any]) -> float:
    """The best arm first, and those without a run last."""
    return -row["mean"] if row["seeds"] else math.inf


def _count_questions(study: Study) -> int:
    """How many different questions a run was evaluated on."""
    if not study.runs:
        return 0
    run = study.runs[0]
    return len(set(verdicts.question_groups([run]) or run.scores.questions))


def arm_rows(study: Study) -> list[dict[str, Any]]:
    """For each arm: its seeds, accuracies, their means and margin, the parts of its gain, its
    arguments and a sample."""
    scores = final_scores(study)
    together = verdicts.arms_together(study)
    rows = []
    for arm, runs in study.arms.items():
        accuracies = [float(scores_Q.mean()) for scores_Q in scores[arm].values()]
        row = {
            "name": arm,
            "seeds": list(runs),
            "settings": study.varied[arm],
            "sample": sample_of(runs),
            "accuracies": accuracies,
            "margin": half_width(study, arm, scores[arm]),
            "mean": math.nan,
            "iqm": math.nan,
            "split": [math.nan] * 3,
        }
        if runs:
            budget = verdicts.budget(study, together[arm])
            gains = [verdicts.split_of_gain(run, study.match, budget) for run in runs.values()]
            row["mean"] = float(np.mean(accuracies))
            row["iqm"] = interquartile_mean(accuracies)
            row["split"] = np.mean(gains, axis=0)
        rows.append(row)
    return rows


def headline(factors: Mapping[str, Sequence[Comparison]], pairs: Sequence[Comparison]) -> list[str]:
    """A line for each varied argument, or for the pairs of arms, those with controls apart: the
    largest differences, and how many tie or are undecided."""
    tables = factors or verdicts.named_tables(pairs) or {verdicts.OF_QUESTION: pairs}
    lines = []
    for name, comparisons in tables.items():
        subject = "the arms" if name == verdicts.OF_QUESTION else name
        lines.append(f"{subject}: {_summarise(comparisons)}")
    return lines


def _summarise(comparisons: Sequence[Comparison]) -> str:
    """The headline of some comparisons."""
    decided = [comparison for comparison in ranked(comparisons) if comparison.kind == "greater"]
    parts = [f"{c.verdict} ({abs(c.difference):.3f}{_noise_words(c)})" for c in decided[:WINNERS]]
    if not decided:
        parts.append("no difference shown")
    if len(decided) > WINNERS:
        parts.append(f"{len(decided) - WINNERS} more differences")
    numbers = Counter(comparison.kind for comparison in comparisons)
    for kind in ("tie", "undecided"):
        if numbers[kind]:
            words = f"{numbers[kind]} of {len(comparisons)} pairs {kind}"
            parts.append(words + TIE_ASSUMPTION * (kind == "tie"))
    return "; ".join(parts)


def measured(study: Study) -> str:
    """What arms are measured by, as the head of a column."""
    return "accuracy" if study.measure == "accuracy" else verdicts.outcome(study).title


def _noise_words(comparison: Comparison) -> str:
    """What a winner assumes where the exact test does not support it, and about how many seeds
    would do without; "" where it does support all that the winner says."""
    if comparison.exact:
        return f"; {IF_NOISE}" if comparison.is_small else ""
    return f"; {IF_NOISE}, without that about {comparison.exact_seeds} seeds"


def sample_of(runs: Mapping[int, Run]) -> dict[str, str] | None:
    """A question of the first seed's evaluations with its first and last answer, preferably one
    whose reward changed."""
    if not runs:
        return None
    first_seed = min(runs)
    run = runs[first_seed]
    old, new = first_change(run.path, run.evals)
    texts = {
        "question": new["question"],
        "truth": new["ground_truth"],
        "before": old["text"],
        "after": new["text"],
    }
    return {key: printable(text)[:600] for key, text in texts.items()}


ACCURACY = "avg_all_rewards"
CURVES = {
    ACCURACY: "held-out accuracy",
    "reward": "training reward",
    "response_length": "response tokens",
    "entropy": "entropy, nats a token",
    "clip_fraction": "share of clipped tokens",
    "grad_norm": "gradient norm",
}
"""The quantities with a curve, by their names in the records of a run -> the axis's label."""
COSTS = {
    "rollout steps": "steps",
    "sampled tokens": "tokens",
    "seconds of training": "seconds",
}
"""What a curve is drawn over -> what --match calls it. The first is that of every curve, the others
are of accuracy's."""
COLOURS = {"greater": "tab:green", "tie": "tab:blue", "undecided": "tab:orange"}
DASHES = ("-", "--", ":", "-.")  # of lines, where two arguments vary


def figures(study: Study, comparisons: Sequence[Comparison]) -> dict[str, Figure]:
    """The figures by title."""
    plt.switch_backend("svg")
    plt.style.use(HERE / "report.mplstyle")
    compared = verdicts.outcome(study).title
    drawn: dict[str, Figure] = {}
    if comparisons:
        drawn[f"Differences of {compared}"] = _draw(_draw_differences, study, comparisons)
    first_cost = next(iter(COSTS))
    all_evals = list(itertools.chain.from_iterable(run.evals for run in study.runs))
    for label, key in further_accuracies(all_evals).items():
        if _has_curve(study, key, first_cost):
            title = f"Held-out accuracy, {label}, by {first_cost}"
            drawn[title] = _draw(_draw_curves, study, key, first_cost)
    for key, label in CURVES.items():
        costs = COSTS if key == ACCURACY else (first_cost,)
        for cost in costs:
            if _has_curve(study, key, cost):
                title = f"{label[0].upper()}{label[1:]} by {cost}"
                drawn[title] = _draw(_draw_curves, study, key, cost)
    if comparisons:
        drawn[f"{compared.capitalize()} by arm"] = _draw(_draw_final, study)
    tuning = study.tuning
    if tuning is not None and len(tuning.names) == 1 and not tuning.are_words:
        title = f"Validation {tuning.measure} by {tuning.names[0]}"
        drawn[title] = _draw(_draw_tuning, study, tuning)
    return drawn


def _has_curve(study: Study, key: str, cost: str) -> bool:
    """Whether a run has a point beside its beginning."""

    def has_later_point(run: Run) -> bool:
        return any(spent for spent, _ in _points(run, key, cost).values())

    return any(has_later_point(run) for run in study.runs)


Styles = Mapping[str, dict[str, Any]]
"""By arm, the arguments of matplotlib that make its line."""


def _draw(draw: Callable[..., None], study: Study, *args: object) -> Figure:
    figure, axes = plt.subplots(layout="constrained")
    draw(axes, _styles(study), study, *args)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper")
    return figure


def _levels(study: Study, name: str) -> list[object]:
    """The values of an argument, each once; None for arms that have no such setting."""
    levels: list[object] = []
    for values in study.varied.values():
        if values.get(name) not in levels:
            levels.append(values.get(name))
    return levels


def _styles(study: Study) -> Styles:
    """The line of each arm. Where two arguments vary, the colour says the value of the one, the
    dash that of the other."""

    def count_values(name: str) -> int:
        return len(_levels(study, name))

    # there are more colours than dashes
    names = sorted(choices(study.varied), key=count_values, reverse=True)
    colours: dict[str, int] = {}
    dashes: dict[str, int] = {}
    styles = {}
    for arm, values in study.varied.items():
        coloured = arm
        dashed = ""
        if len(names) == 2:
            coloured, dashed = (str(values.get(name)) for name in names)
        colour = colours.setdefault(coloured, len(colours))
        dash = dashes.setdefault(dashed, len(dashes))
        styles[arm] = {"color": f"C{colour}", "linestyle": DASHES[dash % len(DASHES)]}
    return styles


def _file_name(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower())


def _save(figure: Figure, folder: Path, title: str) -> Markup:
    """Write the figure as SVG and PDF. Returns the SVG for the page."""
    svg = io.StringIO()
    file = folder / _file_name(title)
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(f"{file}.pdf", metadata={"CreationDate": None})
    plt.close(figure)
    text = svg.getvalue().replace(INK, "currentColor")
    write_atomically(file.with_suffix(".svg"), text)
    return Markup(text[text.index("<svg") :])


def _draw_differences(
    axes: Axes, styles: Styles, study: Study, comparisons: Sequence[Comparison]
) -> None:
    """Draw each difference with its interval, the first at the top, and the margin of a tie as a
    band."""
    shown = comparisons[:SHOWN_PAIRS][::-1]
    _set_rows(axes, len(shown))
    axes.axvspan(
        -study.tie, study.tie, color="tab:gray", alpha=0.2, lw=0, label=f"tie: below {study.tie:g}"
    )
    axes.axvline(0, color="tab:gray", lw=0.8)
    for kind, colour in COLOURS.items():
        rows = [row for row, comparison in enumerate(shown) if comparison.kind == kind]
        if not rows:
            continue
        differences = [shown[row].difference for row in rows]
        below = [shown[row].difference - shown[row].low for row in rows]
        above = [shown[row].high - shown[row].difference for row in rows]
        axes.errorbar(differences, rows, xerr=(below, above), fmt="o", color=colour, label=kind)
    axes.set_yticks(range(len(shown)), [f"{c.a} − {c.b}" for c in shown])
    axes.set_xlabel(f"difference of {verdicts.outcome(study).title}, with its 95 % interval")
    axes.set_ylim(-0.6, len(shown) - 0.4)


def _set_rows(axes: Axes, rows: int) -> None:
    """Make the figure as high as so many rows need."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(1.2 + 0.25 * rows)


def _draw_curves(axes: Axes, styles: Styles, study: Study, key: str, cost: str) -> None:
    """Draw a thin line for each seed, and each arm's mean over seeds, of accuracies with its 95 %
    interval, by cost."""
    for arm, runs in study.arms.items():
        curves = [_points(run, key, cost) for run in runs.values()]
        for curve in curves:
            axes.plot(*zip(*curve.values(), strict=True), **styles[arm], lw=0.5, alpha=0.5)
        steps = _shared_steps(curves)
        if not steps:
            continue
        means = []
        for step in steps:
            points = [curve[step] for curve in curves]
            means.append(np.mean(points, axis=0))
        margins = None
        if key == ACCURACY:
            margins = [half_width(study, arm, _scores_at(runs, step)) for step in steps]
        x, y = np.array(means).T
        axes.errorbar(x, y, yerr=margins, **styles[arm], label=arm)
    axes.set(xlabel=cost, ylabel=CURVES.get(key, f"held-out accuracy: {key}"))
    if key not in CURVES or key == ACCURACY:
        axes.set_ylim(_within_accuracies(axes.get_ylim()))
    axes.locator_params(axis="x", integer=True)


def _within_accuracies(limits: tuple[float, float]) -> tuple[float, float]:
    """An axis's limits without what no accuracy can be, to which a wide interval may reach."""
    low, high = limits
    return max(low, -0.02), min(high, 1.02)


Curve = Mapping[int, tuple[float, float]]
"""By step: what a run had cost, and a quantity's value."""


def _shared_steps(curves: Sequence[Curve]) -> list[int]:
    """The steps at which all curves have a point, in order."""
    if not curves:
        return []
    steps_of_curves = [set(curve) for curve in curves]
    return sorted(set.intersection(*steps_of_curves))


def _scores_at(runs: Mapping[int, Run], step: int) -> dict[int, np.ndarray]:
    """By seed, the score [Q] of every question in the evaluation at a step."""
    scores = {}
    for seed, run in runs.items():
        evaluation = run.scores.steps.index(step)
        scores[seed] = run.scores.rewards_EQ[evaluation]
    return scores


def _points(run: Run, key: str, cost: str) -> Curve:
    """The run's curve of `key` over a cost, where it has values."""
    is_of_training = key in CURVES and key != ACCURACY
    records = run.metrics if is_of_training else run.evals
    known = [record for record in records if record.get(key) is not None]
    costs = run.amounts_until(COSTS[cost], known)
    points = {}
    for record, cost_of_record in zip(known, costs, strict=True):
        points[record["step"]] = (float(cost_of_record), record[key])
    return points


def _draw_tuning(axes: Axes, styles: Styles, study: Study, tuning: Tuning) -> None:
    """Draw what each arm chose by on the validation questions over the values of the tuned
    argument: a point for each seed, a line for the mean, and a larger point for the value that the
    arm took."""
    [name] = tuning.names
    smallest = math.inf
    for arm, choice in tuning.choices.items():
        tried = sorted(choice.candidates, key=lambda candidate: candidate.values[name])
        values = [candidate.values[name] for candidate in tried]
        smallest = min(smallest, *values)
        for candidate in tried:
            seeds = list(candidate.accuracies.values())
            style = styles[arm]
            axes.plot([candidate.values[name]] * len(seeds), seeds, ".", color=style["color"])
        axes.plot(values, [candidate.mean for candidate in tried], **styles[arm], label=arm)
        taken = choice.candidate
        axes.plot(taken.values[name], taken.mean, "D", color=styles[arm]["color"])
    if smallest > 0:
        axes.set_xscale("log")
    first = next(iter(tuning.choices.values()))
    tried_values = [candidate.values[name] for candidate in first.candidates]
    axes.set_xticks(tried_values, [f"{value:g}" for value in tried_values])
    axes.set_xticks([], minor=True)
    axes.set(xlabel=name, ylabel=f"validation {tuning.measure}")


def _draw_final(axes: Axes, styles: Styles, study: Study) -> None:
    """Draw a point for each seed, and each arm's mean with its interval, the first at the top."""
    from_last_arm = reversed(final_scores(study).items())
    scores = {arm: by_seed for arm, by_seed in from_last_arm if by_seed}
    _set_rows(axes, len(scores))
    for row, (arm, by_seed) in enumerate(scores.items()):
        accuracies = [scores_Q.mean() for scores_Q in by_seed.values()]
        margin = half_width(study, arm, by_seed)
        colour = styles[arm]["color"]
        axes.plot(accuracies, [row] * len(accuracies), "o", color=colour, alpha=0.45)
        axes.errorbar(np.mean(accuracies), row, xerr=margin, color=colour, marker="D")
    if study.measure == "accuracy":
        axes.set_xlim(_within_accuracies(axes.get_xlim()))
    axes.set(
        xlabel=measured(study),
        yticks=range(len(scores)),
        yticklabels=list(scores),
        ylim=(-0.6, len(scores) - 0.4),
    )
