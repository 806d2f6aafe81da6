"""The comparisons of a study, by arms and by varied arguments, and the parts of a gain. It loads
scipy; `study.py` does not."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from alignment.ablation import statistics
from alignment.ablation.design import varied_values
from alignment.ablation.statistics import Comparison, Contrast, Scores, compare
from alignment.ablation.study import Run, Study
from alignment.core.records import Problem
from alignment.data.questions import question_text
from alignment.data.tasks import TASKS
from alignment.system.errors import UserError


def budget(study: Study) -> float:
    """How much of what `study.match` names all runs had taken by their last evaluations; infinite
    for steps, of which each run counts its own."""
    least = min(
        (float(run.spent(study.match, run.evals[-1:])[0]) for run in study.runs), default=math.inf
    )
    return math.inf if study.match == "steps" else least


def outcome(study: Study) -> tuple[str, str]:
    """What is compared, as a title, and as part of a sentence."""
    if study.match == "steps":
        return "final accuracy", "the accuracy of the last evaluation"
    unit = {
        "samples": "sampled responses",
        "tokens": "sampled tokens",
        "seconds": "seconds of steps",
    }[study.match]
    where = (
        f"the accuracy at {budget(study):,.0f} {unit}, which all runs have reached, on straight"
        " lines between evaluations"
    )
    return f"accuracy at equal {study.match}", where


def curve(run: Run, match: str, most: float) -> tuple[np.ndarray, np.ndarray]:
    """What the run had taken [E] by its evaluations, in the unit of `match`, and every question's
    reward in them [E, Q]. A curve that goes on ends at `most`, on a straight line between the
    evaluations before and after."""
    amounts_E, rewards_EQ = run.spent(match, run.evals), run.scores.rewards_EQ
    end = min(most, amounts_E[-1])
    weights_E = np.array(
        [np.interp(end, amounts_E, of_evaluation) for of_evaluation in np.eye(len(amounts_E))]
    )
    before = amounts_E < end
    return np.append(amounts_E[before], end), np.vstack(
        [rewards_EQ[before], weights_E @ rewards_EQ]
    )


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
    runs: Sequence[Run], match: str, most: float, shares_X: np.ndarray
) -> tuple[float, float]:
    """The least and the largest amount by which an arm's learning curve lies above the straight
    lines between its evaluations, averaged over the points at these shares of what its runs had
    taken: from the mean over runs of `chord_bends`. Where both neighbours say that the curve bends
    the same way, the smaller one bounds it; where they differ, each bounds one side."""
    above = []
    for run in runs:
        amounts_E = run.spent(match, run.evals)
        end = min(most, float(amounts_E[-1]))
        above.append(chord_bends(amounts_E, run.scores.rewards_EQ.mean(axis=1), end * shares_X))
    mean_2X = np.mean(above, axis=0)
    if np.isinf(mean_2X).any():
        return -math.inf, math.inf
    least_X, largest_X = mean_2X.min(axis=0), mean_2X.max(axis=0)
    low_X = np.where(largest_X <= 0, largest_X, np.minimum(least_X, 0.0))
    high_X = np.where(least_X >= 0, least_X, np.maximum(largest_X, 0.0))
    return float(low_X.mean()), float(high_X.mean())


def bends(study: Study, whole_curve: bool = False) -> dict[str, tuple[float, float]]:
    """For each arm with runs the bounds of `arm_bend` at the budget, or of the area under the curve
    up to it; {} for steps, where the last evaluations themselves are compared."""
    if study.match == "steps":
        return {}
    shares_X = AREA_POINTS if whole_curve else np.ones(1)
    most = budget(study)
    return {
        arm: arm_bend(list(runs.values()), study.match, most, shares_X)
        for arm, runs in study.arms.items()
        if runs
    }


def final_scores(study: Study) -> dict[str, Scores]:
    """For each arm and seed, the reward [Q] of every question where its curve ends: in the last
    evaluation, or at `budget`."""
    most, match = budget(study), study.match
    return {
        arm: {seed: curve(run, match, most)[1][-1] for seed, run in runs.items()}
        for arm, runs in study.arms.items()
    }


def areas(study: Study) -> dict[str, Scores]:
    """For each arm and seed, the area [Q] under every question's learning curve."""
    most = budget(study)

    def area(run):
        return statistics.area_under_curve(*curve(run, study.match, most))

    return {
        arm: {seed: area(run) for seed, run in runs.items()} for arm, runs in study.arms.items()
    }


