"""Progress on a terminal."""

import io
import re

from rich.console import Console
from rich.text import Text

from alignment.system.terminal import progress_line


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
