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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from alignment.core.records import Problem
from alignment.data.answer_cells import (
    IN_BOX,
    WHOLE_CELL,
    cell_at,
    final_answer,
    is_messages,
    joined_parts,
    opened_json,
    present_column,
    read_turns,
)
from alignment.data.prompts import fill_prompt
from alignment.data.questions import Key, question_text, split_of
from alignment.data.row_warnings import (
    PlacedText,
    stripped,
    warn_of_answers,
    warn_of_misread_latex,
)
from alignment.data.rows import Row, Rows, cell_text, hub_splits, numbered, read_rows
from alignment.system.errors import UserError
from alignment.system.terminal import printable, say_once

ANNOTATION = re.compile(r"<<[^<>]*>>")  # of GSM8K's calculator
# one question in 20 belongs to the test split of demonstrations, for the validation loss
VALIDATION_SHARE = 20
# a problem and a response to it; a problem without a question has its prompt already
Demonstration = tuple[Problem, str]
# Columns of demonstrations that may hold messages.
COLUMNS_OF_MESSAGES = ("messages", "prompt", "completion")
# Keys under which messages hold what comes before their "content".
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
UNTRAINABLE = ("tool_calls", "function_call")
# All keys of messages that are read.
MESSAGE_KEYS = ("role", "content", "weight", *THOUGHTS, *UNTRAINABLE)
# Keys of rows that say something of what is to be trained, if they stand in messages.
MISPLACED = ("weight", *THOUGHTS)


@dataclass(frozen=True)
class DataConfig:
    """The columns and splits of the user's own rows. The fields are those of the flags of the same
    names."""

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


@dataclass(frozen=True)
class _SplitRows:
    """The rows of a training split, and of a test split where there is one."""

    train: Rows
    test: Rows | None


def forget_rows() -> None:
    """Read files and data sets anew when they are asked for next: they may have changed."""
    _pairs.cache_clear()


@lru_cache(maxsize=2)
def _pairs(name: str, data: DataConfig) -> Mapping[str, list[Demonstration]]:
    """The pairs of each split. Without test rows, a hash of the question decides."""
    kind, _, source = name.partition(":")
    if kind == "hf":
        rows = _rows_of_data_set(name, source, data.test_split)
    else:
        train_rows = read_rows(Path(source), flag=f"--task {name}")
        test_rows = None
        if data.test_split:
            flag = f"--test_split {data.test_split}"
            test_rows = read_rows(Path(data.test_split), flag=flag)
        rows = _SplitRows(train_rows, test_rows)
    pairs = worked_problems(rows.train, data)
    if rows.test is not None:
        return {"train": pairs, "test": worked_problems(rows.test, data)}
    by_split: dict[str, list[Demonstration]] = {"train": [], "test": []}
    for problem, response in pairs:
        by_split[split_of(question_text(problem))].append((problem, response))
    if not all(by_split.values()):
        questions = len({question_text(problem) for problem, _ in pairs})
        number = f"{len(pairs)} rows"
        if questions < len(pairs):
            noun = "question" if questions == 1 else "questions"
            number += f" that ask {questions} {noun}"
        raise UserError(
            f"--task {name}: {number} are too few to hold some out for tests; name others with"
            f" --test_split, or, to evaluate on all of these, --test_split {_whole_split(name)}"
        )
    tested = len({question_text(problem) for problem, _ in by_split["test"]})
    say_once(
        f"--task {name}: {tested} questions of {len(pairs)} rows are held out for tests, by a hash;"
        f" --test_split FILE names others, and in `evaluate` --test_split {_whole_split(name)} all"
    )
    return by_split


def _whole_split(name: str) -> str:
    """The value of --test_split that makes all rows of --task `name` the test problems."""
    kind, _, source = name.partition(":")
    return "train" if kind == "hf" else source


def _rows_of_data_set(name: str, source: str, test_split: str) -> _SplitRows:
    """The rows of a data set of the hub, or of a folder, that --task `name` names. Its split
    "train", or its first one, is for training; `test_split`, or "test", for tests."""
    splits = hub_splits(f"--task {name}", "hf:FOLDER", *source.split(":", maxsplit=1))
    if test_split and test_split not in splits:
        raise UserError(
            f"--test_split {test_split}: --task {name} has the splits {', '.join(splits)}"
        )
    train_split = "train" if "train" in splits else next(iter(splits))
    test_split = test_split or "test"
    test_rows = None
    if test_split in splits:
        test_rows = numbered(f"{source} {test_split}", splits[test_split])
    return _SplitRows(numbered(f"{source} {train_split}", splits[train_split]), test_rows)


