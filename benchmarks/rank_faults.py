"""What a run of several processes does when one of them fails: seconds to its end, what it says,
and whether it is resumed.

uv run -m benchmarks.rank_faults                    # all faults, in some 20 minutes on 4 cores uv
run -m benchmarks.rank_faults --only SIGSTOP "NaN update"
"""

from __future__ import annotations

import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import tyro
from rich.console import Console
from rich.table import Table

from alignment.data.embedded import embedded_model
from alignment.policy.sharded import Shard
from alignment.runs.run_folder import last_whole_step
from alignment.system.errors import UserError
from alignment.system.ranks import Ranks
from alignment.verify import digests

DEADLINE = 10  # --rank_timeout
STEPS = 4
HARMED_STEP = 3
VICTIM = 1  # the rank that is harmed
MARK = "harmed"  # the file that the victim writes first
NAME = "run"
FLAGS = [
    "--preset",
    "tiny",
    "--reward",
    "random",
    "--prompts_per_rollout",
    "4",
    "--group_size",
    "4",
    "--max_problems",
    "4",
]
FLAGS += [
    "--train_mini_batch_size",
    "16",
    "--max_new_tokens",
    "200",
    "--num_steps",
    str(STEPS),
    "--save_interval",
    "1",
]
FLAGS += [
    "--eval_interval",
    str(STEPS),
    "--keep_checkpoints",
    "0",
    "--run_name",
    NAME,
    "--output_dir",
    ".",
]
FLAGS += ["--policy_parallelism", "sharded"]
PHASES = ("sampling", "update", "checkpoint")
SIGNALS = {name: getattr(signal, name) for name in ("SIGKILL", "SIGSTOP", "SIGTERM")}
FAULTS = {
    **dict.fromkeys(SIGNALS, PHASES),
    "hang": ("update", "checkpoint"),
    "NaN": ("update",),
    "out of memory": ("update", "checkpoint"),
    "full disk": ("checkpoint",),
    "lost rendezvous": PHASES,
    "other flags": ("start",),
}


class FaultyShard(Shard):
    """A rank's part of a policy, which harms its own process in the phase of step 3 that the
    environment names."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.updates = self.saves = 0
        self.fault, self.phase = os.environ["RANK_FAULT"].split(":")

    def accumulate(self, *arguments):
        self.updates += 1
        results = super().accumulate(*arguments)
        if self.updates == HARMED_STEP and self.fault == "NaN" and self._harms("update"):
            mark()
            next(self.model.parameters()).grad.to_local().fill_(torch.nan)
        return results

    def in_micro_batches(self, *arguments):
        for done in super().in_micro_batches(*arguments):
            if (
                self.updates == HARMED_STEP
                and self.saves < HARMED_STEP
                and self.fault != "NaN"
                and self._harms("update")
            ):
                self.harm()
            yield done

    def save_optimizer(self, folder):
        self.saves += 1
        if self.saves == HARMED_STEP and self._harms("checkpoint"):
            self.harm()
        super().save_optimizer(folder)
        if self.saves == HARMED_STEP - 1 and self._harms("sampling"):
            threading.Timer(0.5, self.harm).start()

    def _harms(self, phase: str) -> bool:
        return self.phase == phase and self.ranks.rank == VICTIM and not Path(MARK).exists()

    def harm(self) -> None:
        """Do what the fault says to this process; the harness kills torchrun where the rendezvous
        is to be lost."""
        mark()
        if self.fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.fault])
        elif self.fault == "hang":
            time.sleep(600)
        elif self.fault == "out of memory":
            torch.empty(2**46)
        elif self.fault == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def mark() -> None:
    Path(MARK).write_text(str(time.time()))


def harmed_command() -> None:
    """`train_rl` with the faulty part on every rank."""
    open_object = Ranks.open
    Ranks.open = lambda self, path, *arguments: open_object(
        self, "benchmarks.rank_faults:FaultyShard", *arguments
    )
    runpy.run_module("alignment.train_rl", run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Outcome:
    """What became of a run with a fault."""

    seconds: float
    code: int
    line: str
    resumed: str
    left: int


def environment(**more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **more}


def train(folder: Path, ranks: int, *flags: str) -> subprocess.CompletedProcess:
    """An undisturbed command in a folder."""
    line = [
        sys.executable,
        "-m",
        "alignment.train_rl",
        *FLAGS,
        "--policy_ranks",
        str(ranks),
        *flags,
    ]
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True)


def commands(fault: str, ranks: int, port: int) -> list[list[str]]:
    """The command lines of a run: one, or a torchrun for each rank, the first of which keeps the
    rendezvous."""
    harmed = ["benchmarks.rank_faults", "harmed", *FLAGS, "--rank_timeout", str(DEADLINE)]
    if fault not in ("lost rendezvous", "other flags"):
        return [[sys.executable, "-m", *harmed, "--policy_ranks", str(ranks)]]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(ranks),
        "--nproc_per_node",
        "1",
    ]
    torchrun += [
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        f"127.0.0.1:{port}",
        "--rdzv_id",
        "faults",
    ]
    line = [*torchrun, "-m", *harmed]
    return [
        [*line, *(["--learning_rate", "0.5"] if rank and fault == "other flags" else [])]
        for rank in range(ranks)
    ]


def outcome(folder: Path, fault: str, phase: str, ranks: int, port: int) -> Outcome:
    """Start a run, wait for the fault and for the run's end, and resume it."""
    case = environment(RANK_FAULT=f"{fault}:{phase}", RANK_FAULT_CASE=str(folder))
    started, begun = [], time.time()
    for number, line in enumerate(commands(fault, ranks, port)):
        with (folder / f"log{number}").open("wb") as log:
            started.append(subprocess.Popen(line, cwd=folder, env=case, stdout=log, stderr=log))
        time.sleep(2 if number == 0 else 0)  # so that the first one has the store
    while not (folder / MARK).exists() and any(process.poll() is None for process in started):
        time.sleep(0.02)
    if fault == "lost rendezvous":
        started[0].kill()
    for process in started:
        process.wait()
    at = float((folder / MARK).read_text()) if (folder / MARK).exists() else begun
    while (left := processes_of(str(folder))) and time.time() - at < 4 * DEADLINE:
        time.sleep(0.1)
    seconds = time.time() - at
    for process in left:
        process.kill()
    codes = [process.returncode for process in started if process.returncode != -signal.SIGKILL]
    lines = "".join(
        (folder / f"log{number}").read_text(errors="replace") for number in range(len(started))
    ).splitlines()
    words = ("error: ", "stopped after", "warning, step")
    said = next(
        (line[line.index(word) :] for word in words for line in lines if word in line),
        lines[-1] if lines else "",
    )
    again = resumed(folder, ranks, len(started) == 1)
    found = Outcome(seconds, max(codes, key=abs), said.replace(str(folder), ""), again, len(left))
    print(f"{fault}, {phase}: {found}", flush=True)
    return found


