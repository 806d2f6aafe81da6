"""What a run says before a tensor library is loaded."""

import io
import sys

import pytest
from rich.console import Console

from alignment.args import RLArgs
from alignment.builders.announcements import announce_run
from alignment.system.registry import place_of

CODE = """from alignment.core.losses import Loss

def clipped(inputs):
    return -inputs.advantages * inputs.log_probs, {}

entry = Loss(clipped)

def advantages(inputs, state):
    return inputs.rewards, state

class Reward:
    def __call__(self, response, ground_truth):
        return 1.0

reward = Reward()
"""


@pytest.fixture
def said(tmp_path, monkeypatch):
    """A function that returns the lines that a run of these arguments begins with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "announced_code.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "announced_code", raising=False)

    def announced(has_checkpoint: bool = False, **arguments) -> list[str]:
        console = Console(file=io.StringIO(), width=80)
        announce_run(RLArgs(**arguments), has_checkpoint, console)
        return console.file.getvalue().splitlines()

    return announced


def test_a_run_says_what_it_starts_from(said, tmp_path):
    assert said(sft_base="", model="[some]/model") == ["starting from [some]/model"]
    assert said(sft_base="made", model="tiny") == [
        "made is not there yet: warming up tiny by SFT, once"
    ]
    (tmp_path / "made").mkdir()
    assert said(sft_base="made") == ["starting from made"]
    assert said(has_checkpoint=True, sft_base="made") == []


@pytest.mark.parametrize("loss", ["clipped", "entry"])
def test_a_run_says_which_functions_of_which_files_are_the_users_own(loss, said, tmp_path):
    """A function, an entry that holds one, and an object that is called."""
    file = tmp_path / "announced_code.py"
    lines = said(
        has_checkpoint=True,
        sft_base="",
        loss_type=f"announced_code:{loss}",
        advantage="announced_code:advantages",
        reward="format:0.5,announced_code:reward:2",
    )
    assert lines == [
        f"--loss_type announced_code:{loss}: clipped of {file}:3",
        f"--advantage announced_code:advantages: advantages of {file}:8",
        f"--reward announced_code:reward: Reward of {file}",
    ]


def test_nothing_is_said_of_the_projects_own_functions(said):
    assert said(has_checkpoint=True, loss_type="grpo_clip", reward="format:0.5,accuracy") == []


def test_a_function_of_c_has_no_line():
    assert place_of(len) == "builtins"
