"""Problems and demonstrations from rows of the user's own, in files or in data sets that the library `datasets` loads.

A problem is a question and an answer, in the columns that `DataConfig` names. A demonstration is a "question", which goes into
the run's prompt template, or a whole "prompt", with a "response" or "completion"; or a question and its response as "messages".
Longer "messages", and a "prompt" and "completion" of messages, are conversations, for the tokenizer's chat template:

    {"question": "What is 2 + 3?", "response": " 2 + 3 = 5 </think> <answer> 5 </answer>"}
    {"messages": [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}]}"""

import csv
import io
import json
import math
import os
import random
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import httpx

from alignment.core.records import Problem
from alignment.data.prompts import fill_prompt
from alignment.data.questions import Key, question_text, split_of
from alignment.system.clock import start_in_background
from alignment.system.errors import UserError
from alignment.system.files import read_text

FINAL_ANSWER = "(?s)(?:#### |^(?!.*#### ))(.*)"  # what follows GSM8K's mark, or the whole cell where there is none
ANNOTATION = re.compile(r"<<[^<>]*>>")  # of GSM8K's calculator
VALIDATION_SHARE = 20  # one question in 20 belongs to the test split of demonstrations, for the validation loss
Demonstration = tuple[Problem, str]  # a problem and a response to it; a problem without a question has its prompt already
Rows = Iterable[tuple[str, dict]]  # ("file:line", row), or ("file: row number", row) where rows have no lines


@dataclass(frozen=True)
class DataConfig:
    """What is where in the user's own rows. The fields are those of the flags of the same names."""

    question_column: str = "question"
    answer_column: str = "answer"
    answer_pattern: str = ""
    test_split: str = ""


def problems(name: str, data: DataConfig, split: str, dataset_path: str = "") -> list[Problem]:
    """The problems of a split of the rows that --task `name` names; `dataset_path` is not read. Raises `UserError`, naming the
    row where there is one, for rows that are not there, cannot be read, or have other columns."""
    return [problem for problem, _ in _pairs(name, data)[split]]


def demonstrations(name: str, data: DataConfig, split: str, dataset_path: str, seed: int) -> list[Demonstration]:
    """The training problems that have a worked solution, with the response that it teaches, as `of_split`."""
    return of_split([pair for pair in _pairs(name, data)["train"] if pair[1]], split, seed)


@lru_cache(maxsize=2)
def _pairs(name: str, data: DataConfig) -> Mapping[str, list[Demonstration]]:
    """The pairs of each split. Without test rows, a hash of the question decides."""
    kind, _, source = name.partition(":")
    if kind == "hf":
        splits = hub_splits(f"--task {name}", "hf:FOLDER", *source.split(":", maxsplit=1))
        chosen = "train" if "train" in splits else next(iter(splits)), data.test_split or "test"
        train, test = (numbered(f"{source} {split}", splits[split]) if split in splits else None for split in chosen)
        if data.test_split and not test:
            raise UserError(f"--test_split {data.test_split}: --task {name} has the splits {', '.join(splits)}")
    else:
        train, test = read_rows(Path(source)), data.test_split and read_rows(Path(data.test_split))
    pairs = worked_problems(train, data)
    if test:
        return {"train": pairs, "test": worked_problems(test, data)}
    by_split = {split: [p for p in pairs if split_of(question_text(p[0])) == split] for split in ("train", "test")}
    if not all(by_split.values()):
        raise UserError(f"--task {name}: {len(pairs)} rows are too few to hold some out for tests; name --test_split")
    return by_split


