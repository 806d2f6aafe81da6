"""What does attention of packed rows take, beside torch's attention under a mask?

    uv run -m benchmarks.attention --tokens 1024
    uv run -m benchmarks.attention --tokens 1024 --other FOLDER_OF_ANOTHER_CHECKOUT
    uv run -m benchmarks.attention --tokens 32 --prompt 24 --prompts 16 --responses 8

One layer with SmolLM2's heads, float32, on the CPU: `--responses` responses of so many tokens to a
prompt, or to each of several, of which each is a token shorter than the one before. MiB kept for
backward, peaks of both passes in MiB above the inputs, and seconds. The peer pads nothing and
shares the prompt, too: each response's queries see prompt and response by
`scaled_dot_product_attention` under a mask; of several prompts it is left out. Each number is of a
process of its own, whose malloc gives back at once what is freed, so that the resident set is what
tensors hold; medians, by turns.

Those processes run this file as a script with another PYTHONPATH, which says whose `alignment` they
take: hence this file takes nothing of ours but `alignment.model.packing`, and that there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

# SmolLM2-135M
HEADS = 9
KEY_HEADS = 3
SIZE = 64  # numbers of a head
# every block of some size from the system itself, to which it goes back when it is freed
EXACT_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
}
SAMPLING_PERIOD = 0.001  # seconds between two looks at the resident memory

# The kinds of peers.
PACKED = "packed"
MASK = "mask"

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


# --- resident memory ------------------------------------------------------------------------------


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Peak:
    """The highest resident memory between its making and `end`, in MiB.

    A thread looks every so many seconds. The kernel's own peak, VmHWM, is no use within a run,
    whose meter begins it anew in every phase.
    """

    def __init__(self, seconds: float = 0.01) -> None:
        self.highest = 0.0
        self.seconds = seconds
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()

    def _look(self) -> None:
        while not self.stop.wait(self.seconds):
            self.highest = max(self.highest, resident())

    def end(self) -> float:
        """Stop looking; returns the highest."""
        self.stop.set()
        self.thread.join()
        return max(self.highest, resident())


# --- a peer's process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Responses to prompts, in tokens."""

    prompt: int
    """Of the longest prompt."""
    responses: int
    """To each prompt."""
    tokens: int
    """Of each response."""
    prompts: int = 1

    @property
    def prompt_lengths(self) -> list[int]:
        """Each prompt's tokens."""
        return [max(1, self.prompt - number) for number in range(self.prompts)]

    @property
    def length(self) -> int:
        """Of all, each prompt once."""
        return sum(self.prompt_lengths) + self.prompts * self.responses * self.tokens


@dataclass(frozen=True)
class PassCosts:
    """What a forward and a backward pass took."""

    kept: float
    """MiB, between the passes."""
    peak_forward: float
    """MiB."""
    peak: float
    """MiB, of both passes."""
    forward: float
    """Seconds."""
    backward: float
    """Seconds."""


def make_packed(layout: Layout) -> Attend:
    """Our attention of packed rows: [1, heads, length, size] of prompt and responses."""
    from alignment.model import packing

    rows = []
    for length in layout.prompt_lengths:
        for _ in range(layout.responses):
            rows.append((tuple(range(length)), tuple(range(layout.tokens))))
    packed = packing.pack(rows)
    rule = packing.AttentionRule(SIZE**-0.5)

    def attend(q, k, v) -> torch.Tensor:
        return packed.attend(None, q, k, v, rule)

    return attend


def make_masked(layout: Layout) -> Attend:
    """Torch's attention under a mask: [responses, heads, tokens, size] of the responses alone. The
    prompt's own attention is left out: it is little."""

    def own_part(values: torch.Tensor) -> torch.Tensor:
        """Each response's [responses, heads, tokens, size]."""
        responses = values[:, layout.prompt :].unflatten(1, (layout.responses, layout.tokens))
        return responses.transpose(0, 1)

    def behind_prompt(values: torch.Tensor) -> torch.Tensor:
        """Each response's behind a copy of the prompt's."""
        prompt = values[:, : layout.prompt].expand(layout.responses, -1, -1, -1)
        return torch.cat([prompt, own_part(values)], dim=2)

    def attend(q, k, v) -> torch.Tensor:
        width = layout.prompt + layout.tokens
        mask = torch.ones(layout.tokens, width, dtype=torch.bool).tril(layout.prompt)
        return torch.nn.functional.scaled_dot_product_attention(
            own_part(q[0]),
            behind_prompt(k[0]),
            behind_prompt(v[0]),
            attn_mask=mask,
            enable_gqa=True,
        )

    return attend


