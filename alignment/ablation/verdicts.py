"""The comparisons of a study, by arms and by varied arguments, and the parts of a gain. It loads
scipy; `study.py` does not."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from alignment.ablation import statistics
from alignment.ablation.design import (
    implied_settings,
    is_control,
    is_decided_by,
    varied_values,
)
from alignment.ablation.measures import OF_RUNS, RunMeasures, evaluation_values, measure_words
from alignment.ablation.statistics import Comparison, Contrast, Scores, compare
from alignment.ablation.study import Run, Study, read_measure
from alignment.core.records import Problem
from alignment.data.questions import question_text
from alignment.data.tasks import TASKS
from alignment.system.errors import UserError


def budget(study: Study, arms: Iterable[str]) -> float:
    """How much of what `study.match` names all runs of these arms had taken by their last
    evaluations; infinite for steps, of which each run counts its own."""
    if study.match == "steps":
        return math.inf
    return min(_amounts_taken(study, arms, study.match), default=math.inf)


def _amounts_taken(study: Study, arms: Iterable[str], match: str) -> list[float]:
    """What each run of these arms had taken by its last evaluation, in the unit of `match`."""
    amounts = []
    for run in _runs_of(study, arms):
        [amount] = run.amounts_until(match, run.evals[-1:])
        amounts.append(float(amount))
    return amounts


def arms_of_tasks(varied: Mapping[str, Mapping[str, object]]) -> list[list[str]]:
    """The arms of each task, whose runs answer the same questions, by the arguments in which arms
    differ."""
    arms_of_task: dict[str, list[str]] = {}
    for arm, values in varied.items():
        arms_of_task.setdefault(str(values.get("task", "")), []).append(arm)
    return list(arms_of_task.values())


def alpha_of_table(study: Study) -> float:
    """The chance that a table of pairs has any false verdict: all tasks share that of a look."""
    return study.alpha / max(1, len(arms_of_tasks(study.varied)))


def arms_together(study: Study) -> dict[str, list[str]]:
    """By arm, those with which it shares a `budget` where it is shown alone: those of its task that
    answer the sweep's question, for a control all of its task."""
    together = {}
    for arms in arms_of_tasks(study.varied):
        compared = [arm for arm in arms if not is_control(arm)]
        for arm in arms:
            together[arm] = arms if is_control(arm) else compared
    return together


UNITS = {
    "samples": "sampled responses",
    "tokens": "sampled tokens",
    "seconds": "seconds of steps",
}


class Outcome(NamedTuple):
    """What is compared, as a title, and as part of a sentence."""

    title: str
    description: str


def outcome(study: Study) -> Outcome:
    """What the study compares."""
    if study.match == "steps":
        return Outcome(*measure_words(study.measure))
    description = (
        f"the {study.measure} at {_budget_words(study)}, on straight lines between evaluations"
    )
    return Outcome(f"{study.measure} at equal {study.match}", description)


def _tables_alone(study: Study) -> list[list[str]]:
    """The lists of `arms_together`, each once."""
    tables = {tuple(arms): arms for arms in arms_together(study).values()}
    return list(tables.values())


def _budget_words(study: Study) -> str:
    """The amounts at which arms are compared, and who has reached them: a table of pairs has one
    amount."""
    numbers: dict[str, None] = {}
    for arms in _tables_alone(study):
        if _runs_of(study, arms):
            numbers[f"{budget(study, arms):,.0f}"] = None
    reached = "which all runs of a table" if len(numbers) > 1 else "which all runs"
    return f"{' or '.join(numbers)} {UNITS[study.match]}, {reached} have reached"


