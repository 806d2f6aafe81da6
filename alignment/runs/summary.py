"""What is printed and written at the end of a run: the first evaluation beside the last, the
learning curve, peaks of memory, seconds of each phase, summary.json and the model card."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from alignment.runs.held_out import evaluation_words, further_accuracies
from alignment.runs.run_folder import Record
from alignment.system.files import read_json, read_jsonl, write_json
from alignment.system.templates import fill_template
from alignment.system.terminal import make_table, printable


def write_summary(run: Path, sampling: str, console: Console, facts: Mapping[str, Any]) -> None:
    """Draw the learning curve, print the first evaluation beside the last, and write summary.json.

    `run` is the run's folder. `sampling` says in words how evaluations were sampled. `facts` go to
    summary.json as they are: "seconds_beside_steps" (of the run, for all but its steps),
    "reproducibility", and "peak_bytes" (device -> phase -> [measured, predicted])."""
    evals = read_jsonl(run / "evals.jsonl")
    metrics = read_jsonl(run / "metrics.jsonl")
    plot_learning_curve(run / "learning_curve.png", metrics, evals, run.name)
    print_before_and_after(run.name, sampling, metrics, evals, console)
    console.print(
        f"gains count from the accuracy before the first step, {accuracy_with_interval(evals[0])}"
    )
    print_audit(run, console)
    print_peaks(facts["peak_bytes"], console)
    print_seconds(metrics, console)
    print_first_change(run, evals, console)
    console.print(
        f"learning curve: {run / 'learning_curve.png'}\nmodel: {run / 'final'}", markup=False
    )
    warnings = Counter(itertools.chain.from_iterable(record["warnings"] for record in metrics))
    summary = {
        "before": evals[0],
        "after": evals[-1],
        "steps": len(metrics),
        "seconds": total(metrics, "seconds"),
        **facts,
        "warnings": warnings,  # Name of a warning -> number of steps that had it.
        "bad_updates": total(metrics, "bad_updates"),
        "grading_failed": total(metrics, "grading_failed"),
        "restarts": total(metrics, "restarts"),
    }
    # Last, because a run with a summary counts as finished.
    write_json(run / "summary.json", summary)


def total(records: Sequence[Record], key: str) -> Any:
    """The sum of one number of each record."""
    return sum(record[key] for record in records)


def print_before_and_after(
    name: str, sampling: str, metrics: Sequence[Record], evals: Sequence[Record], console: Console
) -> None:
    """Print a table of the first and the last evaluation of the run `name`, which were sampled as
    the words `sampling` say."""
    rows = [
        ("accuracy", accuracy_with_interval(evals[0]), accuracy_with_interval(evals[-1])),
        (
            "format rate",
            f"{evals[0]['avg_format_rewards']:.3f}",
            f"{evals[-1]['avg_format_rewards']:.3f}",
        ),
        (
            "mean length (tokens)",
            f"{evals[0]['response_length']:.1f}",
            f"{evals[-1]['response_length']:.1f}",
        ),
        ("finished (share)", f"{evals[0]['finished']:.3f}", f"{evals[-1]['finished']:.3f}"),
        ("seconds of RL", "", f"{total(metrics, 'seconds'):.0f}"),
    ]
    for label, key in further_accuracies(evals).items():
        rows.append((label, f"{evals[0][key]:.3f}", f"{evals[-1][key]:.3f}"))
    heading = f"{name}: {evals[-1]['problems']} held-out problems, {sampling}"
    columns = ("before", "after")
    console.print(make_table(heading, ("", *columns), rows, numbers=columns))


def print_audit(run: Path, console: Console) -> None:
    """Print what the run's base model does in its best format, where `evaluate --audit_base` has
    measured that on the same task."""
    arguments = read_json(run / "args.json")["args"]
    audit = best_audit(run.parent, arguments["model"], arguments["task"])
    if audit:
        console.print(audit, markup=False, soft_wrap=True)


def best_audit(output_dir: Path, model: str, task: str) -> str:
    """What a model does on a task in its best format, by the last audit of both under `output_dir`;
    "" where there is none."""
    for file in sorted(output_dir.glob("*/audit_base.json"), reverse=True):
        for row in read_json(file)["evaluations"]:
            if (row["model"], row["task"]) == (model, task):
                return (
                    f"{model}, before any training, in its best format of {file.parent.name}"
                    f" ({row['format']}): {accuracy_with_interval(row)}"
                )
    return ""


def accuracy_with_interval(evaluation: Record) -> str:
    """The accuracy and its confidence interval: "0.500 (0.400 .. 0.600)"."""
    low, high = evaluation["avg_all_rewards_ci"]
    return f"{evaluation['avg_all_rewards']:.3f} ({low:.3f} .. {high:.3f})"


def print_peaks(peak_bytes: Mapping[str, Mapping[str, Sequence]], console: Console) -> None:
    """Print the peak of memory, measured and predicted, of each device in each phase."""
    rows: list[tuple[str, ...]] = []
    for device, phases in peak_bytes.items():
        for phase, (measured, predicted) in phases.items():
            rows.append((device, phase, gigabytes(measured), gigabytes(predicted)))
    columns = ("measured", "predicted")
    headings = ("device", "phase", *columns)
    console.print(make_table("peak memory in GB", headings, rows, numbers=columns))


def gigabytes(size: float | None) -> str:
    """A number of bytes in GB; "" for None."""
    if size is None:
        return ""
    return f"{size / 1e9:.2f}"


def print_seconds(metrics: Sequence[Record], console: Console) -> None:
    """Print the share of each phase in the seconds of all steps, the largest first."""
    prefix = "seconds_"
    all_keys = set[str]().union(*metrics)
    seconds: dict[str, float] = {}
    for key in sorted(key for key in all_keys if key.startswith(prefix)):
        # A step that lacks the key had no such phase.
        seconds[key.removeprefix(prefix)] = sum(record.get(key, 0.0) for record in metrics)
    all_seconds = total(metrics, "seconds")
    # What no phase counts, such as logging.
    seconds["other"] = all_seconds - sum(seconds.values())
    phases = sorted(seconds, key=lambda phase: seconds[phase], reverse=True)
    shares = [f"{phase} {seconds[phase] / all_seconds:.1%}" for phase in phases]
    console.print(f"of these seconds: {', '.join(shares)}")


def print_first_change(run: Path, evals: Sequence[Record], console: Console) -> None:
    """Print the first problem whose reward changed between the first and the last evaluation of the
    run in the folder `run`, with both completions; where none did, that there is none."""
    before, after = first_change(run, evals)
    if before["score"]["reward"] == after["score"]["reward"]:
        console.print("no problem's outcome changed")
        return
    question = printable(before["question"])
    console.print(f"the first problem whose outcome changed: {question}", markup=False)
    # A prompt may begin the answer, as R1's does with "<think>"; that is not of the completion.
    for label, record in (("before", before), ("after", after)):
        text = printable(record["text"])
        console.print(f"  {label}: {text}", markup=False, highlight=False)


def write_card(folder: Path, run: Path, reproducibility: str) -> None:
    """Write README.md, the model card of the run in the folder `run`, to `folder`, which holds the
    run's final model. The licence is the one that the card of the base model names, if any."""
    record = read_json(run / "args.json")
    base_model = Path(record["args"]["model"])
    base_card = ""
    if (base_model / "README.md").is_file():
        base_card = (base_model / "README.md").read_text(errors="ignore")
    facts = {
        **record,
        "licence": re.findall(r"(?m)^license: *(\S+)$", base_card),
        "is_local": base_model.exists(),
        "run": run.name,
        "evals": read_jsonl(run / "evals.jsonl"),
        "metrics": read_jsonl(run / "metrics.jsonl"),
        "reproducibility": reproducibility,
        "evaluation_words": evaluation_words,
    }
    card = fill_template(Path(__file__).with_name("model_card.md.j2"), **facts)
    (folder / "README.md").write_text(card, encoding="utf-8")


