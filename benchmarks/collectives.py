"""What does a rank send in one optimiser step: as counted on a fake process group, and by a closed
form?

    uv run -m benchmarks.collectives

Number of collectives, bytes that they gather or reduce, and bytes that a rank sends for them, of a
replicated and of a sharded policy over 1 to 64 ranks. One process is rank 0, whose collectives move
nothing (torch's backend "fake"), so that their number and sizes are those of a real step and the
values are not. A second table has the closed form's gigabytes for a model of 1.5 billion
parameters. Exit code 1 where a count differs from the closed form or from torch's CommDebugMode.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from alignment.data.embedded import embedded_model
from alignment.model.shape import empty_model
from alignment.policy.policy import Objective, PolicyConfig
from alignment.system.terminal import make_table
from benchmarks.fake_ranks import fake_ranks, open_shard
from benchmarks.workloads import make_batch, negative_log_likelihood
from tests.model.published_shapes import qwen2_1_5b

MICRO_BATCHES = 4  # of each rank: a prompt group each
GROUP_SIZE = 2
PROMPT = 12  # tokens
RESPONSE = 8  # tokens
MICRO_BATCH_TOKENS = 30  # room for one group's 12 + 2 x 8 tokens, not for two

ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_REDUCE = "all-reduce"
KINDS: tuple[str, ...] = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
KIND_BY_OPERATION = {
    "allgather": ALL_GATHER,
    "all_gather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "allreduce": ALL_REDUCE,
    "all_reduce": ALL_REDUCE,
}
"""The kind of a collective by what the name of torch's operation has in it."""


@dataclass(frozen=True)
class World:
    """The ranks of a policy, and whether each has a copy of the whole model; else the ranks of a
    machine share one."""

    machines: int
    local_ranks: int
    """Of each machine."""
    replicated: bool

    @property
    def ranks(self) -> int:
        return self.machines * self.local_ranks

    @property
    def copies(self) -> int:
        """Of the model."""
        if self.replicated:
            return self.ranks
        return self.machines

    @property
    def parts(self) -> int:
        """Of each copy."""
        return self.ranks // self.copies

    @property
    def labels(self) -> tuple[str, str]:
        """The first two cells of its rows."""
        parallelism = "sharded"
        if self.replicated:
            parallelism = "replicated"
        return f"{self.machines} x {self.local_ranks}", parallelism


def all_worlds() -> list[World]:
    """1 to 64 ranks on 1 to 8 machines, first sharded ones."""
    worlds = []
    for replicated in (False, True):
        for machines, local in ((1, 1), (1, 2), (1, 4), (2, 2), (1, 8), (2, 8), (4, 8), (8, 8)):
            worlds.append(World(machines, local, replicated))
    return worlds


# --- the closed form ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind on one rank."""

    number: int = 0
    bytes: int = 0
    """Of what they gather or reduce."""
    sent: Fraction = Fraction()
    """Bytes that the rank sends for them."""

    @classmethod
    def of_rings(cls, kind: str, number: int, size: int, ranks: int) -> Traffic:
        """Collectives of `size` bytes together, by rings of so many ranks: a gather or scatter of n
        bytes sends n / ranks to the next rank ranks - 1 times, and an all-reduce is one of each
        (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms")."""
        rounds = 1
        if kind == ALL_REDUCE:
            rounds = 2
        return cls(number, size, rounds * Fraction(ranks - 1, ranks) * size)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.number + other.number, self.bytes + other.bytes, self.sent + other.sent)


