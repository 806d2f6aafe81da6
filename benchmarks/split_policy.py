"""How far do a split policy's GPUs work at the same time?

    uv run -m benchmarks.split_policy
    uv run -m benchmarks.split_policy --model FOLDER --gpus 2 4 --micro_batches 32

A simulation of one update, in the order in which it is issued: how many times as fast as one
micro-batch after another, for each number of GPUs, and the share of the time that they are at work.
Costs are in units of one layer's forward pass over one micro-batch: a backward pass 2, the head as
its parameters are to a layer's, a move between devices `--transfer`. A device does what it was
given in the order in which it was given, which is that of `layer_split.issue_order`, by which the
update itself goes. A move goes by streams of its pair of devices, as `loading.copy_between` has it,
or, as torch's own copies do, by both devices' own streams: each then waits for all that the other
was given before. For comparison: 1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503),
where each device has an order of its own, and sharding over the same devices, whose gathers are not
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from transformers import PretrainedConfig, Qwen2Config

from alignment.builders.base_models import resolve_model
from alignment.model.device_map import partition_layers
from alignment.model.loading import load_config
from alignment.model.shape import ModelShape
from alignment.policy.layer_split import IN_FLIGHT, issue_order
from alignment.system.terminal import make_table

QWEN_NAME = "qwen2.5-math-1.5b"
QWEN = Qwen2Config(
    num_hidden_layers=28,
    hidden_size=1536,
    intermediate_size=8960,
    num_attention_heads=12,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
)
HEADINGS = (
    "GPUs",
    "one after another",
    f"{IN_FLIGHT} a GPU, torch's copies",
    f"{IN_FLIGHT} a GPU",
    "at work",
    "1F1B",
    "sharded, no gathers counted",
)

# What a micro-batch needs, as `issue_order` names it.
FORWARD = "forward"
HEAD = "head"
BACKWARD = "backward"


# --- the work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Work of one micro-batch on one device, and its cost."""

    device: str
    cost: float


def make_stages(shape: ModelShape, devices: Sequence[str]) -> list[Stage]:
    """A model's way through its devices, forwards: consecutive modules on one device together, the
    head apart. A tied head goes back to the device of the embedding."""
    device_by_module = partition_layers(shape, devices)
    costs = dict.fromkeys(shape.layers, 1.0)
    # a tied head has no parameters of its own: it is the embedding, the largest module
    head_parameters = shape.parameters[shape.head] or max(shape.parameters.values())
    costs[shape.head] = head_parameters / shape.parameters[shape.layers[0]]
    stages: list[Stage] = []
    for name, cost in costs.items():
        device = device_by_module[name]
        if stages and stages[-1].device == device and name != shape.head:
            cost += stages.pop().cost
        stages.append(Stage(device, cost))
    return stages


def stages_by_action(stages: Sequence[Stage]) -> dict[str, list[Stage]]:
    """The devices that each part of a micro-batch's work goes through, with its cost there."""
    *body, head = stages
    return {
        FORWARD: body,
        HEAD: [Stage(head.device, 3 * head.cost)],  # forward and backward
        BACKWARD: [Stage(stage.device, 2 * stage.cost) for stage in reversed(body)],
    }


# --- in the order in which it is issued -----------------------------------------------------------


class Devices:
    """When each device, and each way between two, is done with what it was given."""

    def __init__(self, names: Iterable[str], transfer: float, barriers: bool):
        self.free = dict.fromkeys(names, 0.0)
        self.busy = dict.fromkeys(self.free, 0.0)
        self.free_links: dict[tuple[str, str], float] = {}
        self.transfer = transfer
        self.barriers = barriers

    def move(self, source: str, target: str, ready: float) -> float:
        """Move what is ready at that time between two devices; returns when it is there."""
        if source == target:
            return ready
        if self.barriers:
            done = max(ready, self.free[source], self.free[target]) + self.transfer
            self.free[source] = done
            self.free[target] = done
            return done
        done = max(ready, self.free_links.get((source, target), 0.0)) + self.transfer
        self.free_links[source, target] = done
        return done

    def work(self, stage: Stage, ready: float) -> float:
        """Do what is ready at that time; returns when it is done."""
        done = max(ready, self.free[stage.device]) + stage.cost
        self.free[stage.device] = done
        self.busy[stage.device] += stage.cost
        return done


@dataclass(frozen=True)
class Simulation:
    """How an update went."""

    end: float
    """When the last of its work was done."""
    work: float
    """Of all devices together."""


