"""Attention of packed rows, one layer: bytes kept for backward, peak bytes, and seconds, beside
torch's attention under a mask.

uv run -m benchmarks.attention [--tokens 1024] [--other FOLDER_OF_ANOTHER_CHECKOUT]

`--responses` responses of so many tokens to one prompt, SmolLM2's heads, float32. The peer pads
nothing and shares the prompt, too: each response's queries see prompt and response by
`scaled_dot_product_attention` under a mask. Each number is of a process of its own, whose malloc
gives back at once what is freed, so that the resident set is what tensors hold. Seconds are
medians, by turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

HEADS, KEY_HEADS, SIZE = 9, 3, 64  # SmolLM2-135M
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
COLUMNS = (
    "kept for backward, MiB",
    "peak of forward, MiB",
    "peak, MiB",
    "forward, s",
    "backward, s",
)


def main(
    tokens: int = 1024,
    responses: int = 15,
    prompt: int = 128,
    repeats: int = 3,
    other: str = "",
    one: str = "",
) -> None:
    """Compare; `other` is a checkout whose packed attention is a third peer; `one` is for the
    processes that this starts."""
    if one:
        return measure(one, tokens, responses, prompt)
    here = str(Path(__file__).parents[1])
    peers = {"joined parts": ("packed", here), "under a mask": ("mask", here)}
    peers |= {f"packed, {other}": ("packed", other)} if other else {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(repeats):
        for name, (kind, folder) in peers.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--one", kind]
            answer = subprocess.run(
                command,
                env=os.environ | EXACT | {"PYTHONPATH": folder},
                stdout=subprocess.PIPE,
                check=True,
            )
            found[name].append(json.loads(answer.stdout))
    table = Table(
        title=(
            f"one layer, {responses} responses of {tokens} tokens, prompt {prompt}; medians of"
            f" {repeats}"
        )
    )
    for heading in ("", *COLUMNS):
        table.add_column(heading, justify="right" if heading else "left")
    for name, records in found.items():
        middle = [statistics.median(record[column] for record in records) for column in COLUMNS]
        table.add_row(
            name,
            *(f"{value:.0f}" for value in middle[:3]),
            *(f"{value:.2f}" for value in middle[3:]),
        )
    Console(width=130).print(table)


def measure(kind: str, tokens: int, responses: int, prompt: int) -> None:
    """Print what one peer takes, as JSON, in the second of two passes."""
    from alignment.model import packing

    rows = [(tuple(range(prompt)), tuple(range(tokens))) for _ in range(responses)]
    length, generator = prompt + responses * tokens, torch.Generator().manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    qkv = [
        torch.randn(1, number, length, SIZE, generator=generator).requires_grad_()
        for number in heads
    ]
    packed, rule = packing.pack(rows), packing.AttentionRule(SIZE**-0.5)

    def under_mask(q, k, v) -> torch.Tensor:
        """[responses, heads, tokens, size] of the responses; the prompt's own attention is left
        out: it is little."""
        q, k, v = (tensor[0] for tensor in (q, k, v))

        def own(of):
            return of[:, prompt:].unflatten(1, (responses, tokens)).transpose(0, 1)

        def shared(of):
            return of[:, :prompt].expand(responses, -1, -1, -1)

        keys, values = (torch.cat([shared(of), own(of)], dim=2) for of in (k, v))
        mask = torch.ones(tokens, prompt + tokens, dtype=torch.bool).tril(prompt)
        return torch.nn.functional.scaled_dot_product_attention(
            own(q), keys, values, attn_mask=mask, enable_gqa=True
        )

    attend = under_mask if kind == "mask" else lambda *tensors: packed.attend(None, *tensors, rule)
    for _ in range(2):
        before = resident()
        peak, start = Peak(0.001), time.perf_counter()
        out = attend(*qkv)
        forward, kept, peak_forward = (
            time.perf_counter() - start,
            resident() - before,
            peak.end() - before,
        )
        peak, gradient = Peak(0.001), torch.ones_like(out)
        start = time.perf_counter()
        out.backward(gradient)
        backward, highest = time.perf_counter() - start, max(peak.end() - before, peak_forward)
        del out, gradient
        for tensor in qkv:
            tensor.grad = None
    print(
        json.dumps(
            dict(zip(COLUMNS, (kept, peak_forward, highest, forward, backward), strict=True))
        )
    )


class Peak:
    """The highest resident set between its making and `end`, in MiB, by a thread that looks every
    so many seconds: a run's own meter begins the kernel's VmHWM anew in every phase."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.highest, self.stop, self.seconds = 0.0, threading.Event(), seconds
        self.thread = threading.Thread(target=self.look)
        self.thread.start()

    def look(self) -> None:
        while not self.stop.wait(self.seconds):
            self.highest = max(self.highest, resident())

    def end(self) -> float:
        self.stop.set()
        self.thread.join()
        return max(self.highest, resident())


def resident() -> float:
    """Resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
