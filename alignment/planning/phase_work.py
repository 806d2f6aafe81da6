"""The busiest device's work in each phase of a step, an evaluation and a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from alignment.model.activations import CACHE_BYTES
from alignment.model.loading import mlp_width
from alignment.planning.passes import (
    FORWARD,
    HOST_COUNTS,
    PASSES,
    UPDATE,
    ComputedModel,
    DecodedRows,
    PassTokens,
    counts_on_card,
    decoding,
    forward,
    pass_on_card,
)
from alignment.planning.step_shape import StepShape
from alignment.planning.work import Work
from alignment.policy.policy import policy_kind

FP32 = 4  # bytes of a number in float32

USUAL_MICRO_BATCH = 4096
"""Tokens of a micro-batch where --micro_batch_tokens leaves them to the free memory.

Assumption: for models of billions of parameters, since the free memory is not known before a run.
Shown wrong by: `micro_batch_tokens` in a run's metrics.jsonl, which `plan --calibrate` takes
instead; the tiny preset on two CPU cores chose 16,384. It sets how often an update reads all
weights and starts its kernels, so it counts where a micro-batch is short. Read by: `StepWork`."""

PASSES_OF_ADAPTER_UPDATE = 2
"""Forward passes' work in an update with adapters, which has no gradients of the frozen weights;
else `PASSES[UPDATE]`.

Source: arithmetic. Shown wrong by: seconds of an update over those of old log-probs, of runs whose
rows all have a gradient, with --lora_rank. Read by: `StepWork`."""

CAST_BYTES = 6
"""Bytes through memory, a parameter and micro-batch, of autocast's casts on a CPU.

Source: autocast reads 4 bytes and writes 2. Shown wrong by: a profile of its copies. Read by:
`StepWork`."""

GRADIENT_BYTES = 12
"""Bytes through memory, a trained parameter and micro-batch, of its gradient on a CPU.

Source: a gradient is read, and added to another one, in fp32. Shown wrong by: a profile of the sums
of gradients. Read by: `StepWork`."""

OPTIMIZER_BYTES = 40
"""Bytes through memory, a trained parameter and update, of clipping and AdamW.

Source: the gradient's norm reads 4; clipping reads and writes 8; AdamW reads weight, gradient and
both moments, 16, and writes all but the gradient, 12. Shown wrong by: the seconds of an optimiser's
step: for 1.5 billion parameters on an H200 clipping and AdamW took .02 s, of which this explains
.015 s at the .89 of its bandwidth that copies reached there. Read by: `StepWork`."""

OPTIMIZER_KERNELS = 27
"""Kernels of a layer's tensors at an update's end: the gradient's norm, and the optimiser.

Assumption: three for each of the nine tensors of a Llama-like layer, while torch takes many tensors
in one kernel where it can. Shown wrong by: a profile of the optimiser's step. It matters little, as
the seconds at `OPTIMIZER_BYTES` show. Read by: `StepWork`."""

SUMMED_BYTES = 2 * FP32
"""Bytes over a link, a trained parameter, of a sum over ranks.

Source: a ring sends each number's sum and receives it, in fp32. Shown wrong by: the bytes that
`benchmarks.collectives` counts. Read by: `StepWork`."""

BORDER_BYTES = 2 * FP32
"""Bytes over a link, a number of a hidden state at a border of two stages.

Source: itself and its gradient, as the test counts them (tests/policy/test_placement_simulated.py).
Shown wrong by: that count. Read by: `StepWork`."""

SYNC_PASSES = 3
"""Times that a number of the sampler's type passes through memory while it gets new weights.

Source: it is written, sent, and written again where it is received. Shown wrong by: a profile of
`EngineClient.send`. It matters little beside the requests below. Read by: `StepWork`."""

REQUEST_BYTES = 2**27
"""Bytes of new weights for which vLLM's host takes as long as for a pass: it answers one request.

