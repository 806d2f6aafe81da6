"""The checks of what is trained and evaluated: hand-made splits, and each fault that they show."""

from dataclasses import replace

import pytest
from rollout_helpers import ARGS

from alignment.core.records import Endless, Problem
from alignment.rollouts import config as rollouts
from alignment.verification.splits import (
    RunData,
    ValidationSplit,
    asked_elsewhere,
    value_of_sum,
)
from alignment.verify import measured_by

CONFIG = replace(ARGS, prompts_per_rollout=3).rollout_config
EVALUATED = "data: evaluated beside the test split"
LEAKED = "data: test questions that are trained"
ELSEWHERE = "data: trained beside the training split"
PASS = "data: problems that a pass repeats or skips"
RESUMED = "data: steps of other problems after resume"
ORDERS = "data: orders that are not by chance"
TRUTHS = "data: wrong truths of sums and Countdown"


def problem(number: int, split: str = "train") -> Problem:
    question = f"What is {number} of {split}?"
    return Problem(f"{split}/{number}", question, f"Q: {question} A:", str(number))


TRAIN = [problem(number) for number in range(8)]
TEST = [problem(number, "test") for number in range(4)]


def failed(**changes) -> set[str]:
    data = RunData(TRAIN, TEST, TEST[:3], TRAIN, CONFIG, lambda: list(TRAIN))
    found = set()
    for check in replace(data, **changes).checks():
        if not check.not_checked and measured_by(check)[0] > check.limit:
            found.add(check.what)
    return found


def test_splits_without_a_fault():
    assert failed() == set()


def test_evaluations_on_training_problems():
    assert failed(evaluated=TRAIN[:3]) == {EVALUATED, LEAKED}


def test_a_test_question_in_other_letters_that_is_trained():
    shouted = replace(TRAIN[0], question="WHAT  is 2 of test?")
    assert failed(train_rows=[shouted], trained=[shouted], open_anew=lambda: [shouted]) == {LEAKED}


def test_a_test_row_that_is_trained_under_another_question():
    row = replace(TEST[0], question="What else?")
    trained = [*TRAIN, row]
    assert failed(trained=trained, open_anew=lambda: trained) == {LEAKED, ELSEWHERE}


def test_ids_that_both_splits_number_by_themselves_say_nothing():
    numbered = [replace(row, id=row.id[-1]) for row in TRAIN]
    tested = [replace(row, id=row.id[-1]) for row in TEST]
    changes = {"train_rows": numbered, "trained": numbered, "open_anew": lambda: numbered}
    assert failed(test_rows=tested, evaluated=tested, **changes) == set()


def test_another_truth():
    changed = [replace(TRAIN[0], ground_truth="9"), *TRAIN[1:]]
    assert failed(trained=changed, open_anew=lambda: changed) == {ELSEWHERE}


def test_the_same_problems_in_every_step(monkeypatch):
    real = rollouts.problems_of_step
    monkeypatch.setattr(
        "alignment.verification.splits.problems_of_step", lambda *rest: real(*rest[:3], 1)
    )
    assert failed() == {PASS}
    endless = Endless(lambda index: TRAIN[index % 8])
    same = {"train_rows": endless, "trained": endless, "open_anew": lambda: endless}
    assert failed(**same) == {PASS, ORDERS}


def test_an_order_that_depends_on_what_ran_before():
    assert failed(open_anew=lambda: TRAIN[::-1]) == {RESUMED}


@pytest.mark.parametrize("name", ["evaluated", "trained"])
def test_one_problem_alone(name):
    changes = {name: [TEST[0]] if name == "evaluated" else [TRAIN[0]]}
    if name == "trained":
        changes["open_anew"] = lambda: [TRAIN[0]]
    assert failed(**changes) == set()


MANY = [problem(number) for number in range(20)]


def test_an_order_that_is_the_file_s(monkeypatch):
    changes = {"train_rows": MANY, "trained": MANY, "open_anew": lambda: MANY}
    assert failed(**changes) == set()
    monkeypatch.setattr(rollouts, "_order_of_pass", lambda seed, number, size: list(range(size)))
    assert failed(**changes) == {ORDERS}


