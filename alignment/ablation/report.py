"""The report of a study: verdicts in the terminal; a page with curves, samples and commands;
figures and tables for a paper."""

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from rich.console import Console

from alignment.ablation import verdicts
from alignment.ablation.places import unseen_share
from alignment.ablation.statistics import Comparison, interquartile_mean
from alignment.ablation.study import Run, Study, shell_command
from alignment.ablation.verdicts import choices, decide, decide_factors, final_scores, half_width
from alignment.runs.run_folder import reproducibility
from alignment.runs.summary import first_change
from alignment.system.files import fill_template, read_jsonl, read_toml, write_atomically
from alignment.system.terminal import make_table, printable

SHOWN_PAIRS = 30  # in the Markdown summary and the figure; the page has all
WINNERS = 4  # differences that the headline names
HERE = Path(__file__).parent  # of the templates
PAGES = ("report.html", "report.md", "report.tex", "comparisons.csv", "arms.csv", "curves.csv")
INK = "#010101"  # of text and axes; the SVGs take the page's colour instead, light or dark


def report(study: Study, folder: Path, console: Console) -> None:
    """Print a table of verdicts for each varied argument of a full grid, else one of the pairs of
    arms; write the report."""

    def cells(c):
        return (
            f"{c.a} - {c.b}",
            f"{c.difference:+.3f}",
            f"{c.low:+.3f} .. {c.high:+.3f}",
            str(c.seeds),
            c.verdict,
        )

    compared, measured = verdicts.outcome(study)
    factors = {
        f"{compared}: {name}, averaged over all else": rows
        for name, rows in decide_factors(study).items()
    }
    if not factors and (pairs := decide(study)):
        factors = {compared: pairs}
    for title, comparisons in factors.items():
        rows = map(cells, _ranked(comparisons))
        console.print(
            make_table(title, ("", "difference", "95 % interval", "seeds", "verdict"), rows)
        )
    if note := caution(study, [c for rows in factors.values() for c in rows] or decide(study)):
        console.print(note, markup=False, soft_wrap=True)
    for warning in study.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if study.match != "steps":
        console.print(f"verdicts are on {measured}", soft_wrap=True)
    for name in study.missing:
        console.print(f"unfinished: {name}", style="red", markup=False)
    console.print(f"report: {write_report(study, folder)[0]}", markup=False, soft_wrap=True)


def write_report(study: Study, folder: Path) -> list[Path]:
    """Write report.html, one page without other files, and for a paper Markdown, LaTeX, CSV, SVG
    and PDF. Returns `PAGES`."""
    facts = contents(study)
    drawn = figures(
        study, [c for rows in facts["factors"].values() for c in rows] or facts["pairs"]
    )
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    facts |= {
        "figures": {
            title: _save(figure, folder / "figures", title) for title, figure in drawn.items()
        }
    }

    def p_value(p):
        return "< 0.0001" if p < 1e-4 else f"{p:.2g}"

    facts |= {
        "shown": SHOWN_PAIRS,
        "printable": printable,
        "file_name": _file_name,
        "p_value": p_value,
    }
    facts |= {"methods": " ".join(fill_template(HERE / "methods.txt.j2", **facts).split())}
    for page in PAGES:
        write_atomically(folder / page, fill_template(HERE / f"{page}.j2", **facts))
    return [folder / page for page in PAGES]


def contents(study: Study) -> dict[str, object]:
    """The values that the templates use. `run` is the only run of a study without a comparison,
    else None."""
    factors, pairs, arms = decide_factors(study), decide(study), arm_rows(study)
    any_run, varied = study.runs[0] if study.runs else None, choices(study.varied)
    question = (
        f"Does {' or '.join(varied)} make a difference to held-out accuracy?"
        if varied
        else "What did training change?"
    )
    run = any_run if len(arms) == len(study.runs) == 1 else None
    return {
        "study": study,
        "run": run,
        "question": question,
        "varied": varied or [],
        "compared": verdicts.outcome(study),
        "headline": headline(factors, pairs),
        "factors": factors,
        "caution": caution(study, [*pairs, *(c for rows in factors.values() for c in rows)]),
        "pairs": _ranked(pairs),
        "pairs_area": _ranked(decide(study, whole_curve=True)),
        "over_tasks": verdicts.over_tasks(study),
        "completions": (
            read_jsonl(run.path / "completions" / f"eval_{run.evals[-1]['step']:06d}.jsonl")
            if run
            else []
        ),
        "fewest": min((len(runs) for runs in study.arms.values() if runs), default=0),
        "arms": sorted(arms, key=lambda arm: -arm["mean"] if arm["seeds"] else math.inf),
        "commands": [(run.path.name, shell_command(run.command)) for run in study.runs],
        "reproducibility": sorted({reproducibility(run.path) for run in study.runs}),
        "questions": (
            len(set(verdicts.question_groups([any_run]) or any_run.scores.questions))
            if any_run
            else 0
        ),
    }


