"""Ablations that end in verdicts: train every arm with every seed, then say which choice made the
difference.

uv run -m alignment.sweep --preset tiny --loss_type no_baseline reinforce_with_baseline grpo_clip
--group_size 4 8 --seed 0 1 2
"""

import dataclasses
import math
import sys
from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from alignment.ablation import schedule
from alignment.ablation.design import (
    ALPHA,
    Design,
    grid,
    lint,
    named_arms,
    rare_evaluations,
    refuse_incomparable_arms,
    refuse_rare_evaluations,
    with_controls,
)
from alignment.args import (
    RLArgs,
    SweepArgs,
    SweepOptions,
    from_preset,
    parse,
    refuse_missing_warm_start,
    swept_values,
)
from alignment.builders.checks import check_loss, check_output, check_reward
from alignment.data.tasks import find_task, try_rows
from alignment.planning.seconds import hardware_of
from alignment.rewards.rules import find_reward
from alignment.runs.run_folder import plain_name
from alignment.system.errors import UserError, run_command
from alignment.system.files import LOCK
from alignment.system.terminal import make_console, make_table

# assumed standard deviation of an arm's accuracy between seeds, for the design's power
SEED_STD = 0.02


def main() -> None:
    args, console = parse(SweepArgs), make_console()
    from_preset(RLArgs, args.preset)  # blames --preset itself, not an arm, for an unknown preset
    design = make_design(args)
    print_design(design, args, console)
    if args.dry_run:
        return
    found = {file.name for file in design.folder.glob("*")}
    if found and found.isdisjoint(("sweep.json", LOCK)):
        raise UserError(f"{design.folder} exists and is no sweep's folder; give another --run_name")
    check_output(design.folder)
    resources = (
        args.executor,
        args.ray_address,
        args.cpus_per_run,
        args.gpus_per_run,
        args.slurm_parameters,
    )
    with schedule.working_in(design.folder, resources, console) as executor:
        schedule.claim_folder(design, sys.argv)
        train(design, executor, args, console)


def make_design(args: SweepOptions) -> Design:
    """The design of the command line. Raises `UserError` where an arm cannot work, and with
    --strict where it has warnings."""
    values = swept_values(args)
    arms = (
        named_arms(args.sweep_file, args.preset, values)
        if args.sweep_file
        else grid(args.preset, values, args.hold)
    )
    arms = with_controls(arms) if args.controls else arms
    varied = [name for name, several in values.items() if len(several) > 1] or ["seeds"]
    default = "_".join(
        ["sweep", args.preset, *([Path(args.sweep_file).stem] if args.sweep_file else varied)]
    )
    folder = Path(args.output_dir) / (args.run_name or plain_name(default))
    arms = {
        name: dataclasses.replace(arm, output_dir=str(folder), trackers=args.trackers)
        for name, arm in arms.items()
    }
    seeds = tuple(dict.fromkeys(args.seed)) or (0,)
    for arm in arms.values():
        for seed in seeds:
            dataclasses.replace(arm, seed=seed)  # refuses one that is out of range
        refuse_missing_warm_start(arm)
        find_reward(arm.reward, find_task(arm.task, arm.data).rules)
    refuse_incomparable_arms(arms)
    refuse_rare_evaluations(arms, args.match)
    try_users_code(arms.values())
    warnings = (*lint(arms, seeds), *rare_evaluations(arms, args.match))
    if warnings and args.strict:
        raise UserError(f"--strict: {'; '.join(warnings)}")
    design = Design(
        folder,
        arms,
        seeds,
        args.hold,
        args.tie,
        ALPHA / looks(len(seeds), args),
        warnings,
        args.match,
    )
    if args.question:
        from alignment.ablation.verdicts import refuse_unknown_question

        refuse_unknown_question(design.varied, args.question)
    return design


