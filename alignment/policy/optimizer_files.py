"""The optimiser's state in a file of each rank. A single process does without: torch's module takes seconds to import."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def write_parts(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Have each rank of a group write its part of sharded tensors as safetensors; the first rank that holds a part writes it.
    Raises OSError on all ranks where one cannot."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    first = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer, planner=first, process_group=group)
    except dcp.api.CheckpointException as error:  # which is no `Exception`, and prints the tracebacks of all ranks
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{folder} could not be written by rank {rank}: {cause}") from None


def read_parts(folder: Path, parameters: Sequence[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """All tensors in a folder's safetensors files, on the CPU, of which each name begins with the number of its parameter: the
    part that this process holds of the parameter. Raises OSError where a part is missing."""
    reader, tensors = dcp.HuggingFaceStorageReader(str(folder)), {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        parameter = parameters[int(name.partition(".")[0])]
        tensors[name] = torch.empty_like(parameter, device="cpu") if stored.size else torch.empty(())
        if sum(part.sizes.numel() for part in stored.chunks) != tensors[name].numel():  # torch would leave the rest as it is
            raise OSError(f"{folder}: parts of {name} are missing")
    with warnings.catch_warnings(action="ignore"):  # which says that no ranks take part
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
