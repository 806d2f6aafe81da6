"""Do two checkouts compute the same weights, logs and tables, bit for bit?

    uv run -m benchmarks.same_results run --checkout . --out /tmp/new [--only grpo_clip kl]
    uv run -m benchmarks.same_results compare /tmp/old /tmp/new

`run` runs one set of small commands, `SETTINGS`, with a checkout's code in the folder --out: the
runs are in checkpoints/, what they printed is in logs/, and table.json has each setting's command,
exit code, seconds, and the SHA-256 of its weights, optimiser states, logs and tables. `compare`
takes two such folders and prints a row for each file. Timings are left out, and logs are compared
in the fields that both have: a new field or a new file is named, and is no difference. Exit code 1
where something differs, is gone or has failed. Everything runs on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from tyro.conf import Positional

FILES = ("*.safetensors", "*.jsonl", "report.md", "printed.txt")
ABSENT = object()  # in place of a field that a record lacks
TIMINGS = ("seconds", "tokens_per_second", "peak_bytes")  # what the names of such fields begin with
SFT = "alignment.sft --max_problems 32 --num_steps"
STEPS = "--prompts_per_rollout 8 --group_size 4 --train_mini_batch_size 16 --max_problems 32"
RL = (
    f"alignment.train_rl {STEPS} --num_steps 4 --eval_interval 2 --save_interval 2 --seed 0"
    " --run_name"
)


@dataclass(frozen=True)
class Setting:
    """A command that writes to checkpoints/NAME, the setting whose model it starts from, and its
    OMP_NUM_THREADS."""

    command: str
    needs: str = ""
    threads: int = 1


FLAGS = {
    "no_baseline": "--loss_type no_baseline",
    "reinforce_with_baseline": "--loss_type reinforce_with_baseline",
    "grpo_clip": "--loss_type grpo_clip",
    "kl": "--beta 0.04",
    "two_epochs": "--epochs_per_rollout 2",
    "refills": "--max_refills 2",
    "async": "--rollouts async",
    "async_kl": "--rollouts async --max_staleness 1 --beta 0.04",
    "async_correction": (
        "--rollouts async --loss_type reinforce_with_baseline --sampler_correction token_truncate"
    ),
    "adamw_cpu_offload": "--optimizer adamw_cpu_offload",
    "gspo": "--loss_type gspo --cliprange 3e-4 --cliprange_high 4e-4",
    "cispo": "--loss_type cispo --cliprange 0.1 --loss_normalization token_mean",
    "sampler_correction": "--sampler_correction token_truncate",
    "truncated_sampling": "--sampling_top_p 0.9 --sampling_top_k 50",
    # which some responses exceed
    "overlong": "--overlong_buffer 10 --skip_unfinished --max_new_tokens 44",
    "old_log_probs_sampler": "--old_log_probs sampler --epochs_per_rollout 2",
}
SWEEP = (
    "--sweep_name sweep --cpus_per_run 1 --num_steps 2 --loss_type no_baseline grpo_clip --seed 0 1"
)
EVALUATE = "alignment.evaluate --run_name evaluate --num_samples 4 --max_problems 32 --model"
SETTINGS = {  # each after what it needs
    "tiny_sft": Setting(f"{SFT} 500 --eval_interval 100"),
    "sft_two_threads": Setting(
        f"{SFT} 60 --eval_interval 30 --sft_base checkpoints/sft_two_threads", threads=2
    ),
    "countdown_tiny_sft": Setting(f"{SFT} 60 --eval_interval 30 --preset countdown_tiny"),
    **{name: Setting(f"{RL} {name} {flags}", "tiny_sft") for name, flags in FLAGS.items()},
    "two_threads": Setting(f"{RL} two_threads", "tiny_sft", threads=2),
    "countdown": Setting(f"{RL} countdown --preset countdown_tiny", "countdown_tiny_sft"),
    "evaluate": Setting(f"{EVALUATE} checkpoints/grpo_clip/final", "grpo_clip"),
    "gradients": Setting(
        "alignment.gradients --prompts 4 --group_size 2 4 --updates 1", "tiny_sft"
    ),
    "sweep": Setting(f"alignment.sweep {STEPS} {SWEEP}", "tiny_sft"),
}


def run(
    checkout: Path, out: Path, python: Path = Path(sys.executable), only: tuple[str, ...] = ()
) -> None:
    """Run the settings with the code in `checkout`, by the interpreter `python`, in the folder
    `out`. `only`: some of them, and what they need that is not there yet, whose entries in
    table.json are replaced or added."""
    if unknown := set(only) - SETTINGS.keys():
        sys.exit(f"--only {' '.join(sorted(unknown))}: choose from {' '.join(SETTINGS)}")
    file = out / "table.json"
    table: dict[str, dict] = {}
    if only and file.exists():
        table = json.loads(file.read_text())
    finished = {name for name, entry in table.items() if entry["exit_code"] == 0}
    for name in settings_to_run(only, finished):
        needed = table.get(SETTINGS[name].needs, {"exit_code": 0})
        entry = run_setting(
            name, checkout.absolute(), python.absolute(), out.absolute(), needed["exit_code"]
        )
        table[name] = entry
        file.write_text(json.dumps(table, indent=2) + "\n")
        summary = f"{name}: exit code {entry['exit_code']}, {entry['seconds']} s"
        print("\n".join([summary, *entry["last_lines"]]), flush=True)


def settings_to_run(only: tuple[str, ...], finished: set[str]) -> list[str]:
    """The settings in `only`, or all, and those that they need and that are not finished; each
    after what it needs."""
    wanted = set(only or SETTINGS)
    # from the last one on, so that what a needed setting needs itself comes later
    for name in reversed(SETTINGS):
        needed = SETTINGS[name].needs
        if name in wanted and needed and needed not in finished:
            wanted.add(needed)
    return [name for name in SETTINGS if name in wanted]


def run_setting(name: str, checkout: Path, python: Path, out: Path, failed: int) -> dict:
    """Run one setting anew, where what it needs has not `failed`; returns its entry in the
    table."""
    command = SETTINGS[name].command
    folder = out / "checkpoints" / name
    log = out / "logs" / f"{name}.txt"
    if failed:
        return {
            "command": command,
            "exit_code": 1,
            "seconds": 0,
            "last_lines": ["what it needs has failed"],
            "files": {},
        }
    shutil.rmtree(folder, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": str(SETTINGS[name].threads),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
        "PYTHONIOENCODING": "utf-8",
    }
    words = [str(python), "-m", *command.split()]
    start = time.perf_counter()
    with log.open("w") as output:
        code = subprocess.run(
            words, cwd=out, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    seconds = round(time.perf_counter() - start, 1)
    printed = log.read_text(errors="replace").splitlines()
    if name == "gradients":  # which writes no file
        rows = [line for line in printed if line.startswith(("┃", "│"))]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "printed.txt").write_text("\n".join(rows) + "\n")
    last_lines = []
    if code:
        last_lines = printed[-15:]
    return {
        "command": command,
        "exit_code": code,
        "seconds": seconds,
        "last_lines": last_lines,
        "files": digests(folder),
    }


def digests(folder: Path) -> dict[str, str]:
    """The digest of each file in a run's folder whose contents are compared."""
    by_name = {}
    for pattern in FILES:
        for file in sorted(folder.rglob(pattern)):
            by_name[str(file.relative_to(folder))] = digest(file)
    return by_name


