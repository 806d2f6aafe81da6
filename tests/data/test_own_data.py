"""Problems and demonstrations from rows of the user's own: files of four formats, folders through
`datasets`, conversations."""

import csv
import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import EvaluateArgs, SFTArgs
from alignment.builders.checks import check_sft
from alignment.builders.data_checks import check_test_split, check_training_split
from alignment.core.records import Problem
from alignment.data.prompts import prompted, read_template
from alignment.data.questions import split_of
from alignment.data.rows import read_rows
from alignment.data.tasks import DataConfig, find_task, published
from alignment.data.tasks.own_data import of_split, read_demonstrations, worked_problems
from alignment.system.errors import UserError

REAL = Path(__file__).parents[3] / "shared" / "dataset"
ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]


def write(file: Path, *rows) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def written(folder: Path, kind: str) -> Path:
    """ROWS in a file of this kind."""
    file = folder / f"rows.{kind}"
    if kind == "csv":
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, ["question", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    elif kind == "json":
        file.write_text(json.dumps(ROWS, indent=2))
    else:
        write(file, *ROWS)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_each_format_gives_the_same_problems(kind, tmp_path):
    task = find_task(f"file:{written(tmp_path, kind)}")
    train, test = (task.problems(split, "") for split in ("train", "test"))
    assert {p.question for p in test} == {
        row["question"] for row in ROWS if split_of(row["question"].lower()) == "test"
    }
    assert sorted((p.question, p.ground_truth) for p in [*train, *test]) == sorted(
        (r["question"], r["answer"]) for r in ROWS
    )
    number = ROWS.index({"question": train[3].question, "answer": train[3].ground_truth}) + 1
    places = {"jsonl": f":{number}", "csv": f":{number + 1}"}
    assert train[3].id == f"{tmp_path}/rows.{kind}" + places.get(kind, f": row {number}")
    assert (task.prompt, task.rules) == ("r1_zero", ("r1_zero", "r1_zero_strict"))


def test_two_files_or_the_splits_of_a_folder_are_taken_as_they_are(tmp_path):
    (tmp_path / "data").mkdir()
    train, test = (
        write(tmp_path / "data/train.jsonl", *ROWS[:30]),
        write(tmp_path / "data/test.jsonl", *ROWS[30:]),
    )
    pytest.importorskip("datasets")
    for task in (
        find_task(f"file:{train}", DataConfig(test_split=str(test))),
        find_task(f"hf:{tmp_path / 'data'}"),
    ):
        assert [p.ground_truth for p in task.problems("train", "")] == [
            row["answer"] for row in ROWS[:30]
        ]
        assert [p.ground_truth for p in task.problems("test", "")] == [
            row["answer"] for row in ROWS[30:]
        ]
    assert task.problems("test", "")[1].id == f"{tmp_path}/data test: row 2"
    with pytest.raises(
        UserError, match="^--test_split validation: --task hf:.* has the splits train, test$"
    ):
        find_task(f"hf:{tmp_path / 'data'}", DataConfig(test_split="validation")).problems(
            "test", ""
        )
    test.unlink()
    (tmp_path / "data").rename(tmp_path / "alone")
    assert 0 < len(find_task(f"hf:{tmp_path / 'alone'}").problems("test", "")) < 15  # by hash
    write(tmp_path / "only/test.jsonl", *ROWS)
    with pytest.raises(
        UserError, match="^every one of 40 training problems asks what a test problem asks"
    ):
        check_training_split(find_task(f"hf:{tmp_path / 'only'}"), "")


def test_what_datasets_cannot_load_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    with pytest.raises(
        UserError, match=rf"^--task hf:{tmp_path}: cannot be loaded \(EmptyDatasetError: "
    ):
        find_task(f"hf:{tmp_path}").problems("train", "")
    (tmp_path / "train.jsonl").write_text('{"question": "a"}\n{"question": ')
    with pytest.raises(
        UserError,
        match=rf"^{tmp_path}/train.jsonl:2: not a JSON object \(Expecting value at column 14\)$",
    ):
        find_task(f"hf:{tmp_path}").problems("train", "")
    monkeypatch.setattr("alignment.data.rows.find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match="^--task hf:a/b needs the library datasets: run with `uv run --extra datasets ...`$",
    ):
        find_task("hf:a/b").problems("test", "")


CELLS = [
    ("7", "", "7", ""),
    (7.5, "", "7.5", ""),
    ("It is so.\n#### 1,000 ", "", "1,000", "It is so."),
    ("2 + 3 = <<2+3=5>>5\n#### 5", "", "5", "2 + 3 = 5"),
    ("Is #1 it?\n#### 7\n#### 8", "", "8", "Is #1 it?\n#### 7"),
    (
        "#### Step 1\nAdd.\n#### Step 2\nSo 22.\n#### 22",
        "",
        "22",
        "#### Step 1\nAdd.\n#### Step 2\nSo 22.",
    ),
    ("Add the numbers, 22.\n####22", "", "22", "Add the numbers, 22."),
    ("Add them.\n#### 22\nI hope this helps.", "", "22", "Add them."),
    ("Add them. ####\n\n 22 \nBye.", "", "22", "Add them."),
    ("So.\n##### 7 eggs \r", "", "7 eggs", "So."),
    ("#### 5\n#### ", "#### (.*)", "5", ""),
    ("#### Step 1\n#### 22\nBye.", "#### (.*)", "22", "#### Step 1"),
    ("####\t-3", "", "-3", ""),
    ("Item #3 of ### is 4", "", "Item #3 of ### is 4", ""),
    ("#### 5", "", "5", ""),
    ("x\ny", "", "x\ny", ""),
    ("A: 3. A: 4", r"A: (\d)$", "4", "A: 3."),
    ("x\ny", "(?s)(.*)", "x\ny", ""),
]


@pytest.mark.parametrize(("cell", "pattern", "answer", "steps"), CELLS)
def test_where_the_answer_is_in_its_cell(cell, pattern, answer, steps):
    rows = [("f:1", {"question": " Why? ", "answer": cell})]
    [(problem, response)] = worked_problems(rows, DataConfig(answer_pattern=pattern))
    assert problem == Problem("f:1", "Why?", problem.prompt, answer)
    assert problem.prompt.endswith("\nUser: Why?\nAssistant: <think>")
    assert response == (f" {steps} </think> <answer> {answer} </answer>" if steps else "")


def test_a_column_of_solutions_is_what_sft_learns_from():
    rows = [
        ("f:1", {"problem": "Two?", "solution": "Well, 2.", "final": 2}),
        ("f:2", {"problem": "3?", "final": 3}),
    ]
    pairs = worked_problems(rows, DataConfig("problem", "final"))
    assert [(problem.question, problem.ground_truth) for problem, _ in pairs] == [
        ("Two?", "2"),
        ("3?", "3"),
    ]
    assert [response for _, response in pairs] == [" Well, 2. </think> <answer> 2 </answer>", ""]


SHAPES = [  # (file, text): each asks "a", whose answer is 1
    ("one_list.jsonl", '[{"question": "a", "answer": "1"}]'),
    ("one_list_in_lines.jsonl", '[\n {"question": "a",\n "answer": 1}\n]\n'),
    ("mac.csv", "question,answer\ra,1\r"),
    ("windows.jsonl", '{"question": "a", "answer": "1"}\r\n'),
    ("bom.csv", "\ufeffquestion,answer\na,1\n"),
    ("empty_column.csv", "question,answer,\na,1,\n"),
    (
        "verl.jsonl",
        '{"prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": 1}}',
    ),
    (
        "verl_as_text.csv",
        'prompt,reward_model\n"[{""role"": ""user"", ""content"": ""a""}]",'
        '"{""ground_truth"": 1}"\n',
    ),
    (
        "parts.jsonl",
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},'
        ' {"role": "assistant", "content": "1"}]}',
    ),
]


