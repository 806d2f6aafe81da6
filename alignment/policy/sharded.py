"""A policy whose work ranks of torch.distributed share (`system/ranks.py`): rank 0's side of it,
and what each rank holds, a part of every weight, gradient and moment (torch's FSDP2,
`fully_shard`), of which every method is called on all ranks."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils._pytree import tree_map_only

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, cut_by_tokens, packed_tokens, rows_by_prompt, split_rows
from alignment.model.huggingface import PreTrainedModel, decoder_layers
from alignment.model.kernel_choice import KERNELS, kernels_to_try, use_kernels
from alignment.model.saving import persistent_buffers, save_model
from alignment.policy import lora
from alignment.policy.micro_batches import gathered_bytes
from alignment.policy.policy import MicroBatchResult, Objective, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.system.errors import UserError
from alignment.system.processes import START_SECONDS
from alignment.system.ranks import Ranks, lead
from alignment.system.terminal import say_once


def _count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def deal(rows: Sequence[Row], ranks: int) -> list[list[int]]:
    """The row numbers of each rank: rows of one prompt together, and packed tokens as even as
    dealing the largest group first to the rank with the fewest makes them. A function of the rows
    alone. Some ranks may get none."""
    groups = []
    for numbers in rows_by_prompt(rows).values():
        tokens = packed_tokens([rows[number] for number in numbers])
        groups.append((tokens, numbers))
    rows_of_rank: list[list[int]] = [[] for _ in range(ranks)]
    tokens_of_rank = [0] * ranks
    for tokens, numbers in sorted(groups, key=lambda group: -group[0]):
        rank = tokens_of_rank.index(min(tokens_of_rank))
        rows_of_rank[rank] += numbers
        tokens_of_rank[rank] += tokens
    return [sorted(numbers) for numbers in rows_of_rank]


def _compute(
    model: PreTrainedModel, forward: Callable[[PreTrainedModel], torch.Tensor]
) -> torch.Tensor:
    """`forward` of the model, as a method that FSDP2 wraps. It takes no tensor: FSDP2 would move it
    to the rank's GPU, while what plans a micro-batch is read on the host."""
    return forward(model)


