"""What ranks send one another in one optimiser step: counted on a fake process group, against the
closed form; and the closed form for a model of 1.5 billion parameters.

uv run -m benchmarks.collectives

One process is rank 0 of up to 64, whose collectives move nothing (torch's backend "fake"), so that
their number and sizes are those of a real step and the values are not. Exit code 1 where any
differs.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

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

from alignment.core.records import Batch
from alignment.core.tokens import collate
from alignment.data.embedded import embedded_model
from alignment.model.shape import empty_model
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.sharded import Shard
from alignment.system.terminal import make_table
from benchmarks.fake_ranks import fake_ranks
from tests.model.published_shapes import qwen2_1_5b

WORLDS = ((1, 1), (1, 2), (1, 4), (2, 2), (1, 8), (2, 8), (4, 8), (8, 8))  # machines, ranks of each
GROUPS = 4  # prompt groups of each rank, a micro-batch each


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind on one rank: how many, the bytes of what they gather or reduce, and
    those that the rank sends."""

    number: int = 0
    bytes: int = 0
    sent: Fraction = Fraction()

    @classmethod
    def of(cls, kind: str, number: int, size: int, ranks: int) -> "Traffic":
        """By rings of so many ranks: a gather or scatter of n bytes sends n / ranks to the next
        rank ranks - 1 times, and an all-reduce is one of each (Patarasuk and Yuan 2009, "Bandwidth
        optimal all-reduce algorithms")."""
        return cls(
            number, size, (2 if kind == "all-reduce" else 1) * Fraction(ranks - 1, ranks) * size
        )

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.number + other.number, self.bytes + other.bytes, self.sent + other.sent)


