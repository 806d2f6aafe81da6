"""TODO."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from safetensors.torch import save_file

from alignment.args import RLArgs, command_line
from alignment.core.rollout import Rollout
from alignment.core.tokens import take_rows
from alignment.runs.checkpoint import (
    checkpoint_folder,
    last_whole_step,
    put_aside,
)
from alignment.system import signals
from alignment.system.errors import RunStopped, UserError
from alignment.system.files import full_disk_is_an_os_error, read_json
from alignment.system.signals import Interrupted

# --- before the loop ----------------------------------------------------------------------------------------------


def resume(path: Path, args: RLArgs, console: Console) -> int:
    """The steps that a run which is to go on has done. Raises `UserError` where it cannot go on as asked."""
    before = read_json(path / "args.json").get("args")
    if not isinstance(before, dict):
        raise UserError(f"--resume: {path / 'args.json'} is damaged, so it cannot be told how the run was started")
    free = {"resume", "run_name", "num_steps", "save_interval", "keep_checkpoints", "sampler_timeout", "max_bad_steps"}
    free |= {"max_grader_failures"}
    now = json.loads(json.dumps(dataclasses.asdict(args)))
    changed = [
        f"--{key} was {before.get(key)!r}, now {value!r}"
        for key, value in now.items()
        if before.get(key) != value and key not in free
    ]
    if changed:
        raise UserError(f"--resume: {path} was started with other arguments: {'; '.join(changed)}")
    finished = read_json(path / "summary.json").get("steps", 0) if (path / "summary.json").exists() else 0
    done, damaged = (finished, []) if finished >= args.num_steps else last_whole_step(path)
    if finished >= args.num_steps or done > args.num_steps:
        raise UserError(f"--resume: {path} has already done {done} of --num_steps {args.num_steps}")
    for wrong in damaged:
        console.print(f"{wrong}; it is put aside, and step {done} is gone on from", style="red", markup=False, soft_wrap=True)
    put_aside(path, after=done)
    # What a shorter run ended with; its model is still there as its last checkpoint.
    (path / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(path / "final", ignore_errors=True)
    return done


# --- around the loop ------------------------------------------------------------------------------------------------


@contextmanager
def saved_when_stopped(
    path: Path, args: RLArgs, steps_done: Callable[[], int], save: Callable[[int], None], console: Console
) -> Iterator[None]:
    """Save what is done when a signal or a lost cause ends the loop, and say how to go on."""
    try:
        yield
    except (Interrupted, RunStopped) as stop:
        step = steps_done()
        try:
            if signals.signals_are_deferred():  # the weights are between two steps: the last checkpoint stands
                step, _ = last_whole_step(path)
            elif step and not checkpoint_folder(path, step).exists():
                save(step)
        except RunStopped:  # a sampler that is lost has taken with it what older weights had drawn
            step, _ = last_whole_step(path)
        again = command_line(dataclasses.replace(args, run_name=path.name, resume=True))
        command = f"uv run -m alignment.train_rl {shlex.join(again)}"
        console.print(f"stopped after step {step} ({stop}); go on with: {command}", markup=False, soft_wrap=True)
        raise
    except OSError as error:
        kept = "it had no checkpoint yet"
        with suppress(UserError, OSError):
            step, _ = last_whole_step(path)
            kept = f"its checkpoint of step {step} is whole" if step else kept
        raise RunStopped(f"{error}. The run {path} has stopped; {kept}: go on with --resume when that is mended") from None


def save_bad_batches(path: Path, rollout: Rollout, step: int, bad: Sequence[Sequence[int]]) -> None:
    """Keep the mini-batches that had no finite loss or gradient, as tensors, in bad_batches/."""
    for number, rows in enumerate(bad, start=1):
        batch = take_rows(rollout.batch, rows)
        tensors = {"input_ids": batch.input_ids, "labels": batch.labels, "response_mask": batch.response_mask}
        width = batch.labels.shape[1]
        for key in ("raw_rewards_B1", "advantages_B1", "sampler_log_probs_BT", "old_log_probs_BT"):
            if (tensor := getattr(rollout, key)) is not None:
                tensors[key] = tensor[list(rows), :width].contiguous()
        file = path / "bad_batches" / f"step_{step:06d}_{number}.safetensors"
        file.parent.mkdir(exist_ok=True)
        with full_disk_is_an_os_error(file):
            save_file(tensors, file)
