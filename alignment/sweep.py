"""Ablations that end in verdicts: train every arm with every seed, then say which choice made the difference.

uv run -m alignment.sweep --preset tiny --loss_type no_baseline reinforce_with_baseline grpo_clip --group_size 4 8 --seed 0 1 2
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Table

from alignment.ablation.design import LintWarning, grid, lint, named_arms, refuse_what_cannot_be_compared, with_controls
from alignment.ablation.executors import LOST, Executor, Job, make_executor
from alignment.ablation.report import Study, decide, print_verdicts, read_study, write_report
from alignment.ablation.statistics import ALPHA, detectable_difference
from alignment.args import (
    RLArgs,
    SFTArgs,
    SweepArgs,
    SweepOptions,
    as_command,
    command_line,
    from_preset,
    refuse_missing_warm_start,
    swept_values,
)
from alignment.data.tasks import find_task
from alignment.rewards.reward import find_reward
from alignment.runs.run_folder import versions
from alignment.system.errors import UserError, run_command
from alignment.system.files import LOCK, lock_run_folder, read_json, read_jsonl, write_atomically
from alignment.system.signals import Interrupted
from alignment.system.terminal import make_console

SEED_STD = 0.02  # of an arm's accuracy between seeds, questions aside: what the design's power is reckoned with
ATTEMPTS = 2  # at each run


@dataclass(frozen=True)
class Design:
    """What a sweep trains: its folder, its arms by name, its seeds, and what cannot be told from them."""

    folder: Path
    arms: Mapping[str, RLArgs]
    seeds: tuple[int, ...]
    hold: str
    tie: float
    alpha: float
    """Chance that any verdict is false: ALPHA, or its share for each of the looks that --until_decided may take."""
    warnings: tuple[LintWarning, ...]

    def facts(self) -> dict[str, object]:
        """What sweep.json says of it, seeds aside: this may not change when a sweep is continued."""
        arms = {name: dataclasses.asdict(args) for name, args in self.arms.items()}
        return json.loads(json.dumps({"hold": self.hold, "tie": self.tie, "alpha": self.alpha, "arms": arms}))


@dataclass
class State:
    """Where one run stands: waiting, running, done or failed."""

    arm: str
    seed: int
    status: str = "waiting"
    attempts: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        """The name of the run and of its folder."""
        return f"{self.arm}_seed{self.seed}"


# --- the design -------------------------------------------------------------------------------------------------


def make_design(args: SweepOptions) -> Design:
    """The design that the command line asks for. Raises `UserError` where an arm cannot work, or with --strict is doubtful."""
    arms = named_arms(args) if args.sweep_file else grid(args)
    arms = with_controls(arms) if args.controls else arms
    folder = Path(args.output_dir) / (args.sweep_name or default_name(args))
    arms = {name: dataclasses.replace(arm, output_dir=str(folder)) for name, arm in arms.items()}
    seeds = tuple(dict.fromkeys(args.seed)) or (0,)
    for arm in arms.values():
        [dataclasses.replace(arm, seed=seed) for seed in seeds]  # which says what is wrong with a seed
        refuse_missing_warm_start(arm)
        find_reward(arm.reward, find_task(arm.task).rules)
    refuse_what_cannot_be_compared(arms)
    warnings = tuple(lint(arms, seeds))
    if warnings and args.strict:
        raise UserError(f"--strict: {'; '.join(map(str, warnings))}")
    # Looking again after every added seed gives chance more than one opportunity (Bonferroni over the looks).
    alpha = ALPHA / (max(0, args.max_seeds - len(seeds)) + 1) if args.until_decided else ALPHA
    return Design(folder, arms, seeds, args.hold, args.tie, alpha, warnings)


def default_name(args: SweepOptions) -> str:
    """`sweep_tiny_loss_type_group_size`: the preset and what varies."""
    if args.sweep_file:
        return f"sweep_{args.preset}_{Path(args.sweep_file).stem}"
    varied = [name for name, values in swept_values(args).items() if len(values) > 1]
    return "_".join(["sweep", args.preset, *(varied or ["seeds"])])


def print_design(design: Design, args: SweepOptions, console: Console) -> None:
    """Arms, runs, time, the smallest difference that would be seen, and the warnings."""
    any_arm = next(iter(design.arms.values()))
    varying = [f.name for f in dataclasses.fields(RLArgs) if len({getattr(arm, f.name) for arm in design.arms.values()}) > 1]
    table = Table(title=f"{len(design.arms)} arms x {len(design.seeds)} seeds = {len(design.arms) * len(design.seeds)} runs")
    for heading in ("arm", *varying, "responses a step"):
        table.add_column(heading, overflow="fold")
    for name, arm in design.arms.items():
        table.add_row(name, *(str(getattr(arm, field)) for field in varying), str(arm.rollout_size))
    console.print(table)
    seconds = seconds_of(design, args.output_dir)
    console.print(f"time, one run after another: {_duration(sum(seconds))}" if seconds else "time: unknown before a first run")
    questions = any_arm.max_problems
    smallest = detectable_difference(len(design.arms), len(design.seeds), questions or 1000, SEED_STD)
    console.print(
        f"smallest difference of accuracies that {len(design.seeds)} seeds and {questions or 'all'} questions would show with"
        f" a chance of 80 %: {'none' if math.isinf(smallest) else f'{smallest:.3f}'} (assuming a standard deviation of"
        f" {SEED_STD} between seeds)",
        soft_wrap=True,
    )
    for warning in design.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def seconds_of(design: Design, output_dir: str) -> list[float]:
    """Seconds that each run will take, from what a response took in earlier runs of these presets; [] where there are none."""
    presets = {arm.preset for arm in design.arms.values()}
    paces = []
    for file in [*Path(output_dir).glob("*/metrics.jsonl"), *Path(output_dir).glob("*/*/metrics.jsonl")]:
        with suppress(UserError, OSError, ValueError, KeyError, TypeError):
            facts = read_json(file.parent / "args.json")["args"]
            if facts["preset"] in presets:
                pace = statistics.median(record["seconds"] for record in read_jsonl(file))
                paces.append(pace / (facts["prompts_per_rollout"] * facts["group_size"]))
    if not paces:
        return []
    return [arm.rollout_size * arm.num_steps * statistics.median(paces) for arm in design.arms.values() for _ in design.seeds]


def refuse_other_folder(design: Design) -> None:
    """Raise `UserError` where the sweep's folder is something else's."""
    if design.folder.is_dir() and any(design.folder.iterdir()) and not {"sweep.json", LOCK} & set(os.listdir(design.folder)):
        raise UserError(f"{design.folder} exists and is no sweep's folder; give another --sweep_name")


def claim_folder(design: Design, command: Sequence[str]) -> None:
    """Make the sweep's folder, or see that it is this sweep's. Raises `UserError` where it is another's."""
    file, seeds = design.folder / "sweep.json", set(design.seeds)
    if file.exists():
        before = read_json(file)
        if {key: before.get(key) for key in design.facts()} != design.facts():
            raise UserError(f"{design.folder} holds a sweep of another design; give another --sweep_name")
        seeds |= set(before.get("seeds", ()))
    facts = {
        **design.facts(),
        "seeds": sorted(seeds),
        "warnings": [str(warning) for warning in design.warnings],
        "command": list(command),
        "versions": versions(),
    }
    write_atomically(file, json.dumps(facts, indent=2) + "\n")


