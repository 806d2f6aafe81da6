"""A budget split among seeds, questions and samples: hand-worked components, and splits that
simulated verdicts hold to."""

from pathlib import Path

import numpy as np
import pytest

from alignment.ablation.budget import (
    ASSUMED,
    Budget,
    Components,
    components_of,
    components_of_study,
    shown_splits,
    splits,
)
from alignment.ablation.statistics import compare
from alignment.ablation.study import read_study
from alignment.system.errors import UserError
from tests.ablation.test_report import make_run, write_sweep


def test_components_by_hand():
    """Two arms, two seeds, two questions, two samples. Only the arms' effects on questions differ:
    the first arm is right on the first question alone, the second on the other. The residuals of
    arms x questions are 1/2 each, so their mean square is 1, with one degree of freedom."""
    answers = np.zeros((2, 2, 2, 2))
    answers[0, :, 0] = 1
    answers[1, :, 1] = 1
    assert components_of(answers) == Components(0, 1.0, 0, 0)
    # Of each two samples one is right: a variance of 1/2, and nothing else; what arms and seeds
    # vary by chance, 0 here, is less than that explains.
    halves = np.zeros((2, 2, 2, 2))
    halves[..., 0] = 1
    assert components_of(halves) == Components(0, 0, 0, 0.5)


def test_a_pilot_whose_answers_are_equal_is_refused(tmp_path):
    runs = []
    for loss in "ab":
        for seed in range(2):
            runs.append(make_run(tmp_path / f"{loss}{seed}", seed, 1.0, loss_type=loss))
    with pytest.raises(UserError, match="--pilot x: all answers of an arm have one reward"):
        components_of_study(read_study(runs), "x")


def test_a_pilots_controls_do_not_say_how_much_its_arms_vary(tmp_path):
    """The accuracies of two arms lie 0.1 apart in one seed and -0.1 in the other; those of a
    control never change. Of two further arms of another task none is comparable."""

    def pilot(*losses: str) -> list[Path]:
        return [tmp_path / f"{loss}_seed{seed}" for loss in losses for seed in (0, 1)]

    accuracies = {"a": (0.5, 0.4), "b": (0.4, 0.5), "control_random": (0.1, 0.1)}
    for loss, of_seeds in accuracies.items():
        for seed, accuracy in enumerate(of_seeds):
            make_run(tmp_path / f"{loss}_seed{seed}", seed, accuracy, loss_type=loss)
    arms = {loss: {"loss_type": loss} for loss in accuracies}
    write_sweep(tmp_path, arms, (0, 1))
    with_control = components_of_study(read_study([tmp_path]), "x")
    assert with_control == components_of_study(read_study(pilot("a", "b")), "x")
    # The means lie 0.05 from what arms and seeds explain, with one degree of freedom. Of 40
    # questions 4 differ, which lie 0.45 from that; the others lie 0.05 from it.
    of_answers = 4 * (4 * 0.45**2 + 36 * 0.05**2) / (2 * 39)
    assert with_control.between_seeds == pytest.approx(4 * 0.05**2 - of_answers / 40)
    del arms["b"]
    write_sweep(tmp_path, arms, (0, 1))
    with pytest.raises(UserError, match="--pilot x: it needs two arms, controls aside"):
        components_of_study(read_study([tmp_path]), "x")


def test_a_pilots_arms_were_asked_the_same_questions(tmp_path):
    runs = []
    for task in ("one", "two"):
        for seed in (0, 1):
            run = make_run(tmp_path / f"{task}{seed}", seed, 0.4 + 0.1 * seed, task=task)
            for file in (run / "completions").glob("*.jsonl"):
                file.write_text(file.read_text().replace("What is", f"What is {task} and"))
            runs.append(run)
    with pytest.raises(UserError, match="--pilot x: it needs two arms.* on the same questions"):
        components_of_study(read_study(runs), "x")


