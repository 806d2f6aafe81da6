"""Which role runs on which device."""

from dataclasses import dataclass
from typing import Literal

from alignment.config.flag import Extra, flag
from alignment.policy.policy import DEVICE_MAP, kinds_in_words

Kernels = Literal["auto", "eager", "compiled", "liger"]


@dataclass(frozen=True)
class PlacementFlags:
    """The devices of the roles, and how the policy uses its own."""

    sample_device: tuple[str, ...] = flag(
        (), group="devices", swept=False, changeable=True, setting=True
    )
    """Device of the sampler, such as cuda:7, or several, each with an engine that draws its share;
    by default the last GPU."""
    sampler_tensor_parallel: int = flag(
        1, group="devices", at_least=1, swept=False, changeable=True
    )
    """Devices of --sample_device that each vLLM engine takes together, for a large model."""
    reference_model_device: str | None = flag(None, group="devices", swept=False)
    """Device of the reference (old-policy) model; by default the last GPU but one."""
    eval_device: str | None = flag(None, group="devices", swept=False)
    """Device of the evaluation sampler; by default the last GPU but two."""
    policy_devices: tuple[str, ...] = flag(
        (), group="devices", swept=False, changeable=True, setting=True
    )
    """Devices the policy is split over; by default every GPU that no other role holds."""
    policy_parallelism: str = flag(
        DEVICE_MAP,
        group="devices",
        values_in_words=kinds_in_words(),
        bookkeeping=True,
        changeable=True,
        setting=True,
    )
    """How the policy uses its devices: by a kind of policy, or a class of your own as
    package.module:name."""
    policy_ranks: int = flag(
        0, group="devices", at_least=0, zero="one a device", changeable=True, setting=True
    )
    """Processes, on each machine, of a policy that has one a device; 0: one for each policy
    device."""
    rank_timeout: float = flag(60.0, group="devices", above=0, changeable=True)
    """Seconds after which a process of the policy that does not answer is lost, and the run
    stops."""


@dataclass(frozen=True)
class KernelFlags:
    """What computes the policy's layers, and vLLM's share of a GPU."""

    compile: bool = flag(False, group="devices", bookkeeping=True, changeable=True, setting=True)
    """Have torch compile the policy's layers, which takes a minute or more at the start of a run;
    for GPUs: on a CPU it is slower."""
    use_liger_kernel: bool = flag(
        False,
        group="devices",
        needs=Extra("liger_kernel", "liger"),
        bookkeeping=True,
        changeable=True,
        setting=True,
    )
    """Compute the policy's norms, rotary embeddings and MLPs by Liger's Triton kernels, on GPUs
    (extra "liger")."""
    gpu_memory_utilization: float | None = flag(
        None, group="devices", above=0, at_most=1, swept=False
    )
    """Share of a GPU's memory for vLLM; by default 0.9, or 0.4 on a shared GPU."""
    kernels: Kernels = flag(
        "auto",
        group="devices",
        needs=Extra("liger_kernel", "liger", only_for="liger"),
        bookkeeping=True,
        changeable=True,
        setting=True,
    )
    """What computes the work between the policy's matrix products: each operator of the model's own
    code (eager), functions that torch compiles, a kernel each (compiled), or Liger's Triton kernels
    for norms, rotary embeddings and MLPs and compiled functions for the rest (liger; extra
    "liger"). auto: on a GPU compiled, or else liger, if it passes a check when the policy is
    loaded; on a CPU eager."""


@dataclass(frozen=True)
class DeterminismFlags:
    """Whether a GPU computes the same bits each time."""

    deterministic: bool = flag(False, group="devices", setting=True)
    """On GPUs, use torch's deterministic kernels, where there are any; slower. A CPU needs none."""


@dataclass(frozen=True)
class MachineFlags:
    """A machine to plan for."""

    hardware: str = flag("", group="devices")
    """Instead of these: machines x GPUs x card, as 8xA100-40GB, 2x8xH100, or 8xFILE.toml of your
    own card."""
    price: float = flag(0.0, group="devices", at_least=0, zero="unknown")
    """Dollars that an hour of one GPU costs, or of a machine without; adds the run's price. 0:
    unknown."""
    calibrate: tuple[str, ...] = flag((), group="devices")
    """Folders of finished runs on such a machine, whose seconds tell its rates."""
    best: bool = flag(False, group="devices")
    """Rank the placements and parallelisms that fit by their time, each with its command line."""
    json: str = flag("", group="devices")
    """File to write all of it to."""
    num_gpus: int | None = flag(None, group="devices", at_least=0)
    """GPUs of a machine to plan for; by default those of this one."""
    machines: int = flag(1, group="devices", above=0)
    """Machines to plan for, all alike; several start the processes of a policy that has one a
    device."""
    gpu_memory: float | None = flag(None, group="devices", at_least=1)
    """GB (1e9 bytes) of each GPU, or of a host without; by default this machine's, where --num_gpus
    says nothing."""
