"""Rows of the user's own files and data sets. One reader for all of them: text stays text, and
numbers keep their digits.

A CSV cell `None` is the text None and `9007199254740993` has all its digits, in a file as in a
folder for the library `datasets`, which finds and downloads the files of a data set and would
otherwise guess types for their cells."""

import csv
import dataclasses
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alignment.system.errors import UserError
from alignment.system.files import read_text
from alignment.system.hub import wait_for_hub
from alignment.system.nearest import did_you_mean_path

Row = dict[str, Any]  # column -> cell
PlacedRow = tuple[str, Row]  # ("file:line", row), or ("file: row number", row) without lines
Rows = Iterable[PlacedRow]
# What a data set's description may say of its files; where it says more, the library reads them.
UNDERSTOOD = {
    "name",
    "version",
    "data_dir",
    "data_files",
    "description",
    "features",
    "sep",
    "delimiter",
}
# How a CSV file is cut into cells. What cells mean, such as a decimal comma, is beside these.
SHAPE_OF_CSV = {
    "header",
    "names",
    "column_names",
    "index_col",
    "usecols",
    "skipinitialspace",
    "skiprows",
    "nrows",
    "skip_blank_lines",
    "lineterminator",
    "quotechar",
    "quoting",
    "escapechar",
    "comment",
    "encoding",
    "dialect",
    "skipfooter",
    "doublequote",
    "engine",
    "memory_map",
    "encoding_errors",
    "on_bad_lines",
}


# A file is read whole, so its cells may be of any length. The csv module's own limit is 131,072
# characters.
csv.field_size_limit(2**31 - 1)


class WrittenNumber(float):
    """A number with a point or an exponent, of a JSON file. Its `str` has the digits that the file
    has."""

    text: str

    def __new__(cls, text: str):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text


def read_rows(file: Path, *texts: str, flag: str = "") -> list[PlacedRow]:
    """The rows of a .csv, .tsv or .parquet file, a .json file of one list or an object a line, or
    any other file, of JSON lines.

    Raises `UserError` with file and line for a file that is not there or, unless `texts` are given,
    empty, and for a row without those texts, or with two values of one name. An error of the file
    itself names the `flag` that gave it."""
    place_of_file = f"{flag}: {file}" if flag else str(file)
    if file.is_dir():
        raise UserError(f"{place_of_file} is a folder: name a file in it")
    if not file.is_file():
        raise UserError(f"{place_of_file} does not exist{did_you_mean_path(file)}")
    reader = READERS.get(file.suffix.lower(), json_lines)
    rows = list(reader(file))
    if not rows and not texts:
        raise UserError(f"{file} holds no row")
    wanted = " with the texts " + " and ".join(texts) if texts else ""
    for place, row in rows:
        if not isinstance(row, dict) or not _has_texts(row, texts):
            raise UserError(f"{place}: not a JSON object{wanted}")
    return rows


def _has_texts(row: Row, columns: Iterable[str]) -> bool:
    """Whether a row has a text in each of some columns."""
    return all(isinstance(row.get(column), str) for column in columns)


def numbered(place: Path | str, rows: Iterable[Row]) -> Rows:
    """Rows of a source without lines, with their numbers as places."""
    return ((f"{place}: row {number}", row) for number, row in enumerate(rows, start=1))


def cell_text(place: str, row: Mapping[str, object], column: str, remedy: str = "") -> str:
    """A cell's text, or its number as text. Raises `UserError`, with place, the row's columns and
    `remedy`, for any other."""
    value = row.get(column)
    text = value if isinstance(value, str) else _number_text(value)
    # half of a surrogate pair is no text
    can_be_written = text.encode(errors="ignore").decode() == text
    is_blank = not any(sign.isprintable() and not sign.isspace() for sign in text)
    if is_blank or not can_be_written:
        columns = ", ".join(map(str, row))
        held = _describe(value)
        fault = f'"{column}" must hold text or a number, not {held}; the row has {columns}'
        if column not in row:
            near = [name for name in row if _is_near(name, column)]
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            fault = f'there is no "{column}"{hint}; the row has {columns}'
        raise UserError(f"{place}: {fault}{remedy}")
    return text


