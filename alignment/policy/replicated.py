"""What one rank of a replicated policy holds and computes. Every method is called on all ranks together."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, packed_tokens, split_rows, take_rows
from alignment.policy.policy import MicroBatchResult, Objective, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.system.ranks import Ranks


def deal(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """The row numbers of each rank: rows of one prompt together, and packed tokens as even as dealing the largest group first
    to the rank with the fewest makes them. A function of the rows alone. Some ranks may get none."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (prompt, _) in enumerate(rows):
        groups[prompt].append(number)
    tokens = {prompt: packed_tokens([rows[number] for number in numbers]) for prompt, numbers in groups.items()}
    hands: list[list[int]] = [[] for _ in range(ranks)]
    dealt = [0] * ranks
    for prompt in sorted(groups, key=lambda prompt: -tokens[prompt]):
        poorest = dealt.index(min(dealt))
        hands[poorest] += groups[prompt]
        dealt[poorest] += tokens[prompt]
    return [sorted(hand) for hand in hands]


class Replica(SingleDevicePolicy):
    """One rank's copy of the policy, on the device of its place on its machine. Its share of the rows is `deal`'s."""

    def __init__(self, ranks: Ranks, config: PolicyConfig):
        self.ranks = ranks
        super().__init__(replace(config, devices=(config.devices[ranks.local_rank],)))

    def _own_rows(self, batch: Batch, rows: Sequence[int] | None) -> list[int]:
        rows = range(len(batch.labels)) if rows is None else rows
        split = split_rows(batch.input_ids, batch.response_mask)
        return [rows[i] for i in deal([split[row] for row in rows], self.ranks.count)[self.ranks.rank]]

    def log_probs(self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None) -> torch.Tensor:
        values_BT = super().log_probs(batch, distribution, self._own_rows(batch, rows))
        dist.all_reduce(values_BT)  # every row is 0 on all ranks but one
        return values_BT

    def accumulate(self, batch: Batch, rows: Sequence[int], objective: Objective) -> Iterator[MicroBatchResult]:
        results = [to_cpu(result) for result in super().accumulate(batch, self._own_rows(batch, rows), objective)]
        self._sum_gradient()
        return iter(self._gathered(results))

    def _sum_gradient(self) -> None:
        """Sum the gradient over the ranks: every denominator is of the whole optimiser step."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()

    def _gathered(self, results: list) -> list:
        """All ranks' results in their order on rank 0, and nothing on the others."""
        everything = [None] * self.ranks.count if self.ranks.rank == 0 else None
        dist.gather_object(results, everything, group=self.ranks.calls)
        return [result for results in everything or [] for result in results]

    def supervised_log_probs(self, batch: Batch) -> Iterator[torch.Tensor]:
        own = self._own_rows(batch, None)
        parts = super().supervised_log_probs(take_rows(batch, own)) if own else ()
        return iter(self._gathered([part.cpu() for part in parts]))

    def choose_micro_batch_tokens(self, longest: int, previous: int = 0) -> str | None:
        """As many tokens as fit on the rank with the least memory; ranks on a CPU share the host's."""
        message = super().choose_micro_batch_tokens(longest, previous)
        if message is None and (previous or self.policy_config.micro_batch_tokens):
            return None
        share = self.ranks.local_count if self.devices[0] == "cpu" else 1
        tokens = torch.tensor([self.micro_batch_tokens // share, message is None])
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
        self.micro_batch_tokens = max(1, tokens[0].item())
        return message


def to_cpu(result: MicroBatchResult) -> MicroBatchResult:
    """A result whose tensors can be sent to another rank."""
    sums = {name: value.cpu() if torch.is_tensor(value) else value for name, value in result.sums.items()}
    return MicroBatchResult(list(result.rows), result.log_probs.cpu(), sums)