@pytest.mark.parametrize(("name", "text"), SHAPES, ids=[name for name, _ in SHAPES])
def test_shapes_of_files_that_say_the_same(name, text, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    [(problem, _)] = worked_problems(read_rows(tmp_path / name), DataConfig())
    assert (problem.question, problem.ground_truth) == ("a", "1")


GOOD = '{"question": "a", "answer": "1"}\n'
BAD = [  # (file, text, flags, message)
    ("e.jsonl", "\n \n", {}, "e.jsonl holds no row"),
    ("e.csv", "question,answer\n", {}, "e.csv holds no row"),
    ("b.jsonl", b"\xff\xfe", {}, "b.jsonl: not UTF-8 text"),
    ("b.csv", b"question,answer\n\xff,1", {}, "b.csv: not UTF-8 text"),
    ("p.parquet", b"PAR1", {}, "p.parquet: cannot be read as Parquet"),
    ("m.jsonl", GOOD + "{oops", {}, "m.jsonl:2: not a JSON object .*column 2"),
    ("l.jsonl", GOOD + "[1]", {}, "l.jsonl:2: not a JSON object"),
    ("l.json", '[{"question": "a", "answer": "1"}, 5]', {}, "l.json: row 2: not a JSON object"),
    ("q.csv", 'question,answer\n"a\nb",1\n"c,2', {}, "q.csv:4: not CSV"),
    (
        "w.csv",
        'question,answer\n"a\nb",1\n\nc,2,3\n',
        {},
        "w.csv:5: has more cells than the heading",
    ),
    (
        "s.csv",
        'question,answer\n"a\nb",1\n\nc\n',
        {},
        's.csv:5: "answer" must hold text or a number, not blank text; the row has',
    ),
    (
        "c.csv",
        "ask,reply\na,1\n",
        {},
        'c.csv:2: there is no "question"; the row has ask, reply: name --question_column',
    ),
    (
        "c.jsonl",
        GOOD,
        {"question_column": "Q"},
        'c.jsonl:1: there is no "Q"; the row has question, answer',
    ),
    (
        "d.jsonl",
        GOOD + '{"question": "b", "final_answer": "1"}',
        {},
        'd.jsonl:2: there is no "answer"',
    ),
    (
        "j.json",
        '[{"question": "a",\n"answer" "1"}]',
        {},
        "j.json:2: not a JSON object .Expecting ':'",
    ),
    ("o.json", GOOD + "5 6", {}, "o.json:2: not a JSON object .Extra data at column 3"),
    ("o2.json", GOOD.strip() + " 5", {}, "o2.json:1: not a JSON object .Extra data at column 34"),
    (
        "k.jsonl",
        GOOD + '{"question": "a", "answer": "1", "answer": "2"}',
        {},
        'k.jsonl:2: has the key "answer" twice',
    ),
    (
        "k.json",
        '[{"question": "a", "answer": "1"}, {"a": [{"b": 1, "b": 1}]}]',
        {},
        'k.json: row 2: has the key "b" twice',
    ),
    ("k.csv", '"question",answer,answer\na,1,2\n', {}, 'k.csv:1: has two columns "answer"'),
    ("k.tsv", "question\tanswer\tquestion\na\t1\tb\n", {}, 'k.tsv:1: has two columns "question"'),
    (
        "f.jsonl",
        '{"question": "a", "answer": "Yes.\\n####  "}',
        {},
        'f.jsonl:1: "answer" holds no answer after its last ####$',
    ),
    (
        "b2.jsonl",
        '{"question": "a", "answer": "\\sqrt{2}"}',
        {},
        r"b2.jsonl:1: not a JSON object .*; a backslash is written \\\\$",
    ),
    ("a.jsonl", '{"question": "a", "answer": NaN}', {}, 'a.jsonl:1: "answer" must hold'),
    ("a2.jsonl", '{"question": "a", "answer": [["1"], "2"]}', {}, 'a2.jsonl:1: "answer" must hold'),
    ("a3.jsonl", '{"question": "a", "answer": -1e400}', {}, 'a3.jsonl:1: "answer" must hold'),
    (
        "n.jsonl",
        '{"question": ["a"], "answer": "1"}',
        {},
        'n.jsonl:1: "question" must hold text or a number',
    ),
    ("t.jsonl", '{"question": "a", "answer": true}', {}, 't.jsonl:1: "answer" .* a truth value'),
    ("u.jsonl", '{"question": "a", "answer": null}', {}, 'u.jsonl:1: "answer" .* nothing .null'),
    ("o.jsonl", '{"question": "a", "answer": {"v": 1}}', {}, "o.jsonl:1: .* not an object; "),
    ("zw.jsonl", '{"question": "a", "answer": "\\u200b"}', {}, "zw.jsonl:1: .* not blank text; "),
    ("z.jsonl", GOOD + "\0\0", {}, "z.jsonl:2: has a zero byte: if it is UTF-16, save it as UTF-8"),
    ("z.csv", "question,answer\na,1\n".encode("utf-16-le"), {}, "z.csv:1: has a zero byte"),
    ("u.csv", "question,answer\na,1\n".encode("utf-16"), {}, "u.csv: .*UTF-16: save it as UTF-8"),
    ("g.jsonl", gzip.compress(GOOD.encode()), {}, "g.jsonl: not UTF-8 .*gzip: unpack it"),
    ("t.xlsx", b"PK\x03\x04", {}, "t.xlsx: not UTF-8 text, but a zip archive, as Excel's"),
    ("semicolons.csv", "question;answer\na;1\n", {}, "semicolons.csv:1: .*semicolons between"),
    ("commas.tsv", "question,answer\na,1\n", {}, "commas.tsv:1: the heading has commas"),
    ("blank.csv", "\nquestion,answer\na,1\n", {}, "blank.csv:1: .*heading, and it is blank"),
    ("case.csv", "question, Answer\na,1\n", {}, 'case.csv:2: .* .did you mean " Answer"'),
    ("box.jsonl", '{"question": "a", "answer": "\\\\boxed{}"}', {}, r"holds no answer in its last"),
    (
        "image.jsonl",
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        {},
        'image.jsonl:1: the "content" of a message has a part that is no text',
    ),
    (
        "silent.jsonl",
        '{"messages": [{"role": "user", "content": null}]}',
        {},
        'silent.jsonl:1: a message of the user has no "content"',
    ),
    ("i.jsonl", '{"question": "a", "answer": 1e999}', {}, 'i.jsonl:1: "answer" must hold'),
    ("h.jsonl", f'{{"question": "a", "answer": {"9" * 5000}}}', {}, "h.jsonl:1: cannot be read"),
    ("r.jsonl", '{"question": "\\ud800", "answer": "1"}', {}, 'r.jsonl:1: "question" must hold'),
    (
        "x.jsonl",
        GOOD,
        {"answer_pattern": "#### (.*)"},
        'x.jsonl:1: "answer" holds no answer where --answer_pattern #### ',
    ),
    (
        "v.jsonl",
        GOOD,
        {"answer_pattern": "("},
        r"^--answer_pattern \(: must be a regular expression with a group",
    ),
    (
        "v2.jsonl",
        GOOD,
        {"answer_pattern": ".*"},
        r"^--answer_pattern \.\*: must be a regular expression with a group",
    ),
]


@pytest.mark.parametrize(("name", "text", "flags", "message"), BAD, ids=[name for name, *_ in BAD])
def test_what_is_wrong_is_said_with_its_place(name, text, flags, message, tmp_path):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        find_task(
            f"file:{tmp_path / name}", DataConfig(**flags, test_split=str(tmp_path / name))
        ).problems("test", "")


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        (
            "gsm8k",
            {"question_column": "q"},
            "^--task gsm8k has rows of its own: --question_column, .* go with file:",
        ),
        ("file:", {}, "^--task file: names nothing: write file:FILE, or hf:NAME$"),
        ("hf:", {}, "^--task hf: names nothing"),
        ("file:{folder}", {}, "is a folder: name a file in it"),
        ("file:{folder}/none.csv", {}, "none.csv does not exist"),
        (
            "file:{folder}/a.jsonl",
            {},
            "1 rows are too few to hold some out for .* all of these, --test_split /.*/a.jsonl$",
        ),
        ("file:{folder}/a.jsonl", {"test_split": "none"}, "none does not exist"),
    ],
)
def test_flags_that_do_not_fit(task, flags, message, tmp_path):
    write(
        tmp_path / "a.jsonl",
        {"question": next(q for q in map(str, range(99)) if split_of(q) == "test"), "answer": "1"},
    )
    flags = {name: value.replace("{folder}", str(tmp_path)) for name, value in flags.items()}
    args = EvaluateArgs(task=task.replace("{folder}", str(tmp_path)), **flags)
    with pytest.raises(UserError, match=message):
        for split in ("test", "train"):
            find_task(args.task, args.data).problems(split, args.dataset_path)


