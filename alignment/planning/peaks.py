"""The most bytes that each device holds in each phase of a training step, from shapes alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alignment.model.activations import (
    CACHE_BYTES,
    activation_bytes,
    checkpointed_activation_bytes,
    key_value_bytes,
    passing_bytes,
)
from alignment.model.loading import mlp_width
from alignment.model.log_probs import row_pieces
from alignment.model.shape import ModelShape
from alignment.planning.placement import Roles, Share, engine_share, policy_shares
from alignment.policy.micro_batches import MAX_ACTIVATION_BYTES, gathered_bytes, tokens_that_fit
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import RANKED
from alignment.system.files import read_toml

MEASURED = read_toml(Path(__file__).with_name("memory.toml"), "--policy_devices")


CONTEXT_BYTES, LIBRARY_BYTES, BFLOAT16_BYTES, SLACK = (
    MEASURED[of] for of in ("context", "libraries", "bfloat16", "slack")
)


GRAPH_BYTES, WORKSPACE_BYTES = MEASURED["graphs"], MEASURED["workspace"]


SPARE = 0.05  # of a card, which is left to fragmentation


@dataclass(frozen=True)
class StepShape:
    """What a training step needs to know to count its bytes."""

    card: int  # Bytes of each GPU, or of a host's for each process.
    policy_parallelism: str  # A key of `POLICIES`.
    itemsize: int  # Bytes of a number in matrix products: 2 under autocast to bfloat16, else 4.
    optimizer: str
    micro_batch_tokens: int  # 0: what `choose_micro_batch_tokens` would take.
    update_tokens: int
    """Of an update's rows, a prompt of several rows counted once: no micro-batch has more."""
    parallel: int  # Micro-batches at once, which share these tokens.
    prompt: int  # Tokens of the longest prompt.
    max_new_tokens: int  # Of the longest response.
    group_size: int
    # "sampling", "evaluation" -> prompts, responses to each, their longest tokens.
    sampled: Mapping[str, tuple[int, int, int]]
    truncated: bool  # Whether top-p or top-k leaves tokens out.
    passes: frozenset[str]  # Of "old_log_probs" and "reference", those that the loss needs.
    frozen: int  # Frozen models kept on the reference's device: the reference, and the old policy.
    vllm: bool  # Whether vLLM samples, or our own decoding.
    # vLLM's share of a GPU's memory, for each engine; None: `engine_share`.
    gpu_memory_utilization: float | None
    engines: int  # On a GPU that samples and evaluates.
    sleeps: bool
    """Whether a vLLM engine on a GPU of the policy's sleeps while the trainer computes."""
    layers: float = 1.0
    """The largest share of the model's layers on one device: `peak_bytes` tells."""
    largest_micro_batch: int = 0
    """Tokens of the largest of a real update; 0: as many as there may be."""


AWAKE = ("sampling", "evaluation", "sync", "checkpoint")
"""Phases in which an engine that sleeps is awake: from the weights that it gets to the last request
that they answer."""


RESERVED = (  # The kind of bytes that torch's allocator has got of a GPU and has not handed out.
    "reserved"
)


OF_ENGINE = "engine"  # The kind of bytes that belong to an engine's own process.


