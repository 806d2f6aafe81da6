"""GSM8K: reading, refusing, and downloading."""

import functools
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest

from alignment.args import DownloadArgs
from alignment.data.tasks import gsm8k
from alignment.rewards.r1_zero import r1_zero_reward_fn
from alignment.system.errors import UserError

REAL = Path(__file__).parents[3] / "shared" / "dataset" / "gsm8k"
GOOD = json.dumps({"question": "Two and three?", "answer": "2 + 3 = <<2+3=5>>5 eggs.\nSo 5.\n#### 5"})


def write(folder: Path, text: str | bytes, name: str = "train.jsonl") -> str:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_real_row_parses_and_its_demonstration_earns_the_reward(split):
    if not REAL.is_dir():
        pytest.skip(f"the real GSM8K files are not at {REAL}")
    problems = gsm8k.problems(split, str(REAL))
    assert len(problems) == {"train": 7473, "test": 1319}[split]
    assert len({problem.id for problem in problems}) == len(problems)
    for problem, response in gsm8k.demonstrations(split, str(REAL)):
        assert "<<" not in response
        assert r1_zero_reward_fn(response, problem.ground_truth)["reward"] == 1, response


def test_a_row(tmp_path):
    (problem,) = gsm8k.problems("train", write(tmp_path, GOOD + "\n\n"))
    assert problem.ground_truth == "5"
    assert problem.prompt.endswith("\nUser: Two and three?\nAssistant: <think>")
    assert gsm8k.demonstrations("train", str(tmp_path)) == [(problem, " 2 + 3 = 5 eggs.\nSo 5. </think> <answer> 5 </answer>")]


def test_line_separators_inside_text_do_not_split_a_row(tmp_path):
    row = json.dumps({"question": "a\u2028b?", "answer": "#### 5"}, ensure_ascii=False)
    assert gsm8k.problems("train", write(tmp_path, row))[0].question == "a\u2028b?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "\n{oops", r"train\.jsonl:2: not a JSON object"),
        ('{"question": "?"}', r'train\.jsonl:1: "answer" must hold text or a number; the row has question'),
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
        gsm8k.problems("train", write(tmp_path, content))


def test_a_missing_file_says_how_to_get_it(tmp_path):
    with pytest.raises(UserError, match=r"test\.jsonl does not exist: download GSM8K with `uv run -m alignment.download`"):
        gsm8k.problems("test", str(tmp_path))


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
    for name in gsm8k.SHA256:
        write(folder, (GOOD + "\n") * 2000, name)
        monkeypatch.setitem(gsm8k.SHA256, name, hashlib.sha256((folder / name).read_bytes()).hexdigest())
    monkeypatch.setattr(_Ranged, "break_after", None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Ranged, directory=str(folder)))
    server.starts = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def test_the_download_command_has_the_task_s_defaults():
    assert DownloadArgs() == DownloadArgs(gsm8k.FOLDER, gsm8k.SOURCE)


def test_download(source, tmp_path):
    server, address, _ = source
    gsm8k.download(tmp_path / "data", address)
    assert len(gsm8k.problems("test", str(tmp_path / "data"))) == 2000
    asked = len(server.starts)
    gsm8k.download(tmp_path / "data", address)
    assert len(server.starts) == asked  # whole files are not fetched again


def test_a_broken_download_goes_on_where_it_stopped(source, tmp_path, monkeypatch):
    server, address, _ = source
    monkeypatch.setattr(_Ranged, "break_after", 100_000)
    with pytest.raises(UserError):
        gsm8k.download(tmp_path / "data", address)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.jsonl.part"]
    monkeypatch.setattr(_Ranged, "break_after", None)
    gsm8k.download(tmp_path / "data", address)
    assert server.starts[:2] == [0, 100_000]
    assert not list((tmp_path / "data").glob("*.part"))


def test_a_wrong_file_is_not_kept(source, tmp_path):
    _, address, folder = source
    write(folder, "something else", "train.jsonl")
    with pytest.raises(UserError, match="SHA-256"):
        gsm8k.download(tmp_path / "data", address)
    assert not list((tmp_path / "data").iterdir())


def test_no_connection_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="could not be fetched.*--dataset_path"):
        gsm8k.download(tmp_path / "data", "http://127.0.0.1:9")
