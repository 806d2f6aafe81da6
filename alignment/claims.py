"""Published claims about RL fine-tuning, tried on tasks that a laptop trains: which hold here,
fail, tie or stay undecided.

uv run -m alignment.claims --run clip_higher --report checkpoints/claims_page

A claim's trial on a preset compares the arm expected above with every other one, or all pairs where
none is. Its comparisons share a chance of 5 % of any false verdict (`compare`). Trials stand by
themselves; a second verdict shares it (Bonferroni)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console

from alignment.ablation import schedule, study
from alignment.ablation.design import ALPHA, Design, grid, lint, name_of, named_arms
from alignment.args import (
    CLAIMS,
    ClaimsArgs,
    ClaimsOptions,
    RLArgs,
    flags_of,
    from_preset,
    parse,
    refuse_missing_warm_start,
    swept_values,
)
from alignment.system.errors import UserError, run_command
from alignment.system.files import read_jsonl, read_toml, write_atomically
from alignment.system.templates import fill_template
from alignment.system.terminal import make_console, make_table

if TYPE_CHECKING:
    from alignment.ablation.statistics import Comparison


class Trial(NamedTuple):
    """A claim on a preset: the content of its file, the design with arms by `name_of`, and the
    finished runs by arm and seed."""

    name: str
    file: dict[str, Any]
    preset: str
    design: Design
    runs: dict[str, dict[int, study.Run]]


class Decision(NamedTuple):
    """A trial with its verdict, the comparisons behind it, the verdict that shares the chance of a
    false one with all trials, and the hours of its runs."""

    trial: Trial
    verdict: str
    comparisons: list[Comparison]
    with_all: str
    hours: float


Value = np.ndarray | float
"""A run's measure: for each question [Q], or of the whole run."""


def _final_accuracy(run: study.Run) -> Value:
    return run.scores.rewards_EQ[-1]


def _mean_accuracy(run: study.Run) -> Value:
    return run.scores.rewards_EQ.mean(axis=0)


def _pass_at(run: study.Run, samples: int) -> Value:
    from alignment.ablation.measures import evaluation_values  # loads scipy

    return evaluation_values(run, f"pass@{samples}")[-1]


def _last_mean(run: study.Run, key: str) -> Value:
    from alignment.ablation.measures import last_mean  # loads scipy

    return last_mean(run, key)


def _wrong_length(run: study.Run) -> Value:
    last_step = run.evals[-1]["step"]
    answers = read_jsonl(run.path / "completions" / f"eval_{last_step:06d}.jsonl")
    wrong = [answer for answer in answers if not answer["score"]["reward"]]
    lengths = [len(answer["token_ids"]) for answer in wrong]
    return float(np.mean(lengths))


# What a claim's [about] has where its file does not say otherwise.
USUAL = {
    "equal": "warm start, prompts, samples, updates",
    "measure": "final accuracy",
    "tie": 0.03,
    "seeds": [0, 1, 2, 3, 4],
}
MEASURES: dict[str, Callable[[study.Run], Value]] = {
    "final accuracy": _final_accuracy,
    "mean accuracy of all evaluations": _mean_accuracy,
    "pass@8": partial(_pass_at, samples=8),
    "pass@32": partial(_pass_at, samples=32),
    "entropy of the last 10 steps": partial(_last_mean, key="entropy"),
    "divergence in the last 10 steps": partial(_last_mean, key="kl"),
    "length of wrong answers": _wrong_length,
}
"""A claim's measure -> its value for each question [Q], or the run's own, in nats a token and
tokens; NaN where it has none."""


def main() -> None:
    args = parse(ClaimsArgs)
    console = make_console(args.quiet)
    failed = []
    trials = read_trials(args)
    refuse_lost_verdicts(trials, args)
    for trial in trials:
        if {trial.name, "all"} & set(args.run) and trial.runs:
            failed += train(trial.design, args, console)
    decisions = decide_all(read_trials(args))
    rows = []
    for name, of_claim in decisions.items():
        claim = of_claim[0].trial.file["about"]["claim"]
        rows.append((name, claim, *(decision.verdict for decision in of_claim)))
    console.print(make_table("published claims", ("claim", "what it says", *args.preset), rows))
    if args.report:
        write_page(decisions, args)
    if failed:
        raise UserError(
            f"{len(failed)} runs failed and are missing from the verdicts: {', '.join(failed)}"
        )