@dataclass(frozen=True)
class DevicePeak:
    """What a rank of the policy, or a device, holds at the worst moment of each phase: the
    trainer's own process, with all that computes in it, and engines in processes of their own."""

    device: str
    rank: int | None  # None: a device of a policy of one process, or of other roles.
    phases: dict[str, dict[str, int]]  # Phase -> kind -> bytes; only the phases that occur there.

    @property
    def name(self) -> str:
        """The device, and which rank's it is."""
        return self.device if self.rank is None else f"rank {self.rank}, {self.device}"

    @property
    def worst(self) -> str:
        """The phase that takes the most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def total(self) -> int:
        """Bytes of that phase."""
        return sum(self.phases[self.worst].values())

    def of_device(self, phase: str) -> int | None:
        """Bytes of a phase by all processes; None: it does not occur here."""
        return sum(self.phases[phase].values()) if phase in self.phases else None

    def of_trainer(self, phase: str) -> int | None:
        """Bytes of a phase as the trainer's process is measured: on a GPU those that torch's
        allocator hands out, without CUDA's context, on a CPU all that is resident. Neither has
        engines. None: the phase does not occur here."""
        if phase not in self.phases:
            return None
        elsewhere = (OF_ENGINE,) if self.device == "cpu" else (OF_ENGINE, RESERVED, "context")
        return sum(size for kind, size in self.phases[phase].items() if kind not in elsewhere)


def peak_bytes(shape: ModelShape, config: Any, roles: Roles, step: StepShape) -> list[DevicePeak]:
    """The peaks of the machine's ranks, or of the devices of a policy of one process, then of other
    roles' own devices. Frozen models stay through all phases. An engine keeps its whole share, but
    while it sleeps its context and graphs alone. Moments are those from the second step on. For
    fp32 weights whose linear layers are autocast."""
    shares = policy_shares(shape, roles.policy, step.policy_parallelism, step.optimizer)
    step = replace(step, layers=max(shape.layer_share(share.modules) for share in shares))
    number, others = (
        len(shares),
        {*roles.sample, roles.eval, roles.reference} - {share.device for share in shares},
    )
    shares += [Share(device, "", (), 0) for device in sorted(others)]
    # Ranks may share the host's CPU, where the first of them has the other roles, too.
    none = replace(roles, sample=(), eval="", reference="")
    here = [none if share in shares[:i] else roles for i, share in enumerate(shares)]
    ranks = number if step.policy_parallelism in RANKED else 0
    phases = [
        _phases_of(share, shape, config, there, step)
        for share, there in zip(shares, here, strict=True)
    ]
    return [
        DevicePeak(s.device, i if i < ranks else None, phases[i])
        for i, s in enumerate(shares)
        if phases[i]
    ]


def _phases_of(
    share: Share, shape: ModelShape, config: Any, roles: Roles, step: StepShape
) -> dict[str, dict[str, int]]:
    """Phase -> kind -> bytes of one share of the policy and the other roles on its device."""
    device, held, frozen = (
        share.device,
        share.modules,
        step.frozen * (share.device == roles.reference),
    )
    ranked, total = bool(held) and step.policy_parallelism in RANKED, sum(shape.parameters.values())
    checkpointing = False
    kept = _kept(share, shape, roles, step, frozen)
    moments: dict[str, list[dict[str, int]]] = {}
    for phase, there in (
        ("sampling", device in roles.sample),
        ("evaluation", device == roles.eval),
    ):
        if there:
            moments[phase] = (
                [{}] if step.vllm else _decoding(config, step, *step.sampled[phase], device)
            )
    for phase, own in (("old_log_probs", held), ("reference", held if shape.adapters else ())):
        if phase in step.passes and (frozen or own):
            moments[phase] = [_pass(shape, config, step, device, own)]
    engine = _engine_bytes(share, roles, step)
    if held:
        at_work = sum(kept.values()) + engine["update"]
        moments["update"], checkpointing = _update(share, shape, config, step, at_work)
    embedding = 4 * config.vocab_size * config.hidden_size
    if held or device in (*roles.sample, roles.eval):
        moments["sync"] = [{"transit": embedding * bool(ranked or shape.adapters)}]
    if held:  # where weights are not the policy's own, safetensors gets whole copies on the host
        copies = 4 * total * (device == "cpu") * (2 if ranked else bool(shape.adapters))
        moments["checkpoint"] = [{"transit": max(embedding * ranked, copies)}]
    worst = {
        phase: max(of, key=lambda moment: sum(moment.values())) for phase, of in moments.items()
    }
    if device != "cpu":
        for kinds in worst.values():
            if held or frozen or not step.vllm:  # the trainer's process allocates something there
                kinds["margin"] = _allocator_margin(kinds)
                kinds[RESERVED] = int(
                    SLACK["reserved"] * (sum(kept.values()) - kept["context"] + sum(kinds.values()))
                )
    else:
        for phase, kinds in worst.items():
            kind = (
                "ranks"
                if ranked
                else "adapters"
                if shape.adapters
                else "layers twice"
                if checkpointing
                else "update"
            )
            slack = SLACK[kind if phase == "update" else "other phases"]
            passing = int(slack * (sum(kinds.values()) - kinds.get("gradients", 0)))
            kinds["margin"] = (
                max(passing, 3 * BFLOAT16_BYTES * (step.itemsize == 2))
                + LIBRARY_BYTES * checkpointing
            )
            if ranked and step.itemsize == 4 and phase in ("update", "old_log_probs"):
                kinds["margin"] += (
                    5 if roles.eval else 3
                ) * embedding  # as measured; with 16 bits it is not there
    return {phase: kept | {OF_ENGINE: engine[phase]} | kinds for phase, kinds in worst.items()}


def _allocator_margin(kinds: Mapping[str, int]) -> int:
    """What torch's allocator takes on a GPU beyond the tensors that come and go in a phase."""
    return WORKSPACE_BYTES + int(SLACK["cuda"] * (sum(kinds.values()) - kinds.get("gradients", 0)))


