"""Do the invariants of a training run warn where nothing is wrong?

uv run -m benchmarks.invariant_alarms --runs 200

Trains short runs of the presets that a CPU can train, each with a seed, a loss, an estimator of
advantages, an optimiser, a group size and numbers of updates by chance, in forks of one process.
Counts the warnings of invariants. Exit code 1 where there is one, or where a run fails.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import tyro

# Warnings of a whole run, beside those of its updates.
INVARIANTS_OF_RUNS = ("cut_short", "trained_test_questions", "zero_moments")
PRESETS = ("tiny", "countdown_tiny")
LOSSES = ("reinforce_with_baseline", "grpo_clip", "grpo_no_clip", "gspo", "cispo", "sapo", "gmpo")
ADVANTAGES = ("group_baseline", "opo", "maxrl", "reinforce_plus_plus_baseline")
OPTIMIZERS = ("adamw", "adamw", "adamw_8bit", "adamw_cpu_offload", "muon")
STEPS = 3
COMMON = {
    "reward": "random",
    "prompts_per_rollout": 2,
    "max_new_tokens": 12,
    "max_problems": 2,
    "num_problems": 64,
    "num_steps": STEPS,
    "save_interval": STEPS - 1,
    "eval_interval": STEPS,
    "sampler": "transformers",
    "max_sampler_mismatch": 0.1,  # Presets have less, for float32.
}


def flags_of_run(number: int) -> list[str]:
    """The command line of a run, which its number decides."""
    draw = random.Random(f"run {number}")
    group_size = draw.choice((2, 3, 4, 8))
    values = {
        **COMMON,
        "preset": draw.choice(PRESETS),
        "seed": number,
        "loss_type": draw.choice(LOSSES),
        "advantage": draw.choice(ADVANTAGES),
        "optimizer": draw.choice(OPTIMIZERS),
        "group_size": group_size,
        "epochs_per_rollout": draw.choice((1, 2, 3)),
        "train_mini_batch_size": draw.choice((0, group_size)),
        "learning_rate": draw.choice((1e-6, 1e-4, 1e-2)),
        "warmup_steps": draw.choice((0, 2, 10)),
        "weight_decay": draw.choice((0.0, 0.1)),
        "max_grad_norm": draw.choice((0.01, 1.0)),
        "beta": draw.choice((0.0, 0.0, 0.1)),
        "lora_rank": draw.choice((0, 0, 0, 4)),
        "dtype": draw.choice(("float32", "float32", "bfloat16")),
        "sampling_temperature": draw.choice((0.7, 1.0)),
        "sampling_top_p": draw.choice((0.9, 1.0)),
    }
    flags = ["--trackers"]
    for name, value in values.items():
        flags += [f"--{name}", str(value)]
    return flags


def train_in_fork(number: int, base: Path, folder: Path) -> int:
    """Train a run in a fork of this process, whose output goes to a file. Returns its exit code."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    code = 1
    try:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open(folder / f"{number}.log", "w"))
            stack.enter_context(contextlib.redirect_stdout(log))
            stack.enter_context(contextlib.redirect_stderr(log))
            code = train_once(number, base, folder)
    finally:
        os._exit(code)


def train_once(number: int, base: Path, folder: Path) -> int:
    """Train a run in this process. Returns 0, or 1 where it fails."""
    import torch

    from alignment.args import RLArgs, parse
    from alignment.builders.checks import check_rl
    from alignment.system.terminal import make_console
    from alignment.train_rl import train

    # In a fork the first call replaces torch's pool of threads, without a lock: two threads of the
    # run that came first together would stop it with "Invalid thread pool!".
    torch.set_num_threads(1)
    names = ["--sft_base", str(base), "--output_dir", str(folder), "--run_name", str(number)]
    sys.argv = ["train_rl", *flags_of_run(number), *names]
    try:
        args = parse(RLArgs)
        check_rl(args)
        train(args, make_console())
    except BaseException:  # parse raises SystemExit.
        traceback.print_exc()
        return 1
    return 0


def alarms_of(folder: Path) -> list[str]:
    """The invariants that a run's steps warn of."""
    from alignment.training.invariants import INVARIANTS

    known = (*INVARIANTS, *INVARIANTS_OF_RUNS)
    warnings: list[str] = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        warnings += json.loads(line)["warnings"]
    return [name for name in warnings if name in known]


def import_modules() -> None:
    """Import here what every fork then has."""
    from alignment import train_rl  # noqa: F401
    from alignment.builders import evaluations, training, warm_start  # noqa: F401
    from alignment.data.tasks import TASKS
    from alignment.runs import summary

    # Of no use here, and a large part of the time of a short run.
    summary.plot_learning_curve = lambda *_: None
    for preset_task in ("arithmetic", "countdown_small"):
        TASKS[preset_task].test_problems("")
    gc.freeze()  # What every fork shares is no garbage.


def train_all(runs: Sequence[int], base: Path, folder: Path) -> tuple[Counter[str], list[int]]:
    """Train the runs, and print each that fails or warns. Returns the number of runs with each
    alarm, and the runs that failed."""
    alarms: Counter[str] = Counter()
    failures = []
    for number in runs:
        code = train_in_fork(number, base, folder)
        if code:
            failures.append(number)
            last = (folder / f"{number}.log").read_text().strip().splitlines()[-1:]
            print(f"run {number} failed: {' '.join(last)}", flush=True)
            continue
        found = sorted(set(alarms_of(folder / str(number))))
        alarms.update(found)
        if found:
            print(f"run {number} warns of {found}: {' '.join(flags_of_run(number))}", flush=True)
    return alarms, failures


def main(base: str = "", runs: int = 200, first: int = 0) -> None:
    """Count the invariants' alarms in sound runs.

    Args:
        base: Folder of the model that runs start from; by default the embedded one, untrained.
        runs: Number of runs.
        first: Number of the first run, which decides its settings.
    """
    import torch

    os.nice(5)
    torch.set_num_threads(1)  # A fork has none of the other threads.
    import_modules()
    start = time.process_time()
    with tempfile.TemporaryDirectory(prefix="alarms_") as name:
        folder = Path(name)
        model = Path(base)
        if not base:
            from alignment.data.embedded import build_tiny

            model = folder / "base"
            build_tiny(model)
        alarms, failures = train_all(range(first, first + runs), model, folder)
    times = os.times()
    seconds = time.process_time() - start + times.children_user + times.children_system
    print(
        f"{runs} runs of {STEPS} steps, {sum(alarms.values())} alarms {dict(alarms)},"
        f" {len(failures)} failed; {seconds:.0f} s of processor time"
    )
    sys.exit(bool(alarms or failures))


if __name__ == "__main__":
    tyro.cli(main)