def curve(
    run: Run, match: str, most: float, measure: str = "accuracy"
) -> tuple[np.ndarray, np.ndarray]:
    """What the run had taken [E] by its evaluations, in the unit of `match`, and every question's
    value of the measure in them [E, Q]. A curve that goes on ends at `most`, on a straight line
    between the evaluations before and after."""
    amounts_E = run.amounts_until(match, run.evals)
    rewards_EQ = evaluation_values(run, measure)
    end = min(most, amounts_E[-1])
    # Interpolation is linear in the values: what each evaluation weighs is the value at `end` of a
    # line that is 1 there and 0 in all others.
    unit_curves_EE = np.eye(len(amounts_E))
    weights_E = np.array([np.interp(end, amounts_E, unit_E) for unit_E in unit_curves_EE])
    is_before_E = amounts_E < end
    amounts = np.append(amounts_E[is_before_E], end)
    rewards = np.vstack([rewards_EQ[is_before_E], weights_E @ rewards_EQ])
    return amounts, rewards


AREA_POINTS = (np.arange(64) + 0.5) / 64  # of a curve, at which an area's bend is taken


def chord_bends(amounts_E: np.ndarray, values_E: np.ndarray, at_X: np.ndarray) -> np.ndarray:
    """How far the straight lines of the intervals before and after lie above that of the interval
    with each point, [2, X]: 0 at an evaluation, infinite where there is none on one side. A curve
    that bends one way lies between an interval's straight line and those of its neighbours, drawn
    on into it. Before the first evaluation and after the last one the curve is taken for flat."""
    amounts_E, first_E = np.unique(amounts_E, return_index=True)
    values_E = values_E[first_E]
    slopes_I = np.concatenate([[0.0], np.diff(values_E) / np.diff(amounts_E), [0.0]])
    above_2X = np.zeros((2, len(at_X)))
    for place, at in enumerate(at_X):
        right = int(np.searchsorted(amounts_E, at))
        if right < len(amounts_E) and np.isclose(at, amounts_E[right], rtol=1e-9):
            continue
        if right in (0, len(amounts_E)):
            above_2X[:, place] = np.inf
            continue
        before, own, after = slopes_I[right - 1 : right + 2]
        above_2X[0, place] = (before - own) * (at - amounts_E[right - 1])
        above_2X[1, place] = (own - after) * (amounts_E[right] - at)
    return above_2X


def arm_bend(
    runs: Sequence[Run],
    match: str,
    most: float,
    shares_X: np.ndarray,
    measure: str = "accuracy",
) -> tuple[float, float]:
    """The least and the largest amount by which an arm's learning curve lies above the straight
    lines between its evaluations, averaged over the points at these shares of what its runs had
    taken: from the mean over runs of `chord_bends`. Where both neighbours say that the curve bends
    the same way, the smaller one bounds it; where they differ, each bounds one side."""
    above = []
    for run in runs:
        amounts_E = run.amounts_until(match, run.evals)
        end = min(most, float(amounts_E[-1]))
        means_E = evaluation_values(run, measure).mean(axis=1)
        above.append(chord_bends(amounts_E, means_E, end * shares_X))
    mean_2X = np.mean(above, axis=0)
    if np.isinf(mean_2X).any():
        return -math.inf, math.inf
    least_X = mean_2X.min(axis=0)
    largest_X = mean_2X.max(axis=0)
    low_X = np.where(largest_X <= 0, largest_X, np.minimum(least_X, 0.0))
    high_X = np.where(least_X >= 0, least_X, np.maximum(largest_X, 0.0))
    return float(low_X.mean()), float(high_X.mean())


def bends(
    study: Study, arms: Iterable[str], whole_curve: bool = False
) -> dict[str, tuple[float, float]]:
    """For each of these arms with runs the bounds of `arm_bend` at their budget, or of the area
    under the curve up to it; {} for steps, where the last evaluations themselves are compared."""
    if study.match == "steps":
        return {}
    is_area = whole_curve or study.measure == "area"
    shares_X = AREA_POINTS if is_area else np.ones(1)
    arms = list(arms)
    most = budget(study, arms)
    by_arm = {}
    for arm in arms:
        runs = list(study.arms[arm].values())
        if runs:
            by_arm[arm] = arm_bend(runs, study.match, most, shares_X, study.measure)
    return by_arm


