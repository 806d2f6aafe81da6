"""Ablations that end in verdicts: train every arm with every seed, then say which choice made the
difference.

uv run -m alignment.sweep --preset tiny --loss_type no_baseline reinforce_with_baseline grpo_clip
--group_size 4 8 --seed 0 1 2
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from alignment.ablation import schedule, tuning
from alignment.ablation.design import (
    ALPHA,
    SEED_STD,
    Design,
    grid,
    is_control,
    lint,
    named_arms,
    rare_evaluations,
    refuse_incomparable_arms,
    refuse_rare_evaluations,
    refuse_shared_warm_starts,
    refuse_unequal_evaluations,
    with_controls,
)
from alignment.args import (
    RLArgs,
    SweepArgs,
    SweepOptions,
    parse,
    preset_title,
    refuse_missing_warm_start,
    swept_values,
)
from alignment.builders.checks import (
    check_loss,
    check_output,
    check_reward,
    check_trackers,
    refuse_other_share,
)
from alignment.builders.data_checks import check_pass_rates
from alignment.config.data import ALL_PASS_RATES
from alignment.config.presets import values_of_preset
from alignment.data.tasks import find_task, try_rows
from alignment.planning.seconds import hardware_of
from alignment.rewards.rules import RULES, find_reward
from alignment.runs.run_folder import plain_name
from alignment.system.errors import UserError, run_command
from alignment.system.locks import LOCK
from alignment.system.terminal import counted, make_console, make_table

if TYPE_CHECKING:
    import numpy as np

    from alignment.ablation.statistics import Contrast, Power
    from alignment.ablation.study import Run
    from alignment.core.records import Problem

CONTROL_SIDES = "an arm and a control"  # whose comparison is beside the sweep's question
# of the designs among which --show_difference looks for the cheapest
MOST_SEEDS = 64


def main() -> None:
    args = parse(SweepArgs)
    console = make_console(args.quiet)
    # An unknown preset is the fault of --preset itself, and of no arm.
    values_of_preset(RLArgs, args.preset, {})
    design = make_design(args)
    tuning_runs = make_tuning_design(design, args)
    print_design(design, args, console, tuning_runs)
    if args.dry_run:
        return
    refuse_other_folder(design.folder)
    check_output(design.folder)
    with schedule.open_executor(design.folder, args.resources, console) as executor:
        if tuning_runs is not None:
            design = tune(design, tuning_runs, executor, args, console)
        schedule.claim_folder(design, sys.argv)
        train(design, executor, args, console)


def make_tuning_design(design: Design, args: SweepOptions) -> Design | None:
    """The runs of --tune; None without it. Raises `UserError` where a value or a seed cannot be
    tried."""
    if not args.tune:
        return None
    last_seeds = max(args.max_seeds, len(design.seeds)) if args.until_decided else 0
    tuning.refuse_shared_seeds(args.tune_seeds, design.seeds, last_seeds, design.folder)
    seeds = tuple(dict.fromkeys(args.tune_seeds))
    runs = tuning.tuning_design(design, tuning.read_grid(args.tune), seeds)
    refuse_faulty_arms(runs.arms, seeds)
    refuse_shared_warm_starts(runs.arms)
    refuse_unequal_evaluations(runs.arms, design.measure)
    return runs


def tune(
    design: Design,
    runs: Design,
    executor: schedule.Executor,
    args: SweepOptions,
    console: Console,
) -> Design:
    """Train the runs of --tune, and return the design with the values that each arm takes. Raises
    `UserError` where an arm cannot choose, or its runs were asked different questions, or where the
    sweep's folder has runs of other values."""
    from alignment.ablation.study import amounts_of, read_study
    from alignment.ablation.verdicts import final_scores, question_groups

    runs.folder.mkdir(exist_ok=True)
    schedule.claim_folder(runs, sys.argv)
    states = []
    for seed in runs.seeds:
        states += [schedule.State(arm, seed) for arm in runs.arms]
    schedule.warm_up(runs, executor, args.output_dir, console)
    console.print(f"tuning: {counted(len(states), 'run')}")
    schedule.run_all(runs, executor, states, console)
    study = read_study([runs.folder])
    grid = tuning.read_grid(args.tune)
    for arm in tuning.tuned_arms(design.arms):
        of_arm: list[Run] = []
        for name in tuning.runs_of_arm(arm, grid):
            of_arm += study.arms.get(name, {}).values()
        question_groups(of_arm)  # refuses different ones
    accuracies = {}
    for name, by_seed in final_scores(study).items():
        accuracies[name] = {seed: float(scores.mean()) for seed, scores in by_seed.items()}
    choices = tuning.choose(design.arms, grid, accuracies, runs.seeds)
    questions = max((len(run.scores.questions) for run in study.runs), default=0)
    tuned = tuning.with_choices(design, choices)
    # Finished runs of the folder may have other values, of which tuning.json tells.
    schedule.refuse_other_design(tuned)
    chosen = tuning.Tuning(choices, runs.seeds, questions, amounts_of(study.runs), runs.measure)
    tuning.write_tuning(design.folder, chosen)
    schedule.note_report(runs.folder, runs.seeds)
    for arm, choice in choices.items():
        taken = choice.candidate
        console.print(
            f"{arm}: {taken.words}, validation {runs.measure} {taken.mean:.3f}",
            markup=False,
            soft_wrap=True,
        )
    return tuned


