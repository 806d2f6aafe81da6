"""GSM8K and SVAMP: reading, refusing, and downloading."""

import functools
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment import download
from alignment.data.tasks import TASKS, published
from alignment.data.tasks.published import calculate, svamp_row
from alignment.rewards.r1_zero import r1_zero_reward_fn
from alignment.system.errors import UserError

REAL = Path(__file__).parents[3] / "shared" / "dataset"
SVAMP_TRAIN = "mawps-asdiv-a_train.csv"
GOOD = json.dumps(
    {"question": "Two and three?", "answer": "2 + 3 = <<2+3=5>>5 eggs.\nSo 5.\n#### 5"}
)


def write(folder: Path, text: str | bytes, name: str = "train.jsonl") -> str:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


@pytest.mark.parametrize(
    ("name", "split", "count", "shown"),
    [
        ("gsm8k", "train", 7473, 7473),
        ("gsm8k", "test", 1319, 1319),
        ("svamp", "train", 3138, 3106),
        ("svamp", "test", 1000, 997),
    ],
)
def test_every_real_row_parses_and_its_demonstration_earns_the_reward(name, split, count, shown):
    """SVAMP's rows whose equation, on numbers of four decimals, has another value than the answer
    show nothing."""
    if not (REAL / name).is_dir():
        pytest.skip(f"the real files are not at {REAL / name}")
    problems = published.problems(name, split, str(REAL / name))
    assert len(problems) == len({problem.id for problem in problems}) == count
    pairs = published.demonstrations(name, split, str(REAL / name))
    assert len(pairs) == shown
    for problem, response in pairs:
        assert "<<" not in response and "number0" not in problem.question + response
        assert r1_zero_reward_fn(response, problem.ground_truth)["reward"] == 1, response


def test_no_training_question_of_svamp_is_a_test_question():
    if not (REAL / "svamp").is_dir():
        pytest.skip(f"the real files are not at {REAL / 'svamp'}")
    task, path = TASKS["svamp"], str(REAL / "svamp")
    assert len(task.test_problems(path)) == 1000
    assert len(task.training_problems(path)) == 3138


def test_a_training_question_that_is_a_test_question_is_left_out(tmp_path):
    rows = (
        "Tom has number0 . How many ?,2.0,number0,2.0\nTom has number0 . How many"
        " ?,3.0,number0,3.0\n"
    )
    write(tmp_path, f"Question,Numbers,Equation,Answer\n{rows}", SVAMP_TRAIN)
    write(
        tmp_path,
        json.dumps(
            [{"Body": "Tom has 2.", "Question": "How many?", "Equation": "2.0", "Answer": 2.0}]
        ),
        "SVAMP.json",
    )
    (trained,) = TASKS["svamp"].training_problems(str(tmp_path))
    assert trained.question == "Tom has 3. How many?"


def test_a_training_row_of_svamp():
    """Placeholders are filled in, number10 as well as number1; numbers lose their ".0"."""
    cells = {
        "Question": "Ann has number0 apples , and number10 pears . How many in number1 boxes ?",
        "Numbers": "56.0 9.5 0 0 0 0 0 0 0 0 44.0",
        "Equation": "* + number0 number10 number1",
        "Answer": "950.0",
    }
    assert svamp_row("f:2", cells) == {
        "question": "Ann has 56 apples, and 44 pears. How many in 9.5 boxes?",
        "answer": "950",
        "solution": "56 + 44 = 100 ; 100 * 9.5 = 950",
    }
    # the published row contradicts itself
    assert svamp_row("f:2", cells | {"Answer": "951.0"})["solution"] == ""


def test_a_test_row_of_svamp():
    cells = {
        "Body": "Each costs 7 dollars",
        "Question": "How much are 3 less 2?",
        "Equation": "( 7.0 * ( 3.0 - 2.0 ) )",
        "Answer": 7.0,
    }
    wanted = {
        "question": "Each costs 7 dollars, how much are 3 less 2?",
        "answer": "7",
        "solution": "3 - 2 = 1 ; 7 * 1 = 7",
    }
    assert svamp_row("row 1", cells) == wanted
    assert (
        svamp_row("row 1", cells | {"Body": "Each costs 7."})["question"]
        == "Each costs 7. How much are 3 less 2?"
    )