MAKE_ATTEND = {PACKED: make_packed, MASK: make_masked}


def random_inputs(layout: Layout) -> list[torch.Tensor]:
    """Queries, keys and values [1, heads, length, size], as a model's projections write them: a
    token's numbers lie one after another."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for heads in (HEADS, KEY_HEADS, KEY_HEADS):
        by_token = torch.randn(1, layout.length, heads, SIZE, generator=generator)
        inputs.append(by_token.transpose(1, 2).requires_grad_())
    return inputs


def measure_pass(attend: Attend, inputs: list[torch.Tensor]) -> PassCosts:
    """A forward and a backward pass; the inputs lose their gradients."""
    before = resident()
    peak = Peak(SAMPLING_PERIOD)
    start = time.perf_counter()
    output = attend(*inputs)
    forward = time.perf_counter() - start
    kept = resident() - before
    peak_forward = peak.end() - before

    peak = Peak(SAMPLING_PERIOD)
    gradient = torch.ones_like(output)
    start = time.perf_counter()
    output.backward(gradient)
    backward = time.perf_counter() - start
    peak_backward = peak.end() - before
    for tensor in inputs:
        tensor.grad = None
    return PassCosts(kept, peak_forward, max(peak_forward, peak_backward), forward, backward)


def print_costs(kind: str, layout: Layout) -> None:
    """Print what one peer takes, as JSON, in the second of two passes."""
    inputs = random_inputs(layout)
    attend = MAKE_ATTEND[kind](layout)
    measure_pass(attend, inputs)
    print(json.dumps(dataclasses.asdict(measure_pass(attend, inputs))))


# --- the parent -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A kind of attention, and the checkout whose code computes it."""

    kind: str
    checkout: str

    def measure(self) -> PassCosts:
        """What it takes in a process of its own, with this command's flags."""
        command = [sys.executable, __file__, *sys.argv[1:], "--one", self.kind]
        environment = os.environ | EXACT_MALLOC | {"PYTHONPATH": self.checkout}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        return PassCosts(**json.loads(done.stdout))


def measure_peers(peers: dict[str, Peer], repeats: int) -> dict[str, list[PassCosts]]:
    """What each peer takes, by turns."""
    costs: dict[str, list[PassCosts]] = {name: [] for name in peers}
    for _ in range(repeats):
        for name, peer in peers.items():
            costs[name].append(peer.measure())
    return costs


def table_of_costs(title: str, costs: dict[str, list[PassCosts]]) -> Table:
    """Medians of each peer."""
    table = Table(title=title)
    table.add_column("")
    for heading in (
        "kept for backward, MiB",
        "peak of forward, MiB",
        "peak, MiB",
        "forward, s",
        "backward, s",
    ):
        table.add_column(heading, justify="right")
    for name, passes in costs.items():
        table.add_row(
            name,
            f"{statistics.median(costs.kept for costs in passes):.0f}",
            f"{statistics.median(costs.peak_forward for costs in passes):.0f}",
            f"{statistics.median(costs.peak for costs in passes):.0f}",
            f"{statistics.median(costs.forward for costs in passes):.3g}",
            f"{statistics.median(costs.backward for costs in passes):.3g}",
        )
    return table


def main(
    tokens: int = 1024,
    responses: int = 15,
    prompt: int = 128,
    prompts: int = 1,
    repeats: int = 3,
    other: str = "",
    one: str = "",
) -> None:
    """Print a row for each peer.

    Args:
        tokens: Of a response.
        responses: To each prompt.
        prompt: Tokens of the longest prompt.
        prompts: Their number.
        repeats: Turns of each peer.
        other: Another checkout, whose packed attention is a third peer.
        one: For the processes that this starts: the kind of peer.
    """
    if one:
        return print_costs(one, Layout(prompt, responses, tokens, prompts))
    checkout = str(Path(__file__).parents[1])
    peers = {"packed": Peer(PACKED, checkout)}
    if prompts == 1:
        peers["under a mask"] = Peer(MASK, checkout)
    if other:
        peers[f"packed, {other}"] = Peer(PACKED, other)
    title = (
        f"one layer, {prompts} x {responses} responses of {tokens} tokens, prompt {prompt}; medians"
        f" of {repeats}"
    )
    table = table_of_costs(title, measure_peers(peers, repeats))
    Console(width=130).print(table)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
