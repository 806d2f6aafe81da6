"""Writing a model's folder: first the weights, whatever becomes of the files beside them; and the
trial of those files before training.

transformers loads more than it saves: a generation_config.json with a temperature but without
do_sample, a chat template with a lone surrogate. Its `save_pretrained` writes such files before the
weights and raises at the first one, so that the weights would never be written. What it refuses is
written here as the base model has it, from where it has just been loaded."""

import json
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from alignment.model.huggingface import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    cached_file,
)
from alignment.model.loading import load_config, load_generation_config
from alignment.model.shards import whole
from alignment.system.errors import UserError
from alignment.system.files import guard_library_write, is_disk_fault
from alignment.system.terminal import say_once

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
)


@dataclass(frozen=True)
class SideFiles:
    """One kind of files beside a model's weights."""

    name: str
    """For messages."""
    write: Callable[[Path], object]
    """Has transformers write them to a folder."""
    keep: Callable[[Path], object]
    """Writes them as the base model has them, where transformers refuses."""


def save_model(
    model: PreTrainedModel,
    folder: Path,
    tokenizer,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the weights, by default the model's own, and then the files beside them, as a Hugging
    Face folder. Raises OSError where the disk is at fault, and nothing else once the weights are
    written."""
    with guard_library_write(folder):
        _write_weights(model, folder, weights)
        for kind in side_files(model.config, model.generation_config, tokenizer):
            try:
                _write_side_files(kind, folder)
            except UserError as error:
                say_once(f"{error}; the weights are saved without")


def _write_weights(
    model: PreTrainedModel, folder: Path, weights: Mapping[str, torch.Tensor] | None
) -> None:
    """Have transformers write the weights, or write them by their names where it refuses. Raises
    OSError where the disk is at fault."""
    state_dict = None
    if weights is not None:
        state_dict = dict(weights)
    try:
        with weights_alone():
            model.save_pretrained(folder, state_dict=state_dict)
    except Exception as error:
        if is_disk_fault(error):
            raise
        if state_dict is None:
            # tied weights once
            state_dict = dict(chain(model.named_parameters(), persistent_buffers(model)))
        tensors = {}
        for name, tensor in state_dict.items():
            tensors[name] = tensor.detach().contiguous()
        save_file(tensors, folder / WEIGHTS_FILE)
        say_once(
            f"transformers refuses to save the weights ({_reason(error)}): they are in"
            f" {WEIGHTS_FILE} by their names"
        )


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a model's file holds beside its parameters, whole, on the CPU, such as
    the bias that DeepSeek-V3's router adds to its scores and that no gradient trains."""
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored:
            yield name, whole(buffer).cpu()


def check_saving(model_path: str, tokenizer) -> None:
    """Write the files beside a model's weights to a folder that is removed. Prints a line for a
    kind that transformers refuses to write and that is kept as it is. Raises `UserError` for one
    that cannot be read, or not be written in any way."""
    config = load_config(model_path)
    generation = load_generation_config(model_path) or GenerationConfig.from_model_config(config)
    with tempfile.TemporaryDirectory() as folder:
        for kind in side_files(config, generation, tokenizer):
            refusal = _write_side_files(kind, Path(folder))
            if refusal:
                say_once(
                    f"--model {model_path}: transformers refuses to save its {kind.name}"
                    f" ({refusal}); trained models get it as it is"
                )


def side_files(
    config: PreTrainedConfig, generation: GenerationConfig | None, tokenizer
) -> Iterator[SideFiles]:
    """The kinds of files beside a model's weights."""
    yield SideFiles(CONFIG_FILE, write=config.save_pretrained, keep=partial(_keep_config, config))
    if generation is not None:
        yield SideFiles(
            GENERATION_FILE,
            write=generation.save_pretrained,
            keep=partial(_keep_generation_config, generation),
        )
    yield SideFiles(
        "tokenizer", write=tokenizer.save_pretrained, keep=partial(_copy_tokenizer, tokenizer)
    )


@contextmanager
def weights_alone() -> Iterator[None]:
    """Within the block `save_pretrained` of a model writes its weights and nothing else. It unwraps
    no model, of which ours are none: a second of imports would ask what FSDP has wrapped."""

    def write_nothing(self, *arguments, **options):
        return None

    def unwrap(model: PreTrainedModel) -> PreTrainedModel:
        return model

    with (
        patch("transformers.modeling_utils.unwrap_model", unwrap),
        patch.object(PreTrainedConfig, "save_pretrained", write_nothing),
        patch.object(GenerationConfig, "save_pretrained", write_nothing),
    ):
        yield


def _write_side_files(kind: SideFiles, folder: Path) -> str:
    """Write a kind of files; returns why transformers refused, or "". Raises `UserError` where they
    cannot be written."""
    refusal = _write_all_or_nothing(kind.write, folder)
    if not refusal:
        return ""
    fault = _write_all_or_nothing(kind.keep, folder)
    if fault:
        raise UserError(f"its {kind.name} cannot be saved: {refusal}; {fault}")
    return refusal


def _write_all_or_nothing(write: Callable[[Path], object], folder: Path) -> str:
    """Have `write` write its files to the folder; where it raises, none of them stays. Returns why
    it raised, or "". Raises OSError where the disk is at fault."""
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        try:
            write(Path(unfinished))
        except Exception as error:
            if is_disk_fault(error):
                raise
            return _reason(error)
        for path in Path(unfinished).iterdir():
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                path.replace(folder / path.name)
    return ""


def _reason(error: Exception) -> str:
    """The beginning of an error's message, on one line."""
    message = str(error).replace("GenerationConfig is invalid:", "")
    message = " ".join(message.split()).strip("- ")
    return textwrap.shorten(message, 160, placeholder=" ...") or type(error).__name__


def _keep_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write the base model's config.json, with the type and the class of the weights that are
    saved."""
    base = _base_folder(str(config.name_or_path))
    values = json.loads((base / CONFIG_FILE).read_text(encoding="utf-8"))
    # an older name of "dtype", which some versions would read first
    values.pop("torch_dtype", None)
    values["dtype"] = str(config.dtype).removeprefix("torch.")
    values["architectures"] = config.architectures
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _keep_generation_config(generation: GenerationConfig, folder: Path) -> None:
    """Write a generation_config.json as `save_pretrained` does, which first validates it."""
    generation.to_json_file(folder / GENERATION_FILE, keys_to_pop=["compile_config"])


def _copy_tokenizer(tokenizer, folder: Path) -> None:
    """Copy the base model's tokenizer files. Raises ValueError where there are none."""
    base = _base_folder(tokenizer.name_or_path)
    files: set[Path] = set()
    # what several patterns match is one file
    for pattern in (*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()):
        files.update(path for path in base.glob(pattern) if path.is_file())
    if not files:
        raise ValueError(f"there are no tokenizer files in {base}")
    for file in files:
        copy = folder / file.relative_to(base)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _base_folder(name: str) -> Path:
    """The folder that a model or tokenizer was loaded from; of a hub name, that in the hub's cache.
    Raises ValueError where that is there no more."""
    folder = Path(name)
    if not folder.is_dir():
        # None would be for a file that may be missing.
        folder = Path(str(cached_file(name, CONFIG_FILE, local_files_only=True))).parent
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder} has no {CONFIG_FILE}")
    return folder