def refuse_other_folder(folder: Path) -> None:
    """Raise `UserError` where the folder has files, and they are no sweep's."""
    names = {file.name for file in folder.glob("*")}
    if (folder / tuning.FOLDER / "sweep.json").exists():
        return
    if names and names.isdisjoint(("sweep.json", LOCK)):
        raise UserError(f"{folder} exists and is no sweep's folder; give another --run_name")


def make_design(args: SweepOptions) -> Design:
    """The design of the command line. Raises `UserError` where an arm cannot work, and with
    --strict where it has warnings."""
    values = swept_values(args)
    if args.sweep_file:
        arms = named_arms(args.sweep_file, args.preset, values)
    else:
        arms = grid(args.preset, values, args.hold)
    if args.controls:
        arms = with_controls(arms)
    name = args.run_name or default_name(args, values)
    folder = Path(args.output_dir) / name
    validation_share = args.validation_share if args.tune else 0.0
    for arm, rl in arms.items():
        arms[arm] = dataclasses.replace(
            rl,
            output_dir=str(folder),
            trackers=args.trackers,
            eval_tasks=args.eval_tasks or rl.eval_tasks,
            validation_share=validation_share or rl.validation_share,
        )
    seeds = tuple(dict.fromkeys(args.seed)) or (0,)
    refuse_faulty_arms(arms, seeds)
    refuse_incomparable_arms(arms)
    refuse_shared_warm_starts(arms)
    refuse_rare_evaluations(arms, args.match)
    refuse_unmeasured_arms(arms, args.measure, args.match)
    refuse_unequal_evaluations(arms, args.measure)
    check_trackers(args.trackers)
    try_users_code(arms.values())
    looks = count_looks(len(seeds), args)
    # --until_decided adds a seed at each further look.
    most_seeds = range(len(seeds) + looks - 1)
    warnings = (*lint(arms, most_seeds), *rare_evaluations(arms, args.match))
    # Each time that verdicts are made has its share of the chance of a false one (Bonferroni).
    alpha = ALPHA / looks
    if looks == 1:
        warnings += schedule.later_looks(folder, seeds)
    else:
        schedule.refuse_further_looks(folder, seeds, alpha, args.question)
    if warnings and args.strict:
        raise UserError(f"--strict: {'; '.join(warnings)}")
    design = Design(
        folder,
        arms,
        seeds,
        args.hold,
        args.tie,
        alpha,
        warnings,
        args.match,
        measure=args.measure,
        question=args.question,
    )
    if args.question:
        from alignment.ablation.verdicts import refuse_unknown_question

        refuse_unknown_question(design.varied, args.question)
    return design


