"""Training problems by their measured pass rates: the band's edges, what is left out, and what is
said of a file that does not fit."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import ARGS

from alignment.builders.checks import run_config
from alignment.builders.data_checks import check_pass_rates
from alignment.core.records import Completion, Endless, Group, Problem
from alignment.data.pass_rates import (
    Band,
    PassRates,
    banded,
    pass_rate_rows,
    problems_in_band,
    read_band,
    read_pass_rates,
    rows_with_rates,
)
from alignment.data.questions import question_text
from alignment.system.errors import UserError

PROBLEMS = [Problem(f"t/{n}", f"What is {n}?", "", str(n)) for n in range(6)]


def row(problem: Problem, correct: int, samples: int = 10, **others) -> dict:
    facts = {"id": problem.id, "question": problem.question, "samples": samples, "correct": correct}
    return facts | {"task": ARGS.task, "model": ARGS.sft_base or ARGS.model} | others


@pytest.fixture
def file(tmp_path):
    def write(*rows: dict) -> str:
        path = tmp_path / "rates.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in rows))
        return str(path)

    return write


def test_both_ends_of_the_band_belong_to_it(file):
    """Rates 0.0, 0.1, 0.2, 0.3 and 1.0; 3 of 10 is the number that "0.3" names. Problem 5 was not
    measured."""
    path = file(*(row(PROBLEMS[n], c) for n, c in enumerate((0, 1, 2, 3, 10))))

    def kept(band: str) -> list[str]:
        return [problem.id for problem in banded(PROBLEMS, path, band)]

    assert kept("0.1-0.3") == ["t/1", "t/2", "t/3"]
    assert kept("0.11-0.29") == ["t/2"]
    assert kept("0-0") == ["t/0"] and kept("1-1") == ["t/4"]
    assert kept("0-1") == ["t/0", "t/1", "t/2", "t/3", "t/4"]
    assert kept("0.4-0.9") == []
    selection = problems_in_band(PROBLEMS, read_pass_rates(path), Band(0.1, 0.3))
    assert (selection.outside, selection.unmeasured) == ((0.0, 1.0), 1)


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_rate_is_in_the_band_of_itself_alone(counts):
    correct, samples = counts
    rate = correct / samples
    question = question_text(PROBLEMS[0])
    rates = dataclasses.replace(
        EMPTY, samples={question: samples}, correct={question: correct}, rows=1
    )
    assert problems_in_band(PROBLEMS[:1], rates, Band(rate, rate)).kept == PROBLEMS[:1]


EMPTY = PassRates({}, {}, 0, (), "")


def test_rows_of_one_question_are_added_up(file):
    """1 of 4 and 5 of 8 are 6 of 12; case and white space do not count."""
    again = row(PROBLEMS[0], 5, 8, id="other/7", question=" what  IS 0?")
    rates = read_pass_rates(file(row(PROBLEMS[0], 1, 4), again))
    assert rates.rate_of(PROBLEMS[0]) == 0.5
    assert rates.rate_of(PROBLEMS[1]) is None


def test_of_endless_problems_those_of_the_file_are_looked_at(file):
    endless = Endless(lambda index: PROBLEMS[index])
    path = file(*(row(problem, correct=n) for n, problem in enumerate(PROBLEMS[:3])))
    assert banded(endless, path, "0.1-1") == PROBLEMS[1:3]


@pytest.mark.parametrize(
    ("text", "band"),
    [("0.2-0.8", (0.2, 0.8)), ("0-1", (0, 1)), (".5-1.", (0.5, 1))],
)
def test_bands(text, band):
    assert read_band(text) == band


@pytest.mark.parametrize("text", ["0.8-0.2", "0.2", "0.2-", "-0.5-1", "0-1.01", "0.2 0.8", "nan-1"])
def test_what_is_no_band_is_refused(text):
    assert read_band(text) is None
    with pytest.raises(UserError, match=r"^--pass_rate_band .*must be LOW-HIGH"):
        dataclasses.replace(ARGS, pass_rate_band=text)


def test_what_is_written_of_groups_is_read_again(file):
    """Two of three responses have reward 1; 0.5, which parts can give, is not right."""
    scores = [{"reward": reward} for reward in (1.0, 0.5, 1.0)]
    completion = Completion((1,), (2,), (0.0,), "text", "stop", 0)
    group = Group(PROBLEMS[2], (completion,) * 3, tuple(scores))
    [line] = pass_rate_rows([group], "my_task", "my_model")
    assert line == {
        "id": "t/2",
        "question": "What is 2?",
        "samples": 3,
        "correct": 2,
        "task": "my_task",
        "model": "my_model",
    }
    rates = read_pass_rates(file(line))
    assert rates.rate_of(PROBLEMS[2]) == 2 / 3
    assert (rates.tasks, rates.model) == (("my_task",), "my_model")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "q", "response": "r"}], r':1: needs "samples" and "correct"'),
        ([row(PROBLEMS[0], 3, 2)], r':1: needs "samples" and "correct"'),
        ([row(PROBLEMS[0], 0, 0)], r':1: needs "samples" and "correct"'),
        ([{"samples": 2, "correct": 1}], ":1: not a JSON object with the texts question"),
        ([row(PROBLEMS[0], 1), row(PROBLEMS[1], 1, model="b")], r"rates of 2 models \(.*, b\)"),
        ([], "holds no row"),
    ],
)
def test_files_of_other_things_are_refused(rows, message, file):
    with pytest.raises(UserError, match=message):
        read_pass_rates(file(*rows))


def test_it_says_how_many_problems_are_kept(file, capsys):
    path = file(row(PROBLEMS[0], 5), row(PROBLEMS[1], 0), row(PROBLEMS[2], 9))
    args = dataclasses.replace(ARGS, pass_rates=path, pass_rate_band="0.2-0.8")
    assert check_pass_rates(args, PROBLEMS) == PROBLEMS[:1]
    said = capsys.readouterr().err
    assert said == (
        "--pass_rate_band 0.2-0.8 keeps 1 of 6 training problems; 2 have other rates, 0.00 .. 0.90;"
        f" 3 are not in {path}\n"
    )


def test_another_task_or_model_is_said(file, capsys):
    path = file(row(PROBLEMS[0], 5, task="gsm8k", model="Qwen/Other"))
    check_pass_rates(dataclasses.replace(ARGS, pass_rates=path), PROBLEMS)
    task_line, model_line, _ = capsys.readouterr().err.splitlines()
    assert (
        task_line == f"--pass_rates {path}: measured on --task gsm8k, and this run's is {ARGS.task}"
    )
    assert model_line.startswith(
        f"--pass_rates {path}: measured of Qwen/Other, and this run starts"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pass_rate_band": "0.6-0.8"}, "keeps none of 6 .*; 1 have other rates, 0.50 .. 0.50"),
        ({"pass_rates": "absent.jsonl"}, "--pass_rates absent.jsonl: is no file"),
        (
            {"pass_rates": "", "pass_rate_band": "0-0.5"},
            "--pass_rate_band 0-0.5: needs --pass_rates",
        ),
    ],
)
def test_a_run_that_would_have_no_problem_is_refused(change, message, file):
    path = file(row(PROBLEMS[0], 5))
    args = dataclasses.replace(ARGS, **{"pass_rates": path} | change)
    with pytest.raises(UserError, match=message):
        check_pass_rates(args, PROBLEMS)


def test_the_problems_of_a_run_are_listed_with_their_rates(file):
    path = file(row(PROBLEMS[0], 5), row(PROBLEMS[1], 2))
    assert list(rows_with_rates(banded(PROBLEMS, path, "0.2-0.4"), path)) == [
        {"id": "t/1", "question": "What is 1?", "pass_rate": 0.2}
    ]


def test_a_run_records_the_digest_of_its_file(file):
    """A run that resumes with other rates would train on other problems."""
    args = dataclasses.replace(ARGS, pass_rates=file(row(PROBLEMS[0], 5)))
    before = run_config(args).arguments
    file(row(PROBLEMS[0], 4))
    assert run_config(args).arguments != before
    assert "sha256_of_pass_rates" not in run_config(ARGS).arguments
