"""One device of a run, and what stays on it through all phases of a step."""

from dataclasses import dataclass
from typing import Any

from alignment.model.shape import ModelShape
from alignment.planning.measured_memory import (
    BFLOAT16_BYTES,
    CUDA_CONTEXT_BYTES,
    GRAPH_BYTES,
    PYTHON_BYTES,
    RANK_LIBRARY_BYTES,
)
from alignment.planning.placement import Roles, Share, engine_share
from alignment.planning.step_shape import StepShape
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import policy_kind

FP32 = 4  # bytes of a number in float32
BF16 = 2  # bytes of a number in bfloat16

# bytes of a trained parameter's weight and gradient, in fp32, which an optimiser's entry counts too
WEIGHT_AND_GRADIENT = 2 * FP32

AWAKE = ("sampling", "evaluation", "sync", "checkpoint")
"""Phases in which a vLLM engine that sleeps is awake: from the weights that it gets to the last
request that they answer."""

Bytes = dict[str, int]
"""Kind of bytes -> how many of them are on the device."""


@dataclass(frozen=True)
class DeviceLoad:
    """What a run puts on one device, or on one rank's part of it."""

    share: Share  # The policy's; without modules where the device has other roles alone.
    roles: Roles  # Those whose bytes count here.
    shape: ModelShape
    config: Any  # The model's, of transformers.
    step: StepShape

    @property
    def device(self) -> str:
        return self.share.device

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def trains(self) -> bool:
        """Whether the policy has a part here."""
        return bool(self.share.modules)

    @property
    def is_rank(self) -> bool:
        """Whether a rank of the policy is here, which gathers layers and sums gradients."""
        return self.trains and self.ranked_policy

    @property
    def ranked_policy(self) -> bool:
        """Whether the run's policy has a process for each device, here or elsewhere."""
        return policy_kind(self.step.policy_parallelism).ranked

    @property
    def keeps_gradients(self) -> bool:
        """Whether the policy's gradients stay in memory through all phases."""
        return policy_kind(self.step.policy_parallelism).keeps_gradients

    @property
    def has_adapters(self) -> bool:
        return bool(self.shape.adapters)

    @property
    def has_head(self) -> bool:
        return self.shape.head in self.share.modules

    @property
    def samples(self) -> bool:
        return self.device in self.roles.sample

    @property
    def evaluates(self) -> bool:
        return self.device == self.roles.eval

    @property
    def frozen_models(self) -> int:
        """Whole frozen models on the device: the reference, and the old policy."""
        return self.step.frozen if self.device == self.roles.reference else 0

    @property
    def teacher_bytes(self) -> int:
        """Bytes of the teacher's weights on the device."""
        teacher = self.step.teacher_model
        if teacher is None or self.device != self.roles.teacher:
            return 0
        return teacher.shape.frozen_bytes(self.step.itemsize)

    @property
    def has_frozen(self) -> bool:
        """Whether there is a frozen model on the device."""
        return bool(self.frozen_models or self.teacher_bytes)

    @property
    def further_processes(self) -> int:
        """Processes of ours on the device, beside the trainer's."""
        names = self.step.own_processes
        number = 0
        if "sampling" in names:
            number += self.roles.sample.count(self.device)
        if "reference" in names & self.step.frozen_passes and self.device == self.roles.reference:
            number += 1
        if "teacher" in names and self.teacher_bytes:
            number += 1
        return number

    @property
    def decodes(self) -> bool:
        """Whether the trainer's process draws responses itself on the device."""
        samples = self.samples and "sampling" not in self.step.own_processes
        return not self.step.vllm and (self.evaluates or samples)

    @property
    def has_trainer(self) -> bool:
        """Whether the trainer's process, or a rank of it, has anything on the device."""
        names = self.step.own_processes
        frozen = self.step.frozen_passes - names
        has_frozen = bool(frozen) and self.device == self.roles.reference
        has_teacher = self.teacher_bytes > 0 and "teacher" not in names
        return self.trains or self.decodes or has_frozen or has_teacher

    @property
    def engines(self) -> int:
        """vLLM's engines on a device that samples or evaluates."""
        return self.step.engines if self.roles.eval in self.roles.sample else 1

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.shape.parameters.values())

    @property
    def layer_parameters(self) -> list[int]:
        """Parameters of each of the model's layers."""
        return [self.shape.parameters[name] for name in self.shape.layers]

    @property
    def trained_parameters(self) -> int:
        """Parameters that are trained on the device."""
        return self.shape.trained(self.share.modules) // self.share.parts

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding in fp32, or of a head of its own."""
        return FP32 * self.config.vocab_size * self.config.hidden_size


def total(sizes: Bytes) -> int:
    """Bytes of all kinds."""
    return sum(sizes.values())


def resident_bytes(load: DeviceLoad) -> Bytes:
    """Bytes that the trainer's process keeps on a device through all phases of a step. Our own
    decoding counts as the trainer's, also where it has a process of its own.

    "weights": fp32 masters. "moments": what the optimiser keeps on the device; those that a GPU
    would send to the host stay on a CPU. "sampler": a whole copy of the weights for each engine
    that is ours. "reference" and "teacher": whole frozen models, whose linear layers are in the
    type of products. "context": CUDA's, or Python and its libraries on a CPU. "kept gradients":
    those that the kind of policy keeps from one update to the next; without any there is no such
    key."""
    optimizer = OPTIMIZERS[load.step.optimizer]
    moment_bytes = optimizer.device_bytes - WEIGHT_AND_GRADIENT
    if load.on_cpu:
        moment_bytes += optimizer.host_bytes
    kept = {}
    if load.keeps_gradients:
        kept["kept gradients"] = FP32 * load.trained_parameters
    return {
        "weights": load.shape.state_bytes(load.share.modules, FP32) // load.share.parts,
        "moments": moment_bytes * load.trained_parameters,
        "sampler": _sampler_bytes(load),
        "reference": load.shape.frozen_bytes(load.step.itemsize) * load.frozen_models,
        "teacher": load.teacher_bytes,
        "context": _context_bytes(load),
        **kept,
    }


def _sampler_bytes(load: DeviceLoad) -> int:
    """Bytes of the weights that our own decoding copies, once for each of its processes. That of
    the trainer reads the policy's where it has all of them on the CPU, in the type of its products
    and without adapters."""
    if load.step.vllm:
        return 0
    copies = 0
    if "sampling" in load.step.own_processes:
        copies = load.roles.sample.count(load.device)
    reads_policy = (
        load.on_cpu
        and load.trains
        and load.share.parts == 1
        and policy_kind(load.step.policy_parallelism).lends_model
        and not load.has_adapters
        and not load.step.in_bfloat16
    )
    if load.decodes and not reads_policy:
        copies += 1
    return copies * load.step.itemsize * load.parameters


def _context_bytes(load: DeviceLoad) -> int:
    """Bytes of the trainer's process itself: CUDA's context, or on a CPU Python and what it loads.
    A device of engines alone has none."""
    if not (load.trains or load.has_frozen) and load.step.vllm:
        return 0
    if not load.on_cpu:
        return CUDA_CONTEXT_BYTES
    size = PYTHON_BYTES
    if load.step.in_bfloat16:
        size += BFLOAT16_BYTES
    if load.ranked_policy or load.has_adapters:
        size += RANK_LIBRARY_BYTES
    return size


def engine_bytes(load: DeviceLoad, phase: str) -> int:
    """Bytes of processes beside the trainer's on a device, in a phase. Each has a context. A vLLM
    engine that is awake also has its share of the GPU's memory, and one that sleeps its CUDA
    graphs. What others of our own compute with counts as the trainer's."""
    context = PYTHON_BYTES if load.on_cpu else CUDA_CONTEXT_BYTES
    processes = load.further_processes + load.has_trainer
    if _context_bytes(load):  # That of one of them counts as the trainer's.
        processes = max(0, processes - 1)
    return processes * context + _vllm_bytes(load, phase, context)


def _vllm_bytes(load: DeviceLoad, phase: str, context: int) -> int:
    """Bytes of the vLLM engines on a device in a phase, each with a context."""
    if not load.step.vllm or not (load.samples or load.evaluates):
        return 0
    sleeps = load.step.sleeps and load.trains and not load.on_cpu
    if sleeps and phase not in AWAKE:
        return load.engines * (context + GRAPH_BYTES)
    memory_share = load.step.gpu_memory_utilization
    if not memory_share:
        memory_share = engine_share(load.roles, load.device, load.engines)
    return load.engines * (int(memory_share * load.step.card) + context)
