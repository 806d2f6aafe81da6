"""Writing a model's folder: the weights come first, and what transformers refuses to write beside
them is kept as it is."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import exit_code
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from alignment import sft
from alignment.model import saving
from alignment.model.loading import load_tokenizer
from alignment.model.saving import check_saving
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.system.errors import UserError
from alignment.system.terminal import say_once
from tests.some_families import BUFFER, save_with_buffer

REFUSED = {
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.9, "top_k": 20},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.3},
    "early_stopping": {"early_stopping": True},
    "length_penalty": {"length_penalty": 0.8},
    "pad_token_id": {"pad_token_id": -1},
    "output_scores": {"output_scores": True},
    "greedy_said": {"do_sample": False, "temperature": 0.7, "eos_token_id": [0, 1]},
}
UNREADABLE = {
    "max_new_tokens": {"max_new_tokens": -1},
    "num_return_sequences": {"num_return_sequences": 4},
    "early_stopping": {"early_stopping": "x"},
    "cache": {"cache_implementation": "foo"},
    "no_object": [1],
}


@pytest.fixture(autouse=True)
def lines_said_in_an_earlier_test():
    say_once.cache_clear()


@pytest.fixture
def changed(tiny_folder, tmp_path):
    """A function that copies the tiny model and changes the values of one of its JSON files;
    returns the folder."""

    def change(file: str, values) -> Path:
        folder = tmp_path / "base"
        shutil.copytree(tiny_folder, folder)
        present = json.loads((folder / file).read_text()) if isinstance(values, dict) else None
        (folder / file).write_text(json.dumps(present | values if present else values))
        return folder

    return change


def opened(folder: Path) -> SingleDevicePolicy:
    return SingleDevicePolicy(PolicyConfig(str(folder), ("cpu",), "float32"))


def saved(folder: Path) -> Path:
    """Where the model of a folder is saved to, as a run does it, and whose weights are what it has
    loaded."""
    tokenizer, policy, copy = load_tokenizer(str(folder)), opened(folder), folder.with_name("copy")
    copy.mkdir()
    policy.save(copy, tokenizer)
    for (name, weight), (_, again) in zip(policy.weights(), opened(copy).weights(), strict=True):
        assert torch.equal(weight, again), name
    return copy


def transformers_saves(folder: Path) -> bool:
    """Whether transformers saves a folder's generation_config.json."""
    config = GenerationConfig.from_pretrained(folder)
    try:
        config.save_pretrained(folder.with_name("saved"))
    except ValueError as error:
        assert "GenerationConfig is invalid" in str(error)
        return False
    return True


@pytest.mark.parametrize("kind", REFUSED)
def test_a_generation_config_that_transformers_does_not_save_is_kept(kind, changed, capsys):
    folder = changed("generation_config.json", REFUSED[kind])
    check_saving(str(folder), load_tokenizer(str(folder)))
    line = capsys.readouterr().err.strip()
    if transformers_saves(folder):  # since 5.24
        assert line == ""
    else:
        assert line.startswith(
            f"--model {folder}: transformers refuses to save its generation_config.json ("
        )
        assert line.endswith("; trained models get it as it is") and "\n" not in line
    kept = json.loads((saved(folder) / "generation_config.json").read_text())
    # which is what a lack of it means
    given = {name: value for name, value in REFUSED[kind].items() if value is not False}
    assert {name: kept[name] for name in given} == given


@pytest.mark.parametrize("kind", UNREADABLE)
def test_one_that_transformers_does_not_read_is_refused(kind, changed):
    folder = changed("generation_config.json", UNREADABLE[kind])
    with pytest.raises(
        UserError,
        match=r"its generation_config\.json cannot be read \(.*correct that file, or delete it",
    ):
        check_saving(str(folder), load_tokenizer(str(folder)))


