"""How long does an update of each --optimizer take, and where is its state, and how big?

    uv run --extra torchao -m benchmarks.optimizers --layers 4 --width 1024

Median milliseconds of an optimiser's step on random gradients, by turns in one process, on the GPU
where there is one, else on the CPU; times those of adamw; and bytes of state for each parameter, by
device.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
import tyro
from rich.console import Console

from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.single_device import make_optimizer
from alignment.system.terminal import make_table
from benchmarks.measuring import medians, seconds_of, take_turns

NUMBERS = ("ms/update", "times adamw", "bytes of state a parameter")


def timed_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of an optimiser step on random gradients, until its device has done it."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    def step_to_end() -> None:
        optimizer.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the gradients
    return seconds_of(step_to_end)


def describe_state(optimizer: torch.optim.Optimizer, parameters: int) -> str:
    """Bytes of state for each parameter, by device."""
    sizes: Counter[str] = Counter()
    for state in optimizer.state_dict()["state"].values():
        for tensor in state.values():
            sizes[str(tensor.device)] += tensor.nbytes
    words = [f"{size / parameters:.2f} on {device}" for device, size in sizes.items()]
    return ", ".join(words)


def main(layers: int = 4, width: int = 1024, repeats: int = 5) -> None:
    """Print a row for each optimiser.

    Args:
        layers: Square matrices whose weights are updated.
        width: Of each.
        repeats: Turns of each optimiser that count; the one before them compiles.
    """
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda:0"
    matrices = [torch.nn.Linear(width, width) for _ in range(layers)]
    model = torch.nn.Sequential(*matrices).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizers = {name: make_optimizer(model, 1e-5, 0.0, name) for name in OPTIMIZERS}
    turns = {name: partial(timed_step, model, own) for name, own in optimizers.items()}
    seconds = medians(take_turns(turns, repeats))
    rows = []
    for name, optimizer in optimizers.items():
        ratio = seconds[name] / seconds["adamw"]
        state = describe_state(optimizer, parameters)
        rows.append((name, f"{seconds[name] * 1e3:.1f}", f"{ratio:.1f}", state))
    title = f"{parameters:,} parameters on {device}"
    Console().print(make_table(title, ("optimizer", *NUMBERS), rows, numbers=NUMBERS))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
