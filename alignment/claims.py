"""Published claims about RL fine-tuning, tried on tasks that a laptop trains: which hold here,
fail, tie or stay undecided.

uv run -m alignment.claims --run clip_higher --report docs

A claim's trial on a preset compares the arm expected above with every other one, or all pairs where
none is. Its comparisons share a chance of 5 % of any false verdict (`compare`). Trials stand by
themselves; a second verdict shares it (Bonferroni)."""

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np

from alignment.ablation import schedule, study
from alignment.ablation.design import ALPHA, Design, grid, lint, name_of, named_arms
from alignment.args import (
    CLAIMS,
    ClaimsArgs,
    RLArgs,
    flags_of,
    from_preset,
    parse,
    refuse_missing_warm_start,
    swept_values,
)
from alignment.system.errors import UserError, run_command
from alignment.system.files import fill_template, read_jsonl, read_toml, write_atomically
from alignment.system.terminal import make_console, make_table

Trial = namedtuple("Trial", "name file preset design runs")
"""A claim on a preset: the content of its file, the design with arms by `name_of`, and the finished
runs by arm and seed."""


def _wrong_length(run: study.Run) -> float:
    answers = read_jsonl(run.path / "completions" / f"eval_{run.evals[-1]['step']:06d}.jsonl")
    return np.mean(
        [len(answer["token_ids"]) for answer in answers if not answer["score"]["reward"]]
    )


# What a claim's [about] has where its file does not say otherwise.
USUAL = {
    "equal": "warm start, prompts, samples, updates",
    "measure": "final accuracy",
    "tie": 0.03,
    "seeds": [0, 1, 2, 3, 4],
}
MEASURES = {
    "final accuracy": lambda run: run.scores.rewards_EQ[-1],
    "mean accuracy of all evaluations": lambda run: run.scores.rewards_EQ.mean(axis=0),
    "entropy of the last 10 steps": lambda run: np.nanmean(
        np.array([m["entropy"] for m in run.metrics[-10:]], dtype=float)
    ),
    "divergence in the last 10 steps": lambda run: np.nanmean(
        np.array([m["kl"] for m in run.metrics[-10:]], dtype=float)
    ),
    "length of wrong answers": _wrong_length,
}
"""A claim's measure -> its value for each question [Q], or the run's own, in nats a token and
tokens; NaN where it has none."""


def main() -> None:
    args, console = parse(ClaimsArgs), make_console()

    def read():
        return [read_trial(name, preset, args) for name in CLAIMS for preset in args.preset]

    resources = schedule.Resources(
        args.executor,
        args.ray_address,
        args.cpus_per_run,
        args.gpus_per_run,
        args.slurm_parameters,
    )
    failed = []
    for design in [
        trial.design for trial in read() if {trial.name, "all"} & set(args.run) and trial.runs
    ]:
        for arm in design.arms.values():
            refuse_missing_warm_start(arm)
        states = [schedule.State(arm, seed) for seed in design.seeds for arm in design.arms]
        with schedule.open_executor(design.folder, resources, console) as executor:
            schedule.warm_up(design, executor, args.output_dir, console)
            schedule.run_all(design, executor, states, console)
        failed += [state.name for state in states if state.status == "failed"]
    facts = contents(read()) | {"presets": args.preset, "given": flags_of(swept_values(args))}
    rows = [
        (name, of[0][0].file["about"]["claim"], *(row[1] for row in of))
        for name, of in facts["told"].items()
    ]
    console.print(make_table("published claims", ("claim", "what it says", *args.preset), rows))
    if args.report:
        Path(args.report).mkdir(parents=True, exist_ok=True)
        page = fill_template(Path(__file__).parent / "ablation" / "claims.md.j2", **facts)
        write_atomically(Path(args.report) / "claims.md", page)
    if failed:
        raise UserError(
            f"{len(failed)} runs failed and are missing from the verdicts: {', '.join(failed)}"
        )


def read_trial(name: str, preset: str, args: ClaimsArgs) -> Trial:
    """A claim's trial on a preset, with the runs that there are. Raises `UserError` where an arm
    cannot work."""
    file, given = read_toml(CLAIMS[name], "--run"), swept_values(args)
    file["about"] = about = (USUAL if "arms" in file else {}) | file["about"]
    arms = named_arms(str(CLAIMS[name]), preset, given) if "arms" in file else {}
    base, *_ = grid(preset, given, hold="").values()
    folder = (
        Path(args.output_dir)
        / "claims"
        / f"{preset}_{name_of(base, from_preset(RLArgs, preset))}".strip("_")
    )
    names = {arm: name_of(own, base) or "baseline" for arm, own in arms.items()}
    seeds = tuple(dict.fromkeys(args.seed or about.get("seeds", ())))

    def finished(run):
        return {
            s: study.read_run(p)
            for s in seeds
            if ((p := folder / f"{run}_seed{s}") / "summary.json").exists()
        }

    placed = {
        names[arm]: replace(own, output_dir=str(folder), trackers=args.trackers)
        for arm, own in arms.items()
    }
    design = Design(
        folder, placed, seeds, "", about.get("tie", 0.0), ALPHA, tuple(lint(arms, seeds))
    )
    return Trial(name, file, preset, design, {arm: finished(run) for arm, run in names.items()})


def decide(trial: Trial, alpha: float = ALPHA) -> tuple[str, list]:
    """The trial's verdict, the first of "fails", "undecided", "tie", "holds" that a comparison
    gives; and the comparisons."""
    from alignment.ablation.statistics import compare, pairs  # loads scipy

    about, above = trial.file["about"], trial.file["about"].get("above")

    # as of many questions: `compare` takes it for no rounded share
    def whole(x):
        return np.broadcast_to(x, np.shape(x) or 10_000)

    def known(of):
        return {
            s: whole(x)
            for s, run in of.items()
            if not np.isnan(x := MEASURES[about["measure"]](run)).any()
        }

    scores = {arm: known(of) for arm, of in trial.runs.items()}
    contrasts = [
        c for c in pairs(sorted(scores, key=lambda arm: arm != above)) if above in (c.a, None)
    ]
    found = (
        compare(scores, trial.design.tie, contrasts, alpha)
        if scores and all(scores.values())
        else []
    )
    verdicts = {
        "greater": "holds" if above else "fails",
        "tie": "tie" if above else "holds",
        "undecided": "undecided",
    }
    said = {
        "fails" if c.kind == "greater" and c.difference < 0 else verdicts[c.kind] for c in found
    }
    return (
        next(
            (v for v in ("fails", "undecided", "tie", "holds") if v in said),
            about.get("cannot", "not run"),
        ),
        found,
    )


def contents(trials: list[Trial]) -> dict[str, object]:
    """What a page tells: by claim its trials, each with verdict, comparisons, verdict with all, and
    hours; and all hours."""
    decided, told, runs = [decide(trial) for trial in trials], {name: [] for name in CLAIMS}, {}
    alpha = ALPHA / max(1, sum(bool(comparisons) for _, comparisons in decided))

    def hours(runs):
        return (
            sum(record["seconds"] for run in runs.values() for record in (*run.metrics, *run.evals))
            / 3600
        )

    for trial, (verdict, comparisons) in zip(trials, decided, strict=True):
        runs |= (own := {run.path: run for of in trial.runs.values() for run in of.values()})
        told[trial.name].append((trial, verdict, comparisons, decide(trial, alpha)[0], hours(own)))
    return {"told": told, "hours": hours(runs)}


if __name__ == "__main__":
    run_command(main)
