"""What comes and goes on a device in each phase of a training step, in bytes.

A phase is a class. Its `instants` are those that may be its worst, each as kind -> bytes, beside
what stays on the device through all phases. In formulas: T tokens of the micro-batches at work, H
the hidden size, V the vocabulary, L the layers on the device, I the bytes of a number in matrix
products (4, or 2 in bfloat16)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from alignment.model.activations import (
    CACHE_BYTES,
    activation_bytes,
    checkpointed_activation_bytes,
    key_value_bytes,
    mlp_bytes,
    passing_bytes,
)
from alignment.model.loading import mlp_width
from alignment.planning.device_load import BF16, FP32, Bytes, DeviceLoad, total
from alignment.planning.head import HeadUse, head_bytes
from alignment.policy.micro_batches import (
    GATHERED_LAYERS,
    MAX_ACTIVATION_BYTES,
    ActivationRoom,
    MicroBatchNeed,
    gathered_bytes,
    tokens_that_fit,
)

END_VECTORS = 4
"""Vectors of the hidden size, in fp32, that the head keeps of a token.

Source: the last norm's input and output, of all tokens, and two of responses alone, which count as
if all tokens were responses'. Shown wrong by: the count over fake tensors of
tests/planning/test_peak.py. Read by: `layers_bytes`."""

FROZEN_NORM_VECTORS = 2
"""Vectors of the hidden size, in fp32, that a layer does not keep of a token where its norms are
frozen.

Source: each of two norms' normalised input, which only the gradient of the norm's weight needs.
Shown wrong by: that count, with adapters. Read by: `layers_bytes`."""

REMADE_IN_BACKWARD = (3, 4)
"""The share, as a fraction, of what a layer keeps for backward that its backward pass makes again.

Source: fitted to what torch's tracker counted over fake tensors. Shown wrong by: that count, where
a layer's backward pass is the peak (a small vocabulary). Read by: `Update`."""

DRAW_TENSORS = 4
"""Tensors [rows, vocabulary] in fp32 that live while our own sampler draws a token.

Source: logits, log-probs, probabilities, and their sums up to each token. Shown wrong by: torch's
peak of sampling, where the last token is it. Read by: `Decoding`."""

TRUNCATED_DRAW_TENSORS = 5
"""Tensors [rows, vocabulary] in fp32 that live while it draws with top-p or top-k.

Source: the same, and the logits that are left. Shown wrong by: the same peak. Read by:
`Decoding`."""

CACHE_COPIES = 2
"""Copies of the prompts' keys and values that are there at a time, at most.

Source: they are copied into the cache that has room for responses. Shown wrong by: torch's peak of
sampling, with long prompts and short responses. Read by: `Decoding`."""

WHOLE_GRADIENT_LAYERS = 2
"""Layers whose whole gradients a rank has at a time in backward.

Source: those of the layer at work, and those of the one before on its way to its ranks, as FSDP2
sends them. Shown wrong by: `benchmarks.rank_memory`. Read by: `RankUpdate`."""

LAYERS_DONE = 2
"""Layers that have given back what they kept, at a rank's worst instant in backward.

Source: the worst instant is that of the last layer but one, by torch's tracker. Shown wrong by:
`benchmarks.rank_memory`. Read by: `RankUpdate`."""

RANK_HOST_COPIES = 2
"""Whole copies of the weights, in fp32, that a rank on a CPU has while a checkpoint is written.

Source: one gathered, and one that safetensors is given. Shown wrong by: the resident bytes of
`benchmarks.memory` in a checkpoint. Read by: `Checkpoint`."""