def worked_problems(rows: Rows, data: DataConfig) -> list[Demonstration]:
    """Each row's problem, with the response that its worked solution teaches: what stands before
    the answer in its cell, else the column "solution"; "" where there is none.

    Prints what looks wrong in texts and answers. Raises `UserError`, naming the row, where it has
    no question or answer."""
    pattern = _with_group(data.answer_pattern) if data.answer_pattern else None
    rows = list(rows)
    # A problem has the columns of all rows, None where its own row lacks one.
    all_columns = dict.fromkeys(chain.from_iterable(row for _, row in rows))
    pairs = []
    worked = []
    for place, row in rows:
        one = _worked_problem(place, row, data, pattern)
        worked.append(one)
        # dates as text: checkpoints are JSON
        columns = json.loads(json.dumps(all_columns | row, default=str))
        pairs.append((replace(one.problem, columns=columns), one.response))
    _say_sources(worked, data.question_column)
    warn_of_misread_latex(_texts(rows, (data.question_column, data.answer_column, "solution")))
    warn_of_answers([problem for problem, _ in pairs])
    return pairs


class _WorkedProblem(NamedTuple):
    """A row's problem, the response that its worked solution teaches, the column of its question,
    and where its answer was found."""

    problem: Problem
    response: str
    question_column: str
    source: str
    has_system: bool


def _worked_problem(
    place: str, row: Row, data: DataConfig, pattern: re.Pattern | None
) -> _WorkedProblem:
    """One row's problem and response, as `worked_problems`."""
    cells = _read_cells(place, row, data)
    question = stripped(cells.question)
    final = final_answer(stripped(cells.answer), pattern)
    if not final.answer:
        where = r"in its last \boxed{}" if final.source == IN_BOX else "after its last ####"
        if pattern:
            where = f"where --answer_pattern {pattern.pattern} looks"
        raise UserError(f'{place}: "{cells.answer_column}" holds no answer {where}')
    source = final.source
    if cells.answer_column != data.answer_column:
        source = f'{final.source}, "{cells.answer_column}"'
    steps = ANNOTATION.sub("", final.steps or str(row.get("solution") or "")).strip()
    response = f" {steps} </think> <answer> {final.answer} </answer>" if steps else ""
    problem = Problem(place, question, fill_prompt("r1_zero", question), final.answer)
    return _WorkedProblem(problem, response, cells.question_column, source, cells.has_system)


class _Cells(NamedTuple):
    """The texts of a row's question and answer, and their columns."""

    question: str
    answer: str
    question_column: str
    answer_column: str
    has_system: bool


def _read_cells(place: str, row: Row, data: DataConfig) -> _Cells:
    """A row's question and answer, of the columns that `data` names or, in their absence, of verl's
    "prompt" and "reward_model" or of "messages"."""
    remedy = ": name --question_column and --answer_column"
    others_of_question = ("messages", "prompt")
    question_column = present_column(row, data.question_column, "question", others_of_question)
    others = ("reward_model.ground_truth", "messages")
    answer_column = present_column(row, data.answer_column, "answer", others)
    question = cell_at(row, question_column)
    answer = cell_at(row, answer_column)
    if question_column in others_of_question:
        question = opened_json(question)
    if answer_column == "messages":
        answer = opened_json(answer)
    has_system = False
    if is_messages(question):
        turns = read_turns(place, question_column, question)
        question = turns.question
        has_system = turns.has_system
    if is_messages(answer) and answer_column == "messages":
        answer = read_turns(place, answer_column, answer).answer
        if answer == "":
            raise UserError(
                f'{place}: the last turn of "messages" is missing, the assistant\'s, which holds'
                " the answer; or name --answer_column"
            )
    elif isinstance(answer, list) and len(answer) == 1:
        [answer] = answer
    return _Cells(
        cell_text(place, _with_cell(row, question_column, question), question_column, remedy),
        cell_text(place, _with_cell(row, answer_column, answer), answer_column, remedy),
        question_column,
        answer_column,
        has_system,
    )


def _with_cell(row: Row, column: str, value: object) -> Row:
    """The row with what was read of a nested column, or of messages."""
    return row if value is None else {**row, column: value}


def _say_sources(worked: Sequence[_WorkedProblem], question_column: str) -> None:
    """Say in one line from which columns questions come, unless all are of `question_column`; in
    one how many answers come from what, unless all are whole cells; and that turns of the system
    are not asked."""
    columns = Counter(one.question_column for one in worked)
    if set(columns) - {question_column}:
        named = [f'column "{column}"' for column in columns]
        if len(columns) > 1:
            named = [f'{number} of column "{column}"' for column, number in columns.items()]
        say_once(f"questions: {', '.join(named)}")
    firsts = {one.source: one.problem for one in reversed(worked)}
    if set(firsts) - {"", WHOLE_CELL}:
        counts = Counter(one.source for one in worked)
        parts = []
        for source, number in counts.most_common():
            example = f" (first {firsts[source].id})"
            if source == WHOLE_CELL:
                answer = printable(firsts[source].ground_truth[:60], line_breaks=False)
                example = f' without a mark (first {firsts[source].id}: "{answer}")'
            parts.append(f"{number} {source}{example}")
        say_once(f"answers: {', '.join(parts)}")
    spoken = [one.problem.id for one in worked if one.has_system]
    if spoken:
        say_once(
            f"{spoken[0]}: has a turn of the system, as {len(spoken)} of {len(worked)} rows: it is"
            " not asked; give --system_prompt"
        )


