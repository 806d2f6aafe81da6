"""The most bytes that each GPU holds during a training step, by kind, from a model's shape. No device is touched."""

from dataclasses import dataclass
from typing import Any

from alignment.policy.log_probs import LOGITS_IN_MEMORY
from alignment.policy.memory import ACTIVATION_SHARE, BF16_FACTOR, CACHE_BYTES, MAX_TOKENS, activation_bytes, key_value_bytes
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.placement import ModelShape, Roles, engine_share, partition_layers

CONTEXT_BYTES = int(0.8e9)  # of a process on a GPU: CUDA's context, and workspaces of matrix products
SPARE = 0.05  # of a card, which is left to fragmentation


@dataclass(frozen=True)
class StepShape:
    """What a training step needs to know to count its bytes, in bfloat16 under autocast."""

    card: int  # Bytes of each GPU.
    optimizer: str
    micro_batch_tokens: int  # 0: what `choose_micro_batch_tokens` would take.
    prompt: int  # Tokens of the longest prompt.
    max_new_tokens: int  # Of the longest response.
    rows: int  # Most responses that are sampled at once, by our own decoding.
    sampled: int  # Tokens of these and their prompts.
    truncated: bool  # Whether logits are sorted, for top-p or top-k.
    frozen: int  # Frozen models kept on the reference's device: the reference, and the old policy.
    vllm: bool  # Whether vLLM samples, or our own decoding.
    gpu_memory_utilization: float | None  # vLLM's share of a GPU's memory, for each engine; None: `engine_share`.
    engines: int  # On a GPU that samples and evaluates.


def peak_bytes(shape: ModelShape, config: Any, roles: Roles, step: StepShape) -> dict[str, dict[str, int]]:
    """Device -> kind -> bytes at the worst moment: the head of an update's later micro-batch, where all of its activations, the
    gradient of those before, and temporaries of logits exist, or sampling, where keys and values do and gradients do not.

    Between them, engines and frozen models stay. Counts for a model of fp32 weights whose linear layers autocast casts."""
    placed = partition_layers(shape, roles.policy)
    devices = sorted({*roles.policy, roles.sample, roles.eval, roles.reference})
    held = {device: [name for name, place in placed.items() if place == device] for device in devices}
    return {device: _device_peak(shape, config, roles, step, held[device], device) for device in devices}


def _device_peak(shape: ModelShape, config: Any, roles: Roles, step: StepShape, held: list[str], device: str) -> dict[str, int]:
    """The larger of an update's and of sampling's bytes on one device; `held` are the policy's modules there."""
    total, trained = sum(shape.parameters.values()), shape.trained(held)
    samples = device in (roles.sample, roles.eval)
    engines = step.engines if roles.sample == roles.eval else 1
    frozen, vllm = step.frozen * (device == roles.reference), step.vllm
    copy = int((step.gpu_memory_utilization or engine_share(roles, device, engines)) * step.card) if vllm else 2 * total
    kept = {
        "weights": shape.state_bytes(held, 4),
        "moments": (OPTIMIZERS[step.optimizer].device_bytes - 8) * trained,
        "sampler": engines * copy * samples,
        "reference": shape.frozen_bytes(2) * frozen,
        "context": CONTEXT_BYTES * (bool(held or frozen or not vllm) + engines * (samples and vllm)),
    }
    update = {**kept, "gradients": 4 * trained}
    if held:
        update |= _activations(shape, config, step, held, step.card - sum(update.values()))
    if shape.head in held or frozen:
        update["logits"] = head_bytes(config, step, trained=shape.head in held and not shape.adapters)
    moments = [update]
    if samples and not vllm:
        all_rows = step.sampled * key_value_bytes(config, 2)
        cache = min(CACHE_BYTES["cuda"], all_rows)  # waves of rows keep to it
        logits = 4 * step.rows * cache // all_rows * config.vocab_size * (5 if step.truncated else 4)
        moments.append(kept | {"keys and values": cache, "logits": logits})
    return max(moments, key=lambda moment: sum(moment.values()))


def _activations(shape: ModelShape, config: Any, step: StepShape, held: list[str], free: int) -> dict[str, int]:
    """Bytes of the layers held: autocast's casts, which backward keeps, activations, and what attention keeps beside them."""
    layers = len(set(held) & set(shape.layers))
    a_token = BF16_FACTOR * activation_bytes(config)
    fits = min(max(int(ACTIVATION_SHARE * max(free, 0) / a_token), 1), MAX_TOKENS)
    tokens = max(step.micro_batch_tokens or 2 ** (fits.bit_length() - 1), step.prompt + step.max_new_tokens)  # one row at least
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # Rows of one prompt need a bias, which each layer casts for itself; keys and values of other rows are repeated.
    rows = (tokens - step.prompt) // step.max_new_tokens
    bias = rows * (heads // kv_heads) * step.max_new_tokens * (step.prompt + step.max_new_tokens) if rows > 1 else 0
    repeated = 4 * tokens * config.hidden_size * (heads > kv_heads)
    return {
        "casts": shape.state_bytes([name for name in held if name in (*shape.layers, shape.head)], 4) // 2,
        "activations": int(a_token * tokens * layers / config.num_hidden_layers),
        "attention": layers * (2 * bias + repeated) + 4 * bias,
    }


def head_bytes(config: Any, step: StepShape, trained: bool) -> int:
    """Bytes of `LabelLogProbs`: the head's weight cast; its gradient, in fp32 and as a product in bf16; and temporaries, as
    multiples of a piece's fp32 logits. Truncation sorts: logits, a tempered and a sorted copy, places of 8 bytes, and 20 bytes
    a number that torch's CUDA sort takes for itself."""
    head = config.vocab_size * config.hidden_size
    piece = 4 * min(LOGITS_IN_MEMORY, max(step.micro_batch_tokens, step.prompt + step.max_new_tokens, 512) * config.vocab_size)
    scoring = (5 if step.truncated else 4) * piece
    return 2 * head + (4 * head + max(scoring, 2 * head + 3 * piece // 2) if trained else scoring)