def test_components_are_unbiased():
    """Over 200 tables of 3 arms, 4 seeds, 40 questions and 3 samples."""
    truth = Components(0.02**2, 0.1**2, 0.08**2, 0.3**2)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        answers = (
            0.02 * rng.normal(size=(3, 4, 1, 1))
            + 0.1 * rng.normal(size=(3, 1, 40, 1))
            + 0.08 * rng.normal(size=(3, 4, 40, 1))
            + 0.3 * rng.normal(size=(3, 4, 40, 3))
            + rng.normal(size=(1, 4, 1, 1))  # what seeds and questions do to all arms
            + rng.normal(size=(1, 1, 40, 1))
        )
        found.append(vars(components_of(answers)))
    for name, value in vars(truth).items():
        values = [components[name] for components in found]
        # Cut off at 0, the seeds' variance is a little too large.
        slack = 0.3 * value if name == "between_seeds" else 0.0
        assert np.mean(values) == pytest.approx(value, abs=4 * float(np.std(values)) / 14 + slack)


def budget(amount: float, of_answer: float = 0.001, all_questions: int = 500) -> Budget:
    """Each seed takes one hour, and `of_answer` for an answer."""
    return Budget(amount, all_questions, lambda seeds, answers: seeds * (1 + of_answer * answers))


def test_answers_that_a_budget_leaves():
    # 10 hours: of 4 seeds 2.5 hours each, 1.5 hours for 1,500 answers; of 10 seeds none.
    assert budget(10).answers(4) == 1500
    assert budget(10).answers(10) == 0
    assert budget(10, all_questions=50).answers(4) == 800  # 16 samples of each


def test_questions_come_before_samples_and_every_split_is_paid():
    found = splits(budget(10), ASSUMED, (1.0, -1.0), 1, 64)
    assert [split.seeds for split in found] == list(range(2, 10))
    by_seeds = {split.seeds: (split.questions, split.samples) for split in found}
    assert by_seeds[4] == (500, 3) and by_seeds[8] == (250, 1)
    assert all(split.cost <= 10 for split in found)
    rows = shown_splits(found)
    best = min(found, key=lambda split: split.difference)
    assert {split.seeds for split in rows} == {2, 3, 4, 6, 8, best.seeds}


def test_seeds_that_vary_are_worth_more_than_questions():
    """Where seeds do not vary, questions decide, and the best has few seeds."""

    def best(between_seeds: float) -> int:
        components = Components(between_seeds, 0.0, 0.0, 0.25)
        found = splits(budget(10, 0.01), components, (1.0, -1.0), 1, 64)
        return min(found, key=lambda split: split.difference).seeds

    assert best(0.0) < best(0.05**2) <= best(0.2**2)


@pytest.mark.parametrize("seeds", [3, 6])
def test_verdicts_find_the_difference_of_a_split(seeds):
    """In 400 tables of answers of 0 or 1 whose chances vary as the components say: 80 %, of which
    two points are a standard error, and no less than the rule's approximations lose."""
    components = Components(0.03**2, 0.1**2, 0.0, 0.24)
    [split] = [
        split
        for split in splits(budget(2.2 * seeds, 0.005, 200), components, (1.0, -1.0), 1, seeds)
        if split.seeds == seeds
    ]
    rng = np.random.default_rng(seeds)
    found = 0
    for _ in range(400):
        arms = {}
        for arm, shift in (("a", split.difference), ("b", 0.0)):
            taste_Q = 0.1 * rng.normal(size=split.questions)
            seed_S = 0.03 * rng.normal(size=split.seeds)
            chance_SQ = np.clip(0.45 + shift + seed_S[:, None] + taste_Q, 0, 1)
            rewards_SQ = rng.binomial(split.samples, chance_SQ) / split.samples
            arms[arm] = dict(enumerate(rewards_SQ))
        [comparison] = compare(arms, 0.03)
        found += comparison.kind == "greater" and comparison.difference > 0
    assert 0.74 < found / 400 < 0.9