def _is_near(name: object, column: str) -> bool:
    """Whether two columns' names differ only in case and white space."""
    return isinstance(name, str) and name.strip().casefold() == column.strip().casefold()


_NAMES_OF_TYPES = {
    bool: "a truth value (write it as text)",
    bytes: "bytes",
    dict: "an object",
    type(None): "nothing (null)",
}


def _describe(value: object) -> str:
    """What a cell holds that is neither text nor a finite number, in words."""
    if isinstance(value, str):
        is_whole = value.encode(errors="ignore").decode() == value
        return "blank text" if is_whole else "half of a surrogate pair"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, float | Decimal):
        return f"{value}, which is no finite number"
    return _NAMES_OF_TYPES.get(type(value), f"a {type(value).__name__}")


def _number_text(value: object) -> str:
    """The digits of a finite number; "" for anything else, such as a truth value."""
    if isinstance(value, Decimal) and value.is_finite():
        return f"{value:f}"
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    return str(value) if type(value) is int else ""  # a truth value is an int of another type


# --- JSON -----------------------------------------------------------------------------------------


def json_rows(file: Path) -> Rows:
    """The rows of a list, of one object, or of an object a line."""
    text = read_text(file)
    if _has_an_object_a_line(text):
        yield from json_lines(file)
        return
    value = _parse(file, 1, text)
    values = value if isinstance(value, list) else [value]
    for place, row in numbered(file, values):
        _refuse_repeated_keys(place, row)
        yield place, row


def _has_an_object_a_line(text: str) -> bool:
    """Whether a JSON text is one object after another, each on a line of its own."""
    first, _, rest = text.strip().partition("\n")
    if not first.startswith("{") or not rest.strip():
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return True


def json_lines(file: Path) -> Rows:
    """The value of each line that is not blank; those of a file that is one list."""
    text = read_text(file)
    if _is_one_list(text):
        yield from json_rows(file)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{file}:{number}"
            row = _parse(file, number, line)
            _refuse_repeated_keys(place, row)
            yield place, row


def _is_one_list(text: str) -> bool:
    """Whether a text is a list of objects in JSON."""
    if not re.match(r"\s*\[\s*\{", text):
        return False
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), list)
    return False


class _Ambiguous(dict):
    """An object whose text has two values of one `key`."""

    key: str = ""


def _make_object(pairs: list[tuple[str, Any]]) -> Row:
    """The object of these pairs, `_Ambiguous` where two have one key."""
    row = dict(pairs)
    if len(row) == len(pairs):
        return row
    names = [name for name, _ in pairs]
    ambiguous = _Ambiguous(row)
    ambiguous.key = next(name for name in names if names.count(name) > 1)
    return ambiguous


def _refuse_repeated_keys(place: str, row: object) -> None:
    """Raise `UserError` where a value holds an `_Ambiguous` object, however deep."""
    values = [row]
    while values:
        value = values.pop()
        if isinstance(value, _Ambiguous):
            raise UserError(f'{place}: has the key "{value.key}" twice: which one counts?')
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value


def _parse(file: Path, number: int, text: str) -> Any:
    """The value of a JSON text that begins at a line of a file, of any type."""
    try:
        return json.loads(text, object_pairs_hook=_make_object, parse_float=WrittenNumber)
    except json.JSONDecodeError as error:
        place = f"{file}:{number + error.lineno - 1}"
        remedy = r"; a backslash is written \\" if "escape" in error.msg else ""
        raise UserError(
            f"{place}: not a JSON object ({error.msg} at column {error.colno}){remedy}"
        ) from None
    except RecursionError:
        raise UserError(f"{file}:{number}: cannot be read: lists are nested too deeply") from None
    except ValueError:
        raise UserError(
            f"{file}:{number}: cannot be read: a number has too many digits; write it as text"
        ) from None


