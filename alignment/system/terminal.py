"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_line(name: str, total: int, console: Console) -> Iterator[Callable[[int, str], None]]:
    """A line with the time left; gives the function that moves it on to a step, with words. Where output is no terminal, a
    plain line is printed each tenth of the way."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=total)

        def advance(step: int, words: str) -> None:
            progress.update(bar, completed=step, description=f"{name}, {words}" if words else name)
            if not console.is_terminal and step * 10 // total > (step - 1) * 10 // total:
                console.print(f"{name}, step {step} of {total}{words and ', '}{words}", markup=False, soft_wrap=True)

        yield advance


def printable(text: str) -> str:
    """Text that is safe to show in a terminal: what is not printable is written out, as \\x1b for an escape."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
