"""GPUs + model shape -> which role and which layer sits where, and the bytes on each. No device is
touched. Devices are the strings "cpu" and "cuda:N", as in the device maps of `from_pretrained` and
`accelerate.dispatch_model`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import RANKED
from alignment.system.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLAGS = {
    "sample": "--sample_device",
    "reference": "--reference_model_device",
    "eval": "--eval_device",
}
HELPERS = tuple(FLAGS)  # in the order in which GPUs are handed out, highest first
FLAGS |= {"policy": "--policy_devices"}


@dataclass(frozen=True)
class Roles:
    """Where each role runs. `policy` holds its devices in layer order, `sample` those of the
    sampler's engines."""

    policy: tuple[str, ...]
    sample: tuple[str, ...]
    reference: str
    eval: str


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
    several = sample_device.split(",") if sample_device is not None else ()
    texts = {
        "sample": several,
        "reference": [reference_model_device],
        "eval": [eval_device],
        "policy": policy_devices,
    }
    listed = {
        role: tuple(_read_device(FLAGS[role], t, gpus) for t in of if t is not None)
        for role, of in texts.items()
    }
    named = {
        role: next((device for device in listed[role] if device != "cpu"), "cpu")
        for role in HELPERS
        if listed[role]
    }
    samplers, policy = listed["sample"], listed["policy"]
    for role, devices in listed.items():
        for device, times in Counter(devices).items():
            if times > 1 and (role, device) != ("sample", "cpu"):
                raise UserError(
                    f"{FLAGS[role]} lists {device} {times} times; list each device once"
                )
    if not gpus:
        return Roles(policy=("cpu",), sample=samplers or ("cpu",), reference="cpu", eval="cpu")

    free = [gpu for gpu in gpus if gpu not in (*policy, *named.values(), *samplers)]
    if not policy and not free and num_gpus > 1:
        flags = " and ".join(
            f"{FLAGS[role]} {' '.join(listed[role])}" for role in named if named[role] != "cpu"
        )
        remedy = (
            "put two of these on one GPU, or say which GPU the policy shares with"
            f" {FLAGS['policy']}"
        )
        raise UserError(f"{flags} leave none of the {num_gpus} GPUs for the policy; {remedy}")
    spare = free if policy else free[1:]  # a policy by default keeps the lowest free GPU
    helpers = _place_helpers(named, spare, policy, gpus)
    samplers = samplers or (helpers["sample"],)
    for sampler in samplers if vllm else ():
        _refuse_vllm_clashes(named, helpers | {"sample": sampler}, spare, policy, gpus)
    # No GPU is left over only when there is just one, which then holds everything.
    rest = tuple(gpu for gpu in gpus if gpu not in (*helpers.values(), *samplers)) or gpus
    return Roles(policy=policy or rest, **helpers | {"sample": samplers})


def _read_device(flag: str, text: str, gpus: Sequence[str]) -> str:
    """The device that `text` names, as "cpu" or "cuda:N"; bare "cuda" is cuda:0."""
    if text == "cpu":
        return text
    if (match := re.fullmatch(r"cuda(?::([0-9]+))?", text)) is None:
        raise UserError(f"{flag} {text!r} is not a device; write cpu or cuda:N, such as cuda:0")
    device = f"cuda:{int(match[1] or 0)}"
    if not gpus:
        raise UserError(f"{flag} {device}, but no GPU is visible; use cpu or leave the flag out")
    if device not in gpus:
        visible = (
            f"1 GPU is visible ({gpus[0]})"
            if len(gpus) == 1
            else f"{len(gpus)} GPUs are visible ({gpus[0]}..{gpus[-1]})"
        )
        raise UserError(
            f"{flag} {device}, but only {visible}; name one of these or leave the flag out"
        )
    return device


def _place_helpers(
    named: dict[str, str], spare: Sequence[str], policy: Sequence[str], gpus: Sequence[str]
) -> dict[str, str]:
    """Fill in the helpers that were not named: the highest spare GPU each; else that of the helper
    just before (eval the reference, the reference the sampler), else of one after it; and one of
    the policy's only when the policy has them all."""
    placed, left = dict(named), list(spare)
    for index, role in enumerate(HELPERS):
        if role not in named:
            neighbours = [
                placed.get(other) for other in (*reversed(HELPERS[:index]), *HELPERS[index + 1 :])
            ]
            shareable = [device for device in neighbours if device in gpus and device not in policy]
            placed[role] = left.pop() if left else next(iter(shareable), gpus[-1])
    return placed


