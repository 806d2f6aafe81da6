"""Where golds come from: marks, boxes, nested cells and messages; what no response can meet."""

import json

import pytest

from alignment.data.answer_cells import final_answer
from alignment.data.row_warnings import LONGEST_GRADED, why_unmeetable
from alignment.data.rows import read_rows
from alignment.data.tasks.own_data import DataConfig, read_demonstrations, worked_problems
from alignment.rewards.grading.cascade import MAX_CHARS
from alignment.system.errors import UserError

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 0},
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "2 + 3 is 5.\n#### 5"},
]


def write_rows(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def golds(tmp_path, *rows, **columns):
    pairs = worked_problems(read_rows(write_rows(tmp_path, *rows)), DataConfig(**columns))
    return [(problem.question, problem.ground_truth) for problem, _ in pairs]


@pytest.mark.parametrize(
    ("cell", "steps", "answer", "source"),
    [
        ("22", "", "22", "whole cells"),
        ("a\n#### 22", "a\n", "22", "after ####"),
        ("a #### b #### 22 \nthe end", "a #### b ", "22", "after ####"),
        ("a####22", "a", "22", "after ####"),
        (r"\boxed{7}", "", "7", r"in \boxed{}"),
        (r"$\boxed{\frac{1}{2}}$.", "", r"\frac{1}{2}", r"in \boxed{}"),
        (r"So $x = \boxed{\frac{1}{2}}$.", None, r"\frac{1}{2}", r"in \boxed{}"),
        ("First \\boxed{3}.\nSo \\boxed{x_{12}}.", None, "x_{12}", r"in \boxed{}"),
        (r"So \boxed{3} or \boxed{5}.", None, "3, 5", r"in \boxed{}"),
        (r"So \boxed{3} = \boxed{3}.", None, "3", r"in \boxed{}"),
        (r"So \boxed{\boxed{3}}.", None, r"\boxed{3}", r"in \boxed{}"),
        (r"So \fbox{\{1, 2\}}.", None, r"\{1, 2\}", r"in \boxed{}"),
        (r"So \boxed{3", "", r"So \boxed{3", "whole cells"),
        (r"\boxed 7", "", "7", r"in \boxed{}"),
        (r"\boxed{3} #### 4", r"\boxed{3} ", "4", "after ####"),
    ],
)
def test_the_final_answer_of_a_cell(cell, steps, answer, source):
    # None: the whole cell is the worked solution.
    assert final_answer(cell) == (cell if steps is None else steps, answer, source)


def test_one_line_says_how_many_golds_come_from_what(tmp_path, capsys):
    cells = ["a #### 1", "b #### 2", r"so \boxed{3}", "a worked solution without a mark"]
    rows = [{"question": f"{cell}?", "answer": cell} for cell in cells]
    assert [gold for _, gold in golds(tmp_path, *rows)] == ["1", "2", "3", cells[-1]]
    file = tmp_path / "rows.jsonl"
    assert capsys.readouterr().err == (
        rf"answers: 2 after #### (first {file}:1), 1 in \boxed{{}} (first {file}:3), 1 whole cells"
        f' without a mark (first {file}:4: "a worked solution without a mark")\n'
    )
    golds(tmp_path, {"question": "a", "answer": "1"})
    assert capsys.readouterr().err == ""


# --- rows in other projects' shapes ---------------------------------------------------------------


def test_rows_of_verl_are_read(tmp_path, capsys):
    listed = VERL | {"reward_model": {"ground_truth": ["7"]}}
    assert golds(tmp_path, VERL, listed) == [("What is 2 + 3?", "5"), ("What is 2 + 3?", "7")]
    assert '2 whole cells, "reward_model.ground_truth"' in capsys.readouterr().err
    named = {"question_column": "prompt", "answer_column": "reward_model.ground_truth"}
    assert golds(tmp_path, VERL, **named) == [("What is 2 + 3?", "5")]
    printed = {name: str(cell) for name, cell in VERL.items()}  # as pandas writes CSV
    assert golds(tmp_path, printed) == [("What is 2 + 3?", "5")]
    nested = {"question_column": "extra_info.question", "answer_column": "extra_info.answer"}
    row = {"extra_info": {"question": "Q?", "answer": 4}}
    assert golds(tmp_path, row, **nested) == [("Q?", "4")]


def test_one_line_says_which_column_was_taken_for_the_question(tmp_path, capsys):
    prompt = {"prompt": "1 + 1?", "answer": "2"}
    assert golds(tmp_path, prompt) == [("1 + 1?", "2")]
    assert capsys.readouterr().err == 'questions: column "prompt"\n'
    golds(tmp_path, prompt, {"question": "2 + 2?", "answer": "4"}, prompt)
    assert capsys.readouterr().err == ('questions: 2 of column "prompt", 1 of column "question"\n')
    golds(tmp_path, prompt, question_column="prompt")  # the user has named it
    assert capsys.readouterr().err == ""


def test_messages_are_a_question_and_a_solution(tmp_path, capsys):
    pairs = worked_problems(read_rows(write_rows(tmp_path, {"messages": CHAT})), DataConfig())
    [(problem, response)] = pairs
    assert (problem.question, problem.ground_truth) == ("What is 2 + 3?", "5")
    assert response == " 2 + 3 is 5. </think> <answer> 5 </answer>"
    assert "it is not asked; give --system_prompt" in capsys.readouterr().err
    with_answer = {"messages": CHAT[1:2], "answer": "5"}
    assert golds(tmp_path, with_answer) == [("What is 2 + 3?", "5")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CHAT[:2]}, "rows.jsonl:1: the last turn of .* is missing"),
        ({"messages": CHAT + CHAT[1:]}, 'rows.jsonl:1: "messages" must hold one message of the'),
        ({"messages": CHAT[2:]}, 'rows.jsonl:1: "messages" must hold one message of the user'),
        (VERL | {"reward_model": {"style": "rule"}}, 'rows.jsonl:1: there is no "answer"'),
        (VERL | {"reward_model": {"ground_truth": {"target": 5}}}, "rows.jsonl:1: .* must hold"),
        (VERL | {"prompt": []}, 'rows.jsonl:1: "prompt" must hold text'),
    ],
)
def test_other_shapes_are_refused_with_their_place(row, message, tmp_path):
    with pytest.raises(UserError, match=message):
        golds(tmp_path, row)


