"""What is kept of a model's answers, what is not and why, and demonstrations read back from
files."""

import json
import signal

import pytest

from alignment import rejection_sample
from alignment.core.records import Completion, Group, Problem
from alignment.data.prompts import ChatOptions, prompted
from alignment.data.tasks import own_data
from alignment.rejection_sample import REASONS, select
from alignment.rewards.rules import RULES
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl

PROBLEM = Problem("a", "What is 2 + 3?", "User: What is 2 + 3?\nAssistant: <think>", "5")
GOOD = " two and three </think> <answer> 5 </answer>"


def group(*answers, problem=PROBLEM):
    completions = tuple(
        Completion((1,), (2,), (-0.1,), text, finish, 0)
        for text, finish in (
            answer if isinstance(answer, tuple) else (answer, "stop") for answer in answers
        )
    )
    return Group(
        problem,
        completions,
        tuple(RULES["r1_zero"](c.text, problem.ground_truth) for c in completions),
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((GOOD, "length"), "unfinished"),
        (GOOD.replace("5", "6"), "wrong"),
        (" <answer> 5 </answer>", "wrong"),  # without the thought's end no answer counts
        (" ```two``` and" + GOOD, "unreadable"),
        (" word" * 500 + GOOD, "unreadable"),
        (" \x1b[2J" + GOOD, "unreadable"),
        (" 二加三 </think> <answer> 5 </answer>", "in several languages"),
        (GOOD.replace(" and ", "  and "), "said already"),
    ],
)
def test_each_reason(answer, reason):
    rows, against = select([group(GOOD, answer)], "all", 0.95)
    assert (
        [row["response"] for row in rows] == [GOOD] and against == {reason: 1} and reason in REASONS
    )


def test_all_or_the_shortest_are_kept_with_their_problem():
    longer = " two, then three more" + GOOD
    other = Problem("b", "What is 1 + 1?", "", "2")
    groups = [group(longer, GOOD), group("</think> <answer> 3 </answer>", problem=other)]
    rows, against = select(groups, "best", 0.95)
    assert rows == [
        {"id": "a", "question": "What is 2 + 3?", "ground_truth": "5", "response": GOOD}
    ]
    assert against == {"wrong": 1, "not the best": 1}
    assert [row["response"] for row in select(groups, "all", 0.95)[0]] == [longer, GOOD]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_demonstrations_are_read_shuffled_and_one_in_twenty_is_held_out(tmp_path):
    file = write(
        tmp_path / "rows.jsonl", *({"question": f"q{i}", "response": f"r{i}"} for i in range(40))
    )
    general = write(tmp_path / "general.jsonl", {"prompt": "Hello,", "response": " world"})
    train, test = (
        own_data.of_split(own_data.read_demonstrations(file, general), split, 0)
        for split in ("train", "test")
    )
    assert len(test) == 2 and len(train) == 39
    assert {response for _, response in (*train, *test)} == {
        *(f"r{i}" for i in range(40)),
        " world",
    }
    assert [response for _, response in train] != [f"r{i}" for i in range(39)]
    (whole,) = [problem for problem, response in (*train, *test) if response == " world"]
    assert (whole.question, whole.prompt) == ("", "Hello,")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", ":1: not a JSON object"),
        ('{"response": "r"}', ':1: there is no "prompt"'),
        ('{"question": "q", "response": ""}', ':1: "response" must hold text'),
    ],
)
def test_rows_that_are_none_are_named(line, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        own_data.read_demonstrations(str(tmp_path / "rows.jsonl"))


def test_examples_come_before_each_question(tmp_path):
    file = write(tmp_path / "shown.jsonl", {"question": "What is 1 + 1?", "response": " 2"})
    options = ChatOptions(examples=tuple(own_data.read_examples(file)))
    (asked,) = prompted([PROBLEM], "tiny", None, options)
    assert asked.prompt == "User: What is 1 + 1?\nAssistant: <think> 2\n\n" + PROBLEM.prompt


def test_nothing_kept_is_said_in_words(tmp_path, monkeypatch):
    wrong = GOOD.replace("5", "6")
    monkeypatch.setattr(
        rejection_sample, "sample_groups", lambda *_: [group((GOOD, "length"), wrong, wrong)]
    )
    monkeypatch.setattr(
        "sys.argv",
        ["rejection_sample", "--output", str(tmp_path / "kept.jsonl"), "--num_samples", "3"],
    )
    with pytest.raises(
        UserError,
        match="^nothing was kept of 3 answers: 2 wrong, 1 unfinished; nothing is written$",
    ):
        rejection_sample.main()


def test_a_second_stopped_command_leaves_what_the_first_has_kept(tmp_path, monkeypatch, capsys):
    """The same command can be started again, and no answer that was paid for is lost."""
    monkeypatch.setattr(rejection_sample, "received_signal", lambda: signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    words = ["rejection_sample", "--output", "kept.jsonl", "--num_samples", "2"]
    monkeypatch.setattr("sys.argv", words)
    wrong = GOOD.replace("5", "6")
    answers = [[GOOD, wrong], [wrong, " well," + GOOD], [" so" + GOOD, GOOD]]
    for of_command in answers:
        groups = [group(*of_command)]
        monkeypatch.setattr(rejection_sample, "sample_groups", lambda *_, groups=groups: groups)
        rejection_sample.main()
    names = ["kept.jsonl", "kept.jsonl-2", "kept.jsonl-3"]
    kept = [read_jsonl(tmp_path / f"{name}.stopped") for name in names]
    assert [len(rows) for rows in kept] == [1, 1, 2]
    assert kept[0][0]["response"] == GOOD and kept[1][0]["response"] == " well," + GOOD
    rates = [read_jsonl(tmp_path / f"{name}.pass_rates.jsonl") for name in names]
    assert [row["correct"] for [row] in rates] == [1, 1, 2]
    assert not (tmp_path / "kept.jsonl").exists() and "-3.stopped: 2" in capsys.readouterr().out
