"""Which role sits on which device, and the bytes of its weights there. No device is touched.

Devices are the strings "cpu" and "cuda:N", as in the device maps of `from_pretrained` and
`accelerate.dispatch_model`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alignment.model.device_map import partition_layers
from alignment.model.shape import ModelShape
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import policy_kind
from alignment.system.errors import UserError

STATE_SHARE = 0.7
"""Share of a device's memory that weights, gradients and moments may take where each has all of
them; the rest is for activations.

Assumption: a choice. Shown wrong by: a run with `--policy_parallelism auto` that replicates and
runs out of memory, or computes layers twice. Read by: `_fits_each_device`."""

HELPERS = ("sample", "reference", "eval")
"""The roles beside the policy, in the order in which GPUs are handed out, highest first."""

FLAGS = {
    "sample": "--sample_device",
    "reference": "--reference_model_device",
    "eval": "--eval_device",
    "policy": "--policy_devices",
}
"""Role -> the flag that names its devices."""


@dataclass(frozen=True)
class Roles:
    """Where each role runs. `policy` holds its devices in layer order, `sample` those of the
    sampler's engines."""

    policy: tuple[str, ...]
    sample: tuple[str, ...]
    reference: str
    eval: str
    teacher: str = ""  # Empty without --teacher.

    @property
    def trainer(self) -> frozenset[str]:
        """The devices of the trainer's models: the policy and the frozen models beside it."""
        frozen = {self.reference, self.teacher} - {""}
        return frozenset(self.policy) | frozen


def assign_roles(
    num_gpus: int,
    sample_device: str | None = None,
    reference_model_device: str | None = None,
    eval_device: str | None = None,
    policy_devices: tuple[str, ...] = (),
    vllm: bool = False,
) -> Roles:
    """Give each role its device; None and () ask for the default. `sample_device` may list several,
    with commas.

    By default sampler, reference and eval take the highest GPUs in that order and the policy keeps
    the rest: 7, 6, 5 and 0-4 of eight. With three GPUs reference and eval share one, with two all
    three share cuda:1; one GPU, or the CPU, holds everything. Defaults fill the highest GPUs that
    no flag names, then share, but never take the policy's last one.

    Raises UserError for a device that is malformed, absent, or taken, naming the flag and what to
    change."""
    gpus = tuple(f"cuda:{index}" for index in range(num_gpus))
    texts: dict[str, Sequence[str]] = {
        "sample": [],
        "reference": [],
        "eval": [],
        "policy": policy_devices,
    }
    if sample_device is not None:
        texts["sample"] = sample_device.split(",")
    if reference_model_device is not None:
        texts["reference"] = [reference_model_device]
    if eval_device is not None:
        texts["eval"] = [eval_device]
    listed = {role: _read_devices(FLAGS[role], texts[role], gpus) for role in texts}
    for role, devices in listed.items():
        _refuse_repeated(role, devices)
    samplers = listed["sample"]
    policy = listed["policy"]
    if not gpus:
        return Roles(policy=("cpu",), sample=samplers or ("cpu",), reference="cpu", eval="cpu")

    named = _named_helpers(listed)
    taken = {*policy, *named.values(), *samplers}
    free = [gpu for gpu in gpus if gpu not in taken]
    if not policy and not free and num_gpus > 1:
        _refuse_no_policy_gpu(named, listed, num_gpus)
    spare = free if policy else free[1:]  # a policy by default keeps the lowest free GPU
    helpers = _place_helpers(named, spare, policy, gpus)
    samplers = samplers or (helpers["sample"],)
    if vllm:
        for sampler in samplers:
            _refuse_vllm_clashes(named, helpers | {"sample": sampler}, spare, policy, gpus)
    # No GPU is left over only when there is just one, which then holds everything.
    helper_devices = {*helpers.values(), *samplers}
    left = tuple(gpu for gpu in gpus if gpu not in helper_devices)
    return Roles(
        policy=policy or left or gpus,
        sample=samplers,
        reference=helpers["reference"],
        eval=helpers["eval"],
    )


def with_teacher(
    roles: Roles, device: str | None, num_gpus: int, policy_is_named: bool = False
) -> Roles:
    """The roles with a teacher's on `device`; None: on the reference's. A GPU that is named for the
    teacher is none of the policy's, unless `policy_is_named` or the policy has no other.

    Raises UserError for a device that is malformed or absent."""
    if device is None:
        return replace(roles, teacher=roles.reference)
    gpus = tuple(f"cuda:{index}" for index in range(num_gpus))
    teacher = _read_device("--teacher_device", device, gpus)
    policy = roles.policy
    if not policy_is_named:
        policy = tuple(other for other in policy if other != teacher) or policy
    return replace(roles, policy=policy, teacher=teacher)


