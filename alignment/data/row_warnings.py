"""What looks wrong in the user's own rows but may be meant: it is said in one line on stderr, and
the rows are taken as they are.

The words of LaTeX are in latex.toml."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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

Texts = Iterable[tuple[str, str, str]]  # place, column, text


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


def misread_command(text: str) -> tuple[str, str] | None:
    r"""What stands in a text instead of a LaTeX command, in words, and that command: of "\frac"
    with one backslash in JSON, a form feed before "rac", and \frac. None where there is nothing of
    the kind."""
    for match in ESCAPED_WORD.finditer(text):
        if _lost_backslash(match, text):
            command = f"\\{ESCAPES[match[1]]}{match[2]}"
            return f'a {CONTROL_NAMES[match[1]]} before "{match[2]}"', command
    if r"\begin{" in text:  # where two backslashes end a line
        return None
    for match in DOUBLED.finditer(text):
        if match[1] in COMMANDS:
            return f'two backslashes before "{match[1]}"', f"\\{match[1]}"
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
    in_formula = text.count("$", 0, match.start()) % 2 == 1
    return word in COMMANDS and (character != "\n" or word not in AMBIGUOUS or in_formula)


def warn_of_misread_latex(texts: Texts) -> None:
    """Say at how many places text was likely another one for its author, and what at the first."""
    found = []
    for place, column, text in texts:
        misread = misread_command(text)
        if misread:
            found.append((place, column, *misread))
    if not found:
        return
    place, column, instead, command = found[0]
    rows = len({place for place, *_ in found})
    meant = rf'where {command} was probably meant; JSON writes that "\{command}"'
    number = f"{rows} row{'s' * (rows > 1)} of this kind"
    say_once(f'warning: {place}: "{column}" has {instead}, {meant}; {number}')


def warn_of_answers(problems: Sequence[Problem]) -> None:
    """Say how many answers say that there is none, and how many questions come with different
    answers."""
    placeholders = [problem for problem in problems if is_placeholder(problem.ground_truth)]
    if placeholders:
        counts = Counter(problem.ground_truth for problem in placeholders)
        each = (f"{answer} {number}" for answer, number in counts.most_common())
        kinds = printable(", ".join(each))
        share = f"{len(placeholders)} of {len(problems)} answers"
        paid = f"the first at {placeholders[0].id}: a response that says so is paid"
        say_once(f"warning: {share} say that there is none ({kinds}), {paid}; leave these rows out")
    conflicts = conflicting(problems)
    if conflicts:
        examples = next(iter(conflicts.values()))
        answers = " and ".join(f"{each.id} ({printable(each.ground_truth)})" for each in examples)
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