def _engine_bytes(share: Share, roles: Roles, step: StepShape) -> dict[str, int]:
    """Phase -> bytes of the vLLM engines on a share's device, in processes of their own: awake
    their part of the GPU and a context each, asleep a context and graphs."""
    device, phases = share.device, (*AWAKE, "old_log_probs", "reference", "update")
    if not step.vllm or device not in (*roles.sample, roles.eval):
        return dict.fromkeys(phases, 0)
    engines = step.engines if roles.eval in roles.sample else 1
    context = CONTEXT_BYTES["cpu" if device == "cpu" else "cuda"]
    memory_share = step.gpu_memory_utilization or engine_share(roles, device, engines)
    awake = engines * (int(memory_share * step.card) + context)
    asleep = engines * (context + GRAPH_BYTES)
    sleeps = step.sleeps and bool(share.modules) and device != "cpu"
    return {phase: asleep if sleeps and phase not in AWAKE else awake for phase in phases}


def _kept(
    share: Share, shape: ModelShape, roles: Roles, step: StepShape, frozen: int
) -> dict[str, int]:
    """What a share of the policy, and other roles on its device but vLLM's engines, keep through
    all phases. Our own decoding counts as the trainer's, also where it has a process of its own."""
    device, ranked = share.device, step.policy_parallelism in RANKED
    samples = not step.vllm and device in (*roles.sample, roles.eval)
    copies = (step.engines if roles.eval in roles.sample else 1) * samples
    entry, trained = OPTIMIZERS[step.optimizer], shape.trained(share.modules) // share.parts
    # Our own decoding reads the policy's weights where these are of the type of its products.
    reads = (
        device == "cpu"
        and step.itemsize == 4
        and share.parts == 1
        and share.modules
        and not shape.adapters
    )
    kernels, libraries = (
        BFLOAT16_BYTES * (step.itemsize == 2),
        LIBRARY_BYTES * (ranked or bool(shape.adapters)),
    )
    own = CONTEXT_BYTES["cpu"] + kernels + libraries if device == "cpu" else CONTEXT_BYTES["cuda"]
    copy = 0 if reads and not ranked else step.itemsize * sum(shape.parameters.values())
    return {
        "weights": shape.state_bytes(share.modules, 4) // share.parts,
        "moments": (entry.device_bytes - 8 + entry.host_bytes * (device == "cpu")) * trained,
        "sampler": copies * copy,
        "reference": shape.frozen_bytes(step.itemsize) * frozen,
        "context": own * bool(share.modules or frozen or not step.vllm),
    }


