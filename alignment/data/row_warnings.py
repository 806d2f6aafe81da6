r"""Warnings about the user's own data: LaTeX commands that lost their backslash, placeholders for
answers, answers that no response can meet, and questions with several answers. Each kind of finding
is one line on stderr. The rows are used unchanged, since they may be as the user wants them.

In JSON and in Python strings a backslash with a letter may stand for a control character: "\frac"
with one backslash becomes a form feed and "rac". The LaTeX commands are in latex.toml."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from alignment.core.records import Problem
from alignment.data.questions import plain, question_text
from alignment.system.files import read_toml
from alignment.system.terminal import CONTROL_NAMES, printable, say_once

LATEX = read_toml(Path(__file__).with_name("latex.toml"), "latex")
COMMANDS = frozenset(LATEX["commands"].split())
# Commands whose rest, after \n has become a line break, may be a word of its own: "e" of \ne.
AMBIGUOUS = frozenset(LATEX["ambiguous_after_line_break"].split())
# Control character -> the letter that stands for it after a backslash.
LETTER_OF_CONTROL = {
    "\a": "a",
    "\b": "b",
    "\t": "t",
    "\n": "n",
    "\v": "v",
    "\f": "f",
    "\r": "r",
}
CONTROL_AND_WORD = re.compile(r"([\a\b\t\n\v\f\r])([A-Za-z]+)")
TWO_BACKSLASHES_AND_WORD = re.compile(r"(?<!\\)\\\\([A-Za-z]+)")
# What published data has as the ground truth of a question without an answer.
PLACEHOLDERS = frozenset(
    {
        "proof",
        "proof omitted",
        "see proof",
        "to prove",
        "see solution",
        "see explanation",
        "omitted",
        "notfound",
        "not found",
        "n/a",
        "na",
        "nan",
        "null",
        "nil",
        "unknown",
        "not applicable",
        "not available",
        "tbd",
        "todo",
        "?",
        "??",
        "-",
        "--",
        "证明",
        "证明见解析",
        "见解析",
        "略",
    }
)


LONGEST_GRADED = 1000  # characters of an answer; the grader reads no longer one
MOST_WORDS = 25  # of an answer in words; a worked solution has more
_LIST_AS_TEXT = re.compile(
    r"""[\[(]\s*(['"]).*\1\s*,?\s*[\])] | \{\s*(['"]).*:.*\} | (?:array|tensor)\(.*\)""",
    re.DOTALL | re.VERBOSE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\b")  # those that close have been opened
_AROUND_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")


class PlacedText(NamedTuple):
    """A text of the user's data, with its place: the file and line of its row, and its column."""

    place: str
    column: str
    text: str


class MisreadCommand(NamedTuple):
    """A LaTeX command that a text has lost."""

    instead: str  # What the text has in its place, in words: 'a form feed before "rac"'
    command: str  # The command that was probably meant: \frac


def is_placeholder(answer: str) -> bool:
    """Whether a text such as "proof" or "(N/A)" stands where an answer is missing."""
    words = plain(_AROUND_WORDS.sub(r"\1", answer))
    return words in PLACEHOLDERS or words.strip(" .()[]$") in PLACEHOLDERS


def why_unmeetable(answer: str) -> str:
    """Why no response can meet a ground truth; "" where one can, as far as its text shows."""
    if len(answer) > LONGEST_GRADED:
        return f"longer than {LONGEST_GRADED} characters"
    if _LIST_AS_TEXT.fullmatch(answer.strip()):
        return "a list in a program's spelling"
    if _BOX.search(answer):
        return "with a box that never closes"
    if len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", answer)) > MOST_WORDS:
        return f"of more than {MOST_WORDS} words, as a worked solution"
    return ""


def stripped(text: str) -> str:
    r"""A text without the white space around it, except for a character that is the rest of a LaTeX
    command. Of "\frac" with one backslash in JSON, the form feed before "rac" stays."""
    inner = text.strip()
    white_space = text[: text.find(inner)]
    with_control = white_space[-1:] + inner
    match = CONTROL_AND_WORD.match(with_control)
    if match is not None and _is_lost_command(match, with_control):
        return with_control
    return inner


def misread_command(text: str) -> MisreadCommand | None:
    """The first LaTeX command that a text has lost, to a control character or to two backslashes
    instead of one; None if it has lost none."""
    for match in CONTROL_AND_WORD.finditer(text):
        if _is_lost_command(match, text):
            instead = f'a {CONTROL_NAMES[match[1]]} before "{match[2]}"'
            return MisreadCommand(instead, f"\\{LETTER_OF_CONTROL[match[1]]}{match[2]}")
    # In an environment, such as a matrix, two backslashes end a line: \\ cos x is no mistake.
    if r"\begin{" in text:
        return None
    for match in TWO_BACKSLASHES_AND_WORD.finditer(text):
        if match[1] in COMMANDS:
            return MisreadCommand(f'two backslashes before "{match[1]}"', f"\\{match[1]}")
    return None


def _is_lost_command(match: re.Match, text: str) -> bool:
    """Whether a control character and the word after it, a match of `CONTROL_AND_WORD` in `text`,
    were written as a LaTeX command."""
    character = match[1]
    command = LETTER_OF_CONTROL[character] + match[2]
    # Nobody writes a bell, backspace, vertical tab or form feed on purpose.
    if character in "\a\b\v\f":
        return True
    # Tabs and line breaks are common, so a known command has to follow.
    if command not in COMMANDS:
        return False
    # The line break and "e" of \ne may as well be a line that begins with "e". Within $...$, which
    # an odd number of $ before it shows, it is the command.
    is_ambiguous = character == "\n" and command in AMBIGUOUS
    in_formula = text.count("$", 0, match.start()) % 2 == 1
    return in_formula or not is_ambiguous


def warn_of_misread_latex(texts: Iterable[PlacedText]) -> None:
    """Warn in one line of texts that have lost a LaTeX command: what the first one has, and the
    number of rows."""
    findings: list[tuple[PlacedText, MisreadCommand]] = []
    for text in texts:
        misread = misread_command(text.text)
        if misread is not None:
            findings.append((text, misread))
    if not findings:
        return
    first, misread = findings[0]
    rows = len({text.place for text, _ in findings})
    meant = rf'where {misread.command} was probably meant; JSON writes that "\{misread.command}"'
    number = "1 row of this kind" if rows == 1 else f"{rows} rows of this kind"
    say_once(f'warning: {first.place}: "{first.column}" has {misread.instead}, {meant}; {number}')


def warn_of_answers(problems: Sequence[Problem]) -> None:
    """Warn of answers that are placeholders, of those that no response can meet, and of questions
    that come with different answers, in a line each."""
    placeholders = [problem for problem in problems if is_placeholder(problem.ground_truth)]
    if placeholders:
        counts = Counter(problem.ground_truth for problem in placeholders)
        kinds = ", ".join(f"{answer} {number}" for answer, number in counts.most_common(5))
        if len(counts) > 5:
            kinds += ", ..."
        say_once(
            f"warning: {len(placeholders)} of {len(problems)} answers say that there is none"
            f" ({printable(kinds)}), the first at {placeholders[0].id}: a response that says so is"
            " paid; leave these rows out"
        )
    unmeetable = [problem for problem in problems if why_unmeetable(problem.ground_truth)]
    if unmeetable:
        reasons = Counter(why_unmeetable(problem.ground_truth) for problem in unmeetable)
        kinds = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
        say_once(
            f"warning: {len(unmeetable)} of {len(problems)} answers can be met by no response"
            f" ({kinds}), the first at {unmeetable[0].id}: write the values alone, 3, 5, or name"
            " --answer_pattern"
        )
    conflicts = conflicting(problems)
    if conflicts:
        first_conflict = next(iter(conflicts.values()))
        examples = " and ".join(
            f"{problem.id} ({printable(problem.ground_truth)})" for problem in first_conflict
        )
        number = len(conflicts)
        questions = "1 question comes" if number == 1 else f"{number} questions come"
        say_once(
            f"warning: {questions} with different answers, as in {examples}: each row is graded by"
            " its own"
        )


def conflicting(problems: Iterable[Problem]) -> Mapping[str, tuple[Problem, Problem]]:
    """The questions that come with different answers: question -> its first problem, and the first
    problem with another answer."""
    first_problems: dict[str, Problem] = {}
    conflicts: dict[str, tuple[Problem, Problem]] = {}
    for problem in problems:
        question = question_text(problem)
        first = first_problems.setdefault(question, problem)
        if question not in conflicts and plain(first.ground_truth) != plain(problem.ground_truth):
            conflicts[question] = first, problem
    return conflicts