def plot_learning_curve(
    path: Path, metrics: Sequence[Record], evals: Sequence[Record], title: str
) -> None:
    """Write a PNG of what changed over the steps: training rewards and each of their parts,
    held-out accuracy with its 95 % interval, and response length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6))
    # Margins that hold all labels: to compute them takes as long as to draw.
    margins = {"left": 0.12, "right": 0.98, "bottom": 0.09, "top": 0.94, "hspace": 0.06}
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1), gridspec_kw=margins)
    steps = [record["step"] for record in metrics]
    rewards = [record["reward"] for record in metrics]
    format_rewards = [record["format_reward"] for record in metrics]
    faint = {"alpha": 0.6}
    top.plot(steps, rewards, color="tab:gray", label="training reward", **faint)
    top.plot(steps, format_rewards, color="tab:orange", label="training format reward", **faint)
    parts = rewards_of_parts(metrics)
    for number, (name, values) in enumerate(parts.items()):
        color = f"C{(number + 2) % 10}"  # C0 and C1 are those of accuracy and format.
        top.plot(steps, values, color=color, linewidth=1, label=f"part {name}", **faint)
    accuracies = [evaluation["avg_all_rewards"] for evaluation in evals]
    intervals = [evaluation["avg_all_rewards_ci"] for evaluation in evals]
    below = [mean - low for mean, (low, _) in zip(accuracies, intervals, strict=True)]
    above = [high - mean for mean, (_, high) in zip(accuracies, intervals, strict=True)]
    top.errorbar(
        [evaluation["step"] for evaluation in evals],
        accuracies,
        yerr=[below, above],
        color="tab:blue",
        marker="o",
        capsize=3,
        label="held-out accuracy (95 %)",
    )
    baseline = f"baseline {accuracies[0]:.3f}, before the first step"
    top.axhline(accuracies[0], color="tab:blue", linestyle="--", label=baseline, **faint)
    for label, key in further_accuracies(evals).items():
        top.plot(
            [evaluation["step"] for evaluation in evals],
            [evaluation[key] for evaluation in evals],
            marker=".",
            linewidth=1,
            label=f"held out: {label}",
        )
    shown = [*rewards, *format_rewards, *itertools.chain.from_iterable(parts.values())]
    is_share = all(0 <= value <= 1 for value in shown if not math.isnan(value))
    if is_share:  # Else matplotlib chooses, so that signed and weighted rewards are seen whole.
        top.set_ylim(0, 1)
    top.set_title(title)
    top.legend(loc="best", fontsize="small")
    top.grid(alpha=0.3)
    lengths = [record["response_length"] for record in metrics]
    bottom.plot(steps, lengths, color="tab:green")
    bottom.set(xlabel="rollout step", ylabel="response tokens")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def rewards_of_parts(metrics: Sequence[Record]) -> dict[str, list[float]]:
    """The mean of each part of the reward in each step, by the part's name; NaN in a step to none
    of whose responses it applies."""
    names: dict[str, None] = {}
    for record in metrics:
        names |= dict.fromkeys(key for key in record if key.startswith("part_"))
    values = {}
    for name in names:
        values[name.removeprefix("part_")] = [record.get(name, math.nan) for record in metrics]
    return values


def first_change(run: Path, evals: Sequence[Record]) -> tuple[dict, dict]:
    """The completions, in the first and the last evaluation of the run in the folder `run`, of the
    first problem whose reward changed between them; of the first problem if none did."""
    first = read_completions(run, evals[0])
    last = read_completions(run, evals[-1])
    for before, after in zip(first, last, strict=True):
        if before["score"]["reward"] != after["score"]["reward"]:
            return before, after
    return first[0], last[0]


def read_completions(run: Path, evaluation: Record) -> list[dict]:
    """The completions of one evaluation of the run in the folder `run`."""
    return read_jsonl(run / "completions" / f"eval_{evaluation['step']:06d}.jsonl")
