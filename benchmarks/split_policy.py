"""How far a split policy's GPUs work at the same time: a simulation of one update, in the order in which it is issued.

uv run -m benchmarks.split_policy --model Qwen/Qwen2.5-Math-1.5B

Costs, in units of one layer's forward pass over one micro-batch: a backward pass 2, the head as its parameters are to a
layer's, a move between devices `transfer`. A device does what it was given in the order in which it was given;
the order is `placement.issue_order`, which the update itself goes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from alignment.checks import resolve_model
from alignment.policy.layer_split import IN_FLIGHT
from alignment.policy.loading import load_config
from alignment.policy.placement import ModelShape, issue_order, partition_layers


@dataclass(frozen=True)
class Stage:
    """Consecutive modules on one device, and what their forward pass costs."""

    device: str
    cost: float


def stages(shape: ModelShape, devices: Sequence[str]) -> list[Stage]:
    """A model's way through its devices, forwards; a tied head goes back to the device of the embedding."""
    placed = partition_layers(shape, devices)
    costs = dict.fromkeys(shape.layers, 1.0)
    head = shape.parameters[shape.head] or max(shape.parameters.values())  # a tied one is the embedding, larger than a layer
    costs[shape.head] = head / shape.parameters[shape.layers[0]]
    way: list[Stage] = []
    for name, cost in costs.items():
        if way and way[-1].device == placed[name] and name != shape.head:
            cost += way.pop().cost
        way.append(Stage(placed[name], cost))
    return way


def finished(way: Sequence[Stage], order: Iterable[tuple[str, int]], transfer: float) -> tuple[float, dict[str, float]]:
    """When the last of the work issued in this order is done, and how long each device has worked."""
    free: dict[str, float] = {stage.device: 0.0 for stage in way}
    busy = dict.fromkeys(free, 0.0)
    ready: dict[int, float] = {}
    where: dict[int, str] = {}
    for what, number in order:
        *body, head = way
        stretch = {
            "forward": [(stage.device, stage.cost) for stage in body],
            "head": [(head.device, 3 * head.cost)],
            "backward": [(stage.device, 2 * stage.cost) for stage in reversed(body)],
        }[what]
        at = ready.get(number, 0.0)
        for device, cost in stretch:
            at = max(at + transfer * (where.get(number, device) != device), free[device]) + cost
            where[number] = device
            free[device] = at
            busy[device] += cost
        ready[number] = at
    return max(free.values()), busy


def main(
    model: str = "qwen2.5-math-1.5b", gpus: tuple[int, ...] = (2, 3, 4, 5), micro_batches: int = 16, transfer: float = 0.1
):
    """Print, for each number of GPUs, the time of one after another, of the update's order, and of no waiting at all."""
    config = QWEN if model == "qwen2.5-math-1.5b" else load_config(resolve_model(model, "checkpoints"))
    shape = ModelShape.from_config(config)
    table = Table(title=f"{micro_batches} micro-batches, {len(shape.layers)} layers, a move costs {transfer:g} of a layer")
    for heading in ("GPUs", "one in flight", f"{IN_FLIGHT} a GPU", "ratio", "the busiest GPU alone", "at work"):
        table.add_column(heading, justify="right")
    for number in gpus:
        way = stages(shape, [f"cuda:{index}" for index in range(number)])
        heads_first = way[-1].device != way[-2].device
        naive, _ = finished(way, issue_order(micro_batches, 1, heads_first), transfer)
        ours, busy = finished(way, issue_order(micro_batches, IN_FLIGHT * number, heads_first), transfer)
        share = sum(busy.values()) / (ours * number)
        cells = f"{naive:.0f}", f"{ours:.0f}", f"{naive / ours:.2f}", f"{max(busy.values()):.0f}", f"{share:.0%}"
        table.add_row(str(number), *cells)
    Console().print(table)


QWEN = Qwen2Config(
    num_hidden_layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip

if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
