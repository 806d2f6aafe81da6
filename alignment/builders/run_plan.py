"""What follows from a run's arguments, its machine and its base model: devices, kind of policy,
engines, schedule and lengths. Builders read it here instead of working it out again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from alignment.args import Args, RLArgs, SFTArgs
from alignment.builders.devices import (
    asks_for_ranks,
    check_one_device,
    check_processes,
    devices_of_ranks,
    roles_of,
)
from alignment.builders.evaluations import evaluation_tokens
from alignment.model.loading import compute_dtype, load_config
from alignment.model.shape import ModelShape
from alignment.planning.placement import STATE_SHARE, Roles, engine_share
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import (
    AUTO,
    DEVICE_MAP,
    RESOLVED_KINDS,
    kind_of_devices,
    kind_of_ranks,
    policy_kind,
)
from alignment.rollouts.config import Schedule
from alignment.sampling.sampler import SamplerConfig
from alignment.system.device_memory import total_bytes
from alignment.system.errors import UserError
from alignment.system.torchrun import PROCESSES


@dataclass(frozen=True)
class PlannedMachines:
    """The machines that a run is planned for, all alike; by default this one."""

    gpus: int | None = None  # GPUs of each machine; None: as many as this process sees.
    memory: float = 0.0  # Bytes of each GPU, or of a host without GPUs; 0.0: as on this machine.
    number: int = 1
    card: Mapping[str, Any] | None = None  # The numbers of each GPU; None: of no named card.


THIS_MACHINE = PlannedMachines()


@dataclass(frozen=True)
class PolicyPlan:
    """The kind of policy, and where and in which type it computes."""

    kind: str  # A key of `POLICIES`, or package.module:name.
    # The device of each rank on this machine, or the devices that share out the layers, in order.
    devices: tuple[str, ...]
    dtype: str  # Type of matrix products, "float32" or "bfloat16".


@dataclass(frozen=True)
class EnginePlan:
    """The engines of one sampler, all started alike."""

    name: str  # A key of `SAMPLERS`, package.module:name, or "auto".
    config: SamplerConfig
    in_process: bool = True  # Whether an engine may read the policy's own weights in place.


@dataclass(frozen=True)
class RunPlan:
    """How a run of `train_rl` is placed and paced, resolved once (`plan_run`)."""

    # Folder or hub name of the weights to load: the base model's, or the checkpoint's on resume.
    base: str
    roles: Roles
    policy: PolicyPlan
    evaluation: EnginePlan
    rollouts: EnginePlan
    # Whether one sampler draws both evaluations and rollouts, by turns on the same devices.
    shares_sampler: bool
    # Whether rollouts are sampled between the updates; else during them, in other processes.
    samples_between_updates: bool
    # Whether engines must wait until the policy is loaded: torchrun's ranks then say which machines
    # there are, and a policy that may not start from the base which weights it has.
    engines_need_policy: bool
    schedule: Schedule
    # Whether a copy of the policy on the reference's device computes old log-probs.
    keeps_old_policy: bool
    response_tokens: int  # Of the longest response that is trained.
    longest_response: int  # Of any sampled response, evaluations' included.

    @property
    def engines(self) -> dict[str, EnginePlan]:
        """The samplers by their use, "evaluation" and, where it has its own, "rollouts"."""
        if self.shares_sampler:
            return {"evaluation": self.evaluation}
        return {"evaluation": self.evaluation, "rollouts": self.rollouts}


def plan_run(args: RLArgs, base: str, machines: PlannedMachines = THIS_MACHINE) -> RunPlan:
    """The plan of a run on such `machines` that loads the weights of the folder `base`.

    `base` must exist, since its size decides the kind of policy where that is "auto"; a warm start
    is made before. Raises `UserError` as `roles_of` and `plan_policy`."""
    roles = roles_of(args, machines.gpus)
    policy = plan_policy(args, roles, base, machines)
    samples_between_updates = args.rollouts == "sync"
    is_shared = shares_sampler(args, roles)
    evaluation_devices = roles.sample if is_shared else (roles.eval,)
    evaluation = _with_sleep(plan_engine(args, roles, base, evaluation_devices), roles)
    rollouts = evaluation if is_shared else _plan_rollouts(args, roles, base)
    return RunPlan(
        base=base,
        roles=roles,
        policy=policy,
        evaluation=evaluation,
        rollouts=rollouts,
        shares_sampler=is_shared,
        samples_between_updates=samples_between_updates,
        engines_need_policy=bool(PROCESSES) or not policy_kind(policy.kind).starts_from_base,
        schedule=args.schedule,
        keeps_old_policy=keeps_old_policy(args, roles, policy.kind),
        response_tokens=args.max_new_tokens,
        longest_response=max(args.max_new_tokens, evaluation_tokens(args)),
    )


def shares_sampler(args: RLArgs, roles: Roles) -> bool:
    """Whether one sampler draws both evaluations and rollouts. Engines that sample beside the
    updates are busy when an evaluation is due, and servers at --sampler_url draw rollouts only."""
    return args.rollouts == "sync" and roles.eval in roles.sample and not args.sampler_url


def counted_kernels(args: RLArgs, roles: Roles) -> str:
    """The value of --kernels by which a policy's bytes and seconds are counted: that which auto
    chooses where the check of kernels accepts it. Adapters are computed by modules of their own,
    and --compile keeps what the family's own code does: both count as eager."""
    if args.lora_rank or args.compile:
        return "eager"
    if args.use_liger_kernel:
        return "liger"
    if args.kernels != "auto":
        return args.kernels
    return "compiled" if roles.policy[0].startswith("cuda") else "eager"