def test_refills_that_ask_the_same_problems(monkeypatch):
    changes = {"train_rows": MANY, "trained": MANY, "open_anew": lambda: MANY}
    real = rollouts.refill_problems
    monkeypatch.setattr(
        "alignment.verification.splits.refill_problems", lambda *rest: real(*rest[:4], 1)
    )
    assert failed(**changes) == {ORDERS}


def test_a_step_over_the_end_of_a_pass_in_that_pass_s_order(monkeypatch):
    """Of 20 problems, three a step, the 7th step takes the last two of the first pass."""

    def of_first_place(problems, number, data_seed, step):
        first = (step - 1) * number
        order = rollouts._order_of_pass(data_seed, first // len(problems), len(problems))
        return [problems[order[place % len(problems)]] for place in range(first, first + number)]

    monkeypatch.setattr("alignment.verification.splits.problems_of_step", of_first_place)
    changes = {"train_rows": MANY, "trained": MANY, "open_anew": lambda: MANY}
    assert PASS in failed(**changes)


def test_a_refill_that_asks_a_problem_twice(monkeypatch):
    changes = {"train_rows": MANY, "trained": MANY, "open_anew": lambda: MANY}
    real = rollouts.refill_problems

    def with_a_repetition(*rest):
        first, second, *others = real(*rest)
        return [first, first, *others]

    monkeypatch.setattr("alignment.verification.splits.refill_problems", with_a_repetition)
    assert failed(**changes) == {ORDERS}


def test_a_wrong_truth_of_a_sum():
    assert value_of_sum("2 + 3 * 4 - 1") == 13
    assert value_of_sum("6 * 2 * 2 - 20") == 4
    rows = [
        Problem("a", "What is 2 + 3 * 4?", "", "14"),
        Problem("b", "What is 2 * 3 - 4?", "", "2"),
    ]
    changes = {"train_rows": rows, "trained": rows, "open_anew": lambda: rows}
    assert failed(**changes) == set()
    rows = [replace(rows[0], ground_truth="20"), rows[1]]
    changes = {"train_rows": rows, "trained": rows, "open_anew": lambda: rows}
    assert failed(**changes) == {TRUTHS}


@pytest.mark.parametrize(
    ("question", "truth", "is_wrong"),
    [
        ("1 8 8 -> 17", "17 = 1 8 8", False),
        ("1 8 8 -> -7", "-7 = 1 8 8", False),
        ("1 8 8 -> 17", "18 = 1 8 8", True),
        ("1 8 8 -> 17", "17 = 1 8", True),
        ("1 8 8 -> -7", "7 = 1 8 8", True),
        ("6 12 18 -> 24", "30", False),  # a series of a user's own
    ],
)
def test_a_wrong_truth_of_countdown(question, truth, is_wrong):
    rows = [Problem("a", question, "", truth)]
    changes = {"train_rows": rows, "trained": rows, "open_anew": lambda: rows}
    assert failed(**changes) == ({TRUTHS} if is_wrong else set())


HELD_OUT = [problem(number, "test") for number in range(100)]


def validation(**changes) -> list[str]:
    """The faults of a split of 100 questions of which 10 are for validation."""
    split = ValidationSplit(0.1, HELD_OUT[:10], HELD_OUT[10:], HELD_OUT, HELD_OUT[:4], True)
    return replace(split, **changes).faults()


def test_parts_of_a_test_split():
    assert validation() == []
    assert validation(evaluated=HELD_OUT[10:14], is_validation=False) == []
    assert validation(validation=HELD_OUT[:15], test=HELD_OUT[15:]) == []  # 5 more by chance
    assert validation(is_validation=False) == ["evaluations of the other part"]
    assert validation(test=HELD_OUT) == ["10 questions in both"]
    # 90 in the place of about 10, which 6 standard deviations of 3 do not explain
    assert validation(validation=HELD_OUT[10:], test=HELD_OUT[:10], is_validation=False) == [
        "90 of 100 questions for validation"
    ]


def test_another_task_that_asks_other_problems():
    rows = {"mine": TEST, "other": HELD_OUT}
    assert asked_elsewhere({"mine": TEST[:2], "other": HELD_OUT[:3]}, rows) == []
    assert asked_elsewhere({"mine": TEST[:2], "other": TRAIN[:3]}, rows) == ["other"]
    assert asked_elsewhere({"mine": [], "other": HELD_OUT}, rows) == ["mine"]
