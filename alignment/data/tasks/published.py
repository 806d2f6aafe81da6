"""Data sets of published files, GSM8K and SVAMP: reading them, and downloading them by the table
`published.toml`."""

import random
import re
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx

from alignment.core.records import Problem
from alignment.data.rows import cell_text, read_rows
from alignment.data.tasks.countdown import OPERATIONS
from alignment.data.tasks.own_data import DataConfig, worked_problems
from alignment.system.errors import UserError, os_error
from alignment.system.files import read_toml, sha256
from alignment.system.terminal import make_console, progress_line

FOLDER = "dataset/{}"
PUBLISHED = read_toml(Path(__file__).with_name("published.toml"), "--task")


def problems(name: str, split: str, dataset_path: str = "") -> list[Problem]:
    """The problems of a split of the data set `name`, in file order. `UserError`, with file and
    line, where they are bad."""
    return [problem for problem, _ in _pairs(name, split, dataset_path)]


def demonstrations(
    name: str, split: str, dataset_path: str = "", seed: int = 0
) -> list[tuple[Problem, str]]:
    """(problem, response) pairs of worked solutions, less calculator annotations, shuffled by
    `seed`; raises as `problems`."""
    pairs = [pair for pair in _pairs(name, split, dataset_path) if pair[1]]
    random.Random(seed).shuffle(pairs)
    return pairs


def _pairs(name: str, split: str, dataset_path: str) -> list[tuple[Problem, str]]:
    files = PUBLISHED[name]
    path = Path(dataset_path or FOLDER.format(name)) / files[split]["file"]
    if not path.is_file():
        command = (
            f"`uv run -m alignment.download --task {name}`, or point --dataset_path at a folder"
        )
        wanted = f"{files['train']['file']} and {files['test']['file']}"
        raise UserError(
            f"{path} does not exist: download {files['title']} with {command} with {wanted}"
        )
    rows = (
        (place, svamp_row(place, row) if "equation" in files else row)
        for place, row in read_rows(path)
    )
    pairs = worked_problems(rows, DataConfig(answer_pattern=files["answer_pattern"]))
    return [
        (replace(problem, id=f"{name}/{split}/{index}"), response)
        for index, (problem, response) in enumerate(pairs)
    ]


def svamp_row(place: str, cells: dict) -> dict[str, str]:
    """A row's question, answer and solution, which is "" where the equation has another value than
    the answer; published.toml shows rows. Numbers have four decimals at most. Raises `UserError`,
    naming the place, for a malformed row."""
    question, equation, answer = (
        cell_text(place, cells, column).strip() for column in ("Question", "Equation", "Answer")
    )
    steps: list[str] = []
    try:
        if "Numbers" in cells:
            numbers = [number(text) for text in cell_text(place, cells, "Numbers").split()]
            question, equation = (
                re.sub(r"number(\d+)", lambda m: numbers[int(m[1])], text)
                for text in (question, equation)
            )
            question = re.sub(r" (?=[.,?])", "", question)
        else:
            body = cell_text(place, cells, "Body").strip()
            question = (
                f"{body} {question}"
                if body[-1] in ".,?!"
                else f"{body}, {question[0].lower()}{question[1:]}"
            )
        answer, value = number(answer), calculate(iter(equation.split()), steps)
    except (ValueError, LookupError, StopIteration, ArithmeticError, RecursionError) as error:
        reason = str(error) or "it breaks off"
        raise UserError(
            f"{place}: Numbers, Equation and Answer make no calculation ({reason})"
        ) from None
    return {
        "question": question,
        "answer": answer,
        "solution": " ; ".join(steps) if value == answer else "",
    }


def calculate(tokens: Iterator[str], steps: list[str]) -> str:
    """The value of the equation that `tokens` begin, in prefix form or in parentheses; appends its
    calculations to `steps`."""
    if (token := next(tokens)) == "(":
        left, sign, right, _ = (
            calculate(tokens, steps),
            next(tokens),
            calculate(tokens, steps),
            next(tokens),
        )
    elif token in OPERATIONS:
        left, sign, right = calculate(tokens, steps), token, calculate(tokens, steps)
    else:
        return number(token)
    result = number(OPERATIONS[sign](float(left), float(right)))
    steps.append(f"{left} {sign} {right} = {result}")
    return result


def number(value: float | str) -> str:
    """A number as people write it: 504, not 504.0; at most four decimals."""
    return f"{round(float(value), 4):.12g}"


def download(name: str, folder: Path, source: str = "") -> None:
    """Fetch both files of the data set `name` into `folder`; a broken transfer goes on where it
    stopped. A file takes its name only once its SHA-256 is right. Raises `UserError` where it is
    not, or without a connection."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        published = PUBLISHED[name][split]
        file, url = (
            folder / published["file"],
            f"{source or PUBLISHED[name]['source']}/{published['path']}",
        )
        if file.exists() and sha256(file) == published["sha256"]:
            print(f"{file}: already there and whole")
            continue
        part = file.with_name(f"{file.name}.part")
        _fetch(url, part)
        if sha256(part) != published["sha256"]:
            part.unlink()
            raise UserError(
                f"{url}: the file's SHA-256 is not {published['sha256']}; nothing was kept, try"
                " again"
            )
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
                raise UserError(
                    f"{url}: the server answered {response.status_code} {response.reason_phrase}"
                )
            resumed = response.status_code == 206
            expected = int(response.headers.get("Content-Length") or 0) + have * resumed
            file, line = (
                part.open("ab" if resumed else "wb"),
                progress_line(part.stem, expected, make_console(), "byte"),
            )
            with file, line as advance:
                for (
                    block
                ) in response.iter_raw():  # raises an HTTPError where the connection breaks off
                    file.write(block)
                    advance(file.tell(), "")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise UserError(
            f"{url}: could not be fetched ({os_error(error)}). Check the connection and run the"
            " command again (it continues), or copy the files from elsewhere and use"
            " --dataset_path"
        ) from None
