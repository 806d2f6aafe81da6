"""The policy: the trained weights with their devices, optimiser and parallelism. No other module
changes a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from alignment.core.records import Batch, Distribution
from alignment.policy.optimizers import AdamSettings
from alignment.system.registry import import_object

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    MicroBatchLoss = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]


@dataclass(frozen=True)
class PolicyConfig:
    """The initial weights of a policy, its devices and its optimiser."""

    model_path: str
    """Hugging Face folder or hub name of the initial weights."""
    devices: tuple[str, ...]
    """In layer order, such as ("cuda:0", "cuda:1")."""
    dtype: str
    """Type of matrix products: "float32" or "bfloat16". Trained weights are kept in float32."""
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    micro_batch_tokens: int = 0
    """0: as many as fit the free memory (`Policy.choose_micro_batch_tokens`)."""
    rank_timeout: float = 60.0
    """Seconds after which a rank that does not answer is lost."""
    lora_rank: int = 0
    """Rank of adapters, which are then all that is trained; 0: there are none."""
    lora_alpha: int = 32
    lora_targets: str = ""
    """Names of the adapted layers, with commas between; empty: all linear layers but the head."""
    seed: int = 0
    """Of the adapters' matrices A."""
    checkpoint: str = ""
    """Folder of adapters, and the weights that they make, to go on with; empty: new ones."""
    compile: bool = False
    """Whether torch compiles the layers."""
    dropout: bool = False
    """Whether gradients are of a model with the dropout of its config."""
    use_liger_kernel: bool = False
    """Whether Liger's kernels compute parts of the layers."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    gradient_checkpointing: bool = False
    """Whether layers are computed again in backward, also where they would fit."""
    kernels: str = "eager"
    """What computes the work between matrix products: an entry of `kernel_choice.KERNELS`, or
    "auto"."""

    @property
    def adam(self) -> AdamSettings:
        """The numbers of AdamW, and of what other optimisers have of it."""
        return AdamSettings(self.adam_beta1, self.adam_beta2, self.adam_eps)


@dataclass(frozen=True)
class Objective:
    """The loss that the policy minimises: `loss(rows, log_probs [b, t], mask [b, t])` of each
    micro-batch, with its row numbers in the batch, returns a differentiable scalar, and tensors to
    report. Log-probs are those of `distribution`; with `entropy`, a micro-batch also reports
    "entropy_sum" and "sampling_entropy_sum" (before and after truncation). With
    `differentiable_entropy` the loss has a fourth argument: the entropies [b, t] before truncation,
    in nats, with their gradient."""

    loss: MicroBatchLoss
    distribution: Distribution = Distribution()
    entropy: bool = True
    differentiable_entropy: bool = False


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
        ...

    def log_probs_and_entropies(
        self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_probs`, and the entropies [B, T], in nats, of the distribution before truncation, of
        one forward pass. Only --token_selection and --entropy_target call it."""
        ...

    def base_log_probs(self, batch: Batch, distribution: Distribution) -> torch.Tensor:
        """`log_probs` of the weights without adapters."""
        ...

    def use_adapters(self, kind: Literal["trained", "random"]) -> None:
        """Compute with random adapters, other than 0, instead of the trained ones, until it is
        called with "trained"."""

    def accumulate(
        self, batch: Batch, rows: Sequence[int], objective: Objective
    ) -> Iterator[MicroBatchResult]:
        """Add the gradient of some rows of a batch, micro-batch by micro-batch. Without rows the
        gradient is zeros."""
        ...

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down if its norm exceeds `max_norm`; returns the norm before
        clipping."""
        ...

    def step(self, learning_rate: float) -> None:
        """Make one optimiser step, then discard the gradient."""

    def drop_gradient(self) -> None:
        """Discard the gradient."""

    def gradient(self) -> torch.Tensor:
        """The gradient of all that is trained as one flat tensor [D] on the CPU, zeros for weights
        without a gradient."""
        ...

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) of every weight, unsharded, with its adapter's part; tied
        weights once."""
        ...

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

    def reset_optimizer(self) -> None:
        """Forget the optimiser's state, moments and number of updates, as if it were new. Only
        --reference_reset_optimizer calls it."""


