"""Every source of rows gives the same text: what a cell says, with all its digits, whichever file
or library brings it."""

import decimal
import gzip
import json
from pathlib import Path

import pytest

from alignment.data.rows import hub_splits, read_rows
from alignment.data.tasks import DataConfig, find_task
from alignment.data.tasks.own_data import worked_problems
from alignment.rewards.rules import find_rule
from alignment.system.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

# Texts that a reader which guesses types would change, or take for nothing.
TEXTS = [
    "None",
    "NA",
    "nan",
    "null",
    "True",
    "false",
    "007",
    "1e5",
    "1E5",
    "-0.0",
    "+5",
    "0.10",
    "1e400",
    "9007199254740993",
    "12345678901234567890.123",
    "1,000",
    "2024-01-05",
    "3/4",
    "inf",
    "٣",
    "0x10",
    '"7"',
    "a\\frac{1}{2}",
]


def golds(file: Path) -> list[str]:
    return [problem.ground_truth for problem, _ in worked_problems(read_rows(file), DataConfig())]


def rows_of(answers) -> list[dict]:
    return [{"question": f"Q{number}?", "answer": answer} for number, answer in enumerate(answers)]


def write_text(file: Path, rows: list[dict]) -> Path:
    """The rows as JSON lines, a JSON list, CSV or TSV."""
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    elif file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        separator = {".csv": ",", ".tsv": "\t"}[file.suffix]
        quoted = ['"' + row["answer"].replace('"', '""') + '"' for row in rows]
        lines = [
            f"{row['question']}{separator}{cell}" for row, cell in zip(rows, quoted, strict=True)
        ]
        file.write_text("\n".join([f"question{separator}answer", *lines]) + "\n")
    return file


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_text_stays_text_in_a_file_and_in_a_folder(kind, tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    file = write_text(tmp_path / f"data/train.{kind}", rows_of(TEXTS))
    assert golds(file) == TEXTS
    splits = hub_splits("--task", "", str(tmp_path / "data"))
    assert [row["answer"] for row in splits["train"]] == TEXTS
    assert [row["answer"] for row in splits["train"]] == TEXTS  # a second time, too


def test_a_right_answer_of_many_digits_is_paid_by_hf_and_a_wrong_one_is_not(tmp_path):
    """As float64, 9007199254740993 is 9007199254740992."""
    pytest.importorskip("datasets")
    write_text(tmp_path / "train.csv", rows_of(["9007199254740993", "2.5"] * 20))
    write_text(tmp_path / "test.csv", rows_of(["9007199254740993", "2.5"]))
    problem, _ = find_task(f"hf:{tmp_path}").problems("test", "")
    assert problem.ground_truth == "9007199254740993"
    paid = {
        answer: find_rule("r1_zero")(
            f" </think> <answer> {answer} </answer>", problem.ground_truth
        )["reward"]
        for answer in ("9007199254740993", "9007199254740992", "9007199254740992.0")
    }
    assert paid == {"9007199254740993": 1, "9007199254740992": 0, "9007199254740992.0": 0}


JSON_NUMBERS = {
    "9007199254740993": "9007199254740993",
    "12345678901234567890.123": "12345678901234567890.123",
    "0.10": "0.10",
    "1E5": "1E5",
    "-0.0": "-0.0",
    "5": "5",
    "123456789012345678901234567890": "123456789012345678901234567890",
    "1e-7": "1e-7",
    "22.0": "22.0",
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_numbers_of_json_keep_their_digits(name, tmp_path):
    rows = [f'{{"question": "Q{number}?", "answer": {number}}}' for number in JSON_NUMBERS]
    (tmp_path / name).write_text(f"[{','.join(rows)}]" if name == "a.json" else "\n".join(rows))
    assert golds(tmp_path / name) == list(JSON_NUMBERS.values())
    problem, _ = worked_problems(read_rows(tmp_path / name), DataConfig())[2]
    # a plain number for functions
    assert problem.columns["answer"] == 0.1 and type(problem.columns["answer"]) is float


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        # 0.1 as float32 is 0.100000001490116...; 0.1 is the shortest decimal that rounds to it.
        (
            pyarrow.array([0.1, 22.1, -0.0, 16777216.0, 1e20, 1 / 3], pyarrow.float32()),
            ["0.1", "22.1", "-0.0", "16777216.0", "1e+20", "0.33333334"],
        ),
        (
            pyarrow.array([0.1, 0.5, 2048.0], pyarrow.float32()).cast(pyarrow.float16()),
            ["0.1", "0.5", "2048.0"],
        ),
        (pyarrow.array([0.1, 1 / 3]), ["0.1", "0.3333333333333333"]),
        (
            pyarrow.array(
                [decimal.Decimal("22.10"), decimal.Decimal("-1000000.00")],
                pyarrow.decimal128(20, 2),
            ),
            ["22.10", "-1000000.00"],
        ),
        (pyarrow.array([decimal.Decimal("7")], pyarrow.decimal256(40, 0)), ["7"]),
        (
            pyarrow.array([2**53 + 1, -(2**63)], pyarrow.int64()),
            ["9007199254740993", "-9223372036854775808"],
        ),
        (pyarrow.array([2**64 - 1], pyarrow.uint64()), ["18446744073709551615"]),
        (pyarrow.array(["None", "x"]).dictionary_encode(), ["None", "x"]),
        (pyarrow.array(["True"], pyarrow.large_string()), ["True"]),
    ],
    ids=lambda value: str(value.type) if hasattr(value, "type") else "",
)
def test_numbers_of_parquet_are_read_as_they_were_meant(column, expected, tmp_path):
    questions = [f"Q{number}?" for number in range(len(column))]
    parquet.write_table(
        pyarrow.table({"question": questions, "answer": column}), tmp_path / "train.parquet"
    )
    assert golds(tmp_path / "train.parquet") == expected


