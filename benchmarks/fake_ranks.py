"""One of many ranks that do not exist, by torch's fake process group: nothing is sent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from alignment.policy.policy import PolicyConfig
from alignment.policy.sharded import Shard


@dataclass(frozen=True)
class FakeRanks:
    """What a `Shard` reads of `alignment.system.ranks.Ranks`, as rank 0 has it."""

    count: int
    local_count: int
    """Ranks on this machine."""
    rank: int = 0
    local_rank: int = 0
    timeout: float = 60.0
    """In seconds."""


@contextmanager
def fake_ranks(count: int, local_count: int) -> Iterator[FakeRanks]:
    """Be rank 0 of `count` ranks, `local_count` of them on this machine."""
    excepthook = sys.excepthook  # torch replaces it by one that names the rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield FakeRanks(count, local_count)
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def open_shard(ranks: FakeRanks, config: PolicyConfig, replicated: bool) -> Shard:
    """Rank 0's part of a policy. It keeps its results, which are not gathered from all ranks: they
    are Python objects, which no fake process group carries."""
    shard = Shard(ranks, config, replicated)
    shard._gathered = keep_results
    return shard


def keep_results(results: list) -> list:
    """The results of one rank, in place of those of all."""
    return results
