"""A run goes on only with the reference model and the teacher that it began with."""

import json

import pytest
from rich.console import Console

from alignment.args import RLArgs
from alignment.builders.checks import run_config
from alignment.runs.run import FROZEN_MODELS, open_run
from alignment.runs.run_folder import write_args
from alignment.system.errors import UserError
from alignment.system.manifests import digest_of_weights


@pytest.fixture
def model(tmp_path):
    """A folder with two files of weights of 3 MiB, the first of which is full of one byte."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"a" * 3 * 2**20)
    (folder / "model-2.safetensors").write_bytes(b"b" * 3 * 2**20)
    return folder


@pytest.mark.parametrize("place", [0, 3 * 2**20 - 1])
def test_the_digest_of_weights_reads_both_ends_of_each_file(model, place):
    before = digest_of_weights(model)
    (model / "config.json").write_text("{}")
    assert digest_of_weights(model) == before
    with (model / "model-2.safetensors").open("r+b") as opened:
        opened.seek(place)
        opened.write(b"c")
    assert digest_of_weights(model) != before


@pytest.mark.parametrize("change", ["none", "weights", "another file"])
def test_a_run_with_replaced_weights_does_not_go_on(tmp_path, model, change):
    args = RLArgs(sft_base="", output_dir=str(tmp_path), run_name="mine", resume=True)
    config = run_config(args)
    run = tmp_path / "mine"
    run.mkdir()
    write_args(run, config.arguments, config.seeds, config.automatic)
    digest = digest_of_weights(model)
    (run / FROZEN_MODELS).write_text(json.dumps({"teacher": digest}))
    if change == "weights":
        (model / "model-1.safetensors").write_bytes(b"z")
    if change == "another file":
        (model / "model-3.safetensors").write_bytes(b"")
    with open_run(config, Console(width=300)) as opened:
        if change == "none":
            opened.keep_frozen("teacher", str(model))
            return
        with pytest.raises(UserError, match=f"weights of the teacher, in {model}, are not those"):
            opened.keep_frozen("teacher", str(model))


def test_a_model_that_is_no_folder_is_not_read(tmp_path):
    args = RLArgs(sft_base="", output_dir=str(tmp_path), run_name="mine")
    with open_run(run_config(args), Console(width=300)) as opened:
        opened.keep_frozen("teacher", "someone/a-model-of-the-hub")
