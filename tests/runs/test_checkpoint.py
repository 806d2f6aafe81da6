"""Checkpoints on the disk."""

import os
import stat

import pytest
import torch
from safetensors.torch import load_file

from alignment.model.loading import load_tokenizer
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import OPTIMIZER_FILE, SingleDevicePolicy
from alignment.runs.run_folder import (
    TRAINER,
    checkpoint_folder,
    drop_old_checkpoints,
    last_whole_step,
    save_checkpoint,
)
from alignment.system.manifests import write_manifest


def open_policy(folder, optimizer: str) -> SingleDevicePolicy:
    return SingleDevicePolicy(
        PolicyConfig(str(folder), ("cpu",), "float32", optimizer, weight_decay=0.1)
    )


def step_once(policy: SingleDevicePolicy, step: int) -> None:
    """One step with a clipped gradient and a learning rate that changes."""
    ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(step % 3))
    policy.model(ids, labels=ids).loss.backward()
    policy.clip_gradient(0.5)
    policy.step(1e-3 * (1 + step % 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_continues_bit_for_bit(tiny_folder, tmp_path, optimizer):
    policy, tokenizer = open_policy(tiny_folder, optimizer), load_tokenizer(str(tiny_folder))
    for step in range(3):
        step_once(policy, step)
    saved = checkpoint_folder(tmp_path, 3)
    save_checkpoint(saved, policy, tokenizer)
    resumed = open_policy(saved, optimizer)
    resumed.load_optimizer(saved / TRAINER)
    for each, name in ((policy, "undisturbed"), (resumed, "resumed")):
        step_once(each, 3)
        save_checkpoint(tmp_path / name, each, tokenizer)
    for (name, one), (_, other) in zip(policy.weights(), resumed.weights(), strict=True):
        assert torch.equal(one, other), name
    undisturbed, resumed_state = (
        load_file(tmp_path / name / TRAINER / OPTIMIZER_FILE) for name in ("undisturbed", "resumed")
    )
    assert undisturbed.keys() == resumed_state.keys()
    assert all(torch.equal(undisturbed[name], resumed_state[name]) for name in undisturbed)


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_other_users_read_a_checkpoint_as_far_as_the_umask_lets_them(tiny_folder, tmp_path, mask):
    before = os.umask(mask)
    try:
        save_checkpoint(
            tmp_path / "saved", open_policy(tiny_folder, "adamw"), load_tokenizer(str(tiny_folder))
        )
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    assert {"model.safetensors", OPTIMIZER_FILE, "manifest.sha256.json", "tokenizer.json"} <= {
        file.name for file in files
    }
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in files} == {
        file.name: 0o666 & ~mask for file in files
    }


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (5, 10, 15, 1_000_000):
        checkpoint_folder(tmp_path, step).mkdir()
        with write_manifest(checkpoint_folder(tmp_path, step)):
            pass
    drop_old_checkpoints(tmp_path, 0)
    assert last_whole_step(tmp_path) == (1_000_000, [])
    drop_old_checkpoints(tmp_path, 2, spared=(5,))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000005",
        "step_000015",
        "step_1000000",
    ]


def make_checkpoints(run, *steps: int) -> None:
    for step in steps:
        checkpoint_folder(run, step).mkdir()
        with write_manifest(checkpoint_folder(run, step)):
            (checkpoint_folder(run, step) / "weights").write_text("w")


def test_the_checkpoints_of_a_reference_are_kept_while_they_are_needed(tmp_path):
    """Resets every 4 steps: 9 and 11 go on with the reference of step 8, 7 with that of 4."""
    make_checkpoints(tmp_path, 3, 4, 6, 7, 8)
    drop_old_checkpoints(tmp_path, 2, reset_interval=4)
    assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["04", "07", "08"]
    make_checkpoints(tmp_path, 9, 11)
    drop_old_checkpoints(tmp_path, 2, reset_interval=4)
    assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["08", "09", "11"]
    # Step 7's samplers load it again; its reference is step 4's.
    make_checkpoints(tmp_path, 4, 7)
    drop_old_checkpoints(tmp_path, 1, spared=(7,), reset_interval=4)
    assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["04", "07", "08", "11"]


def test_a_run_goes_on_from_a_step_whose_reference_is_whole(tmp_path):
    make_checkpoints(tmp_path, 4, 6, 8, 9)
    assert last_whole_step(tmp_path, 4) == (9, [])
    (checkpoint_folder(tmp_path, 8) / "weights").write_text("damaged")
    assert last_whole_step(tmp_path) == (9, [])
    step, damages = last_whole_step(tmp_path, 4)
    assert step == 6
    assert "step_000009 is damaged: the checkpoint of its reference, of step 8: " in damages[0]