def simulate(
    stages: Sequence[Stage],
    order: Iterable[tuple[str, int]],
    transfer: float,
    barriers: bool = False,
) -> Simulation:
    """Do the work of (action, micro-batch) pairs in the order in which they are issued; with
    `barriers`, moves take the devices' own streams."""
    work = stages_by_action(stages)
    devices = Devices((stage.device for stage in stages), transfer, barriers)
    ready: dict[int, float] = {}  # when each micro-batch's work so far is done
    place: dict[int, str] = {}  # and on which device
    for action, number in order:
        for stage in work[action]:
            source = place.get(number, stage.device)
            arrival = devices.move(source, stage.device, ready.get(number, 0.0))
            ready[number] = devices.work(stage, arrival)
            place[number] = stage.device
    return Simulation(max(devices.free.values()), sum(devices.busy.values()))


# --- 1F1B -----------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Option:
    """A task that a device may begin; the least of several is the one that comes first."""

    start: float
    is_forward: bool
    """Backwards, and heads, come before forwards that could begin at the same time."""
    number: int
    """Of the micro-batch; the oldest comes first."""


def simulate_1f1b(
    stages: Sequence[Stage], micro_batches: int, in_flight: int, transfer: float
) -> float:
    """When 1F1B is done: a device takes the oldest backward (or head) that is there, else a
    forward, with at most `in_flight` micro-batches between the two."""
    work = stages_by_action(stages)
    tasks = [*work[FORWARD], *work[HEAD], *work[BACKWARD]]  # of each micro-batch
    forwards = len(work[FORWARD])
    next_task = [0] * micro_batches
    ready = [0.0] * micro_batches
    free = {stage.device: 0.0 for stage in stages}
    while min(next_task) < len(tasks):
        options = []
        for number, task in enumerate(next_task):
            is_forward = task < forwards
            if task == len(tasks):
                continue
            if is_forward and count_in_flight(next_task, task, len(tasks)) >= in_flight:
                continue
            arrival = ready[number]
            if task > 0 and tasks[task - 1].device != tasks[task].device:
                arrival += transfer
            start = max(free[tasks[task].device], arrival)
            options.append(Option(start, is_forward, number))
        chosen = min(options)
        stage = tasks[next_task[chosen.number]]
        done = chosen.start + stage.cost
        free[stage.device] = done
        ready[chosen.number] = done
        next_task[chosen.number] += 1
    return max(free.values())


def count_in_flight(next_task: Sequence[int], forward: int, tasks: int) -> int:
    """Micro-batches that have made this forward task, and not yet the backward task of the same
    stage: the last of the tasks belongs to the first stage."""
    backward = tasks - 1 - forward
    return sum(forward < task <= backward for task in next_task)


# --- command --------------------------------------------------------------------------------------


def make_row(shape: ModelShape, gpus: int, micro_batches: int, transfer: float) -> list[str]:
    """The cells of `HEADINGS`."""
    stages = make_stages(shape, [f"cuda:{index}" for index in range(gpus)])
    # a tied head is on the embedding's device
    heads_first = stages[-1].device != stages[-2].device
    in_flight = min(micro_batches, IN_FLIGHT * gpus)
    one_by_one = list(issue_order(micro_batches, 1, heads_first))
    in_blocks = list(issue_order(micro_batches, in_flight, heads_first))
    naive = simulate(stages, one_by_one, transfer).end
    torchs_copies = simulate(stages, in_blocks, transfer, barriers=True).end
    ours = simulate(stages, in_blocks, transfer)
    interleaved = simulate_1f1b(stages, micro_batches, in_flight, transfer)
    sharded = ours.work / gpus
    return [
        str(gpus),
        f"{naive:.0f}",
        f"{naive / torchs_copies:.2f}",
        f"{naive / ours.end:.2f}",
        f"{ours.work / (ours.end * gpus):.0%}",
        f"{naive / interleaved:.2f}",
        f"{naive / sharded:.2f}",
    ]


def find_config(model: str) -> PretrainedConfig:
    if model == QWEN_NAME:
        return QWEN
    return load_config(resolve_model(model, "checkpoints"))


def main(
    model: str = QWEN_NAME,
    gpus: tuple[int, ...] = (2, 3, 4, 5),
    micro_batches: int = 16,
    transfer: float = 0.1,
):
    """Print a row for each number of GPUs.

    Args:
        model: The model; no weights are loaded.
        gpus: Numbers of GPUs.
        micro_batches: Of the update.
        transfer: What a move between devices costs, in forward passes of a layer.
    """
    shape = ModelShape.from_config(find_config(model))
    rows = [make_row(shape, number, micro_batches, transfer) for number in gpus]
    title = (
        f"{micro_batches} micro-batches, {len(shape.layers)} layers, a move costs {transfer:g} of a"
        " layer"
    )
    Console().print(make_table(title, HEADINGS, rows, numbers=HEADINGS))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
