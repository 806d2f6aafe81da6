"""Demonstrations from JSON-lines files: worked by people, sampled and kept, or general data.

A row has a "question", which is asked with the run's prompt template, or a whole "prompt"; and the "response" to it:

    {"question": "What is 2 + 3?", "response": " 2 + 3 = 5 </think> <answer> 5 </answer>"}
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from alignment.core.records import Problem
from alignment.system.errors import UserError

VALIDATION_SHARE = 20  # one demonstration in so many is held out, for the validation loss


def demonstrations(files: Sequence[str], split: str, seed: int) -> list[tuple[Problem, str]]:
    """(problem, response) of all rows of a split, shuffled by `seed`; a problem without a question has its prompt already.

    Raises `UserError`, naming file and line, for a row that is none, and for files that hold fewer than two.
    """
    rows = [row for file in files for row in read_demonstrations(Path(file))]
    if len(rows) < 2:
        raise UserError(f"--demonstrations {' '.join(files)}: {len(rows)} rows are too few to train on")
    random.Random(f"demonstrations {seed}").shuffle(rows)
    asked = list(dict.fromkeys(question_of(row) for row in rows))
    held_out = set(asked[: max(1, len(asked) // VALIDATION_SHARE)]) if len(asked) > 1 else set()
    return [row for row in rows if (question_of(row) in held_out) == (split == "test")] or rows


def question_of(row: tuple[Problem, str]) -> str:
    """What a demonstration answers; no question is on both sides of the split, unless there is one only."""
    return row[0].question or row[0].prompt


def read_demonstrations(file: Path) -> list[tuple[Problem, str]]:
    """The rows of one file."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise UserError(f"{file} does not exist") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return [_row(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _row(line: str, place: str) -> tuple[Problem, str]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not a JSON object ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise UserError(f"{place}: nested too deeply for a demonstration") from None
    if not isinstance(record, dict) or not isinstance(record.get("response"), str) or not record["response"]:
        raise UserError(f'{place}: needs a "response", which is text')
    asked = record.get("question") or record.get("prompt")
    try:
        f"{asked}{record['response']}".encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: holds half of a surrogate pair, which is no text") from None
    if not isinstance(asked, str):
        raise UserError(f'{place}: needs a "question" or a "prompt", which is text')
    question = asked if record.get("question") else ""
    return Problem(place, question, "" if question else asked, ""), record["response"]