def worked_problems(rows: Rows, data: DataConfig) -> list[Demonstration]:
    """Each row's problem, with the response that its worked solution teaches: what stands before the answer in its cell, else
    the column "solution"; "" where there is none. Raises `UserError`, naming the row, where question or answer is not there."""
    pattern, pairs, rows = _with_group(data.answer_pattern or FINAL_ANSWER), [], list(rows)
    names = dict.fromkeys(name for _, row in rows for name in row)  # a row has None where it lacks what others have
    for place, row in rows:
        columns = (data.question_column, data.answer_column)
        question, cell = (cell_text(place, row, c, ": name --question_column and --answer_column").strip() for c in columns)
        match = pattern.search(cell)
        if not match or not (answer := (match[1] or "").strip()):
            raise UserError(f'{place}: "{data.answer_column}" holds no answer where --answer_pattern {pattern.pattern} looks')
        steps = ANNOTATION.sub("", cell[: match.start()] or str(row.get("solution") or "")).strip()
        response = f" {steps} </think> <answer> {answer} </answer>" if steps else ""
        columns = json.loads(json.dumps(dict.fromkeys(names) | row, default=str))  # dates as text: checkpoints are JSON
        pairs.append((Problem(place, question, fill_prompt("r1_zero", question), answer, columns=columns), response))
    return pairs


def _with_group(pattern: str) -> re.Pattern:
    with suppress(re.error):
        if (compiled := re.compile(pattern)).groups:
            return compiled
    raise UserError(f"--answer_pattern {pattern}: must be a regular expression with a group, the answer, such as '#### (.*)'")


