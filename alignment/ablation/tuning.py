"""Tuning of arms: each arm of a sweep tries the same values with the same seeds, and takes the one
with the best validation accuracy. No verdict sees these runs, seeds or questions. Nothing here
loads scipy."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.ablation.design import (
    CONTROL,
    SEED_STD,
    Design,
    are_evaluated_alike,
    given_value,
    is_control,
    label_of,
    refuse_idle_arguments,
    run_folders,
    with_settings,
)
from alignment.args import RLArgs
from alignment.config.flag import flags_of_class
from alignment.config.settings import flag_values
from alignment.system.errors import UserError
from alignment.system.files import read_json, write_json

FOLDER = "tuning"  # of the tuning runs, in the sweep's folder
FILE = "tuning.json"  # in the sweep's folder
OF_EVALUATION = {
    "sampling_temperature": "eval_temperature",
    "sampling_top_p": "eval_top_p",
    "sampling_top_k": "eval_top_k",
    "max_new_tokens": "eval_max_new_tokens",
    "reward": "eval_rule",
}
"""Arguments of training that evaluations take too -> the evaluations' own, which go before."""


@dataclass(frozen=True)
class Candidate:
    """Values of the tuned arguments that an arm tried, with its validation accuracy by seed.
    `failed` are the seeds whose runs did not finish."""

    values: Mapping[str, Any]
    accuracies: Mapping[int, float]
    failed: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """The mean accuracy over seeds; NaN without a finished run."""
        if not self.accuracies:
            return math.nan
        return statistics.fmean(self.accuracies.values())

    @property
    def words(self) -> str:
        """The values, as a sentence has them."""
        return ", ".join(f"{name} {value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Choice:
    """The candidates that an arm tried, in order, and the place of the one that it took."""

    candidates: tuple[Candidate, ...]
    chosen: int

    @property
    def candidate(self) -> Candidate:
        return self.candidates[self.chosen]

    def edges(self) -> dict[str, Any]:
        """By argument, the next value beyond the grid, where the arm took the least or the largest
        of several numbers: its best may lie beyond."""
        beyond: dict[str, Any] = {}
        for name, value in self.candidate.values.items():
            tried = [candidate.values[name] for candidate in self.candidates]
            following = next_value(tried, value)
            if following is not None:
                following = within_bounds(name, value, following)
            if following is not None:
                beyond[name] = following
        return beyond


@dataclass(frozen=True)
class Tuning:
    """What the arms of a sweep tried and took, by arm; the seeds, the number of validation
    questions, what all tuning runs took together (runs, steps, sampled tokens and seconds), and the
    measure that arms chose by, whose values candidates have as accuracies."""

    choices: Mapping[str, Choice]
    seeds: tuple[int, ...]
    questions: int
    amounts: Mapping[str, float]
    measure: str = "accuracy"

    @property
    def names(self) -> tuple[str, ...]:
        """The tuned arguments."""
        first = next(iter(self.choices.values()))
        return tuple(first.candidate.values)

    @property
    def are_words(self) -> bool:
        """Whether a tuned argument has values that are no numbers."""
        tried: list[Any] = []
        for choice in self.choices.values():
            for candidate in choice.candidates:
                tried += candidate.values.values()
        return not all(map(_is_number, tried))

    def most_lost(self, alpha: float) -> dict[str, float]:
        """By arm, the most of `measure` that it may have lost by taking another value than its
        grid's best. With a chance of `alpha` at most, an arm has lost more. Infinite where a value
        has a run that did not finish, of which nothing is known.

        The bound is the largest, over the values that an arm did not take, of the difference to the
        one that it took plus z standard errors, or 0 (z by Bonferroni's
        correction for all values and arms). The variance of a run's accuracy is that
        between seeds of one value, of all arms together, or if this is larger, that of answers to
        so many questions plus SEED_STD squared."""
        variance = self._variance_of_run()
        lost = {}
        for arm, choice in self.choices.items():
            others = []
            for place, candidate in enumerate(choice.candidates):
                if place != choice.chosen:
                    others.append(candidate.mean - choice.candidate.mean)
            lost[arm] = 0.0
            if any(candidate.failed for candidate in choice.candidates):
                lost[arm] = math.inf
            elif others:
                level = alpha / (len(self.choices) * len(others))
                error = math.sqrt(2 * variance / len(self.seeds))
                z = statistics.NormalDist().inv_cdf(1 - level)
                lost[arm] = max(0.0, max(others) + z * error)
        return lost

    def _variance_of_run(self) -> float:
        """The variance of a tuning run's accuracy, as `most_lost` has it."""
        between_seeds = []
        by_answers = 0.0
        for choice in self.choices.values():
            mean = choice.candidate.mean
            by_answers = max(by_answers, mean * (1 - mean) / max(1, self.questions))
            for candidate in choice.candidates:
                if len(candidate.accuracies) > 1:
                    between_seeds.append(statistics.variance(candidate.accuracies.values()))
        pooled = statistics.fmean(between_seeds) if between_seeds else 0.0
        return max(pooled, by_answers + SEED_STD**2)

    def edge_warnings(self) -> list[str]:
        """A warning for each arm that took a value at the edge of its grid."""
        warnings = []
        for arm, choice in self.choices.items():
            for name, following in choice.edges().items():
                value = choice.candidate.values[name]
                warnings.append(
                    f"{arm}: its best {name}, {value}, is at the edge of the values that it tried,"
                    f" so it may not be tuned: try {following} too"
                )
        return warnings


def next_value(tried: Sequence[Any], value: Any) -> float | int | None:
    """The next number beyond the edge of the values that were tried, at the distance of its
    neighbour: by the same factor where all are positive, else by the same step. None where the
    value is no edge, is no number, or is the only one."""
    numbers = sorted(set(tried)) if all(map(_is_number, tried)) else []
    if len(numbers) < 2 or value not in (numbers[0], numbers[-1]):
        return None
    neighbour = numbers[1] if value == numbers[0] else numbers[-2]
    following = 2 * value - neighbour
    if numbers[0] > 0:
        following = value * (value / neighbour)
    if all(isinstance(number, int) for number in numbers):
        following = round(following)
        return following if following != value else None
    return float(f"{following:.3g}")


def within_bounds(name: str, value: float, following: float) -> float | None:
    """The next value of an argument, or its bound where it lies between; None where the value
    itself is the bound."""
    facts = flags_of_class(RLArgs).get(name)  # a setting of a loss, say, has none
    if facts is None or facts.admits(following):
        return following
    for limit in (facts.at_least, facts.at_most):
        if limit is not None and (value - limit) * (following - limit) < 0:
            return type(value)(limit)
    for limit in (facts.above, facts.below):
        is_beyond = limit is not None and (value - limit) * (following - limit) <= 0
        if limit is not None and is_beyond and isinstance(value, float):
            return float(f"{(value + limit) / 2:.3g}")
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_grid(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values of each argument in `words`, FIELD=v1,v2,... each. Raises `UserError` for an
    unknown argument, a bad value, and a single one."""
    grid: dict[str, tuple[Any, ...]] = {}
    for word in words:
        name, _, text = word.partition("=")
        texts = [part for part in text.split(",") if part]
        values = tuple(dict.fromkeys(given_value(name, part, "--tune ") for part in texts))
        if len(values) < 2 or name in grid:
            raise UserError(
                f"--tune {word}: give an argument once, with two values or more, such as"
                " learning_rate=1e-5,3e-5,1e-4"
            )
        grid[name] = values
    return grid


def tuned_arms(arms: Mapping[str, RLArgs]) -> dict[str, RLArgs]:
    """The arms that are tuned: all but the controls, which take the values of the first arm."""
    return {name: arm for name, arm in arms.items() if not is_control(name)}


def tuning_design(design: Design, grid: Mapping[str, tuple], seeds: Sequence[int]) -> Design:
    """The runs that tune the arms of a design: every tuned arm with every combination of the
    grid's values, evaluated on the validation split. Raises `UserError` where arms differ in a
    tuned argument, lack it or cannot work with a value, where a value changes an evaluation, and
    where all arms are controls."""
    if not tuned_arms(design.arms):
        raise UserError(
            f"--tune: the names of all arms begin with {CONTROL}, and controls are not tuned:"
            " rename the arms that are none"
        )
    arms: dict[str, RLArgs] = {}
    folder = design.folder / FOLDER
    for name in grid:
        _refuse_varied(design, name)
    for arm, args in tuned_arms(design.arms).items():
        _refuse_chosen_evaluations(args, grid)
        for candidate in _candidates(grid):
            own = with_settings(args, candidate)
            facts = flag_values(own)
            missing = [name for name in candidate if name not in facts]
            if missing:
                raise UserError(f"--tune {missing[0]}: arm {arm} has no such setting")
            name = _run_name(arm, candidate)
            if name in arms:
                raise UserError(f"--tune: two tuning runs would be called {name}; rename an arm")
            arms[name] = dataclasses.replace(
                own, output_dir=str(folder), eval_split="validation", eval_tasks=()
            )
    refuse_idle_arguments(grid, grid, arms.values(), "--tune: ")
    return Design(
        folder,
        arms,
        tuple(seeds),
        design.hold,
        design.tie,
        design.alpha,
        warnings=(),
        # One value with which responses become short would end every other curve where it ends.
        match="steps",
        measure=measure_of_choice(design.measure),
    )


def measure_of_choice(measure: str) -> str:
    """What arms choose by: the measure of the verdicts where more of it is better, else
    accuracy."""
    kind = measure.partition("@")[0]
    return "accuracy" if kind in ("tokens_to", "entropy") else measure


def _candidates(grid: Mapping[str, tuple]) -> list[dict[str, Any]]:
    """Every combination of the grid's values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _run_name(arm: str, candidate: Mapping[str, Any]) -> str:
    """The name of an arm with a candidate's values."""
    return "_".join([arm, *(label_of(name, value) for name, value in candidate.items())])


def runs_of_arm(arm: str, grid: Mapping[str, tuple]) -> list[str]:
    """The names of the runs of `tuning_design` among which an arm chooses."""
    return [_run_name(arm, candidate) for candidate in _candidates(grid)]


def _refuse_varied(design: Design, name: str) -> None:
    """Raise `UserError` where the tuned arms differ in an argument, which then is no arm's to
    choose."""
    values = {str(flag_values(arm).get(name)) for arm in tuned_arms(design.arms).values()}
    if len(values) > 1:
        raise UserError(
            f"--tune {name}: the arms differ in it, so none of them may choose it; leave out one"
        )


def _refuse_chosen_evaluations(arm: RLArgs, grid: Mapping[str, tuple]) -> None:
    """Raise `UserError` where a value of the grid changes what evaluations of an arm ask, or how
    they sample and score: each arm would choose the evaluation that suits it."""
    [first, *_] = _candidates(grid)
    of_first = with_settings(arm, first)
    for name, values in grid.items():
        for value in values:
            if not are_evaluated_alike(of_first, with_settings(arm, {**first, name: value})):
                raise UserError(
                    f"--tune {name}: it changes how an arm is evaluated, and each arm would choose"
                    f" the evaluation that suits it; {_remedy(name)}"
                )


def _remedy(name: str) -> str:
    """What to do about a tuned argument that changes evaluations."""
    if name in OF_EVALUATION:
        return f"give --{OF_EVALUATION[name]} one value, so that {name} is of training alone"
    return f"give --{name} one value"


def refuse_shared_seeds(
    tune_seeds: Sequence[int], seeds: Sequence[int], max_seeds: int, folder: Path
) -> None:
    """Raise `UserError` where a seed that tunes is one of the verdicts', or may become one by
    --until_decided, in this command or in earlier ones of the sweep's folder."""
    reached = set(seeds) | set(range(max(seeds) + 1, max(seeds) + 1 + max_seeds))
    shared = sorted((reached | seeds_of_folder(folder)) & set(tune_seeds))
    if shared:
        raise UserError(
            f"--tune_seeds {shared[0]}: a verdict may use this seed, so its runs must not choose a"
            " value; give others"
        )
    shared = sorted(reached & seeds_of_folder(folder / FOLDER))
    if shared:
        raise UserError(
            f"--seed {shared[0]}: runs with this seed chose values before ({folder / FOLDER}), so"
            " no verdict may use it; give others, or another --run_name"
        )


def seeds_of_folder(folder: Path) -> set[int]:
    """The seeds of a sweep's earlier commands, those that --until_decided added included; none
    where there is no sweep yet."""
    file = folder / "sweep.json"
    seeds = set(read_json(file).get("seeds", ())) if file.exists() else set()
    return seeds.union(seed for _, _, seed in run_folders(folder))


def choose(
    arms: Mapping[str, RLArgs],
    grid: Mapping[str, tuple],
    accuracies: Mapping[str, Mapping[int, float]],
    seeds: Sequence[int],
) -> dict[str, Choice]:
    """For each tuned arm the candidate with the best mean accuracy over these seeds, the first of
    equal ones. `accuracies` are those of the finished runs, by the names of `tuning_design` and
    seed. A candidate with a run that did not finish is not taken. Raises `UserError` where an arm
    has no other."""
    choices = {}
    for arm in tuned_arms(arms):
        candidates = []
        for values in _candidates(grid):
            of_all_seeds = accuracies.get(_run_name(arm, values), {})
            # The folder may have seeds of earlier commands too.
            by_seed = {seed: of_all_seeds[seed] for seed in seeds if seed in of_all_seeds}
            failed = tuple(seed for seed in seeds if seed not in by_seed)
            candidates.append(Candidate(values, by_seed, failed))
        choice = _best_of(candidates)
        if choice is None:
            raise UserError(
                f"--tune: arm {arm} has no value with which all runs finished, so it cannot choose"
            )
        choices[arm] = choice
    return choices


def _best_of(candidates: Sequence[Candidate]) -> Choice | None:
    """The choice of the candidate with the best mean, the first of equal ones, of those whose runs
    have all finished; None where there is no such one."""
    complete = [place for place, one in enumerate(candidates) if not one.failed]
    if not complete:
        return None
    # `max` takes the first of equal ones
    best = max(complete, key=lambda place: candidates[place].mean)
    return Choice(tuple(candidates), best)


def with_choices(design: Design, choices: Mapping[str, Choice]) -> Design:
    """The design with every arm's values. A control takes the first arm's, but for an argument in
    which it differs from that arm by its nature."""
    first_name, first_choice = next(iter(choices.items()))
    first = flag_values(design.arms[first_name])
    arms = {}
    for name, arm in design.arms.items():
        values = dict(choices.get(name, first_choice).candidate.values)
        if name not in choices:
            own = flag_values(arm)
            values = {key: value for key, value in values.items() if own.get(key) == first.get(key)}
        arms[name] = with_settings(arm, values)
    names = tuple(first_choice.candidate.values)
    return dataclasses.replace(design, arms=arms, tuned=names)


def write_tuning(folder: Path, tuning: Tuning) -> None:
    """Write tuning.json."""
    arms = {}
    for arm, choice in tuning.choices.items():
        candidates = []
        for candidate in choice.candidates:
            by_seed = {str(seed): value for seed, value in candidate.accuracies.items()}
            failed = list(candidate.failed)
            candidates.append({"values": candidate.values, "accuracies": by_seed, "failed": failed})
        arms[arm] = {"candidates": candidates, "chosen": choice.chosen}
    content = {
        "seeds": list(tuning.seeds),
        "questions": tuning.questions,
        "measure": tuning.measure,
        "amounts": dict(tuning.amounts),
        "arms": arms,
    }
    write_json(folder / FILE, content)


def read_tuning(folder: Path) -> Tuning | None:
    """The tuning of a sweep's folder; None where it has none. Raises `UserError` where the file is
    damaged."""
    if not (folder / FILE).exists():
        return None
    content = read_json(folder / FILE)
    # An older version kept it with the tuning runs alone.
    runs = folder / FOLDER / "sweep.json"
    if "measure" not in content and runs.exists():
        content["measure"] = read_json(runs).get("measure", "accuracy")
    try:
        choices = {arm: _read_choice(facts) for arm, facts in content["arms"].items()}
        return Tuning(
            choices,
            tuple(content["seeds"]),
            int(content["questions"]),
            content["amounts"],
            str(content.get("measure", "accuracy")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{folder / FILE} is damaged: give the sweep's command again") from None


def _read_choice(facts: Mapping[str, Any]) -> Choice:
    candidates = []
    for candidate in facts["candidates"]:
        by_seed = {int(seed): float(value) for seed, value in candidate["accuracies"].items()}
        candidates.append(Candidate(candidate["values"], by_seed, tuple(candidate["failed"])))
    return Choice(tuple(candidates), int(facts["chosen"]))
