"""`train_rl` on a GPU for three steps, in every way that it can train there. The commands run side
by side."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
AT_ONCE = max(1, min(8, (os.cpu_count() or 2) // 2))
SMALL = [
    "--sampler",
    "transformers",
    "--num_steps",
    "3",
    "--eval_interval",
    "3",
    "--save_interval",
    "3",
    "--max_problems",
    "32",
]
SMALL += ["--prompts_per_rollout", "8", "--beta", "0.04"]
BF16 = ["--dtype", "bfloat16", "--max_sampler_mismatch", "0.1"]
RUNS = {
    "single": [],
    "sharded, one rank": ["--policy_parallelism", "sharded", "--policy_ranks", "1"],
    "replicated, one rank": ["--policy_parallelism", "replicated", "--policy_ranks", "1"],
    "sharded, bfloat16": ["--policy_parallelism", "sharded", "--policy_ranks", "1", *BF16],
    "sharded, adapters": [
        "--policy_parallelism",
        "sharded",
        "--policy_ranks",
        "1",
        "--lora_rank",
        "8",
    ],
    "bfloat16": BF16,
    "adapters": ["--lora_rank", "8"],
    "adamw_8bit": ["--optimizer", "adamw_8bit"],
    "adamw_cpu_offload": ["--optimizer", "adamw_cpu_offload"],
    "muon": ["--optimizer", "muon"],
    "compile": ["--compile"],
    "liger": ["--use_liger_kernel"],
    "eager kernels": ["--kernels", "eager"],
    "compiled kernels": ["--kernels", "compiled", *BF16],
    "liger and compiled kernels": ["--kernels", "liger"],
    "asynchronous": ["--rollouts", "async", "--max_staleness", "1"],
    "deterministic, truncated": [
        "--deterministic",
        "--sampling_top_p",
        ".9",
        "--sampling_top_k",
        "50",
    ],
    "reference on the host": [
        "--reference_model_device",
        "cpu",
        "--train_mini_batch_size",
        "32",
        "--kernels",  # Other kernels have no copy as old policy.
        "eager",
    ],
    "policy on the host": [
        "--policy_devices",
        "cpu",
        "--sample_device",
        "cuda:0",
        "--eval_device",
        "cuda:0",
    ],
}
SEVERAL = {
    "layer_split": ["--policy_parallelism", "layer_split", "--policy_devices", "cuda:0", "cuda:1"],
    "sharded": ["--policy_parallelism", "sharded", "--policy_devices", "cuda:0", "cuda:1"],
    "replicated": ["--policy_parallelism", "replicated", "--policy_devices", "cuda:0", "cuda:1"],
}
# Nats a token that rounding in 16 bits, or weights of a step before, may make; elsewhere 1e-3.
LOOSER = {"bfloat16": 0.1, "sharded, bfloat16": 0.1, "asynchronous": 0.5}
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def runs(warm_start, tmp_path_factory):
    """Name -> the future of a run's (exit code, output, metrics)."""
    folder = tmp_path_factory.mktemp("runs")
    wanted = RUNS | (SEVERAL if torch.cuda.device_count() > 1 else {})

    def run(number: int, flags: list[str]):
        output = folder / str(number)
        command = [
            sys.executable,
            "-m",
            "alignment.train_rl",
            "--sft_base",
            str(warm_start / "sft"),
            *SMALL,
            *flags,
        ]
        command += ["--output_dir", str(output)]
        variables = {**os.environ, "OMP_NUM_THREADS": "2"}
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280
        )
        rows = [
            json.loads(line)
            for file in output.glob("*/metrics.jsonl")
            for line in file.read_text().splitlines()
        ]
        return done.returncode, done.stdout + done.stderr, rows

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            name: pool.submit(run, number, flags)
            for number, (name, flags) in enumerate(wanted.items())
        }


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=TWO_GPUS) for name in SEVERAL)])
def test_it_trains_for_three_steps(name, runs, figures):
    code, output, rows = runs[name].result()
    assert code == 0, output
    assert [row["step"] for row in rows] == [1, 2, 3]
    worst = max(row["sampler_mismatch"] or 0.0 for row in rows)
    figures(f"{name}: nats a token between sampler and trainer", worst)
    assert worst < LOOSER.get(name, 1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "sharded, one rank",
        "replicated, one rank",
        "adamw_cpu_offload",
        "compile",
        "liger",
        "eager kernels",
        "liger and compiled kernels",
    ],
)
def test_its_first_update_is_that_of_the_plain_policy(name, runs):
    """The same weights sample the same responses, and the gradient is the same but for rounding."""
    (_, _, plain), (_, output, rows) = runs["single"].result(), runs[name].result()
    assert rows, output
    for metric in ("loss", "grad_norm", "entropy", "reward"):
        assert rows[0][metric] == pytest.approx(plain[0][metric], rel=1e-3, abs=1e-5), metric