def test_training_questions_that_the_test_split_asks_are_left_out(tmp_path, capsys):
    train = write(
        tmp_path / "train.jsonl", *ROWS[:6], {"question": " what IS 0 + 0?", "answer": "0"}
    )
    test = write(tmp_path / "test.jsonl", ROWS[0], ROWS[0], ROWS[3])
    task, data = f"file:{train}", DataConfig(test_split=str(test))
    check_test_split(find_task(task, data), "", 0)
    assert "1 of 3 questions twice or more" in capsys.readouterr().err
    check_training_split(find_task(task, data), "")
    assert (
        "3 of 7 training problems ask what a test problem asks: they are left out"
        in capsys.readouterr().err
    )
    assert [problem.ground_truth for problem in find_task(task, data).training_problems("")] == [
        "2",
        "4",
        "8",
        "10",
    ]
    worked = write(tmp_path / "worked.jsonl", *({**row, "solution": "so"} for row in ROWS[:6]))
    shown = check_sft(
        SFTArgs(task=f"file:{worked}", test_split=str(test), sft_base=str(tmp_path / "x"))
    )
    assert {problem.ground_truth for problem, _ in shown["train"]} <= {"2", "4", "8", "10"}
    assert (
        "demonstrations ask what a test problem asks: they are left out" in capsys.readouterr().err
    )


