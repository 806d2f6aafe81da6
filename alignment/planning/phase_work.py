"""The busiest device's work in each phase of a step, an evaluation and a checkpoint."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from alignment.model.activations import CACHE_BYTES
from alignment.planning.passes import ComputedModel, DecodedRows, PassTokens, decoding, forward
from alignment.planning.step_shape import StepShape
from alignment.planning.work import Work
from alignment.policy.policy import policy_kind

FP32 = 4  # bytes of a number in float32

USUAL_MICRO_BATCH = 4096
"""Tokens of a micro-batch where --micro_batch_tokens leaves them to the free memory.

An assumption, for models of billions of parameters, and no measurement: the free memory is not
known before a run. The tiny preset on two CPU cores chose 16,384. `micro_batch_tokens` in a run's
metrics.jsonl shows it wrong; `plan --calibrate` takes that number instead. It sets how often an
update reads all weights and starts its kernels, so it counts where a micro-batch is short."""

PASSES_OF_UPDATE = 3
"""Of a forward pass's work: forward, the gradients of inputs, and those of weights."""

PASSES_OF_ADAPTER_UPDATE = 2
"""The same without gradients of the frozen weights."""

CAST_BYTES = 6
"""Through memory, a parameter and micro-batch: autocast reads 4 bytes and writes 2."""

GRADIENT_BYTES = 12
"""Through memory, a trained parameter and micro-batch: a gradient is read, and added to another
one, in fp32."""

OPTIMIZER_BYTES = 40
"""Through memory, a trained parameter and update: the gradient's norm reads 4; clipping reads and
writes 8; AdamW reads weight, gradient and both moments, 16, and writes all but the gradient, 12."""

OPTIMIZER_KERNELS = 27
"""Kernels of a layer's tensors at an update's end: the gradient's norm, and the optimiser.

An assumption, no count: it is three for each of the nine tensors of a Llama-like layer, while torch
takes many tensors in one kernel where it can. A profile of the optimiser's step shows it wrong. It
matters little: for 1.5 billion parameters on an H200, clipping and AdamW took .02 s, of which
`OPTIMIZER_BYTES` explain .015 s at the .89 of its bandwidth that copies reached there."""

SUMMED_BYTES = 2 * FP32
"""Over a link, a trained parameter: a ring sends each number's sum and receives it, in fp32."""

BORDER_BYTES = 2 * FP32
"""Over a link, a number of a hidden state at a border of two stages: itself and its gradient."""


class Shares(NamedTuple):
    """How much of what it may have a run has on average."""

    prompt: float  # A prompt's tokens, of the longest prompt's.
    response: float  # A response's tokens, of --max_new_tokens.
    trained: float  # Responses with a gradient, of all.


@dataclass(frozen=True)
class PolicySplit:
    """How a policy's devices share its work."""

    machines: int = 1
    ranks: int = 1  # Of all machines, which share the rows.
    parts: int = 1  # Ranks of a machine, which share the weights.
    stages: int = 1  # Devices of a split policy, which share the layers.

    @classmethod
    def of_kind(cls, kind: str, devices: int, machines: int) -> "PolicySplit":
        """The split of a kind of policy on so many devices of each machine."""
        facts = policy_kind(kind)
        return cls(
            machines,
            ranks=devices * machines if facts.ranked else 1,
            parts=facts.parts(devices),
            stages=facts.stages(devices),
        )

    @property
    def share_of_others(self) -> float:
        """The share of the weights that the other parts have."""
        return 1 - 1 / self.parts


@dataclass(frozen=True)
class Schedule:
    """What a step samples and trains on."""

    prompts: int  # Of a rollout.
    responses: int  # Of a rollout.
    max_new_tokens: int
    updates: int
    epochs: int
    micro_batch_tokens: int  # 0: as the free memory allows.
    refills: int = 0  # Times that a step samples groups again.


@dataclass(frozen=True)
class Engines:
    """The sampler's engines."""

    devices: tuple[str, ...]  # Of one machine.
    tensor_parallel: int  # Devices of an engine.


class PassWork(NamedTuple):
    """The work of a forward pass over a step's rows."""

    work: Work
    pieces: int  # Micro-batches.