def keeps_old_policy(args: RLArgs, roles: Roles, kind: str) -> bool:
    """Whether a copy of a policy of this kind computes old log-probs on the reference's device.

    A copy would gain nothing on the policy's own device, and has one process's weights. Without a
    copy the policy computes old log-probs itself, before its first update."""
    is_on_policys_device = roles.policy == (roles.reference,)
    has_equal_copy = args.copies_old_policy and not policy_kind(kind).ranked
    return has_equal_copy and not is_on_policys_device


def _plan_rollouts(args: RLArgs, roles: Roles, base: str) -> EnginePlan:
    """The engines that sample rollouts alone: those of --sampler, or the servers of
    --sampler_url."""
    engine = plan_engine(args, roles, base, roles.sample)
    samples_between_updates = args.rollouts == "sync"
    if samples_between_updates:  # Engines that sample during the updates have no time to sleep.
        engine = _with_sleep(engine, roles)
    name = "vllm_server" if args.sampler_url else engine.name
    config = replace(engine.config, url=args.sampler_url, weights_folder=args.output_dir)
    return EnginePlan(name, config, in_process=samples_between_updates)


def _with_sleep(engine: EnginePlan, roles: Roles) -> EnginePlan:
    """The same engines, set to sleep if they share a GPU with the policy: while it computes, they
    give that GPU's memory back."""
    devices = engine.config.devices
    shares_gpu = devices[0] != "cpu" and not set(devices).isdisjoint(roles.policy)
    return replace(engine, config=replace(engine.config, sleeps=shares_gpu))


@dataclass(frozen=True)
class SFTPlan:
    """How a run of `sft` is placed, resolved once (`plan_sft`)."""

    policy: PolicyPlan
    evaluation: EnginePlan  # Of the trained model.
    held_out: EnginePlan  # Of the policy while it trains, whose weights it may read in place.


def plan_sft(args: SFTArgs, base: str) -> SFTPlan:
    """The plan of a run that fine-tunes the model `base`. Raises `UserError` as `roles_of` and
    `plan_policy`."""
    roles = roles_of(args)
    return SFTPlan(
        policy=plan_policy(args, roles, base),
        evaluation=plan_engine(args, roles, args.sft_base, (roles.eval,)),
        held_out=replace(plan_engine(args, roles, base, (roles.eval,)), name="transformers"),
    )


def plan_evaluation(args: Args, base: str) -> EnginePlan:
    """The engine of --sampler that evaluates the model `base` where nothing is trained: on the
    device of the role "eval"."""
    roles = roles_of(args)
    return plan_engine(args, roles, base, (roles.eval,))


