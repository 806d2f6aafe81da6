"""Checkpoints: a Hugging Face folder with the trainer's state beside the weights, whole or absent.

All randomness of a run is a function of its seed and the step number, so a resumed run repeats the undisturbed one from step,
weights, optimiser, and the rollouts that older weights have sampled ahead.
"""

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from alignment.core.records import Completion, Group, Problem, SampledStep, Score
from alignment.system.errors import UserError
from alignment.system.files import atomic_folder, damage, manifested, read_jsonl

# Not in the top folder, where loaders take every *.safetensors file for model weights.
TRAINER = "trainer"
ROLLOUTS = Path(TRAINER) / "rollouts.jsonl"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return run / f"step_{step:06d}"


def last_whole_step(run: Path) -> tuple[int, list[str]]:
    """The newest undamaged checkpoint's step, and what is wrong with each newer one. 0 where there are no checkpoints. Raises
    `UserError` where all of them are damaged."""
    damages = []
    for step in sorted(_steps(run), reverse=True):
        wrong = damage(checkpoint_folder(run, step))
        if wrong is None:
            return step, damages
        damages.append(f"{checkpoint_folder(run, step)} is damaged: {wrong}")
    if damages:
        raise UserError(f"no checkpoint is whole: {'; '.join(damages)}. Start a new run, or delete these folders")
    return 0, []


def put_aside(run: Path, after: int) -> None:
    """Rename the checkpoints after a step, which are damaged, so that they are neither used nor in the way."""
    for step in [step for step in _steps(run) if step > after]:
        folder = checkpoint_folder(run, step)
        names = itertools.chain([f"damaged_{folder.name}"], (f"damaged_{folder.name}-{n}" for n in itertools.count(2)))
        folder.rename(next(path for path in map(folder.with_name, names) if not path.exists()))


def save_checkpoint(folder: Path, policy, tokenizer, sampled_ahead: Sequence[SampledStep] = ()) -> None:
    """Write the policy, its optimiser, the tokenizer and the rollouts sampled ahead to `folder`, which appears only when all
    of it is on the disk."""
    with atomic_folder(folder) as building, manifested(building):
        policy.save(building, tokenizer)
        (building / TRAINER).mkdir()
        policy.save_optimizer(building / TRAINER)
        if sampled_ahead:
            (building / ROLLOUTS).write_text("".join(json.dumps(asdict(sampled)) + "\n" for sampled in sampled_ahead))


def load_rollouts(folder: Path) -> list[SampledStep]:
    """The rollouts that a whole checkpoint's run had sampled ahead."""
    records = read_jsonl(folder / ROLLOUTS)
    for record in records:
        record.pop("restarts", None)  # of older checkpoints
    return [SampledStep(**record | {"groups": [_group(**group) for group in record["groups"]]}) for record in records]


def _group(problem: dict, completions: list[dict], scores: list[Score]) -> Group:
    tuples = ({key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()} for fields in completions)
    return Group(Problem(**problem), tuple(Completion(**fields) for fields in tuples), tuple(scores))


def drop_old_checkpoints(run: Path, keep: int, spared: int = 0) -> None:
    """Delete all checkpoints but the newest `keep`, and the one of step `spared`; 0 keeps all."""
    for step in sorted(_steps(run))[: -keep or None] if keep else []:
        if step != spared:
            shutil.rmtree(checkpoint_folder(run, step))


def _steps(run: Path) -> list[int]:
    matches = (re.fullmatch(r"step_(\d{6,})", path.name) for path in run.glob("step_*"))
    return [int(match[1]) for match in matches if match]
