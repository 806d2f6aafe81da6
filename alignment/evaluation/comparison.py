"""Two evaluations of the same problems: the paired difference, and the problems won and lost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch
from rich.console import Console
from rich.text import Text

from alignment.core.records import Group
from alignment.system.files import write_atomically, write_jsonl
from alignment.system.terminal import make_table, printable

SHOWN = 200  # problems of each kind on the page


@dataclass(frozen=True)
class PairedDifference:
    """B - A, with its 95 % interval, and the problems on which the mean rewards differ, a row of comparison.jsonl each."""

    a: float
    b: float
    difference: float
    interval: tuple[float, float]
    won: tuple[dict, ...]
    lost: tuple[dict, ...]


def paired_difference(
    a: Sequence[Group], b: Sequence[Group], interval_a: tuple[float, float], interval_b: tuple[float, float]
) -> PairedDifference:
    """The difference of two sides' groups of the same problems in the same order, given the interval of each mean reward.

    The difference's interval is made of the two sides' own, allowing for the correlation r between problems' mean rewards
    (Newcombe 1998, Statistics in Medicine 17:2635, method 10): with d = b - a, and lower and upper bounds l and u,
    d - sqrt((b - l_b)^2 - 2 r (b - l_b)(u_a - a) + (u_a - a)^2), and likewise above. Unlike the normal interval it has a
    width where all answers of both sides score alike."""
    means_a, means_b = (torch.tensor([_mean(group) for group in groups], dtype=torch.float64) for groups in (a, b))
    mean_a, mean_b = means_a.mean().item(), means_b.mean().item()
    varies = means_a.std() > 0 and means_b.std() > 0
    r = torch.corrcoef(torch.stack([means_a, means_b]))[0, 1].item() if varies else 0.0
    difference = mean_b - mean_a

    low = difference - _reach(mean_b - interval_b[0], interval_a[1] - mean_a, r)
    high = difference + _reach(interval_b[1] - mean_b, mean_a - interval_a[0], r)
    outcomes = list(map(_outcome, a, b))
    won, lost = (tuple(o for o in outcomes if sign * (o["b"] - o["a"]) > 0) for sign in (1, -1))
    return PairedDifference(mean_a, mean_b, difference, (low, high), won, lost)


def _outcome(a: Group, b: Group) -> dict[str, str | float]:
    """One problem: the mean reward of each side, and both sides' first completions."""
    facts = {"problem": a.problem.id, "question": a.problem.question, "ground_truth": a.problem.ground_truth}
    return {**facts, "a": _mean(a), "b": _mean(b), "a_text": a.completions[0].text, "b_text": b.completions[0].text}


def _reach(one: float, other: float, r: float) -> float:
    return math.sqrt(max(0.0, one * one - 2 * r * one * other + other * other))


def write_comparison(comparison: PairedDifference, names: Sequence[str], folder: Path) -> Path:
    """Write comparison.jsonl, a line for each problem won or lost, and comparison.html, which is returned."""
    kinds = (("won", comparison.won), ("lost", comparison.lost))
    records = [{"outcome": kind, **outcome} for kind, outcomes in kinds for outcome in outcomes]
    write_jsonl(folder / "comparison.jsonl", records)
    source = Path(__file__).with_name("comparison.html.j2").read_text(encoding="utf-8")
    template = jinja2.Template(source, autoescape=True, undefined=jinja2.StrictUndefined)
    file = folder / "comparison.html"
    write_atomically(file, template.render(comparison=comparison, names=names, kinds=kinds, shown=SHOWN))
    return file


def print_comparison(comparison: PairedDifference, names: Sequence[str], console: Console) -> None:
    """Print the difference with its interval, and the first problem that was won and the first that was lost."""
    (low, high), won, lost = comparison.interval, comparison.won, comparison.lost
    difference = f"{names[1]} - {names[0]}: {comparison.difference:+.4f} (95 %: {low:+.4f} .. {high:+.4f})"
    console.print(f"{difference}; {len(won)} problems won, {len(lost)} lost", style="bold", markup=False)
    firsts = [(kind, outcome) for kind, side in (("won", won), ("lost", lost)) for outcome in side[:1]]
    rows = [(f"{kind}: {outcome['question']}", outcome["a_text"], outcome["b_text"]) for kind, outcome in firsts]
    table = make_table("", ("", *names), [[Text(printable(cell)) for cell in row] for row in rows])
    table.show_lines = True
    console.print(table)


def _mean(group: Group) -> float:
    return sum(score["reward"] for score in group.scores) / len(group.scores)
