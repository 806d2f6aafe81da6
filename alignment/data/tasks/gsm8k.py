"""GSM8K: 8,792 grade-school word problems with worked solutions (Cobbe et al. 2021, arXiv:2110.14168; MIT licence).

A row of `train.jsonl` or `test.jsonl`:

    {"question": "Natalia sold 48 clips in April ...", "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\\n#### 72"}

    uv run -m alignment.download        # fetches both files into dataset/gsm8k/"""

import random
import ssl
from dataclasses import replace
from pathlib import Path

import httpx

from alignment.core.records import Problem
from alignment.data.tasks.own_data import DataConfig, read_rows, worked_problems
from alignment.system.errors import UserError, os_error
from alignment.system.files import sha256
from alignment.system.terminal import make_console, progress_line

FOLDER = "dataset/gsm8k"
SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
SHA256 = {
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}


def problems(split: str, dataset_path: str = "") -> list[Problem]:
    """The problems of a split with the r1_zero prompt, in file order. Raises `UserError`, naming file and line, for a missing
    or empty file and for a bad row."""
    return [problem for problem, _ in _pairs(split, dataset_path)]


def demonstrations(split: str, dataset_path: str = "", seed: int = 0) -> list[tuple[Problem, str]]:
    """(problem, response) pairs of worked solutions, less calculator annotations, shuffled by `seed`; raises as `problems`."""
    pairs = [pair for pair in _pairs(split, dataset_path) if pair[1]]
    random.Random(seed).shuffle(pairs)
    return pairs


def _pairs(split: str, dataset_path: str) -> list[tuple[Problem, str]]:
    path = Path(dataset_path or FOLDER) / f"{split}.jsonl"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: download GSM8K with `uv run -m alignment.download`,"
            " or point --dataset_path at a folder with train.jsonl and test.jsonl"
        )
    pairs = worked_problems(read_rows(path), DataConfig(answer_pattern="#### (.*)"))
    return [(replace(problem, id=f"gsm8k/{split}/{index}"), response) for index, (problem, response) in enumerate(pairs)]


def download(folder: Path, source: str = SOURCE) -> None:
    """Fetch both files into `folder`; a broken transfer goes on where it stopped. A file takes its name only once its SHA-256
    is right. Raises `UserError` where it is not, or without a connection."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, expected in SHA256.items():
        if (folder / name).exists() and sha256(folder / name) == expected:
            print(f"{folder / name}: already there and whole")
            continue
        part = folder / f"{name}.part"
        _fetch(f"{source}/{name}", part)
        if sha256(part) != expected:
            part.unlink()
            raise UserError(f"{source}/{name}: the file's SHA-256 is not {expected}; nothing was kept, try again")
        part.replace(folder / name)


def _fetch(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    options = {"timeout": 30, "follow_redirects": True, "verify": ssl.create_default_context()}
    try:
        with httpx.stream("GET", url, headers=headers, **options) as response:
            if response.status_code == 416:  # nothing is left to send, the part is already complete
                return
            if not response.is_success:
                raise UserError(f"{url}: the server answered {response.status_code} {response.reason_phrase}")
            resumed = response.status_code == 206
            expected = int(response.headers.get("Content-Length") or 0) + have * resumed
            file, line = part.open("ab" if resumed else "wb"), progress_line(part.stem, expected, make_console(), "byte")
            with file, line as advance:
                for block in response.iter_raw():  # raises an HTTPError where the connection breaks off
                    file.write(block)
                    advance(file.tell(), "")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise UserError(
            f"{url}: could not be fetched ({os_error(error)}). Check the connection and run the command"
            " again (it continues), or copy train.jsonl and test.jsonl from elsewhere and use --dataset_path"
        ) from None
