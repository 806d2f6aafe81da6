"""Weights on their way through a pipe to another process, one tensor at a time."""

from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection

import torch


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