def decide(study: Study, whole_curve: bool = False) -> list[Comparison]:
    """A comparison for each pair of arms of a task: of final scores, or of the areas under whole
    learning curves. Raises `UserError` if questions differ."""
    scores = areas(study) if whole_curve else final_scores(study)
    of_curves = bends(study, whole_curve)
    tasks = {arm: str(study.varied[arm].get("task", "")) for arm in study.arms}
    comparisons = []
    for task in dict.fromkeys(tasks.values()):
        arms = {arm: runs for arm, runs in study.arms.items() if tasks[arm] == task}
        groups = question_groups(run for runs in arms.values() for run in runs.values())
        alpha = study.alpha / len(set(tasks.values()))
        comparisons += compare(
            {arm: scores[arm] for arm in arms},
            study.tie,
            alpha=alpha,
            groups=groups,
            bends=of_curves,
        )
    return comparisons


def question_groups(runs: Iterable[Run]) -> list[str] | None:
    """The key of every question that the runs were evaluated on (`Task.key`); None where no two are
    equal, as of all runs whose evaluations ask a question once. Raises `UserError` where the runs
    were evaluated on different questions."""
    if len(by_questions := {run.scores.texts: run for run in runs}) > 1:
        a, b, *_ = (run.path for run in by_questions.values())
        raise UserError(
            f"{a} and {b} were evaluated on different questions, so they cannot be compared: give"
            " runs of the same"
        )
    for run in by_questions.values():
        task = TASKS.get(str(run.args.get("task")))
        # a task of the user's own is not imported for a report
        key = task.key if task else question_text
        keys = [
            key(Problem(name, text, "", ""))
            for name, text in zip(run.scores.questions, run.scores.texts, strict=True)
        ]
        return keys if len(set(keys)) < len(keys) else None
    return None


def over_tasks(study: Study) -> dict[str, float]:
    """The interquartile mean of final accuracy over tasks and seeds, by the other varied arguments;
    {} for a single task."""
    pooled: dict[str, list[float]] = {}
    for arm, by_seed in final_scores(study).items():
        if "task" in study.varied[arm]:
            rest = ", ".join(
                _level(name, value) for name, value in study.varied[arm].items() if name != "task"
            )
            pooled.setdefault(rest or "all arms", []).extend(
                float(scores.mean()) for scores in by_seed.values()
            )
    return {arm: statistics.interquartile_mean(values) for arm, values in pooled.items() if values}


def factor_contrasts(varied: Mapping[str, Mapping[str, object]]) -> dict[str, list[Contrast]]:
    """For each varied argument the contrasts of its values; {} unless the arms, but controls, form
    a full grid of one task."""
    arms = {arm: values for arm, values in varied.items() if not arm.startswith("control_")}
    names = choices(arms)
    levels = {arm: [_level(name, values[name]) for name in names] for arm, values in arms.items()}
    several = [dict.fromkeys(column) for column in zip(*levels.values(), strict=True)]
    full = len(set(map(tuple, levels.values()))) == len(arms) == math.prod(map(len, several))
    if len(names) < 2 or not full or "task" in names:
        return {}
    contrasts: dict[str, list[Contrast]] = {}
    for place, name in enumerate(names):
        sides = {
            level: [arm for arm in arms if levels[arm][place] == level] for level in several[place]
        }

        def side(level, sign, sides=sides):
            return dict.fromkeys(sides[level], sign / len(sides[level]))

        contrasts[name] = [
            Contrast(a, b, side(a, 1) | side(b, -1)) for a, b in combinations(sides, 2)
        ]
    return contrasts


