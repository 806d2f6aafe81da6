"""What ranks send one another in one optimiser step: counted on a fake process group, against the closed form.

uv run -m benchmarks.collectives

One process is rank 0 of up to 64, whose collectives move nothing (torch's backend "fake"), so that their number and sizes are
those of a real step and the values are not. Exit code 1 where any differs.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment.core.records import Batch
from alignment.core.tokens import collate
from alignment.data.embedded import embedded_model
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.sharded import Shard
from alignment.system.terminal import make_table

WORLDS = ((1, 1), (1, 2), (1, 4), (2, 2), (1, 8), (2, 8), (4, 8), (8, 8))  # machines, ranks of each
GROUPS = 4  # prompt groups of each rank, a micro-batch each


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind on one rank: how many, and the bytes of what they gather or reduce."""

    number: int = 0
    bytes: int = 0


def closed_form(shard: Shard, micro_batches: int) -> dict[str, Traffic]:
    """The traffic of a step of so many micro-batches, in fp32. Each micro-batch gathers every layer twice, for its forward and
    its backward pass, and the rest of the model once, and scatters their gradients, summed over a machine's ranks. The last
    one sums them over the copies of the model. A step also agrees on the number of micro-batches, 8 bytes, and on the norm."""
    copies, parts = shard.mesh_shape["copies"], shard.mesh_shape["parts"]
    padded = {name: 4 * -(-p.shape[0] // parts) * parts * p[0].numel() for name, p in shard.model.named_parameters()}
    total, layers = sum(padded.values()), shard.model.config.num_hidden_layers
    in_layers = sum(size for name, size in padded.items() if ".layers." in name)
    gathered = Traffic(micro_batches * (2 * layers + 1), micro_batches * (total + in_layers)) if parts > 1 else Traffic()
    scattered = Traffic(micro_batches * (layers + 1), micro_batches * total) if parts > 1 else Traffic()
    summed = Traffic(layers + 1, total // parts) if copies > 1 else Traffic()
    norm = Traffic(1, 4 * len(padded)) if parts > 1 else Traffic()  # of every parameter, in one tensor
    return {
        "all-gather": gathered,
        "reduce-scatter": scattered,
        "all-reduce": Traffic(summed.number + 1 + norm.number, summed.bytes + 8 + norm.bytes),
    }


KINDS = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"} | {
    "allreduce": "all-reduce", "all_reduce": "all-reduce",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts collectives and their bytes, those within operations on sharded tensors too."""

    def __init__(self):
        super().__init__()
        self.numbers, self.bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as operations on its parts
        if function.namespace in ("c10d", "_c10d_functional"):
            for name, kind in KINDS.items():
                if name in function.__name__:
                    self.numbers[kind] += 1
                    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
                    self.bytes[kind] += max(tensor.nbytes for tensor in tensors)
        return function(*args, **(kwargs or {}))


NO_MODULES = SimpleNamespace(
    __enter__=lambda: None, __exit__=lambda: None, name="step", is_bw=False, activation_checkpointing=False,
    module_parents_dict={"step": ()},
)  # fmt: skip
"""In place of CommDebugMode's record of modules, which fails where a module is not called through its model."""


def negative_log_likelihood(rows: Sequence[int], log_probs_bt: torch.Tensor, mask_bt: torch.Tensor):
    return -(log_probs_bt * mask_bt).sum(), {}


def batch_of(ranks: int) -> Batch:
    """`GROUPS` groups of two equal prompts for each rank, each as long as the others."""
    prompts = [(5 + number % 90, 5 + number // 90, *range(5, 15)) for number in range(GROUPS * ranks) for _ in range(2)]
    return collate(prompts, [tuple(range(20, 28))] * len(prompts), pad_token_id=0)


def counted(machines: int, local: int, replicated: bool, model_path: str):
    """A step's traffic on rank 0 as counted and by `closed_form`, and CommDebugMode's number of collectives."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=machines * local)
    try:
        ranks = SimpleNamespace(rank=0, local_rank=0, count=machines * local, local_count=local, seconds=60.0)
        shard = Shard(ranks, PolicyConfig(model_path, ("cpu",) * local, "float32", micro_batch_tokens=30), replicated)
        shard._gathered = lambda results: results  # Python objects, which go to rank 0 over gloo
        batch = batch_of(ranks.count)
        debug = CommDebugMode()
        debug.advanced_module_tracker = NO_MODULES
        with debug, Counting() as counting:
            results = list(shard.accumulate(batch, range(len(batch.labels)), Objective(negative_log_likelihood)))
            shard.clip_gradient(1.0)
            shard.step(1e-3)
        kinds = ("all-gather", "reduce-scatter", "all-reduce")
        found = {kind: Traffic(counting.numbers[kind], counting.bytes[kind]) for kind in kinds}
        return found, closed_form(shard, len(results)), debug.get_total_counts()
    finally:
        dist.destroy_process_group()


def main() -> None:
    rows, differ = [], False
    with tempfile.TemporaryDirectory() as folder:
        model_path = str(embedded_model("tiny", folder))
        for replicated in (False, True):
            for machines, local in WORLDS:
                found, expected, total = counted(machines, local, replicated, model_path)
                equal = found == expected and total == sum(traffic.number for traffic in found.values())
                differ |= not equal
                cells = (f"{traffic.number}, {traffic.bytes:,} B" for traffic in found.values())
                kind = "replicated" if replicated else "sharded"
                rows.append((f"{machines} x {local}", kind, *cells, "equal" if equal else f"{expected}, {total}"))
    headings = ("machines x ranks", "kind", "all-gather", "reduce-scatter", "all-reduce", "closed form")
    Console(width=160).print(make_table("one step on one rank: collectives, and bytes gathered or reduced", headings, rows))
    sys.exit(differ)


if __name__ == "__main__":
    main()
