"""What one rank of a sharded policy holds: a part of every weight, gradient and moment (torch's FSDP2, `fully_shard`)."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, cut_by_tokens, take_rows
from alignment.policy.frozen import model_log_probs
from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.loading import load_model
from alignment.policy.policy import Objective
from alignment.policy.replicated import Replica
from alignment.policy.single_device import MicroBatch

ONE_TOKEN = Batch(
    torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
)
"""What a rank computes, and discards, while others have a micro-batch and it has none: collectives need every rank."""


class Root(torch.nn.Module):
    """Calls a function with the model, within torch's hooks, which gather the embedding, the last norm and the head first."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable):
        return compute(self.model)


class Shard(Replica):
    """One rank's part of the policy. The ranks of one machine share the weights; each machine has all of them (hybrid sharding,
    Zhao et al. 2023, arXiv:2304.11277, section 3.2.2). Weights are gathered in fp32, layer by layer, and gradients summed."""

    def _load(self, model_path: str) -> PreTrainedModel:
        model = load_model(model_path, ("cpu",), torch.float32)
        if (device := torch.device(self.devices[0])).type == "cuda":
            torch.cuda.set_device(device)
        here, machines = self.ranks.local_count, self.ranks.count // self.ranks.local_count
        sizes = {"machines": machines, "ranks": here} if machines > 1 else {"ranks": here}
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.root = Root(model)
        stacks = [child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)]
        for module in (*(layer for stack in stacks for layer in stack), self.root):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)  # a sum over ranks, in which
            module.set_force_sum_reduction_for_comms(True)  # no factor is multiplied: gloo cannot
        return model

    def run(self, function: Callable, *arguments):
        return self.root(lambda model: function(model, *arguments))

    def _micro_batches(
        self, batch: Batch, rows: Sequence[int], split: Sequence[Row], objective: Objective
    ) -> Iterator[tuple[MicroBatch, Sequence[int]]]:
        for piece in self._pieces(split):
            if piece:
                micro_batch = MicroBatch(self, batch, [rows[i] for i in piece], objective)
            else:
                micro_batch = MicroBatch(self, ONE_TOKEN, [0], dataclasses.replace(objective, loss=zero))
            micro_batch.head()
            micro_batch.backward()
            if piece:
                yield micro_batch, piece

    def _pieces(self, split: Sequence[Row]) -> list[list[int]]:
        """The micro-batches as indices into `split`, with empty ones until there are as many as on every other rank."""
        pieces = cut_by_tokens(split, self.micro_batch_tokens)
        most = torch.tensor(len(pieces))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return pieces + [[] for _ in range(most.item() - len(pieces))]

    @torch.no_grad()
    def _forward_passes(self, batch: Batch, rows: Sequence[int], distribution: Distribution, supervised: bool) -> list:
        """(rows, log-probs [b, t] on the CPU) of each micro-batch of this rank, without gradient."""
        self.model.eval()
        results = []
        for piece in self._pieces(self._split(batch, rows, supervised)):
            numbers = [rows[i] for i in piece]
            part = take_rows(batch, numbers) if piece else ONE_TOKEN
            results.append((numbers, self.run(model_log_probs, part, distribution, self.dtype).cpu()))
        self.root.reshard()  # which a backward pass would do: what is gathered now must not outlive the next step
        return [(numbers, values) for numbers, values in results if numbers]

    def log_probs(self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None) -> torch.Tensor:
        values_BT = torch.zeros(batch.labels.shape)
        for numbers, part_bt in self._forward_passes(batch, self._own_rows(batch, rows), distribution, False):
            values_BT[numbers, : part_bt.shape[1]] = part_bt
        dist.all_reduce(values_BT)
        return values_BT

    def supervised_log_probs(self, batch: Batch) -> Iterator[torch.Tensor]:
        parts = self._forward_passes(batch, self._own_rows(batch, None), Distribution(), True)
        return iter(self._gathered([values for _, values in parts]))

    def _sum_gradient(self) -> None:
        """Do nothing: the backward pass has summed each rank's part."""

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        return whole(super().clip_gradient(max_norm))

    def gradient(self) -> torch.Tensor:
        parameters = list(self.model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters if p.requires_grad]
        return torch.cat([whole(gradient).flatten().cpu() for gradient in gradients])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, whole(parameter.detach())) for name, parameter in self.model.named_parameters())

    def model_on(self, device: str, dtype: torch.dtype) -> None:
        return None

    def save(self, folder: Path, tokenizer) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.weights()}
        if self.ranks.rank == 0:
            self.model.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, whole(tensor).cpu()) for name, tensor in super().optimizer_tensors())

    def save_optimizer(self, file: Path) -> None:
        if self.ranks.rank == 0:
            super().save_optimizer(file)
        else:
            deque(self.optimizer_tensors(), maxlen=0)  # takes part in gathering them

    def stored(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all ranks' parts; called on all of them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def zero(rows: Sequence[int], log_probs_bt: torch.Tensor, mask_bt: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """A loss that is 0 and has a gradient of zeros."""
    return log_probs_bt.sum() * 0, {}