def _texts(rows: Rows, columns: Sequence[str]) -> Iterator[PlacedText]:
    """The rows' cells of text in some columns."""
    for place, row in rows:
        for column in columns:
            text = row.get(column)
            if isinstance(text, str):
                yield PlacedText(place, column, text)


def _with_group(pattern: str) -> re.Pattern:
    """The compiled pattern. Raises `UserError` where it is none, or has no group."""
    with suppress(re.error):
        compiled = re.compile(pattern)
        if compiled.groups:
            return compiled
    raise UserError(
        f"--answer_pattern {pattern}: must be a regular expression with a group, the answer, such"
        " as '#### (.*)'"
    )


def of_split(
    rows: Sequence[Demonstration], split: str, seed: int, key: Key = question_text
) -> list[Demonstration]:
    """The demonstrations of a split, shuffled by `seed`.

    No question, as `key` tells them apart, is in both splits, unless there is only one. Raises
    `UserError` where there are fewer than two demonstrations."""
    if len(rows) < 2:
        raise UserError(
            f"{len(rows)} rows are too few to train on: SFT needs --demonstrations, or rows with"
            " worked solutions"
        )
    shuffled = list(rows)
    random.Random(f"demonstrations {seed}").shuffle(shuffled)

    def question_key(problem: Problem) -> str:
        # all turns of a conversation are in one split
        return problem.id if problem.turns else key(problem)

    keys = [question_key(problem) for problem, _ in shuffled]
    questions = list(dict.fromkeys(keys))
    if len(questions) == 1:
        return shuffled
    test_keys = set(questions[: max(1, len(questions) // VALIDATION_SHARE)])
    wants_test = split == "test"
    rows_of_split = []
    for row, row_key in zip(shuffled, keys, strict=True):
        is_test = row_key in test_keys
        if is_test == wants_test:
            rows_of_split.append(row)
    return rows_of_split


def read_demonstrations(*files: str) -> list[Demonstration]:
    """The demonstrations of the files.

    Prints what looks wrong in texts, and how many messages of weight 0 are left out. Raises
    `UserError`, naming file and line, for a malformed row."""
    demonstrations: list[Demonstration] = []
    for file in files:
        rows = [(place, _with_opened_messages(place, row)) for place, row in read_rows(Path(file))]
        weightless = 0
        for place, row in rows:
            row_demonstrations = _demonstrations(place, row)
            demonstrations += row_demonstrations.demonstrations
            weightless += row_demonstrations.weightless
        _warn_of_keys(file, [row for _, row in rows])
        if weightless:
            messages = "1 message" if weightless == 1 else f"{weightless} messages"
            say_once(f"{file}: {messages} of weight 0: context only, not trained")
        texts = (_demonstrated_texts(place, row) for place, row in rows)
        warn_of_misread_latex(chain.from_iterable(texts))
    return demonstrations


def read_examples(file: str) -> list[tuple[str, str]]:
    """The (question, response) pairs of --few_shot; none for "". Raises `UserError` where the file
    has none, or one has no question."""
    if not file:
        return []
    examples = read_demonstrations(file)
    have_questions = all(problem.question and not problem.turns for problem, _ in examples)
    if not examples or not have_questions:
        raise UserError(
            f'--few_shot {file}: every example needs a "question" and a "response", and there must'
            " be one"
        )
    return [(problem.question, response) for problem, response in examples]


def _with_opened_messages(place: str, row: Row) -> Row:
    """The row with messages that are JSON text as lists, and the contents of messages that are
    parts of text as texts. Raises `UserError`, naming the place, for other parts."""
    opened = dict(row)
    for column in COLUMNS_OF_MESSAGES:
        messages = opened_json(row.get(column))
        if is_messages(messages):
            opened[column] = [_with_joined_parts(place, message) for message in messages]
    return opened


def _with_joined_parts(place: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": joined_parts(place, message["content"])}


def _messages(row: Row) -> Iterator[Row]:
    """The messages in a row, of all the columns that may hold some."""
    for column in COLUMNS_OF_MESSAGES:
        messages = row.get(column)
        if isinstance(messages, list):
            yield from (message for message in messages if isinstance(message, dict))


def _warn_of_keys(file: str, rows: Sequence[Row]) -> None:
    """Say which keys of messages are not read, as one may mean what is trained; and which of rows
    would be read in a message."""
    unread: set[str] = set()
    for row in rows:
        for message in _messages(row):
            unread |= set(message) - set(MESSAGE_KEYS)
    if unread:
        names = ", ".join(f'"{name}"' for name in sorted(unread))
        say_once(f"{file}: messages have {names}: not read, and no message is left out for it")
    misplaced = [name for name in MISPLACED if _has_column(rows, name)]
    if misplaced:
        names = ", ".join(f'"{name}"' for name in misplaced)
        remedy = "the response is trained as it stands; messages can have thoughts and weights"
        say_once(f"{file}: rows have {names}: not read, {remedy}")


def _has_column(rows: Sequence[Row], name: str) -> bool:
    """Whether a row has a cell of that name that is not empty."""
    return any(row.get(name) is not None for row in rows)


def _demonstrated_texts(place: str, row: Row) -> Iterator[PlacedText]:
    """The texts of a row, and those of its messages."""
    yield from _texts([(place, row)], ("question", "prompt", "response", "completion"))
    for message in _messages(row):
        yield from _texts([(place, message)], ("content", *THOUGHTS))


class _RowsDemonstrations(NamedTuple):
    """The demonstrations of a row, and the number of its messages of weight 0, which are not
    trained."""

    demonstrations: list[Demonstration]
    weightless: int


def _demonstrations(place: str, row: Row) -> _RowsDemonstrations:
    """A row's demonstration; of a conversation one for each turn of the assistant after those that
    are a "prompt"."""
    if "messages" in row:
        prompt = []
        completion = row["messages"]
    else:
        prompt = row.get("prompt")
        completion = row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list) and completion:
        return _conversation(place, prompt + completion, len(prompt))
    return _RowsDemonstrations([_plain_demonstration(place, row)], 0)


def _conversation(place: str, messages: Sequence[Any], prompt_messages: int) -> _RowsDemonstrations:
    """The demonstrations of messages, of which the first `prompt_messages` are the prompt.

    One question and its answer go into the run's template, like a row of these; unless the answer
    has thoughts, which only the tokenizer's chat template can place. Problems have the `messages`
    as their columns."""
    roles = []
    for message in messages:
        # What is no turn is said to have the role "False", which the pattern refuses.
        roles.append(str(isinstance(message, dict) and message.get("role")))
    if not re.fullmatch("(system,)?(user,assistant,)+", "".join(f"{role}," for role in roles)):
        wanted = "turns must be of user and assistant in turn, after one of system or none"
        remedy = ""
        if roles[-1] == "user":
            remedy = ": the last turn is missing, the assistant's, which would be trained"
        raise UserError(f"{place}: {wanted}, not {roles}{remedy}")
    checked = [_checked_message(place, message) for message in messages]
    later = range(prompt_messages, len(messages))
    answers = [number for number in later if roles[number] == "assistant"]
    trained = [number for number in answers if _is_trained(place, messages[number])]
    weightless = len(answers) - len(trained)
    has_thoughts = any(set(message) - {"role", "content"} for message in checked)
    if not prompt_messages and len(checked) == 2 and not has_thoughts:
        row = {"question": checked[0]["content"], "response": checked[1]["content"]}
        return _RowsDemonstrations([_plain_demonstration(place, row) for _ in trained], weightless)
    turns = tuple((message["role"], message["content"]) for message in checked)
    columns: dict[str, object] = {"messages": checked}
    demonstrations = []
    for number in trained:
        question = checked[number - 1]["content"]
        problem = Problem(place, question, "", "", turns[:number], columns)
        demonstrations.append((problem, checked[number]["content"]))
    return _RowsDemonstrations(demonstrations, weightless)


def _checked_message(place: str, message: Row) -> dict[str, str]:
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


def _is_trained(place: str, message: Row) -> bool:
    """Whether a message of the assistant is trained: by its "weight", 0 or 1, where it has one."""
    weight = message.get("weight")
    if weight is None:
        return True
    if isinstance(weight, str) or weight not in (0, 1):
        wanted = "0 (the message is not trained) or 1"
        raise UserError(f'{place}: "weight" must be {wanted}, not {weight!r}')
    return bool(weight)


def _plain_demonstration(place: str, row: Row) -> Demonstration:
    """A question for the run's template, or a whole prompt, with its response."""
    pairs = 'a "question" or "prompt" and a "response" or "completion"'
    remedy = f'; a demonstration has {pairs}, or "messages"'
    response_column = "completion" if "completion" in row else "response"
    response = cell_text(place, row, response_column, remedy)
    if row.get("question"):
        return Problem(place, cell_text(place, row, "question", remedy), "", ""), response
    return Problem(place, "", cell_text(place, row, "prompt", remedy), ""), response
