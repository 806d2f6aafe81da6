"""Each benchmark read from files with the columns that its publishers give it, and what is
refused."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from alignment.core.power import detectable_difference, score_std
from alignment.data.prompts import PROMPTS
from alignment.data.tasks import find_task
from alignment.evaluation import benchmarks
from alignment.rewards.rules import RULES, find_rule
from alignment.system.errors import UserError

pytest.importorskip("datasets")

BOX = r"So $x = \frac{1}{2}$, and it is $\boxed{\frac{1}{2}}$."
SVAMP = {"ID": "chal-1", "Equation": "( 8.0 - 3.0 )", "Answer": 5.0, "Type": "Subtraction"}
# Of each benchmark, a row as it is published, and the question and the answer in it.
ROWS = {
    "gsm8k": (
        {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5.\n#### 1,005"},
        "How many?",
        "1,005",
    ),
    "math500": (
        {
            "problem": "Find $x$.",
            "solution": BOX,
            "answer": r"\frac{1}{2}",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "t/1",
        },
        "Find $x$.",
        r"\frac{1}{2}",
    ),
    "aime24": (
        {
            "id": 60,
            "problem": "Find $p+q$.",
            "solution": "It is 25.",
            "answer": "025",
            "url": "u",
            "year": "2024",
        },
        "Find $p+q$.",
        "025",
    ),
    "aime25": ({"problem": "Find the sum.", "answer": "70", "id": "0"}, "Find the sum.", "70"),
    "amc23": ({"id": 0, "answer": 27.0, "url": "u", "question": "How far?"}, "How far?", "27.0"),
    "minerva": (
        {"question": "What mass?", "solution": BOX, "type": "Astronomy", "idx": 0},
        "What mass?",
        r"\frac{1}{2}",
    ),
    "olympiad": (
        {
            "id": 1606,
            "question": "All $x$?",
            "final_answer": ["$2$", "$-3$"],
            "is_multiple_answer": True,
            "unit": None,
        },
        "All $x$?",
        "$2$, $-3$",
    ),
    "svamp": (
        {"Body": "Ann has 8 pens", "Question": "How many are left?", **SVAMP},
        "Ann has 8 pens, how many are left?",
        "5",
    ),
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that writes rows to a benchmark's own folder, in a file, and reads its
    problems."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def reading(name: str, *rows: dict, file: str = "test.jsonl"):
        path = tmp_path / "data" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        else:
            text = (
                json.dumps(rows)
                if path.suffix == ".json"
                else "".join(json.dumps(row) + "\n" for row in rows)
            )
            path.write_text(text)
        benchmarks.problems.cache_clear()
        return benchmarks.BENCHMARKS[name].problems("test", str(tmp_path / "data"))

    return reading


def test_every_benchmark_has_a_row_here():
    assert set(ROWS) == set(benchmarks.BENCHMARKS)


@pytest.mark.parametrize("file", ["test.jsonl", "test-00000-of-00001.parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_a_published_row(name, file, read):
    row, question, answer = ROWS[name]
    (problem,) = read(name, row, file=file)
    assert (problem.id, problem.question, problem.ground_truth) == (f"{name}/0", question, answer)
    rule = find_rule(benchmarks.BENCHMARKS[name].rules[0])
    assert rule(f" so </think> <answer> {answer} </answer>", problem.ground_truth)["reward"] == 1
    assert rule(" so </think> <answer> 999983 </answer>", problem.ground_truth)["reward"] == 0


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("minerva", {"problem": "What mass?", "solution": BOX}, r"\frac{1}{2}"),
        ("minerva", {"question": "What mass?", "answer": "1.6e-19"}, "1.6e-19"),
        (
            "aime24",
            {"ID": "2024-I-1", "Problem": "Find it.", "Answer": 204, "Solution": "."},
            "204",
        ),
        ("olympiad", {"question": "How many?", "final_answer": "7"}, "7"),
    ],
)
def test_copies_name_their_columns_in_other_ways(name, row, answer, read):
    assert read(name, row)[0].ground_truth == answer


def test_the_order_of_several_answers_does_not_matter(read):
    (problem,) = read("olympiad", ROWS["olympiad"][0])
    assert (
        find_rule("r1_zero")(" </think> <answer> -3, 2 </answer>", problem.ground_truth)["reward"]
        == 1
    )
    assert (
        find_rule("r1_zero")(" </think> <answer> 2 </answer>", problem.ground_truth)["reward"] == 0
    )


def test_entries_name_prompts_and_rules_that_there_are():
    for name, entry in benchmarks.ENTRIES.items():
        assert (
            entry["prompt"] in PROMPTS
            and set(entry["rules"]) <= set(RULES)
            and entry["problems"] > 0
            and entry["about"]
        ), name


def test_the_page_says_what_the_entries_say():
    """Name, data set, splits and problems; and the smallest difference of an accuracy of one half,
    by one sample a problem."""
    text = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()
    rows = {
        cells[0].strip("`"): cells[1:]
        for cells in re.findall(
            r"^\| (`\w+`) \| (`.*?) \| (.*?) \| (\d+) \| .* \| ([\d.]+) \|$", text, re.M
        )
    }
    assert list(rows) == list(benchmarks.ENTRIES)
    for name, (hub, splits, problems, difference) in rows.items():
        entry, z2 = benchmarks.ENTRIES[name], 1.96**2
        assert re.findall("`(.*?)`", hub) == [entry["hub"], *entry.get("subset", [])]
        assert (
            set(splits.split(", ")) <= set(entry["splits"]) and int(problems) == entry["problems"]
        )
        assert float(difference) == pytest.approx(
            detectable_difference(score_std(0.0, int(problems) + z2)), abs=5e-4
        )


def test_a_benchmark_is_a_task_by_its_path():
    assert find_task("alignment.evaluation.benchmarks:aime24") is benchmarks.BENCHMARKS["aime24"]
    assert benchmarks.BENCHMARKS["aime24"].problems("train", "") == ()


def test_the_problems_are_in_the_splits_of_the_entry_or_in_the_only_one(read, tmp_path):
    row = ROWS["svamp"][0]
    read("svamp", row, row, file="train.jsonl")
    assert len(read("svamp", row)) == 3  # the hub's copy has 700 and 300 of them
    (tmp_path / "data/svamp/test.jsonl").unlink()
    # The published folder has the training rows of two other data sets beside the problems.
    (tmp_path / "data/svamp/mawps-asdiv-a_train.csv").write_text(
        "Question,Numbers,Equation,Answer\na,1.0,number0,1.0\n"
    )
    assert len(read("svamp", row, file="SVAMP.json")) == 1
    assert [
        len(read("gsm8k", ROWS["gsm8k"][0], file=file))
        for file in ("problems.jsonl", "train.jsonl", "test.jsonl")
    ][0] == 1


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        (
            "gsm8k",
            [{"question": "a", "answer": "#### 5"}, {"question": "b", "answer": "5"}],
            'test: row 2: "answer" holds no answer',
        ),
        (
            "gsm8k",
            [{"question": "a", "reply": "#### 5"}],
            'test: row 1: there is no "answer"; the row has question, reply',
        ),
        (
            "minerva",
            [{"question": "a", "solution": "It is 5."}],
            'row 1: "solution" holds no answer where .*boxed',
        ),
        (
            "olympiad",
            [{"question": "a", "final_answer": []}],
            'row 1: "final_answer" must hold text',
        ),
        (
            "svamp",
            [{"Body": "a", "Question": "b?", "Equation": "( 1 + )", "Answer": 1}],
            "row 1: Numbers, Equation and Answer",
        ),
        (
            "aime24",
            [ROWS["aime24"][0]] * 31,
            "31 rows in test; published are 30 problems, in train$",
        ),
    ],
)
def test_bad_rows_are_refused_with_their_place(name, rows, message, read):
    with pytest.raises(UserError, match=message):
        read(name, *rows)


def test_no_split_of_the_entry_is_refused(read):
    read("math500", ROWS["math500"][0], file="validation.jsonl")
    with pytest.raises(
        UserError,
        match=(
            "^--eval_tasks math500: .* has 0 rows in train, validation; published are 500 problems,"
            " in test$"
        ),
    ):
        read("math500", ROWS["math500"][0], file="train.jsonl")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="^--dataset_path .*: has no folder gsm8k"):
        benchmarks.problems("gsm8k", str(tmp_path))


def evaluate_at(endpoint: str, folder: Path) -> str:
    """What `evaluate` says of a benchmark of the hub at an address."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder),
        "PYTHONPATH": os.getcwd(),
    }
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "alignment.evaluate", "--eval_tasks", "gsm8k"]
    done = subprocess.run(
        command,
        cwd=os.getcwd(),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_hub_that_is_not_there_or_never_answers_is_one_line(tmp_path):
    remedy = (
        "without the hub, give --dataset_path FOLDER with gsm8k/, or HF_HUB_OFFLINE=1 for what is"
        " in its cache\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and says nothing
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = evaluate_at(address, tmp_path)
    assert (
        said == f"error: --eval_tasks gsm8k: cannot be loaded (TimeoutError: no answer); {remedy}"
    )
    said = evaluate_at(address, tmp_path)  # nobody listens any more
    assert said.startswith(
        "error: --eval_tasks gsm8k: cannot be loaded (ConnectError: "
    ) and said.endswith(f"; {remedy}")