def train(design: Design, args: ClaimsOptions, console: Console) -> list[str]:
    """Train the runs of a design; returns the names of those that failed."""
    for arm in design.arms.values():
        refuse_missing_warm_start(arm)
    states: list[schedule.State] = []
    for seed in design.seeds:
        states += [schedule.State(arm, seed) for arm in design.arms]
    with schedule.open_executor(design.folder, args.resources, console) as executor:
        schedule.warm_up(design, executor, args.output_dir, console)
        schedule.run_all(design, executor, states, console)
    return [state.name for state in states if state.status == "failed"]


def read_trials(args: ClaimsOptions) -> list[Trial]:
    """The trials of all claims on the presets."""
    trials = []
    for name in CLAIMS:
        trials += [read_trial(name, preset, args) for preset in args.preset]
    return trials


def read_trial(name: str, preset: str, args: ClaimsOptions) -> Trial:
    """A claim's trial on a preset, with the runs that there are. Raises `UserError` where an arm
    cannot work."""
    file = read_toml(CLAIMS[name], "--run")
    given = swept_values(args)
    arms: dict[str, RLArgs] = {}
    about = file["about"]
    if "arms" in file:
        arms = named_arms(str(CLAIMS[name]), preset, given)
        about = USUAL | about
    file["about"] = about
    base, *_ = grid(preset, given, hold="").values()
    changes = name_of(base, from_preset(RLArgs, preset))
    folder = Path(args.output_dir) / "claims" / f"{preset}_{changes}".strip("_")
    seeds = tuple(dict.fromkeys(args.seed or about.get("seeds", ())))
    placed: dict[str, RLArgs] = {}
    runs: dict[str, dict[int, study.Run]] = {}
    for arm, own in arms.items():
        # claims share the runs of equal arms, so a run is called by its arguments
        run_name = name_of(own, base) or "baseline"
        placed[run_name] = replace(own, output_dir=str(folder), trackers=args.trackers)
        runs[arm] = read_finished(folder, run_name, seeds)
    tie = about.get("tie", 0.0)
    warnings = tuple(lint(arms, seeds))
    design = Design(folder, placed, seeds, "", tie, ALPHA, warnings)
    return Trial(name, file, preset, design, runs)


def read_finished(folder: Path, name: str, seeds: Sequence[int]) -> dict[int, study.Run]:
    """By seed, the finished runs of a name."""
    runs = {}
    for seed in seeds:
        path = folder / f"{name}_seed{seed}"
        if (path / "summary.json").exists():
            runs[seed] = study.read_run(path)
    return runs


def measure(trial: Trial, runs: Mapping[int, study.Run]) -> dict[int, np.ndarray]:
    """By seed, the trial's measure of the runs that have it, as scores of questions [Q]."""
    scores = {}
    for seed, run in runs.items():
        value = MEASURES[trial.file["about"]["measure"]](run)
        if not np.isnan(value).any():
            # a run's own, as of many questions: `compare` takes it for no rounded share
            scores[seed] = np.broadcast_to(value, np.shape(value) or 10_000)
    return scores


def decide(trial: Trial, alpha: float = ALPHA) -> tuple[str, list[Comparison]]:
    """The trial's verdict, the first of "fails", "undecided", "tie", "holds" that a comparison
    gives; and the comparisons."""
    from alignment.ablation.statistics import compare, pairs  # loads scipy

    about = trial.file["about"]
    above = about.get("above")
    scores = {arm: measure(trial, runs) for arm, runs in trial.runs.items()}
    comparisons: list[Comparison] = []
    if scores and all(scores.values()):
        above_first = sorted(scores, key=lambda arm: arm != above)
        contrasts = [c for c in pairs(above_first) if above in (c.a, None)]
        comparisons = compare(scores, trial.design.tie, contrasts, alpha)
    verdicts = {verdict_of(comparison, above) for comparison in comparisons}
    for verdict in ("fails", "undecided", "tie", "holds"):
        if verdict in verdicts:
            return verdict, comparisons
    return about.get("cannot", "not run"), comparisons