def default_name(args: SweepOptions, values: Mapping[str, tuple]) -> str:
    """A folder's name that says the preset, and the file of arms or else the varied arguments."""
    if args.sweep_file:
        varied = [Path(args.sweep_file).stem]
    else:
        varied = [name for name, given in values.items() if len(given) > 1] or ["seeds"]
    return plain_name("_".join(["sweep", preset_title(args.preset), *varied]))


def refuse_faulty_arms(arms: Mapping[str, RLArgs], seeds: Sequence[int]) -> None:
    """Raise `UserError` where an arm cannot run with a seed, or misses its warm start or its
    reward."""
    for arm in arms.values():
        for seed in seeds:
            dataclasses.replace(arm, seed=seed)  # refuses one that is out of range
        refuse_missing_warm_start(arm)
        refuse_other_share(arm)
        rules = arm.task_in_format.rules
        find_reward(arm.reward, rules, settings=arm.reward_settings)


def refuse_unmeasured_arms(arms: Mapping[str, RLArgs], measure: str, match: str) -> None:
    """Raise `UserError` where evaluations of an arm would not have what the verdicts are on."""
    if measure == "accuracy":
        return
    from alignment.ablation.study import read_measure, refuse_unmatched_measure

    refuse_unmatched_measure(measure, match)
    kind, number = read_measure(measure)
    for name, arm in arms.items():
        samples = arm.eval_samples
        if kind in ("pass", "maj") and samples < number or kind == "avg" and samples != number:
            raise UserError(
                f"--measure {measure}: {name} samples {samples} answers a question in evaluations;"
                f" give --eval_samples {number:.0f}"
            )
        if kind == "maj" and arm.evaluation_rule not in RULES:
            raise UserError(
                f"--measure {measure}: {name} is evaluated by {arm.evaluation_rule}, a function of"
                " your own, and which answers it would count is not known; measure avg@N or pass@K"
            )
        if kind == "greedy" and not arm.eval_greedy:
            raise UserError(f"--measure greedy: {name} has no greedy answers; give --eval_greedy")


def try_users_code(arms: Collection[RLArgs]) -> None:
    """Try the arms' losses and rewards that are the user's own on made-up responses, and read the
    problems of their tasks and their pass rates. Raises `UserError` where a run of an arm could
    only fail."""
    for arm in arms:
        check_loss(arm)
    # arms mostly share a task and a reward, and each is tried once
    tasks = {(arm.task, arm.data): arm.dataset_path for arm in arms}
    for (name, data), dataset_path in tasks.items():
        for split in ("test", "train"):
            try_rows(find_task(name, data), "problems", split, dataset_path)
    for arm in arms:
        if arm.pass_rates or arm.pass_rate_band != ALL_PASS_RATES:
            task = find_task(arm.task, arm.data)
            check_pass_rates(arm, task.training_problems(arm.dataset_path, arm.sft_share))
    # Of arms that differ in nothing that a reward of the user's own depends on, one is checked.
    users_rewards = {}
    for arm in arms:
        if ":" in arm.reward:
            key = (arm.task, arm.data, arm.prompt, arm.reward, arm.reward_settings)
            users_rewards[key] = arm
    for arm in users_rewards.values():
        task = arm.task_in_format
        reward = find_reward(arm.reward, task.rules, arm.reward_timeout, arm.reward_settings)
        check_reward(arm, task, reward, task.training_problems(arm.dataset_path)[0])


def count_looks(seeds: int, args: SweepOptions) -> int:
    """The number of times that verdicts are made: once, or with --until_decided after each added
    seed too."""
    if not args.until_decided:
        return 1
    return max(0, args.max_seeds - seeds) + 1


