"""The policy: the trained weights with their devices, optimiser and parallelism. No other module
changes a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from alignment.core.records import Batch, Distribution
from alignment.system.registry import import_object

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    MicroBatchLoss = Callable[
        [Sequence[int], torch.Tensor, torch.Tensor], tuple[torch.Tensor, Mapping[str, torch.Tensor]]
    ]


@dataclass(frozen=True)
class PolicyConfig:
    """The initial weights of a policy, its devices and its optimiser."""

    model_path: str  # Hugging Face folder or hub name of the initial weights
    devices: tuple[str, ...]  # In layer order, such as ("cuda:0", "cuda:1")
    # Type of matrix products: "float32" or "bfloat16". Trained weights are kept in float32.
    dtype: str
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    micro_batch_tokens: int = 0
    """0: as many as fit the free memory (`Policy.choose_micro_batch_tokens`)."""
    rank_timeout: float = 60.0  # Seconds after which a rank that does not answer is lost.
    # Rank of adapters (`policy/lora.py`), which are then all that is trained; 0: there are none.
    lora_rank: int = 0
    lora_alpha: int = 32
    # Names of the adapted layers, with commas between; empty: all linear layers but the head.
    lora_targets: str = ""
    seed: int = 0  # Of the matrices A.
    checkpoint: str = ""
    """Folder of adapters, and the weights that they make, to go on with; empty: new ones."""
    compile: bool = False  # Whether torch compiles the layers (`packing.compile_layers`).
    # Whether gradients are of a model with the dropout of its config (`model/dropout.py`).
    dropout: bool = False
    use_liger_kernel: bool = False
    """Whether Liger's kernels compute parts of the layers (`loading.use_liger_kernel`)."""


@dataclass(frozen=True)
class Objective:
    """The loss that the policy minimises: `loss(rows, log_probs [b, t], mask [b, t])` of each
    micro-batch, with its row numbers in the batch, returns a differentiable scalar, and tensors to
    report. Log-probs are those of `distribution`; with `entropy`, a micro-batch also reports
    "entropy_sum" and "sampling_entropy_sum" (before and after truncation)."""

    loss: MicroBatchLoss
    distribution: Distribution = Distribution()
    entropy: bool = True


@dataclass(frozen=True)
class MicroBatchResult:
    """The rows of one micro-batch, their log-probs [b, t] without gradient, and the sums that the
    loss reported, with "loss", and with "tokens", the number of computed tokens, of which a shared
    prompt's count once."""

    rows: Sequence[int]
    log_probs: torch.Tensor
    sums: Mapping[str, torch.Tensor | int]


class Policy(Protocol):
    """The whole interface to the trained weights. Batches are on the CPU, [B, T], right-padded;
    `rows` are row numbers."""

    devices: tuple[str, ...]
    config: PretrainedConfig
    dtype: torch.dtype  # Type of matrix products
    micro_batch_tokens: int

    def log_probs(
        self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Log-probs [B, T] of a batch's responses, on the CPU, without gradient. Prompts, padding
        and other rows are 0."""

    def base_log_probs(self, batch: Batch, distribution: Distribution) -> torch.Tensor:
        """`log_probs` of the weights without adapters."""

    def use_adapters(self, kind: Literal["trained", "random"]) -> None:
        """Compute with random adapters, other than 0, instead of the trained ones, until it is
        called with "trained"."""

    def accumulate(
        self, batch: Batch, rows: Sequence[int], objective: Objective
    ) -> Iterator[MicroBatchResult]:
        """Add the gradient of some rows of a batch, micro-batch by micro-batch. Without rows the
        gradient is zeros."""

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down if its norm exceeds `max_norm`; returns the norm before
        clipping."""

    def step(self, learning_rate: float) -> None:
        """Make one optimiser step, then discard the gradient."""

    def drop_gradient(self) -> None:
        """Discard the gradient."""

    def gradient(self) -> torch.Tensor:
        """The gradient of all that is trained as one flat tensor [D] on the CPU, zeros for weights
        without a gradient."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) of every weight, unsharded, with its adapter's part; tied
        weights once."""

    def model_on(self, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
        """The policy's model, for reading only, if all of it is on `device` in `dtype`; else
        None."""

    def choose_micro_batch_tokens(self, longest: int, previous: int = 0) -> str | None:
        """Set `micro_batch_tokens`, if it is 0, from the free memory. `longest`: tokens of the
        longest row; `previous`: the value before the run was resumed, or 0. Returns a message for
        the user, or None."""

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write weights and tokenizer as a Hugging Face folder, and adapters, in PEFT's format, to
        its folder adapter/."""

    def save_optimizer(self, folder: Path) -> None:
        """Write the optimiser's state as safetensors, of which there is a file for each process
        that holds a part."""

    def load_optimizer(self, folder: Path) -> None:
        """Read what `save_optimizer` of any kind of policy, of any number of processes, wrote."""


POLICIES: Mapping[
    str, str
] = {  # --policy_parallelism -> the policy class; its constructor takes a `PolicyConfig`.
    "single": "alignment.policy.single_device:SingleDevicePolicy",
    "layer_split": "alignment.policy.layer_split:LayerSplitPolicy",
    "replicated": "alignment.policy.sharded:ReplicatedPolicy",
    "sharded": "alignment.policy.sharded:ShardedPolicy",
}
RANKED = ("replicated", "sharded")  # those of one process a device


def open_policy(kind: str, config: PolicyConfig) -> Policy:
    """Load a policy; `kind` is a key of `POLICIES` or package.module:name. Raises `UserError` for a
    bad name or bad weights."""
    return import_object("--policy_parallelism", POLICIES.get(kind, kind))(config)