def of_split(rows: list[Demonstration], split: str, seed: int, key: Key = question_text) -> list[Demonstration]:
    """The demonstrations of a split; shuffles `rows` by `seed`. No question, as `key` tells them apart, is in both splits,
    unless there is only one. Raises `UserError` where there are fewer than two demonstrations."""
    if len(rows) < 2:
        raise UserError(f"{len(rows)} rows are too few to train on: SFT needs --demonstrations, or rows with worked solutions")
    random.Random(f"demonstrations {seed}").shuffle(rows)
    asked = [problem.id if problem.turns else key(problem) for problem, _ in rows]  # a conversation is in one split
    questions = list(dict.fromkeys(asked))
    tested = set(questions[: max(1, len(questions) // VALIDATION_SHARE)]) if len(questions) > 1 else set()
    return [row for row, question in zip(rows, asked, strict=True) if (question in tested) == (split == "test")] or rows


def read_demonstrations(*files: str) -> list[Demonstration]:
    """The demonstrations of the files. Raises `UserError`, naming file and line, for a malformed row."""
    return [shown for file in files for place, row in read_rows(Path(file)) for shown in _demonstrations(place, row)]


def _demonstrations(place: str, row: Mapping[str, object]) -> list[Demonstration]:
    """A row's demonstration; of a conversation one for each turn of the assistant after those that are a "prompt"."""
    remedy = '; a demonstration has a "question" or "prompt" and a "response" or "completion", or "messages"'
    given, shown = ([], row["messages"]) if "messages" in row else (row.get("prompt"), row.get("completion"))
    if isinstance(given, list) and isinstance(shown, list) and shown:
        roles = [str(isinstance(turn, dict) and turn.get("role")) for turn in given + shown]
        if not re.fullmatch("(system,)?(user,assistant,)+", "".join(f"{role}," for role in roles)):
            raise UserError(f"{place}: turns must be of user and assistant in turn, after one of system or none, not {roles}")
        turns = tuple((role, cell_text(place, turn, "content")) for role, turn in zip(roles, given + shown, strict=True))
        if given or len(turns) > 2:
            answers = [i for i in range(len(given), len(turns)) if roles[i] == "assistant"]
            return [(Problem(place, turns[i - 1][1], "", "", turns[:i]), turns[i][1]) for i in answers]
        row = {"question": turns[0][1], "response": turns[1][1]}
    response = cell_text(place, row, "completion" if "completion" in row else "response", remedy)
    if row.get("question"):
        return [(Problem(place, cell_text(place, row, "question", remedy), "", ""), response)]
    return [(Problem(place, "", cell_text(place, row, "prompt", remedy), ""), response)]


def read_rows(file: Path, *texts: str) -> list[tuple[str, dict]]:
    """The rows of a .csv file, a .parquet file, a .json file of one list, or any other file, of JSON lines. Raises `UserError`
    with file and line for a file that is not there or, unless `texts` are given, empty, and a row without those texts."""
    if not file.is_file():
        raise UserError(f"{file} is a folder: name a file in it" if file.is_dir() else f"{file} does not exist")
    rows = list({".csv": _csv_rows, ".parquet": parquet_rows}.get(file.suffix.lower(), _json_rows)(file))
    if not rows and not texts:
        raise UserError(f"{file} holds no row")
    for place, row in rows:
        if not isinstance(row, dict) or not all(isinstance(row.get(column), str) for column in texts):
            raise UserError(f"{place}: not a JSON object{' with the texts ' * bool(texts)}{' and '.join(texts)}")
    return rows


def _json_rows(file: Path) -> Rows:
    text = read_text(file)
    if file.suffix.lower() == ".json":
        return numbered(file, rows if isinstance(rows := _parsed(file, 1, text), list) else [rows])
    lines = enumerate(text.split("\n"), start=1)
    return ((f"{file}:{number}", _parsed(file, number, line)) for number, line in lines if line.strip())


def _parsed(file: Path, number: int, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{file}:{number + error.lineno - 1}"
        raise UserError(f"{place}: not a JSON object ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number too long, or lists nested too deeply
        raise UserError(f"{file}:{number}: cannot be read ({error})") from None


def _csv_rows(file: Path) -> Rows:
    """A row may have several lines, and is named by its last."""
    reader = csv.DictReader(io.StringIO(read_text(file)), restval="", strict=True)
    try:
        for row in reader:
            if None in row:
                raise UserError(f"{file}:{reader.line_num}: has more cells than the heading")
            yield f"{file}:{reader.line_num}", row
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num + 1}: not CSV ({error})") from None


def parquet_rows(file: Path) -> Rows:
    """The rows of a Parquet file. Raises `UserError` where it cannot be read as such."""
    if not find_spec("pyarrow"):
        raise UserError(f"{file}: reading Parquet needs pyarrow: run with `uv run --extra parquet ...`")
    from pyarrow import ArrowException, parquet

    try:
        return numbered(file, parquet.read_table(file).to_pylist())
    except (ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as Parquet ({error})") from None


def hub_splits(flag: str, local: str, name: str, *subset: str, **options: str) -> Mapping[str, Iterable[dict]]:
    """The splits of a data set of the hub, or of a folder of files, that `flag` asks for. Raises `UserError` where the library
    `datasets` is not installed or cannot load it, and at once where the hub does not answer: then give a `local` folder."""
    if not find_spec("datasets"):
        raise UserError(f"{flag} needs the library datasets: run with `uv run --extra datasets ...`")
    from huggingface_hub import constants

    remedy = "" if Path(name).exists() else f"; without the hub, give {local}, or HF_HUB_OFFLINE=1 for what is in its cache"
    try:
        # `datasets` asks a silent hub for half a minute. Looking up its name obeys no timeout; any answer will do.
        if remedy and not (constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE")):
            start_in_background(lambda: httpx.head(constants.ENDPOINT, timeout=9, verify=False)).result(5)
        import datasets

        return datasets.load_dataset(name, *subset, **options)
    except Exception as error:  # of the network, of the files, or of a missing subset: each of another class
        reason = " ".join(str(error.__cause__ or error).split())[:300] or "no answer"
        raise UserError(f"{flag}: cannot be loaded ({type(error).__name__}: {reason}){remedy}") from None


def numbered(place: Path | str, rows: Iterable[dict]) -> Rows:
    """Rows without lines, named by their numbers."""
    return ((f"{place}: row {number}", row) for number, row in enumerate(rows, start=1))


def cell_text(place: str, row: Mapping[str, object], column: str, remedy: str = "") -> str:
    """A cell's text, or its number as text. Raises `UserError`, with place, the row's columns and `remedy`, for any other."""
    value = row.get(column)
    text = str(value) if type(value) in (str, int) or isinstance(value, float) and math.isfinite(value) else ""
    if not text.strip() or text.encode(errors="ignore").decode() != text:  # half of a surrogate pair is no text
        raise UserError(f'{place}: "{column}" must hold text or a number; the row has {", ".join(map(str, row))}{remedy}')
    return text