def try_users_code(arms: Collection[RLArgs]) -> None:
    """Try the arms' losses and rewards that are the user's own on made-up responses, and ask their
    tasks for problems. Raises `UserError` where a run of an arm could only fail."""
    rewards = {
        (arm.task, arm.data, arm.prompt, arm.reward): arm for arm in arms if ":" in arm.reward
    }
    for arm in arms:
        check_loss(arm)
    tasks = {(arm.task, arm.data): arm.dataset_path for arm in arms}
    for name_and_data, dataset_path in tasks.items():
        for split in ("test", "train"):
            try_rows(find_task(*name_and_data), "problems", split, dataset_path)
    for arm in rewards.values():
        task = find_task(arm.task, arm.data)
        reward = find_reward(arm.reward, task.rules, arm.reward_timeout)
        check_reward(arm, task, reward, task.training_problems(arm.dataset_path)[0])


def looks(seeds: int, args: SweepOptions) -> int:
    """How often verdicts are made, with --until_decided after each seed: they share the chance of a
    false one (Bonferroni)."""
    return max(0, args.max_seeds - seeds) + 1 if args.until_decided else 1


def print_design(design: Design, args: SweepOptions, console: Console) -> None:
    """Print the arms, the runs, what the seeds would show, what that costs, and the warnings."""
    arms, seeds, varied = design.arms, len(design.seeds), design.varied
    title = f"{len(arms)} arms x {seeds} seeds = {len(arms) * seeds} runs"
    rows = [
        (name, *map(str, varied[name].values()), str(arm.rollout_size))
        for name, arm in arms.items()
    ]
    console.print(
        make_table(title, ("arm", *next(iter(varied.values())), "responses a step"), rows)
    )
    if design.hold == "rollouts" and "group_size" in next(iter(varied.values())):
        prompts = " ".join(str(arm.prompts_per_rollout) for arm in arms.values())
        console.print(
            f"--hold rollouts: --prompts_per_rollout is {prompts}; --hold prompts keeps it",
            soft_wrap=True,
        )
    print_power(design, args, console)
    if args.hardware or args.calibrate or args.price or args.show_difference:
        print_cost(design, args, console)
    else:
        console.print(
            "time: --calibrate FOLDER, of a finished run, or --hardware adds it", soft_wrap=True
        )
    for warning in design.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def print_power(design: Design, args: SweepOptions, console: Console) -> None:
    """Print the smallest differences that the seeds would show, and whether they could show a
    tie."""
    seeds, arm = len(design.seeds), next(iter(design.arms.values()))
    questions = len(find_task(arm.task, arm.data).test_problems(arm.dataset_path, arm.max_problems))
    after = range(seeds, seeds + looks(seeds, args))
    until = f", added until they decide, up to {after[-1]}," if len(after) > 1 else ""
    console.print(
        f"{seeds} seeds{until} and {questions} questions, a standard deviation of {SEED_STD}"
        " between seeds:"
    )
    for sides, (difference, tie) in powers(design, after, questions).items():
        smallest = "none" if math.isinf(difference) else f"{difference:.3f}"
        found = (
            f"- smallest difference of {sides} that they would show with a chance of 80 %:"
            f" {smallest}"
        )
        tied = f"equal ones would be called a tie within {design.tie:g} with a chance of {tie:.0%}"
        console.print(f"{found}; {tied}", soft_wrap=True)


def powers(design: Design, after: range, questions: int) -> dict:
    """Two sides that the arms compare -> the `Power` of verdicts after so many seeds each, on so
    many questions."""
    from alignment.ablation.statistics import pairs, power
    from alignment.ablation.verdicts import factor_contrasts
    from alignment.core.power import score_std

    tables = {
        f"two values of {name}": contrasts
        for name, contrasts in factor_contrasts(design.varied).items()
    }
    arms = [arm for arm in design.arms if not (tables and arm.startswith("control_"))]

    def weights(contrasts):
        return [contrasts[0].weights.get(arm, 0.0) for arm in arms] if contrasts else []

    tables = tables or {"two arms": pairs(arms)}
    std = score_std(SEED_STD, questions)
    return {
        sides: power(weights(of), len(of), after, std, design.tie) for sides, of in tables.items()
    }