def print_design(
    design: Design, args: SweepOptions, console: Console, tuning_runs: Design | None = None
) -> None:
    """Print the arms, the runs, those that tune, what the seeds would show, what that costs, and
    the warnings."""
    arms = design.arms
    seeds = len(design.seeds)
    varied = design.varied
    varied_names = list(next(iter(varied.values())))
    rows = []
    for name, arm in arms.items():
        values = [str(value) for value in varied[name].values()]
        rows.append((name, *values, str(arm.rollout_size)))
    runs = counted(len(arms) * seeds, "run")
    title = f"{counted(len(arms), 'arm')} x {counted(seeds, 'seed')} = {runs}"
    console.print(make_table(title, ("arm", *varied_names, "responses a step"), rows))
    if design.hold == "rollouts" and "group_size" in varied_names:
        prompts = " ".join(str(arm.prompts_per_rollout) for arm in arms.values())
        console.print(
            f"--hold rollouts: --prompts_per_rollout is {prompts}; --hold prompts keeps it",
            soft_wrap=True,
        )
    if tuning_runs is not None:
        print_tuning(design, tuning_runs, args, console)
    print_power(design, args, console)
    if args.hardware or args.calibrate or args.price or args.show_difference or args.budget:
        print_cost(design, args, console, tuning_runs)
    else:
        console.print(
            "time: --calibrate FOLDER, of a finished run, or --hardware adds it", soft_wrap=True
        )
    for warning in design.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def print_tuning(design: Design, runs: Design, args: SweepOptions, console: Console) -> None:
    """Print what is tuned, by how many runs and questions, and the number of all runs."""
    grid = tuning.read_grid(args.tune)
    values = " x ".join(f"{counted(len(tried), 'value')} of {name}" for name, tried in grid.items())
    tune_seeds = counted(len(runs.seeds), "seed")
    number = len(runs.arms) * len(runs.seeds)
    tuned = len(tuning.tuned_arms(design.arms))
    in_all = number + len(design.arms) * len(design.seeds)
    questions = len(held_out_problems(next(iter(runs.arms.values()))))
    console.print(
        f"tuning first: {counted(tuned, 'arm')} x {values} x {tune_seeds} ="
        f" {counted(number, 'run')}, by {counted(questions, 'validation question')} that no verdict"
        f" asks; {counted(in_all, 'run')} in all",
        soft_wrap=True,
    )


def held_out_problems(arm: RLArgs, max_problems: int | None = None) -> list[Problem]:
    """The questions of an arm's evaluation, or up to another number of them (0: all)."""
    most = arm.max_problems if max_problems is None else max_problems
    task = find_task(arm.task, arm.data)
    return task.test_problems(arm.dataset_path, most, arm.eval_split, arm.validation_share)


def print_power(design: Design, args: SweepOptions, console: Console) -> None:
    """Print the smallest differences that the seeds would show, and whether they could show a
    tie."""
    seeds = len(design.seeds)
    arm = next(iter(design.arms.values()))
    questions = len(held_out_problems(arm))
    looks = range(seeds, seeds + count_looks(seeds, args))
    if not any(table.family for table in compared_sides(design).values()):
        console.print("there are no two arms of a task to compare", soft_wrap=True)
        return
    if looks[-1] < 2:
        console.print(
            "what a difference would have to be to be seen cannot be told with one seed; the runs"
            " are for a look, not for a verdict",
            soft_wrap=True,
        )
        return
    of_what = ""
    if args.measure != "accuracy" or arm.eval_samples > 1:
        # of no other measure is it known how it varies before its runs are there
        of_what = " (the accuracy of one answer to each)"
    until = ""
    if len(looks) > 1:
        until = f", added until they decide, up to {looks[-1]},"
    console.print(
        f"{counted(seeds, 'seed')}{until} and {counted(questions, 'question')}{of_what}, a standard"
        f" deviation of {SEED_STD} between seeds:",
        soft_wrap=True,
    )
    for sides, power in powers(design, looks, questions).items():
        console.print(power_line(sides, power, design.tie), soft_wrap=True)


def power_line(sides: str, power: Power, tie: float) -> str:
    """What seeds and questions would show of a difference of two sides, and of a tie."""
    if power.difference > 1:
        return f"- so few cannot show any difference of {sides}: accuracies differ by 1 at most"
    return (
        f"- smallest difference of {sides} that they would show with a chance of 80 %:"
        f" {power.difference:.3f}; equal ones would be called a tie within {tie:g} with a chance"
        f" of {power.tie:.0%}"
    )