MERGED_HOST_COPIES = 1
"""Whole copies of the weights, in fp32, that a process on a CPU has while it writes merged
adapters.

Source: the merged weights. Shown wrong by: the same bytes. Read by: `Checkpoint`."""


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches at work at a time on a device."""

    tokens: int  # Of all of them.
    most: int  # As many as all of them may have, however few there are.
    parallel: int  # How many they are.
    recomputed: bool  # Whether layers are computed twice (gradient checkpointing).
    recomputed_mlps: int  # Layers of which only the MLP's inside is computed twice.

    @property
    def tokens_of_one(self) -> int:
        return self.tokens // self.parallel


def micro_batches_beside(load: DeviceLoad, taken: int, tokens: int) -> MicroBatches:
    """The micro-batches of a pass over `tokens`, where `taken` bytes of the device are not free:
    as large as --micro_batch_tokens says, or as the free memory allows."""
    step = load.step
    limit = min(step.card, MAX_ACTIVATION_BYTES[load.device.partition(":")[0]])
    largest = tokens_that_fit(
        load.config,
        step.itemsize,
        ActivationRoom(step.card - taken, limit, step.layers),
        MicroBatchNeed(
            step.longest_row, step.gradient_checkpointing, step.micro_batch_tokens, step.kernels
        ),
    )
    most = step.micro_batch_tokens or largest.tokens
    # as in `cut_for_parallel`: each of several takes a group at least, and they share the rows
    parallel = 1
    if most >= step.parallel * step.largest_group:
        parallel = step.parallel
    if parallel > 1:
        even_part = -(-tokens // parallel)
        most = parallel * min(most // parallel, even_part + step.largest_group // 2)
    return MicroBatches(
        tokens=max(min(most, tokens), step.longest_row),
        most=max(most, step.longest_row),
        parallel=parallel,
        recomputed=largest.checkpointing,
        recomputed_mlps=largest.recomputed_mlps,
    )


@dataclass(frozen=True)
class Phase(ABC):
    """One phase of a step, on one device."""

    load: DeviceLoad
    name: ClassVar[str]

    @property
    @abstractmethod
    def occurs(self) -> bool:
        """Whether the device has anything to do with the phase."""

    @abstractmethod
    def instants(self) -> list[Bytes]:
        """The bytes by kind at each instant that may be the worst."""

    def worst(self) -> Bytes:
        """The bytes by kind of the worst instant; of several alike the first."""
        return max(self.instants(), key=total)


@dataclass(frozen=True)
class Decoding(Phase):
    """Our own decoding, of as many prompts at a time as have room for their keys and values; vLLM's
    bytes are its engine's.

    With P prompts of p tokens at a time, R responses to each of r tokens, and K bytes of keys and
    values a token:

        while one layer computes the prompts  K P p      and "activations" of the layer alone
        while the prompts' cache is copied    2 K P p
        while the last token is drawn         K P (p + R r)  and "logits" 4 or 5 x 4 P R V"""

    def instants(self) -> list[Bytes]:
        if self.load.step.vllm:
            return [{}]
        config = self.load.config
        step = self.load.step
        rows = step.sampled[self.name]
        token = key_value_bytes(config, step.itemsize)
        group = step.prompt + rows.responses * rows.longest
        room = CACHE_BYTES[self.load.device.partition(":")[0]]
        prompts = min(rows.prompts, max(1, room // (group * token)))
        prompt_tokens = prompts * step.prompt
        tensors = TRUNCATED_DRAW_TENSORS if step.truncated or rows.truncated else DRAW_TENSORS
        logits = FP32 * prompts * rows.responses * config.vocab_size
        return [
            {
                "keys and values": prompt_tokens * token,
                "activations": prompt_tokens * passing_bytes(config, step.itemsize),
            },
            {"keys and values": CACHE_COPIES * prompt_tokens * token},
            {"keys and values": prompts * group * token, "logits": tensors * logits},
        ]


@dataclass(frozen=True)
class Sampling(Decoding):
    """The rollout's responses, on the sampler's devices."""

    name: ClassVar[str] = "sampling"

    @property
    def occurs(self) -> bool:
        return self.load.samples and self.load.step.draws_rollouts


@dataclass(frozen=True)
class Evaluation(Decoding):
    """The test problems' responses, on the evaluation's device."""

    name: ClassVar[str] = "evaluation"

    @property
    def occurs(self) -> bool:
        return self.load.evaluates


@dataclass(frozen=True)
class LogProbPass(Phase):
    """A forward pass for log-probs alone, over all sampled rows. Nothing is kept for backward.

    "casts"        2 for each parameter of the layers here, autocast to bfloat16; a frozen
                   model's weights need none
    "activations"  T x those of the one layer that is at work
    "logits"       of the micro-batches at the head, where it is here
    "gathered"     by a rank, in fp32: what is outside the layers, and two layers, one at work
                   and the next one ahead of it"""

    @property
    @abstractmethod
    def own_modules(self) -> tuple[str, ...]:
        """The policy's modules that compute the pass; of none, a frozen model computes it."""

    @property
    def occurs(self) -> bool:
        computes = bool(self.load.frozen_models or self.own_modules)
        return computes and self.name in self.load.step.passes

    def instants(self) -> list[Bytes]:
        load = self.load
        config = load.config
        step = load.step
        work = micro_batches_beside(load, taken=0, tokens=step.rollout_tokens)
        casts = logits = gathered = 0
        if step.in_bfloat16:
            own_layers = [name for name in load.shape.layers if name in self.own_modules]
            casts = load.shape.state_bytes(own_layers, FP32) // 2
        if not self.own_modules or load.shape.head in self.own_modules:
            head = head_bytes(config, step, work.tokens_of_one, load.device, "pass")
            logits = work.parallel * head
        if load.ranked_policy:
            layers = load.layer_parameters
            outside = load.parameters - sum(layers)
            gathered = FP32 * (outside + GATHERED_LAYERS * max(layers))
        return [
            {
                "casts": casts,
                "activations": work.tokens * passing_bytes(config, step.itemsize),
                "logits": logits,
                "gathered": gathered,
            }
        ]