def arm_rows(study: Study) -> list[dict]:
    """For each arm: its seeds, accuracies, their means and margin, the parts of its gain, its
    arguments and a sample."""
    scores, end = final_scores(study), (study.match, verdicts.budget(study))
    accuracy = {arm: [float(s.mean()) for s in by_seed.values()] for arm, by_seed in scores.items()}
    return [
        {
            "name": arm,
            "seeds": sorted(runs),
            "settings": study.varied[arm],
            "sample": sample_of(runs),
            "accuracies": accuracy[arm],
            "margin": half_width(study, arm, scores[arm]),
            "mean": float(np.mean(accuracy[arm])) if runs else math.nan,
            "iqm": interquartile_mean(accuracy[arm]) if runs else math.nan,
            "split": (
                np.mean([verdicts.split_of_gain(run, *end) for run in runs.values()], axis=0)
                if runs
                else [math.nan] * 3
            ),
        }
        for arm, runs in study.arms.items()
    ]


def _ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return sorted(
        comparisons, key=lambda c: (c.kind == "undecided", -abs(c.difference) if c.seeds else 0)
    )


def headline(factors: Mapping[str, Sequence[Comparison]], pairs: Sequence[Comparison]) -> list[str]:
    """A line for each varied argument, or for the pairs of arms: the largest differences, and how
    many tie or are undecided."""
    lines = []
    for name, comparisons in (factors or {"the arms": pairs}).items():
        winners = [
            f"{c.verdict} ({abs(c.difference):.3f})"
            for c in _ranked(comparisons)
            if c.kind == "greater"
        ]
        shown = winners[:WINNERS] + (
            [f"{len(winners) - WINNERS} more differences"] if len(winners) > WINNERS else []
        )
        kinds = Counter(c.kind for c in comparisons)
        rest = [
            f"{kinds[kind]} of {len(comparisons)} pairs {kind}"
            for kind in ("tie", "undecided")
            if kinds[kind]
        ]
        lines.append(f"{name}: {'; '.join([*(shown or ['no difference shown']), *rest])}")
    return lines


def caution(study: Study, comparisons: Sequence[Comparison]) -> str:
    """What verdicts "in runs like these" leave open, by the fewest seeds of one; "" where every
    verdict is firm."""
    open_ones = [c for c in comparisons if c.kind != "undecided" and not c.firm]
    if not open_ones:
        return ""
    seeds = min(c.seeds for c in open_ones)
    share = unseen_share(
        seeds, study.alpha / max(1, sum(bool(runs) for runs in study.arms.values()))
    )
    shift = max(c.hidden for c in open_ones)
    size = f"up to {shift:.2g}" if math.isfinite(shift) else "any amount"
    return (
        f"in runs like these: {seeds} seeds cannot exclude that up to {share:.0%} of an arm's runs"
        f" end elsewhere (they learn or they do not), which could shift a difference by {size}; a"
        " verdict without these words allows for that"
    )


def sample_of(runs: Mapping[int, Run]) -> dict[str, str] | None:
    """A question of the first seed's evaluations with its first and last answer, preferably one
    whose reward changed."""
    if not runs:
        return None
    run = runs[min(runs)]
    old, new = first_change(run.path, run.evals)
    texts = {
        "question": new["question"],
        "truth": new["ground_truth"],
        "before": old["text"],
        "after": new["text"],
    }
    return {key: printable(text)[:600] for key, text in texts.items()}


ACCURACY = "avg_all_rewards"
FIGURES = read_toml(HERE / "report.toml", "report")


def figures(study: Study, comparisons: Sequence[Comparison]) -> dict[str, Figure]:
    """The figures by title."""
    plt.switch_backend("svg")
    plt.style.use(HERE / "report.mplstyle")
    compared, _ = verdicts.outcome(study)
    drawn = (
        {f"Differences of {compared}": _draw(_draw_differences, study, comparisons)}
        if comparisons
        else {}
    )
    for key, label in FIGURES["curves"].items():
        for cost in list(FIGURES["costs"])[: None if key == ACCURACY else 1]:
            if any(x for run in study.runs for x, _ in _points(run, key, cost).values()):
                drawn[f"{label[0].upper()}{label[1:]} by {cost}"] = _draw(
                    _draw_curves, study, key, cost
                )
    return drawn | (
        {f"{compared.capitalize()} by arm": _draw(_draw_final, study)} if comparisons else {}
    )


def _draw(draw: Callable, study: Study, *args) -> Figure:
    figure, axes = plt.subplots(layout="constrained")
    draw(axes, _styles(study), study, *args)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper")
    return figure


