r"""What is said of rows that look wrong: one line a kind, with the first place. JSON reads "\frac"
as a form feed and "rac"."""

import json

import pytest

from alignment.core.records import Problem
from alignment.data.row_warnings import (
    conflicting,
    is_placeholder,
    misread_command,
    stripped,
    warn_of_answers,
)
from alignment.data.rows import read_rows
from alignment.data.tasks import DataConfig
from alignment.data.tasks.own_data import read_demonstrations, worked_problems
from alignment.system.terminal import printable


@pytest.mark.parametrize(
    ("source", "instead", "command"),
    [
        # Texts as they stand in a JSON file, with one backslash.
        (r"\frac{22}{7}", 'a form feed before "rac"', r"\frac"),
        (r"x is \frac12", 'a form feed before "rac"', r"\frac"),
        (r"3 \times 4", 'a tab before "imes"', r"\times"),
        (r"\theta", 'a tab before "heta"', r"\theta"),
        (r"\boxed{5}", 'a backspace before "oxed"', r"\boxed"),
        (r"\beta + 1", 'a backspace before "eta"', r"\beta"),
        (r"\rho", 'a carriage return before "ho"', r"\rho"),
        (r"a \neq b", 'a line break before "eq"', r"\neq"),
        (r"if $x \ne 0$", 'a line break before "e"', r"\ne"),
        (r"\nabla f", 'a line break before "abla"', r"\nabla"),
        (r"\\\\frac{22}{7}", 'two backslashes before "frac"', r"\frac"),
        (r"2\\\\sqrt{3}", 'two backslashes before "sqrt"', r"\sqrt"),
        # Python writes these from a string that is not raw.
        (r"\u000bec{x}", 'a vertical tab before "ec"', r"\vec"),
        (r"\u0007lpha", 'a bell before "lpha"', r"\alpha"),
    ],
)
def test_a_lost_or_doubled_backslash_is_named(source, instead, command):
    assert misread_command(json.loads(f'"{source}"')) == (instead, command)


@pytest.mark.parametrize(
    "source",
    [
        r"\\frac{22}{7}",
        r"a\tb",
        r"name\tanswer",
        r"Let x = 3.\ne is the base.\nu = 3.\nnot so.\nexample",
        r"So.\n\nTherefore 5.\n#### 5",
        r"\\begin{pmatrix} 1 \\\\cos x \\end{pmatrix}",
        r"C:\\\\users",
        "line\\r\\nright",
        "",
    ],
)
def test_text_that_may_be_meant_is_not_named(source):
    assert misread_command(json.loads(f'"{source}"')) is None


def test_white_space_is_stripped_but_not_what_stands_for_a_backslash():
    assert stripped(" \n5\t ") == "5"
    assert stripped("\frac{1}{2} ") == "\frac{1}{2}"
    assert stripped(" \theta") == "\theta"
    assert stripped("\tan apple") == "\tan apple"  # \tan
    assert stripped("\tapple") == "apple"
    assert stripped(" \f ") == ""


def test_one_line_for_a_file_names_its_first_row(tmp_path, capsys):
    lines = [
        r'{"question": "a", "answer": "5"}',
        r'{"question": "b", "answer": "\frac{22}{7}"}',
        r'{"question": "c \times", "answer": "\frac{1}{7}"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pairs = worked_problems(read_rows(tmp_path / "a.jsonl"), DataConfig())
    assert [problem.ground_truth for problem, _ in pairs] == ["5", "\frac{22}{7}", "\frac{1}{7}"]
    assert capsys.readouterr().err == (
        rf'warning: {tmp_path}/a.jsonl:2: "answer" has a form feed before "rac", where \frac was'
        r" probably meant; "
        'JSON writes that "\\\\frac"; 2 rows of this kind\n'
    )


def test_demonstrations_are_looked_at_too(tmp_path, capsys):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": r"\boxed{5}"}]
    text = json.dumps({"messages": messages}).replace(r"\\boxed", r"\boxed")
    (tmp_path / "a.jsonl").write_text(text + '\n{"prompt": "P", "completion": " \\times"}\n')
    read_demonstrations(str(tmp_path / "a.jsonl"))
    said = capsys.readouterr().err
    assert said.startswith(
        rf'warning: {tmp_path}/a.jsonl:1: "content" has a backspace before "oxed", where \boxed was'
    )
    assert said.endswith("2 rows of this kind\n") and said.count("\n") == 1


def problem(number: int, question: str, answer: str) -> Problem:
    return Problem(f"f:{number}", question, "", answer)


def test_answers_that_are_none_are_counted(capsys):
    answers = ["22", "proof", "notfound", " Proof", "N/A", "no solution", "proof that", "0"]
    warn_of_answers(
        [problem(number, f"{number}?", answer) for number, answer in enumerate(answers)]
    )
    said = capsys.readouterr().err
    assert said.startswith(
        "warning: 4 of 8 answers say that there is none (proof 1, notfound 1,  Proof 1, N/A 1), the"
        " first at f:1: "
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "answer", ["Proof.", "(N/A)", "TBD", "?", "-", r"\text{proof}", "证明", "略"]
)
def test_answers_that_say_that_there_is_none(answer):
    assert is_placeholder(answer)


@pytest.mark.parametrize(
    "answer", ["none", "undefined", "no solution", "-5", "0", "proof by parity"]
)
def test_answers_that_may_be_meant(answer):
    assert not is_placeholder(answer)


def test_a_question_with_two_answers_is_named(capsys):
    rows = [
        ("a?", "22"),
        ("A ?", "1"),
        ("b?", "1"),
        ("a?", "22"),
        (" A? ", "23"),
        ("a?", "24"),
        ("b?", " 1"),
        ("A ?", "X"),
        ("A ?", "x"),
    ]
    problems = [problem(number, *row) for number, row in enumerate(rows)]
    assert {key: (first.id, other.id) for key, (first, other) in conflicting(problems).items()} == {
        "a?": ("f:0", "f:4"),
        "a ?": ("f:1", "f:7"),
    }
    warn_of_answers(problems)
    assert (
        capsys.readouterr().err
        == "warning: 2 questions come with different answers, as in f:0 (22) and f:4 (23): each row"
        " is graded by its own\n"
    )
    warn_of_answers(problems[:4])
    assert capsys.readouterr().err == ""


def test_control_characters_are_written_out_as_what_they_are():
    """A tab must not look like a backslash and a t."""
    assert (
        printable("\times \frac\n\boxed\r\x1b\v")
        == "<tab>imes <form feed>rac\n<backspace>oxed<carriage return>\\x1b<vertical tab>"
    )
    assert printable("a\nb\\t", line_breaks=False) == "a<line break>b\\t"