def plan_sampling(args: Args, base: str) -> EnginePlan:
    """The engines of --sampler that sample from the model `base` where nothing is trained: on the
    devices of the role "sample"."""
    roles = roles_of(args)
    return plan_engine(args, roles, base, roles.sample)


def plan_engine(args: Args, roles: Roles, base: str, devices: tuple[str, ...]) -> EnginePlan:
    """The engines of --sampler on `devices`, with the weights of the folder `base`, not yet set to
    sleep.

    A vLLM engine's share of a GPU's memory is --gpu_memory_utilization. By default it is what the
    other roles leave on the fullest of the devices."""
    first, *further = devices
    share = args.gpu_memory_utilization
    if not share:
        engines = engines_on_shared_gpu(args, roles)
        share = min(engine_share(roles, device, engines) for device in devices)
    tensor_parallel = args.sampler_tensor_parallel if further else 1
    config = SamplerConfig(
        model_path=base,
        device=first,
        further_devices=tuple(further),
        dtype=compute_dtype(args.dtype, first),
        timeout=args.sampler_timeout,
        memory_share=share,
        tensor_parallel=tensor_parallel,
        settings=args.sampler_settings,
    )
    return EnginePlan(args.sampler, config)


def engines_on_shared_gpu(args: Args, roles: Roles) -> int:
    """The number of engines that share one GPU's memory: 2 where the engine of asynchronous
    rollouts is on the same GPU as the evaluation's, else 1. Servers at --sampler_url have GPUs of
    their own."""
    if not isinstance(args, RLArgs) or args.rollouts == "sync" or args.sampler_url:
        return 1
    return 2 if roles.eval in roles.sample else 1


def own_processes(args: RLArgs, vllm: bool) -> frozenset[str]:
    """Of "sampling", "reference" and "teacher", those that our own code computes in processes of
    their own: with --rollouts async all that no vLLM does."""
    if args.rollouts == "sync":
        return frozenset()
    if vllm or args.sampler_url:
        return frozenset(["reference", "teacher"])
    return frozenset(["sampling", "reference", "teacher"])


def plan_policy(
    args: Args, roles: Roles, base: str, machines: PlannedMachines = THIS_MACHINE
) -> PolicyPlan:
    """The policy's kind, devices and dtype. --policy_parallelism "device_map" and "auto" become a
    kind here, by the number of devices, or of ranks and the size of the model `base`; RL has an
    "auto" that the plan decides before (`with_fastest_kind`).

    Raises `UserError` where the devices or processes do not suit the kind, and where it depends on
    the unknown memory of other machines."""
    devices = roles.policy
    kind = args.policy_parallelism
    has_ranks = asks_for_ranks(args, machines.number)
    if policy_kind(kind).ranked or (kind in RESOLVED_KINDS and has_ranks):
        devices = devices_of_ranks(args.policy_ranks, devices)
    if kind == AUTO or (kind == DEVICE_MAP and has_ranks):
        ranks = max(PROCESSES, machines.number * len(devices))
        kind = kind_of_ranks(ranks, lambda: _fits_each_device(args, base, devices, machines))
    kind = kind_of_devices(kind, len(devices))
    check_processes(args, kind)
    check_one_device(kind, devices)
    return PolicyPlan(kind, devices, compute_dtype(args.dtype, devices[0]))


def _fits_each_device(
    args: Args, base: str, devices: tuple[str, ...], machines: PlannedMachines
) -> bool:
    """Whether one device holds all weights, gradients and moments, with room for activations."""
    if machines.gpus is not None and not machines.memory:
        raise UserError(
            f"--policy_parallelism {args.policy_parallelism} depends on the memory of a GPU: give"
            " --gpu_memory, or name a kind"
        )
    shape = ModelShape.from_config(load_config(base), args.lora_rank, args.lora_targets)
    optimizer = getattr(args, "optimizer", "adamw")  # Commands that do not train have no flag.
    state = shape.state_bytes(shape.parameters, OPTIMIZERS[optimizer].device_bytes)
    memory = machines.memory or min(map(total_bytes, devices))
    ranks_per_memory = 1
    if "cuda" not in devices[0]:
        ranks_per_memory = len(devices)  # Ranks on a CPU share the host's memory.
    return state <= STATE_SHARE * memory / ranks_per_memory