def verdict_of(comparison: Comparison, above: str | None) -> str:
    """What a comparison says of a claim that the arm `above` is better, or without one, that arms
    tie. A difference that is shown, and shown to be below the margin, is a tie."""
    if comparison.kind == "undecided":
        return "undecided"
    if comparison.kind == "tie" or comparison.is_small:
        return "tie" if above else "holds"
    if above and comparison.difference >= 0:
        return "holds"
    return "fails"


def decide_all(trials: Sequence[Trial]) -> dict[str, list[Decision]]:
    """By claim, the decisions of its trials."""
    decided = [decide(trial) for trial in trials]
    compared = [comparisons for _, comparisons in decided if comparisons]
    alpha = ALPHA / max(1, len(compared))
    decisions: dict[str, list[Decision]] = {name: [] for name in CLAIMS}
    for trial, (verdict, comparisons) in zip(trials, decided, strict=True):
        with_all, _ = decide(trial, alpha)
        hours = count_hours(runs_by_path([trial]).values())
        decisions[trial.name].append(Decision(trial, verdict, comparisons, with_all, hours))
    return decisions


def runs_by_path(trials: Iterable[Trial]) -> dict[Path, study.Run]:
    """The runs of some trials, each of them once."""
    runs: dict[Path, study.Run] = {}
    for trial in trials:
        for by_seed in trial.runs.values():
            runs |= {run.path: run for run in by_seed.values()}
    return runs


def count_hours(runs: Iterable[study.Run]) -> float:
    """The hours of the runs' steps and evaluations."""
    seconds = 0
    for run in runs:
        for record in (*run.metrics, *run.evals):
            seconds += record["seconds"]
    return seconds / 3600


PAGE = "claims.md"
ROW = re.compile(r"^\| \[.*\]\(#(?P<name>\w+)\) \| [^|]* \|(?P<cells>.*)\|$")
"""A claim's line of the page's first table, with a cell for each preset."""
VERDICT = re.compile(r" (holds|fails|tie|undecided here)\b")


def verdicts_of_page(text: str) -> set[tuple[str, str]]:
    """The claims and presets of which a page has verdicts."""
    presets: list[str] = []
    found = set()
    for line in text.splitlines():
        if line.startswith("| claim | paper |") and not presets:
            presets = [cell.strip() for cell in line.strip("|").split("|")[2:]]
        row = ROW.match(line)
        if row:
            for preset, cell in zip(presets, row["cells"].split("|"), strict=False):
                if VERDICT.match(cell):
                    found.add((row["name"], preset))
    return found


def refuse_lost_verdicts(trials: Sequence[Trial], args: ClaimsOptions) -> None:
    """Raise `UserError` where the folder of --report has a page with verdicts that the new one
    would not have: their runs are in another folder, or are not kept."""
    file = Path(args.report) / PAGE
    if not args.report or not file.exists():
        return
    lost = verdicts_of_page(file.read_text("utf-8"))
    for trial in trials:
        is_trained = bool({trial.name, "all"} & set(args.run))
        has_runs = bool(trial.runs) and all(len(runs) > 1 for runs in trial.runs.values())
        if is_trained or has_runs:
            lost.discard((trial.name, trial.preset))
    if lost:
        names = ", ".join(f"{name} on {preset}" for name, preset in sorted(lost))
        raise UserError(
            f"--report {args.report}: {file} has verdicts that a new page would lose, of {names}:"
            f" their runs are not in {args.output_dir}/claims; give another folder"
        )


def write_page(decisions: Mapping[str, Sequence[Decision]], args: ClaimsOptions) -> None:
    """Write claims.md into the folder of --report."""
    trials: list[Trial] = []
    for of_claim in decisions.values():
        trials += [decision.trial for decision in of_claim]
    page = fill_template(
        Path(__file__).parent / "ablation" / "claims.md.j2",
        told=decisions,
        hours=count_hours(runs_by_path(trials).values()),
        presets=args.preset,
        given=flags_of(swept_values(args)),
    )
    folder = Path(args.report)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PAGE, page)


if __name__ == "__main__":
    run_command(main)