@dataclass(frozen=True)
class OldLogProbs(LogProbPass):
    """Log-probs under the policy that sampled: by the policy itself, or by a frozen copy of it."""

    name: ClassVar[str] = "old_log_probs"

    @property
    def own_modules(self) -> tuple[str, ...]:
        return self.load.share.modules


@dataclass(frozen=True)
class ReferenceLogProbs(LogProbPass):
    """Log-probs under the reference: a frozen model, or the policy without its adapters."""

    name: ClassVar[str] = "reference"

    @property
    def own_modules(self) -> tuple[str, ...]:
        return self.load.share.modules if self.load.has_adapters else ()


@dataclass(frozen=True)
class TeacherLogProbs(Phase):
    """Log-probs under the teacher, in micro-batches as large as the policy's: "activations" of the
    one layer of its own that is at work, and its "logits"."""

    name: ClassVar[str] = "teacher"

    @property
    def occurs(self) -> bool:
        return self.load.teacher_bytes > 0

    def instants(self) -> list[Bytes]:
        step = self.load.step
        assert step.teacher_model is not None  # Else the phase does not occur.
        config = step.teacher_model.config
        work = micro_batches_beside(self.load, taken=0, tokens=step.rollout_tokens)
        head = head_bytes(config, step, work.tokens_of_one, self.load.device, "pass")
        return [
            {
                "activations": work.tokens * passing_bytes(config, step.itemsize),
                "logits": work.parallel * head,
            }
        ]


