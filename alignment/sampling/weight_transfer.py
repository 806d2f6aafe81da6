"""The ways of new weights to another process: which one an engine of vLLM takes, and the pipe, one tensor at a time."""

from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

import torch

from alignment.sampling.sampler import SamplerConfig


def send_tensors(connection: Connection, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """A header and the bytes of each tensor, then None: one tensor on its way at a time."""
    for name, tensor in tensors:
        local = tensor.detach().to(dtype).cpu().contiguous()  # cast where it is, so that fewer bytes travel
        connection.send((name, dtype, tuple(local.shape)))
        connection.send_bytes(memoryview(local.flatten().view(torch.uint8).numpy()))
    connection.send(None)


def received_tensors(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """What `send_tensors` sends, on the other side."""
    for name, dtype, shape in iter(connection.recv, None):
        yield name, torch.frombuffer(bytearray(connection.recv_bytes()), dtype=dtype).view(shape)


def transfer_backend(config: SamplerConfig) -> str:
    """vLLM's name of the way of weights from `config.policy_device` to an engine: NCCL to other GPUs than the policy's, since
    it takes none twice, CUDA IPC to the policy's own, and the host's memory to all else."""
    if {torch.device(device).type for device in (config.policy_device, *config.devices)} != {"cuda"}:
        return "shared_memory"
    return "nccl" if config.policy_device not in config.devices else "ipc" if len(config.devices) == 1 else "shared_memory"
