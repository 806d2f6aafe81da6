"""Checkpoints: a Hugging Face folder with the trainer's state beside the weights, whole or absent.

All randomness of a run is a function of its seed and the step number, so step, weights and optimiser are all there is
to save for a resumed run to repeat the undisturbed one.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from alignment.errors import UserError
from alignment.files import atomic_folder

# Out of the top folder, where loaders take every *.safetensors file for model weights.
OPTIMIZER = Path("trainer") / "optimizer.safetensors"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return run / f"step_{step:06d}"


def last_step(run: Path) -> int:
    """The newest checkpoint's step; 0 where there is none."""
    return max(_steps(run), default=0)


def save_checkpoint(folder: Path, model, tokenizer, optimizer: torch.optim.Optimizer) -> None:
    """Write model, tokenizer and optimiser state to `folder`, which appears only when all of it is on the disk."""
    with atomic_folder(folder) as building:
        save_model(building, model, tokenizer)
        (building / OPTIMIZER).parent.mkdir()
        state = optimizer.state_dict()["state"]
        tensors = {f"{index}.{key}": t.contiguous() for index, values in state.items() for key, t in values.items()}
        save_file(tensors, building / OPTIMIZER)


def save_model(folder: Path, model, tokenizer) -> None:
    """Write a Hugging Face folder that `from_pretrained` and vLLM load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Fill a fresh optimiser with a checkpoint's state. Raises `UserError` where that is missing or damaged."""
    try:
        saved = load_file(folder / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder / OPTIMIZER} is missing or damaged ({error}): delete {folder} to resume from the checkpoint before it"
        ) from None
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in saved.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def drop_old_checkpoints(run: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep`; 0 keeps all."""
    for step in sorted(_steps(run))[: -keep or None] if keep else []:
        shutil.rmtree(checkpoint_folder(run, step))


def _steps(run: Path) -> list[int]:
    found = (re.fullmatch(r"step_(\d{6,})", path.name) for path in run.glob("step_*"))
    return [int(match[1]) for match in found if match]