def decide_factors(study: Study) -> dict[str, list[Comparison]]:
    """Comparisons of each varied argument's values (`factor_contrasts`); {} where an arm has no
    run."""
    contrasts, scores = factor_contrasts(study.varied), final_scores(study)
    arms = {arm: scores[arm] for arm in study.arms if not arm.startswith("control_")}
    if not all(arms.values()) or not contrasts:
        return {}
    groups = question_groups(run for arm in arms for run in study.arms[arm].values())
    of_curves = bends(study)
    return {
        name: compare(arms, study.tie, several, study.alpha, groups, of_curves)
        for name, several in contrasts.items()
    }


def decide_question(study: Study, question: Sequence[str]) -> list[Comparison]:
    """The comparisons that answer `question`: all pairs of arms if it is empty, an argument's
    values, or two arms or values."""
    factors = decide_factors(study)
    if len(question) < 2:
        return factors.get("".join(question)) or decide(study)
    return [c for c in [*decide(study), *sum(factors.values(), [])] if {c.a, c.b} == set(question)]


def refuse_unknown_question(
    varied: Mapping[str, Mapping[str, object]], question: Sequence[str]
) -> None:
    """Raise `UserError` where no comparison of the arms answers `question`."""
    factors = factor_contrasts(varied)
    names = list(factors) or choices(varied)[:1] * (len(choices(varied)) == 1)
    values = [{c.a, c.b} for contrasts in factors.values() for c in contrasts]
    known = (
        question[0] in names
        if len(question) == 1
        else set(question) <= set(varied) or set(question) in values
    )
    if question and (not known or len(set(question)) < len(question)):
        answers = (
            f"{', '.join(names)}{' or ' if names else ''}two of"
            f" {', '.join(sorted(set().union(*values, varied)))}"
        )
        raise UserError(f"--question {' '.join(question)}: give {answers}")


def choices(varied: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The names of the varied arguments, without the prompts of a step where the group size alone
    decides them."""
    names = list(next(iter(varied_values(varied).values())))
    if {"group_size", "prompts_per_rollout"} <= set(names):
        pairs = {
            (values["group_size"], values["prompts_per_rollout"]) for values in varied.values()
        }
        if len(pairs) == len({group_size for group_size, _ in pairs}):
            names.remove("prompts_per_rollout")
    return names


def _level(name: str, value: object) -> str:
    return value if isinstance(value, str) else f"{name} {value}"


def split_of_gain(
    run: Run, match: str = "steps", most: float = math.inf
) -> tuple[float, float, float]:
    """(gain, format's part, answers' part) of accuracy from a `curve`'s beginning to its end.
    Accuracy is the format rate f times the accuracy c of well-formed responses; the parts, which
    add up, are f's change at mean c and c's at mean f."""
    rates = (
        [evaluation[key] for evaluation in run.evals]
        for key in ("avg_format_rewards", "avg_all_rewards")
    )
    f, a = ([rate[0], float(np.interp(most, run.spent(match, run.evals), rate))] for rate in rates)
    c = [x / y if y else 0.0 for x, y in zip(a, f, strict=True)]
    by_format, by_answers = (f[1] - f[0]) * (c[0] + c[1]) / 2, (c[1] - c[0]) * (f[0] + f[1]) / 2
    return a[1] - a[0], by_format, by_answers


def half_width(study: Study, arm: str, by_seed: Scores) -> float:
    """Half of the 95 % interval of an arm's mean (`half_width_of_mean`); 0 with fewer than two
    seeds."""
    return statistics.half_width_of_mean(by_seed, question_groups(study.arms[arm].values()))