def _at_work(
    config: Any, step: StepShape, device: str, held: int, total: int
) -> tuple[int, int, bool]:
    """(Tokens of the micro-batches at work at a time beside `held` bytes, of `total`; how many
    micro-batches these are; whether their layers are computed twice)."""
    longest, limit = (
        step.prompt + step.max_new_tokens,
        min(step.card, MAX_ACTIVATION_BYTES[device.partition(":")[0]]),
    )
    fit, checkpointing = tokens_that_fit(
        config, step.itemsize, step.card - held, longest, limit, step.layers
    )
    most, group = (
        step.micro_batch_tokens or fit,
        step.prompt + step.group_size * step.max_new_tokens,
    )
    parallel = step.parallel if most >= step.parallel * group else 1  # as in `cut_for_parallel`
    if parallel > 1:
        most = parallel * min(most // parallel, -(-total // parallel) + group // 2)
    return max(min(most, total), longest), parallel, checkpointing and not step.micro_batch_tokens


def _pass(
    shape: ModelShape, config: Any, step: StepShape, device: str, own: Sequence[str]
) -> dict[str, int]:
    """Bytes of a forward pass for log-probs alone: of one layer, and of the head. `own` are the
    policy's modules that compute it; without, a frozen model does, whose weights need no cast."""
    prompts, each, longest = step.sampled["sampling"]
    tokens, parallel, _ = _at_work(
        config, step, device, 0, prompts * (step.prompt + each * longest)
    )
    layers = [shape.parameters[name] for name in shape.layers]
    outside = sum(shape.parameters.values()) - sum(layers)
    return {
        "casts": (
            shape.state_bytes([name for name in shape.layers if name in own], 4)
            // 2
            * (step.itemsize == 2)
        ),
        "activations": tokens * passing_bytes(config, step.itemsize),
        "logits": (
            parallel
            * head_bytes(config, step, tokens // parallel, device, "pass")
            * (shape.head in own or not own)
        ),
        "gathered": 4 * (outside + 2 * max(layers)) * (step.policy_parallelism in RANKED),
    }


def _update(
    share: Share, shape: ModelShape, config: Any, step: StepShape, held: int
) -> tuple[list, bool]:
    """(The moments of an update that may be its worst, whether layers are computed twice): the head
    of a later micro-batch, with its activations, earlier ones' gradient, and temporaries of logits;
    a layer's backward pass; for a rank where whole layers or their gradients are on their way. With
    all rows at work at once the head's gradient alone is there before."""
    device, layers, adapted = (
        share.device,
        [shape.parameters[name] for name in shape.layers],
        bool(shape.adapters),
    )
    ranked, trained = (
        step.policy_parallelism in RANKED,
        4 * (shape.trained(share.modules) // share.parts),
    )
    gathered = (
        gathered_bytes(layers, sum(shape.parameters.values()) - sum(layers), step.itemsize)
        if ranked
        else 0
    )
    tokens, parallel, checkpointing = _at_work(
        config, step, device, held + trained + gathered, step.update_tokens
    )
    all_at_once = tokens >= step.update_tokens
    tokens = step.largest_micro_batch or tokens
    update = {"gradients": trained, **_activations(shape, config, step, share.modules, tokens)}
    update["casts"] *= parallel if adapted else 1  # autocast shares casts of what is trained only
    if checkpointing:
        twice = tokens * checkpointed_activation_bytes(
            config, step.itemsize, shape.layer_share(share.modules)
        )
        update |= {
            "activations": twice,
            **{kind: update[kind] // len(layers) for kind in ("casts", "attention")},
        }
    use = "frozen" if adapted else "trained"
    head = (
        parallel
        * head_bytes(config, step, tokens // parallel, device, use)
        * (shape.head in share.modules)
    )
    # A layer's forward and backward pass makes some three quarters of what it keeps again.
    layer = {
        "activations": (
            update["activations"]
            + 3 * tokens * activation_bytes(config, step.itemsize) // (4 * len(layers))
        )
    }
    at_head = update | {"logits": head}
    moments = [*_rank_moments(shape, config, at_head)] if ranked else [at_head, update | layer]
    if all_at_once:
        embedding = min(trained, 4 * config.vocab_size * config.hidden_size)
        moments = [
            moment | {"gradients": embedding * (shape.head in share.modules)} for moment in moments
        ]
        moments.append({"gradients": trained + parallel * embedding, "gathered": gathered})
    return moments, checkpointing


def _decoding(
    config: Any, step: StepShape, prompts: int, each: int, tokens: int, device: str
) -> list[dict[str, int]]:
    """Bytes of our own decoding of the most prompts whose keys and values have room at a time, each
    with `each` responses of `tokens` at most: while a layer computes the prompts, when what it made
    is copied, and when the last token is drawn."""
    a_token = key_value_bytes(config, step.itemsize)
    group = step.prompt + each * tokens
    wave = min(prompts, max(1, CACHE_BYTES[device.partition(":")[0]] // (group * a_token)))
    read = wave * step.prompt
    logits = 4 * wave * each * config.vocab_size * (5 if step.truncated else 4)
    return [
        {
            "keys and values": read * a_token,
            "activations": read * passing_bytes(config, step.itemsize),
        },
        {"keys and values": 2 * read * a_token},
        {"keys and values": wave * group * a_token, "logits": logits},
    ]


def _activations(
    shape: ModelShape, config: Any, step: StepShape, held: Sequence[str], tokens: int
) -> dict[str, int]:
    """Bytes of the layers held: autocast's casts, which backward keeps, activations, and what
    attention keeps beside them."""
    layers = [name for name in shape.layers if name in held]
    keys_and_values = key_value_bytes(config, step.itemsize) // config.num_hidden_layers
    log_sums = 4 * getattr(config, "num_attention_heads", 1)
    # four vectors at the head, half of them of responses alone
    ends = 16 * config.hidden_size * (shape.head in held)
    # Of two norms a layer, what only the gradient of their weights needs.
    unkept = 8 * config.hidden_size * len(layers) * bool(shape.adapters)
    a_token = (
        activation_bytes(config, step.itemsize) * len(layers) // config.num_hidden_layers
        - unkept
        + ends
    )
    return {
        "casts": shape.state_bytes(layers, 4) // 2 * (step.itemsize == 2),
        "activations": tokens * a_token,
        "attention": tokens * len(layers) * (keys_and_values + log_sums),
    }


def _rank_moments(
    shape: ModelShape, config: Any, update: dict[str, int]
) -> Iterator[dict[str, int]]:
    """The update of a rank, which gathers in fp32 (or copies, where it has all weights) what is
    outside the layers for a whole micro-batch, and each layer for its forward and backward pass: at
    the head, and in backward of the last layer but one, where the next one is gathered ahead, this
    one's gradient is whole, and the last one's is on its way to its ranks."""
    outside = shape.state_bytes([name for name in shape.parameters if name not in shape.layers], 4)
    layer = max(shape.state_bytes([name], 4) for name in shape.layers)
    gradient = 4 * max(shape.trained([name]) for name in shape.layers)
    # In bf16 the gradient of one matrix, and in fp32 the head's.
    products = (
        0
        if shape.adapters
        else 2 * mlp_width(config) * config.hidden_size + 4 * config.vocab_size * config.hidden_size
    )
    left = max(len(shape.layers) - 2, 0) / len(shape.layers)
    kept = {kind: int(left * update[kind]) for kind in ("casts", "activations", "attention")}
    yield update | {"gathered": outside}
    yield (
        update
        | kept
        | {
            "logits": 0,
            "gathered": outside + 2 * layer,
            "whole gradients": 2 * gradient + products,
        }
    )


def head_bytes(config: Any, step: StepShape, tokens: int, device: str, use: str) -> int:
    """Bytes of `LabelLogProbs` in a micro-batch: in a "pass" without gradients, or with a "frozen"
    or a "trained" head, whose gradient comes in fp32 and as a bf16 product. The weight's cast, and
    temporaries as multiples of a piece's fp32 logits: with entropies, in forward alone, or without.
    Truncation adds a copy, masks, ranks. A CPU goes over few logits at a time; it multiplies in
    bf16 first."""
    head, cast_too = config.vocab_size * config.hidden_size, step.itemsize == 2
    piece = (
        4
        * row_pieces(max(tokens - step.prompt, step.max_new_tokens), config.vocab_size)[0].stop
        * config.vocab_size
    )
    of_cpu, of_gpu = (1.5, 1.5) if cast_too else (1, 1), (5, 5) if step.truncated else (4, 3)
    with_entropies, without = of_cpu if device == "cpu" else of_gpu
    cast = 2 * head * cast_too
    rounded = cast + piece + piece // 2 * (cast_too or device != "cpu")
    backward = 4 * head + max(int(without * piece), rounded)
    forward = int((without if use == "pass" else with_entropies) * piece)
    return cast + max(forward, backward * (use == "trained"))
