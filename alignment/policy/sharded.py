"""What one rank of a policy of several processes holds: a part of every weight, gradient and moment (torch's FSDP2,
`fully_shard`). Every method is called on all ranks together."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, cut_by_tokens, packed_tokens, split_rows, take_rows
from alignment.policy.frozen import computed_rows, model_log_probs
from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.loading import load_model
from alignment.policy.policy import MicroBatchResult, Objective, PolicyConfig
from alignment.policy.single_device import MicroBatch, SingleDevicePolicy
from alignment.system.ranks import Ranks

ONE_TOKEN = Batch(*[torch.zeros(1, 1, dtype=torch.int64)] * 2, torch.ones(1, 1, dtype=torch.bool))
"""What a rank computes, and discards, while others have a micro-batch and it has none: collectives need every rank."""


def deal(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """The row numbers of each rank: rows of one prompt together, and packed tokens as even as dealing the largest group first
    to the rank with the fewest makes them. A function of the rows alone. Some ranks may get none."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (prompt, _) in enumerate(rows):
        groups[prompt].append(number)
    tokens = {prompt: packed_tokens([rows[number] for number in numbers]) for prompt, numbers in groups.items()}
    rows_of_rank: list[list[int]] = [[] for _ in range(ranks)]
    tokens_of_rank = [0] * ranks
    for prompt in sorted(groups, key=lambda prompt: -tokens[prompt]):
        rank = tokens_of_rank.index(min(tokens_of_rank))
        rows_of_rank[rank] += groups[prompt]
        tokens_of_rank[rank] += tokens[prompt]
    return [sorted(numbers) for numbers in rows_of_rank]


class Shard(SingleDevicePolicy):
    """One rank's part of the policy, on the device of its place on its machine; its share of the rows is `deal`'s. With
    `replicated` each rank has all of the weights; else the ranks of one machine share them, and each machine has all (hybrid
    sharding, Zhao et al. 2023, arXiv:2304.11277, section 3.2.2). Weights are gathered in fp32, layer by layer, gradients
    summed: every denominator is of the whole optimiser step."""

    def __init__(self, ranks: Ranks, config: PolicyConfig, replicated: bool):
        self.ranks = ranks
        here = 1 if replicated else ranks.local_count
        self.mesh_shape = {"copies": ranks.count // here, "parts": here}
        super().__init__(dataclasses.replace(config, devices=(config.devices[ranks.local_rank],)))

    def _load(self, model_path: str) -> PreTrainedModel:
        model = load_model(model_path, ("cpu",), torch.float32)
        if (device := torch.device(self.devices[0])).type == "cuda":
            torch.cuda.set_device(device)
        mesh = init_device_mesh(device.type, tuple(self.mesh_shape.values()), mesh_dim_names=tuple(self.mesh_shape))
        model.compute = MethodType(lambda model, function, *arguments: function(model, *arguments), model)
        stacks = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)]
        for module in (*(layer for stack in stacks for layer in stack), model):
            fully_shard(module, mesh=mesh if self.mesh_shape["copies"] > 1 else mesh["parts"])
            module.set_gradient_divide_factor(1.0)  # a sum over ranks, in which
            module.set_force_sum_reduction_for_comms(True)  # no factor is multiplied: gloo cannot
        register_fsdp_forward_method(model, "compute")  # which first gathers the embedding, the last norm and the head
        return model

    def run(self, function: Callable, *arguments):
        return self.model.compute(function, *arguments)

    def accumulate(self, batch: Batch, rows: Sequence[int], objective: Objective) -> Iterator[MicroBatchResult]:
        results = [to_cpu(result) for result in super().accumulate(batch, self._own_rows(batch, rows), objective)]
        return iter(self._gathered(results))

    def _micro_batches(
        self, batch: Batch, rows: Sequence[int], split: Sequence[Row], objective: Objective
    ) -> Iterator[tuple[MicroBatch, Sequence[int]]]:
        pieces = self._pieces(split)
        for number, piece in enumerate(pieces, start=1):
            self.model.set_requires_all_reduce(number == len(pieces))  # copies of the model sum a step's gradient once
            if piece:
                micro_batch = MicroBatch(self, batch, [rows[i] for i in piece], objective)
            else:
                micro_batch = MicroBatch(self, ONE_TOKEN, [0], dataclasses.replace(objective, loss=zero))
            micro_batch.head()
            micro_batch.backward()
            if piece:
                yield micro_batch, piece

    def _own_rows(self, batch: Batch, rows: Sequence[int] | None) -> list[int]:
        rows = range(len(batch.labels)) if rows is None else rows
        split = split_rows(batch.input_ids, batch.response_mask)
        return [rows[i] for i in deal([split[row] for row in rows], self.ranks.count)[self.ranks.rank]]

    def _pieces(self, split: Sequence[Row]) -> list[list[int]]:
        """The micro-batches as indices into `split`, with empty ones until there are as many as on every other rank."""
        pieces = cut_by_tokens(split, self.micro_batch_tokens)
        most = torch.tensor(len(pieces))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return pieces + [[] for _ in range(most.item() - len(pieces))]

    def _gathered(self, results: list) -> list:
        """All ranks' results in their order on rank 0, and nothing on the others."""
        everything = [None] * self.ranks.count if self.ranks.rank == 0 else None
        dist.gather_object(results, everything, group=self.ranks.calls)
        return [result for results in everything or [] for result in results]

    @torch.no_grad()
    def _forward_passes(self, batch: Batch, rows: Sequence[int], distribution: Distribution, supervised: bool) -> list:
        """(rows, log-probs [b, t] on the CPU) of each micro-batch of this rank, without gradient."""
        self.model.eval()
        results = []
        for piece in self._pieces(computed_rows(self.model, batch, rows, supervised)):
            numbers = [rows[i] for i in piece]
            part = take_rows(batch, numbers) if piece else ONE_TOKEN
            results.append((numbers, self.run(model_log_probs, part, distribution, self.dtype).cpu()))
        self.model.reshard()  # which a backward pass would do: what is gathered now must not outlive the next step
        return [(numbers, values) for numbers, values in results if numbers]

    def log_probs(self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None) -> torch.Tensor:
        values_BT = torch.zeros(batch.labels.shape)
        for numbers, part_bt in self._forward_passes(batch, self._own_rows(batch, rows), distribution, False):
            values_BT[numbers, : part_bt.shape[1]] = part_bt
        dist.all_reduce(values_BT)  # every row is 0 on all ranks but one
        return values_BT

    def supervised_log_probs(self, batch: Batch) -> Iterator[torch.Tensor]:
        parts = self._forward_passes(batch, self._own_rows(batch, None), Distribution(), True)
        return iter(self._gathered([values for _, values in parts]))

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

    def save(self, folder: Path, tokenizer) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.weights()}
        if self.ranks.rank == 0:
            self.model.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)

    def save_optimizer(self, file: Path) -> None:
        if self.ranks.rank == 0:
            super().save_optimizer(file)
        else:
            deque(self.optimizer_tensors(), maxlen=0)  # takes part in gathering them

    def stored(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def to_cpu(result: MicroBatchResult) -> MicroBatchResult:
    """A result whose tensors can be sent to another rank."""
    sums = {name: value.cpu() if torch.is_tensor(value) else value for name, value in result.sums.items()}
    return MicroBatchResult(list(result.rows), result.log_probs.cpu(), sums)


def zero(rows: Sequence[int], log_probs_bt: torch.Tensor, mask_bt: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """A loss that is 0 and has a gradient of zeros."""
    return log_probs_bt.sum() * 0, {}
