"""Data sets of published files, GSM8K and SVAMP: reading them, and downloading them by the table
`published.toml`."""

import random
import re
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from alignment.core.records import Problem
from alignment.data.rows import Row, cell_text, read_rows
from alignment.data.tasks.countdown import OPERATIONS
from alignment.data.tasks.own_data import DataConfig, worked_problems
from alignment.system.errors import UserError, os_error
from alignment.system.files import read_toml
from alignment.system.manifests import sha256
from alignment.system.terminal import make_console, progress_line

FOLDER = "dataset/{}"
PUBLISHED = read_toml(Path(__file__).with_name("published.toml"), "--task")


def problems(name: str, split: str, dataset_path: str = "") -> list[Problem]:
    """The problems of a split of the data set `name`, in file order. Raises `UserError`, with file
    and line, where they are bad."""
    return [problem for problem, _ in _pairs(name, split, dataset_path)]


def demonstrations(
    name: str, split: str, dataset_path: str = "", seed: int = 0
) -> list[tuple[Problem, str]]:
    """(problem, response) pairs of worked solutions, less calculator annotations, shuffled by
    `seed`. Raises `UserError` as `problems` does."""
    pairs = [pair for pair in _pairs(name, split, dataset_path) if pair[1]]
    random.Random(seed).shuffle(pairs)
    return pairs


def _pairs(name: str, split: str, dataset_path: str) -> list[tuple[Problem, str]]:
    """The problems of a split, with the responses that their worked solutions teach."""
    files = PUBLISHED[name]
    path = _folder(name, dataset_path) / files[split]["file"]
    if not path.is_file():
        command = (
            f"`uv run -m alignment.download --task {name}`, or point --dataset_path at a folder"
        )
        wanted = f"{files['train']['file']} and {files['test']['file']}"
        raise UserError(
            f"{path} does not exist: download {files['title']} with {command} with {wanted}"
        )
    rows = read_rows(path)
    if "equation" in files:
        rows = [(place, svamp_row(place, row)) for place, row in rows]
    pairs = worked_problems(rows, DataConfig(answer_pattern=files["answer_pattern"]))
    demonstrations = []
    for index, (problem, response) in enumerate(pairs):
        named_problem = replace(problem, id=f"{name}/{split}/{index}")
        demonstrations.append((named_problem, response))
    return demonstrations


def _folder(name: str, dataset_path: str) -> Path:
    """The folder of a data set's files: the one that is named, else dataset/NAME, or dataset itself
    where it has both files and dataset/NAME has none."""
    if dataset_path:
        return Path(dataset_path)
    own = Path(FOLDER.format(name))
    files = [PUBLISHED[name][split]["file"] for split in ("train", "test")]
    is_own = any((own / file).is_file() for file in files)
    is_flat = all((own.parent / file).is_file() for file in files)
    return own.parent if is_flat and not is_own else own


def svamp_row(place: str, cells: Row) -> Row:
    """A row's question, answer and solution, which is "" where the equation has another value than
    the answer; published.toml shows rows.

    Numbers have four decimals at most. Raises `UserError`, naming the place, for a malformed
    row."""
    question = cell_text(place, cells, "Question").strip()
    equation = cell_text(place, cells, "Equation").strip()
    answer = cell_text(place, cells, "Answer").strip()
    steps: list[str] = []
    try:
        if "Numbers" in cells:
            numbers = [number(text) for text in cell_text(place, cells, "Numbers").split()]
            question = _fill_numbers(question, numbers)
            equation = _fill_numbers(equation, numbers)
            question = re.sub(r" (?=[.,?])", "", question)
        else:
            body = cell_text(place, cells, "Body").strip()
            if body[-1] in ".,?!":
                question = f"{body} {question}"
            else:
                question = f"{body}, {question[0].lower()}{question[1:]}"
        answer = number(answer)
        value = calculate(iter(equation.split()), steps)
    except (ValueError, LookupError, StopIteration, ArithmeticError, RecursionError) as error:
        reason = str(error) or "it breaks off"
        raise UserError(
            f"{place}: Numbers, Equation and Answer make no calculation ({reason})"
        ) from None
    solution = " ; ".join(steps) if value == answer else ""
    return {"question": question, "answer": answer, "solution": solution}


def _fill_numbers(text: str, numbers: Sequence[str]) -> str:
    """A text with its numbers in place of the words number0, number1 and so on."""
    return re.sub(r"number(\d+)", lambda match: numbers[int(match[1])], text)


def calculate(tokens: Iterator[str], steps: list[str]) -> str:
    """The value of the equation that `tokens` begin, in prefix form or in parentheses; appends its
    calculations to `steps`."""
    token = next(tokens)
    if token == "(":
        left = calculate(tokens, steps)
        sign = next(tokens)
        right = calculate(tokens, steps)
        next(tokens)  # the closing parenthesis
    elif token in OPERATIONS:
        sign = token
        left = calculate(tokens, steps)
        right = calculate(tokens, steps)
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
    stopped.

    A file takes its name only once its SHA-256 is right. Raises `UserError` where it is not, or
    without a connection."""
    folder.mkdir(parents=True, exist_ok=True)
    address = source or PUBLISHED[name]["source"]
    for split in ("train", "test"):
        published = PUBLISHED[name][split]
        file = folder / published["file"]
        url = f"{address}/{published['path']}"
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
    """Write what a server sends to the file `part`, or append what it still lacks."""
    size = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if size:
        headers["Range"] = f"bytes={size}-"
    try:
        with httpx.stream(
            "GET",
            url,
            headers=headers,
            timeout=30,
            follow_redirects=True,
            verify=ssl.create_default_context(),
        ) as response:
            if response.status_code == 416:  # nothing is left to send, the part is already complete
                return
            if not response.is_success:
                raise UserError(
                    f"{url}: the server answered {response.status_code} {response.reason_phrase}"
                )
            expected = int(response.headers.get("Content-Length") or 0)
            mode = "wb"
            if response.status_code == 206:  # the server sends the rest of the file only
                expected += size
                mode = "ab"
            line = progress_line(part.stem, expected, make_console(), "byte")
            with part.open(mode) as file, line as advance:
                # iter_raw raises an HTTPError where the connection breaks off
                for block in response.iter_raw():
                    file.write(block)
                    advance(file.tell(), "")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise UserError(
            f"{url}: could not be fetched ({os_error(error)}). Check the connection and run the"
            " command again (it continues), or copy the files from elsewhere and use"
            " --dataset_path"
        ) from None
