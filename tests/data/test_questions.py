"""Which problems ask the same question, and that the test split asks each once and training leaves
it alone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import RLArgs, SFTArgs
from alignment.builders.checks import check_rl, check_sft
from alignment.builders.data_checks import (
    check_test_split,
    check_training_split,
    print_shared_questions,
)
from alignment.core.records import Endless, Problem
from alignment.data.questions import distinct, question_text, without
from alignment.data.tasks import TASKS, Task, arithmetic, countdown, own_data
from alignment.rollouts.config import problems_of_step, refill_problems
from alignment.system.errors import UserError

NUMBERS = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def question(text: str, prompt: str = "") -> Problem:
    return Problem(text, text, prompt, "1")


def test_case_and_white_space_do_not_make_another_question():
    first, twin, other = (
        question(text)
        for text in ("How many?  Two\neggs.", "how many? two eggs. ", "How many? 2 eggs.")
    )
    assert (
        question_text(first) == question_text(twin) == "how many? two eggs." != question_text(other)
    )
    assert question_text(question("", "How  many? two EGGS.")) == question_text(first)
    assert question_text(question("2 * (3 + 4)")) != question_text(question("2 * 3 + 4"))
    assert distinct([first, twin, other], question_text) == [first, other]
    assert distinct([first, twin, other], question_text, most=1) == [first]
    assert without([first, other], {question_text(twin)}, question_text) == [other]


def test_terms_by_hand():
    assert arithmetic.terms("2 + 3 * 4 - 1") == "+ [2] + [3, 4] - [1]"
    assert arithmetic.terms("4 * 3 - 1 + 2") == "+ [2] + [3, 4] - [1]"
    assert arithmetic.terms("3 - 4") == "+ [3] - [4]"
    assert arithmetic.key(question("How much is 2 + 3?")) == "how much is 2 + 3?"
    assert countdown.key(question("Reach 6 from 3 1 2")) == "reach 6 from 3 1 2"


@given(st.data(), st.lists(st.tuples(st.sampled_from("+-"), NUMBERS), max_size=3), NUMBERS)
def test_any_order_of_terms_and_factors_has_one_key_and_one_value(data, others, first):
    signed = [("+", first), *others]
    shuffled = data.draw(st.permutations(signed).filter(lambda terms: terms[0][0] == "+"))
    shuffled = [(sign, data.draw(st.permutations(factors))) for sign, factors in shuffled]
    one, other = (as_question(terms) for terms in (signed, shuffled))
    assert arithmetic.key(one) == arithmetic.key(other)
    assert value(one) == value(other)


@given(*[st.lists(st.tuples(st.sampled_from("+-"), NUMBERS), min_size=1, max_size=3)] * 2)
def test_another_value_is_another_question(signed, others):
    one, other = as_question([("+", [1]), *signed]), as_question([("+", [1]), *others])
    assert value(one) == value(other) or arithmetic.key(one) != arithmetic.key(other)


def as_question(signed) -> Problem:
    parts = [part for sign, factors in signed for part in (sign, " * ".join(map(str, factors)))]
    return question(f"What is {' '.join(parts[1:])}?")


def value(problem: Problem) -> int:
    parts = [int(part) if part.isdigit() else part for part in problem.question[8:-1].split()]
    return (
        arithmetic.solve(tuple(parts), by_precedence=True)[-1][-1] if len(parts) > 1 else parts[0]
    )


@given(st.data(), NUMBERS, st.integers(1, 30))
def test_the_order_of_a_countdown_does_not_count_and_its_target_does(data, numbers, target):
    one = countdown.as_problem(numbers, target)
    assert countdown.key(one) == countdown.key(
        countdown.as_problem(data.draw(st.permutations(numbers)), target)
    )
    assert countdown.key(one) != countdown.key(countdown.as_problem(numbers, target + 1))
    assert countdown.key(one) != countdown.key(
        countdown.as_problem([*numbers[1:], numbers[0] + 1], target)
    )
    assert countdown.key(one) != countdown.key(countdown.as_problem([*numbers, target], target))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("countdown_small", 212),
        pytest.param("arithmetic", 627, marks=pytest.mark.slow),
        pytest.param("countdown", 1024, marks=pytest.mark.slow),
    ],
)
def test_no_question_is_asked_twice_and_none_of_the_test_split_is_trained_on(name, number):
    task = TASKS[name]
    tested = [task.key(problem) for problem in task.test_problems("")]
    assert len(set(tested)) == len(tested) == number
    training = task.training_problems("")
    steps = [problems_of_step(training, 64, seed, step) for seed in (0, 1) for step in range(1, 5)]
    refills = [refill_problems(training, 64, 0, step, 1) for step in range(1, 5)]
    assert {task.key(problem) for step in (*steps, *refills) for problem in step}.isdisjoint(tested)
    if name != "countdown":
        shown = [problem for problem, _ in task.demonstrations("train", "", 0)]
        assert {task.key(problem) for problem in shown}.isdisjoint(tested)


def own_task(**splits) -> Task:
    return Task("own", lambda split, path: splits[split], None, "r1_zero")


def test_duplicates_and_test_questions_in_users_data_are_left_out_and_counted(capsys):
    task = own_task(
        train=[question("One?"), question("Two? "), question("One?")],
        test=[question("two?"), question("TWO?"), question("3?")],
    )
    assert [problem.id for problem in check_test_split(task, "", 0)] == ["two?", "3?"]
    assert (
        capsys.readouterr().err
        == "the test split has 1 of 3 questions twice or more: each is asked once\n"
    )
    assert [problem.id for problem in check_test_split(task, "", 5)] == ["two?", "3?"]
    capsys.readouterr()
    check_training_split(task, "")
    assert (
        capsys.readouterr().err
        == "1 of 3 training problems ask what a test problem asks: they are left out\n"
    )
    assert [problem.id for problem in task.training_problems("")] == ["One?", "One?"]
    with pytest.raises(
        UserError, match="every one of 1 training problems asks what a test problem asks"
    ):
        check_training_split(own_task(train=[question("a")], test=[question("A")]), "")


def test_nothing_is_said_of_a_task_without_duplicates(capsys):
    check_test_split(TASKS["arithmetic"], "", RLArgs.max_problems)
    check_training_split(TASKS["arithmetic"], "")
    assert capsys.readouterr() == ("", "")


def test_training_questions_are_compared_with_those_of_other_evaluated_tasks(capsys):
    """A turn of a conversation counts as a question; greedy evaluations are of the same ones."""
    talk = Problem("talk", "", "", "1", turns=(("user", "Five?"), ("assistant", "5")))
    training = [question("One?"), question("two? "), question("One?"), talk]
    held_out = {
        "greedy": [question("one?")],
        "mine": [question("ONE?"), question("3?")],
        "mine/greedy": [question("ONE?"), question("3?")],
        "other": [question("3?")],
        "file.talks.jsonl": [question("five?")],
    }
    print_shared_questions(training, held_out, "training problems")
    end = "asks: they are trained on, so its accuracy is not of unseen questions"
    assert capsys.readouterr().err.splitlines() == [
        f"2 of 4 training problems ask what a test problem of --eval_tasks mine {end}",
        f"1 of 4 training problems ask what a test problem of --eval_tasks file.talks.jsonl {end}",
    ]
    print_shared_questions(Endless(lambda index: training[0]), held_out, "training problems")
    assert capsys.readouterr().err == ""


def test_both_commands_say_which_training_questions_an_evaluated_task_asks(
    tmp_path, monkeypatch, capsys
):
    """Of 20 rows, whose test split is another file, 3 ask what Countdown's test problems ask; SFT
    keeps one of these to validate on, and leaves that out as well."""
    monkeypatch.chdir(tmp_path)
    asked = [problem.question for problem in TASKS["countdown_small"].test_problems("", 3)]
    asked += [f"What is {n}?" for n in range(17)]
    rows = [json.dumps({"question": text, "answer": "So 1.\n#### 1"}) + "\n" for text in asked]
    # By whole paths: rows are kept by the file's name, which other tests in this process share.
    train = tmp_path / "train.jsonl"
    test = tmp_path / "test.jsonl"
    train.write_text("".join(rows))
    test.write_text(rows[-1])
    flags = {
        "task": f"file:{train}",
        "test_split": str(test),
        "eval_tasks": ("countdown_small",),
        "output_dir": ".",
    }
    said = "ask what a test problem of --eval_tasks countdown_small asks"
    check_rl(RLArgs(sft_base="", **flags))
    assert f"3 of 19 training problems {said}" in capsys.readouterr().err
    check_sft(SFTArgs(sft_base="made", **flags))
    assert f"2 of 18 demonstrations {said}" in capsys.readouterr().err


def test_endless_problems_draw_another_in_the_place_of_a_test_question():
    tested = [question(str(i)) for i in range(0, 10, 2)]
    endless = own_task(
        train=Endless(lambda i: question(str(i % 10))), test=tested
    ).training_problems("")
    drawn = [endless[i].id for i in range(40)]
    assert set(drawn) == set("13579") and drawn == [endless[i].id for i in range(40)]
    assert drawn[1::2] == list("13579") * 4  # the others stay where they were
    every = own_task(train=Endless(lambda i: tested[0]), test=tested).training_problems("")
    with pytest.raises(UserError, match="1000 training problems drawn in a row"):
        every[0]


def test_demonstrations_of_test_questions_are_left_out(tmp_path, capsys):
    tested = arithmetic.problems("test")[0]  # 1 - 6 - 2 * 4
    rows = [{"question": f"q{i}", "response": "r"} for i in range(30)]
    rows += [
        {"question": "What is 1 - 4 * 2 - 6?", "response": "r"},
        {"prompt": tested.prompt + "\n", "response": "r"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = (str(tmp_path / "rows.jsonl"),)
    for seed in range(3):
        splits = check_sft(SFTArgs(sft_base=str(tmp_path / "x"), demonstrations=files, seed=seed))
        asked = {problem.question or problem.prompt for problem, _ in splits["train"]}
        assert not asked & {"What is 1 - 4 * 2 - 6?", tested.prompt + "\n"}
        assert len(splits["train"]) + len(splits["test"]) >= 30
    assert (
        "2 of 31 demonstrations ask what a test problem asks: they are left out"
        in capsys.readouterr().err
    )


def test_a_question_in_other_spacing_is_in_one_split_of_the_demonstrations(tmp_path):
    rows = [
        {"question": f"{space}Q {i}", "response": "r"}
        for i in range(20)
        for space in ("", " ", "  ")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "rows.jsonl")
    train, test = (
        own_data.of_split(own_data.read_demonstrations(file), split, 0)
        for split in ("train", "test")
    )
    assert (len(train), len(test)) == (57, 3)
