"""Problems and demonstrations from rows of the user's own, in files or in data sets that the
library `datasets` finds.

A problem is a question and an answer, in the columns that `DataConfig` names. A demonstration is a
"question", which goes into the run's prompt template, or a whole "prompt", with a "response" or
"completion"; or a question and its response as "messages". Longer "messages", and a "prompt" and
"completion" of messages, are conversations, for the tokenizer's chat template:

    {"question": "What is 2 + 3?", "response": " 2 + 3 = 5 </think> <answer> 5 </answer>"}
    {"messages": [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content":
      "It is 5."}]}"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from alignment.core.records import Problem
from alignment.data.prompts import fill_prompt
from alignment.data.questions import Key, question_text, split_of
from alignment.data.row_warnings import stripped, warn_of_answers, warn_of_misread_latex
from alignment.data.rows import Rows, cell_text, hub_splits, numbered, read_rows
from alignment.system.errors import UserError
from alignment.system.terminal import say_once

MARKER = re.compile("#{4,}")  # GSM8K's, before the final answer
ANNOTATION = re.compile(r"<<[^<>]*>>")  # of GSM8K's calculator
# one question in 20 belongs to the test split of demonstrations, for the validation loss
VALIDATION_SHARE = 20
# a problem and a response to it; a problem without a question has its prompt already
Demonstration = tuple[Problem, str]
# Keys under which messages hold what comes before their "content".
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
UNTRAINABLE = ("tool_calls", "function_call")
# All keys of messages that are read.
OF_MESSAGES = ("role", "content", "weight", *THOUGHTS, *UNTRAINABLE)
# Keys of rows that say something of what is to be trained, if they stand in messages.
MISPLACED = ("weight", *THOUGHTS)


@dataclass(frozen=True)
class DataConfig:
    """What is where in the user's own rows. The fields are those of the flags of the same names."""

    question_column: str = "question"
    answer_column: str = "answer"
    answer_pattern: str = ""
    test_split: str = ""


def problems(name: str, data: DataConfig, split: str, dataset_path: str = "") -> list[Problem]:
    """The problems of a split of the rows that --task `name` names; `dataset_path` is not read.
    Raises `UserError`, naming the row where there is one, for rows that are not there, cannot be
    read, or have other columns."""
    return [problem for problem, _ in _pairs(name, data)[split]]


def demonstrations(
    name: str, data: DataConfig, split: str, dataset_path: str, seed: int
) -> list[Demonstration]:
    """The training problems that have a worked solution, with the response that it teaches, as
    `of_split`."""
    return of_split([pair for pair in _pairs(name, data)["train"] if pair[1]], split, seed)


@lru_cache(maxsize=2)
def _pairs(name: str, data: DataConfig) -> Mapping[str, list[Demonstration]]:
    """The pairs of each split. Without test rows, a hash of the question decides."""
    kind, _, source = name.partition(":")
    if kind == "hf":
        splits = hub_splits(f"--task {name}", "hf:FOLDER", *source.split(":", maxsplit=1))
        chosen = "train" if "train" in splits else next(iter(splits)), data.test_split or "test"
        train, test = (
            numbered(f"{source} {split}", splits[split]) if split in splits else None
            for split in chosen
        )
        if data.test_split and not test:
            raise UserError(
                f"--test_split {data.test_split}: --task {name} has the splits {', '.join(splits)}"
            )
    else:
        train, test = read_rows(Path(source)), data.test_split and read_rows(Path(data.test_split))
    pairs = worked_problems(train, data)
    if test:
        return {"train": pairs, "test": worked_problems(test, data)}
    by_split = {
        split: [p for p in pairs if split_of(question_text(p[0])) == split]
        for split in ("train", "test")
    }
    if not all(by_split.values()):
        questions = len({question_text(problem) for problem, _ in pairs})
        rows = f"{len(pairs)} rows"
        if questions < len(pairs):
            rows += f" that ask {questions} question{'s' * (questions > 1)}"
        fault = f"{rows} are too few to hold some out for tests"
        raise UserError(f"--task {name}: {fault}; name --test_split")
    return by_split


