"""What a pass asks of a GPU beside its products, as coefficients of a closed form, fitted to what
`benchmarks.gpu_cost` counts over fake tensors of the true shape.

    uv run -m benchmarks.gpu_passes

It prints the tables [passes] of alignment/planning/h200.toml, from which `alignment.plan` has a
pass's kernels and bytes (`alignment.planning.passes`), fitted to two shapes and two sizes of
micro-batches. Run it after the kernels of a layer have changed: it
takes 15 minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tyro

from alignment.core.tokens import cut_by_tokens, packed_tokens, split_rows
from benchmarks.gpu_cost import (
    TRACES,
    Rates,
    Segment,
    Setting,
    Work,
    all_of,
    arguments_of,
    config_of,
    launches_of,
    measured_rates,
    rollout_of,
    segments_of,
)
from benchmarks.gpu_trace import (
    EFFICIENT_BACKWARD,
    EFFICIENT_FORWARD,
    FLASH_BACKWARD,
    FLASH_FORWARD,
    PRODUCTS,
)

ATTENTION = (FLASH_FORWARD, FLASH_BACKWARD, EFFICIENT_FORWARD, EFFICIENT_BACKWARD)
SMALL = Setting(prompts=4)
WAYS: Mapping[str, Setting] = {
    "parts": replace(SMALL, flash=False),
    "eager": SMALL,
    "liger": replace(SMALL, kernels="liger"),
    "compiled": replace(SMALL, kernels="compiled"),
}
"""Table of [passes] -> how a pass is computed."""
MODELS = ("Qwen--Qwen2.5-Math-1.5B", "smollm2")
SIZES = (16_384, 8_192)


@dataclass(frozen=True)
class Sizes:
    """What the work of a pass is proportional to."""

    tokens: int
    labels: int
    """Tokens with logits."""
    pieces: int
    """Micro-batches."""


@dataclass(frozen=True)
class Counted:
    """One traced pass, of one layer and of what each further layer adds."""

    setting: Setting
    sizes: Sizes
    layer: Segment
    ends: Segment
    """What is outside of layers."""


def sizes_of(setting: Setting) -> Sizes:
    """The sizes of a pass over the rollout of a setting."""
    batch = rollout_of(setting, arguments_of(setting)).batch
    rows = split_rows(batch.input_ids, batch.response_mask)
    pieces = cut_by_tokens(rows, setting.micro_batch_tokens)
    tokens = sum(packed_tokens([rows[number] for number in piece]) for piece in pieces)
    return Sizes(tokens, int(batch.response_mask.sum()), len(pieces))


def count(setting: Setting) -> Counted:
    """Trace one and two layers."""
    one, two = (
        all_of(segments_of(TRACES[setting.work](replace(setting, layers=layers))))
        for layers in (1, 2)
    )
    layer = two.copy()
    layer.subtract(one)
    ends = one.copy()
    ends.subtract(layer)
    return Counted(setting, sizes_of(setting), layer, ends)


def bytes_as_copied(work: Segment, rates: Rates, attention: bool) -> float:
    """The bytes that the card copies at the rate of `bandwidth` while it computes the kernels of
    attention, by their bytes, or all others but products."""
    seconds = 0.0
    for kernel, number in work.items():
        if attention and kernel.kind in ATTENTION:
            seconds += number * kernel.bytes / rates.bandwidth / rates.efficiency[kernel.kind]
        if not attention and kernel.kind not in (PRODUCTS, *ATTENTION):
            seconds += number * rates.card_seconds(kernel)
    return seconds * rates.bandwidth


def parameters_of(setting: Setting) -> tuple[int, int]:
    """Parameters of a layer, and of the embedding, which is the head."""
    config = config_of(setting)
    hidden = config.hidden_size
    keys = hidden * config.num_key_value_heads // config.num_attention_heads
    layer = hidden * (2 * hidden + 2 * keys + 3 * config.intermediate_size)
    return layer, config.vocab_size * hidden


def solve(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients, none below 0, by relative least squares."""
    from scipy.optimize import nnls

    scale = np.array(values)
    solution, _ = nnls(np.array(rows) / scale[:, None], np.ones(len(values)))
    return [float(number) for number in solution]


def fitted(counted: Sequence[Counted], rates: Rates) -> dict[str, float]:
    """The coefficients of one table, by their names in `PassCount`."""
    layers = []
    attention = []
    ends = []
    values: dict[str, list[float]] = {"layer": [], "attention": [], "ends": []}
    for one in counted:
        config = config_of(one.setting)
        sizes = one.sizes
        of_layer, of_ends = parameters_of(one.setting)
        hidden = sizes.tokens * config.hidden_size
        mlp = sizes.tokens * config.intermediate_size
        layers.append([hidden, mlp, sizes.pieces * of_layer])
        attention.append([hidden])
        ends.append([sizes.labels * config.vocab_size, hidden, sizes.pieces * of_ends])
        values["layer"].append(bytes_as_copied(one.layer, rates, False))
        values["attention"].append(bytes_as_copied(one.layer, rates, True))
        values["ends"].append(bytes_as_copied(one.ends, rates, False))
    by_layer = solve(layers, values["layer"])
    by_ends = solve(ends, values["ends"])
    coefficients: dict[str, float] = {}
    coefficients |= zip(("hidden", "mlp", "weight"), by_layer, strict=True)
    (coefficients["attention"],) = solve(attention, values["attention"])
    coefficients |= zip(("logit", "end_hidden", "end_weight"), by_ends, strict=True)
    for name in ("layer", "ends"):
        launches = [launches_of(getattr(one, name)) / one.sizes.pieces for one in counted]
        coefficients[f"{name}_launches"] = float(np.mean(launches))
    return coefficients


def main(ways: tuple[str, ...] = tuple(WAYS)) -> None:
    """Print the tables.

    Args:
        ways: Which of them.
    """
    rates = measured_rates()
    works: tuple[Work, ...] = ("log_probs", "update")
    for way in ways:
        for work in works:
            counted = []
            for model in MODELS:
                for size in SIZES:
                    setting = replace(WAYS[way], work=work, model=model, micro_batch_tokens=size)
                    counted.append(count(setting))
            print(f"\n[passes.{way}.{work}]")
            for name, number in fitted(counted, rates).items():
                print(f"{name} = {number:.3g}", flush=True)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
