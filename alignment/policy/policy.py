"""The policy: the trained weights with their devices, optimiser and parallelism. Nobody else touches a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from alignment.core.records import Batch, Distribution
from alignment.system.registry import find, import_object

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    MicroBatchLoss = Callable[[Sequence[int], torch.Tensor, torch.Tensor], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


@dataclass(frozen=True)
class PolicyConfig:
    """Where a policy comes from and how it is trained."""

    model_path: str
    """Hugging Face folder or hub name of the weights to begin with."""
    devices: tuple[str, ...]
    """In layer order, such as ("cuda:0", "cuda:1")."""
    dtype: str
    """Type of matrix products: "float32" or "bfloat16". Trained weights are kept in float32."""
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    micro_batch_tokens: int = 0
    """Tokens computed at once; 0: what the free memory allows (`Policy.choose_micro_batch_tokens`)."""


@dataclass(frozen=True)
class Objective:
    """What the policy descends.

    `loss(rows, log_probs [b, t], mask [b, t])` is called for each micro-batch with its row numbers in the batch; it returns a
    scalar with its graph, and tensors to report. Log-probs are taken under `distribution`; with `entropy`, each micro-batch
    reports "entropy_sum" too. `supervised` batches go through the model and its head as one graph, and count every row's last
    label as a token when the batch is cut into micro-batches.
    """

    loss: MicroBatchLoss
    distribution: Distribution = Distribution()
    entropy: bool = True
    supervised: bool = False


@dataclass(frozen=True)
class MicroBatchResult:
    """The rows of one micro-batch, their log-probs [b, t] without gradient, and what the loss reported, "loss" included.

    `sums["tokens"]` is the number of tokens that were computed, a prompt that several rows share counted once.
    """

    rows: Sequence[int]
    log_probs: torch.Tensor
    sums: Mapping[str, torch.Tensor | int]


class Policy(Protocol):
    """All that the rest of the code may do with the trained weights.

    Batches are on the CPU, [B, T], right-padded; row numbers choose among their rows. Weights have their Hugging Face names.
    """

    devices: tuple[str, ...]
    config: PretrainedConfig
    dtype: torch.dtype
    """Of matrix products."""
    micro_batch_tokens: int

    def log_probs(self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Log-probs [B, T] of a batch's responses, on the CPU, without gradient; 0 elsewhere and in rows not among `rows`."""

    def accumulate(self, batch: Batch, rows: Sequence[int], objective: Objective) -> Iterator[MicroBatchResult]:
        """Add the gradient of some rows of a batch, micro-batch by micro-batch. Without rows the gradient is zeros."""

    def supervised_log_probs(self, batch: Batch) -> Iterator[torch.Tensor]:
        """The log-probs [b, t] of each micro-batch of a supervised batch, without gradient, without dropout."""

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down where its norm exceeds `max_norm`; returns the norm before that."""

    def step(self, learning_rate: float) -> None:
        """Make one optimiser step with the gradient, and drop the gradient."""

    def drop_gradient(self) -> None:
        """Forget the gradient."""

    def gradient(self) -> torch.Tensor:
        """The gradient of all trained weights as one flat tensor [D] on the CPU, zeros where there is none."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Every weight, whole, by its name; tied weights once."""

    def model_on(self, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
        """The policy's own model, to be read only, where it sits whole on `device` in `dtype`; else None."""

    def choose_micro_batch_tokens(self, longest: int, previous: int = 0) -> str | None:
        """Decide `micro_batch_tokens` where it was left open, from the memory that is free now. `longest`: tokens of the
        longest row; `previous`: what the run used before it was stopped. Returns a message for the user, or None."""

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write weights and tokenizer as a Hugging Face folder."""

    def save_optimizer(self, file: Path) -> None:
        """Write the optimiser's state as safetensors."""

    def load_optimizer(self, file: Path) -> None:
        """Read what `save_optimizer` wrote."""


POLICIES: Mapping[str, str] = {
    "single": "alignment.policy.single_device:SingleDevicePolicy",
    "layer_split": "alignment.policy.layer_split:LayerSplitPolicy",
}
"""--policy_parallelism -> the class that is made from a `PolicyConfig`."""


def policy_kind(parallelism: str, devices: Sequence[str]) -> str:
    """The kind that --policy_parallelism names, with "auto" decided by the number of devices."""
    if parallelism != "auto":
        return parallelism
    return "single" if len(devices) == 1 else "layer_split"


def check_parallelism(parallelism: str) -> None:
    """Raise `UserError` where --policy_parallelism names no kind of policy."""
    if parallelism != "auto" and parallelism not in POLICIES:
        find("--policy_parallelism", parallelism, {"auto": "", **POLICIES}, wrap=lambda policy_class: policy_class)


def open_policy(kind: str, config: PolicyConfig) -> Policy:
    """Load a policy of one of the kinds in `POLICIES`, or of a class named as package.module:name.

    Raises `UserError` for weights that are missing or damaged, and for a name that cannot be imported.
    """
    return import_object("--policy_parallelism", POLICIES.get(kind, kind))(config)
