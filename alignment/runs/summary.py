"""The end of a run: its before and after, its learning curve, where its time went, and
summary.json."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from alignment.runs.run_folder import Record
from alignment.system.files import fill_template, read_json, read_jsonl, write_json
from alignment.system.terminal import make_table, printable


def write_summary(path: Path, title: str, console: Console, facts: Mapping[str, Any]) -> None:
    """Draw the learning curve, print the run's before and after, and write summary.json. `title`
    says how evaluations were sampled; `facts` are "seconds_beside_steps", "reproducibility",
    "peak_bytes" (place -> phase -> measured, predicted)."""
    evals, metrics = read_jsonl(path / "evals.jsonl"), read_jsonl(path / "metrics.jsonl")
    before, after, total = evals[0], evals[-1], sum(m["seconds"] for m in metrics)
    plot_learning_curve(path / "learning_curve.png", metrics, evals, path.name)
    spans = "{:.3f} ({:.3f} .. {:.3f})"
    rows = [
        (
            "accuracy",
            *(
                spans.format(e["avg_all_rewards"], *e["avg_all_rewards_ci"])
                for e in (before, after)
            ),
        ),
        ("format rate", *(f"{e['avg_format_rewards']:.3f}" for e in (before, after))),
        ("mean length (tokens)", *(f"{e['response_length']:.1f}" for e in (before, after))),
        ("seconds of RL", "", f"{total:.0f}"),
    ]
    heading, sides = (
        f"{path.name}: {after['problems']} held-out problems, {title}",
        ("before", "after"),
    )
    console.print(make_table(heading, ("", *sides), rows, numbers=sides))

    def gigabytes(size):
        return "" if size is None else f"{size / 1e9:.2f}"

    memory = [
        (place, phase, *map(gigabytes, both))
        for place, of in facts["peak_bytes"].items()
        for phase, both in of.items()
    ]
    columns = ("measured", "predicted")
    console.print(
        make_table("peak memory in GB", ("device", "phase", *columns), memory, numbers=columns)
    )
    phases = sorted({key for m in metrics for key in m if key.startswith("seconds_")})
    spent = {
        phase.removeprefix("seconds_"): sum(m.get(phase, 0.0) for m in metrics) for phase in phases
    }
    spent["other"] = total - sum(spent.values())  # logging, books
    shares = [
        f"{phase} {spent[phase] / total:.1%}"
        for phase in sorted(spent, key=spent.get, reverse=True)
    ]
    console.print(f"of these seconds: {', '.join(shares)}")
    changed = first_change(path, evals)
    console.print(
        f"the first problem whose outcome changed: {printable(changed[0]['question'])}",
        markup=False,
    )
    for label, record in zip(("before", "after"), changed, strict=True):
        console.print(
            f"  {label}: <think>{printable(record['text'])}", markup=False, highlight=False
        )
    console.print(
        f"learning curve: {path / 'learning_curve.png'}\nmodel: {path / 'final'}", markup=False
    )
    summary = {"before": before, "after": after, "steps": len(metrics), "seconds": total, **facts}
    # in how many steps each
    summary["warnings"] = Counter(name for m in metrics for name in m["warnings"])
    summary |= {
        key: sum(m[key] for m in metrics) for key in ("bad_updates", "grading_failed", "restarts")
    }
    # last, because a run with a summary counts as finished
    write_json(path / "summary.json", summary)


def write_card(folder: Path, run: Path, reproducibility: str) -> None:
    """Write README.md, the model card of a run, to the folder of its final model."""
    record, evals, metrics = (
        read_json(run / "args.json"),
        *(read_jsonl(run / f"{log}.jsonl") for log in ("evals", "metrics")),
    )
    model = Path(record["args"]["model"])
    stated = (
        (model / "README.md").read_text(errors="ignore") if (model / "README.md").is_file() else ""
    )
    record |= {
        "licence": re.findall(r"(?m)^license: *(\S+)$", stated),
        "is_local": model.exists(),
        "run": run.name,
    }
    record |= {"evals": evals, "metrics": metrics, "reproducibility": reproducibility}
    template = Path(__file__).with_name("model_card.md.j2")
    (folder / "README.md").write_text(fill_template(template, **record), encoding="utf-8")


def plot_learning_curve(
    path: Path, metrics: Sequence[Record], evals: Sequence[Record], title: str
) -> None:
    """Write a PNG of training reward, held-out accuracy with its 95 % interval, and response length
    over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = [m["step"] for m in metrics]
    top.plot(
        steps, [m["reward"] for m in metrics], color="tab:gray", alpha=0.6, label="training reward"
    )
    top.plot(
        steps,
        [m["format_reward"] for m in metrics],
        color="tab:orange",
        alpha=0.6,
        label="training format reward",
    )
    eval_steps, accuracy = [e["step"] for e in evals], [e["avg_all_rewards"] for e in evals]
    spread = [
        [a - e["avg_all_rewards_ci"][0], e["avg_all_rewards_ci"][1] - a]
        for a, e in zip(accuracy, evals, strict=True)
    ]
    look = {"color": "tab:blue", "marker": "o", "capsize": 3, "label": "held-out accuracy (95 %)"}
    top.errorbar(eval_steps, accuracy, yerr=list(zip(*spread, strict=True)), **look)
    top.set(ylim=(0, 1), title=title)
    top.legend(loc="best")
    top.grid(alpha=0.3)
    bottom.plot(steps, [m["response_length"] for m in metrics], color="tab:green")
    bottom.set(xlabel="rollout step", ylabel="response tokens")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def first_change(path: Path, evals: Sequence[Record]) -> tuple[dict, dict]:
    """The first and the last evaluation's completion of the first problem whose outcome changed,
    else of the first problem."""
    first, last = (
        read_jsonl(path / "completions" / f"eval_{e['step']:06d}.jsonl")
        for e in (evals[0], evals[-1])
    )
    pairs = list(zip(first, last, strict=True))
    return next(
        (pair for pair in pairs if pair[0]["score"]["reward"] != pair[1]["score"]["reward"]),
        pairs[0],
    )