class Shard(SingleDevicePolicy):
    """One rank's part of the policy, on the device of its place on its machine, with `deal`'s share
    of the rows. With `replicated` each rank has all of the weights, else each machine, whose ranks
    share them (hybrid sharding, Zhao et al. 2023, arXiv:2304.11277, section 3.2.2). Weights are
    gathered in fp32, layer by layer; gradients are sums over ranks."""

    model: Any  # what FSDP2 makes of a model has further methods
    gathers_weights = True

    def __init__(self, ranks: Ranks, config: PolicyConfig, replicated: bool):
        self.ranks = ranks
        parts = ranks.local_count  # Of one copy of the weights, which the ranks of a machine hold.
        if replicated:
            parts = 1
        self.mesh_shape = {"copies": ranks.count // parts, "parts": parts}
        super().__init__(dataclasses.replace(config, devices=(config.devices[ranks.local_rank],)))
        self.model.reshard()  # what a check of the model has gathered

    def _load(self) -> PreTrainedModel:
        model: Any = lora.load_trained_model(self.policy_config, ("cpu",))
        device = torch.device(self.policy_config.devices[0])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        mesh = init_device_mesh(
            device.type, tuple(self.mesh_shape.values()), mesh_dim_names=tuple(self.mesh_shape)
        )
        # torch gives the default of half an hour to groups of some of the ranks.
        for name in self.mesh_shape:
            _set_pg_timeout(timedelta(seconds=self.ranks.timeout), mesh.get_group(name))
        model.compute = MethodType(_compute, model)
        wrapped: list[Any] = [*decoder_layers(model), model]
        mesh_of_weights = mesh["parts"]
        if self.mesh_shape["copies"] > 1:
            mesh_of_weights = mesh
        for module in wrapped:
            fully_shard(module, mesh=mesh_of_weights)
            # A plain sum over ranks: gloo cannot multiply it by a factor.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        # "compute" now gathers the embedding, the last norm and the head before it runs.
        register_fsdp_forward_method(model, "compute")
        return model

    def run(self, forward: Callable[[PreTrainedModel], torch.Tensor]) -> torch.Tensor:
        return self.model.compute(forward)

    def _use_kernels(self, name: str) -> str:
        """Those that `use_kernels` accepts on every rank, or else eager ones, for a small model
        that each rank has to itself: a kernel that fails in a pass of the policy would leave
        weights gathered, and other ranks waiting. Raises `UserError` on all ranks where kernels
        that are named fail on one."""
        device = torch.device(self.policy_config.devices[0])
        if kernels_to_try(name, [device]) == ["eager"]:
            return "eager"
        # Kernels that compile take longer than those that fail.
        group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_SECONDS))
        refusal = ""
        chosen = "eager"
        try:
            small = lora.small_trained_model(self.model, self.policy_config, device)
            chosen = use_kernels(small, name, self.dtype)
        except Exception as error:  # Of any kind: other ranks wait for this one's choice.
            refusal = str(error)
        places = [torch.tensor(-1) for _ in range(self.ranks.count)]
        dist.all_gather(places, torch.tensor(list(KERNELS).index(chosen)), group=group)
        if any(place != places[0] for place in places):
            refusal = refusal or f"--kernels {name}: other ranks' kernels differ or fail"
        if refusal and name != "auto":
            raise UserError(refusal)
        if refusal:
            say_once(f"{refusal}; eager ones compute")
            return "eager"
        KERNELS[chosen](self.model)
        return chosen

    def accumulate(
        self, batch: Batch, rows: Sequence[int], objective: Objective
    ) -> Iterator[MicroBatchResult]:
        # rank 0's seed is everyone's, and each rank draws for its own rows
        if self.policy_config.dropout:
            torch.manual_seed(torch.initial_seed() + self.ranks.rank)
        results = super().accumulate(batch, self._own_rows(batch, rows), objective)
        # On the CPU, from where tensors can be sent to another rank.
        sent = []
        for result in results:
            values = tree_map_only(torch.Tensor, torch.Tensor.cpu, vars(result))
            sent.append(MicroBatchResult(**values))
        return iter(self._gathered(sent))

    def in_micro_batches(
        self, compute: Callable, rows: Sequence[Row], parameters=()
    ) -> Iterator[tuple[Sequence[int], object]]:
        """See `MicroBatchedModel.in_micro_batches`. Computes empty ones too, until there are as
        many as on every other rank."""
        pieces = cut_by_tokens(rows, self.micro_batch_tokens)
        most_of_ranks = torch.tensor(len(pieces))
        dist.all_reduce(most_of_ranks, op=dist.ReduceOp.MAX)
        most = int(most_of_ranks)
        empty: list[list[int]] = [[]] * (most - len(pieces))
        for number, piece in enumerate(pieces + empty, start=1):
            # copies of the model sum a step's gradient once
            self.model.set_requires_all_reduce(number == most)
            result = compute(piece)
            if piece:
                yield piece, result

    @property
    def _process_group(self) -> Any:
        """The group of all ranks that carries calls: torch's type of it has an int for no group."""
        return self.ranks.call_group

    def _own_rows(self, batch: Batch, rows: Sequence[int] | None) -> list[int]:
        rows = range(len(batch.labels)) if rows is None else rows
        split = split_rows(batch.input_ids, batch.response_mask)
        rows_of_ranks = deal([split[row] for row in rows], self.ranks.count)
        return [rows[i] for i in rows_of_ranks[self.ranks.rank]]

    def _gathered(self, results: list) -> list:
        """All ranks' results in their order on rank 0, and nothing on the others."""
        by_rank: list[Any] | None = None
        if self.ranks.rank == 0:
            by_rank = [None] * self.ranks.count
        dist.gather_object(results, by_rank, group=self._process_group)
        return list(chain.from_iterable(by_rank or []))

    def _token_values(
        self,
        batch: Batch,
        distribution: Distribution,
        rows: Sequence[int] | None,
        names: Sequence[str],
    ) -> torch.Tensor:
        own_rows = self._own_rows(batch, rows)
        values_KBT = super()._token_values(batch, distribution, own_rows, names)
        # A backward pass would do it: weights that are gathered now must not outlive the next step.
        self.model.reshard()
        dist.all_reduce(values_KBT)  # every row is 0 on all ranks but one
        return values_KBT

    def choose_micro_batch_tokens(self, longest: int, previous: int = 0) -> str | None:
        """As many tokens as fit on the rank with the least memory, beside `gathered_bytes`; ranks
        on a CPU share the host's."""
        # the first is the whole model
        wrapped: list[Any] = [m for m in self.model.modules() if isinstance(m, FSDPModule)]
        layers = [_count_parameters(layer) for layer in wrapped[1:]]
        outside = _count_parameters(self.model) - sum(layers)
        whole = gathered_bytes(layers, outside, self.dtype.itemsize)
        processes = self.ranks.local_count if self.devices[0] == "cpu" else 1
        message = super().choose_micro_batch_tokens(longest, previous, processes, whole)
        tokens = torch.tensor(self.micro_batch_tokens)
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
        self.micro_batch_tokens = int(tokens)
        return message

    def save(self, folder: Path, tokenizer) -> None:
        writes = self.ranks.rank == 0
        weights = {}
        # Each is gathered by all ranks, and kept by the one that writes: a machine's memory may not
        # hold a whole model for each of its ranks.
        for name, tensor in chain(self.weights(), persistent_buffers(self.model)):
            if writes:
                weights[name] = tensor.cpu()
        lora.save(self.model, folder, writes)
        if writes:
            save_model(self.model, folder, tokenizer, weights)

    def save_optimizer(self, folder: Path) -> None:
        """See `Policy.save_optimizer`: the first rank that holds a part writes it. Raises OSError
        on all if one cannot."""
        if self.mesh_shape["parts"] == 1:
            if self.ranks.rank == 0:
                super().save_optimizer(folder)
            return
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        first = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        try:
            save(
                dict(self.optimizer_tensors()),
                storage_writer=writer,
                planner=first,
                process_group=self._process_group,
            )
        except CheckpointException as error:  # no `Exception`; it prints all ranks' tracebacks
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(f"{folder} could not be written by rank {rank}: {cause}") from None