@given(
    st.recursive(
        st.integers(1, 99).map(str),
        lambda part: st.tuples(st.sampled_from("+-*"), part, part),
        max_leaves=6,
    )
)
def test_prefix_form_and_parentheses_are_one_calculation(tree):
    """Both forms of an equation make the same steps, and Python agrees with the value."""

    def prefix(t):
        return t if isinstance(t, str) else f"{t[0]} {prefix(t[1])} {prefix(t[2])}"

    def infix(t):
        return t if isinstance(t, str) else f"( {infix(t[1])} {t[0]} {infix(t[2])} )"

    steps, same = [], []
    value = calculate(iter(prefix(tree).split()), steps)
    assert value == calculate(iter(infix(tree).split()), same) and steps == same
    assert float(value) == pytest.approx(eval(infix(tree)), rel=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"Equation": "+ number0 number2"},
            "f:2: Numbers, Equation and Answer make no calculation .list index out of range",
        ),
        ({"Equation": "/ number0 0"}, "f:2: .*zero"),
        ({"Equation": "+ number0"}, "f:2: .*it breaks off"),
        ({"Equation": "^ number0 number1"}, r"f:2: .*\^"),
        ({"Answer": "many"}, "f:2: .*many"),
        ({"Numbers": ""}, 'f:2: "Numbers" must hold text or a number'),
    ],
)
def test_a_bad_row_of_svamp_is_refused_with_its_place(change, message):
    cells = {
        "Question": "number0 and number1 ?",
        "Numbers": "1.0 2.0",
        "Equation": "+ number0 number1",
        "Answer": "3.0",
    }
    with pytest.raises(UserError, match=message):
        svamp_row("f:2", cells | change)


def test_a_row(tmp_path):
    (problem,) = published.problems("gsm8k", "train", write(tmp_path, GOOD + "\n\n"))
    assert problem.ground_truth == "5"
    assert problem.prompt.endswith("\nUser: Two and three?\nAssistant: <think>")
    assert published.demonstrations("gsm8k", "train", str(tmp_path)) == [
        (problem, " 2 + 3 = 5 eggs.\nSo 5. </think> <answer> 5 </answer>")
    ]