def test_sft_needs_worked_solutions(tmp_path):
    task = f"file:{write(tmp_path / 'a.jsonl', *ROWS)}"
    with pytest.raises(
        UserError,
        match="^0 rows are too few to train on: SFT needs --demonstrations, or rows with worked",
    ):
        check_sft(SFTArgs(task=task, sft_base=str(tmp_path / "x")))


@given(st.lists(st.text(max_size=12), min_size=2, max_size=4, unique=True))
def test_csv_cells_are_read_as_they_were_written(tmp_path_factory, cells):
    file = tmp_path_factory.mktemp("csv") / "a.csv"
    with file.open("w", newline="", encoding="utf-8", errors="replace") as opened:
        csv.writer(opened).writerows([["prompt", "response"], *([cell, "r"] for cell in cells)])
    try:
        read = [problem.prompt for problem, _ in read_demonstrations(str(file))]
    except UserError as error:
        assert "a.csv" in str(error)
    else:
        expected = [
            cell.encode(errors="replace").decode().replace("\r\n", "\n").replace("\r", "\n")
            for cell in cells
        ]
        assert read == expected


# --- demonstrations -------------------------------------------------------------------------------


def turns(*texts: str) -> list[dict]:
    return [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, texts, strict=False)
    ]


@pytest.mark.parametrize(
    ("row", "question", "prompt", "response"),
    [
        ({"question": "Q", "response": " R"}, "Q", "", " R"),
        ({"prompt": "P", "response": " R"}, "", "P", " R"),
        ({"prompt": "P", "completion": " R"}, "", "P", " R"),
        ({"question": "Q", "completion": 7}, "Q", "", "7"),
        ({"messages": turns("Q", " R")}, "Q", "", " R"),
    ],
)
def test_the_shapes_of_demonstrations(row, question, prompt, response, tmp_path):
    file = str(write(tmp_path / "rows.jsonl", row))
    assert read_demonstrations(file) == [(Problem(f"{file}:1", question, prompt, ""), response)]


