"""The sizes of a training step: what its bytes depend on beside the model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from alignment.planning.passes import ComputedModel


class SampledRows(NamedTuple):
    """The responses that a phase samples."""

    prompts: int
    responses: int  # To each prompt.
    longest: int  # Tokens of the longest response.
    truncated: bool = False  # Whether top-p of their own leaves tokens out.


@dataclass(frozen=True)
class StepShape:
    """What a training step needs to know to count its bytes."""

    card: int  # Bytes of each GPU, or of a host's for each process.
    policy_parallelism: str  # A key of `POLICIES`.
    itemsize: int  # Bytes of a number in matrix products: 2 under autocast to bfloat16, else 4.
    optimizer: str  # A key of `OPTIMIZERS`.
    micro_batch_tokens: int  # 0: what `choose_micro_batch_tokens` would take.
    update_tokens: int
    """Of an update's rows, a prompt of several rows counted once: no micro-batch has more."""
    parallel: int  # Micro-batches at once, which share these tokens.
    prompt: int  # Tokens of the longest prompt.
    max_new_tokens: int  # Of the longest response.
    group_size: int  # Responses to each prompt of training.
    sampled: Mapping[str, SampledRows]
    """"sampling" and "evaluation" -> what they sample."""
    truncated: bool  # Whether top-p or top-k leaves tokens out.
    passes: frozenset[str]  # Of "old_log_probs" and "reference", those that the loss needs.
    frozen_passes: frozenset[str]
    """Of `passes`, those that a frozen model on the reference's device computes: a reference, or a
    copy of the old policy."""
    vllm: bool  # Whether vLLM samples, or our own decoding.
    gpu_memory_utilization: float | None
    """vLLM's share of a GPU's memory, for each engine; None: `engine_share`."""
    engines: int  # On a GPU that samples and evaluates.
    sleeps: bool
    """Whether a vLLM engine on a GPU of the policy's sleeps while the trainer computes."""
    layers: float = 1.0
    """The largest share of the model's layers on one device: `peak_bytes` sets it."""
    largest_micro_batch: int = 0
    """Tokens of the largest micro-batch of a real update; 0: as many as there may be."""
    teacher_model: ComputedModel | None = None
    """The model of --teacher; None without."""
    gradient_checkpointing: bool = False
    """Whether layers are computed twice, also where one pass would fit."""
    draws_rollouts: bool = True
    """Whether responses are sampled; worked solutions (--train_on solutions) are not."""
    kernels: str = "eager"
    """The policy's kernels, a key of `KEPT_MLP_VECTORS`."""
    own_processes: frozenset[str] = frozenset()
    """Of "sampling", "reference" and "teacher", those that our own code computes in processes of
    their own."""
    prepares_updates: bool = False
    """Whether the policy makes a forward pass of a mini-batch before its update, which needs the
    entropies of all tokens."""

    @property
    def frozen(self) -> int:
        """Frozen models kept on the reference's device."""
        return len(self.frozen_passes)

    @property
    def rollout_tokens(self) -> int:
        """Tokens of a rollout, each prompt counted once, where all are the longest."""
        rows = self.sampled["sampling"]
        return rows.prompts * (self.prompt + rows.responses * rows.longest)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.prompt + self.max_new_tokens

    @property
    def largest_group(self) -> int:
        """Tokens of the longest prompt, counted once, with all its responses."""
        return self.prompt + self.group_size * self.max_new_tokens

    @property
    def in_bfloat16(self) -> bool:
        """Whether matrix products are in 16 bits, under autocast."""
        return self.itemsize == 2