# --- the runs ---------------------------------------------------------------------------------------------------


def warm_up(design: Design, executor: Executor, output_dir: str, console: Console) -> None:
    """Make the warm starts that the arms share, before they do. Raises `UserError` where that fails."""
    wanted = {arm.sft_base: arm for arm in design.arms.values() if arm.auto_sft and arm.sft_base}
    for base, arm in wanted.items():
        if Path(base).exists():
            continue
        console.print(f"{base} is not there yet: warming up by SFT, once", markup=False)
        args = dataclasses.replace(as_command(SFTArgs, arm), seed=RLArgs.seed, run_name="", output_dir=output_dir)
        job = Job("sft", "alignment.sft", tuple(command_line(args)), str(design.folder / "logs" / "sft.log"))
        executor.submit(job)
        with console.status("warming up"):
            while not (codes := executor.finished(1.0)):
                pass
        if codes["sft"]:
            raise UserError(f"warming up failed; its output is in {job.log}")


def run_all(design: Design, executor: Executor, states: Sequence[State], console: Console) -> None:
    """Bring every run to its end; what fails is tried once more, and then said."""
    for state in states:
        if is_finished(design, state):
            state.status = "done"
        else:
            submit(design, executor, state)
    by_name = {state.name: state for state in states}
    with Live(progress_table(design, states), console=console, refresh_per_second=2, transient=True) as live:
        while any(state.status == "running" for state in states):
            for name, code in executor.finished(1.0).items():
                settle(design, executor, by_name[name], code, console)
            live.update(progress_table(design, states))
    console.print(progress_table(design, states))


def submit(design: Design, executor: Executor, state: State) -> None:
    """Start or continue a run."""
    folder, state.status = design.folder / state.name, "running"
    state.attempts += 1
    resumed = (folder / "args.json").exists()
    args = dataclasses.replace(design.arms[state.arm], seed=state.seed, run_name=state.name, resume=resumed)
    log = str(design.folder / "logs" / f"{state.name}.log")
    executor.submit(Job(state.name, "alignment.train_rl", tuple(command_line(args)), log))