def _refuse_vllm_clashes(
    named: dict, helpers: dict, spare: Sequence[str], policy: Sequence[str], gpus: Sequence[str]
) -> None:
    """Refuse placements that a vLLM engine cannot start in: off the GPUs, or on one that another
    role needs. The sampler and eval may share a GPU, and so an engine; a single GPU holds all
    roles; sampler and reference may share if no GPU is spare."""
    greedy = "but vLLM claims most of its GPU's memory at start"
    for role in ("sample", "eval"):
        if helpers[role] == "cpu":
            names = gpus[0] if len(gpus) == 1 else f"{gpus[0]}..{gpus[-1]}"
            remedy = f"name a GPU ({names}), leave the flag out, or sample without vLLM"
            raise UserError(
                f"{FLAGS[role]} cpu, but vLLM's NVIDIA build cannot run there; {remedy}"
            )
        if len(gpus) == 1 or helpers[role] not in policy:
            continue
        if role not in named:
            reason = f"{greedy} and the {role} role has none to itself"
            raise UserError(
                f"{FLAGS['policy']} names every GPU, {reason}; take {gpus[-1]} off"
                f" {FLAGS['policy']}"
            )
        remedy = (
            f"use {FLAGS[role]} {spare[-1]}"
            if spare
            else f"take {helpers[role]} off {FLAGS['policy']}"
        )
        raise UserError(
            f"{FLAGS[role]} {helpers[role]} is also in {FLAGS['policy']}, {greedy}; {remedy}"
        )
    if "sample" in named and helpers["sample"] == named.get("reference") and spare:
        both = f"{FLAGS['sample']} and {FLAGS['reference']} are both {helpers['sample']}"
        raise UserError(f"{both}, {greedy}; use {FLAGS['reference']} {spare[-1]}")


def engine_share(roles: Roles, device: str, engines: int = 1) -> float:
    """The share of a GPU's memory that each of `engines` vLLM engines on it claims by default."""
    return (0.4 if device in {*roles.policy, roles.reference} else 0.9) / engines


@dataclass(frozen=True)
class ModelShape:
    """The modules of a causal language model that a device map names, in forward order, and their
    sizes."""

    parameters: Mapping[str, int]
    """Hugging Face module name -> number of its parameters. A tied head counts 0: its matrix is
    counted as the embedding."""
    layers: tuple[str, ...]
    head: str
    cast: int = 0  # How many parameters are among `cast_by_autocast`.
    adapters: Mapping[str, int] | None = None
    """With --lora_rank, the parameters of each module's adapters, which are then all that is
    trained."""

    @classmethod
    def from_config(cls, config: Any, lora_rank: int = 0, lora_targets: str = "") -> ModelShape:
        """Count a model that has no weights. Raises `UserError` as `of` and `adapted_layers` do."""
        model = empty_model(config)
        shape = cls.of(model)
        if not lora_rank:
            return shape
        adapters = dict.fromkeys(shape.parameters, 0)
        for name, layer in adapted_layers(
            model, lora_targets
        ).items():  # A [rank, inputs] and B [outputs, rank]
            adapters[next(m for m in adapters if f"{name}.".startswith(f"{m}."))] += (
                lora_rank * sum(layer.weight.shape)
            )
        return replace(shape, adapters=adapters)

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """Read a model's modules. Raises `UserError` for a family without one list of layers
        between its embedding and head."""
        names = {module: name for name, module in model.named_modules()}
        number, decoder = model.config.num_hidden_layers, model.get_decoder()
        stacks = [
            each
            for each in decoder.children()
            if type(each).__name__ == "ModuleList" and len(each) == number
        ]
        parameters: dict[str, int] = {}
        counted: set[Any] = set()
        # a decoder's own tensors would get no device
        if len(stacks) == 1 and not [*decoder.buffers(recurse=False)]:
            # Modules without parameters, such as rotary embeddings, compute with the embedding's
            # output, so they come first.
            children = sorted(
                decoder.children(), key=lambda child: any(True for _ in child.parameters())
            )
            start = children.index(stacks[0])
            for module in (
                *children[:start],
                *stacks[0],
                *children[start + 1 :],
                model.get_output_embeddings(),
            ):
                own = set(module.parameters()) - counted
                counted |= own
                parameters[names[module]] = sum(parameter.numel() for parameter in own)
        if counted != set(model.parameters()):
            kind = model.config.model_type
            raise UserError(
                f"model_type {kind!r} is no embedding, list of layers and head, so it cannot be"
                " placed"
            )
        cast = sum(parameter.numel() for parameter in cast_by_autocast(model))
        return cls(
            parameters,
            tuple(names[layer] for layer in stacks[0]),
            names[model.get_output_embeddings()],
            cast=cast,
        )

    @property
    def is_tied(self) -> bool:
        """Whether the head's matrix is the embedding's."""
        return self.parameters[self.head] == 0

    def layer_share(self, modules: Sequence[str]) -> float:
        """The share of the layers that is among some modules."""
        return sum(name in modules for name in self.layers) / len(self.layers)

    def trained(self, modules: Iterable[str]) -> int:
        """The trained parameters of some modules."""
        return sum((self.adapters or self.parameters)[name] for name in modules)

    def state_bytes(self, modules: Iterable[str], trained_bytes: int) -> int:
        """Bytes of some modules' weights, gradients and moments, of which a trained parameter has
        `trained_bytes`."""
        frozen = sum(self.parameters[name] for name in modules) if self.adapters else 0
        return 4 * frozen + trained_bytes * self.trained(modules)

    def frozen_bytes(self, itemsize: int) -> int:
        """Bytes of a model that only computes log-probs: `itemsize` for each number that autocast
        casts, 4 for others."""
        return 4 * sum(self.parameters.values()) - (4 - itemsize) * self.cast


