"""How far a split policy's GPUs work at the same time: a simulation of one update, in the order in
which it is issued.

uv run -m benchmarks.split_policy --model Qwen/Qwen2.5-Math-1.5B

Costs, in units of one layer's forward pass over one micro-batch: a backward pass 2, the head as its
parameters are to a layer's, a move between devices `transfer`. A device does what it was given in
the order in which it was given; the order is `placement.issue_order`, which the update itself goes
by. A move goes by streams of its pair of devices, as `loading.copy_between` has it, or, as torch's
own copies do, by both devices' own streams: each then waits for all that the other was given
before. For comparison: 1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503), where each
device has an order of its own, and sharding over the same devices, whose gathers are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from alignment.builders.base_models import resolve_model
from alignment.model.device_map import partition_layers
from alignment.model.loading import load_config
from alignment.model.shape import ModelShape
from alignment.policy.layer_split import IN_FLIGHT, issue_order


@dataclass(frozen=True)
class Stage:
    """Consecutive modules on one device, and what their forward pass costs."""

    device: str
    cost: float


def stages(shape: ModelShape, devices: Sequence[str]) -> list[Stage]:
    """A model's way through its devices, forwards; a tied head goes back to the device of the
    embedding."""
    placed = partition_layers(shape, devices)
    costs = dict.fromkeys(shape.layers, 1.0)
    # a tied one is the embedding, larger than a layer
    head = shape.parameters[shape.head] or max(shape.parameters.values())
    costs[shape.head] = head / shape.parameters[shape.layers[0]]
    way: list[Stage] = []
    for name, cost in costs.items():
        if way and way[-1].device == placed[name] and name != shape.head:
            cost += way.pop().cost
        way.append(Stage(placed[name], cost))
    return way


def stretches(way: Sequence[Stage]) -> dict[str, list[tuple[str, float]]]:
    """The devices that each part of a micro-batch's work goes through, with its cost there."""
    *body, head = way
    return {
        "forward": [(stage.device, stage.cost) for stage in body],
        "head": [(head.device, 3 * head.cost)],
        "backward": [(stage.device, 2 * stage.cost) for stage in reversed(body)],
    }


def finished(
    way: Sequence[Stage], order: Iterable[tuple[str, int]], transfer: float, barriers: bool = False
) -> tuple[float, dict[str, float]]:
    """When the last of the work issued in this order is done, and how long each device has
    worked."""
    free: dict[str, float] = {stage.device: 0.0 for stage in way}
    busy, links = dict.fromkeys(free, 0.0), {}
    ready: dict[int, float] = {}
    where: dict[int, str] = {}
    for what, number in order:
        at = ready.get(number, 0.0)
        for device, cost in stretches(way)[what]:
            source = where.get(number, device)
            if barriers and source != device:
                free[source] = free[device] = at = max(at, free[source], free[device]) + transfer
            elif source != device:
                links[source, device] = at = max(at, links.get((source, device), 0.0)) + transfer
            at = max(at, free[device]) + cost
            where[number] = device
            free[device] = at
            busy[device] += cost
        ready[number] = at
    return max(free.values()), busy


def one_forward_one_backward(
    way: Sequence[Stage], micro_batches: int, in_flight: int, transfer: float
) -> float:
    """When 1F1B is done: a device takes the oldest backward (or head) that is there, else a
    forward, with at most `in_flight` micro-batches between the two."""
    *body, _ = way
    parts = stretches(way)
    tasks = (
        [("forward", i) for i in range(len(body))]
        + [("head", 0)]
        + [("backward", i) for i in range(len(body))]
    )
    done: dict[tuple[int, int], float] = {}  # (micro-batch, number of the task) -> when
    free = {stage.device: 0.0 for stage in way}
    while len(done) < micro_batches * len(tasks):
        options = []
        for number in range(micro_batches):
            task = next((t for t in range(len(tasks)) if (number, t) not in done), None)
            if task is None:
                continue
            what, stage = tasks[task]
            device, cost = parts[what][stage]
            if what == "forward":
                back = len(tasks) - 1 - stage
                begun = sum((n, task) in done for n in range(micro_batches))
                if begun - sum((n, back) in done for n in range(micro_batches)) >= in_flight:
                    continue
            before = done.get((number, task - 1), 0.0)
            from_device = parts[tasks[task - 1][0]][tasks[task - 1][1]][0] if task else device
            start = max(free[device], before + transfer * (from_device != device))
            options.append((start, what == "forward", number, task, device, cost))
        start, _, number, task, device, cost = min(options)
        free[device] = done[number, task] = start + cost
    return max(free.values())


def main(
    model: str = "qwen2.5-math-1.5b",
    gpus: tuple[int, ...] = (2, 3, 4, 5),
    micro_batches: int = 16,
    transfer: float = 0.1,
):
    """Print, for each number of GPUs, how many times faster than one micro-batch after another each
    way is."""
    config = (
        QWEN if model == "qwen2.5-math-1.5b" else load_config(resolve_model(model, "checkpoints"))
    )
    shape = ModelShape.from_config(config)
    table = Table(
        title=(
            f"{micro_batches} micro-batches, {len(shape.layers)} layers, a move costs {transfer:g}"
            " of a layer"
        )
    )
    headings = (
        f"{IN_FLIGHT} a GPU, torch's copies",
        f"{IN_FLIGHT} a GPU",
        "at work",
        "1F1B",
        "sharded, no gathers counted",
    )
    for heading in ("GPUs", "one after another", *headings):
        table.add_column(heading, justify="right")
    for number in gpus:
        way = stages(shape, [f"cuda:{index}" for index in range(number)])
        heads_first = way[-1].device != way[-2].device
        in_flight = min(micro_batches, IN_FLIGHT * number)
        naive, _ = finished(way, issue_order(micro_batches, 1, heads_first), transfer)
        barred, _ = finished(
            way, issue_order(micro_batches, in_flight, heads_first), transfer, barriers=True
        )
        ours, busy = finished(way, issue_order(micro_batches, in_flight, heads_first), transfer)
        others = (
            one_forward_one_backward(way, micro_batches, in_flight, transfer),
            sum(busy.values()) / number,
        )
        ratios = [f"{naive / time:.2f}" for time in (barred, ours, *others)]
        ratios.insert(2, f"{sum(busy.values()) / (ours * number):.0%}")
        table.add_row(str(number), f"{naive:.0f}", *ratios)
    Console().print(table)


QWEN = Qwen2Config(
    num_hidden_layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)

if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