class ShardedPolicy:
    """A `Policy` of one rank a device. Ranks share the rows of a batch, and sum their gradients.

    The ranks of a machine share its copy of the weights, gradients and moments; if `replicated`,
    every rank has a copy. What a rank holds is a `Shard`, whose methods have the names and
    arguments of `Policy`'s. Raises `RunStopped` where a rank is lost."""

    def __init__(self, config: PolicyConfig, replicated: bool = False):
        self.ranks = lead(len(config.devices), config.rank_timeout)
        self.replicated = replicated
        self._own: Any = self.ranks.open("alignment.policy.sharded:Shard", config, replicated)
        self.devices = config.devices
        self.dtype = self._own.dtype
        self.config = self._own.config

    @property
    def micro_batch_tokens(self) -> int:
        return self._own.micro_batch_tokens

    def model_on(self, device: str, dtype) -> None:
        return None

    def __getattr__(self, method: str) -> Callable:
        """The method of this name of every rank's part, which returns rank 0's result; of rank 0's
        part alone where that needs no other rank, and so works after one is lost."""
        getattr(Shard, method)  # raises AttributeError where it has none
        if self.replicated and method in ("weights", "save", "save_optimizer"):
            return getattr(self._own, method)
        return partial(self.ranks.call, method)


ReplicatedPolicy = partial(ShardedPolicy, replicated=True)
