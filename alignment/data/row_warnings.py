"""What looks wrong in the user's own rows but may be meant: it is said in one line on stderr, and
the rows are taken as they are.

The words of LaTeX are in latex.toml."""

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
AMBIGUOUS = frozenset(LATEX["ambiguous_after_line_break"].split())
# What a backslash and a letter are in JSON, or in a Python string: character -> letter.
ESCAPES = {"\a": "a", "\b": "b", "\t": "t", "\n": "n", "\v": "v", "\f": "f", "\r": "r"}
ESCAPED_WORD = re.compile(r"([\a\b\t\n\v\f\r])([A-Za-z]+)")
DOUBLED = re.compile(r"(?<!\\)\\\\([A-Za-z]+)")
# Ground truths of published data that say that there is no answer to compare with.
PLACEHOLDERS = frozenset(
    {"proof", "see solution", "notfound", "not found", "n/a", "na", "nan", "null", "nil", "unknown"}
)


class PlacedText(NamedTuple):
    """A text of a row, and where it is."""

    place: str
    column: str
    text: str


class MisreadCommand(NamedTuple):
    """What a text has instead of a LaTeX command, in words, and that command."""

    instead: str
    command: str


def is_placeholder(answer: str) -> bool:
    """Whether an answer says that there is none, such as "proof"."""
    return plain(answer) in PLACEHOLDERS


def stripped(text: str) -> str:
    """A text without the white space around it, but with a control character that stands before it
    for a backslash and a letter: a form feed before "rac" shows that the author's command was
    lost."""
    inner = text.strip()
    first = text[: text.find(inner)][-1:] + inner
    return first if _lost_backslash(ESCAPED_WORD.match(first), first) else inner


def misread_command(text: str) -> MisreadCommand | None:
    r"""What a text has instead of a LaTeX command: of "\frac" with one backslash in JSON, a form
    feed before "rac". None where it has nothing of the kind."""
    for match in ESCAPED_WORD.finditer(text):
        if _lost_backslash(match, text):
            instead = f'a {CONTROL_NAMES[match[1]]} before "{match[2]}"'
            return MisreadCommand(instead, f"\\{ESCAPES[match[1]]}{match[2]}")
    if r"\begin{" in text:  # where two backslashes end a line
        return None
    for match in DOUBLED.finditer(text):
        if match[1] in COMMANDS:
            return MisreadCommand(f'two backslashes before "{match[1]}"', f"\\{match[1]}")
    return None


def _lost_backslash(match: re.Match | None, text: str) -> bool:
    """Whether a control character and a word, `match` in `text`, were meant as a command. Tabs and
    line breaks are so only before the rest of a known command, and before what may be a word of its
    own only in a formula, after an odd number of $."""
    if match is None:
        return False
    character = match[1]
    word = ESCAPES[character] + match[2]
    if character in "\a\b\v\f":  # nobody writes these
        return True
    if word not in COMMANDS:
        return False
    is_ambiguous = character == "\n" and word in AMBIGUOUS
    in_formula = text.count("$", 0, match.start()) % 2 == 1
    return in_formula or not is_ambiguous


def warn_of_misread_latex(texts: Iterable[PlacedText]) -> None:
    """Say at how many places text was likely another one for its author, and what at the first."""
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
    """Say how many answers say that there is none, and how many questions come with different
    answers."""
    placeholders = [problem for problem in problems if is_placeholder(problem.ground_truth)]
    if placeholders:
        counts = Counter(problem.ground_truth for problem in placeholders)
        counted = [f"{answer} {number}" for answer, number in counts.most_common()]
        kinds = printable(", ".join(counted))
        share = f"{len(placeholders)} of {len(problems)} answers"
        paid = f"the first at {placeholders[0].id}: a response that says so is paid"
        say_once(f"warning: {share} say that there is none ({kinds}), {paid}; leave these rows out")
    conflicts = conflicting(problems)
    if conflicts:
        examples = next(iter(conflicts.values()))
        answers = " and ".join(f"{row.id} ({printable(row.ground_truth)})" for row in examples)
        number = len(conflicts)
        questions = "1 question comes" if number == 1 else f"{number} questions come"
        graded = "each row is graded by its own"
        say_once(f"warning: {questions} with different answers, as in {answers}: {graded}")


def conflicting(problems: Iterable[Problem]) -> Mapping[str, tuple[Problem, Problem]]:
    """Of each question with different answers, the first problem and the first that has another
    answer."""
    first: dict[str, Problem] = {}
    conflicts: dict[str, tuple[Problem, Problem]] = {}
    for problem in problems:
        key = question_text(problem)
        known = first.setdefault(key, problem)
        if key not in conflicts and plain(known.ground_truth) != plain(problem.ground_truth):
            conflicts[key] = known, problem
    return conflicts