@dataclass(frozen=True)
class PolicyKind:
    """One kind of policy: the path of its class, and the facts about it that planning, checks and
    --help need before any weight, or torch, is loaded. The defaults are all that is known of a
    class of a user's own."""

    path: str
    """package.module:name of the class; its constructor takes a `PolicyConfig`."""
    summary: str = ""
    """What it is, in a few words, for --help."""
    one_device: bool = False
    """Whether it computes on one device only, so that a plan for several is refused; else it is
    made for several, and gains nothing on one."""
    ranked: bool = False
    """Whether each device has a process of its own, a rank of torch.distributed; else one process
    has all devices."""
    holds: Literal["layers", "copy", "part"] = "layers"
    """What a device holds of the weights, gradients and moments: some of the layers, a copy of
    everything, or an equal part of every weight."""
    moves: tuple[Literal["hidden states", "weights", "gradients"], ...] = ()
    """What devices send one another in an update: hidden states from layer to layer, weights that
    each pass gathers, gradients that ranks sum."""
    keeps_gradients: bool = False
    """Whether the memory of the gradients stays taken from one update to the next, as that of
    buffers which are zeroed; else `drop_gradient` frees it."""
    lends_model: bool = True
    """Whether `Policy.model_on` may return the model, for a sampler in the policy's process to
    read; else such a sampler has a copy of the weights, which plans count."""
    starts_from_base: bool = False
    """Whether its first weights are those of `PolicyConfig.model_path`, so that an engine may load
    the same ones before the policy is there; else engines wait for the policy."""
    refused_optimizers: tuple[str, ...] = ()
    """Keys of `OPTIMIZERS` that it does not take."""

    @property
    def divides_weights(self) -> bool:
        """Whether each of several devices holds less than all of the weights."""
        return self.holds != "copy" and not self.one_device

    def processes(self, devices: int) -> int:
        """Processes on a machine where the policy has so many devices."""
        return devices if self.ranked else 1

    def parts(self, devices: int) -> int:
        """Parts that a machine's devices cut each weight into; a device holds one of them."""
        return devices if self.holds == "part" else 1

    def copies(self, devices: int) -> int:
        """Copies of all weights on a machine."""
        return devices if self.holds == "copy" else 1

    def stages(self, devices: int) -> int:
        """Devices that a micro-batch passes one after another, while others are on their way."""
        return devices if "hidden states" in self.moves else 1


# --policy_parallelism -> the kind
POLICIES: Mapping[str, PolicyKind] = {
    "single": PolicyKind(
        "alignment.policy.single_device:SingleDevicePolicy",
        summary="the whole model on one device",
        one_device=True,
        starts_from_base=True,
    ),
    "layer_split": PolicyKind(
        "alignment.policy.layer_split:LayerSplitPolicy",
        summary="some layers on each device (the hand-built device map)",
        moves=("hidden states",),
        starts_from_base=True,
    ),
    "replicated": PolicyKind(
        "alignment.policy.sharded:ReplicatedPolicy",
        summary="one process a device, each with all weights",
        ranked=True,
        holds="copy",
        moves=("gradients",),
        lends_model=False,
        starts_from_base=True,
        refused_optimizers=("adamw_8bit",),
    ),
    "sharded": PolicyKind(
        "alignment.policy.sharded:ShardedPolicy",
        summary="one process a device, each with a part of every weight",
        ranked=True,
        holds="part",
        moves=("weights", "gradients"),
        lends_model=False,
        starts_from_base=True,
        refused_optimizers=("adamw_8bit",),
    ),
}

DEVICE_MAP = "device_map"
AUTO = "auto"
# --policy_parallelism -> what it means, of values that become one of `POLICIES`
RESOLVED_KINDS: Mapping[str, str] = {
    DEVICE_MAP: (
        "single on one device, layer_split on several; of several processes replicated where"
        " weights, gradients and moments fit on each, else sharded"
    ),
    AUTO: "of RL the fastest kind that fits, by the plan; else as device_map of processes",
}


def kind_of_devices(name: str, devices: int) -> str:
    """The kind of policy that --policy_parallelism `name` is, for one process with so many devices;
    a name that is no `DEVICE_MAP` stays."""
    if name != DEVICE_MAP:
        return name
    return "single" if devices == 1 else "layer_split"


def kind_of_ranks(ranks: int, fits_each_device: Callable[[], bool]) -> str:
    """The kind of policy of so many ranks on all machines, where --policy_parallelism leaves it
    open. `fits_each_device` says whether a device holds all weights, gradients and moments."""
    if ranks == 1:
        return "single"
    return "replicated" if fits_each_device() else "sharded"


def kinds_in_words() -> str:
    """Each value of --policy_parallelism but a user's own, with what it is."""
    summaries = {name: kind.summary for name, kind in POLICIES.items()}
    summaries |= RESOLVED_KINDS
    return "; ".join(f"{name}: {summary}" for name, summary in summaries.items() if summary)


def policy_kind(name: str) -> PolicyKind:
    """The kind of policy that is called `name` in `POLICIES`, or that a user's own class
    `package.module:name` is."""
    return POLICIES.get(name, PolicyKind(name))


def open_policy(name: str, config: PolicyConfig) -> Policy:
    """Load a policy of the kind that is called `name`, as for `policy_kind`. Raises `UserError` for
    a bad name or bad weights."""
    policy_class: Any = import_object("--policy_parallelism", policy_kind(name).path)
    return policy_class(config)