def test_line_separators_inside_text_do_not_split_a_row(tmp_path):
    row = json.dumps({"question": "a\u2028b?", "answer": "#### 5"}, ensure_ascii=False)
    assert published.problems("gsm8k", "train", write(tmp_path, row))[0].question == "a\u2028b?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "\n{oops", r"train\.jsonl:2: not a JSON object"),
        (
            '{"question": "?"}',
            r'train\.jsonl:1: there is no "answer"; the row has question',
        ),
        ("[1]", r"train\.jsonl:1: not a JSON object"),
        ('{"question": [1], "answer": "#### 5"}', r'train\.jsonl:1: "question" must hold text'),
        ('{"question": "?", "answer": "5"}', r"train\.jsonl:1: .*#### "),
        ('{"question": "?", "answer": "#### "}', r"train\.jsonl:1: .*#### "),
        ("\n \n", r"train\.jsonl holds no row"),
        (b"\xff\xfe", r"train\.jsonl: not UTF-8"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path, content, message):
    with pytest.raises(UserError, match=message):
        published.problems("gsm8k", "train", write(tmp_path, content))


def test_a_missing_file_says_how_to_get_it(tmp_path):
    with pytest.raises(
        UserError,
        match=(
            r"test\.jsonl does not exist: download GSM8K with `uv run -m alignment.download --task"
            r" gsm8k`"
        ),
    ):
        published.problems("gsm8k", "test", str(tmp_path))


class _Ranged(http.server.SimpleHTTPRequestHandler):
    """Serves files, honours `Range: bytes=N-`, and can break off after some bytes."""

    break_after: int | None = None

    def do_GET(self):
        data = Path(self.translate_path(self.path)).read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.server.starts.append(start)
        if start >= len(data) > 0:
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start:][: type(self).break_after])

    def log_message(self, *args):
        pass


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A local server with two files, whose checksums the task then expects."""
    folder = tmp_path / "source"
    folder.mkdir()
    for split in ("train", "test"):
        file = published.PUBLISHED["gsm8k"][split]
        write(folder, (GOOD + "\n") * 2000, file["path"])
        monkeypatch.setitem(
            file, "sha256", hashlib.sha256((folder / file["path"]).read_bytes()).hexdigest()
        )
    monkeypatch.setattr(_Ranged, "break_after", None)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Ranged, directory=str(folder))
    )
    server.starts = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def test_the_download_command_takes_a_task_and_puts_files_where_it_looks(
    source, tmp_path, monkeypatch, capsys
):
    _, address, _ = source
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["download", "--task", "gsm8k", "--source", address])
    download.main()
    assert "GSM8K is in dataset/gsm8k/" in capsys.readouterr().out
    assert len(TASKS["gsm8k"].problems("train", "")) == 2000


def test_svamp_is_downloaded_by_its_own_paths_and_names(tmp_path, source, monkeypatch):
    _, address, folder = source
    (folder / "data" / "mawps-asdiv-a_svamp").mkdir(parents=True)
    for split in ("train", "test"):
        file = published.PUBLISHED["svamp"][split]
        write(folder, split, file["path"])
        monkeypatch.setitem(file, "sha256", hashlib.sha256(split.encode()).hexdigest())
    published.download("svamp", tmp_path / "data", address)
    assert {path.name: path.read_text() for path in (tmp_path / "data").iterdir()} == {
        SVAMP_TRAIN: "train",
        "SVAMP.json": "test",
    }


def test_download(source, tmp_path):
    server, address, _ = source
    published.download("gsm8k", tmp_path / "data", address)
    assert len(published.problems("gsm8k", "test", str(tmp_path / "data"))) == 2000
    asked = len(server.starts)
    published.download("gsm8k", tmp_path / "data", address)
    assert len(server.starts) == asked  # whole files are not fetched again


def test_a_broken_download_goes_on_where_it_stopped(source, tmp_path, monkeypatch):
    server, address, _ = source
    monkeypatch.setattr(_Ranged, "break_after", 100_000)
    with pytest.raises(UserError):
        published.download("gsm8k", tmp_path / "data", address)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.jsonl.part"]
    monkeypatch.setattr(_Ranged, "break_after", None)
    published.download("gsm8k", tmp_path / "data", address)
    assert server.starts[:2] == [0, 100_000]
    assert not list((tmp_path / "data").glob("*.part"))


def test_a_wrong_file_is_not_kept(source, tmp_path):
    _, address, folder = source
    write(folder, "something else", "train.jsonl")
    with pytest.raises(UserError, match="SHA-256"):
        published.download("gsm8k", tmp_path / "data", address)
    assert not list((tmp_path / "data").iterdir())


def test_no_connection_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="could not be fetched.*--dataset_path"):
        published.download("gsm8k", tmp_path / "data", "http://127.0.0.1:9")


def test_files_that_lie_flat_in_the_folder_of_data_sets_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flat = tmp_path / "dataset"
    flat.mkdir()
    write(flat, GOOD)
    with pytest.raises(UserError, match=r"^dataset/gsm8k/train\.jsonl does not exist"):
        published.problems("gsm8k", "train")  # its test.jsonl may be of anything
    write(flat, GOOD.replace("Two", "Three"), "test.jsonl")
    [problem] = published.problems("gsm8k", "train")
    assert problem.question == "Two and three?"
    with pytest.raises(UserError, match=r"^dataset/svamp/SVAMP\.json does not exist"):
        published.problems("svamp", "test")
    (flat / "gsm8k").mkdir()
    write(flat / "gsm8k", GOOD.replace("Two", "Four"))
    [problem] = published.problems("gsm8k", "train")
    assert problem.question == "Four and three?"