def closed_form(
    model: PreTrainedModel, copies: int, parts: int, micro_batches: int
) -> dict[str, Traffic]:
    """The traffic of a step of so many micro-batches, in fp32. Each micro-batch gathers every layer
    twice, for its forward and its backward pass, and the rest of the model once, and scatters their
    gradients, summed over a machine's ranks. The last one sums them over the copies of the model. A
    step also agrees on the number of micro-batches, 8 bytes, and on the norm."""
    padded = {
        name: 4 * -(-p.shape[0] // parts) * parts * p[0].numel()
        for name, p in model.named_parameters()
    }
    total, layers = sum(padded.values()), model.config.num_hidden_layers
    in_layers = sum(size for name, size in padded.items() if ".layers." in name)
    agreed = Traffic.of("all-reduce", 1, 8, copies * parts)
    traffic = {"all-gather": Traffic(), "reduce-scatter": Traffic(), "all-reduce": agreed}
    if parts > 1:
        norms = 4 * len(padded)  # of every parameter, in one tensor
        gathered = micro_batches * (2 * layers + 1), micro_batches * (total + in_layers)
        traffic["all-gather"] += Traffic.of("all-gather", *gathered, parts)
        traffic["reduce-scatter"] += Traffic.of(
            "reduce-scatter", micro_batches * (layers + 1), micro_batches * total, parts
        )
        traffic["all-reduce"] += Traffic.of("all-reduce", 1, norms, parts)
    if copies > 1:
        traffic["all-reduce"] += Traffic.of("all-reduce", layers + 1, total // parts, copies)
    return traffic


KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
} | {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
}


class Counting(TorchDispatchMode):
    """Counts collectives and their bytes, those within operations on sharded tensors too."""

    def __init__(self):
        super().__init__()
        self.traffic = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), Traffic())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as operations on its parts
        if function.namespace in ("c10d", "_c10d_functional"):
            for name, kind in KINDS.items():
                if name in function.__name__:
                    leaves = tree_leaves((args, kwargs))
                    size = max(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
                    self.traffic[kind] += Traffic.of(kind, 1, size, group_of(leaves).size())
        return function(*args, **(kwargs or {}))


def group_of(arguments: list) -> dist.ProcessGroup:
    """The process group among the arguments of a collective: an object, or the name of one."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str) and argument not in ("sum", "avg", "max"):
            return _resolve_process_group(argument)
    raise ValueError(f"no process group among {arguments}")


NO_MODULES = SimpleNamespace(
    __enter__=lambda: None,
    __exit__=lambda: None,
    name="step",
    is_bw=False,
    activation_checkpointing=False,
    module_parents_dict={"step": ()},
)
"""In place of CommDebugMode's record of modules, which fails where a module is not called through
its model."""


def negative_log_likelihood(rows: Sequence[int], log_probs_bt: torch.Tensor, mask_bt: torch.Tensor):
    return -(log_probs_bt * mask_bt).sum(), {}


def batch_of(ranks: int) -> Batch:
    """`GROUPS` groups of two equal prompts for each rank, each as long as the others."""
    prompts = [
        (5 + number % 90, 5 + number // 90, *range(5, 15))
        for number in range(GROUPS * ranks)
        for _ in range(2)
    ]
    return collate(prompts, [tuple(range(20, 28))] * len(prompts), pad_token_id=0)


def counted(machines: int, local: int, replicated: bool, model_path: str):
    """A step's traffic on rank 0 as counted and by `closed_form`, and CommDebugMode's number of
    collectives."""
    with fake_ranks(machines * local, local) as ranks:
        policy = PolicyConfig(model_path, ("cpu",) * local, "float32", micro_batch_tokens=30)
        shard = Shard(ranks, policy, replicated)
        shard._gathered = lambda results: results  # Python objects, which go to rank 0 over gloo
        batch = batch_of(ranks.count)
        rows = range(len(batch.labels))
        debug = CommDebugMode()
        debug.advanced_module_tracker = NO_MODULES
        with debug, Counting() as counting:
            results = list(shard.accumulate(batch, rows, Objective(negative_log_likelihood)))
            shard.clip_gradient(1.0)
            shard.step(1e-3)
        expected = closed_form(shard.model, *shard.mesh_shape.values(), len(results))
        return counting.traffic, expected, debug.get_total_counts()


def main() -> None:
    rows, differ = [], False
    with tempfile.TemporaryDirectory() as folder:
        model_path = str(embedded_model("tiny", folder))
        for replicated in (False, True):
            for machines, local in WORLDS:
                found, expected, total = counted(machines, local, replicated, model_path)
                equal = found == expected and total == sum(
                    traffic.number for traffic in found.values()
                )
                differ |= not equal
                cells = (
                    f"{traffic.number}, {traffic.bytes:,}, {round(traffic.sent):,} B"
                    for traffic in found.values()
                )
                kind = "replicated" if replicated else "sharded"
                rows.append(
                    (
                        f"{machines} x {local}",
                        kind,
                        *cells,
                        "equal" if equal else f"{expected}, {total}",
                    )
                )
    headings = (
        "machines x ranks",
        "kind",
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "closed form",
    )
    console, title = (
        Console(width=180),
        "one step on one rank: collectives, bytes gathered or reduced, and bytes sent",
    )
    console.print(make_table(title, headings, rows))
    console.print(published())
    sys.exit(differ)


def published() -> Table:
    """By the closed form, what a rank of a model of 1.5 billion parameters sends."""
    model, rows = empty_model(qwen2_1_5b()), []
    for replicated in (False, True):
        for machines, local in WORLDS:
            copies, parts = (machines * local, 1) if replicated else (machines, local)
            traffic = closed_form(model, copies, parts, GROUPS)
            within, between = (
                traffic["all-gather"] + traffic["reduce-scatter"],
                traffic["all-reduce"],
            )
            cells = (
                f"{float(part.sent) / 1e9:.2f}" for part in (within, between, within + between)
            )
            rows.append(
                (f"{machines} x {local}", "replicated" if replicated else "sharded", *cells)
            )
    title = f"Qwen2.5-Math-1.5B: GB that a rank sends in a step of {GROUPS} micro-batches"
    headings = (
        "machines x ranks",
        "kind",
        "gathered and scattered",
        "summed over copies",
        "together",
    )
    return make_table(title, headings, rows)


if __name__ == "__main__":
    main()