def powers(design: Design, looks: range, questions: int) -> dict[str, Power]:
    """The power of a verdict on so many questions, by the two sides that it compares. `looks` are
    the numbers of seeds after which verdicts are made."""
    from alignment.ablation.statistics import PlannedContrast, power
    from alignment.core.power import score_std

    std = score_std(SEED_STD, questions)
    power_of_sides = {}
    for sides, table in compared_sides(design).items():
        planned = PlannedContrast(
            table.weights_A, table.family, looks, std, design.tie, alpha=table.alpha
        )
        power_of_sides[sides] = power(planned)
    return power_of_sides


class ComparedSides(NamedTuple):
    """A table of contrasts that are alike: the weights of the arms in the first one, which stands
    for all, their number, and the chance of a false verdict that all looks share."""

    weights_A: list[float]
    family: int
    alpha: float


def compared_sides(design: Design) -> dict[str, ComparedSides]:
    """The tables of verdicts of a design, by the two sides that each compares; of several tasks
    the largest one."""
    from alignment.ablation.verdicts import (
        OF_QUESTION,
        WITH_CONTROL,
        arms_of_tasks,
        factor_contrasts,
        tables_of_pairs,
    )

    arms = [arm for arm in design.arms if not is_control(arm)]
    # by the sides: the arms that the pairs are judged by, and the pairs
    tables: dict[str, tuple[Sequence[str], Sequence[Contrast]]] = {}
    for name, contrasts in factor_contrasts(design.varied).items():
        tables[f"two values of {name}"] = (arms, contrasts)
    tasks = arms_of_tasks(design.varied)
    if not tables:
        two_arms = "two arms of a task" if len(tasks) > 1 else "two arms"
        for arms_of_task in tasks:
            for table in tables_of_pairs(arms_of_task):
                sides = {OF_QUESTION: two_arms, WITH_CONTROL: CONTROL_SIDES}[table.name]
                if sides not in tables or len(table.contrasts) > len(tables[sides][1]):
                    tables[sides] = (table.arms, table.contrasts)
    if not tables:  # no two arms of a task
        tables["two arms"] = (arms, ())
    alpha = ALPHA / len(tasks)
    sides_compared = {}
    for sides, (judged_by, contrasts) in tables.items():
        weights_A: list[float] = []
        if contrasts:
            weights_A = [contrasts[0].weights.get(arm, 0.0) for arm in judged_by]
        sides_compared[sides] = ComparedSides(weights_A, len(contrasts), alpha)
    return sides_compared


@dataclasses.dataclass(frozen=True)
class SeedCost:
    """What one seed of some arms takes, in GPU-hours, each an array of the least and the most."""

    gpu_hours: np.ndarray
    evaluations: np.ndarray
    """The part of it that evaluations of the arms' task take."""
    further_evaluations: np.ndarray
    """The part of it that evaluations of --eval_tasks take."""
    questions: int
    """The number of questions that an evaluation of the task asks."""
    samples: int
    """The number of answers that are sampled to each."""

    def scaled(self, seeds: int, questions: float) -> tuple[float, float]:
        """The least and the most GPU-hours of so many seeds whose evaluations ask so many
        questions."""
        added_share = questions / self.questions - 1
        least, most = seeds * (self.gpu_hours + added_share * self.evaluations)
        return float(least), float(most)

    def of_answers(self, seeds: int, answers: int) -> float:
        """The most GPU-hours of so many seeds whose evaluations sample so many answers."""
        return self.scaled(seeds, answers / self.samples)[1]

    def tuning(self) -> SeedCost:
        """The same of runs that tune, which are not evaluated on --eval_tasks."""
        without = self.gpu_hours - self.further_evaluations
        return dataclasses.replace(self, gpu_hours=without)


def sum_costs(costs: Sequence[SeedCost]) -> SeedCost:
    """The cost of a seed of several arms, which are evaluated on the same questions."""
    import numpy as np

    parts = {}
    for name in ("gpu_hours", "evaluations", "further_evaluations"):
        parts[name] = np.sum([getattr(cost, name) for cost in costs], axis=0)
    return dataclasses.replace(costs[0], **parts)


