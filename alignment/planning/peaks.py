"""The most bytes that each device holds in each phase of a training step, from shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from alignment.model.shape import ModelShape
from alignment.planning.device_load import Bytes, DeviceLoad, engine_bytes, resident_bytes, total
from alignment.planning.measured_memory import (
    BFLOAT16_PASSING_BYTES,
    HEAP_HOLES_OF_ADAPTER_UPDATE,
    HEAP_HOLES_OF_OTHER_PHASES,
    HEAP_HOLES_OF_RANK_UPDATE,
    HEAP_HOLES_OF_RECOMPUTED_UPDATE,
    HEAP_HOLES_OF_UPDATE,
    RANK_LIBRARY_BYTES,
    RESERVED_SHARE,
    UNUSED_BLOCK_SHARE,
    WORKSPACE_BYTES,
)
from alignment.planning.phases import (
    Checkpoint,
    Evaluation,
    MicroBatches,
    OldLogProbs,
    Phase,
    ReferenceLogProbs,
    Sampling,
    Sync,
    TeacherLogProbs,
    Update,
)
from alignment.planning.placement import Roles, Share, policy_shares
from alignment.planning.step_shape import StepShape
from alignment.policy.policy import policy_kind

RESERVED = "reserved"
"""The kind of bytes that torch's allocator has got of a GPU and has not handed out."""

OF_ENGINE = "engine"
"""The kind of bytes that belong to an engine's own process."""

RANK_EMBEDDINGS = 3
"""Embeddings in fp32 that a rank on a CPU takes in an update, and for old log-probs, beyond all
that is counted, with products in fp32.

Source: fitted to the resident bytes of runs (docs/plan_measured.md). Shown wrong by:
`benchmarks.memory`. Read by: `heap_margin`."""

FIRST_RANK_EMBEDDINGS = 5
"""Embeddings in fp32 that a rank which has the other roles, too, takes so.

Source: fitted to the same runs. Shown wrong by: `benchmarks.memory`. Read by: `heap_margin`."""


@dataclass(frozen=True)
class DevicePeak:
    """What a rank of the policy, or a device, holds at the worst instant of each phase: the
    trainer's own process, with all that computes in it, and engines in processes of their own."""

    device: str
    rank: int | None  # None: a device of a policy of one process, or of other roles.
    phases: dict[str, Bytes]  # Phase -> kind -> bytes; only the phases that occur there.
    micro_batches: MicroBatches | None = None  # Of an update; None where none occurs.

    @property
    def name(self) -> str:
        """The device, and which rank's it is."""
        return self.device if self.rank is None else f"rank {self.rank}, {self.device}"

    @property
    def worst(self) -> str:
        """The phase that takes the most."""
        return max(self.phases, key=lambda phase: total(self.phases[phase]))

    @property
    def total(self) -> int:
        """Bytes of that phase."""
        return total(self.phases[self.worst])

    def of_device(self, phase: str) -> int | None:
        """Bytes of a phase by all processes; None: it does not occur here."""
        return total(self.phases[phase]) if phase in self.phases else None

    def of_trainer(self, phase: str) -> int | None:
        """Bytes of a phase as the trainer's process is measured: on a GPU those that torch's
        allocator hands out, without CUDA's context, on a CPU all that is resident. Neither has
        engines. None: the phase does not occur here."""
        if phase not in self.phases:
            return None
        elsewhere = {OF_ENGINE}
        if self.device != "cpu":
            elsewhere |= {RESERVED, "context"}
        return sum(size for kind, size in self.phases[phase].items() if kind not in elsewhere)