def test_short_floats_inside_lists_and_structs_are_short_too(tmp_path):
    kind = pyarrow.struct({"all": pyarrow.list_(pyarrow.float32())})
    table = pyarrow.table(
        {"question": ["Q?"], "answer": ["1"], "more": pyarrow.array([{"all": [0.1, None]}], kind)}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    [(_, row)] = read_rows(tmp_path / "a.parquet")
    assert row["more"] == {"all": [0.1, None]}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pyarrow.array([True]), 'a.parquet: row 1: "answer" must hold text or a number'),
        (pyarrow.array([None], pyarrow.string()), 'a.parquet: row 1: "answer" must hold'),
        (pyarrow.array([float("nan")], pyarrow.float32()), 'a.parquet: row 1: "answer" must hold'),
        (pyarrow.array([float("inf")]), 'a.parquet: row 1: "answer" must hold'),
        (pyarrow.array([["1", "2"]]), 'a.parquet: row 1: "answer" must hold'),
        (pyarrow.array([b"1"]), 'a.parquet: row 1: "answer" must hold'),
    ],
    ids=lambda value: str(value.type) if hasattr(value, "type") else "",
)
def test_cells_that_are_no_answer_are_refused_with_their_place(column, message, tmp_path):
    parquet.write_table(
        pyarrow.table({"question": ["Q?"], "answer": column}), tmp_path / "a.parquet"
    )
    with pytest.raises(UserError, match=message):
        golds(tmp_path / "a.parquet")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"])] * 3, names=["question", "answer", "answer"]
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match='a.parquet: has two columns "answer": which one counts?'):
        read_rows(tmp_path / "a.parquet")