# --- CSV and Parquet ------------------------------------------------------------------------------


def csv_rows(file: Path, delimiter: str = ",") -> Rows:
    """The rows of a CSV file, all cells as text. A row may have several lines, and is named by its
    last."""
    text = read_text(file)
    _check_heading(f"{file}:1", text.partition("\n")[0], delimiter)
    reader = csv.DictReader(io.StringIO(text), restval="", strict=True, delimiter=delimiter)
    try:
        _refuse_repeated_columns(f"{file}:1", reader.fieldnames or [])
        for row in reader:
            if None in row:
                raise UserError(f"{file}:{reader.line_num}: has more cells than the heading")
            yield f"{file}:{reader.line_num}", row
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num + 1}: not CSV ({error})") from None


_NAMES_OF_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}


def _check_heading(place: str, heading: str, delimiter: str) -> None:
    """Raise `UserError` where a heading is blank, or has other delimiters alone."""
    if not heading.strip():
        raise UserError(f"{place}: the first line is the heading, and it is blank")
    others = [sign for sign in _NAMES_OF_DELIMITERS if sign in heading]
    if others and delimiter not in heading:
        given = _NAMES_OF_DELIMITERS[others[0]]
        raise UserError(
            f"{place}: the heading has {given} between its columns: write commas, or tabs in a .tsv"
            " file"
        )


def described_csv_rows(file: Path, options: Mapping[str, object]) -> Rows:
    """The rows of a CSV file, all cells as text, by `options` of pandas. Raises `UserError` where
    pandas cannot read it."""
    import pandas  # which the library `datasets` brings

    as_text = {"dtype": str, "keep_default_na": False, "na_filter": False}
    arguments: dict[str, Any] = {**options, **as_text}
    del arguments["chunksize"]
    try:
        table = pandas.read_csv(file, **arguments)
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"{file}: not CSV as its data set describes it ({error})") from None
    rows: Any = table.to_dict("records")  # columns are numbers where the file has no heading
    return numbered(file, rows)


def parquet_rows(file: Path) -> Rows:
    """The rows of a Parquet file. Raises `UserError` where it cannot be read as such."""
    if not find_spec("pyarrow"):
        raise UserError(
            f"{file}: reading Parquet needs pyarrow: run with `uv run --extra parquet ...`"
        )
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file).read()
        _refuse_repeated_columns(str(file), table.column_names)
        return numbered(file, list(table_rows(table)))
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"{file}: cannot be read as Parquet ({error})") from None


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".csv": csv_rows,
    ".tsv": partial(csv_rows, delimiter="\t"),
    ".parquet": parquet_rows,
    ".json": json_rows,
}


def _refuse_repeated_columns(place: str, names: Iterable[str]) -> None:
    """Raise `UserError` where two columns have one name."""
    numbers = Counter(names)
    for name, number in numbers.items():
        if name and number > 1:  # a table's indices may all have no name
            raise UserError(f'{place}: has two columns "{name}": which one counts?')