def worked_problems(rows: Rows, data: DataConfig) -> list[Demonstration]:
    """Each row's problem, with the response that its worked solution teaches: what stands before
    the answer in its cell, else the column "solution"; "" where there is none. Says what of text
    and answers looks wrong. Raises `UserError`, naming the row, where question or answer is not
    there."""
    pattern = _with_group(data.answer_pattern) if data.answer_pattern else None
    rows = list(rows)
    # a row has None where it lacks what others have
    names = dict.fromkeys(name for _, row in rows for name in row)
    pairs = []
    for place, row in rows:
        columns = (data.question_column, data.answer_column)
        remedy = ": name --question_column and --answer_column"
        question, cell = (stripped(cell_text(place, row, column, remedy)) for column in columns)
        before, answer = split_answer(cell, pattern)
        if not answer:
            where = "after its last ####"
            if pattern:
                where = f"where --answer_pattern {pattern.pattern} looks"
            raise UserError(f'{place}: "{data.answer_column}" holds no answer {where}')
        steps = ANNOTATION.sub("", before or str(row.get("solution") or "")).strip()
        response = f" {steps} </think> <answer> {answer} </answer>" if steps else ""
        # dates as text: checkpoints are JSON
        columns = json.loads(json.dumps(dict.fromkeys(names) | row, default=str))
        pairs.append(
            (
                Problem(place, question, fill_prompt("r1_zero", question), answer, columns=columns),
                response,
            )
        )
    warn_of_misread_latex(_texts(rows, (data.question_column, data.answer_column, "solution")))
    warn_of_answers([problem for problem, _ in pairs])
    return pairs


def split_answer(cell: str, pattern: re.Pattern | None = None) -> tuple[str, str]:
    """What stands before a cell's final answer, and the answer, "" where there is none. The answer
    is the line of the last #### (the next line, where nothing else is on its own), and the whole
    cell where there is no such mark; by a pattern, the first group of its last match in which that
    is not blank."""
    if pattern is None:
        marks = list(MARKER.finditer(cell))
        if not marks:
            return "", cell
        lines = (stripped(line) for line in cell[marks[-1].end() :].split("\n"))
        return cell[: marks[-1].start()], next(filter(None, lines), "")
    matches = [match for match in pattern.finditer(cell) if (match[1] or "").strip()]
    if not matches:
        return "", ""
    return cell[: matches[-1].start()], stripped(matches[-1][1])


