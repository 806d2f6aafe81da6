"""How much memory and time do log-probs take, forward and backward, beside log_softmax of all
logits?

    uv run -m benchmarks.log_probs

Peak resident memory, in MiB above weight, hidden states and their gradients, and seconds of one
pass on the CPU in float32, by vocabulary and tokens. Both peers' gradients are compared; a
difference is an AssertionError.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from rich.console import Console

from alignment.core.records import Distribution
from alignment.model.log_probs import LabelLogProbs
from alignment.system.terminal import make_table
from benchmarks.attention import Peak, resident

TOLERANCE = 1e-4  # of a gradient's numbers
SAMPLING_PERIOD = 0.001  # seconds between two looks at the resident memory
HEADINGS = ("vocabulary", "tokens", "ours, MiB", "plain, MiB", "ratio", "ours, s", "plain, s")


@dataclass(frozen=True)
class Inputs:
    """What log-probs are computed of: hidden states [N, D], the output head's weight [V, D], and
    the labels [N]."""

    states_ND: torch.Tensor
    weight_VD: torch.Tensor
    labels_N: torch.Tensor


@dataclass(frozen=True)
class Pass:
    """What one forward and backward pass took."""

    peak: float
    """MiB above what was resident before."""
    seconds: float
    gradient_ND: torch.Tensor
    """Of the hidden states."""


def make_inputs(vocabulary: int, tokens: int, hidden: int) -> Inputs:
    torch.manual_seed(0)
    weight_VD = torch.randn(vocabulary, hidden) / hidden**0.5
    states_ND = torch.randn(tokens, hidden, requires_grad=True)
    labels_N = torch.randint(vocabulary, (tokens,))
    return Inputs(states_ND, weight_VD.requires_grad_(), labels_N)


def our_log_probs(inputs: Inputs) -> torch.Tensor:
    """Log-probs [N] of the labels, by pieces of logits that backward computes again."""
    outputs = LabelLogProbs.apply(
        inputs.states_ND, inputs.weight_VD, inputs.labels_N, Distribution(), "none"
    )
    return outputs[0]


def plain_log_probs(inputs: Inputs) -> torch.Tensor:
    """Log-probs [N] of the labels, by all logits at once."""
    logits_NV = inputs.states_ND @ inputs.weight_VD.T
    return logits_NV.log_softmax(-1).gather(-1, inputs.labels_N[:, None]).squeeze(1)


def measure(log_probs: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> Pass:
    """One forward and backward pass, which finds gradients of zeros: they count on no side."""
    inputs.states_ND.grad = torch.zeros_like(inputs.states_ND)
    inputs.weight_VD.grad = torch.zeros_like(inputs.weight_VD)
    before = resident()
    peak = Peak(SAMPLING_PERIOD)
    start = time.perf_counter()
    log_probs(inputs).sum().backward()
    seconds = time.perf_counter() - start
    return Pass(peak.end() - before, seconds, inputs.states_ND.grad)


def main(
    vocabularies: tuple[int, ...] = (49152, 151936),
    tokens: tuple[int, ...] = (512, 1024, 2048, 4096),
    hidden: int = 576,
):
    """Print a row for each vocabulary and number of tokens.

    Args:
        vocabularies: Tokens of each vocabulary.
        tokens: Numbers of tokens whose log-probs are computed.
        hidden: Width of the hidden states.
    """
    rows = []
    for vocabulary, number in itertools.product(vocabularies, tokens):
        inputs = make_inputs(vocabulary, number, hidden)
        ours = measure(our_log_probs, inputs)
        plain = measure(plain_log_probs, inputs)
        assert (ours.gradient_ND - plain.gradient_ND).abs().max() < TOLERANCE
        row = (
            f"{vocabulary:,}",
            f"{number:,}",
            f"{ours.peak:.0f}",
            f"{plain.peak:.0f}",
            f"{plain.peak / ours.peak:.1f}",
            f"{ours.seconds:.1f}",
            f"{plain.seconds:.1f}",
        )
        rows.append(row)
    title = f"log-probs of N tokens, hidden size {hidden}, fp32"
    Console(width=130).print(make_table(title, HEADINGS, rows, numbers=HEADINGS))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