def empty_model(config: Any) -> PreTrainedModel:
    """A model that has no weights. Raises `UserError` where transformers makes none of the
    configuration."""
    import torch  # here, as transformers below: both take seconds, and arguments are checked before

    from alignment.policy.huggingface import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of many kinds
        raise UserError(
            f"--model: transformers makes no {config.model_type} of its config.json ({error!r})"
        ) from None


def adapted_layers(model: PreTrainedModel, targets: str) -> dict[str, Any]:
    """Name -> linear layer that gets an adapter: by --lora_targets (`UserError` for others), or all
    but the head."""
    named = (
        (name, module)
        for name, module in model.named_modules()
        if module is not model.get_output_embeddings()
    )
    # GPT-2's layers are of the latter class, Falcon's of one derived from the former
    linear = {
        "Linear",
        "Conv1D",
    }
    layers = {
        name: module
        for name, module in named
        if linear & {kind.__name__ for kind in type(module).__mro__}
    }
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    if unknown := [target for target in filter(None, targets.split(",")) if target not in kinds]:
        raise UserError(
            f"--lora_targets {targets}: {unknown[0]!r} is none of this model's linear layers:"
            f" {', '.join(kinds)}"
        )
    return {
        name: layer
        for name, layer in layers.items()
        if not targets or name.rpartition(".")[2] in targets.split(",")
    }


def cast_by_autocast(model: PreTrainedModel) -> list[Any]:
    """The parameters that autocast casts for a product and that nothing else reads: of linear
    layers and GPT-2's, but for a head that is the embedding, and stacks of experts' matrices.
    Subclasses of these layers may compute otherwise."""
    of_kinds = [
        (type(module).__name__, own)
        for module in model.modules()
        for own in module.parameters(recurse=False)
    ]
    linear = [own for kind, own in of_kinds if kind in ("Linear", "Conv1D")]
    # Of one matrix alone there is no stack: RWKV's factors of the shape [1, 1, H] enter no product.
    stacks = [
        own
        for kind, own in of_kinds
        if own.ndim == 3 and len(own) > 1 and not kind.startswith("Conv")
    ]
    return [own for own in (*linear, *stacks) if own is not model.get_input_embeddings().weight]


def partition_layers(shape: ModelShape, devices: Sequence[str]) -> dict[str, str]:
    """Spread a model over `devices` in forward order: module name -> device, for
    `from_pretrained(device_map=...)`.

    Each device gets one contiguous run of [embedding, layers, head]; the largest run is as small
    and, among such splits, the bytes are as even as they can be. The last norm stays with the last
    layer, a tied head with its embedding, and rotary embeddings with the first device, which
    computes them. Of more devices than modules, the first ones are used.

    A map that mixes "cpu" with GPUs is for our own moves only: accelerate offloads "cpu" weights,
    so they cannot be trained."""
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            f"partition_layers needs at least one device, each listed once, got {list(devices)}"
        )
    runs: list[list[str]] = [[]]
    for name in shape.parameters:
        if name in shape.layers or name == shape.head:
            runs.append([])
        runs[-1].append(name)
    if shape.is_tied:
        runs[0] += runs.pop()
    sizes = [sum(shape.parameters[name] for name in run) for run in runs]
    owners = [devices[part] for part in split_evenly(sizes, min(len(devices), len(sizes)))]
    placed = {name: device for run, device in zip(runs, owners, strict=True) for name in run}
    return {name: placed[name] for name in shape.parameters}


