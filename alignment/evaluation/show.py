"""Evaluations and comparisons as tables in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alignment.evaluation.accuracy import CATEGORIES, Evaluation
from alignment.evaluation.comparison import PairedDifference
from alignment.system.terminal import make_table, printable


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Print the averages with their intervals, the categories, and pass@k and maj@k where samples allow."""
    rows = [
        (name, f"{value:.4f}", "{:.4f} .. {:.4f}".format(*evaluation.intervals[name]))
        for name, value in evaluation.averages.items()
    ]
    samples = len(evaluation.groups[0].completions)
    if samples > 1:
        rows += [(f"pass@{k}", f"{value:.4f}") for k, value in evaluation.pass_at_k.items()]
        rows += [(f"maj@{samples}", f"{evaluation.maj_at_k:.4f}")]
    rows += [(name, str(evaluation.categories.get(name, 0))) for name in CATEGORIES]
    rows += [("mean response tokens", f"{evaluation.response_length:.1f}")]
    title, numbers = f"{len(evaluation.groups)} problems in {evaluation.seconds:.1f} s", ("value", "95 % interval")
    console.print(make_table(title, ("", *numbers), rows, numbers))


def print_comparison(comparison: PairedDifference, names: Sequence[str], console: Console) -> None:
    """Print the difference with its interval, and the first problem that was won and the first that was lost."""
    low, high = comparison.interval
    console.print(
        f"{names[1]} - {names[0]}: {comparison.difference:+.4f} (95 %: {low:+.4f} .. {high:+.4f}); {len(comparison.won)}"
        f" problems won, {len(comparison.lost)} lost",
        style="bold",
        markup=False,
    )
    table = Table(show_lines=True)
    for heading in ("", *names):
        table.add_column(heading, overflow="fold")
    for kind, outcomes in (("won", comparison.won), ("lost", comparison.lost)):
        for outcome in outcomes[:1]:
            cells = (f"{kind}: {outcome.question}", outcome.a_text, outcome.b_text)
            table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