def final_scores(study: Study) -> dict[str, Scores]:
    """For each arm and seed, the value [Q] of every question that verdicts are on, where the arm is
    shown alone: at the budget of `arms_together`."""
    together = arms_together(study)
    tables = {tuple(arms): scores_together(study, arms) for arms in _tables_alone(study)}
    return {arm: tables[tuple(together[arm])][arm] for arm in study.arms}


def scores_together(study: Study, arms: Iterable[str]) -> dict[str, Scores]:
    """For each of these arms and seed, the value [Q] of every question that verdicts on them are
    on: of the study's measure, where the run's curve ends, in the last evaluation or at their
    `budget`, or of the whole run."""
    arms = list(arms)
    kind, _ = read_measure(study.measure)
    if kind == "area":
        return areas(study, arms)
    if kind in OF_RUNS:
        tokens = min(_amounts_taken(study, arms, "tokens"), default=0.0)
        given = RunMeasures(study.measure, tokens)
        return _by_arm_and_seed(study, arms, lambda run: OF_RUNS[kind](run, given))
    most = budget(study, arms)

    def final(run: Run) -> np.ndarray:
        _, values_EQ = curve(run, study.match, most, study.measure)
        return values_EQ[-1]

    return _by_arm_and_seed(study, arms, final)


def areas(study: Study, arms: Iterable[str]) -> dict[str, Scores]:
    """For each of these arms and seed, the area [Q] under every question's learning curve up to
    their `budget`."""
    arms = list(arms)
    most = budget(study, arms)

    def area(run: Run) -> np.ndarray:
        amounts_E, rewards_EQ = curve(run, study.match, most, study.measure)
        return statistics.area_under_curve(amounts_E.tolist(), rewards_EQ)

    return _by_arm_and_seed(study, arms, area)


def _by_arm_and_seed(
    study: Study, arms: Iterable[str], score: Callable[[Run], np.ndarray]
) -> dict[str, Scores]:
    """The score [Q] of every run of these arms, by arm and seed. Raises `UserError` where one is
    no number."""
    scores: dict[str, Scores] = {}
    for arm in arms:
        scores[arm] = {seed: score(run) for seed, run in study.arms[arm].items()}
        for seed, scores_Q in scores[arm].items():
            if not np.isfinite(scores_Q).all():
                raise UserError(
                    f"--measure {study.measure}: {study.arms[arm][seed].path} has a value that is"
                    " no number; `report --measure` takes another"
                )
    return scores


def decide(study: Study, whole_curve: bool = False) -> list[Comparison]:
    """A comparison for each pair of arms of a task: of final scores, or of the areas under whole
    learning curves. Pairs with a control are a table of their own (`tables_of_pairs`). Raises
    `UserError` if questions differ."""
    comparisons: list[Comparison] = []
    for arms in arms_of_tasks(study.varied):
        groups = question_groups(_runs_of(study, arms))
        for table in tables_of_pairs(arms):
            score = areas if whole_curve else scores_together
            scores = score(study, table.arms)
            of_table = compare(
                scores,
                study.tie,
                table.contrasts,
                alpha_of_table(study),
                groups,
                bends(study, table.arms, whole_curve),
            )
            if not whole_curve:
                of_table = allow_for_target(study, of_table, scores)
            comparisons += of_table
    return comparisons


class PairTable(NamedTuple):
    """Pairs of arms that share the chance of a false verdict, and the arms that they are judged
    by."""

    name: str
    arms: Sequence[str]
    contrasts: Sequence[Contrast]


OF_QUESTION = "pairs of arms"
WITH_CONTROL = "pairs with a control"


