"""Which devices a run computes on, and whether its policy and kernels suit them, before a tensor
library is loaded."""

import os
import shutil
from dataclasses import replace
from importlib.util import find_spec

from alignment.args import Args, RLArgs
from alignment.planning.placement import Roles, assign_roles, with_teacher
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import POLICIES, RESOLVED_KINDS, kind_of_devices, policy_kind
from alignment.sampling.sampler import named_engine
from alignment.system.errors import UserError
from alignment.system.gpus import has_gpu_files, unusable_driver
from alignment.system.registry import find
from alignment.system.torchrun import PROCESSES, PROCESSES_HERE


def roles_of(args: Args, num_gpus: int | None = None) -> Roles:
    """Which device each role has, by the flags and the number of GPUs; None: those that are
    visible. Raises `UserError` where that cannot work."""
    if num_gpus is None:
        num_gpus = visible_gpus()
    claims_gpu = named_engine(args.sampler).claims_gpu
    roles = assign_roles(
        num_gpus,
        ",".join(args.sample_device) or None,
        args.reference_model_device,
        args.eval_device,
        args.policy_devices,
        claims_gpu,
    )
    if isinstance(args, RLArgs) and args.teacher:
        roles = with_teacher(roles, args.teacher_device, num_gpus, bool(args.policy_devices))
    number = len(roles.sample)
    parallel = args.sampler_tensor_parallel
    if parallel > 1 and not claims_gpu:
        raise UserError(
            f"--sampler_tensor_parallel {parallel}: only vLLM takes several devices; choose"
            " --sampler vllm"
        )
    if number % parallel:
        named = f"{number} ({' '.join(roles.sample)}); name {parallel} for each engine"
        raise UserError(f"--sampler_tensor_parallel {parallel}: --sample_device names {named}")
    if isinstance(args, RLArgs) and args.train_on == "solutions":
        # Evaluations alone are sampled.
        return replace(roles, sample=(roles.eval,))
    return roles


def devices_of_ranks(policy_ranks: int, devices: tuple[str, ...]) -> tuple[str, ...]:
    """The device of each of this machine's ranks: `policy_ranks` (0: all) of the policy's devices,
    or one for each of torchrun's processes; ranks without GPUs share the CPU. Raises `UserError`
    where there are too few devices."""
    number = PROCESSES_HERE or policy_ranks or len(devices)
    if policy_ranks not in (0, number):
        raise UserError(
            f"--policy_ranks {policy_ranks}: torchrun has started {number} processes here;"
            " leave the flag out"
        )
    if devices == ("cpu",):
        return devices * number
    if number > len(devices):
        raise UserError(
            f"--policy_ranks {number}: the policy has {len(devices)} devices ({', '.join(devices)})"
        )
    return devices[:number]


def check_processes(args: Args, kind: str) -> None:
    """Raise `UserError` for an unknown kind of policy, several processes of a policy that is one,
    and an optimiser that it does not take."""
    names = dict.fromkeys((*RESOLVED_KINDS, *POLICIES), "")
    find("--policy_parallelism", kind, names, wrap=lambda policy_class: policy_class)
    # A resolved one becomes a kind that fits the processes; of a user's own class nothing is known.
    policy = POLICIES.get(kind)
    if policy is None:
        return
    several = _several_processes(args)
    if several and not policy.ranked:
        raise UserError(f"{several}: a policy that is {kind} is one process")
    optimizer = getattr(args, "optimizer", "")
    if optimizer in policy.refused_optimizers:
        *others, last = (name for name in OPTIMIZERS if name not in policy.refused_optimizers)
        raise UserError(
            f"--optimizer {optimizer}: a {kind} policy takes {', '.join(others)} or {last}"
        )


def check_one_device(kind: str, devices: tuple[str, ...]) -> None:
    """Raise `UserError` for several devices of a policy of a kind that computes on one only."""
    if len(devices) > 1 and policy_kind(kind).one_device:
        *others, last = (name for name, other in POLICIES.items() if not other.one_device)
        raise UserError(
            f"--policy_parallelism {kind} computes on one device, and the policy has"
            f" {len(devices)} ({', '.join(devices)}): name one, as --policy_devices {devices[0]},"
            f" or choose {', '.join(others)} or {last}"
        )


def asks_for_ranks(args: Args, machines: int = 1) -> bool:
    """Whether flags, torchrun or several machines ask for a policy of one process a device."""
    return bool(args.policy_ranks or PROCESSES or machines > 1)


def _several_processes(args: Args) -> str:
    """What asks for several processes of the policy; empty where nothing does."""
    for flag in ("machines", "policy_ranks"):
        number = getattr(args, flag, 1)
        if number > 1:
            return f"--{flag} {number}"
    if PROCESSES > 1:
        return f"torchrun has started {PROCESSES} processes"
    return ""


def check_policy_devices(args: Args) -> None:
    """Raise `UserError` as `check_one_device` and `check_kernels`. It may load torch to count the
    GPUs."""
    devices = roles_of(args).policy
    check_one_device(args.policy_parallelism, devices)
    check_kernels(args, devices_of_ranks(args.policy_ranks, devices))


def check_kernels(args: Args, devices: tuple[str, ...]) -> None:
    """Raise `UserError` where kernels that are compiled find no compiler, or where Liger's cannot
    run on the policy's `devices`."""
    on_cpu = devices[0] == "cpu"
    kind = args.policy_parallelism
    if not asks_for_ranks(args):
        kind = kind_of_devices(kind, len(devices))
    is_split = policy_kind(kind).stages(len(devices)) > 1
    liger = ""
    compiling = "--compile" if args.compile else ""
    if args.kernels in ("compiled", "liger"):
        compiling = f"--kernels {args.kernels}"
    if args.use_liger_kernel or args.kernels == "liger":
        liger = compiling or "--use_liger_kernel"
    if liger and (on_cpu or is_split):
        remedy = "leave the flag out"
        if is_split:
            ranked = [name for name, kind in POLICIES.items() if kind.ranked]
            remedy = f"choose --policy_parallelism {' or '.join(ranked)}"
        raise UserError(
            f"{liger} needs a GPU for each process of the policy, not {' '.join(devices)}: {remedy}"
        )
    flag = compiling or liger
    if not flag:
        return
    # torch compiles C++ for a CPU, and launchers of Triton's kernels, in C, for a GPU.
    variable = "CC"
    compilers = ["gcc", "clang"]
    needed_packages = ""
    has_packages = True
    if on_cpu:
        variable = "CXX"
        compilers = ["g++"]
    else:
        needed_packages = " and triton"
        has_packages = find_spec("triton") is not None
    if variable in os.environ:
        compilers = [os.environ[variable]]
    if not any(map(shutil.which, compilers)) or not has_packages:
        raise UserError(
            f"{flag} needs {compilers[0]}{needed_packages}: install that, or leave the flag out"
        )


def visible_gpus() -> int:
    """The number of GPUs that torch sees. Raises `UserError` where the machine has some that torch
    cannot use."""
    if not has_gpu_files():
        return 0
    fault = unusable_driver()
    if fault:
        raise UserError(
            f"{fault}. Update the driver, or hide the GPUs by CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    import torch  # Here, because it takes seconds.

    return torch.cuda.device_count()