def settle(design: Design, executor: Executor, state: State, code: int, console: Console) -> None:
    """Take note of a run's end; one that failed is tried again, once."""
    if is_finished(design, state):  # whatever became of the process after that
        state.status = "done"
        return
    log = design.folder / "logs" / f"{state.name}.log"
    what = "its worker or machine is gone" if code == LOST else f"exit code {code}"
    again = state.attempts < ATTEMPTS and code != 2  # 2 is a mistake in the arguments, which stays one
    state.status, state.note = "failed", what
    console.print(f"{state.name}: {what}{'; trying again' if again else ''} ({log})", style="red", markup=False, soft_wrap=True)
    if again:
        submit(design, executor, state)


def is_finished(design: Design, state: State) -> bool:
    """Whether the run has written its end."""
    return (design.folder / state.name / "summary.json").exists()


def progress_table(design: Design, states: Sequence[State]) -> Table:
    """A row for each arm, a cell for each seed: how far its run is, or how accurate it ended."""
    seeds = sorted({state.seed for state in states})
    table = Table(title=f"{sum(state.status == 'done' for state in states)} of {len(states)} runs done")
    for heading in ("arm", *(f"seed {seed}" for seed in seeds)):
        table.add_column(heading, overflow="fold")
    cells = {(state.arm, state.seed): _progress(design, state) for state in states}
    for arm in design.arms:
        table.add_row(arm, *(cells.get((arm, seed), "") for seed in seeds))
    return table


def _progress(design: Design, state: State) -> str:
    folder = design.folder / state.name
    if state.status == "done":
        return f"{read_jsonl(folder / 'evals.jsonl')[-1]['avg_all_rewards']:.3f}"
    if state.status == "failed":
        return f"[red]failed[/red] ({state.note})"
    if not (steps := read_jsonl(folder / "metrics.jsonl")):
        return "waiting"
    return f"step {steps[-1]['step']} of {design.arms[state.arm].num_steps}, reward {steps[-1]['reward']:.2f}"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.0f} min"


# --- until it is decided ----------------------------------------------------------------------------------------


def next_runs(design: Design, states: Sequence[State], study: Study, most: int) -> list[State]:
    """Runs that would settle the most: a further seed for the two arms of the undecided pair that needs the fewest."""
    undecided = [c for c in decide(study) if c.more_seeds is not None]
    for comparison in sorted(undecided, key=lambda c: (c.more_seeds, -abs(c.difference))):
        added = []
        for arm in (comparison.a, comparison.b):
            taken = {state.seed for state in states if state.arm == arm}
            either = {state.seed for state in states if state.arm in (comparison.a, comparison.b)}
            added += [State(arm, seed) for seed in sorted(either - taken)]
        if not added and len(either) < most:
            added = [State(arm, max(either) + 1) for arm in (comparison.a, comparison.b)]
        failed = {state.arm for state in states if state.status == "failed"}
        if added and failed.isdisjoint((comparison.a, comparison.b)):
            return added
    return []


def main() -> None:
    args = tyro.cli(SweepArgs, use_underscores=True)
    console = make_console()
    from_preset(RLArgs, args.preset)  # a preset that there is not is a mistake of this flag, not of an arm
    design = make_design(args)
    print_design(design, args, console)
    if args.dry_run:
        return
    refuse_other_folder(design)
    executor = make_executor(args.ray_address, args.cpus_per_run, args.gpus_per_run)
    try:
        design.folder.mkdir(parents=True, exist_ok=True)
        with lock_run_folder(design.folder):
            claim_folder(design, sys.argv)
            train(design, executor, args, console)
    except Interrupted:
        console.print("stopped; the same command continues this sweep")
        raise
    finally:
        executor.close()


def train(design: Design, executor: Executor, args: SweepOptions, console: Console) -> None:
    """Train all runs, and write the report. Raises `UserError` where runs have failed."""
    states = [State(arm, seed) for seed in design.seeds for arm in design.arms]
    warm_up(design, executor, args.output_dir, console)
    run_all(design, executor, states, console)
    while args.until_decided and (added := next_runs(design, states, read_study([design.folder]), args.max_seeds)):
        console.print(f"undecided: adding {', '.join(state.name for state in added)}", markup=False, soft_wrap=True)
        states += added
        run_all(design, executor, states, console)
    study = read_study([design.folder])
    print_verdicts(study, console)
    for file in write_report(study, design.folder):
        console.print(f"report: {file}", markup=False, soft_wrap=True)
    failed = [state.name for state in states if state.status == "failed"]
    if failed:
        raise UserError(f"{len(failed)} of {len(states)} runs failed and are missing from the verdicts: {', '.join(failed)}")


if __name__ == "__main__":
    run_command(main)
