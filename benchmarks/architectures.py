"""How far is our path through each family of transformers from its own forward pass, and how fast?

    uv run -m benchmarks.architectures
    uv run -m benchmarks.architectures --families llama qwen3

Largest differences of log-probs and decoding, in nats, and of the gradient, relative, of tiny
models with random weights in float32; how many times as far as its own code's a gradient by fused
kernels in bfloat16 is from that in float64 (uncompiled, so that each step is rounded; the mean of
two seeds); and response tokens a second of log-probs and gradient, by the path that we choose and
by the plain one.
"""

from __future__ import annotations

import statistics
import time
from unittest import mock

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from alignment.model import kernels
from alignment.model.log_probs import get_response_log_probs
from alignment.model.packing import take_plain_path, takes_plain_path
from alignment.model.self_check import choose_path
from benchmarks.families import (
    FAMILIES,
    bfloat16_error,
    decoding_difference,
    family_model,
    rows_of,
    training_differences,
)


def tokens_per_second(model: PreTrainedModel) -> float:
    """Response tokens a second, forward and backward: 8 responses of each of 4 prompts."""
    torch.manual_seed(2)
    batch = rows_of([(24, 30)] * 4, repeats=8)
    start = time.perf_counter()
    for _ in range(3):
        outputs = get_response_log_probs(
            model, batch.input_ids, batch.labels, response_mask=batch.response_mask
        )
        outputs["log_probs"].sum().backward()
    return 3 * int(batch.response_mask.sum()) / (time.perf_counter() - start)


def rounding_of_fused_kernels(family: str) -> float:
    """The error of a gradient in bfloat16 by fused kernels over that of the family's own code."""
    ratios = []
    with mock.patch.multiple(kernels, compiled=lambda function: function, FUSED={}):
        for seed in (1, 2):
            fused = bfloat16_error(family, True, seed)
            ratios.append(fused / bfloat16_error(family, False, seed))
    return statistics.mean(ratios)


def main(families: tuple[str, ...] = tuple(FAMILIES)):
    """Print a row for each family."""
    table = Table(
        title=(
            "largest differences from a model's own forward pass, fp32, 2 layers; tokens/s of"
            " log-probs and gradient"
        )
    )
    table.add_column("family")
    table.add_column("path")
    numbers = (
        "log-probs, nats",
        "gradient",
        "decoding, nats",
        "bf16 fused / own",
        "tokens/s",
        "plain path, tokens/s",
    )
    for heading in numbers:
        table.add_column(heading, justify="right")
    for name in families:
        model = family_model(name)
        choose_path(model)
        path = "packed"
        if takes_plain_path(model):
            path = "plain"
        rounding = ""  # Rows that are padded have no fused kernels.
        if path == "packed":
            rounding = f"{rounding_of_fused_kernels(name):.2f}"
        training = training_differences(model)
        decoding = decoding_difference(model)
        speed = tokens_per_second(model)
        take_plain_path(model)
        plain_speed = tokens_per_second(model)
        table.add_row(
            name,
            path,
            f"{training.log_probs:.0e}",
            f"{training.gradient:.0e}",
            f"{decoding:.0e}",
            rounding,
            f"{speed:,.0f}",
            f"{plain_speed:,.0f}",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