def _styles(study: Study) -> dict[str, dict]:
    """The line of each arm. Where two arguments vary, the colour says the value of the one, the
    dash that of the other."""
    names = sorted(
        choices(study.varied),
        key=lambda name: -len({str(values[name]) for values in study.varied.values()}),
    )
    keys = [
        [str(of_arm[name]) for name in names] if len(names) == 2 else (arm, "")
        for arm, of_arm in study.varied.items()
    ]
    colours, dashes = (list(dict.fromkeys(values)) for values in zip(*keys, strict=True))
    places = [(colours.index(a), dashes.index(b) % len(FIGURES["dashes"])) for a, b in keys]
    return {
        arm: {"color": f"C{i}", "linestyle": FIGURES["dashes"][j]}
        for arm, (i, j) in zip(study.varied, places, strict=True)
    }


def _file_name(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower())


def _save(figure: Figure, folder: Path, title: str) -> Markup:
    """Write the figure as SVG and PDF. Returns the SVG for the page."""
    svg, file = io.StringIO(), folder / _file_name(title)
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(f"{file}.pdf", metadata={"CreationDate": None})
    plt.close(figure)
    text = svg.getvalue().replace(INK, "currentColor")
    write_atomically(file.with_suffix(".svg"), text)
    return Markup(text[text.index("<svg") :])


def _draw_differences(axes, styles: dict, study: Study, comparisons: Sequence[Comparison]) -> None:
    """Draw each difference with its interval, and the margin of a tie as a band."""
    rows = list(enumerate(reversed(comparisons[:SHOWN_PAIRS])))
    axes.figure.set_figheight(1.2 + 0.25 * len(rows))
    axes.axvspan(
        -study.tie, study.tie, color="tab:gray", alpha=0.2, lw=0, label=f"tie: below {study.tie:g}"
    )
    axes.axvline(0, color="tab:gray", lw=0.8)
    for kind, colour in FIGURES["kinds"].items():
        if mine := [
            (c.difference, y, c.difference - c.low, c.high - c.difference)
            for y, c in rows
            if c.kind == kind
        ]:
            x, y, *reach = zip(*mine, strict=True)
            axes.errorbar(x, y, xerr=reach, fmt="o", color=colour, label=kind)
    axes.set_yticks(range(len(rows)), [f"{c.a} − {c.b}" for _, c in rows])
    label = f"difference of {verdicts.outcome(study)[0]}, with its 95 % interval"
    axes.set(xlabel=label, ylim=(-0.6, len(rows) - 0.4))


def _draw_curves(axes, styles: dict, study: Study, key: str, cost: str) -> None:
    """Draw a thin line for each seed, and each arm's mean over seeds, of accuracies with its 95 %
    interval, by cost."""
    for arm, runs in study.arms.items():
        curves = {seed: _points(run, key, cost) for seed, run in runs.items()}
        for curve in curves.values():
            axes.plot(*zip(*curve.values(), strict=True), **styles[arm], lw=0.5, alpha=0.5)
        if steps := sorted(set.intersection(*map(set, curves.values()))) if curves else []:
            x, y = np.mean([[curve[step] for step in steps] for curve in curves.values()], axis=0).T
            places = [
                {seed: run.scores.steps.index(step) for seed, run in runs.items()}
                for step in steps
                if key == ACCURACY
            ]
            scores = [
                {seed: runs[seed].scores.rewards_EQ[place] for seed, place in at.items()}
                for at in places
            ]
            margins = [half_width(study, arm, at) for at in scores] or None
            axes.errorbar(x, y, yerr=margins, **styles[arm], label=arm)
    axes.set(xlabel=cost, ylabel=FIGURES["curves"][key])
    axes.locator_params(axis="x", integer=True)


def _points(run: Run, key: str, cost: str) -> dict[int, tuple[float, float]]:
    """By step: what the run had cost, and the value of `key`, where there is one."""
    records = [r for r in (run.evals if key == ACCURACY else run.metrics) if r.get(key) is not None]
    return {
        r["step"]: (float(x), r[key])
        for r, x in zip(records, run.spent(FIGURES["costs"][cost], records), strict=True)
    }


def _draw_final(axes, styles: dict, study: Study) -> None:
    """Draw a point for each seed, and each arm's mean with its interval."""
    scores = {arm: by_seed for arm, by_seed in reversed(final_scores(study).items()) if by_seed}
    axes.figure.set_figheight(1.2 + 0.25 * len(scores))
    for y, (arm, by_seed) in enumerate(scores.items()):
        values, margin, colour = (
            [s.mean() for s in by_seed.values()],
            half_width(study, arm, by_seed),
            styles[arm]["color"],
        )
        axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.45)
        axes.errorbar(np.mean(values), y, xerr=margin, color=colour, marker="D")
    axes.set(
        xlabel="accuracy",
        yticks=range(len(scores)),
        yticklabels=list(scores),
        ylim=(-0.6, len(scores) - 0.4),
    )
