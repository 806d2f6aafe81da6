"""A policy whose work ranks of torch.distributed share (`system/ranks.py`): rank 0's side of it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from alignment.core.records import Batch, Distribution
from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.policy import MicroBatchResult, Objective, PolicyConfig
from alignment.system.ranks import lead


class RankedPolicy:
    """A `Policy` of several ranks, one for each of its devices. `part` names the class of what each rank holds, whose methods
    have the names and arguments of `Policy`'s and are called on every rank. Raises `RunStopped` where a rank is lost."""

    part: str

    def __init__(self, config: PolicyConfig):
        self.ranks = lead(len(config.devices), config.rank_timeout)
        self._own = self.ranks.open(self.part, config)
        self.devices, self.dtype, self.config = config.devices, self._own.dtype, self._own.config

    @property
    def micro_batch_tokens(self) -> int:
        return self._own.micro_batch_tokens

    def log_probs(self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None) -> torch.Tensor:
        return self.ranks.call("log_probs", batch, distribution, rows)

    def base_log_probs(self, batch: Batch, distribution: Distribution) -> torch.Tensor:
        return self.ranks.call("base_log_probs", batch, distribution)

    def accumulate(self, batch: Batch, rows: Sequence[int], objective: Objective) -> Iterator[MicroBatchResult]:
        yield from self.ranks.call("accumulate", batch, rows, objective)

    def supervised_log_probs(self, batch: Batch) -> Iterator[torch.Tensor]:
        yield from self.ranks.call("supervised_log_probs", batch)

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        return self.ranks.call("clip_gradient", max_norm)

    def step(self, learning_rate: float) -> None:
        self.ranks.call("step", learning_rate)

    def drop_gradient(self) -> None:
        self.ranks.call("drop_gradient")

    def gradient(self) -> torch.Tensor:
        return self.ranks.call("gradient")

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.ranks.call("weights")

    def probe_adapters(self, on: bool) -> None:
        self.ranks.call("probe_adapters", on)

    def model_on(self, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
        return self._own.model_on(device, dtype)

    def choose_micro_batch_tokens(self, longest: int, previous: int = 0) -> str | None:
        return self.ranks.call("choose_micro_batch_tokens", longest, previous)

    def save(self, folder: Path, tokenizer) -> None:
        self.ranks.call("save", folder, tokenizer)

    def save_optimizer(self, file: Path) -> None:
        self.ranks.call("save_optimizer", file)

    def load_optimizer(self, file: Path) -> None:
        self.ranks.call("load_optimizer", file)


class ReplicatedPolicy(RankedPolicy):
    """Every rank holds the weights, gradient and moments; ranks share the rows, and sum their gradients."""

    part = "alignment.policy.replicated:Replica"

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._own.weights()

    def save(self, folder: Path, tokenizer) -> None:
        self._own.save(folder, tokenizer)  # also after another rank was lost

    def save_optimizer(self, file: Path) -> None:
        self._own.save_optimizer(file)


class ShardedPolicy(RankedPolicy):
    """Every rank of a machine holds a part of the weights, gradient and moments; each machine holds all of them."""

    part = "alignment.policy.sharded:Shard"