def table_rows(table: Any) -> Iterator[Row]:
    """The rows of an Arrow table."""
    columns = [_exact_values(column) for column in table.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def _exact_values(column: Any) -> list[Any]:
    """The values of an Arrow column, with the digits that its type can hold."""
    return [_as_written(value, column.type) for value in column.to_pylist()]


def _as_written(value: Any, kind: Any) -> Any:
    """An Arrow value of the Arrow type `kind`, where a number of 16 or 32 bits is the shortest
    decimal that rounds to it: 0.1 as float32 is 0.100000001490116 to a float of 64 bits."""
    import numpy
    from pyarrow import types

    if value is None:
        return None
    if types.is_float32(kind):
        return float(str(numpy.float32(value)))
    if types.is_float16(kind):
        return float(str(numpy.float16(value)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_as_written(item, kind.value_type) for item in value]
    if types.is_struct(kind):
        return {field.name: _as_written(value[field.name], field.type) for field in kind}
    return value


# --- data sets, through the library `datasets` ----------------------------------------------------


def hub_splits(
    flag: str, local: str, name: str, *subset: str, data_files: str | None = None
) -> Mapping[str, Iterable[Row]]:
    """The splits of a data set of the hub, or of a folder of files, that `flag` names; with
    `data_files`, of that file alone.

    Raises `UserError` where the library `datasets` is not installed or cannot load it, and at once
    where the hub does not answer: then give a `local` folder."""
    if not find_spec("datasets"):
        raise UserError(
            f"{flag} needs the library datasets: run with `uv run --extra datasets ...`"
        )
    from huggingface_hub import constants

    remedy = ""
    is_on_the_hub = not Path(name).exists()
    if is_on_the_hub:
        remedy = f"; without the hub, give {local}, or HF_HUB_OFFLINE=1 for what is in its cache"
    is_offline = constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE")
    try:
        if is_on_the_hub and is_offline:
            name = _cached_folder(name)
        elif is_on_the_hub:
            wait_for_hub(constants.ENDPOINT)
        return _load_splits(name, subset, data_files)
    # of the network, of the files, or of a missing subset: each of another class
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:300] or "no answer"
        raise UserError(
            f"{flag}: cannot be loaded ({type(error).__name__}: {reason}){remedy}"
        ) from None


def _cached_folder(name: str) -> str:
    """The folder of a data set's files in the hub's cache; the name itself where there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(name, repo_type="dataset", local_files_only=True)
    except LocalEntryNotFoundError:
        return name


def _load_splits(
    name: str, subset: Sequence[str], data_files: str | None
) -> Mapping[str, Iterable[Row]]:
    """Each split's rows, from its files where these are CSV, JSON or Parquet; from the library's
    tables where not."""
    import datasets

    builder = datasets.load_dataset_builder(name, *subset, data_files=data_files)
    config: Any = builder.config  # of a class for each kind of file
    separator = getattr(config, "sep", ",")
    readers: dict[str, Callable[[Path], Rows]] = {
        "csv": partial(csv_rows, delimiter=separator),
        "json": json_rows,
        "parquet": parquet_rows,
    }
    known = UNDERSTOOD
    if builder.name == "csv" and (_says_more(config, UNDERSTOOD) or len(separator) != 1):
        known = UNDERSTOOD | SHAPE_OF_CSV
        readers["csv"] = partial(described_csv_rows, options=config.pd_read_csv_kwargs)
    if builder.name not in readers or _says_more(config, known):
        loaded: Any = datasets.load_dataset(name, *subset, data_files=data_files)
        rows_of_splits = {}
        for split, part in loaded.items():
            table = part.with_format("arrow")[:]
            rows_of_splits[split] = list(table_rows(table))
        return rows_of_splits
    manager = datasets.DownloadManager(dataset_name=builder.dataset_name, record_checksums=False)
    splits = {}
    for split, paths in config.data_files.items():
        files = manager.iter_files(manager.download_and_extract(list(paths)))
        splits[str(split)] = _RowsOfFiles([Path(file) for file in files], readers[builder.name])
    return splits


@dataclass(frozen=True)
class _RowsOfFiles:
    """The rows of several files, read whenever they are gone through."""

    files: Sequence[Path]
    reader: Callable[[Path], Rows]

    def __iter__(self) -> Iterator[Row]:
        for file in self.files:
            for place, row in self.reader(file):
                if not isinstance(row, dict):
                    raise UserError(f"{place}: not a JSON object")
                yield row


def _says_more(config: Any, known: set[str]) -> bool:
    """Whether a data set's description says more of its files than what is `known`, such as other
    names of columns."""
    usual = type(config)()
    names = {field.name for field in dataclasses.fields(config)} - known
    return any(getattr(config, name) != getattr(usual, name) for name in names)