def _texts(rows: Rows, columns: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Place, column and text of the rows' cells of text in some columns."""
    for place, row in rows:
        for column in columns:
            if isinstance(row.get(column), str):
                yield place, column, row[column]


def _with_group(pattern: str) -> re.Pattern:
    with suppress(re.error):
        if (compiled := re.compile(pattern)).groups:
            return compiled
    raise UserError(
        f"--answer_pattern {pattern}: must be a regular expression with a group, the answer, such"
        " as '#### (.*)'"
    )


def of_split(
    rows: list[Demonstration], split: str, seed: int, key: Key = question_text
) -> list[Demonstration]:
    """The demonstrations of a split; shuffles `rows` by `seed`. No question, as `key` tells them
    apart, is in both splits, unless there is only one. Raises `UserError` where there are fewer
    than two demonstrations."""
    if len(rows) < 2:
        raise UserError(
            f"{len(rows)} rows are too few to train on: SFT needs --demonstrations, or rows with"
            " worked solutions"
        )
    random.Random(f"demonstrations {seed}").shuffle(rows)
    # a conversation is in one split
    asked = [problem.id if problem.turns else key(problem) for problem, _ in rows]
    questions = list(dict.fromkeys(asked))
    tested = (
        set(questions[: max(1, len(questions) // VALIDATION_SHARE)])
        if len(questions) > 1
        else set()
    )
    return [
        row
        for row, question in zip(rows, asked, strict=True)
        if (question in tested) == (split == "test")
    ] or rows


def read_demonstrations(*files: str) -> list[Demonstration]:
    """The demonstrations of the files. Says what text looks wrong, and how many messages of weight
    0 are left out. Raises `UserError`, naming file and line, for a malformed row."""
    shown: list[Demonstration] = []
    for file in files:
        rows = read_rows(Path(file))
        weightless = 0
        for place, row in rows:
            kept, left_out = _demonstrations(place, row)
            shown += kept
            weightless += left_out
        _warn_of_keys(file, [row for _, row in rows])
        if weightless:
            messages = "1 message" if weightless == 1 else f"{weightless} messages"
            say_once(f"{file}: {messages} of weight 0: context only, not trained")
        texts = (text for place, row in rows for text in _demonstrated_texts(place, row))
        warn_of_misread_latex(texts)
    return shown


def _warn_of_keys(file: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Say which keys of messages are not read, as one may mean what is trained; and which of rows
    would be read in a message."""
    unread = {}
    for row in rows:
        for column in ("messages", "prompt", "completion"):
            for message in row[column] if isinstance(row.get(column), list) else ():
                unread |= dict.fromkeys(set(message) - {*OF_MESSAGES})
    if unread:
        names = ", ".join(f'"{name}"' for name in sorted(unread))
        say_once(f"{file}: messages have {names}: not read, and no message is left out for it")
    misplaced = [name for name in MISPLACED if any(row.get(name) is not None for row in rows)]
    if misplaced:
        names = ", ".join(f'"{name}"' for name in misplaced)
        remedy = "the response is trained as it stands; messages can have thoughts and weights"
        say_once(f"{file}: rows have {names}: not read, {remedy}")


def _demonstrated_texts(place: str, row: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    yield from _texts([(place, row)], ("question", "prompt", "response", "completion"))
    for column in ("messages", "prompt", "completion"):
        for message in row[column] if isinstance(row.get(column), list) else ():
            yield from _texts([(place, message)], ("content", *THOUGHTS))


def _demonstrations(place: str, row: Mapping[str, object]) -> tuple[list[Demonstration], int]:
    """A row's demonstration, and the number of messages of weight 0, which are not trained. Of a
    conversation one for each turn of the assistant after those that are a "prompt"."""
    given, shown = (
        ([], row["messages"]) if "messages" in row else (row.get("prompt"), row.get("completion"))
    )
    if isinstance(given, list) and isinstance(shown, list) and shown:
        return _conversation(place, given + shown, len(given))
    return [_plain_demonstration(place, row)], 0


def _conversation(
    place: str, messages: Sequence[object], given: int
) -> tuple[list[Demonstration], int]:
    """The demonstrations of messages, of which so many are `given` as the prompt, and the number of
    those of weight 0. One question and its answer go into the run's template, like a row of these;
    unless the answer has thoughts, which only the tokenizer's chat template can place. Problems
    have the `messages` as their columns."""
    roles = [str(isinstance(message, dict) and message.get("role")) for message in messages]
    if not re.fullmatch("(system,)?(user,assistant,)+", "".join(f"{role}," for role in roles)):
        wanted = "turns must be of user and assistant in turn, after one of system or none"
        raise UserError(f"{place}: {wanted}, not {roles}")
    kept = [_message(place, message) for message in messages]
    turns = tuple((message["role"], message["content"]) for message in kept)
    answers = [number for number in range(given, len(turns)) if roles[number] == "assistant"]
    trained = [number for number in answers if _is_trained(place, messages[number])]
    weightless = len(answers) - len(trained)
    thoughtful = any(len(message) > len(("role", "content")) for message in kept)
    if not (given or len(turns) > 2 or thoughtful):
        row = {"question": turns[0][1], "response": turns[1][1]}
        return [_plain_demonstration(place, row) for _ in trained], weightless
    columns = {"messages": kept}
    shown = []
    for number in trained:
        question = turns[number - 1][1]
        problem = Problem(place, question, "", "", turns[:number], columns)
        shown.append((problem, turns[number][1]))
    return shown, weightless


def _message(place: str, message: Mapping[str, object]) -> dict[str, str]:
    """The role and the texts of a message, as a chat template takes them. Raises `UserError` for
    what would be lost."""
    kept = {"role": message["role"], "content": cell_text(place, message, "content")}
    for name in UNTRAINABLE:
        if message.get(name):
            remedy = 'leave the row out, or write it in "content"'
            raise UserError(f'{place}: a message has "{name}", which is not trained: {remedy}')
    for name in THOUGHTS:
        if message.get(name):
            kept[name] = cell_text(place, message, name)
            if message["role"] != "assistant":
                role = message["role"]
                fault = f'a message of the {role} has "{name}"'
                raise UserError(f"{place}: {fault}: only the assistant thinks")
    return kept


def _is_trained(place: str, message: Mapping[str, object]) -> bool:
    """Whether a message of the assistant is trained: by its "weight", 0 or 1, where it has one."""
    weight = message.get("weight")
    if weight is None:
        return True
    if isinstance(weight, str) or weight not in (0, 1):
        wanted = "0 (the message is not trained) or 1"
        raise UserError(f'{place}: "weight" must be {wanted}, not {weight!r}')
    return bool(weight)


def _plain_demonstration(place: str, row: Mapping[str, object]) -> Demonstration:
    """A question for the run's template, or a whole prompt, with its response."""
    pairs = 'a "question" or "prompt" and a "response" or "completion"'
    remedy = f'; a demonstration has {pairs}, or "messages"'
    response = cell_text(place, row, "completion" if "completion" in row else "response", remedy)
    if row.get("question"):
        return Problem(place, cell_text(place, row, "question", remedy), "", ""), response
    return Problem(place, "", cell_text(place, row, "prompt", remedy), ""), response