def test_marks_and_line_ends_of_windows_and_unnamed_columns_are_no_text(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbfquestion,answer,,\r\n"a\r\nb",22,0,\r\nc,None,1,\r\n')
    assert [
        (p.id, p.question, p.ground_truth)
        for p, _ in worked_problems(read_rows(file), DataConfig())
    ] == [
        (f"{file}:3", "a\nb", "22"),
        (f"{file}:4", "c", "None"),
    ]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": "So.\\r\\n#### 22\\r\\nBye."}\r\n')
    assert golds(file) == ["22"]


@pytest.mark.parametrize(
    "text",
    [
        '{"question": "a", "answer": "1"}\n\n{"question": "b", "answer": "2"}\n',
        '\ufeff{"answer": "1", "question": "a"}\n  {"question": "b", "answer": 2}',
    ],
)
def test_json_lines_named_json_are_read_as_lines(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    assert golds(tmp_path / "a.json") == ["1", "2"]
    assert [place for place, _ in read_rows(tmp_path / "a.json")][0] == f"{tmp_path}/a.json:1"


def test_one_object_over_many_lines_is_one_row(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"question": "a", "answer": 1}, indent=2))
    assert golds(tmp_path / "a.json") == ["1"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json"])
def test_a_folder_of_compressed_files_is_read_likewise(kind, tmp_path):
    pytest.importorskip("datasets")
    plain = write_text(tmp_path / f"train.{kind}", rows_of(TEXTS))
    (tmp_path / "data").mkdir()
    (tmp_path / f"data/train.{kind}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert [
        row["answer"] for row in hub_splits("--task", "", str(tmp_path / "data"))["train"]
    ] == TEXTS


@pytest.mark.parametrize(
    ("options", "text", "answer"),
    [
        ('sep: ";"', "question;answer\nQ?;None\n", "None"),
        ("names: [question, answer]\n  header: null", "Q?,007\n", "007"),
        ("column_names: [question, answer]", "Q?,9007199254740993.50\n", "9007199254740993.50"),
        ("names: [question, answer]", "Q?,None\n", "None"),
        ("skiprows: 1", "# sums\nquestion,answer\nQ?,1e5\n", "1e5"),
        ('quotechar: "\'"', "question,answer\nQ?,'1,000'\n", "1,000"),
        ('comment: "#"', "question,answer\n# sums\nQ?,0.10\n", "0.10"),
        # What cells mean is the library's to say.
        ("sep: ';'\n  decimal: ','", "question;answer\nQ?;1,5\n", "1.5"),
    ],
)
def test_what_a_folders_card_says_of_its_files_is_heard(options, text, answer, tmp_path):
    pytest.importorskip("datasets")
    card = f'---\nconfigs:\n- config_name: default\n  data_files: "a.csv"\n  {options}\n---\n'
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "a.csv").write_text(text)
    [row] = hub_splits("--task", "", str(tmp_path))["train"]
    assert (row["question"], str(row["answer"])) == ("Q?", answer)


def test_a_file_that_is_not_as_its_card_says_is_one_line(tmp_path):
    pytest.importorskip("datasets")
    card = '---\nconfigs:\n- config_name: default\n  data_files: "a.csv"\n  usecols: [gold]\n---\n'
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "a.csv").write_text("question,answer\nQ?,7\n")
    with pytest.raises(UserError, match="a.csv: not CSV as its data set describes it .*gold"):
        list(hub_splits("--task", "", str(tmp_path))["train"])


def test_a_data_set_in_the_hubs_cache_is_read_from_its_files(tmp_path, monkeypatch):
    """Without the hub. The cache holds a data set as the hub's client lays it out."""
    pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "datasets--owner--name/snapshots" / commit
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets--owner--name/refs").mkdir()
    (tmp_path / "datasets--owner--name/refs/main").write_text(commit)
    write_text(snapshot / "test.csv", rows_of(TEXTS))
    assert [row["answer"] for row in hub_splits("--task", "", "owner/name")["test"]] == TEXTS
    with pytest.raises(
        UserError,
        match=r"^--task: cannot be loaded .*; without the hub, give FOLDER, or HF_HUB_OFFLINE=1",
    ):
        hub_splits("--task", "FOLDER", "owner/other")
