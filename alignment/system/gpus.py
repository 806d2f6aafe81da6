"""The GPUs of this machine, and why torch cannot use them where it cannot."""

import os
from pathlib import Path

DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# CUDA's major version -> the first NVIDIA driver for it (CUDA Toolkit release notes, "CUDA
# Driver").
FIRST_DRIVER = {"11": "450.80", "12": "525.60", "13": "580"}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def has_gpu_files() -> bool:
    """Whether the machine has a GPU's device files: without them it has no GPU, which is known
    without torch."""
    return any(Path(file).exists() for file in DEVICE_FILES)


def unusable_driver() -> str | None:
    """Why torch sees no GPU on a machine that has one, in a line; None where it sees them, or where
    there are none to see."""
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if hides_gpus or not Path(DEVICE_FILES[0]).exists():
        return None
    import torch

    if torch.cuda.is_available():
        return None
    cuda = torch.version.cuda
    if cuda is None:
        return (
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} was built without CUDA"
        )
    major = cuda.partition(".")[0]
    needed = f"torch {torch.__version__} needs an NVIDIA driver for CUDA {cuda}"
    if major in FIRST_DRIVER:
        needed += f", {FIRST_DRIVER[major]} or later"
    version = driver_version() or "an older one"
    return f"{needed}; this machine has {version}"


def driver_version() -> str | None:
    """The version of the loaded NVIDIA driver, such as "580.159.04", or None where it does not
    say."""
    if not NVIDIA_DRIVER.exists():
        return None
    for word in NVIDIA_DRIVER.read_text().split():
        if word[0].isdigit() and "." in word and word.replace(".", "").isdigit():
            return word
    return None