def peak_bytes(shape: ModelShape, config: Any, roles: Roles, step: StepShape) -> list[DevicePeak]:
    """The peaks of the machine's ranks, or of the devices of a policy of one process, then of other
    roles' own devices. Frozen models stay through all phases. An engine keeps its whole share, but
    while it sleeps its context and graphs alone. Moments are those from the second step on. For
    fp32 weights whose linear layers are autocast."""
    policy = policy_shares(shape, roles.policy, step.policy_parallelism, step.optimizer)
    step = replace(step, layers=max(shape.layer_share(share.modules) for share in policy))
    own_devices = {*roles.trainer, *roles.sample, roles.eval}
    own_devices -= {share.device for share in policy}
    shares = [*policy, *(Share(device, "", (), 0) for device in sorted(own_devices))]
    has_ranks = policy_kind(step.policy_parallelism).ranked
    peaks = []
    for index, share in enumerate(shares):
        # Ranks may share the host's CPU, where the first of them has the other roles, too.
        repeated = share in shares[:index]
        counted = (
            replace(roles, sample=(), eval="", reference="", teacher="") if repeated else roles
        )
        load = DeviceLoad(share, counted, shape, config, step)
        resident = resident_bytes(load)
        update = Update(load, taken=total(resident) + engine_bytes(load, "update"))
        phases = phases_of(load, resident, update)
        rank = index if has_ranks and index < len(policy) else None
        micro_batches = update.limit if update.occurs else None
        if phases:
            peaks.append(DevicePeak(share.device, rank, phases, micro_batches))
    return peaks


def phases_of(load: DeviceLoad, resident: Bytes, update: Update) -> dict[str, Bytes]:
    """Phase -> kind -> bytes of one device, at the worst instant of each phase that occurs there:
    what is resident through all phases, engines, what comes and goes, and what allocators add to
    it."""
    recomputed = update.occurs and update.recomputed
    peaks = {}
    for phase in phases_that_occur(load, update):
        passing = phase.worst()
        if load.on_cpu:
            passing |= {"margin": heap_margin(load, phase.name, passing, recomputed)}
        elif load.trains or load.has_frozen or not load.step.vllm:
            passing |= {"margin": allocator_margin(passing)}
            allocated = total(resident) - resident["context"] + total(passing)
            passing |= {RESERVED: int(RESERVED_SHARE * allocated)}
        engine = {OF_ENGINE: engine_bytes(load, phase.name)}
        peaks[phase.name] = resident | engine | passing
    return peaks


def phases_that_occur(load: DeviceLoad, update: Update) -> Iterator[Phase]:
    """The phases of a step that a device has anything to do with."""
    phases = (
        Sampling(load),
        Evaluation(load),
        OldLogProbs(load),
        ReferenceLogProbs(load),
        TeacherLogProbs(load),
        update,
        Sync(load),
        Checkpoint(load),
    )
    return (phase for phase in phases if phase.occurs)


def allocator_margin(passing: Bytes) -> int:
    """Bytes that torch's allocator takes on a GPU beyond the tensors that come and go in a phase.
    Gradients do not count: they stay from one micro-batch to the next."""
    moving = total(passing) - passing.get("gradients", 0)
    return WORKSPACE_BYTES + int(UNUSED_BLOCK_SHARE * moving)


def heap_margin(load: DeviceLoad, phase: str, passing: Bytes, recomputed: bool) -> int:
    """Bytes that a process on a CPU takes beyond the tensors that come and go in a phase: holes in
    malloc's heap as a share of them, oneDNN's at least, and what was measured of ranks.
    `recomputed`: whether an update computes layers twice."""
    moving = total(passing) - passing.get("gradients", 0)
    margin = int(heap_holes(load, phase, recomputed) * moving)
    if load.step.in_bfloat16:
        margin = max(margin, BFLOAT16_PASSING_BYTES)
    if recomputed:
        margin += RANK_LIBRARY_BYTES
    if load.is_rank and not load.step.in_bfloat16 and phase in ("update", "old_log_probs"):
        has_other_roles = bool(load.roles.eval)
        embeddings = FIRST_RANK_EMBEDDINGS if has_other_roles else RANK_EMBEDDINGS
        margin += embeddings * load.embedding_bytes
    return margin


def heap_holes(load: DeviceLoad, phase: str, recomputed: bool) -> float:
    """The holes in malloc's heap, as a share of what comes and goes in a phase."""
    if phase != "update":
        return HEAP_HOLES_OF_OTHER_PHASES
    if load.is_rank:
        return HEAP_HOLES_OF_RANK_UPDATE
    if load.has_adapters:
        return HEAP_HOLES_OF_ADAPTER_UPDATE
    if recomputed:
        return HEAP_HOLES_OF_RECOMPUTED_UPDATE
    return HEAP_HOLES_OF_UPDATE