def test_a_demonstration_without_its_last_turn_says_so(tmp_path):
    with pytest.raises(UserError, match="rows.jsonl:1: .*the last turn is missing, the assistant"):
        read_demonstrations(str(write_rows(tmp_path, {"messages": CHAT[:2]})))


def test_a_cell_of_csv_may_be_of_any_length(tmp_path):
    question = "x" * 200_000
    (tmp_path / "a.csv").write_text(f"question,answer\n{question},5\n")
    [(problem, _)] = worked_problems(read_rows(tmp_path / "a.csv"), DataConfig())
    assert len(problem.question) == 200_000


# --- what no response can meet --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "is_met"),
    [
        ("['3', '5']", False),
        ('["3"]', False),
        ("('a', 'b')", False),
        ("{'x': 3}", False),
        ("array([3])", False),
        (r"So \boxed{3", False),
        ("word " * 26, False),
        ("word " * 25, True),
        (r"\{1: 2\}", True),
        ("x" * 1001, False),
        ("[3, 5]", True),
        ("3', 5'", True),
        ("(1, 2)", True),
        ("x" * 1000, True),
    ],
)
def test_answers_that_no_response_can_meet(answer, is_met):
    assert (why_unmeetable(answer) == "") == is_met
    assert LONGEST_GRADED == MAX_CHARS


def test_they_are_counted_in_one_line(tmp_path, capsys):
    rows = []
    for number, answer in enumerate(["1", "['3', '5']", "['7']", "x" * 2000]):
        rows.append({"question": f"{number}?", "answer": answer})
    golds(tmp_path, *rows)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        "3 of 4 answers can be met by no response (2 a list in a program's spelling, 1 longer"
        in (said)
    )
    assert f"{tmp_path / 'rows.jsonl'}:2" in said
