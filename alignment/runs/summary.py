"""The end of a run: its before and after, where its time went, and summary.json."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from alignment.runs.learning_curve import plot_learning_curve
from alignment.system.files import read_jsonl, write_atomically
from alignment.system.terminal import printable


def write_summary(path: Path, title: str, console: Console) -> None:
    """Draw the learning curve, print the run's before and after, and write summary.json.

    `title` says how the evaluations were sampled.
    """
    evals, metrics = read_jsonl(path / "evals.jsonl"), read_jsonl(path / "metrics.jsonl")
    before, after = evals[0], evals[-1]
    plot_learning_curve(path / "learning_curve.png", metrics, evals, path.name)
    table = Table(title=f"{path.name}: {after['problems']} held-out problems, {title}")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("accuracy", *(_with_interval(e) for e in (before, after)))
    table.add_row("format rate", *(f"{e['avg_format_rewards']:.3f}" for e in (before, after)))
    table.add_row("mean length (tokens)", *(f"{e['response_length']:.1f}" for e in (before, after)))
    table.add_row("seconds of RL", "", f"{sum(m['seconds'] for m in metrics):.0f}")
    console.print(table)
    console.print(f"of these seconds: {', '.join(f'{name} {share:.1%}' for name, share in phase_shares(metrics))}")
    first, last = (read_jsonl(path / "completions" / f"eval_{e['step']:06d}.jsonl") for e in (before, after))
    pairs = list(zip(first, last, strict=True))
    changed = next((pair for pair in pairs if pair[0]["score"]["reward"] != pair[1]["score"]["reward"]), pairs[0])
    console.print(f"the first problem whose outcome changed: {printable(changed[0]['question'])}", markup=False)
    for label, record in zip(("before", "after"), changed, strict=True):
        console.print(f"  {label}: <think>{printable(record['text'])}", markup=False, highlight=False)
    console.print(f"learning curve: {path / 'learning_curve.png'}\nmodel: {path / 'final'}", markup=False)
    # Last, because a run with a summary counts as finished.
    summary = {
        "before": before,
        "after": after,
        "steps": len(metrics),
        "seconds": sum(m["seconds"] for m in metrics),
        "warnings": Counter(name for m in metrics for name in m["warnings"]),  # in how many steps each
        **{key: sum(m[key] for m in metrics) for key in ("bad_updates", "grading_failed", "restarts")},
    }
    write_atomically(path / "summary.json", json.dumps(summary, indent=2) + "\n")


def phase_shares(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Each phase's share of the steps' time, the largest first; what no phase claims is "other" (logging, books)."""
    total = sum(record["seconds"] for record in metrics)
    names = {key for record in metrics for key in record if key.startswith("seconds_")}
    spent = {name.removeprefix("seconds_"): sum(record.get(name, 0.0) for record in metrics) for name in names}
    spent["other"] = total - sum(spent.values())
    return sorted(((name, seconds / total) for name, seconds in spent.items()), key=lambda pair: -pair[1])


def _with_interval(record: dict) -> str:
    low, high = record["avg_all_rewards_ci"]
    return f"{record['avg_all_rewards']:.3f} ({low:.3f} .. {high:.3f})"