def split_evenly(sizes: Sequence[int], parts: int) -> list[int]:
    """The part, of `parts` contiguous and non-empty ones, that each item of `sizes` falls in; 1 <=
    parts <= len(sizes).

    Exact, in O(parts * len(sizes)^2): the largest part's sum is minimal and, among such cuts, so is
    the second largest's, and so on, so that one big embedding does not excuse a lopsided rest. What
    is best of some parts stays so with one more."""
    ends = list(accumulate(sizes, initial=0))
    # By end: of the best cut of the first `end` items into the parts so far, the sums, largest
    # first, and each item's part.
    best: dict[int, tuple[list[int], list[int]]] = {0: ([], [])}
    for part in range(parts):
        longer = {}
        for end in range(part + 1, len(ends)):
            before = ((start, *best[start]) for start in best if start < end)
            longer[end] = min(
                (
                    sorted([*sums, ends[end] - ends[start]], reverse=True),
                    owners + [part] * (end - start),
                )
                for start, sums, owners in before
            )
        best = longer
    return best[len(sizes)][1]


@dataclass(frozen=True)
class Share:
    """One role's part of a device. `bytes` of parameters, the policy's gradients and moments; not
    of activations or caches."""

    device: str
    role: str
    modules: tuple[str, ...]
    bytes: int
    parts: int = 1  # Of which each of the modules' weights is one.


def issue_order(micro_batches: int, in_flight: int, heads_first: bool) -> Iterator[tuple[str, int]]:
    """("forward", "head" or "backward", number of the micro-batch) in the order in which a step
    issues them.

    In as few blocks as hold at most `in_flight`, all alike: all of a block's forwards, then, from
    the output head and the loss on, what leads back (GPipe, Huang et al. 2019, arXiv:1811.06965). A
    device works in that order; with one in flight, a split model's first device waits through each
    micro-batch's whole way. `heads_first` is for a head off the last layers' device, as a tied one:
    all of a block's heads then come before its backwards, the first of which ends on that device
    too."""
    blocks = max(1, -(-micro_batches // in_flight))
    size = max(1, -(-micro_batches // blocks))
    for start in range(0, micro_batches, size):
        block = range(start, min(start + size, micro_batches))
        forwards, heads, backwards = (
            [(action, number) for number in block] for action in ("forward", "head", "backward")
        )
        yield from forwards
        yield from heads + backwards if heads_first else chain(*zip(heads, backwards, strict=True))


def policy_shares(
    shape: ModelShape, devices: Sequence[str], kind: str, optimizer: str
) -> list[Share]:
    """What each rank, or each device of a policy of one process, holds on one machine; `kind` is
    --policy_parallelism."""
    parts, everything = len(devices) if kind == "sharded" else 1, tuple(shape.parameters)
    held = [(device, everything) for device in devices]
    if kind not in RANKED:
        placed = partition_layers(shape, devices)
        held = [
            (device, tuple(n for n in everything if placed[n] == device))
            for device in dict.fromkeys(placed.values())
        ]
    a_number = OPTIMIZERS[optimizer].device_bytes
    return [
        Share(device, "policy", names, shape.state_bytes(names, a_number) // parts, parts)
        for device, names in held
    ]


def place(
    shape: ModelShape,
    roles: Roles,
    optimizer="adamw",
    itemsize=2,
    kind="layer_split",
    tensor_parallel=1,
) -> list[Share]:
    """The shares of a policy of that `kind`, the moments that `optimizer` keeps on the CPU, then
    one whole copy for each other role, with products of numbers of `itemsize` bytes;
    `tensor_parallel` devices share an engine's. Eval on a device of the sampler's runs in the
    sampler's engines, so the two hold one copy, under the role "sample+eval"."""
    policy = policy_shares(shape, roles.policy, kind, optimizer)
    shared = roles.eval in roles.sample
    copies = [("sample+eval" if shared else "sample", device) for device in roles.sample]
    copies += [] if shared else [("eval", roles.eval)]
    # A policy whole on the reference's device is the old policy, until its first update; one with
    # adapters the reference, too.
    copies += (
        []
        if shape.adapters or roles.policy == (roles.reference,)
        else [("reference", roles.reference)]
    )
    everything, total = tuple(shape.parameters), sum(shape.parameters.values())
    on_host = (
        shape.trained(everything)
        * OPTIMIZERS[optimizer].host_bytes
        * (len(policy) if kind == "replicated" else 1)
    )
    moments = (Share("cpu", "moments", everything, on_host),) if on_host else ()
    sizes = {"eval": total * itemsize, "reference": shape.frozen_bytes(itemsize)}
    others = (
        Share(device, role, everything, sizes.get(role, total * itemsize // tensor_parallel))
        for role, device in copies
    )
    return [*policy, *moments, *others]