@dataclass(frozen=True)
class StepWork:
    """The busiest device's work in each phase."""

    model: ComputedModel
    step: StepShape
    split: PolicySplit
    schedule: Schedule
    engines: Engines
    shares: Shares

    @property
    def prompt(self) -> float:
        """Tokens of a prompt, on average."""
        return self.shares.prompt * self.step.prompt

    @property
    def response(self) -> float:
        """Tokens of a response of training, on average."""
        return self.shares.response * self.schedule.max_new_tokens

    @cached_property
    def rank_rows(self) -> PassTokens:
        """The tokens that a rank computes of a rollout. A prompt is computed once for its group;
        responses alone have logits."""
        prompts = self.schedule.prompts * self.prompt / self.split.ranks
        drawn = self.schedule.responses * self.response / self.split.ranks
        seen_by_drawn = self.prompt + self.response / 2
        seen = (prompts * self.prompt / 2 + drawn * seen_by_drawn) / (prompts + drawn)
        return PassTokens(prompts + drawn, seen, drawn)

    def by_phase(self) -> dict[str, Work]:
        """Phase -> work."""
        log_probs = self.forward_pass(1, 1).work
        return {
            "sampling": self.sampling("sampling", 1 + self.schedule.refills),
            **dict.fromkeys(sorted(self.step.passes), log_probs),
            **self.teacher(),
            "update": self.update(),
            "sync": self.sync(),
            "evaluation": self.sampling("evaluation", 1),
            "checkpoint": self.checkpoint(),
        }

    def teacher(self) -> dict[str, Work]:
        """The work of the teacher's pass over all rows, on one device; of no phase without one."""
        teacher = self.step.teacher_model
        if teacher is None:
            return {}
        alone = replace(self, model=teacher, split=PolicySplit())
        return {"teacher": alone.forward_pass(1, 1).work}

    def forward_pass(self, share: float, updates: int) -> PassWork:
        """The work of a forward pass over a share of the rows, in so many updates.

        Of S stages the first is idle while the last micro-batches pass the others (Huang et al.
        2019, section 2): of M micro-batches a stage computes a S-th, in M + S - 1 turns of M. A
        part gathers what the others hold, in fp32, for each micro-batch."""
        tokens, seen, with_logits = self.rank_rows
        most = self.schedule.micro_batch_tokens or USUAL_MICRO_BATCH
        pieces = max(1, ceil(share * tokens / updates / most))
        rows = PassTokens(share * tokens / updates, seen, share * with_logits / updates)
        work = forward(self.model, rows, pieces)
        stages = self.split.stages
        busy = (pieces + stages - 1) / (pieces * stages)
        work = replace(
            work, operations=busy * work.operations, memory_bytes=busy * work.memory_bytes
        )
        gathered = FP32 * self.model.parameters * self.split.share_of_others * pieces
        return PassWork((work + Work(link_bytes=gathered)) * updates, updates * pieces)

    def sampling(self, phase: str, times: float) -> Work:
        """The work of an engine's decoding of a phase's rows, `times` over, divided among its
        devices."""
        sampled, devices = self.step.sampled[phase], self.engines.devices
        cache = 0 if self.step.vllm else CACHE_BYTES[devices[0].partition(":")[0]]
        engines = self.split.machines * len(devices) / self.engines.tensor_parallel
        rows = DecodedRows(
            prompts=times * sampled.prompts / engines,
            responses=sampled.responses,
            prompt_tokens=self.prompt,
            response_tokens=self.shares.response * sampled.longest,
            longest=sampled.longest,
        )
        return decoding(self.model, rows, cache) / self.engines.tensor_parallel

    def update(self) -> Work:
        """The work of all updates of a step, over the responses with a gradient: three forward
        passes' (two with adapters), casts, gradients and the optimiser; and what devices send:
        gradients, and hidden states at the borders of stages."""
        shape, split, updates = self.model.shape, self.split, self.schedule.updates
        trained = shape.trained(shape.parameters)
        share = self.shares.trained * self.schedule.epochs
        forward_pass = self.forward_pass(share, updates)
        pieces = forward_pass.pieces
        passes = PASSES_OF_ADAPTER_UPDATE if shape.adapters else PASSES_OF_UPDATE
        casts = CAST_BYTES * self.model.parameters * pieces if self.step.in_bfloat16 else 0
        state = (GRADIENT_BYTES * pieces + OPTIMIZER_BYTES * updates) * trained / split.parts
        network = 0.0
        if split.ranks > 1 and split.machines > 1:
            network = SUMMED_BYTES * trained / split.parts * updates
        own = Work(
            memory_bytes=casts + state,
            launches=OPTIMIZER_KERNELS * len(shape.layers) * updates,
            link_bytes=self.border_bytes() + self.gradient_bytes(pieces),
            network_bytes=network,
        )
        return forward_pass.work * passes + own

    def border_bytes(self) -> float:
        """Bytes of hidden states and of their gradients, in fp32, over the borders of stages."""
        hidden = BORDER_BYTES * self.model.config.hidden_size
        borders = self.split.stages - 1
        return hidden * self.rank_rows.tokens * borders * self.schedule.epochs

    def gradient_bytes(self, pieces: int) -> float:
        """Bytes of gradients over a machine's links: a part sends the others' after each
        micro-batch; whole gradients are summed once an update."""
        shape, split = self.model.shape, self.split
        trained = shape.trained(shape.parameters)
        if split.parts > 1:
            return FP32 * trained * split.share_of_others * pieces
        if split.ranks > split.machines:
            return SUMMED_BYTES * trained * self.schedule.updates
        return 0

    def sync(self) -> Work:
        """The work of passing all weights to the sampler: fp32 weights are read, numbers of the
        sampler's type written, sent, received and written again."""
        parameters, itemsize = self.model.parameters, self.step.itemsize
        return Work(
            memory_bytes=(FP32 + 3 * itemsize) * parameters, link_bytes=itemsize * parameters
        )

    def checkpoint(self) -> Work:
        """The work of writing all weights and two moments of what is trained, in fp32."""
        trained = self.model.shape.trained(self.model.shape.parameters)
        return Work(disk_bytes=FP32 * self.model.parameters + 2 * FP32 * trained)
