"""The most bytes that each GPU holds during a training step, by kind, from a model's shape. No device is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from alignment.policy.loading import mlp_width
from alignment.policy.log_probs import row_pieces
from alignment.policy.memory import CACHE_BYTES, activation_bytes, gathered_bytes, key_value_bytes, tokens_that_fit
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.packing import QUERIES_AT_A_TIME
from alignment.policy.placement import ModelShape, Roles, Share, engine_share, policy_shares
from alignment.policy.policy import RANKED

CONTEXT_BYTES = int(0.8e9)  # of a process on a GPU: CUDA's context, and workspaces of matrix products
SPARE = 0.05  # of a card, which is left to fragmentation


@dataclass(frozen=True)
class StepShape:
    """What a training step needs to know to count its bytes."""

    card: int  # Bytes of each GPU.
    policy_parallelism: str  # A key of `POLICIES`.
    itemsize: int  # Bytes of a number in matrix products: 2 under autocast to bfloat16, else 4.
    optimizer: str
    micro_batch_tokens: int  # 0: what `choose_micro_batch_tokens` would take.
    prompt: int  # Tokens of the longest prompt.
    max_new_tokens: int  # Of the longest response.
    rows: int  # Most responses that are sampled at once, by our own decoding.
    sampled: int  # Tokens of these and their prompts.
    truncated: bool  # Whether top-p or top-k leaves tokens out.
    frozen: int  # Frozen models kept on the reference's device: the reference, and the old policy.
    vllm: bool  # Whether vLLM samples, or our own decoding.
    gpu_memory_utilization: float | None  # vLLM's share of a GPU's memory, for each engine; None: `engine_share`.
    engines: int  # On a GPU that samples and evaluates.


def peak_bytes(shape: ModelShape, config: Any, roles: Roles, step: StepShape) -> list[tuple[str, dict[str, int]]]:
    """(device, kind -> bytes at the worst moment) of the machine's ranks, or of the devices of a policy of one process, then of
    the devices of other roles alone. The worst is the head of an update's later micro-batch, where all of its activations, the
    gradient of those before, and temporaries of logits exist; for a rank also where whole layers or their gradients are on
    their way; or sampling, where keys and values do and gradients do not.

    Between them, engines and frozen models stay. Counts for a model of fp32 weights whose linear layers autocast casts."""
    shares = policy_shares(shape, roles.policy, step.policy_parallelism, step.optimizer)
    others = {*roles.sample, roles.eval, roles.reference} - {share.device for share in shares}
    shares += [Share(device, "", (), 0) for device in sorted(others)]
    # Ranks may share the host's CPU, where the first of them has the other roles, too.
    none = replace(roles, sample=(), eval="", reference="")
    here = [none if share in shares[:number] else roles for number, share in enumerate(shares)]
    return [(share.device, _peak_of(share, shape, config, there, step)) for share, there in zip(shares, here)]


def _peak_of(share: Share, shape: ModelShape, config: Any, roles: Roles, step: StepShape) -> dict[str, int]:
    """The larger of an update's and of sampling's bytes of one share of the policy and the other roles on its device."""
    device, held = share.device, share.modules
    total, trained = sum(shape.parameters.values()), shape.trained(held) // share.parts
    samples = device in (*roles.sample, roles.eval)
    engines = step.engines if roles.eval in roles.sample else 1
    frozen, vllm = step.frozen * (device == roles.reference), step.vllm
    memory_share = step.gpu_memory_utilization or engine_share(roles, device, engines)
    kept = {
        "weights": shape.state_bytes(held, 4) // share.parts,
        "moments": (OPTIMIZERS[step.optimizer].device_bytes - 8) * trained,
        "sampler": engines * samples * (int(memory_share * step.card) if vllm else step.itemsize * total),
        "reference": shape.frozen_bytes(step.itemsize) * frozen,
        "context": CONTEXT_BYTES * (bool(held or frozen or not vllm) + engines * (samples and vllm)),
    }
    update = {**kept, "gradients": 4 * trained}
    ranked = bool(held) and step.policy_parallelism in RANKED
    layers = [shape.parameters[name] for name in shape.layers]
    gathered = gathered_bytes(layers, total - sum(layers), step.itemsize) if ranked else 0
    longest = step.prompt + step.max_new_tokens
    fit, checkpointing = tokens_that_fit(config, step.itemsize, step.card - sum(update.values()) - gathered, longest, step.card)
    tokens = max(step.micro_batch_tokens or fit * (not checkpointing), longest)  # one row at least
    if held:
        update |= _activations(shape, config, step, held, tokens)
    head = head_bytes(config, step, tokens, trained=shape.head in held and not shape.adapters)
    update["logits"] = head if shape.head in held or frozen else 0
    moments = [*_rank_moments(shape, config, update)] if ranked else [update]
    if samples and not vllm:
        all_rows = step.sampled * key_value_bytes(config, 2)
        cache = min(CACHE_BYTES["cuda"], all_rows)  # waves of rows keep to it
        logits = 4 * step.rows * cache // all_rows * config.vocab_size * (5 if step.truncated else 4)
        moments.append(kept | {"keys and values": cache, "logits": logits})
    return max(moments, key=lambda moment: sum(moment.values()))


def _activations(shape: ModelShape, config: Any, step: StepShape, held: Sequence[str], tokens: int) -> dict[str, int]:
    """Bytes of the layers held: autocast's casts, which backward keeps, activations, and what attention keeps beside them."""
    layers = [name for name in shape.layers if name in held]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # Rows of one prompt need a bias, which each layer casts for itself, and keeps where one piece has all of a row's queries;
    # keys and values of other rows are repeated.
    rows, queries = (tokens - step.prompt) // step.max_new_tokens, min(step.max_new_tokens, QUERIES_AT_A_TIME)
    bias = rows * (heads // kv_heads) * queries * (step.prompt + step.max_new_tokens) if rows > 1 else 0
    kept = len(layers) if queries == step.max_new_tokens else 1
    repeated = 4 * tokens * config.hidden_size * (heads > kv_heads)
    ends = 12 * config.hidden_size * (shape.head in held)  # about three vectors at the head
    # Of two norms a layer, what only the gradient of their weights needs.
    unkept = 8 * config.hidden_size * len(layers) * bool(shape.adapters)
    a_token = activation_bytes(config, step.itemsize) * len(layers) // config.num_hidden_layers - unkept + ends
    return {
        "casts": shape.state_bytes(layers, 4) // 2 * (step.itemsize == 2),
        "activations": tokens * a_token,
        "attention": kept * 2 * bias + len(layers) * repeated + 4 * bias,
    }


def _rank_moments(shape: ModelShape, config: Any, update: dict[str, int]) -> Iterator[dict[str, int]]:
    """The update of a rank, which gathers in fp32 (or copies, where it has all weights) what is outside the layers for a whole
    micro-batch, and each layer for its forward and its backward pass. At the head, and in the backward pass of the last layer
    but one, where the next one is gathered ahead, this one's gradient is whole, and the last one's on its way to the ranks
    that keep it."""
    outside = shape.state_bytes([name for name in shape.parameters if name not in shape.layers], 4)
    layer = max(shape.state_bytes([name], 4) for name in shape.layers)
    gradient = 4 * max(shape.trained([name]) for name in shape.layers)
    # In bf16 the gradient of one matrix, and in fp32 the head's.
    products = 0 if shape.adapters else 2 * mlp_width(config) * config.hidden_size + 4 * config.vocab_size * config.hidden_size
    left = max(len(shape.layers) - 2, 0) / len(shape.layers)
    kept = {kind: int(left * update[kind]) for kind in ("casts", "activations", "attention")}
    yield update | {"gathered": outside}
    yield update | kept | {"logits": 0, "gathered": outside + 2 * layer, "whole gradients": 2 * gradient + products}


def head_bytes(config: Any, step: StepShape, tokens: int, trained: bool) -> int:
    """Bytes of `LabelLogProbs`: the head's weight cast; its gradient, in fp32 and as a product in bf16; and temporaries, as
    multiples of a piece's fp32 logits: with the entropies, in the forward pass alone, or without. Truncation takes
    a tempered copy, masks, and places of tokens that are equally likely."""
    head = config.vocab_size * config.hidden_size
    cast = 2 * head * (step.itemsize == 2)
    piece = 4 * row_pieces(tokens - step.prompt, config.vocab_size)[0].stop * config.vocab_size
    with_entropies, without = (5, 5) if step.truncated else (4, 3)
    backward = 4 * head + max(without * piece, cast + 3 * piece // 2)
    return cast + max(with_entropies * piece, backward * trained)
