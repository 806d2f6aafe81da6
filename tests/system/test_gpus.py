"""What a machine says of its GPUs before torch uses them."""

import pytest
import torch

from alignment.builders import devices
from alignment.system import gpus
from alignment.system.errors import UserError

VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build "
    " (dvs-builder@U22)\nGCC version:  12"
)


@pytest.fixture
def old_driver(tmp_path, monkeypatch):
    """A machine whose device files are there, and whose driver torch finds too old."""
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(gpus, "DEVICE_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_driver_too_old_is_one_line_that_says_which_is_needed(old_driver):
    with pytest.raises(UserError) as error:
        devices.visible_gpus()
    needed = (
        f"torch {torch.__version__} needs an NVIDIA driver for CUDA 13.0, 580 or later; this"
        " machine has 535.104.05"
    )
    assert (
        str(error.value)
        == f"{needed}. Update the driver, or hide the GPUs by CUDA_VISIBLE_DEVICES= to use the CPU"
    )


def test_a_build_without_cuda_says_so(old_driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match="was built without CUDA"):
        devices.visible_gpus()


def test_hidden_gpus_are_not_missed(old_driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.visible_gpus() == 0


def test_a_machine_without_device_files_has_no_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "DEVICE_FILES", ("/nowhere",))
    assert devices.visible_gpus() == 0