@pytest.mark.parametrize("columns", [("messages",), ("prompt", "completion")])
def test_messages_of_demonstrations_may_be_json_text_and_have_parts(columns, tmp_path):
    """As in a CSV file, and as chats with images have them: what the same messages of texts say."""
    plain = turns("Q", " R", "Q2", "R2")
    in_parts = [dict(turn) for turn in plain]
    in_parts[1]["content"] = [{"type": "text", "text": " "}, {"type": "text", "text": "R"}]
    cells = {"messages": in_parts, "prompt": in_parts[:1], "completion": in_parts[1:]}
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([columns, [json.dumps(cells[name]) for name in columns]])
    told = tuple((turn["role"], turn["content"]) for turn in plain)
    assert read_demonstrations(str(file)) == [
        (Problem(f"{file}:2", "Q", "", "", told[:1]), " R"),
        (Problem(f"{file}:2", "Q2", "", "", told[:3]), "R2"),
    ]


QUESTIONED = [{"role": "system", "content": "S"}, *turns("Q", "R", "Q2", "R2")]
TOLD = tuple((turn["role"], turn["content"]) for turn in QUESTIONED)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"messages": QUESTIONED}, [("Q", TOLD[:2], "R"), ("Q2", TOLD[:4], "R2")]),
        ({"messages": QUESTIONED[:3]}, [("Q", TOLD[:2], "R")]),
        ({"prompt": QUESTIONED[:4], "completion": QUESTIONED[4:]}, [("Q2", TOLD[:4], "R2")]),
        ({"prompt": turns("Q"), "completion": turns("", "R")[1:]}, [("Q", (("user", "Q"),), "R")]),
    ],
)
def test_each_turn_of_the_assistant_that_is_no_prompt_is_a_demonstration(row, shown, tmp_path):
    file = str(write(tmp_path / "rows.jsonl", row))
    expected = [
        (Problem(f"{file}:1", question, "", "", before), response)
        for question, before, response in shown
    ]
    assert read_demonstrations(file) == expected


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}{% if"
    " add_generation_prompt %}[assistant]{% endif %}"
)


