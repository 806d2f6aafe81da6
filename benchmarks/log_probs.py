"""Peak memory and time of log-probs, forward and backward, against vocabulary and tokens: ours and
log_softmax of all logits.

uv run -m benchmarks.log_probs
"""

from __future__ import annotations

import time

import torch
import tyro
from rich.console import Console
from rich.table import Table

from alignment.core.records import Distribution
from alignment.model.log_probs import LabelLogProbs
from benchmarks.attention import Peak, resident


def main(
    vocabularies: tuple[int, ...] = (49152, 151936),
    tokens: tuple[int, ...] = (512, 1024, 2048, 4096),
    hidden: int = 576,
):
    """Print MiB above what weight and hidden states take (and their gradients, which are of the
    same size)."""
    table = Table(title=f"log-probs of N tokens, hidden size {hidden}, fp32")
    for heading in (
        "vocabulary",
        "tokens",
        "ours, MiB",
        "plain, MiB",
        "ratio",
        "ours, s",
        "plain, s",
    ):
        table.add_column(heading, justify="right")
    for vocabulary in vocabularies:
        for number in tokens:
            torch.manual_seed(0)
            weight = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
            states, labels = (
                torch.randn(number, hidden, requires_grad=True),
                torch.randint(vocabulary, (number,)),
            )
            ours = measured(
                lambda *a: LabelLogProbs.apply(*a, Distribution(), "none")[0],
                states,
                weight,
                labels,
            )
            plain = measured(whole, states, weight, labels)
            assert (ours[2] - plain[2]).abs().max() < 1e-4
            cells = (
                f"{ours[0]:.0f}",
                f"{plain[0]:.0f}",
                f"{plain[0] / ours[0]:.1f}",
                f"{ours[1]:.1f}",
                f"{plain[1]:.1f}",
            )
            table.add_row(f"{vocabulary:,}", f"{number:,}", *cells)
    Console(width=130).print(table)


def whole(states, weight, labels) -> torch.Tensor:
    """The plain computation."""
    return (states @ weight.T).log_softmax(-1).gather(-1, labels[:, None]).squeeze(1)


def measured(log_probs, states, weight, labels) -> tuple[float, float, torch.Tensor]:
    """Peak MiB and seconds of one forward and backward, and the hidden states' gradient."""
    states.grad, weight.grad = torch.zeros_like(states), torch.zeros_like(weight)
    start_bytes, peak = resident(), Peak(0.001)
    start = time.perf_counter()
    log_probs(states, weight, labels).sum().backward()
    seconds = time.perf_counter() - start
    return peak.end() - start_bytes, seconds, states.grad


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
