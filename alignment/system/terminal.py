"""Terminal output: the console of all commands, progress lines, and text that is safe to print."""

import functools
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

LINE_SECONDS = 20.0  # after which another step makes a line, where the output is no terminal


def make_console(quiet: bool = False) -> Console:
    """The console that a command prints to, or that of --quiet, which prints nothing. It leaves
    words between colons, such as :three:, as they are."""
    return Console(emoji=False, quiet=quiet)


def make_program_console() -> Console:
    """The console of a call from a Python program, which prints to the program's stdout. In a
    notebook rich would show each line as a picture of its own, and variables that ask for colours
    everywhere would bring a progress bar's control characters; here both are text, in lines."""
    return Console(emoji=False, force_jupyter=False, force_terminal=sys.stdout.isatty())


def make_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence], numbers: Sequence[str] = ()
) -> Table:
    """A table, whose columns with a heading among `numbers` are aligned to the right."""
    table = Table(title=title)
    for heading in headings:
        justify = "right" if heading in numbers else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_from_the_top(text: str, console: Console) -> None:
    """Print a text. One that is longer than the terminal goes through the pager (PAGER, by default
    less), so that its beginning is what is seen first."""
    pager = shlex.split(os.environ.get("PAGER", "less"))
    is_longer = text.count("\n") >= console.height
    is_watched = sys.stdin.isatty() and sys.stdout.isatty()
    if not (is_watched and is_longer and pager and shutil.which(pager[0])):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return
    # Ctrl-C is the pager's.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        subprocess.run(pager, input=text, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_line(
    name: str, total: int, console: Console, unit: str = "step"
) -> Iterator[Callable[..., None]]:
    """Show a progress bar with the time left. Yields the function that advances it to a step, with
    a short text and, as lines of their own, details. If the output is no terminal, that function
    prints a plain line with the details after every tenth of the steps, and after every
    `LINE_SECONDS`; on a terminal it prints the details of every step above the bar."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(compact=True),
    )
    # rich would estimate the speed from the last 30 seconds alone, in which a long step has no end.
    history_seconds = 3600.0
    progress = Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=history_seconds,
    )
    with progress:
        bar = progress.add_task(name, total=total)
        printed = (0, 0)  # Tenths of the steps, and spans of time, at the last plain line.

        def advance(step: int, text: str, details: Sequence[str] = ()) -> None:
            nonlocal printed
            description = f"{name}, {text}" if text else name
            progress.update(bar, completed=step, description=description)
            task = progress.tasks[bar]
            tenths = step * 10 // max(1, step, total)
            spans = int((task.elapsed or 0.0) // LINE_SECONDS)
            if console.is_terminal:
                if details:
                    console.print(f"{unit} {step}, {text}", *details, sep="\n", markup=False)
                return
            if (tenths, spans) == printed:
                return
            printed = (tenths, spans)
            line = f"{name}, {unit} {step} of {total}"
            if text:
                line += f", {text}"
            if task.time_remaining:
                line += f", ETA {short_time(task.time_remaining)}"
            console.print(line, *details, sep="\n", markup=False, soft_wrap=True)

        yield advance


def counted(number: int, noun: str) -> str:
    """A number and its noun, with an s but for one: "1 seed", "3 seeds"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def short_time(seconds: float) -> str:
    """A time as hours, minutes and seconds, without hours where these are 0: 4:05, 1:04:05."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")


@contextmanager
def count_parts(
    name: str, total: int, console: Console, unit: str
) -> Iterator[Callable[..., None]]:
    """As `progress_line`, but yields a function to be called whenever another part is done, with
    whatever arguments. If the output is no terminal, a line says at once what begins, and one every
    `LINE_SECONDS` that no part has ended yet: parts of a batch may end together, after minutes."""
    if not console.is_terminal:
        _print_line(f"{name}, {unit} 0 of {total}", console)
    with progress_line(name, total, console, unit) as advance, _waiting(name, unit, console) as end:
        done = itertools.count(1)

        def count(*_) -> None:
            end()
            advance(next(done), "")

        yield count


@contextmanager
def _waiting(name: str, unit: str, console: Console) -> Iterator[Callable[[], None]]:
    """Print a line every `LINE_SECONDS`, off a terminal, until the function that is yielded is
    called or the block ends."""
    first_has_ended = threading.Event()

    def wait() -> None:
        started = time.monotonic()
        while not first_has_ended.wait(LINE_SECONDS):
            seconds = short_time(time.monotonic() - started)
            _print_line(f"{name}, no {unit} has ended in {seconds}", console)

    thread = threading.Thread(target=wait, daemon=True)
    if not console.is_terminal:
        thread.start()
    try:
        yield first_has_ended.set
    finally:
        first_has_ended.set()
        if thread.ident is not None:
            thread.join()


def _print_line(line: str, console: Console) -> None:
    console.print(line, markup=False, soft_wrap=True)


@functools.cache
def say_once(text: str) -> None:
    """Print a line to stderr, once a process."""
    print(text, file=sys.stderr, flush=True)


CONTROL_NAMES = {
    "\a": "bell",
    "\b": "backspace",
    "\t": "tab",
    "\n": "line break",
    "\v": "vertical tab",
    "\f": "form feed",
    "\r": "carriage return",
}


def printable(text: str, line_breaks: bool = True) -> str:
    """The text, safe for a terminal. A control character is written out as what it is, a tab as
    <tab> and an escape as \\x1b, so that none looks like a backslash and a letter. Line breaks
    stay, unless without `line_breaks`."""
    return "".join(_printable_character(character, line_breaks) for character in text)


def _printable_character(character: str, line_breaks: bool) -> str:
    if character.isprintable():
        return character
    if character == "\n" and line_breaks:
        return character
    if character in CONTROL_NAMES and character != "\a":
        return f"<{CONTROL_NAMES[character]}>"
    return repr(character)[1:-1]
