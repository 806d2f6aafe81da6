"""The optimisers of --optimizer side by side in one run: milliseconds an update, and where their
state is and how big.

uv run --extra torchao -m benchmarks.optimizers --layers 4 --width 1024
"""

from __future__ import annotations

import statistics
import time
from collections import Counter

import torch
import tyro
from rich.console import Console
from rich.table import Table

from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.single_device import make_optimizer


def main(layers: int = 4, width: int = 1024, repeats: int = 5) -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizers = {kind: make_optimizer(model, 1e-5, 0.0, kind) for kind in OPTIMIZERS}
    seconds: dict[str, list[float]] = {kind: [] for kind in optimizers}
    # taking turns, so that what else the machine does falls on all of them
    for _ in range(repeats + 1):
        for kind, optimizer in optimizers.items():
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            seconds[kind].append(timed(optimizer.step, device))
    table = Table(title=f"{parameters:,} parameters on {device}")
    for heading in ("optimizer", "ms/update", "times adamw", "bytes of state a parameter"):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    # the first one compiles
    typical = {kind: statistics.median(measured[1:]) for kind, measured in seconds.items()}
    for kind, optimizer in optimizers.items():
        sizes: Counter[str] = Counter()
        for tensor in (
            t for values in optimizer.state_dict()["state"].values() for t in values.values()
        ):
            sizes[str(tensor.device)] += tensor.nbytes
        held = ", ".join(f"{size / parameters:.2f} on {where}" for where, size in sizes.items())
        table.add_row(
            kind, f"{typical[kind] * 1e3:.1f}", f"{typical[kind] / typical['adamw']:.1f}", held
        )
    Console().print(table)


def timed(call, device: str) -> float:
    """Seconds until the device has done it."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