def print_cost(design: Design, args: SweepOptions, console: Console) -> None:
    """Print what every arm takes, what numbers of seeds show for what, and the cheapest design with
    --show_difference."""
    hardware = hardware_of(args.hardware)
    import numpy as np

    from alignment.builders.prediction import calibrate, duration, predict, span

    predictions = [predict(arm, *hardware[:3]) for arm in design.arms.values()]
    arm, step = predictions[0].run, predictions[0].step
    known = calibrate(args.calibrate, step.itemsize)
    spent = [duration(prediction, hardware, known) for prediction in predictions]
    for name, hours in zip(design.arms, spent, strict=True):
        console.print(f"- {name}: {span(hours.gpu_hours)} GPU-hours a seed", soft_wrap=True)
    whole = np.sum([hours.gpu_hours for hours in spent], axis=0)
    evaluations = np.sum([hours.evaluations_gpu_hours for hours in spent], axis=0)
    task, counted = find_task(arm.task, arm.data), step.sampled["evaluation"].prompts
    everything, given = (
        len(task.test_problems(arm.dataset_path, most)) for most in (0, arm.max_problems)
    )

    def shown(seeds: int, questions: int) -> tuple[float, float, str]:
        """The smallest difference that a design shows, its GPU-hours at most, and both in words."""
        difference = max(
            each.difference for each in powers(design, range(seeds, seeds + 1), questions).values()
        )
        hours = seeds * (whole + (questions / counted - 1) * evaluations)
        dollars = f" ({span(args.price * hours)} dollars)" * (args.price > 0)
        words = (
            f"{seeds} seeds and {questions} questions show {difference:.3f} for {span(hours)}"
            f" GPU-hours{dollars}"
        )
        return difference, hours[1], words

    seeds = max(2, len(design.seeds))
    console.print(
        "; ".join(shown(number, given)[2] for number in (seeds, 2 * seeds)), soft_wrap=True
    )
    if args.show_difference:
        numbers = {
            given,
            *(everything >> halvings for halvings in range(4) if everything >> halvings),
        }
        designs = [
            next((d for s in range(2, 65) if (d := shown(s, q))[0] <= args.show_difference), None)
            for q in numbers
        ]
        cheapest = min(
            (d[1:] for d in designs if d), default=(0, "no design of up to 64 seeds does")
        )
        console.print(
            f"cheapest that shows {args.show_difference:g}: {cheapest[1]}", soft_wrap=True
        )


def train(
    design: Design, executor: schedule.Executor, args: SweepOptions, console: Console
) -> None:
    """Train all runs, and write the report. Raises `UserError` where runs have failed."""
    from alignment.ablation.report import report
    from alignment.ablation.study import read_study
    from alignment.ablation.verdicts import decide_question

    states, added = [], [schedule.State(arm, seed) for seed in design.seeds for arm in design.arms]
    schedule.warm_up(design, executor, args.output_dir, console)
    while added:
        states += added
        schedule.run_all(design, executor, states, console)
        comparisons = (
            decide_question(read_study([design.folder]), args.question)
            if args.until_decided
            else []
        )
        if added := schedule.next_runs(states, comparisons, args.max_seeds):
            console.print(
                f"undecided: adding {', '.join(state.name for state in added)}",
                markup=False,
                soft_wrap=True,
            )
    report(read_study([design.folder]), design.folder, console)
    if failed := [
        f"{state.name} ({state.reason or state.note})"
        for state in states
        if state.status == "failed"
    ]:
        raise UserError(
            f"{len(failed)} of {len(states)} runs failed and are missing from the verdicts:"
            f" {', '.join(failed)}"
        )


if __name__ == "__main__":
    run_command(main)
