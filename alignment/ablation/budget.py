"""A budget split among seeds, questions and samples before a sweep: which numbers of them show the
smallest difference. Arrays: A arms, S seeds, Q questions, N samples of a question."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from alignment.ablation.design import ALPHA, SEED_STD, is_control
from alignment.ablation.statistics import PlannedContrast, power
from alignment.ablation.study import Study
from alignment.system.errors import UserError

MOST_SAMPLES = 16  # of a question, that a split takes
SHOWN_SEEDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Components:
    """The variances of one answer's score, beside what all arms share: of an arm's seed
    (`between_seeds`); of what an arm adds to a question, in all seeds (`between_questions`); of
    what one seed adds to a question (`seed_on_question`); and of the samples of one run's answer to
    a question (`within_question`)."""

    between_seeds: float
    between_questions: float
    seed_on_question: float
    within_question: float

    def of_seed(self, questions: int, samples: int) -> float:
        """The standard deviation of a run's mean between seeds, on so many questions of so many
        samples."""
        of_answers = (self.seed_on_question + self.within_question / samples) / questions
        return math.sqrt(self.between_seeds + of_answers)

    def of_questions(self, questions: int) -> float:
        """The standard deviation of an arm's mean by the choice of questions, whatever the
        seeds."""
        return math.sqrt(self.between_questions / questions)

    def describe(self) -> str:
        """The standard deviations in words."""
        return (
            f"standard deviations of {math.sqrt(self.between_seeds):.3f} between seeds,"
            f" {math.sqrt(self.between_questions):.3f} of an arm's effect on a question,"
            f" {math.sqrt(self.seed_on_question):.3f} of a seed's on one and"
            f" {math.sqrt(self.within_question):.3f} of one answer"
        )


ASSUMED = Components(SEED_STD**2, 0.06**2, 0.0, 0.25)
"""Before anything is measured: the deviation between seeds that a sweep assumes, that of an arm's
effect on a question in `benchmarks.measure_rates`, and an accuracy of 0.5 on every question, whose
answers vary most."""


def components_of(answers_ASQN: np.ndarray) -> Components:
    """The components of the answers of several arms and seeds to the same questions, by the mean
    squares of an analysis of variance: unbiased, but set to 0 where chance makes one negative. With
    one sample a question what a seed adds to it counts as the samples' variance."""
    arms, seeds, questions, samples = answers_ASQN.shape
    y_ASQ = answers_ASQN.mean(axis=3)
    y_AS = y_ASQ.mean(axis=2)
    y_AQ = y_ASQ.mean(axis=1)
    y_A = y_ASQ.mean(axis=(1, 2))

    def mean_square(residuals: np.ndarray, dof: int) -> float:
        return float((residuals**2).sum()) / dof

    answers = y_ASQ - y_AS[:, :, None] - y_AQ[:, None, :] + y_A[:, None, None]
    of_answers = mean_square(answers, arms * (seeds - 1) * (questions - 1))
    within = of_answers
    seed_on_question = 0.0
    if samples > 1:
        within = float(answers_ASQN.var(axis=3, ddof=1).mean())
        seed_on_question = max(0.0, of_answers - within / samples)
    # What all arms share cancels in their differences.
    of_seeds = y_AS - y_AS.mean(axis=0) - y_A[:, None] + y_A.mean()
    between_seeds = mean_square(of_seeds, (arms - 1) * (seeds - 1)) - of_answers / questions
    of_questions = y_AQ - y_AQ.mean(axis=0) - y_A[:, None] + y_A.mean()
    between_questions = mean_square(of_questions, (arms - 1) * (questions - 1))
    between_questions -= of_answers / seeds
    return Components(
        max(0.0, between_seeds), max(0.0, between_questions), seed_on_question, within
    )


def components_of_study(study: Study, folder: str) -> Components:
    """The components of the last evaluations of an earlier sweep, of the seeds that all its arms
    but the controls have: a control that learns nothing varies less than the arms of a question.
    Raises `UserError` where two arms of two seeds on the same two questions are not there, and
    where their answers do not vary."""
    arms = {arm: runs for arm, runs in study.arms.items() if runs and not is_control(arm)}
    shared = set.intersection(*(set(runs) for runs in arms.values())) if arms else set()
    answers = []
    questions: set[tuple[str, ...]] = set()
    for runs in arms.values():
        scores = [runs[seed].scores for seed in sorted(shared)]
        questions.update(of_run.texts for of_run in scores)
        answers.append([of_run.rewards_of_samples[-1] for of_run in scores])
    # Equal questions may still have been asked other numbers of times.
    shapes = {rewards_QN.shape for of_arm in answers for rewards_QN in of_arm}
    is_one_table = len(questions) == len(shapes) == 1
    if len(arms) < 2 or len(shared) < 2 or not is_one_table or min(shapes)[0] < 2:
        raise UserError(
            f"--pilot {folder}: it needs two arms, controls aside, with two shared seeds, on the"
            " same questions"
        )
    components = components_of(np.array(answers))
    if not components.of_seed(1, 1) and not components.of_questions(1):
        raise UserError(
            f"--pilot {folder}: all answers of an arm have one reward, so they do not tell what"
            " varies; give a sweep whose accuracies are neither 0 nor 1"
        )
    return components


@dataclass(frozen=True)
class Split:
    """Numbers of seeds, questions and samples, and the smallest difference that they show."""

    seeds: int
    questions: int
    samples: int
    difference: float
    cost: float


@dataclass(frozen=True)
class Budget:
    """What may be spent, and on how many questions at most. `cost(seeds, answers)` is that of so
    many seeds of all arms whose evaluations sample so many answers."""

    amount: float
    all_questions: int
    cost: Callable[[int, int], float]

    def answers(self, seeds: int) -> int:
        """The most answers of an evaluation that so many seeds leave; 0: not even one."""
        without = self.cost(seeds, 0)
        of_one = self.cost(seeds, 1) - without
        if without + of_one > self.amount:
            return 0
        most = self.all_questions * MOST_SAMPLES
        if not of_one:
            return most
        return min(most, int((self.amount - without) / of_one))


def splits(
    budget: Budget,
    components: Components,
    weights_A: Sequence[float],
    family: int,
    most_seeds: int,
    alpha: float = ALPHA,
) -> list[Split]:
    """For each number of seeds that the budget pays, the split that shows the smallest difference
    of a contrast with these weights of the arms, one of `family`, which err with a chance of
    `alpha`.

    So many answers show most as single answers to different questions: each component but the
    seeds' falls with the questions, and only the last one with the samples. Further samples come
    where all questions are asked."""
    found = []
    for seeds in range(2, most_seeds + 1):
        answers = budget.answers(seeds)
        if answers < 2:
            break
        questions = min(answers, budget.all_questions)
        samples = answers // questions
        planned = PlannedContrast(
            weights_A,
            family,
            range(seeds, seeds + 1),
            components.of_seed(questions, samples),
            tie=0.0,
            question_std=components.of_questions(questions),
            alpha=alpha,
        )
        shown = power(planned)
        cost = budget.cost(seeds, questions * samples)
        found.append(Split(seeds, questions, samples, shown.difference, cost))
    return found


def shown_splits(found: Sequence[Split]) -> list[Split]:
    """The best of the splits, which shows the smallest difference, and about every 1.5 times as
    many seeds another one."""
    best = min(found, key=lambda split: split.difference)
    shown = []
    for split in found:
        if split is best or split.seeds in SHOWN_SEEDS:
            shown.append(split)
    return shown