def digest(file: Path) -> str:
    """SHA-256 of what must not change in a file."""
    content = file.read_bytes()
    if file.suffix == ".jsonl":
        content = json.dumps(records(file), sort_keys=True).encode()
    elif file.name == "report.md":
        # verdicts and arms; the design's warnings and the command come after them
        content = content.split(b"\n## What the design cannot tell")[0].split(b"\n    ")[0]
    return hashlib.sha256(content).hexdigest()


def records(file: Path) -> list[dict]:
    """The objects of a JSONL file."""
    return [
        json.loads(line, object_hook=flat, parse_constant=str)
        for line in file.read_text().splitlines()
    ]


def flat(record: dict) -> dict:
    """The record without timings, and the fields of its fields as its own ("score.reward")."""
    fields = {}
    for key, value in record.items():
        if key.startswith(TIMINGS):
            continue
        if isinstance(value, dict):
            fields |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            fields[key] = value
    return fields


def difference(a: list[dict], b: list[dict]) -> str:
    """What differs between two logs; "equal" where nothing does in the fields that both have."""
    names_a = set().union(*a)
    names_b = set().union(*b)
    common = names_a & names_b
    if len(a) != len(b) or not common:
        return f"DIFFERS: {len(a)} and {len(b)} records, with {len(common)} common fields"
    first = 0  # the number of the first record that differs
    different: set[str] = set()
    for number, (record_a, record_b) in enumerate(zip(a, b, strict=True), start=1):
        for name in common:
            # a record may lack a field that others have
            if record_a.get(name, ABSENT) != record_b.get(name, ABSENT):
                different.add(name)
        if different and not first:
            first = number
    if different:
        return f"DIFFERS from record {first} on: {', '.join(sorted(different))}"
    return f"equal, but for fields of one only: {', '.join(sorted(names_a ^ names_b))}"


