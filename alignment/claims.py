"""Published claims about RL fine-tuning, tried on tasks that a laptop trains: which hold here, fail, tie or stay undecided.

uv run -m alignment.claims --run clip_higher --report docs

A claim's trial on a preset compares the arm expected above with every other one, or all pairs where no difference is expected.
The comparisons of a trial share a chance of 5 % of any false verdict (`compare`). Trials stand by themselves, but for a second
verdict, for which all trials that have runs share these 5 % (Bonferroni)."""

from collections import namedtuple
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console

from alignment.ablation import schedule, study
from alignment.ablation.design import ALPHA, Design, lint, name_of, named_arms
from alignment.args import CLAIMS, ClaimsArgs, parse, refuse_missing_warm_start, swept_values
from alignment.system.errors import UserError, run_command
from alignment.system.files import fill_template, read_jsonl, read_toml, write_atomically
from alignment.system.terminal import make_console, make_table

Trial = namedtuple("Trial", "name file preset design runs")
"""A claim on a preset: its name, what its file says, the design, whose arms are named by what differs from the preset, so that
claims share the runs of equal arms, and the finished runs by arm of the claim and seed."""
read_run = cache(study.read_run)


def _wrong_length(run: study.Run) -> float:
    answers = read_jsonl(run.path / "completions" / f"eval_{run.evals[-1]['step']:06d}.jsonl")
    return np.mean([len(answer["token_ids"]) for answer in answers if not answer["score"]["reward"]])


MEASURES = {
    "final accuracy": lambda run: run.scores.rewards_EQ[-1],
    "mean accuracy of all evaluations": lambda run: run.scores.rewards_EQ.mean(axis=0),
    "entropy of the last 10 steps": lambda run: np.nanmean(np.array([m["entropy"] for m in run.metrics[-10:]], dtype=float)),
    "divergence in the last 10 steps": lambda run: np.nanmean(np.array([m["kl"] for m in run.metrics[-10:]], dtype=float)),
    "length of wrong answers": _wrong_length,
}
"""A claim's measure -> its value for each question [Q], or the run's own, in nats a token and tokens; NaN where it has none."""


def main() -> None:
    args, console = parse(ClaimsArgs), make_console()
    read = lambda: [read_trial(name, preset, args) for name in CLAIMS for preset in args.preset]
    resources = args.executor, args.ray_address, args.cpus_per_run, args.gpus_per_run, args.slurm_parameters
    failed = []
    for design in [trial.design for trial in read() if {trial.name, "all"} & set(args.run) and trial.runs]:
        for arm in design.arms.values():
            refuse_missing_warm_start(arm)
        states = [schedule.State(arm, seed) for seed in design.seeds for arm in design.arms]
        with schedule.working_in(design.folder, resources, console) as executor:
            schedule.warm_up(design, executor, args.output_dir, console)
            schedule.run_all(design, executor, states, console)
        failed += [state.name for state in states if state.status == "failed"]
    show(read(), args, console)
    if failed:
        raise UserError(f"{len(failed)} runs failed and are missing from the verdicts: {', '.join(failed)}")


def read_trial(name: str, preset: str, args: ClaimsArgs) -> Trial:
    """A claim's trial on a preset, with the runs that there are. Raises `UserError` where an arm cannot work."""
    file, folder = read_toml(CLAIMS[name], "--run"), Path(args.output_dir) / "claims" / preset
    about, arms = file["about"], named_arms(str(CLAIMS[name]), preset, swept_values(args)) if "arms" in file else {}
    seeds = tuple(dict.fromkeys(args.seed or about.get("seeds", ())))
    paths = {arm: {seed: folder / schedule.State(name_of(own), seed).name for seed in seeds} for arm, own in arms.items()}
    finished = lambda of: {seed: read_run(path) for seed, path in of.items() if (path / "summary.json").exists()}
    placed = {name_of(own): replace(own, output_dir=str(folder), trackers=args.trackers) for own in arms.values()}
    design = Design(folder, placed, seeds, "", about.get("tie", 0.0), ALPHA, tuple(lint(arms, seeds)))
    return Trial(name, file, preset, design, {arm: finished(of) for arm, of in paths.items()})


def decide(trial: Trial, alpha: float = ALPHA) -> tuple[str, list]:
    """The trial's verdict, which is the first of "fails", "undecided", "tie" and "holds" that a comparison gives, or else "not
    run" or "cannot be shown here"; and the comparisons, the arm that is expected above first."""
    from alignment.ablation.statistics import compare, pairs  # loads scipy

    above, measure = (trial.file["about"].get(key) for key in ("above", "measure"))
    values = {arm: {seed: MEASURES[measure](run) for seed, run in of.items()} for arm, of in trial.runs.items()}
    whole = lambda x: np.broadcast_to(x, np.shape(x) or 10_000)  # as of many questions: `compare` takes it for no rounded share
    scores = {arm: {seed: whole(x) for seed, x in of.items() if not np.isnan(x).any()} for arm, of in values.items()}
    contrasts = [c for c in pairs(sorted(scores, key=lambda arm: arm != above)) if above in (c.a, None)]
    found = compare(scores, trial.design.tie, contrasts, alpha) if scores and all(scores.values()) else []
    verdicts = {"greater": "holds" if above else "fails", "tie": "tie" if above else "holds", "undecided": "undecided"}
    said = {"fails" if c.kind == "greater" and c.difference < 0 else verdicts[c.kind] for c in found}
    none = "not run" if trial.runs else "cannot be shown here"
    return next((verdict for verdict in ("fails", "undecided", "tie", "holds") if verdict in said), none), found


def show(trials: list[Trial], args: ClaimsArgs, console: Console) -> None:
    """Print each claim with its verdicts and, with --report, write the page."""
    decided = [decide(trial) for trial in trials]
    alpha = ALPHA / max(1, sum(bool(found) for _, found in decided))
    hours = lambda runs: sum(record["seconds"] for run in runs.values() for record in (*run.metrics, *run.evals)) / 3600
    told, runs = {name: [] for name in CLAIMS}, {}
    for trial, (verdict, comparisons) in zip(trials, decided, strict=True):
        own = {run.path: run for of in trial.runs.values() for run in of.values()}
        told[trial.name].append((trial, verdict, comparisons, decide(trial, alpha)[0], hours(own)))
        runs |= own
    rows = [(name, of[0][0].file["about"]["claim"], *(verdict for _, verdict, *_ in of)) for name, of in told.items()]
    console.print(make_table("published claims", ("claim", "what it says", *args.preset), rows))
    for page in ("claims.md", "claims.html") if args.report else ():
        template = Path(__file__).parent / "ablation" / f"{page}.j2"
        write_atomically(Path(args.report) / page, fill_template(template, told=told, presets=args.preset, hours=hours(runs)))


if __name__ == "__main__":
    run_command(main)
