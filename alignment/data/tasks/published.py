"""Data sets of published files, GSM8K and SVAMP: reading them, and downloading them by the table `published.toml`."""

import random
import ssl
import tomllib
from dataclasses import replace
from pathlib import Path

import httpx

from alignment.core.records import Problem
from alignment.data.tasks.own_data import DataConfig, read_rows, worked_problems
from alignment.data.tasks.svamp import svamp_row
from alignment.system.errors import UserError, os_error
from alignment.system.files import sha256
from alignment.system.terminal import make_console, progress_line

FOLDER = "dataset/{}"
READERS = {"gsm8k": lambda place, row: row, "svamp": svamp_row}  # Make a row of question, answer and, perhaps, solution.
PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def problems(name: str, split: str, dataset_path: str = "") -> list[Problem]:
    """The problems of a split of the data set `name`, with the r1_zero prompt, in file order. Raises `UserError`, naming file
    and line, for a missing or empty file and for a bad row."""
    return [problem for problem, _ in _pairs(name, split, dataset_path)]


def demonstrations(name: str, split: str, dataset_path: str = "", seed: int = 0) -> list[tuple[Problem, str]]:
    """(problem, response) pairs of worked solutions, less calculator annotations, shuffled by `seed`; raises as `problems`."""
    pairs = [pair for pair in _pairs(name, split, dataset_path) if pair[1]]
    random.Random(seed).shuffle(pairs)
    return pairs


def _pairs(name: str, split: str, dataset_path: str) -> list[tuple[Problem, str]]:
    files = PUBLISHED[name]
    path = Path(dataset_path or FOLDER.format(name)) / files[split]["file"]
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: download {files['title']} with `uv run -m alignment.download --task {name}`,"
            f" or point --dataset_path at a folder with {files['train']['file']} and {files['test']['file']}"
        )
    rows = ((place, READERS[name](place, row)) for place, row in read_rows(path))
    pairs = worked_problems(rows, DataConfig(answer_pattern=files["answer_pattern"]))
    return [(replace(problem, id=f"{name}/{split}/{index}"), response) for index, (problem, response) in enumerate(pairs)]


def download(name: str, folder: Path, source: str = "") -> None:
    """Fetch both files of the data set `name` into `folder`; a broken transfer goes on where it stopped. A file takes its name
    only once its SHA-256 is right. Raises `UserError` where it is not, or without a connection."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        published = PUBLISHED[name][split]
        file, url = folder / published["file"], f"{source or PUBLISHED[name]['source']}/{published['path']}"
        if file.exists() and sha256(file) == published["sha256"]:
            print(f"{file}: already there and whole")
            continue
        part = file.with_name(f"{file.name}.part")
        _fetch(url, part)
        if sha256(part) != published["sha256"]:
            part.unlink()
            raise UserError(f"{url}: the file's SHA-256 is not {published['sha256']}; nothing was kept, try again")
        part.replace(file)


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
            " again (it continues), or copy the files from elsewhere and use --dataset_path"
        ) from None