@dataclasses.dataclass(frozen=True)
class Size:
    """Numbers of seeds and questions, the smallest difference that they show, and the GPU-hours
    that they take, the least and the most."""

    seeds: int
    questions: int
    difference: float
    gpu_hours: tuple[float, float]

    def describe(self, price: float) -> str:
        """The size in words, with the dollars where an hour has a price."""
        from alignment.builders.prediction import span

        dollars = ""
        if price > 0:
            least, most = self.gpu_hours
            dollars = f" ({span((price * least, price * most))} dollars)"
        shown = "show no difference"
        if self.difference <= 1:  # accuracies differ by 1 at most
            shown = f"show {self.difference:.3f}"
        return (
            f"{counted(self.seeds, 'seed')} and {counted(self.questions, 'question')} {shown} for"
            f" {span(self.gpu_hours)} GPU-hours{dollars}"
        )


def size_of(design: Design, cost: SeedCost, seeds: int, questions: int) -> Size:
    """The `Size` of a design with other numbers of seeds and questions."""
    power_of_sides = powers(design, range(seeds, seeds + 1), questions)
    if len(power_of_sides) > 1:
        power_of_sides.pop(CONTROL_SIDES, None)  # a design is as large as its question needs
    difference = max(power.difference for power in power_of_sides.values())
    return Size(seeds, questions, difference, cost.scaled(seeds, questions))


def print_cost(
    design: Design, args: SweepOptions, console: Console, tuning_runs: Design | None = None
) -> None:
    """Print what every arm takes, what numbers of seeds show for what, what tuning takes before,
    and the cheapest design with --show_difference."""
    from alignment.builders.prediction import span

    costs = print_seed_costs(design, args, console)
    cost = sum_costs(list(costs.values()))
    arm = next(iter(design.arms.values()))
    questions = len(held_out_problems(arm))
    if tuning_runs is not None:
        # A tuning run takes what a run of its arm takes, but for its evaluations.
        tuned = tuning.tuned_arms(design.arms)
        of_tuned = sum_costs([costs[name] for name in tuned]).tuning()
        seeds = len(tuning_runs.seeds) * len(tuning_runs.arms) // len(tuned)
        asked = len(held_out_problems(next(iter(tuning_runs.arms.values()))))
        console.print(f"tuning before: {span(of_tuned.scaled(seeds, asked))} GPU-hours")
    seeds = max(2, len(design.seeds))
    sizes = [size_of(design, cost, number, questions) for number in (seeds, 2 * seeds)]
    console.print("; ".join(size.describe(args.price) for size in sizes), soft_wrap=True)
    if args.budget:
        print_splits(design, cost, args, console)
    if args.show_difference:
        all_questions = len(held_out_problems(arm, 0))
        numbers = {questions, *(all_questions >> halvings for halvings in range(4))} - {0}
        cheapest = cheapest_size(design, cost, numbers, args.show_difference)
        words = f"no design of up to {MOST_SEEDS} seeds does"
        if cheapest is not None:
            words = cheapest.describe(args.price)
        console.print(
            f"cheapest that shows {args.show_difference:g}: {words}",
            soft_wrap=True,
        )


def print_splits(design: Design, cost: SeedCost, args: SweepOptions, console: Console) -> None:
    """Print how --budget is best split among seeds, questions and samples, as a table of the best
    split and its neighbours. Raises `UserError` where it does not pay two seeds."""
    from alignment.ablation.budget import ASSUMED, Budget, components_of_study, shown_splits, splits
    from alignment.ablation.study import read_study

    components = ASSUMED
    source = "assumed"
    if args.pilot:
        components = components_of_study(read_study([Path(args.pilot)]), args.pilot)
        source = f"of {args.pilot}"
    all_questions = len(held_out_problems(next(iter(design.arms.values())), 0))
    budget = Budget(args.budget, all_questions, cost.of_answers)
    for sides, table in compared_sides(design).items():
        found = splits(budget, components, table.weights_A, table.family, MOST_SEEDS, table.alpha)
        if not found:
            raise UserError(
                f"--budget {args.budget:g}: two seeds of every arm take"
                f" {budget.cost(2, 2):.3g} GPU-hours; give more"
            )
        best = min(found, key=lambda split: split.difference)
        rows = []
        for split in shown_splits(found):
            mark = " (best)" if split == best else ""
            numbers = (split.seeds, split.questions, split.samples)
            rows.append((*map(str, numbers), f"{split.difference:.3f}{mark}", f"{split.cost:.3g}"))
        title = f"--budget {args.budget:g}: smallest difference of {sides} shown in 80 %"
        columns = ("seeds", "questions", "samples a question", "difference", "GPU-hours at most")
        console.print(make_table(title, columns, rows))
    console.print(f"by {components.describe()}, {source}", soft_wrap=True)


