"""What does a run of several processes do when one of them fails: how long until it ends, what does
it say, and is it resumed?

    uv run -m benchmarks.rank_faults
    uv run -m benchmarks.rank_faults --only SIGSTOP "NaN update"

Each case harms one of `--ranks` sharded processes once, in the third of four steps of the tiny
preset on CPUs, with --rank_timeout 10. A row for each: seconds from the fault to the end of the
run's processes, exit code, what the run printed, processes that were left, and from which step the
run goes on when it is resumed undisturbed, and whether it then ends with the bits of a run that was
never harmed. All cases take some 20 minutes on 4 cores. Exit code 1 where a run outlives its
deadline by half a minute, leaves processes, or is not resumed.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import tyro
from rich.console import Console

from alignment.builders.verified_runs import digests
from alignment.data.embedded import embedded_model
from alignment.policy.sharded import Shard
from alignment.runs.run_folder import last_whole_step
from alignment.system.errors import UserError
from alignment.system.ranks import Ranks
from alignment.system.terminal import make_table
from benchmarks.harmed_runs import first_message, live_processes, read_lines, run_environment

RANK_TIMEOUT = 10  # seconds
LATEST_END = RANK_TIMEOUT + 30  # seconds from a fault to the end of its run
STEPS = 4
HARMED_STEP = 3
VICTIM = 1  # the rank that is harmed
MARK = "harmed"  # the file in which the victim writes when it is harmed
RUN_NAME = "run"
UNDISTURBED = "undisturbed"  # the folder of a run that is not harmed
FLAGS = f"""--preset tiny --reward random --prompts_per_rollout 4 --group_size 4
    --train_mini_batch_size 16 --max_problems 4 --max_new_tokens 200 --num_steps {STEPS}
    --save_interval 1 --eval_interval {STEPS} --keep_checkpoints 0 --run_name {RUN_NAME}
    --output_dir . --policy_parallelism sharded"""
MESSAGES = ("error: ", "stopped after", "warning, step")
HEADINGS = ("fault", "phase", "seconds", "code", "line", "resumed from", "left")

LOST_RENDEZVOUS = "lost rendezvous"  # the machine with the store of all torchruns is lost
OTHER_FLAGS = "other flags"  # the ranks are started with different flags
PHASES = ("sampling", "update", "checkpoint")
PHASES_BY_FAULT = {
    "SIGKILL": PHASES,
    "SIGSTOP": PHASES,
    "SIGTERM": PHASES,
    "hang": ("update", "checkpoint"),
    "NaN": ("update",),
    "out of memory": ("update", "checkpoint"),
    "full disk": ("checkpoint",),
    LOST_RENDEZVOUS: PHASES,
    OTHER_FLAGS: ("start",),
}


@dataclass(frozen=True)
class Case:
    """A fault, and the phase of a step in which it comes."""

    fault: str
    phase: str

    @property
    def has_torchruns(self) -> bool:
        """Whether each rank is started by a torchrun of its own, as on several machines; else the
        command itself starts all of them."""
        return self.fault in (LOST_RENDEZVOUS, OTHER_FLAGS)


def all_cases() -> list[Case]:
    """Every fault in every phase in which it can come."""
    cases = []
    for fault, phases in PHASES_BY_FAULT.items():
        cases += [Case(fault, phase) for phase in phases]
    return cases


# --- the victim -----------------------------------------------------------------------------------


def send_signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def hang() -> None:
    time.sleep(600)


def exhaust_memory() -> None:
    torch.empty(2**46)


def fill_disk() -> None:
    """Let no file grow beyond 4 KiB, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def leave_alone() -> None:
    """The harm of a fault that comes from outside of the process."""


HARMS: dict[str, Callable[[], None]] = {
    "SIGKILL": partial(send_signal, signal.SIGKILL),
    "SIGSTOP": partial(send_signal, signal.SIGSTOP),
    "SIGTERM": partial(send_signal, signal.SIGTERM),
    "hang": hang,
    "out of memory": exhaust_memory,
    "full disk": fill_disk,
    LOST_RENDEZVOUS: leave_alone,
}
"""What the victim does to its own process; NaN is put into its gradient instead."""


