"""Progress on a terminal, and off one."""

import io
import re
import subprocess
import sys
import time

from rich.console import Console
from rich.text import Text

from alignment.system import terminal
from alignment.system.terminal import count_parts, counted, progress_line


def test_one_has_no_plural():
    assert [counted(number, "seed") for number in (0, 1, 2)] == ["0 seeds", "1 seed", "2 seeds"]


def test_the_time_left_is_called_so():
    """Four of seven steps of 100 s each are done, so 300 s are left."""
    now = [0.0]
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=100, get_time=lambda: now[0])
    with progress_line("RL", 7, console) as advance:
        for step in (1, 2, 3, 4):
            now[0] += 100.0
            advance(step, "reward 0.50")
    assert re.search(r"RL, reward 0\.50 \S+ 4/7 ETA 05:00", Text.from_ansi(said.getvalue()).plain)


def test_off_a_terminal_a_tenth_or_twenty_seconds_make_a_line():
    """The second and the third step end 20 s later or more, the tenth is a tenth. What is left is
    by the pace since the first step."""
    now, said = [0.0], io.StringIO()
    with progress_line(
        "RL", 100, Console(file=said, get_time=lambda: now[0], width=200)
    ) as advance:
        for step, seconds in (
            (1, 10.0),
            (2, 20.0),
            (3, 80.0),
            (4, 90.0),
            (10, 100.0),
            (11, 101.0),
            (100, 110.0),
        ):
            now[0] = seconds
            advance(step, "reward 0.5" if step < 100 else "")
    assert said.getvalue().splitlines() == [
        "RL, step 2 of 100, reward 0.5, ETA 16:20",  # 98 steps of 10 s
        "RL, step 3 of 100, reward 0.5, ETA 56:35",  # 97 steps of 70 / 2 s
        "RL, step 10 of 100, reward 0.5, ETA 15:00",  # 90 steps of 90 / 9 s
        "RL, step 100 of 100",
    ]


def test_parts_are_counted_as_they_end():
    said = io.StringIO()
    with count_parts("grading [x] :three:", 20, Console(file=said, emoji=False), "answer") as ended:
        for number in range(5):
            ended(number, "text")
    lines = [line.partition(", ETA")[0] for line in said.getvalue().splitlines()]
    assert lines == [f"grading [x] :three:, answer {n} of 20" for n in (0, 2, 4)]


def test_a_batch_whose_parts_end_together_is_not_silent_meanwhile(monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.05)
    said = io.StringIO()
    with count_parts("sampling", 2, Console(file=said), "response") as ended:
        while said.getvalue().count("\n") < 3:
            time.sleep(0.01)
        ended()
        ended()
    lines = said.getvalue().splitlines()
    assert lines[:3] == [
        "sampling, response 0 of 2",
        *["sampling, no response has ended in 0:00"] * 2,
    ]
    assert lines[-1] == "sampling, response 2 of 2"


def test_lines_of_a_pipe_come_as_they_are_printed():
    """The command prints a line and waits: it has arrived though the command goes on."""
    script = """if True:
        import sys
        from alignment.system.errors import run_command
        run_command(lambda: (print("begun"), sys.stdin.read()))
    """
    line = [sys.executable, "-c", script]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        assert process.poll() is None
        process.stdin.close()