def print_seed_costs(design: Design, args: SweepOptions, console: Console) -> dict[str, SeedCost]:
    """Print the GPU-hours of a seed of every arm, and return them by arm. Raises `UserError` for
    unknown hardware."""
    hardware = hardware_of(args.hardware)
    import numpy as np

    from alignment.builders.prediction import (
        calibrate,
        duration,
        evaluated_rows,
        planned_machines,
        predict,
        span,
    )

    machines = planned_machines(hardware)
    predictions = {name: predict(arm, machines) for name, arm in design.arms.items()}
    first = next(iter(predictions.values()))
    known = calibrate(args.calibrate, first.step.itemsize, machines)
    costs = {}
    for name, arm in design.arms.items():
        prediction = predictions[name]
        hours = duration(prediction, hardware, known)
        console.print(f"- {name}: {span(hours.gpu_hours)} GPU-hours a seed", soft_wrap=True)
        questions = len(held_out_problems(arm))
        of_task = evaluated_rows(dataclasses.replace(arm, eval_tasks=()), questions).prompts
        share = min(1.0, of_task / prediction.step.sampled["evaluation"].prompts)
        evaluations = np.array(hours.evaluations_gpu_hours)
        costs[name] = SeedCost(
            np.array(hours.gpu_hours),
            share * evaluations,
            (1 - share) * evaluations,
            questions,
            arm.eval_samples,
        )
    return costs


def cheapest_size(
    design: Design, cost: SeedCost, numbers: Iterable[int], difference: float
) -> Size | None:
    """The size of at most `MOST_SEEDS` seeds, on one of these numbers of questions, that shows the
    difference for the fewest GPU-hours at most; None where none does."""
    sufficient = []
    for questions in numbers:
        # more seeds than the first number that suffices only cost more
        for seeds in range(2, MOST_SEEDS + 1):
            size = size_of(design, cost, seeds, questions)
            if size.difference <= difference:
                sufficient.append(size)
                break
    return min(sufficient, key=lambda size: size.gpu_hours[1], default=None)


def train(
    design: Design, executor: schedule.Executor, args: SweepOptions, console: Console
) -> None:
    """Train all runs, and write the report. Raises `UserError` where runs have failed."""
    from alignment.ablation.report import report
    from alignment.ablation.study import read_study
    from alignment.ablation.verdicts import decide_question

    states: list[schedule.State] = []
    added: list[schedule.State] = []
    for seed in design.seeds:
        added += [schedule.State(arm, seed) for arm in design.arms]
    schedule.warm_up(design, executor, args.output_dir, console)
    while added:
        states += added
        schedule.run_all(design, executor, states, console)
        added = []
        if args.until_decided:
            comparisons = decide_question(read_study([design.folder]), args.question)
            added = schedule.next_runs(states, comparisons, args.max_seeds)
        if added:
            names = ", ".join(state.name for state in added)
            console.print(f"undecided: adding {names}", markup=False, soft_wrap=True)
    # Noted first: a report that is cut short may have been read.
    schedule.note_report(design.folder, [state.seed for state in states])
    report(read_study([design.folder]), design.folder, console)
    failures = [state for state in states if state.status == "failed"]
    if failures:
        failed = [f"{state.name} ({state.reason or state.note})" for state in failures]
        raise UserError(
            f"{len(failed)} of {counted(len(states), 'run')} failed and are missing from the"
            f" verdicts: {', '.join(failed)}"
        )


if __name__ == "__main__":
    run_command(main)