def file_verdict(digest_a: str | None, digest_b: str | None) -> str:
    """How two runs' digests of a file compare; None is that of a file that a run lacks."""
    if digest_a == digest_b:
        return "equal"
    if digest_a is None:
        return "new"
    if digest_b is None:
        return "DIFFERS: gone"
    return "DIFFERS"


@dataclass(frozen=True)
class Side:
    """One of two compared folders."""

    folder: Path
    table: dict[str, dict]
    """The entry of each setting that was run."""

    @classmethod
    def read(cls, folder: Path) -> Side:
        return cls(folder, json.loads((folder / "table.json").read_text()))

    def records_of(self, setting: str, file: str) -> list[dict]:
        return records(self.folder / "checkpoints" / setting / file)


def compare_setting(name: str, a: Side, b: Side) -> dict[str, str]:
    """The verdict on each file of a setting, and on its exit codes."""
    codes = (a.table[name]["exit_code"], b.table[name]["exit_code"])
    verdicts = {"(exit code)": "equal"}
    if codes != (0, 0):
        verdicts["(exit code)"] = f"DIFFERS or failed: {codes}"
    files_a = a.table[name]["files"]
    files_b = b.table[name]["files"]
    for file in sorted(files_a.keys() | files_b.keys()):
        verdict = file_verdict(files_a.get(file), files_b.get(file))
        if verdict == "DIFFERS" and file.endswith(".jsonl"):
            verdict = difference(a.records_of(name, file), b.records_of(name, file))
        verdicts[file] = verdict
    return verdicts


def compare(a: Positional[Path], b: Positional[Path]) -> int:
    """Print a row for each file of the settings that both of two `run`s have; returns 1 where
    something differs, else 0."""
    side_a = Side.read(a)
    side_b = Side.read(b)
    rows = 0
    different = 0
    for name in SETTINGS:
        if name not in side_a.table or name not in side_b.table:
            continue
        verdicts = compare_setting(name, side_a, side_b)
        for file, verdict in verdicts.items():
            print(f"{name:24} {file:57} {verdict}")
        seconds = f"{side_a.table[name]['seconds']} and {side_b.table[name]['seconds']}"
        print(f"{name:24} {'(seconds)':57} {seconds}")
        rows += len(verdicts)
        different += sum(verdict.startswith("DIFFERS") for verdict in verdicts.values())
    in_one = ", ".join(sorted(side_a.table.keys() ^ side_b.table.keys()))
    print(f"\n{rows} rows, {different} differ; settings in one of the two only: {in_one or 'none'}")
    return int(different > 0 or rows == 0)


if __name__ == "__main__":
    sys.exit(tyro.extras.subcommand_cli_from_dict({"run": run, "compare": compare}))
