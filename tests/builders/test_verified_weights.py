"""The weights that `verify` judges where the warm start is not there yet."""

from pathlib import Path

import pytest

from alignment.args import VerifyArgs
from alignment.builders.verified_weights import judged_weights
from alignment.config.presets import from_preset
from alignment.system.errors import UserError
from alignment.system.terminal import make_console

PRESET = """
task = "arithmetic"
model = "tiny"
sft_base = "warm"
max_new_tokens = 8

[sft]
num_steps = 2
batch_size = 2
warmup_steps = 0

[train_rl]
auto_sft = true
"""


def arguments(folder: Path, **changes) -> VerifyArgs:
    preset = folder / "own.toml"
    preset.write_text(PRESET)
    values = {"output_dir": str(folder / "out"), "sft_base": str(folder / "warm"), **changes}
    return from_preset(VerifyArgs, str(preset), **values)


@pytest.mark.slow
def test_a_warm_start_that_is_not_there_is_judged_by_its_first_steps(tmp_path):
    args = arguments(tmp_path)
    with judged_weights(args, make_console()) as (judged, weights):
        made = Path(judged.sft_base)
        assert (made / "model.safetensors").exists()
        assert weights == (
            f"those of 2 of the 2 steps of SFT that make {args.sft_base}, of 2 solutions each"
        )
    assert not made.exists() and not Path(args.sft_base).exists()
    assert not list((tmp_path / "out").glob(".verify_*"))


def test_weights_that_are_there_are_judged(tmp_path):
    (tmp_path / "warm").mkdir()
    args = arguments(tmp_path)
    with judged_weights(args, make_console()) as (judged, weights):
        assert judged == args and weights == args.sft_base
    without = arguments(tmp_path, sft_base="")
    with judged_weights(without, make_console()) as (judged, weights):
        assert judged == without and weights == "tiny"


def test_no_warm_start_is_judged_that_no_run_would_make(tmp_path):
    refused = pytest.raises(UserError, match="does not exist")
    with refused, judged_weights(arguments(tmp_path, auto_sft=False), make_console()):
        pass