def processes_of(case: str) -> list[psutil.Process]:
    """The processes that still run of those that a case has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("RANK_FAULT_CASE") == case
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


def resumed(folder: Path, ranks: int, same_layout: bool) -> str:
    """From which step the run goes on, and whether it ends with the bits of an undisturbed one,
    where its ranks were on one machine as well: else sums have another order."""
    if not (folder / NAME).exists():
        return "nothing was begun"
    if (folder / NAME / "summary.json").exists():
        return "it went on to its end"
    try:
        step, damages = last_whole_step(folder / NAME)
    except UserError as error:
        return str(error)
    done = train(folder, ranks, "--resume")
    if done.returncode:
        return f"step {step}: exit code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    if damages:
        return f"step {step}, DAMAGED: {damages}"
    if not same_layout:
        return f"step {step}"
    same = digests(folder / NAME) == digests(folder.parent / "undisturbed" / NAME)
    return f"step {step}: {'the same bits' if same else 'OTHER BITS'}"


def main(ranks: int = 2, only: tuple[str, ...] = (), jobs: int = 2):
    """Print the table; exit code 1 where a run outlives its deadline by half a minute, leaves
    processes, or is not resumed."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        base = embedded_model("tiny", str(top))
        FLAGS.extend(["--sft_base", str(base)])
        cases = [(fault, phase) for fault, phases in FAULTS.items() for phase in phases]
        cases = [case for case in cases if any(word in " ".join(case) for word in only or [""])]
        folders = [top / f"{number}" for number in range(len(cases))]
        for folder in (top / "undisturbed", *folders):
            folder.mkdir()
        done = train(top / "undisturbed", ranks)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        with ThreadPoolExecutor(jobs) as pool:
            ports = range(20000 + os.getpid() % 10000, 40000)
            results = list(
                pool.map(
                    lambda row: outcome(row[0], *row[1], ranks, row[2]),
                    zip(folders, cases, ports, strict=False),
                )
            )
        shutil.rmtree(top / "undisturbed")
    table = Table(
        title=(
            f"{ranks} processes, one of them harmed in step {HARMED_STEP} of {STEPS};"
            f" --rank_timeout {DEADLINE}"
        )
    )
    for heading in ("fault", "phase", "seconds", "code", "line", "resumed from", "left"):
        table.add_column(heading)
    bad = []
    for (fault, phase), found in zip(cases, results, strict=True):
        said = found.line.partition("; go on")[0]
        table.add_row(
            fault,
            phase,
            f"{found.seconds:.1f}",
            str(found.code),
            said,
            found.resumed,
            str(found.left),
        )
        wrong = found.left or any(
            word in found.resumed for word in ("OTHER", "DAMAGED", "exit code")
        )
        if wrong or found.seconds > DEADLINE + 30 and phase != "start":
            bad.append(f"{fault}, {phase}")
    Console(width=220, markup=False).print(table)
    if bad:
        sys.exit(f"not as it should be: {'; '.join(bad)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["harmed"]:
        del sys.argv[1]
        harmed_command()
    else:
        tyro.cli(main, use_underscores=True)
