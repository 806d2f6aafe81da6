"""Demonstrations from JSON-lines files.

A row has a "question", to which the run's prompt template is applied, or a whole "prompt", and the "response" to it:

    {"question": "What is 2 + 3?", "response": " 2 + 3 = 5 </think> <answer> 5 </answer>"}
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from alignment.core.records import Problem
from alignment.data.questions import Key, question_text
from alignment.system.errors import UserError
from alignment.system.files import text_lines

VALIDATION_SHARE = 20  # one question in 20 belongs to the test split, for the validation loss


def demonstrations(files: Sequence[str], split: str, seed: int, key: Key = question_text) -> list[tuple[Problem, str]]:
    """(problem, response) pairs of a split, shuffled by `seed`; a problem without a question has its prompt already. No
    question, as `key` tells them apart, is in both splits, unless there is only one. Raises `UserError`, naming file and line,
    for a malformed row, and for files with fewer than two rows."""
    rows = [row for file in files for row in read_demonstrations(Path(file))]
    if len(rows) < 2:
        raise UserError(f"--demonstrations {' '.join(files)}: {len(rows)} rows are too few to train on")
    random.Random(f"demonstrations {seed}").shuffle(rows)
    questions = list(dict.fromkeys(key(problem) for problem, _ in rows))
    tested = set(questions[: max(1, len(questions) // VALIDATION_SHARE)]) if len(questions) > 1 else set()
    return [row for row in rows if (key(row[0]) in tested) == (split == "test")] or rows


def read_demonstrations(file: Path) -> list[tuple[Problem, str]]:
    """The (problem, response) pairs of one file. Raises `UserError`, naming file and line, for a malformed row."""
    try:
        return [_row(place, record) for place, record in text_rows(file)]
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None


def text_rows(file: Path, *keys: str) -> Iterator[tuple[str, dict]]:
    """Yield ("file:line", value) for each line of a JSON-lines file that is not blank; the `keys` of each value hold text.
    Raises `UserError`, which names file and line, for a file that is not text and for any other line."""
    named = " and ".join(f'"{key}"' for key in keys)
    for place, line in text_lines(file):
        try:
            row = json.loads(line)
            texts = [row[key] for key in keys]
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not a JSON object ({error.msg} at column {error.colno})") from None
        except (ValueError, RecursionError) as error:  # a number too long, or lists nested too deeply
            raise UserError(f"{place}: cannot be read ({error})") from None
        except (KeyError, TypeError):
            raise UserError(f"{place}: needs the keys {named}") from None
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{place}: {named} must be text")
        yield place, row


def _row(place: str, record: object) -> tuple[Problem, str]:
    if not isinstance(record, dict) or not isinstance(record.get("response"), str) or not record["response"]:
        raise UserError(f'{place}: needs a "response", which is text')
    text = record.get("question") or record.get("prompt")
    try:
        f"{text}{record['response']}".encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: holds half of a surrogate pair, which is no text") from None
    if not isinstance(text, str):
        raise UserError(f'{place}: needs a "question" or a "prompt", which is text')
    question = text if record.get("question") else ""
    return Problem(place, question, "" if question else text, ""), record["response"]