def closed_form(
    model: PreTrainedModel, copies: int, parts: int, micro_batches: int
) -> dict[str, Traffic]:
    """The traffic of a step of so many micro-batches, in float32, by kind.

    Each micro-batch gathers every layer twice, for its forward and its backward pass, and the rest
    of the model once, and scatters their gradients, summed over a copy's ranks. The last one sums
    them over the copies of the model. A step also agrees on the number of micro-batches, 8 bytes,
    and on the gradient's norm.
    """
    sizes = padded_bytes(model, parts)
    total = sum(sizes.values())
    in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    layers = model.config.num_hidden_layers

    agreed = Traffic.of_rings(ALL_REDUCE, 1, 8, copies * parts)
    traffic = {ALL_GATHER: Traffic(), REDUCE_SCATTER: Traffic(), ALL_REDUCE: agreed}
    if parts > 1:
        gathers = micro_batches * (2 * layers + 1)
        gathered = micro_batches * (total + in_layers)
        traffic[ALL_GATHER] += Traffic.of_rings(ALL_GATHER, gathers, gathered, parts)
        scatters = micro_batches * (layers + 1)
        scattered = micro_batches * total
        traffic[REDUCE_SCATTER] += Traffic.of_rings(REDUCE_SCATTER, scatters, scattered, parts)
        # every parameter's norm, in one tensor
        norms = 4 * len(sizes)
        traffic[ALL_REDUCE] += Traffic.of_rings(ALL_REDUCE, 1, norms, parts)
    if copies > 1:
        traffic[ALL_REDUCE] += Traffic.of_rings(ALL_REDUCE, layers + 1, total // parts, copies)
    return traffic


def padded_bytes(model: PreTrainedModel, parts: int) -> dict[str, int]:
    """Bytes of each parameter in float32, by name, its rows padded to a multiple of `parts`."""
    sizes = {}
    for name, parameter in model.named_parameters():
        rows_of_part = -(-parameter.shape[0] // parts)
        sizes[name] = 4 * rows_of_part * parts * parameter[0].numel()
    return sizes


# --- the count ------------------------------------------------------------------------------------


class TrafficCounter(TorchDispatchMode):
    """Counts collectives and their bytes, those within operations on sharded tensors too."""

    def __init__(self):
        super().__init__()
        self.traffic = dict.fromkeys(KINDS, Traffic())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as operations on its parts
        if function.namespace in ("c10d", "_c10d_functional"):
            self._count(function.__name__, tree_leaves((args, kwargs)))
        return function(*args, **kwargs)

    def _count(self, operation: str, arguments: list) -> None:
        """Add one collective. Its largest tensor is the whole of what it gathers or reduces."""
        for name, kind in KIND_BY_OPERATION.items():
            if name in operation:
                tensors = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
                size = max(tensor.nbytes for tensor in tensors)
                ranks = find_group(arguments).size()
                self.traffic[kind] += Traffic.of_rings(kind, 1, size, ranks)


def find_group(arguments: Sequence) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: an object, or the name of one. Raises
    ValueError where there is none."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str) and argument not in ("sum", "avg", "max"):
            return _resolve_process_group(argument)
    raise ValueError(f"no process group among {arguments}")


class NoModules:
    """In place of CommDebugMode's record of modules, which fails where a module is not called
    through its model."""

    name = "step"
    is_bw = False
    activation_checkpointing = False
    module_parents_dict = {"step": ()}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error) -> None:
        pass


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one step on rank 0."""

    counted: dict[str, Traffic]
    expected: dict[str, Traffic]
    """By the closed form."""
    collectives: int
    """As many as CommDebugMode counts, of all kinds."""

    @property
    def is_equal(self) -> bool:
        number = sum(traffic.number for traffic in self.counted.values())
        return self.counted == self.expected and self.collectives == number


def count_step(world: World, model_path: str) -> StepTraffic:
    """Count a step's collectives on rank 0."""
    with fake_ranks(world.ranks, world.local_ranks) as ranks:
        devices = ("cpu",) * world.local_ranks
        policy = PolicyConfig(model_path, devices, "float32", micro_batch_tokens=MICRO_BATCH_TOKENS)
        shard = open_shard(ranks, policy, world.replicated)
        groups = MICRO_BATCHES * world.ranks
        batch = make_batch(groups, GROUP_SIZE, PROMPT, RESPONSE, first_ids=90)
        debug = CommDebugMode()
        debug.advanced_module_tracker = NoModules()
        with debug, TrafficCounter() as counter:
            every_row = range(len(batch.labels))
            results = list(shard.accumulate(batch, every_row, Objective(negative_log_likelihood)))
            shard.clip_gradient(1.0)
            shard.step(1e-3)
        copies, parts = shard.mesh_shape.values()
        expected = closed_form(shard.model, copies, parts, len(results))
        return StepTraffic(counter.traffic, expected, debug.get_total_counts())


# --- tables ---------------------------------------------------------------------------------------


def counted_table(steps: Mapping[World, StepTraffic]) -> Table:
    """A row for each world: its traffic by kind, and whether the closed form has the same."""
    rows = []
    for world, step in steps.items():
        cells = []
        for traffic in step.counted.values():
            cells.append(f"{traffic.number}, {traffic.bytes:,}, {round(traffic.sent):,} B")
        verdict = "equal"
        if not step.is_equal:
            verdict = f"{step.expected}, {step.collectives}"
        rows.append([*world.labels, *cells, verdict])
    title = "one step on one rank: collectives, bytes gathered or reduced, and bytes sent"
    return make_table(title, ("machines x ranks", "kind", *KINDS, "closed form"), rows)


def published_table() -> Table:
    """By the closed form, what a rank of a model of 1.5 billion parameters sends."""
    model = empty_model(qwen2_1_5b())
    rows = []
    for world in all_worlds():
        traffic = closed_form(model, world.copies, world.parts, MICRO_BATCHES)
        within_copy = traffic[ALL_GATHER].sent + traffic[REDUCE_SCATTER].sent
        between_copies = traffic[ALL_REDUCE].sent
        sent = (within_copy, between_copies, within_copy + between_copies)
        rows.append([*world.labels, *(f"{float(size) / 1e9:.2f}" for size in sent)])
    headings = (
        "machines x ranks",
        "kind",
        "gathered and scattered",
        "summed over copies",
        "together",
    )
    title = f"Qwen2.5-Math-1.5B: GB that a rank sends in a step of {MICRO_BATCHES} micro-batches"
    return make_table(title, headings, rows)


def main() -> None:
    """Print both tables."""
    with tempfile.TemporaryDirectory() as folder:
        model_path = str(embedded_model("tiny", folder))
        steps = {world: count_step(world, model_path) for world in all_worlds()}
    console = Console(width=180)
    console.print(counted_table(steps))
    console.print(published_table())
    if not all(step.is_equal for step in steps.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