@pytest.mark.parametrize(
    "values",
    [
        {"chat_template": "\ud800"},
        {
            "chat_template": [
                {"name": "default", "template": "a"},
                {"name": "tool/use", "template": "b"},
            ]
        },
        {"note": "\udfff"},
    ],
    ids=["lone surrogate", "a path for a name", "another value"],
)
def test_tokenizer_files_that_transformers_does_not_save_are_copied(values, changed, capsys):
    folder = changed("tokenizer_config.json", values)
    with pytest.raises((ValueError, UnicodeEncodeError)):
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder.with_name("refused"))
    check_saving(str(folder), load_tokenizer(str(folder)))
    assert "transformers refuses to save its tokenizer (" in capsys.readouterr().err
    copy = saved(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (copy / file).read_bytes() == (folder / file).read_bytes()
    assert not [
        path for path in copy.iterdir() if path.name not in {file.name for file in folder.iterdir()}
    ]


def test_nothing_is_said_of_a_model_that_can_be_saved(tiny_folder, capsys):
    check_saving(str(tiny_folder), load_tokenizer(str(tiny_folder)))
    assert capsys.readouterr() == ("", "")


def test_the_config_of_the_base_is_kept_with_the_type_of_the_saved_weights(changed, monkeypatch):
    folder = changed("config.json", {"dtype": "bfloat16", "torch_dtype": "bfloat16"})
    monkeypatch.setattr(saving.PreTrainedConfig, "to_json_file", lambda *given, **options: 1 / 0)
    config = json.loads((saved(folder) / "config.json").read_text())
    base = json.loads((folder / "config.json").read_text())
    assert config == {key: value for key, value in base.items() if key != "torch_dtype"} | {
        "dtype": "float32"
    }


class Faulty:
    """A tokenizer that transformers could not save, whose files are gone."""

    name_or_path = "nowhere/at-all"
    vocab_files_names: dict[str, str] = {}

    def save_pretrained(self, folder) -> None:
        raise KeyError("no template")


def test_whatever_fails_beside_them_the_weights_are_written(tiny_folder, tmp_path, capsys):
    policy = opened(tiny_folder)
    policy.save(tmp_path, Faulty())
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in policy.weights():
        assert torch.equal(weights[name], weight)
    line = capsys.readouterr().err
    assert line.startswith("its tokenizer cannot be saved: 'no template'; ") and line.endswith(
        "the weights are saved without\n"
    )
    with pytest.raises(UserError, match="its tokenizer cannot be saved: 'no template'"):
        check_saving(str(tiny_folder), Faulty())


def test_weights_that_transformers_refuses_are_written_by_their_names(
    tiny_folder, tmp_path, monkeypatch
):
    """As where two layers share a weight that the family does not tie."""
    policy = opened(tiny_folder)
    monkeypatch.setattr(type(policy.model), "save_pretrained", lambda *given, **options: 1 / 0)
    policy.save(tmp_path, load_tokenizer(str(tiny_folder)))
    for (name, weight), (_, again) in zip(
        policy.weights(), opened(tmp_path).weights(), strict=True
    ):
        assert torch.equal(weight, again), name


def test_they_have_the_models_buffers_with_them(tiny_folder, tmp_path, monkeypatch):
    """Without which the folder could not be loaded."""
    buffer = save_with_buffer(tmp_path / "base")
    policy = opened(tmp_path / "base")
    monkeypatch.setattr(type(policy.model), "save_pretrained", lambda *given, **options: 1 / 0)
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved", load_tokenizer(str(tiny_folder)))
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")[BUFFER], buffer)


def test_a_full_disk_is_no_refusal(tiny_folder, tmp_path, monkeypatch):
    def full(*given, **options):
        raise OSError(28, "No space left on device")

    policy = opened(tiny_folder)
    monkeypatch.setattr(saving.PreTrainedConfig, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left") as caught:
        policy.save(tmp_path, load_tokenizer(str(tiny_folder)))
    assert caught.value.filename == str(tmp_path)


@pytest.mark.slow
def test_sft_from_such_a_model_says_one_line_and_saves_its_work(
    changed, tmp_path, monkeypatch, capsys
):
    folder = changed("generation_config.json", REFUSED["temperature"])
    sizes = ["--num_steps", "2", "--batch_size", "4", "--max_problems", "2", "--trackers"]
    target = ["--output_dir", str(tmp_path / "runs"), "--sft_base", str(tmp_path / "runs" / "sft")]
    assert (
        exit_code(monkeypatch, sft.main, "alignment.sft", "--model", str(folder), *sizes, *target)
        == 0
    )
    assert capsys.readouterr().err.count("transformers refuses to save") == 1
    assert (
        json.loads((tmp_path / "runs" / "sft" / "generation_config.json").read_text())[
            "temperature"
        ]
        == 0.6
    )
    opened(tmp_path / "runs" / "sft")
