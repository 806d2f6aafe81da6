"""The state of a run before each update, as digests. Comparing the digests of two runs shows the
first step at which the runs differ, and what differs: weights, moments, problems or completions."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.core.records import SampledStep
from alignment.core.state_tree import split_tensors
from alignment.system.errors import RunStopped
from alignment.system.files import read_jsonl

if TYPE_CHECKING:
    import torch

STATE = "state.jsonl"


def digest_of_tensors(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> str:
    """SHA-256 of named tensors: names, shapes, types and bits, in the order given."""
    import torch  # here, because commands that report mistakes first import this module

    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_moments(folder: Path) -> str:
    """SHA-256 of the optimiser's state in a folder that `Policy.save_optimizer` wrote, one file for
    each process."""
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(digest_of_tensors(sorted(load_file(file).items())).encode())
    return digest.hexdigest()


def digest_of_json(value: object) -> str:
    """SHA-256 of a value's JSON text."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digest_of_tree(state: object) -> str:
    """SHA-256 of the state of an estimator of advantages. Raises `RunStopped` for one that a
    checkpoint cannot hold."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        tree = split_tensors(state, tensors)
    except TypeError as error:
        raise RunStopped(f"--advantage: {error}") from None
    return digest_of_json([tree, digest_of_tensors(sorted(tensors.items()))])


def state_of(
    policy, sampled: SampledStep, folder: Path, advantage_state: object = None
) -> dict[str, object]:
    """The state before the update of a sampled step: digests of "weights", "moments", "problems"
    (their ids, in order), "completions" and "advantage_state", of the estimator, the
    "sampling_seed", and "micro_batch_tokens".

    The optimiser's state goes through a temporary folder in `folder`. On a device whose sums depend
    on timing, completions may differ although everything else is equal."""
    completions: list[dict] = []
    for group in sampled.groups:
        completions += [asdict(completion) for completion in group.completions]
    with tempfile.TemporaryDirectory(prefix=".state_", dir=folder) as temporary:
        policy.save_optimizer(Path(temporary))
        moments = digest_of_moments(Path(temporary))
    return {
        "step": sampled.step,
        "weights": digest_of_tensors(policy.weights()),
        "moments": moments,
        "problems": digest_of_json(sampled.problem_ids),
        "advantage_state": digest_of_tree(advantage_state),
        "sampling_seed": sampled.seed,
        "micro_batch_tokens": policy.micro_batch_tokens,
        "completions": digest_of_json(completions),
    }


def read_state(run: Path, step: int) -> Mapping[str, object] | None:
    """The record of a step in a run's state.jsonl; None if there is none."""
    for record in read_jsonl(run / STATE, require_steps=True):
        if record["step"] == step:
            return record
    return None
