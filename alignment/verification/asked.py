"""Is what is asked the rows of the user's file, in the words of the prompt's template, and what the
flags leave of them?"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.core.records import Problem
from alignment.verification.check import Check
from alignment.verification.sampling import wanted_prompt_ids
from alignment.verification.splits import question_of, words_of

QUESTION = "{question}"
NO_STRING = ("none",)  # --stop of no string
OF_A_FILE = "file:"
ASKED = "qwzx"  # a question that no chat template has in itself


@dataclass(frozen=True)
class AskedQuestions:
    """The problems of a run, as its own parts give them, and the flags that they follow."""

    trained: Sequence[Problem]
    """Of endless ones the first."""
    evaluated: Sequence[Problem]
    rows: Sequence[Problem]
    """Both splits, as the task reads them."""
    template: str
    """The name of the prompt's template."""
    templates: Path
    """The folder with the templates that ship, NAME.prompt of plain text."""
    stop: Sequence[str]
    """The strings that end a response."""
    examples: Sequence[tuple[str, str]]
    tokenizer: Any
    flags: Mapping[str, Any]

    def checks(self) -> Iterator[Check]:
        """Every check of what is asked."""
        yield Check("prompts: other texts than the template's", 0.0, self.other_prompts)
        yield Check("data: problems that flags leave out", 0.0, self.faults_of_flags)
        reason = ""
        if not self._cells():
            reason = (
                "--task and --test_split name no files of JSON lines with text in their columns"
            )
        what = "data: rows of the file that are read wrongly"
        yield Check(what, 0.0, self.misread_rows, not_checked=reason)

    def other_prompts(self) -> int:
        """How many prompts are not the template with the question in its place, or, of a chat,
        have not the question, the system's turn and the beginning of an answer as the chat template
        writes them. Problems without a question have prompts of their own."""
        problems = [problem for problem in (*self.trained, *self.evaluated) if problem.question]
        text = self._template_text()
        if text is None:
            return sum(not self._is_chat_prompt(problem) for problem in problems)
        wrong = 0
        for problem in problems:
            filled = text.replace(QUESTION, problem.question)
            is_right = problem.prompt == filled
            if self.examples:
                is_right = problem.prompt.endswith(filled) and self._shows_examples(problem.prompt)
            wrong += not is_right
        return wrong

    def _template_text(self) -> str | None:
        """The text of a plain template; None of a chat."""
        file = self.templates / f"{self.template}.prompt"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        own = Path(self.template)
        if self.template and own.suffix != ".chat" and own.is_file():
            return own.read_text(encoding="utf-8").removesuffix("\n")
        return None

    def _shows_examples(self, prompt: str) -> bool:
        """Whether a prompt has every worked example: its question, and the end of its response."""
        shown = words_of(prompt)
        for question, response in self.examples:
            ending = words_of(response)[-20:]
            if words_of(question) not in shown or ending not in shown:
                return False
        return True

    def _is_chat_prompt(self, problem: Problem) -> bool:
        """Whether a prompt has its question, the system's turn and the examples, and ends as the
        chat template begins an answer, or a beginning of the template's own after that."""
        prompt = problem.prompt
        if problem.question not in prompt or not self._shows_examples(prompt):
            return False
        system = self.flags["system_prompt"]
        if system and not Path(system).suffix and words_of(system) not in words_of(prompt):
            return False
        turns = [{"role": "user", "content": ASKED}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text.rpartition(ASKED)[2] in prompt.rpartition(problem.question)[2]

    def faults_of_flags(self) -> list[str]:
        """The flags that the problems, or the strings that end responses, do not follow."""
        flags = self.flags
        faults = []
        most = flags["num_problems"]
        if most and len(set(map(question_of, self.trained))) > most:
            faults.append("num_problems")
        longest = flags["max_prompt_tokens"]
        if longest:
            prompts = {problem.prompt for problem in (*self.trained, *self.evaluated)}
            if any(self._length(prompt) > longest for prompt in prompts):
                faults.append("max_prompt_tokens")
        if flags["pass_rates"] and not self._are_in_band():
            faults.append("pass_rate_band")
        wanted = tuple(flags["stop"] or ())
        if wanted and tuple(self.stop) != (() if wanted == NO_STRING else wanted):
            faults.append("stop")
        return faults

    def _length(self, prompt: str) -> int:
        """The number of a prompt's tokens, or, where nothing is known of its own, of those that the
        tokenizer makes of it."""
        ids = wanted_prompt_ids(prompt, self.tokenizer)
        return len(self.tokenizer(prompt)["input_ids"] if ids is None else ids)

    def _are_in_band(self) -> bool:
        """Whether the share of right samples, in the file of pass rates, of each trained question
        is within the band."""
        samples: Counter[str] = Counter()
        right: Counter[str] = Counter()
        for row in read_json_lines(Path(self.flags["pass_rates"])):
            samples[words_of(str(row["question"]))] += row["samples"]
            right[words_of(str(row["question"]))] += row["correct"]
        low, high = map(float, self.flags["pass_rate_band"].split("-"))
        for problem in self.trained:
            question = question_of(problem)
            if not samples[question] or not low <= right[question] / samples[question] <= high:
                return False
        return True

    def _files(self) -> list[Path]:
        """The user's files of rows, of both splits; none where one has no JSON lines."""
        name = self.flags["task"]
        if not name.startswith(OF_A_FILE):
            return []
        names = [name.removeprefix(OF_A_FILE)]
        if self.flags["test_split"]:
            names.append(self.flags["test_split"])
        return [Path(name) for name in names] if all(map(is_json_lines, names)) else []

    def _cells(self) -> list[tuple[str, str]]:
        """The question and the answer of each row of the user's files; none where a row has them
        elsewhere than as text or numbers in the columns that flags name."""
        rows: list[Any] = []
        for file in self._files():
            rows += read_json_lines(file)
        cells: list[tuple[str, str]] = []
        for row in rows:
            question = row.get(self.flags["question_column"])
            answer = row.get(self.flags["answer_column"])
            if not isinstance(question, str) or not isinstance(answer, str | int):
                return []
            cells.append((words_of(question), str(answer)))
        return cells

    def misread_rows(self) -> int:
        """How many problems are no row of the file, by the whole question and by an answer that
        ends with the truth, or with --answer_pattern has it; and how many rows' questions no
        problem asks."""
        cells = self._cells()
        wrong = 0
        for problem in self.rows:
            question = words_of(problem.question)
            truth = problem.ground_truth
            answers = [answer for asked, answer in cells if asked == question]
            if self.flags["answer_pattern"]:
                wrong += not any(truth in answer for answer in answers)
            else:
                wrong += not any(gives(answer, truth) for answer in answers)
        asked = {words_of(problem.question) for problem in self.rows}
        return wrong + sum(question not in asked for question, _ in cells)


def is_json_lines(name: str) -> bool:
    """Whether a file's name is that of JSON lines."""
    return name.endswith(".jsonl")


def gives(answer: str, truth: str) -> bool:
    """Whether an answer's cell is the truth, gives it in the first line behind its last "####", or
    has it in its last box, or in its last boxes with commas between them."""
    behind = answer.rpartition("####")[2].strip().split("\n")[0]
    if words_of(truth) in (words_of(answer), words_of(behind)):
        return True
    boxes = contents_of_boxes(answer)
    joined = {without_space(",".join(dict.fromkeys(boxes[i:]))) for i in range(len(boxes))}
    return without_space(truth) in joined


def without_space(text: str) -> str:
    return "".join(text.split())


def contents_of_boxes(text: str) -> list[str]:
    r"""What stands in each \boxed{...}, \fbox{...} or \boxed ... of a text, in order. A box within
    another one is a part of it."""
    contents: list[str] = []
    pieces = text.replace(r"\fbox", r"\boxed").split(r"\boxed")
    depth = 0
    for piece in pieces[1:]:
        if depth:
            contents[-1] += r"\boxed"
        else:
            piece = piece.lstrip()
            contents.append("")
        if not depth and not piece.startswith("{"):
            contents[-1] = re.split(r"[\s{}$\\.,]", piece, maxsplit=1)[0]
            continue
        for character in re.findall(r"\\.|.", piece, re.DOTALL):
            depth += {"{": 1, "}": -1}.get(character, 0)
            is_outer_brace = depth == 1 and character == "{" and not contents[-1]
            if not depth:
                break
            if not is_outer_brace:
                contents[-1] += character
    return contents


def read_json_lines(file: Path) -> list[Any]:
    """The values of a file of JSON lines, or of the one list that it is. Numbers with a point or an
    exponent are their text."""
    text = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    if text.lstrip().startswith("["):
        return json.loads(text, parse_float=str)
    lines = text.split("\n")
    return [json.loads(line, parse_float=str) for line in lines if line.strip()]