@dataclass(frozen=True)
class Update(Phase):
    """Forward, backward and the optimiser's step, a micro-batch after another.

        "gradients"        4 for each trained parameter here; an earlier micro-batch's are there;
                           0 where they stay through all phases ("kept gradients")
        "casts"            2 for each parameter of the layers here, autocast to bfloat16, which
                           backward keeps; computed twice, of one layer
        "activations"      T x what L layers keep for backward
        "attention"        T L x keys and values of a layer, repeated, and 4 a head of log-sums
        "logits"           of the micro-batches at the head, where it is here
        "gathered"         by a rank: see `RankUpdate`
        "whole gradients"  by a rank: see `RankUpdate`; else the embedding's, before it is added

    Its worst instant is a later micro-batch's, at the head, in a layer's backward pass or at the
    end. With all rows at work at once only the head's gradient is there before backward, and all
    gradients are at its end."""

    taken: int  # Bytes of the device that stay through all phases, and those of its engines.
    name: ClassVar[str] = "update"

    @property
    def occurs(self) -> bool:
        return self.load.trains

    @cached_property
    def gradients(self) -> int:
        """Bytes of the gradients of all that is trained here, in fp32, but for those that stay
        through all phases."""
        if self.load.keeps_gradients:
            return 0
        return FP32 * self.load.trained_parameters

    @cached_property
    def gathered(self) -> int:
        """Bytes of what a rank gathers, while it chooses how large its micro-batches are."""
        if not self.load.is_rank:
            return 0
        layers = self.load.layer_parameters
        outside = self.load.parameters - sum(layers)
        return gathered_bytes(layers, outside, self.load.step.itemsize)

    @cached_property
    def limit(self) -> MicroBatches:
        """The largest micro-batches that there may be."""
        taken = self.taken + self.gradients + self.gathered
        return micro_batches_beside(self.load, taken, self.load.step.update_tokens)

    @property
    def recomputed(self) -> bool:
        """Whether layers are computed twice."""
        return self.limit.recomputed

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batches at work: those that there were, or the limit."""
        return self.load.step.largest_micro_batch or self.limit.tokens

    def instants(self) -> list[Bytes]:
        at_head = self.layers_forward() | {"logits": self.head()}
        if self.load.is_rank:
            instants = [
                RankUpdate(self.load).at_head(at_head),
                RankUpdate(self.load).in_backward(at_head),
            ]
        else:
            instants = [at_head, self.layers_backward(), self.end_of_backward()]
        if self.load.keeps_gradients or self.limit.tokens < self.load.step.update_tokens:
            return instants
        # All rows are at work at once: no earlier micro-batch has left gradients.
        embedding = min(self.gradients, self.load.embedding_bytes)
        head_gradient = embedding if self.load.has_head else 0
        # At the end of backward a tied embedding has the head's gradient and its own.
        all_gradients = self.gradients + self.limit.parallel * embedding
        return [
            *(instant | {"gradients": head_gradient} for instant in instants),
            {"gradients": all_gradients, "gathered": self.gathered},
        ]

    def layers_forward(self) -> Bytes:
        """Bytes when the layers' forward pass has ended."""
        config = self.load.config
        step = self.load.step
        shape = self.load.shape
        modules = self.load.share.modules
        kept = layers_bytes(self.load, self.tokens)
        if self.load.has_adapters:
            # micro-batches side by side share autocast's casts of what is trained only
            kept["casts"] *= self.limit.parallel
        if self.recomputed:
            share = shape.layer_share(modules)
            a_token = checkpointed_activation_bytes(config, step.itemsize, share, step.kernels)
            kept["activations"] = self.tokens * a_token
            kept["casts"] //= len(shape.layers)
            kept["attention"] //= len(shape.layers)
        kept["activations"] -= self.tokens * self.recomputed_bytes
        return {"gradients": self.gradients, **kept}

    def end_of_backward(self) -> Bytes:
        """Bytes when the embedding's gradient is there and not yet added to the earlier one."""
        forward = self.layers_forward()
        trained = min(self.gradients, self.load.embedding_bytes)
        return {
            "gradients": self.gradients,
            "casts": forward["casts"],
            "whole gradients": self.limit.parallel * trained,
        }

    @property
    def recomputed_bytes(self) -> int:
        """Bytes of a token inside of MLPs that are computed twice, of the layers here."""
        step = self.load.step
        shape = self.load.shape
        inside = mlp_bytes(self.load.config, step.itemsize, step.kernels)
        share_of_layers = shape.layer_share(self.load.share.modules)
        return int(self.limit.recomputed_mlps * share_of_layers * inside / len(shape.layers))

    def head(self) -> int:
        """Bytes at the head of the micro-batches at work."""
        if not self.load.has_head:
            return 0
        tokens_of_one = self.tokens // self.limit.parallel
        use: HeadUse = "frozen" if self.load.has_adapters else "trained"
        return self.limit.parallel * head_bytes(
            self.load.config, self.load.step, tokens_of_one, self.load.device, use
        )

    def layers_backward(self) -> Bytes:
        """Bytes in the last layer's backward pass, which makes a share of what the layer keeps
        again."""
        part, parts = REMADE_IN_BACKWARD
        step = self.load.step
        all_layers = self.tokens * activation_bytes(self.load.config, step.itemsize, step.kernels)
        remade = part * all_layers // (parts * len(self.load.shape.layers))
        forward = self.layers_forward()
        return forward | {"activations": forward["activations"] + remade}