def tables_of_pairs(arms: Sequence[str]) -> list[PairTable]:
    """The pairs of arms in two tables, each with its own chance of a false verdict: those of the
    sweep's question, and those with a control. No control has a part in the first, so that controls
    change no verdict of the question. A table without pairs is left out."""
    compared = [arm for arm in arms if not is_control(arm)]
    of_question = PairTable(OF_QUESTION, compared, statistics.pairs(compared))
    contrasts = [contrast for contrast in statistics.pairs(arms) if has_control(contrast)]
    with_control = PairTable(WITH_CONTROL, arms, contrasts)
    return [table for table in (of_question, with_control) if table.contrasts]


def largest_family(study: Study) -> int:
    """The most comparisons whose p values are corrected together: those of a table of one task, or
    of a varied argument's values."""
    families = list(factor_contrasts(study.varied).values())
    for arms in arms_of_tasks(study.varied):
        families += [list(table.contrasts) for table in tables_of_pairs(arms)]
    return max(map(len, families), default=0)


def has_control(sides: Contrast | Comparison) -> bool:
    """Whether one side is a control arm."""
    return is_control(sides.a) or is_control(sides.b)


def named_tables(pairs: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """The tables of `tables_of_pairs` by name, of their comparisons, in the order of `pairs`."""
    tables: dict[str, list[Comparison]] = {}
    for comparison in pairs:
        name = WITH_CONTROL if has_control(comparison) else OF_QUESTION
        tables.setdefault(name, []).append(comparison)
    return tables


def allow_for_target(
    study: Study, comparisons: Sequence[Comparison], scores: Mapping[str, Scores]
) -> list[Comparison]:
    """The comparisons by tokens until a target accuracy (tokens_to). Where a run does not reach it
    in time, the true difference is larger than the measured one or unknown, so that nothing is
    shown to be small; where all runs begin above it, nothing was measured."""
    kind, target = read_measure(study.measure)
    if kind != "tokens_to":
        return list(comparisons)
    allowed = []
    for comparison in comparisons:
        runs: list[np.ndarray] = []
        for arm in comparison.arms:
            runs += scores[arm].values()
        late = sum(_is_all(scores_Q, 1.0) for scores_Q in runs)
        if runs and all(_is_all(scores_Q, 0.0) for scores_Q in runs):
            reason = f"all runs begin at {target:g} or above"
            comparison = statistics.as_undecided(comparison, reason)
        elif late and (comparison.kind == "tie" or late == len(runs)):
            reason = f"{late} of {len(runs)} runs do not reach {target:g} in time"
            comparison = statistics.as_undecided(comparison, reason)
        elif late:
            comparison = statistics.without_margin(comparison, study.tie)
        allowed.append(comparison)
    return allowed


def _is_all(scores_Q: np.ndarray, value: float) -> bool:
    return bool((scores_Q == value).all())


def censored_words(study: Study) -> str:
    """How many runs do not reach a target accuracy (tokens_to) within the tokens that all runs
    took, and count as if they did with the last of these; "" where all do, and for other
    measures."""
    kind, target = read_measure(study.measure)
    if kind != "tokens_to":
        return ""
    late = []
    for arm, by_seed in final_scores(study).items():
        number = sum(_is_all(scores_Q, 1.0) for scores_Q in by_seed.values())
        if number:
            late.append(f"{number} of {len(by_seed)} of {arm}")
    if not late:
        return ""
    return (
        f"runs that do not reach {target:g} within the tokens that all runs took count as if they"
        f" did with the last of these, so that differences are too small: {', '.join(late)}"
    )


def _runs_of(study: Study, arms: Iterable[str]) -> list[Run]:
    """The runs of these arms."""
    runs: list[Run] = []
    for arm in arms:
        runs += study.arms[arm].values()
    return runs


def question_groups(runs: Iterable[Run]) -> list[str] | None:
    """The key of every question that the runs were evaluated on (`Task.key`); None where no two are
    equal, as of all runs whose evaluations ask a question once. Raises `UserError` where the runs
    were evaluated on different questions."""
    runs_by_questions = list({run.scores.texts: run for run in runs}.values())
    if not runs_by_questions:
        return None
    run, *others = runs_by_questions
    if others:
        raise UserError(
            f"{run.path} and {others[0].path} were evaluated on different questions, so they cannot"
            " be compared: give runs of the same"
        )
    task = TASKS.get(str(run.args.get("task")))
    # a task of the user's own is not imported for a report
    key = task.key if task else question_text
    keys = []
    for name, text in zip(run.scores.questions, run.scores.texts, strict=True):
        question = Problem(name, text, prompt="", ground_truth="")
        keys.append(key(question))
    has_repetition = len(set(keys)) < len(keys)
    return keys if has_repetition else None


def over_tasks(study: Study) -> dict[str, float]:
    """The interquartile mean of final accuracy over tasks and seeds, by the other varied arguments;
    {} for a single task."""
    every_name = next(iter(study.varied.values()), {})
    if "task" not in every_name:
        return {}
    pooled: dict[str, list[float]] = {}
    # What each task has of its own, as its warm start, keeps no arms of several tasks apart.
    follow = {name for name in every_name if is_decided_by("task", name, study.varied)}
    names = [name for name in every_name if name not in follow | {"task"}]
    for arm, by_seed in final_scores(study).items():
        others = ", ".join(_level(name, study.varied[arm][name]) for name in names) or "all arms"
        accuracies = [float(scores.mean()) for scores in by_seed.values()]
        pooled.setdefault(others, []).extend(accuracies)
    means = {}
    for arm, values in pooled.items():
        if values:
            means[arm] = statistics.interquartile_mean(values)
    return means


def factor_contrasts(varied: Mapping[str, Mapping[str, object]]) -> dict[str, list[Contrast]]:
    """For each varied argument the contrasts of its values; {} unless the arms, but controls, form
    a full grid of one task."""
    arms = {arm: values for arm, values in varied.items() if not is_control(arm)}
    names = choices(arms)
    # by argument: its levels, each with the arms that have it
    factors: dict[str, dict[str, list[str]]] = {}
    combinations_of_levels = set()
    for arm, values in arms.items():
        levels = tuple(_level(name, values[name]) for name in names)
        combinations_of_levels.add(levels)
        for name, level in zip(names, levels, strict=True):
            factors.setdefault(name, {}).setdefault(level, []).append(arm)
    cells = math.prod(len(arms_of_level) for arms_of_level in factors.values())
    is_full_grid = len(combinations_of_levels) == len(arms) == cells
    if len(names) < 2 or not is_full_grid or "task" in names:
        return {}
    return {name: _level_contrasts(arms_of_level) for name, arms_of_level in factors.items()}


def _level_contrasts(arms_of_level: Mapping[str, Sequence[str]]) -> list[Contrast]:
    """The contrast of every two levels of an argument, each level by the mean of its arms."""
    contrasts = []
    for a, b in combinations(arms_of_level, 2):
        side_a = dict.fromkeys(arms_of_level[a], 1 / len(arms_of_level[a]))
        side_b = dict.fromkeys(arms_of_level[b], -1 / len(arms_of_level[b]))
        contrasts.append(Contrast(a, b, side_a | side_b))
    return contrasts


def decide_factors(study: Study) -> dict[str, list[Comparison]]:
    """Comparisons of each varied argument's values (`factor_contrasts`); {} where an arm has no
    run."""
    factors = factor_contrasts(study.varied)
    arms = [arm for arm in study.arms if not is_control(arm)]
    if not factors or not all(study.arms[arm] for arm in arms):
        return {}
    scores = scores_together(study, arms)
    groups = question_groups(_runs_of(study, arms))
    arm_bends = bends(study, arms)
    comparisons = {}
    for name, contrasts in factors.items():
        of_factor = compare(scores, study.tie, contrasts, study.alpha, groups, arm_bends)
        comparisons[name] = allow_for_target(study, of_factor, scores)
    return comparisons


def decide_question(study: Study, question: Sequence[str]) -> list[Comparison]:
    """The comparisons that answer `question`: all pairs of arms if it is empty, an argument's
    values, or two arms or values."""
    factors = decide_factors(study)
    if len(question) < 2:
        return factors.get("".join(question)) or decide(study)
    comparisons = decide(study)
    for of_factor in factors.values():
        comparisons += of_factor
    return [c for c in comparisons if {c.a, c.b} == set(question)]


def refuse_unknown_question(
    varied: Mapping[str, Mapping[str, object]], question: Sequence[str]
) -> None:
    """Raise `UserError` where no comparison of the arms answers `question`."""
    if not question:
        return
    factors = factor_contrasts(varied)
    # Of one varied argument, the pairs of arms are the pairs of its values.
    arguments = list(factors)
    if not arguments and len(choices(varied)) == 1:
        arguments = choices(varied)
    pairs_of_values: list[set[str]] = []
    for contrasts in factors.values():
        pairs_of_values += [{contrast.a, contrast.b} for contrast in contrasts]

    words = set(question)
    if len(question) == 1:
        is_known = question[0] in arguments
    else:
        is_known = words <= set(varied) or words in pairs_of_values
    if is_known and len(words) == len(question):
        return
    names = sorted(set().union(*pairs_of_values, varied))
    answers = f"two of {', '.join(names)}"
    if arguments:
        answers = f"{', '.join(arguments)} or {answers}"
    raise UserError(f"--question {' '.join(question)}: give {answers}")


def choices(varied: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The names of the varied arguments, without the prompts of a step where the group size alone
    decides them, and without the settings of components that differ only as these do."""
    implied = implied_settings(varied)
    # Without an arm, as among controls alone, nothing varies.
    of_first = next(iter(varied_values(varied).values()), {})
    names = [name for name in of_first if name not in implied]
    has_both = {"group_size", "prompts_per_rollout"} <= set(names)
    if has_both and is_decided_by("group_size", "prompts_per_rollout", varied):
        names.remove("prompts_per_rollout")
    return names


def _level(name: str, value: object) -> str:
    """A value of an argument, as a verdict calls it."""
    return value if isinstance(value, str) else f"{name} {value}"


class GainParts(NamedTuple):
    """A gain of accuracy, and the parts of it, which add up."""

    gain: float
    by_format: float
    by_answers: float


def split_of_gain(run: Run, match: str = "steps", most: float = math.inf) -> GainParts:
    """The gain of accuracy from a `curve`'s beginning to its end, split. Accuracy is the format
    rate f times the accuracy c of well-formed responses; the parts are f's change at mean c and c's
    at mean f."""
    amounts_E = run.amounts_until(match, run.evals)
    formats_E = [evaluation["avg_format_rewards"] for evaluation in run.evals]
    accuracies_E = [evaluation["avg_all_rewards"] for evaluation in run.evals]
    f_before = formats_E[0]
    f_after = float(np.interp(most, amounts_E, formats_E))
    before = accuracies_E[0]
    after = float(np.interp(most, amounts_E, accuracies_E))
    c_before = before / f_before if f_before else 0.0
    c_after = after / f_after if f_after else 0.0
    by_format = (f_after - f_before) * (c_before + c_after) / 2
    by_answers = (c_after - c_before) * (f_before + f_after) / 2
    return GainParts(after - before, by_format, by_answers)


def half_width(study: Study, arm: str, by_seed: Scores) -> float:
    """Half of the 95 % interval of an arm's mean (`half_width_of_mean`); 0 with fewer than two
    seeds."""
    return statistics.half_width_of_mean(by_seed, question_groups(study.arms[arm].values()))