def _read_devices(flag: str, texts: Sequence[str], gpus: Sequence[str]) -> tuple[str, ...]:
    """The devices that a flag lists."""
    return tuple(_read_device(flag, text, gpus) for text in texts)


def _named_helpers(listed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The device of each helper that a flag names. Of several samplers it is the first GPU that
    counts where roles share."""
    named = {}
    for role in HELPERS:
        if listed[role]:
            gpus = [device for device in listed[role] if device != "cpu"]
            named[role] = gpus[0] if gpus else "cpu"
    return named


def _refuse_repeated(role: str, devices: Sequence[str]) -> None:
    """Raise `UserError` for a device that a flag lists twice; several samplers may share the
    CPU."""
    for device, times in Counter(devices).items():
        if times > 1 and (role, device) != ("sample", "cpu"):
            raise UserError(f"{FLAGS[role]} lists {device} {times} times; list each device once")


def _refuse_no_policy_gpu(
    named: Mapping[str, str], listed: Mapping[str, Sequence[str]], num_gpus: int
) -> None:
    """Raise `UserError`, because the other roles' flags name all GPUs."""
    with_gpus = [role for role in named if named[role] != "cpu"]
    flags = " and ".join(f"{FLAGS[role]} {' '.join(listed[role])}" for role in with_gpus)
    remedy = (
        f"put two of these on one GPU, or say which GPU the policy shares with {FLAGS['policy']}"
    )
    raise UserError(f"{flags} leave none of the {num_gpus} GPUs for the policy; {remedy}")


def _read_device(flag: str, text: str, gpus: Sequence[str]) -> str:
    """The device that `text` names, as "cpu" or "cuda:N"; bare "cuda" is cuda:0."""
    if text == "cpu":
        return text
    match = re.fullmatch(r"cuda(?::([0-9]+))?", text)
    if match is None:
        raise UserError(f"{flag} {text!r} is not a device; write cpu or cuda:N, such as cuda:0")
    device = f"cuda:{int(match[1] or 0)}"
    if not gpus:
        raise UserError(f"{flag} {device}, but no GPU is visible; use cpu or leave the flag out")
    if device not in gpus:
        visible = f"{len(gpus)} GPUs are visible ({gpus[0]}..{gpus[-1]})"
        if len(gpus) == 1:
            visible = f"1 GPU is visible ({gpus[0]})"
        raise UserError(
            f"{flag} {device}, but only {visible}; name one of these or leave the flag out"
        )
    return device


def _place_helpers(
    named: Mapping[str, str], spare: Sequence[str], policy: Sequence[str], gpus: Sequence[str]
) -> dict[str, str]:
    """Fill in the helpers that were not named: the highest spare GPU each; else that of the helper
    just before (eval the reference, the reference the sampler), else of one after it; and one of
    the policy's only when the policy has them all."""
    placed = dict(named)
    left = list(spare)
    for index, role in enumerate(HELPERS):
        if role in named:
            continue
        if left:
            placed[role] = left.pop()
            continue
        neighbours = (*reversed(HELPERS[:index]), *HELPERS[index + 1 :])
        devices = [placed[other] for other in neighbours if other in placed]
        shareable = [device for device in devices if device in gpus and device not in policy]
        placed[role] = shareable[0] if shareable else gpus[-1]
    return placed


def _refuse_vllm_clashes(
    named: Mapping[str, str],
    helpers: Mapping[str, str],
    spare: Sequence[str],
    policy: Sequence[str],
    gpus: Sequence[str],
) -> None:
    """Refuse placements that a vLLM engine cannot start in: off the GPUs, or on one that another
    role needs. The sampler and eval may share a GPU, and so an engine; a single GPU holds all
    roles; sampler and reference may share if no GPU is spare."""
    greedy = "but vLLM claims most of its GPU's memory at start"
    for role in ("sample", "eval"):
        device = helpers[role]
        if device == "cpu":
            names = gpus[0] if len(gpus) == 1 else f"{gpus[0]}..{gpus[-1]}"
            remedy = f"name a GPU ({names}), leave the flag out, or sample without vLLM"
            raise UserError(
                f"{FLAGS[role]} cpu, but vLLM's NVIDIA build cannot run there; {remedy}"
            )
        if len(gpus) == 1 or device not in policy:
            continue
        if role not in named:
            reason = f"{greedy} and the {role} role has none to itself"
            remedy = f"take {gpus[-1]} off {FLAGS['policy']}"
            raise UserError(f"{FLAGS['policy']} names every GPU, {reason}; {remedy}")
        remedy = f"take {device} off {FLAGS['policy']}"
        if spare:
            remedy = f"use {FLAGS[role]} {spare[-1]}"
        raise UserError(f"{FLAGS[role]} {device} is also in {FLAGS['policy']}, {greedy}; {remedy}")
    if "sample" in named and helpers["sample"] == named.get("reference") and spare:
        both = f"{FLAGS['sample']} and {FLAGS['reference']} are both {helpers['sample']}"
        raise UserError(f"{both}, {greedy}; use {FLAGS['reference']} {spare[-1]}")


SHARED_GPU = 0.4
"""Share of a GPU's memory that vLLM claims beside the policy or a reference.

Assumption: a choice. Shown wrong by: tokens a second of rollouts at other shares, and peaks of the
update. Read by: `engine_share`."""

OWN_GPU = 0.9
"""Share of a GPU's memory that vLLM claims on a GPU of its own.

Source: vLLM's default when it was written. Shown wrong by: vLLM's documentation of
gpu_memory_utilization. Read by: `engine_share`."""


def engine_share(roles: Roles, device: str, engines: int = 1) -> float:
    """The share of a GPU's memory that each of `engines` vLLM engines on it claims by default."""
    share = OWN_GPU
    if device in roles.trainer:
        share = SHARED_GPU
    return share / engines


@dataclass(frozen=True)
class Share:
    """One role's part of a device. `bytes` of parameters, the policy's gradients and moments; not
    of activations or caches."""

    device: str
    role: str
    modules: tuple[str, ...]
    bytes: int
    parts: int = 1  # Of which each of the modules' weights is one.


def policy_shares(
    shape: ModelShape, devices: Sequence[str], kind: str, optimizer: str
) -> list[Share]:
    """The shares of a machine's ranks, or of the devices of a policy of one process; `kind` is
    --policy_parallelism."""
    policy = policy_kind(kind)
    parts = policy.parts(len(devices))
    trained_bytes = OPTIMIZERS[optimizer].device_bytes

    def share_of(device: str, modules: tuple[str, ...]) -> Share:
        size = shape.state_bytes(modules, trained_bytes) // parts
        return Share(device, "policy", modules, size, parts)

    if policy.holds != "layers":
        every_module = tuple(shape.parameters)
        return [share_of(device, every_module) for device in devices]
    device_map = partition_layers(shape, devices)
    shares = []
    for device in dict.fromkeys(device_map.values()):
        modules = tuple(name for name in shape.parameters if device_map[name] == device)
        shares.append(share_of(device, modules))
    return shares


def place(
    shape: ModelShape,
    roles: Roles,
    optimizer: str,
    itemsize: int,
    kind: str,
    tensor_parallel: int = 1,
) -> list[Share]:
    """The shares of a policy of that `kind`, the moments that `optimizer` keeps on the CPU, then
    one whole copy for sampler and eval, with products of numbers of `itemsize` bytes;
    `tensor_parallel` devices share an engine's. Eval on a device of the sampler's runs in the
    sampler's engines, so the two hold one copy, under the role "sample+eval"."""
    policy = policy_shares(shape, roles.policy, kind, optimizer)
    everything = tuple(shape.parameters)
    weights = sum(shape.parameters.values()) * itemsize
    engine_part = weights // tensor_parallel
    shares = list(policy)

    copies = policy_kind(kind).copies(len(policy))
    on_host = shape.trained(everything) * OPTIMIZERS[optimizer].host_bytes * copies
    if on_host:
        shares.append(Share("cpu", "moments", everything, on_host))

    evaluates_too = roles.eval in roles.sample
    sampler = "sample+eval" if evaluates_too else "sample"
    shares += [Share(device, sampler, everything, engine_part) for device in roles.sample]
    if not evaluates_too:
        shares.append(Share(roles.eval, "eval", everything, weights))
    return shares


def frozen_share(
    shape: ModelShape, device: str, role: str, itemsize: int, models: int = 1
) -> Share:
    """The share of so many frozen models of that shape, such as a reference or a teacher, with
    products of numbers of `itemsize` bytes."""
    return Share(device, role, tuple(shape.parameters), models * shape.frozen_bytes(itemsize))