def test_the_chat_template_makes_the_prompt_of_a_conversation(tiny_folder, tmp_path):
    """The tokens of its prompt are not trained; those of the response are, and EOS."""
    from alignment.builders.warm_start import tokenise_demonstrations
    from alignment.model.loading import load_tokenizer

    file, tokenizer = (
        str(write(tmp_path / "rows.jsonl", {"messages": QUESTIONED})),
        load_tokenizer(str(tiny_folder)),
    )
    demonstrations = [
        *read_demonstrations(file),
        (Problem("2", "Why?", "", ""), " So."),
        (Problem("3", "", "P:", ""), " 7"),
    ]
    with pytest.raises(
        UserError,
        match=f"^{file}:1: it is a chat, and the tokenizer of this model has no chat template$",
    ):
        tokenise_demonstrations(SFTArgs(), demonstrations, tokenizer, 256)
    tokenizer.chat_template = TEMPLATE
    texts = [
        tuple(map(tokenizer.decode, example))
        for example in tokenise_demonstrations(SFTArgs(), demonstrations, tokenizer, 256)
    ]
    end = "<|endoftext|>"
    first = f"[system]S{end}[user]Q{end}[assistant]"
    assert texts == [
        (first, f"R{end}"),
        (f"{first}R{end}[user]Q2{end}[assistant]", f"R2{end}"),
        ("User: Why?\nAssistant: <think>", f" So.{end}"),
        ("P:", f" 7{end}"),
    ]


def test_a_conversation_is_in_one_split_and_an_earlier_turn_counts_as_asked(tmp_path, capsys):
    rows = [{"messages": [*turns(f"Q{i}", "R"), *turns(f"and {i}?", "R2")]} for i in range(10)]
    shown = [
        of_split(read_demonstrations(str(write(tmp_path / "a.jsonl", *rows))), s, 0)
        for s in ("train", "test")
    ]
    train, test = ({problem.id for problem, _ in split} for split in shown)
    assert (
        not train & test and len(train | test) == 10 and [len(split) for split in shown] == [18, 2]
    )
    task = find_task("arithmetic")
    tested = task.problems("test", "")[0].question
    problem = Problem("a", "Why?", "", "", (("user", tested), ("assistant", "R"), ("user", "Why?")))
    assert task.untested([(problem, "R"), (dataclasses.replace(problem, turns=()), "R")], "") == [
        (dataclasses.replace(problem, turns=()), "R")
    ]


def test_a_row_has_none_where_it_lacks_a_column_of_others(tmp_path):
    rows = [{"question": "Q", "answer": "1"}, {"question": "Q2", "answer": "2", "tests": "t"}]
    pairs = worked_problems(read_rows(write(tmp_path / "a.jsonl", *rows)), DataConfig())
    assert [problem.columns["tests"] for problem, _ in pairs] == [None, "t"]