Source: the trainer sends weights in buckets of at most so many bytes, `BUCKET_BYTES` of
alignment/sampling/vllm_weights.py, each with a request to the engine. That a request takes as long
as a pass, 14 to 15 ms, is an assumption which fits what was measured: an H200 took .30, .33 and .43
s for 1.5 billion parameters in bfloat16, 13 to 19 ms for each of 23 such requests, and 1.1 billion
parameters more took .16 to .19 s more, 10 to 12 ms for each (docs/gpus.md). Shown wrong by:
`seconds_sync` in a run's metrics.jsonl. Read by: `StepWork`."""


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
    micro_batch_tokens: int  # 0: as the free memory allows, which is not known.
    recomputed_mlps: int = 0  # Layers of which an update computes the MLP's inside twice.
    recomputed: bool = False  # Whether it computes all layers twice.
    refills: int = 0  # Times that a step samples groups again.


@dataclass(frozen=True)
class Engines:
    """The engines that sample in a phase."""

    devices: tuple[str, ...]  # Of one machine.
    tensor_parallel: int = 1  # Devices of an engine.
    machines: int = 1


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
    engines: Mapping[str, Engines]  # "sampling" and "evaluation" -> those that sample then.
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
        sampling = {}
        if self.step.draws_rollouts:
            sampling["sampling"] = self.sampling("sampling", 1 + self.schedule.refills)
        return {
            **sampling,
            **{phase: self.log_probs(phase) for phase in sorted(self.step.passes)},
            **self.teacher(),
            "update": self.update(),
            "sync": self.sync(),
            "evaluation": self.sampling("evaluation", 1),
            "checkpoint": self.checkpoint(),
        }

    def log_probs(self, phase: str) -> Work:
        """The work of a pass for log-probs over all rows: by the policy, by a copy of it on one
        device, which has its kernels, or by a reference there, whose kernels are eager."""
        if phase not in self.step.frozen_passes:
            return self.passes(1, 1).work
        if phase == "reference":
            return self.pass_alone(self.with_eager_kernels(self.model))
        return self.pass_alone(self.model)

    def teacher(self) -> dict[str, Work]:
        """The work of the teacher's pass over all rows, on one device; of no phase without one."""
        teacher = self.step.teacher_model
        if teacher is None:
            return {}
        return {"teacher": self.pass_alone(self.with_eager_kernels(teacher))}

    def with_eager_kernels(self, model: ComputedModel) -> ComputedModel:
        """A frozen model as the policy's kind of device computes it by eager kernels."""
        if self.model.counts == HOST_COUNTS:
            return model
        return replace(model, counts=counts_on_card("eager", model.itemsize))

    def pass_alone(self, model: ComputedModel) -> Work:
        """The work of a frozen model's pass over all rows, on one device."""
        alone = replace(self, model=model, split=PolicySplit())
        return alone.passes(1, 1).work

    def passes(self, share: float, updates: int, number: int = 1) -> PassWork:
        """The work of so many forward passes, or of what an update makes of them, over a share of
        the rows, in so many updates.

        Of S stages the first is idle while the last micro-batches pass the others (Huang et al.
        2019, section 2): of M micro-batches a stage computes a S-th, in M + S - 1 turns of M. A
        part gathers what the others hold, in fp32, for each micro-batch."""
        tokens, seen, with_logits = self.rank_rows
        most = self.schedule.micro_batch_tokens or USUAL_MICRO_BATCH
        pieces = max(1, ceil(share * tokens / updates / most))
        rows = PassTokens(share * tokens / updates, seen, share * with_logits / updates)
        work = self.pass_work(rows, pieces, number)
        stages = self.split.stages
        busy = (pieces + stages - 1) / (pieces * stages)
        work = replace(
            work, operations=busy * work.operations, memory_bytes=busy * work.memory_bytes
        )
        gathered = FP32 * self.model.parameters * self.split.share_of_others * pieces * number
        return PassWork((work + Work(link_bytes=gathered)) * updates, updates * pieces)

    def pass_work(self, rows: PassTokens, pieces: int, number: int) -> Work:
        """The work of `passes` on the policy's kind of device, without what others have of it."""
        if self.model.counts == HOST_COUNTS:
            return forward(self.model, rows, pieces) * number
        forward_pass = pass_on_card(self.model, rows, pieces, FORWARD)
        if number == 1:
            return forward_pass
        update = pass_on_card(self.model, rows, pieces, UPDATE)
        again = Work(operations=self.recomputed_mlp_operations(rows.tokens))
        return update + again + forward_pass * (number - PASSES[UPDATE])

    def recomputed_mlp_operations(self, tokens: float) -> float:
        """Operations of the gate's and the up projection's products that backward makes again."""
        config = self.model.config
        of_layer = 2 * 2 * config.hidden_size * mlp_width(config) * tokens
        return self.schedule.recomputed_mlps * of_layer

    def sampling(self, phase: str, times: float) -> Work:
        """The work of an engine's decoding of a phase's rows, `times` over, divided among its
        devices, all but the passes of its one host."""
        sampled = self.step.sampled[phase]
        engines = self.engines[phase]
        devices = engines.devices
        cache = 0 if self.step.vllm else CACHE_BYTES[devices[0].partition(":")[0]]
        number = engines.machines * len(devices) / engines.tensor_parallel
        rows = DecodedRows(
            prompts=times * sampled.prompts / number,
            responses=sampled.responses,
            prompt_tokens=self.prompt,
            response_tokens=self.shares.response * sampled.longest,
            longest=sampled.longest,
        )
        work = decoding(self.model, rows, cache)
        of_device = work / engines.tensor_parallel
        return replace(of_device, engine_passes=work.engine_passes)

    def update(self) -> Work:
        """The work of all updates of a step, over the responses with a gradient: three forward
        passes' (two with adapters; one more where layers are computed twice), casts, gradients and
        the optimiser; what devices send: gradients, and hidden states at the borders of stages; and
        a forward pass before it, of all responses, where the step prepares its updates."""
        shape = self.model.shape
        split = self.split
        updates = self.schedule.updates
        trained = shape.trained(shape.parameters)
        share = self.shares.trained * self.schedule.epochs
        number = PASSES_OF_ADAPTER_UPDATE if shape.adapters else PASSES[UPDATE]
        if self.step.gradient_checkpointing or self.schedule.recomputed:
            number += 1  # Backward begins with another forward pass, layer by layer.
        computed = self.passes(share, updates, number)
        pieces = computed.pieces
        state = OPTIMIZER_BYTES * updates * trained / split.parts
        if self.model.counts == HOST_COUNTS:  # A GPU's pass has its casts and sums of gradients.
            state += GRADIENT_BYTES * pieces * trained / split.parts
            if self.step.in_bfloat16:
                state += CAST_BYTES * self.model.parameters * pieces
        network = 0.0
        if split.ranks > 1 and split.machines > 1:
            network = SUMMED_BYTES * trained / split.parts * updates
        own = Work(
            memory_bytes=state,
            launches=OPTIMIZER_KERNELS * len(shape.layers) * updates,
            link_bytes=self.border_bytes() + self.gradient_bytes(pieces),
            network_bytes=network,
        )
        prepared = Work()
        if self.step.prepares_updates:
            prepared = self.passes(self.schedule.epochs, updates).work
        return prepared + computed.work + own

    def border_bytes(self) -> float:
        """Bytes of hidden states and of their gradients, in fp32, over the borders of stages."""
        hidden = BORDER_BYTES * self.model.config.hidden_size
        borders = self.split.stages - 1
        return hidden * self.rank_rows.tokens * borders * self.schedule.epochs

    def gradient_bytes(self, pieces: int) -> float:
        """Bytes of gradients over a machine's links: a part sends the others' after each
        micro-batch; whole gradients are summed once an update."""
        shape = self.model.shape
        split = self.split
        trained = shape.trained(shape.parameters)
        if split.parts > 1:
            return FP32 * trained * split.share_of_others * pieces
        if split.ranks > split.machines:
            return SUMMED_BYTES * trained * self.schedule.updates
        return 0

    def sync(self) -> Work:
        """The work of passing all weights to the sampler: fp32 weights are read, numbers of the
        sampler's type written, sent, received and written again; vLLM's host answers a request for
        each part of them."""
        sent_bytes = self.step.itemsize * self.model.parameters
        requests = 0.0
        if self.step.vllm:
            requests = sent_bytes / REQUEST_BYTES
        return Work(
            memory_bytes=FP32 * self.model.parameters + SYNC_PASSES * sent_bytes,
            link_bytes=sent_bytes,
            engine_passes=requests,
        )

    def checkpoint(self) -> Work:
        """The work of writing all weights and two moments of what is trained, in fp32."""
        trained = self.model.shape.trained(self.model.shape.parameters)
        return Work(disk_bytes=FP32 * self.model.parameters + 2 * FP32 * trained)
