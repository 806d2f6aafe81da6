"""One of two ranks that choose their kernels: prints, as JSON, what it takes where no rank's
kernels fail, and where rank 1's do.

    python kernels_of_ranks.py RANK FOLDER_OF_A_MODEL FILE_THAT_BOTH_WRITE"""

import json
import sys

import torch
import torch.distributed as dist

from alignment.core.tokens import collate
from alignment.model import kernel_choice, kernels
from alignment.policy import sharded
from alignment.policy.policy import Objective, PolicyConfig
from alignment.system.errors import UserError
from benchmarks.fake_ranks import FakeRanks, open_shard


def as_on_a_gpu(name: str, devices: list[torch.device]) -> list[str]:
    return ["compiled", "eager"] if name == "auto" else [name]


def fail(*arguments):
    raise RuntimeError("no compiler")


def total(rows, log_probs, mask):
    return (log_probs * mask).sum(), {}


def choose(ranks: FakeRanks, folder: str, name: str) -> dict:
    """The kernels of a policy of two ranks, and its gradient's norm; or why they are refused."""
    config = PolicyConfig(folder, ("cpu", "cpu"), "float32", micro_batch_tokens=30, kernels=name)
    try:
        shard = open_shard(ranks, config, replicated=False)
    except UserError as refusal:
        return {"refusal": str(refusal)}
    batch = collate([(1, 2, 3), (5, 6), (7,)], [(4, 5), (8, 9, 3), (2,)], 0)
    shard._own_rows = lambda batch, rows: [0, 1, 2]  # pyright: ignore[reportAttributeAccessIssue]
    list(shard.accumulate(batch, range(3), Objective(total, entropy=False)))
    return {"kernels": shard.kernels, "norm": shard.gradient().norm().item()}


def main() -> None:
    rank = int(sys.argv[1])
    folder, meeting = sys.argv[2:]
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = FakeRanks(2, 2, rank, rank)
    kernels.compiled = lambda function: function
    kernel_choice.kernels_to_try = sharded.kernels_to_try = as_on_a_gpu
    results = [choose(ranks, folder, name) for name in ("eager", "auto", "compiled")]
    if rank == 1:
        kernels.gated = fail
    kernels.FUSED.clear()
    results += [choose(ranks, folder, name) for name in ("auto", "compiled")]
    print(json.dumps(results))
    dist.destroy_process_group()


main()
