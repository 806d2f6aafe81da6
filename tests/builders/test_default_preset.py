"""What a run says of the default preset's numbers, which are for a tiny model."""

import json
import sys

import pytest

from alignment.args import RLArgs, SFTArgs
from alignment.builders.checks import say_numbers_of_tiny


@pytest.fixture
def wide(tmp_path) -> str:
    """The folder of a model that is wider than the tiny one."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 576}))
    return str(tmp_path)


def test_a_larger_model_with_its_numbers_is_told(wide, capsys):
    say_numbers_of_tiny(RLArgs(model=wide), wide)
    assert capsys.readouterr().err == (
        f"--model {wide}: --learning_rate 0.0002 and --max_new_tokens 48 are of --preset tiny, the"
        " default, which is for a tiny model; name them, or another preset (`presets` lists all)\n"
    )
    say_numbers_of_tiny(RLArgs(sft_base=wide, learning_rate=1e-6), wide)
    assert capsys.readouterr().err == (
        f"--sft_base {wide}: --max_new_tokens 48 is of --preset tiny, the default, which is for a"
        " tiny model; name it, or another preset (`presets` lists all)\n"
    )


@pytest.mark.parametrize("words", [["--max_new_tokens", "48"], ["--max-new-tokens=48"]])
def test_a_named_number_is_the_users_though_it_is_the_presets(words, wide, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_rl", "--model", wide, *words])
    say_numbers_of_tiny(RLArgs(model=wide), wide)
    assert f"--model {wide}: --learning_rate 0.0002 is of" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_numbers(wide, capsys):
    say_numbers_of_tiny(RLArgs(model=wide, resume=True), wide)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "args",
    [
        RLArgs(),
        RLArgs(model="tiny_student"),
        RLArgs(model="smollm2", learning_rate=1e-6, max_new_tokens=256),
        SFTArgs(model="smollm2", preset="smollm2_svamp"),
    ],
)
def test_nothing_is_said_of_others(args, capsys):
    say_numbers_of_tiny(args, args.model)
    assert capsys.readouterr().err == ""
