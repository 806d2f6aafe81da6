"""Does `alignment.verify` see a fault, or does a run of three steps stop or warn for it?

uv run -m benchmarks.faults
uv run -m benchmarks.faults --only "other betas" "decay added to the gradient"

Plants each fault of `benchmarks.plants` in a copy of the package, one at a time, and runs `verify`
there as a user would, on the embedded tiny model; where every line passes, three steps of
`train_rl`. First it runs both without a fault. Prints which line saw the fault, and the seconds of
both commands. Exit code 1 where a fault passes unseen, or a line fails without one.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from alignment.system.terminal import make_table
from benchmarks.measuring import ROOT
from benchmarks.plants import PLANTS, Plant

BASE = "base"  # Folder of the model that all runs start from.
RUN = "run"
COMMON = [
    "--preset",
    "tiny",
    "--sft_base",
    BASE,
    "--output_dir",
    "output",
    "--sampler",
    "transformers",
    "--prompts_per_rollout",
    "4",
    "--group_size",
    "4",
    "--max_new_tokens",
    "24",
    "--max_problems",
    "8",
    "--trackers",
]
WARM_UP = ["--preset", "tiny", "--sft_base", BASE, "--num_steps", "60", "--trackers"]


@dataclass(frozen=True)
class Outcome:
    """What became of one plant."""

    plant: Plant | None
    """None: the package as it is."""
    seen_by: list[str]
    """Lines of `verify` that failed, or the message with which a command stopped."""
    seconds: float


def run_command(folder: Path, command: str, flags: Sequence[str]) -> subprocess.CompletedProcess:
    """Run a command of the package that is in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", f"alignment.{command}", *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def copy_package(folder: Path, plant: Plant | None) -> None:
    """Copy the package to `folder`, with the plant's change, if any."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "alignment", folder / "alignment", ignore=ignored)
    if plant is not None:
        file = folder / "alignment" / plant.file
        file.write_text(file.read_text().replace(plant.right, plant.wrong))


def message_of(done: subprocess.CompletedProcess) -> str:
    """The last line that a command printed."""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def try_plant(plant: Plant | None, base: Path) -> Outcome:
    """Plant one fault, or none, in a copy of the package, and run both commands there."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault_") as name:
        folder = Path(name)
        copy_package(folder, plant)
        (folder / BASE).symlink_to(base)
        flags = plant.flags if plant is not None else ()
        resumes = plant is not None and plant.resumes
        seen_by = seen_by_verify(folder, flags, resumes)
        if not seen_by:
            seen_by = seen_by_run(folder, flags)
    return Outcome(plant, seen_by, time.monotonic() - start)


def seen_by_verify(folder: Path, flags: Sequence[str], resumes: bool) -> list[str]:
    """The lines of `verify` that fail there; with `resumes` it kills and resumes a run, too."""
    kill_after = "1" if resumes else "0"
    own = ["--run_name", RUN, "--kill_after", kill_after]
    verified = run_command(folder, "verify", [*COMMON, *own, *flags])
    if verified.returncode == 0:
        return []
    summary = folder / "output" / RUN / "summary.json"
    if not summary.exists():  # It stopped before its end.
        return [f"verify: {message_of(verified)}"]
    checks = json.loads(summary.read_text())["checks"]
    return [check["what"] for check in checks if check["passed"] is False]


def seen_by_run(folder: Path, flags: Sequence[str]) -> list[str]:
    """The error of three steps of `train_rl` there, or the warnings."""
    run = "trained"
    steps = ["--num_steps", "3", "--run_name", run]
    trained = run_command(folder, "train_rl", [*COMMON, *steps, *flags])
    if trained.returncode:
        return [f"train_rl: {message_of(trained)}"]
    names: dict[str, None] = {}
    for line in (folder / "output" / run / "metrics.jsonl").read_text().splitlines():
        names |= dict.fromkeys(json.loads(line)["warnings"])
    return [f"train_rl: warning {name}" for name in names]


def row_of(outcome: Outcome) -> tuple[str, str, str]:
    """The outcome's row in the table: the fault, who saw it, and the seconds."""
    fault = "none"
    if outcome.plant is not None:
        fault = f"{outcome.plant.name} [{outcome.plant.file}]"
    return fault, "; ".join(outcome.seen_by) or "-", f"{outcome.seconds:.0f}"


def warm_up(folder: Path) -> Path:
    """Train the model that all runs start from, so that its answers are not noise."""
    copy_package(folder, None)
    done = run_command(folder, "sft", WARM_UP)
    if done.returncode:
        raise SystemExit(f"the warm-up failed: {message_of(done)}")
    return folder / BASE


def main(only: tuple[str, ...] = (), parallel: int = 0) -> None:
    """Plant faults and print who sees them.

    Args:
        only: Names of plants; by default all.
        parallel: Plants at a time; 0: as many as there are processors.
    """
    names = {plant.name for plant in PLANTS}
    unknown = set(only) - names
    if unknown:
        raise SystemExit(f"--only: no plant is called {', '.join(sorted(unknown))}")
    chosen = [plant for plant in PLANTS if not only or plant.name in only]
    console = Console()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults_") as name:
        base = warm_up(Path(name))
        workers = parallel or os.cpu_count() or 1
        with ThreadPoolExecutor(workers) as threads:
            pending = [threads.submit(try_plant, plant, base) for plant in (None, *chosen)]
            for future in pending:
                outcome = future.result()
                outcomes.append(outcome)
                line = ": ".join(row_of(outcome)[:2])
                console.print(line, markup=False, soft_wrap=True)
    headings = ("fault", "seen by", "seconds")
    console.print(make_table("faults", headings, map(row_of, outcomes), numbers=("seconds",)))
    without_fault, *planted = outcomes
    unseen = [row_of(outcome)[0] for outcome in planted if not outcome.seen_by]
    console.print(f"{len(planted) - len(unseen)} of {len(planted)} faults are seen")
    if unseen:
        console.print(f"unseen: {', '.join(unseen)}", markup=False, soft_wrap=True)
    if without_fault.seen_by:
        console.print("a line fails without a fault")
    sys.exit(bool(unseen or without_fault.seen_by))


if __name__ == "__main__":
    tyro.cli(main)
