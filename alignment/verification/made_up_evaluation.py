"""What is reported of evaluations and of comparisons of two models, on made-up answers whose
figures are known by hand or by counting."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.core.records import Completion, Group, Problem, Score
from alignment.verification.check import Check
from alignment.verification.reported import (
    effective_number,
    faults_of_evaluation,
    is_near,
    mean,
    share_of_choices,
    wilson_interval,
)

TRUTH = "3"
IN_PART = "9"  # An answer that is paid in part, which makes no sample right.
# The answers to each problem, None for none, and maj@4: whether the most frequent answer is right,
# or of several equally frequent ones the share that is.
ANSWERS: Sequence[tuple[Sequence[str | None], float]] = (
    (("3", "3", "5", "7"), 1.0),
    (("5", "5", "3", "7"), 0.0),
    (("3", "3", "5", "5"), 0.5),
    ((None, None, None, "3"), 1.0),
    (("3", "5", "7", "9"), 0.25),
    ((None, None, None, None), 0.0),
)
# The answers of another model to the same problems.
OTHERS: Sequence[Sequence[str | None]] = (
    ("3", "3", "3", "7"),
    ("5", "5", "5", "7"),
    ("3", "3", "5", "5"),
    ("3", "3", None, "3"),
    ("3", "3", "3", "9"),
    (None, None, "3", None),
)
Figures = Callable[[Sequence[Group]], Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class MadeUpEvaluation:
    """The program's functions: the figures of an evaluation's groups, graded by r1_zero; the
    difference of two models' groups; and an evaluation's record and its groups, with votes."""

    figures: Figures
    compare: Callable[[Sequence[Group], Sequence[Group]], Any]
    summarise: Callable[[Sequence[Group]], tuple[Mapping[str, Any], Sequence[Group]]]

    def checks(self) -> Iterator[Check]:
        """Every check of what is reported of made-up answers."""
        yield Check("evaluations: other figures than by counting", 0.0, self.other_figures)
        yield Check("comparisons: other figures than by counting", 0.0, self.other_differences)

    def other_figures(self) -> list[str]:
        """The names of figures that are others."""
        groups = made_up_groups([answers for answers, _ in ANSWERS])
        rewards = rewards_of(groups)
        figures = self.figures(groups)
        expected = {"maj@4": mean([share for _, share in ANSWERS])}
        for number in (1, 2, 4):
            expected[f"pass@{number}"] = share_of_choices(rewards, number)
        for name in ("avg@4", "avg_all_rewards", "avg_answer_rewards"):
            expected[name] = mean([mean(of_problem) for of_problem in rewards])
        faults = []
        for name, value in expected.items():
            if not is_near(figures[name]["value"], value):
                faults.append(name)
        centre = expected["avg_all_rewards"]
        error = math.sqrt(centre * (1 - centre) / effective_number(rewards))
        of_mean = figures["avg_all_rewards"]
        if not is_near(of_mean["std_error"], error):
            faults.append("std_error")
        if not are_near(of_mean["interval"], wilson_interval(rewards)):
            faults.append("interval")
        record, with_votes = self.summarise(groups)
        return faults + faults_of_evaluation(record, [rows_of(group) for group in with_votes])

    def other_differences(self) -> list[str]:
        """The names of a comparison's figures that are others (Newcombe 1998, Statistics in
        Medicine 17:2635, method 10)."""
        first = made_up_groups([answers for answers, _ in ANSWERS])
        second = made_up_groups(OTHERS)
        compared = self.compare(first, second)
        of_first = [mean(rewards) for rewards in rewards_of(first)]
        of_second = [mean(rewards) for rewards in rewards_of(second)]
        a = mean(of_first)
        b = mean(of_second)
        low_a, high_a = wilson_interval(rewards_of(first))
        low_b, high_b = wilson_interval(rewards_of(second))
        phi = statistics.correlation(of_first, of_second)

        def width(one: float, other: float) -> float:
            return math.sqrt(one**2 - 2 * phi * one * other + other**2)

        interval = (b - a - width(b - low_b, high_a - a), b - a + width(high_b - b, a - low_a))
        pairs = list(zip(of_first, of_second, strict=True))
        won = [str(number) for number, (before, after) in enumerate(pairs) if after > before]
        lost = [str(number) for number, (before, after) in enumerate(pairs) if after < before]
        sound = {
            "first mean": is_near(compared.a, a),
            "second mean": is_near(compared.b, b),
            "difference": is_near(compared.difference, b - a),
            "interval": are_near(compared.interval, interval),
            "problems won": [row["problem"] for row in compared.won] == won,
            "problems lost": [row["problem"] for row in compared.lost] == lost,
        }
        return [name for name, is_right in sound.items() if not is_right]


def rows_of(group: Group) -> list[dict[str, Any]]:
    """A group as a file of completions has it."""
    rows = []
    for completion, score in zip(group.completions, group.scores, strict=True):
        rows.append({**vars(completion), "score": score})
    return rows


def are_near(values: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether two intervals are the same but for rounding."""
    return all(map(is_near, values, expected))


def rewards_of(groups: Sequence[Group]) -> list[list[float]]:
    """The rewards of each group."""
    rewards = []
    for group in groups:
        rewards.append([score["reward"] for score in group.scores])
    return rewards


def made_up_groups(answers: Sequence[Sequence[str | None]]) -> list[Group]:
    """A group for each problem, of responses with these answers."""
    groups = []
    for number, of_problem in enumerate(answers):
        problem = Problem(str(number), f"question {number}", f"prompt {number}", TRUTH)
        completions = tuple(map(made_up_completion, of_problem))
        groups.append(Group(problem, completions, tuple(map(score_of, of_problem))))
    return groups


def made_up_completion(answer: str | None) -> Completion:
    text = " so </think>"
    if answer is not None:
        text = f" so </think> <answer> {answer} </answer>"
    return Completion((1,), (2, 3), (-1.0, -1.0), text, "stop", 0)


def score_of(answer: str | None) -> Score:
    reward = 1.0 if answer == TRUTH else 0.0
    if answer == IN_PART:
        reward = 0.5
    return {
        "reward": reward,
        "format_reward": float(answer is not None),
        "answer_reward": reward,
    }