class FaultyShard(Shard):
    """A rank's part of a policy. The victim's harms its own process once, in the phase of step 3
    that the environment names."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.updates = 0
        self.saves = 0
        fault, phase = os.environ["RANK_FAULT"].split(":")
        self.case = Case(fault, phase)

    def accumulate(self, *arguments):
        self.updates += 1
        results = super().accumulate(*arguments)
        is_harmed_step = self.updates == HARMED_STEP
        if is_harmed_step and self.case.fault == "NaN" and self._is_due("update"):
            write_mark()
            next(self.model.parameters()).grad.to_local().fill_(torch.nan)
        return results

    def in_micro_batches(self, *arguments):
        for result in super().in_micro_batches(*arguments):
            # once that step is saved its update is over, and passes are of something else
            is_harmed_step = self.updates == HARMED_STEP and self.saves < HARMED_STEP
            if is_harmed_step and self.case.fault != "NaN" and self._is_due("update"):
                self.harm()
            yield result

    def save_optimizer(self, folder):
        self.saves += 1
        if self.saves == HARMED_STEP and self._is_due("checkpoint"):
            self.harm()
        super().save_optimizer(folder)
        if self.saves == HARMED_STEP - 1 and self._is_due("sampling"):
            # the next step's sampling, in which no method of this object is called
            threading.Timer(0.5, self.harm).start()

    def _is_due(self, phase: str) -> bool:
        is_victim = self.ranks.rank == VICTIM
        return is_victim and self.case.phase == phase and not Path(MARK).exists()

    def harm(self) -> None:
        write_mark()
        HARMS[self.case.fault]()


def write_mark() -> None:
    Path(MARK).write_text(str(time.time()))


def run_harmed_command() -> None:
    """Run `train_rl` with the faulty part on every rank."""
    open_object = Ranks.open

    def open_faulty(self, path, *arguments):
        return open_object(self, "benchmarks.rank_faults:FaultyShard", *arguments)

    Ranks.open = open_faulty
    runpy.run_module("alignment.train_rl", run_name="__main__", alter_sys=True)


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a run with a fault."""

    seconds: float
    """From the fault to the end of all processes."""
    code: int
    """The exit code, of several the one that is furthest from 0."""
    line: str
    """What was printed of the fault."""
    resumed: str
    """From which step the run goes on, and how that ends."""
    left: int
    """Processes that were still alive four deadlines after the fault."""


@dataclass(frozen=True)
class Harness:
    """What the runs of all cases share."""

    top: Path
    """The folder with a folder for each run."""
    base: Path
    """The model from which all runs start."""
    ranks: int

    @property
    def flags(self) -> list[str]:
        return [*FLAGS.split(), "--sft_base", str(self.base)]

    def train(self, folder: Path, *flags: str) -> subprocess.CompletedProcess:
        """Run an undisturbed command in a folder."""
        command = [sys.executable, "-m", "alignment.train_rl", *self.flags]
        command += ["--policy_ranks", str(self.ranks), *flags]
        environment = run_environment()
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    def commands(self, case: Case, port: int) -> list[list[str]]:
        """The command lines of a case's run: one, or a torchrun for each rank, the first of which
        has the store."""
        harmed = ["benchmarks.rank_faults", "harmed", *self.flags]
        harmed += ["--rank_timeout", str(RANK_TIMEOUT)]
        if not case.has_torchruns:
            return [[sys.executable, "-m", *harmed, "--policy_ranks", str(self.ranks)]]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--nnodes", str(self.ranks), "--nproc_per_node", "1"]
        torchrun += ["--rdzv_backend", "c10d", "--rdzv_id", "faults"]
        torchrun += ["--rdzv_endpoint", f"127.0.0.1:{port}"]
        lines = [[*torchrun, "-m", *harmed] for _ in range(self.ranks)]
        if case.fault == OTHER_FLAGS:
            for line in lines[1:]:
                line += ["--learning_rate", "0.5"]
        return lines

    def run_case(self, case: Case, folder: Path, port: int) -> Outcome:
        """Start a case's run, wait for the fault and for the run's end, and resume it."""
        begun = time.time()
        processes = self._start(case, folder, port)
        mark = folder / MARK
        while not mark.exists() and any(process.poll() is None for process in processes):
            time.sleep(0.02)
        if case.fault == LOST_RENDEZVOUS:
            processes[0].kill()
        for process in processes:
            process.wait()
        fault = begun
        if mark.exists():
            fault = float(mark.read_text())
        left = await_processes(folder, fault)
        seconds = time.time() - fault
        for process in left:
            process.kill()

        # a torchrun that was killed with its machine has no exit code of its own
        codes = [process.returncode for process in processes]
        codes = [code for code in codes if code != -signal.SIGKILL]
        logs = [log_file(folder, number) for number in range(len(processes))]
        line = first_message(read_lines(logs), MESSAGES).replace(str(folder), "")
        resumed = self._resume(folder, compares_bits=not case.has_torchruns)
        outcome = Outcome(seconds, max(codes, key=abs), line, resumed, len(left))
        print(f"{case.fault}, {case.phase}: {outcome}", flush=True)
        return outcome

    def _start(self, case: Case, folder: Path, port: int) -> list[subprocess.Popen]:
        """The processes of a case's command lines."""
        environment = run_environment(
            RANK_FAULT=f"{case.fault}:{case.phase}", RANK_FAULT_CASE=str(folder)
        )
        processes = []
        for number, line in enumerate(self.commands(case, port)):
            with log_file(folder, number).open("wb") as log:
                process = subprocess.Popen(
                    line, cwd=folder, env=environment, stdout=log, stderr=log
                )
            processes.append(process)
            if number == 0:
                time.sleep(2)  # so that the first one has the store
        return processes

    def _resume(self, folder: Path, compares_bits: bool) -> str:
        """Resume a run; returns from which step it goes on, and with `compares_bits` whether it
        ends with the bits of an undisturbed run. Ranks that torchruns started are other machines'
        to it, and its sums have another order."""
        run = folder / RUN_NAME
        if not run.exists():
            return "nothing was begun"
        if (run / "summary.json").exists():
            return "it went on to its end"
        try:
            step, damages = last_whole_step(run)
        except UserError as error:
            return str(error)
        done = self.train(folder, "--resume")
        if done.returncode:
            last_line = done.stderr.strip().splitlines()[-1:]
            return f"step {step}: exit code {done.returncode}: {last_line}"
        if damages:
            return f"step {step}, DAMAGED: {damages}"
        if not compares_bits:
            return f"step {step}"
        if digests(run) == digests(self.top / UNDISTURBED / RUN_NAME):
            return f"step {step}: the same bits"
        return f"step {step}: OTHER BITS"


