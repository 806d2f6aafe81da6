"""The pages on extending show the files under test, and commands that parse."""

import re
import shlex
from pathlib import Path

import pytest

from alignment.args import EvaluateArgs, RLArgs, SFTArgs, parse
from alignment.builders.checks import check
from alignment.rewards.rules import find_reward

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGES = (
    "extending.md",
    "extending_rewards.md",
    "extending_engines.md",
    "extending_settings.md",
)
PAGE = "\n".join((DOCS / name).read_text() for name in PAGES)
COMMANDS = re.findall(r"^    uv run -m alignment\.(\w+) (.*)$", PAGE, re.MULTILINE)


def test_the_pages_show_the_files_word_for_word():
    shown = dict(
        re.findall(
            r"^`(my_package/\w+\.py)`\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
        )
    )
    assert shown == {
        f"my_package/{path.name}": path.read_text() for path in (HERE / "my_package").glob("*.py")
    }


def test_the_pages_name_tables_and_tests_that_exist():
    for table, file in re.findall(r"`([A-Z]+)` in `(\S+)`", PAGE):
        assert re.search(rf"^{table}\b", (HERE.parents[1] / file).read_text(), re.MULTILINE)
    for name, file in re.findall(r"`([A-Z]\w*[a-z])` in `(\S+)`", PAGE):
        assert f"class {name}" in (HERE.parents[1] / file).read_text()
    named = re.findall(r"`tests/extending/(\w+\.py)`", PAGE)
    assert sorted([*named, Path(__file__).name]) == sorted(
        path.name for path in HERE.glob("test_*.py")
    )


@pytest.mark.parametrize(("command", "flags"), [pair for pair in COMMANDS if pair[0] != "sweep"])
def test_the_commands_of_the_pages_are_accepted(command, flags):
    kind = {"train_rl": RLArgs, "sft": SFTArgs, "evaluate": EvaluateArgs}[command]
    args = parse(kind, shlex.split(flags))
    task = check(args)
    if kind is RLArgs:
        find_reward(args.reward, task.rules)
