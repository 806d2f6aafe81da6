"""What machines do in a second, by a card's name, a file, or a guess of this one; and the work of
passes through a model."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alignment.model.shape import ModelShape
from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.registry import did_you_mean

CARDS = read_toml(Path(__file__).with_name("cards.toml"), "--hardware")
REACHED, COUNTED, CORE = (CARDS.pop(table) for table in ("reached", "counted", "CPU"))
# of a card: GB, TFLOP/s and GB/s
NUMBERS = (
    "memory",
    "bfloat16",
    "float32",
    "bandwidth",
    "link",
    "network",
)
KINDS = ("operations", "bytes", "launches", "link", "network", "disk")
"""Of work: multiplications and additions, bytes through a device's memory, kernels, bytes to other
devices, machines, disk."""


class Hardware(NamedTuple):
    """Alike machines. None and 0: this one's GPUs, and their memory."""

    gpus: int | None  # Of each machine.
    memory: float  # Bytes of each GPU.
    machines: int
    card: Mapping[str, float] | None = None


def hardware_of(
    text: str, gpus: int | None = None, machines: int = 1, memory: float | None = None
) -> Hardware:
    """What --hardware names, CARD, 8xCARD or 2x8xCARD (machines x GPUs) with a card of `CARDS` or
    of a TOML file, else what --num_gpus, --machines and --gpu_memory say. Raises `UserError` for
    both, an unknown card, and a file without NUMBERS."""
    if not text:
        return Hardware(gpus, 1e9 * (memory or 0), machines)
    if (gpus, machines, memory) != (None, 1, None):
        raise UserError(
            f"--hardware {text}: says all that --num_gpus, --machines and --gpu_memory do; leave"
            " these out"
        )
    *counts, name = re.fullmatch(r"(?:(\d+)x(?=\d+x))?(?:(\d+)x)?(.*)", text, re.DOTALL).groups("1")
    cards = (
        [*read_toml(Path(name), "--hardware").values()]
        if name.endswith(".toml")
        else [CARDS.get(name.upper())]
    )
    if cards == [None] or 0 in map(int, counts):
        listed = (
            f"write {', '.join(CARDS)}, or a TOML file of such numbers, and 8x or 2x8x before it"
        )
        alike = did_you_mean(name, [card for card in CARDS if card[0] == name[:1].upper()])
        raise UserError(f"--hardware {text}: there is no such machine{alike}; {listed}")
    numbers = [card.get(number) for card in cards for number in NUMBERS if isinstance(card, dict)]
    if (
        len(cards) > 1
        or not numbers
        or not all(isinstance(number, int | float) and number > 0 for number in numbers)
    ):
        raise UserError(
            f"--hardware {text}: must hold one table, a card's, with numbers above 0:"
            f" {', '.join(NUMBERS)}"
        )
    return Hardware(int(counts[1]), 1e9 * numbers[0], int(counts[0]), cards[0])


def rates(hardware: Hardware, itemsize: int) -> np.ndarray:
    """Seconds of a unit of KINDS, best and worst, [2, K], with `itemsize` bytes a number. GPUs
    without a name: all of CARDS."""
    import torch  # here, because it takes seconds, and mistakes are reported first

    gpus = torch.cuda.device_count() if hardware.gpus is None else hardware.gpus
    own = {number: (os.cpu_count() or 1) * CORE[number] for number in NUMBERS}
    cards = [hardware.card] if hardware.card else CARDS.values() if gpus else [own]
    kinds = (
        "bfloat16" if itemsize == 2 else "float32",
        "bandwidth",
        "launches",
        "link",
        "network",
        "disk",
    )
    best, worst = (
        np.array([[REACHED[k][end] * card.get(k, 1) for k in kinds] for card in cards])
        for end in (0, 1)
    )
    return 1 / np.array([best.max(axis=0), worst.min(axis=0)])


def work(**amounts: float) -> np.ndarray:
    """Amounts of KINDS, [K]."""
    return np.array([amounts.get(kind, 0.0) for kind in KINDS])


def forward(
    shape: ModelShape, config: Any, itemsize: int, counts: Sequence[float], pieces: float
) -> np.ndarray:
    """The work of a forward pass, in pieces that each read all weights. `counts`: tokens; how many
    others each sees on average; how many have logits. Every token counts as taking all experts."""
    from alignment.model.activations import activation_bytes, key_value_bytes

    (tokens, seen, logits), heads = counts, getattr(config, "num_attention_heads", 1)
    # of a token
    queries = (
        heads
        / (getattr(config, "num_key_value_heads", None) or heads)
        * key_value_bytes(config, 1)
        / 2
    )
    of_layers = sum(shape.parameters[name] for name in shape.layers)
    products = (
        of_layers + 2 * queries * seen
    ) * tokens + config.vocab_size * config.hidden_size * logits
    moved = COUNTED["activation_passes"] * activation_bytes(config, itemsize) * tokens
    moved += (
        4 * COUNTED["logit_passes"] * config.vocab_size * logits
        + itemsize * sum(shape.parameters.values()) * pieces
    )
    kernels = COUNTED["layer_kernels"] * len(shape.layers) + COUNTED["other_kernels"]
    return work(operations=2 * products, bytes=moved, launches=kernels * pieces)


def decoding(
    shape: ModelShape, config: Any, itemsize: int, rows: Sequence[float], cache_bytes: int
) -> np.ndarray:
    """The work of prefill, and of a pass for each token of the longest responses in flight. `rows`:
    prompts, responses to each, mean tokens of a prompt and of a response, the most of a response.
    `cache_bytes` of keys and values at once; 0: vLLM's."""
    from alignment.model.activations import key_value_bytes

    prompts, size, prompt, response, longest = rows
    kept, drawn = key_value_bytes(config, itemsize), prompts * size * response
    group_bytes = (prompt + size * longest) * kept
    lots = np.ceil(
        prompts * group_bytes / cache_bytes
        if cache_bytes
        else prompts * size / COUNTED["vllm_rows"]
    )
    # rows that end early make room for others, or wait for the longest
    steps = lots * min(longest, 2 * response)
    passes = forward(shape, config, itemsize, (drawn, prompt + response / 2, drawn), steps)
    passes[2] = passes[2] if cache_bytes else COUNTED["vllm_kernels"] * steps
    prefill = forward(shape, config, itemsize, (prompts * prompt, prompt / 2, prompts), lots)
    return passes + prefill + work(bytes=drawn * kept * (prompt / size + response / 2))