def log_file(folder: Path, number: int) -> Path:
    """What the command line of that number prints."""
    return folder / f"log{number}"


def await_processes(folder: Path, fault: float) -> list[psutil.Process]:
    """Wait until a case has no process, at most four deadlines from the fault; returns those that
    are left."""
    while True:
        left = live_processes(RANK_FAULT_CASE=str(folder))
        if not left or time.time() - fault >= 4 * RANK_TIMEOUT:
            return left
        time.sleep(0.1)


# --- command --------------------------------------------------------------------------------------


def choose_cases(only: Sequence[str]) -> list[Case]:
    """The cases whose "fault phase" has one of the texts in it; all of them without a text."""
    if not only:
        return all_cases()
    chosen = []
    for case in all_cases():
        if any(text in f"{case.fault} {case.phase}" for text in only):
            chosen.append(case)
    return chosen


def is_as_it_should_be(case: Case, outcome: Outcome) -> bool:
    """Whether a run ended in time, with all its processes, and was resumed."""
    # that of different flags is found before there is a deadline, while torch loads
    is_in_time = outcome.seconds <= LATEST_END or case.phase == "start"
    is_wrong = any(word in outcome.resumed for word in ("OTHER", "DAMAGED", "exit code"))
    return is_in_time and not is_wrong and outcome.left == 0


def run_cases(cases: Sequence[Case], ranks: int, jobs: int) -> list[Outcome]:
    """The outcomes of the cases, of which `jobs` run at a time."""
    first_port = 20000 + os.getpid() % 10000
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        harness = Harness(top, Path(embedded_model("tiny", str(top))), ranks)
        (top / UNDISTURBED).mkdir()
        done = harness.train(top / UNDISTURBED)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        with ThreadPoolExecutor(jobs) as pool:
            futures = []
            for number, case in enumerate(cases):
                folder = top / str(number)
                folder.mkdir()
                future = pool.submit(harness.run_case, case, folder, first_port + number)
                futures.append(future)
            return [future.result() for future in futures]


def main(ranks: int = 2, only: tuple[str, ...] = (), jobs: int = 2):
    """Print a line for each case as it ends, and the table.

    Args:
        ranks: Processes of each run.
        only: Parts of the names of cases, which are FAULT PHASE; all cases where none is given.
        jobs: Cases that run at a time.
    """
    cases = choose_cases(only)
    outcomes = run_cases(cases, ranks, jobs)
    rows = []
    failed = []
    for case, outcome in zip(cases, outcomes, strict=True):
        line = outcome.line.partition("; go on")[0]
        seconds = f"{outcome.seconds:.1f}"
        numbers = [str(outcome.code), line, outcome.resumed, str(outcome.left)]
        rows.append([case.fault, case.phase, seconds, *numbers])
        if not is_as_it_should_be(case, outcome):
            failed.append(f"{case.fault}, {case.phase}")
    title = (
        f"{ranks} processes, one of them harmed in step {HARMED_STEP} of {STEPS};"
        f" --rank_timeout {RANK_TIMEOUT}"
    )
    Console(width=220, markup=False).print(make_table(title, HEADINGS, rows))
    if failed:
        sys.exit(f"not as it should be: {'; '.join(failed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["harmed"]:
        del sys.argv[1]
        run_harmed_command()
    else:
        tyro.cli(main, use_underscores=True)
