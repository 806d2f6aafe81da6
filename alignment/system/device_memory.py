"""Free and total memory of GPUs and of the host."""

import gc

import psutil
import torch


def release_memory() -> None:
    """Give back what torch keeps of a GPU's memory that nothing uses any more: others take it for
    used."""
    gc.collect()
    torch.cuda.empty_cache()


def free_bytes(device: str) -> int:
    """Free memory of a GPU, or of the host. On a GPU what torch keeps unused is not among it: see
    `release_memory`."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return psutil.virtual_memory().available


def total_bytes(device: str) -> int:
    """The memory of a GPU, or of the host."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total