def test_a_conversation_that_asks_a_test_question_is_left_out(tmp_path, capsys):
    tested = find_task("arithmetic").problems("test", "")[0].question
    rows = [{"messages": turns(text, "R")} for text in (tested, "Why?", "How?")]
    files = (str(write(tmp_path / "a.jsonl", *rows)),)
    splits = check_sft(SFTArgs(demonstrations=files, sft_base=str(tmp_path / "x")))
    assert tested not in {problem.question for problem, _ in splits["train"]}
    left_out = "1 of 2 demonstrations ask" in capsys.readouterr().err
    assert left_out or tested in {problem.question for problem, _ in splits["test"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": turns("Q")},
            "turns must be of user and assistant in turn, after one of system or none, not ..user",
        ),
        ({"messages": turns("Q", "R", "Q2")}, "turns must be of user and assistant in turn"),
        (
            {"messages": [*turns("Q", "R"), {"role": "system", "content": "S"}]},
            "turns must be of user and assistant in turn",
        ),
        (
            {"messages": [*turns("Q", "R"), {"role": "tool", "content": "S"}]},
            "turns must be of .* 'tool'",
        ),
        ({"messages": ["Q", "R"]}, "turns must be of user and assistant in turn"),
        (
            {"messages": []},
            'there is no "response"; the row has messages; a demonstration has',
        ),
        ({"messages": turns("Q", "")}, '"content" must hold'),
        (
            {"messages": [{"role": "user", "content": ["parts"]}, turns("", "R")[1]]},
            'the "content" of a message has a part that is no text',
        ),
        ({"prompt": turns("Q", "R"), "completion": []}, '"completion" must hold'),
        (
            {"prompt": turns("Q"), "completion": turns("Q")},
            "turns must be of user and assistant in turn",
        ),
        ({"prompt": turns("Q"), "completion": "R"}, '"prompt" must hold'),
        (
            {"prompt": "P"},
            ('there is no "response"; the row has prompt; a demonstration has a "question" or'),
        ),
        ({"prompt": ["P"], "completion": "R"}, '"prompt" must hold'),
    ],
)
def test_demonstrations_that_are_none(row, message, tmp_path):
    with pytest.raises(UserError, match=f"rows.jsonl:2: {message}"):
        read_demonstrations(
            str(write(tmp_path / "rows.jsonl", {"prompt": "a", "response": "b"}, row))
        )


# --- templates ------------------------------------------------------------------------------------


def test_a_template_is_a_file_with_a_place_for_the_question(tmp_path):
    (tmp_path / "own.txt").write_text("Q: {question}\nA:\n")
    assert read_template(str(tmp_path / "own.txt")) == "Q: {question}\nA:"
    [problem] = prompted([Problem("1", "1 {x}?", "", "")], str(tmp_path / "own.txt"), None)
    assert problem.prompt == "Q: 1 {x}?\nA:"
    (tmp_path / "own.txt").write_text("Q: {problem}")
    with pytest.raises(
        UserError, match=r"own.txt: the file has no place for the question; write \{question\}"
    ):
        read_template(str(tmp_path / "own.txt"))
    with pytest.raises(
        UserError,
        match=r"^--prompt .*none.txt: there is no such template \(did you mean .*own.txt\?\); "
        "choose one of boxed, chat, ",
    ):
        read_template(str(tmp_path / "none.txt"))


# --- real data ------------------------------------------------------------------------------------


def test_gsm8k_by_flags_is_gsm8k():
    if not (REAL / "gsm8k").is_dir():
        pytest.skip(f"the real GSM8K files are not at {REAL}")
    task = find_task(
        f"file:{REAL}/gsm8k/train.jsonl", DataConfig(test_split=f"{REAL}/gsm8k/test.jsonl")
    )
    for split in ("train", "test"):
        ours, theirs = task.problems(split, ""), published.problems("gsm8k", split, f"{REAL}/gsm8k")
        for our, their in zip(ours, theirs, strict=True):
            assert (our.question, our.prompt, our.ground_truth) == (
                their.question,
                their.prompt,
                their.ground_truth,
            )
    shown = {
        response for split in ("train", "test") for _, response in task.demonstrations(split, "", 0)
    }
    assert shown == {
        response for _, response in published.demonstrations("gsm8k", "train", f"{REAL}/gsm8k")
    }
    check_training_split(task, "")


def test_svamp_by_flags():
    if not (REAL / "svamp").is_dir():
        pytest.skip(f"the real SVAMP files are not at {REAL}")
    json_task = find_task(f"file:{REAL}/svamp/SVAMP.json", DataConfig("Question", "Answer"))
    problems = [*json_task.problems("train", ""), *json_task.problems("test", "")]
    assert len(problems) == 1000
    first = next(p for p in problems if p.id.endswith("row 1"))
    assert (first.question, first.ground_truth) == (
        "How much do you have to pay to buy each pack?",
        "51.0",
    )
    csv_task = find_task(
        f"file:{REAL}/svamp/mawps-asdiv-a_train.csv", DataConfig("Question", "Answer")
    )
    problems = [*csv_task.problems("train", ""), *csv_task.problems("test", "")]
    assert (
        len(problems) == 3138
        and next(p for p in problems if p.id.endswith(":2")).ground_truth == "504.0"
    )