def layers_bytes(load: DeviceLoad, tokens: int) -> Bytes:
    """Bytes that a device's layers keep for backward of `tokens`: autocast's casts, activations,
    and what attention keeps beside them, which are repeated keys and values, and for each query
    head the log of its sum in fp32."""
    config = load.config
    step = load.step
    layers = [name for name in load.shape.layers if name in load.share.modules]
    hidden = FP32 * config.hidden_size
    all_layers = activation_bytes(config, step.itemsize, step.kernels)
    a_token = all_layers * len(layers) // config.num_hidden_layers
    if load.has_adapters:
        a_token -= FROZEN_NORM_VECTORS * hidden * len(layers)
    if load.has_head:
        a_token += END_VECTORS * hidden
    keys_and_values = key_value_bytes(config, step.itemsize) // config.num_hidden_layers
    log_sums = FP32 * getattr(config, "num_attention_heads", 1)
    casts = load.shape.state_bytes(layers, FP32) // 2 if step.in_bfloat16 else 0
    return {
        "casts": casts,
        "activations": tokens * a_token,
        "attention": tokens * len(layers) * (keys_and_values + log_sums),
    }


@dataclass(frozen=True)
class RankUpdate:
    """What a rank of a sharded or replicated policy has beside an update's own bytes. It gathers in
    fp32 (or copies, where it has all weights) what is outside the layers for a whole micro-batch,
    and each layer for its forward and backward pass.

        at the head            "gathered" 4 for each parameter outside the layers
        in backward of the     "gathered" the same, that layer, and the next one ahead of it
        last layer but one     "whole gradients" of this layer, and of the last one, on its way to
                               its ranks; the head's, in fp32, and that of one matrix, in bf16
    """

    load: DeviceLoad

    @property
    def outside(self) -> int:
        """Bytes of the weights outside the layers."""
        shape = self.load.shape
        names = [name for name in shape.parameters if name not in shape.layers]
        return shape.state_bytes(names, FP32)

    def at_head(self, update: Bytes) -> Bytes:
        """The bytes of the update with those that the rank gathers at the head."""
        return update | {"gathered": self.outside}

    def in_backward(self, update: Bytes) -> Bytes:
        """The bytes of the update with those of a rank in backward of the last layer but one. The
        last two layers have given back what they kept."""
        shape = self.load.shape
        config = self.load.config
        layer = max(shape.state_bytes([name], FP32) for name in shape.layers)
        gradient = FP32 * max(shape.trained([name]) for name in shape.layers)
        products = 0
        if not self.load.has_adapters:
            matrix = BF16 * mlp_width(config) * config.hidden_size
            products = matrix + self.load.embedding_bytes
        share_left = max(len(shape.layers) - LAYERS_DONE, 0) / len(shape.layers)
        left = {}
        for kind in ("casts", "activations", "attention"):
            left[kind] = int(share_left * update[kind])
        return {
            **update,
            **left,
            "logits": 0,
            "gathered": self.outside + GATHERED_LAYERS * layer,
            "whole gradients": WHOLE_GRADIENT_LAYERS * gradient + products,
        }


@dataclass(frozen=True)
class Sync(Phase):
    """The sampler takes the policy's weights, one tensor at a time: "transit" is 4 V H, the largest
    tensor in fp32, where a rank gathers it or adapters are merged into it."""

    name: ClassVar[str] = "sync"

    @property
    def occurs(self) -> bool:
        return self.load.trains or self.load.samples or self.load.evaluates

    def instants(self) -> list[Bytes]:
        # Before a weight is sent, ranks gather it, or adapters are merged into it. The embedding is
        # the largest.
        makes_tensor = self.load.is_rank or self.load.has_adapters
        transit = 0
        if makes_tensor:
            transit = self.load.embedding_bytes
        return [{"transit": transit}]


@dataclass(frozen=True)
class Checkpoint(Phase):
    """The weights are written: "transit" is 4 V H where a rank gathers one tensor at a time, or
    whole copies in fp32 on the host, where the weights are not the policy's own: two for ranks, one
    for merged adapters."""

    name: ClassVar[str] = "checkpoint"

    @property
    def occurs(self) -> bool:
        return self.load.trains

    def instants(self) -> list[Bytes]:
        gathered = self.load.embedding_bytes if self.load.is_rank else 0
        return [{"transit": max(gathered, self.host_copies * FP32 * self.load.parameters)}]

    @property
    def host_copies(self) -> int:
        """Whole copies of the weights that safetensors is given in the host's memory."""
        if not self.load.on_cpu:
            return 0
        if self.load.is_rank:
            return RANK_HOST_COPIES
        return MERGED_HOST_COPIES if self.load.has_adapters else 0
