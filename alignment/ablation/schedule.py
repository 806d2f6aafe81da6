"""The runs of a sweep: its folder, the shared warm starts, every run to its end, and seeds for
undecided pairs; and executors, which run them one after another on this machine, or side by side on
a Ray cluster's free cores or GPUs, or as SLURM jobs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table

from alignment.ablation.design import Design
from alignment.args import RLArgs, SFTArgs, as_command, command_line
from alignment.runs.run import CHANGEABLE_ON_RESUME
from alignment.runs.run_folder import versions
from alignment.system import signals
from alignment.system.errors import UserError
from alignment.system.files import lock_run_folder, read_json, read_jsonl, write_json
from alignment.system.processes import ROOT, end_command, last_line, start_command
from alignment.system.terminal import make_table

ATTEMPTS = 2  # at each run
LOST = -1000  # exit code of a job whose machine or worker process is gone
REQUEUES = 50  # times that a SLURM job goes back to the queue at its time limit
# for a run to save its last step when SLURM ends its job, of the 90 s that submitit asks for
SAVE_SECONDS = 60
Command = Callable[..., subprocess.Popen]
"""Starts a command, when called with its `threads`, in the sweep's folder: a cluster's machines may
work in another one."""


@dataclass
class State:
    """The state of one run: waiting, running, done or failed."""

    arm: str
    seed: int
    status: str = "waiting"
    attempts: int = 0
    note: str = ""
    reason: str = ""  # The last line that a run which failed has printed.

    @property
    def name(self) -> str:
        return f"{self.arm}_seed{self.seed}"


def claim_folder(design: Design, command: Sequence[str]) -> None:
    """Write sweep.json, with the seeds of earlier commands added. Raises `UserError` where it holds
    another design."""
    file, seeds = design.folder / "sweep.json", set(design.seeds)
    if file.exists():
        if _fixed(before := read_json(file)) != _fixed(design.facts()):
            raise UserError(
                f"{design.folder} holds a sweep of another design; give another --run_name"
            )
        seeds |= set(before.get("seeds", ()))
    facts = {"seeds": sorted(seeds), "warnings": list(design.warnings), "command": list(command)}
    write_json(file, {**design.facts(), **facts, "versions": versions()})


def _fixed(facts: Mapping[str, Any]) -> dict[str, object]:
    """What must stay the same when a sweep is continued. Arms may change what resumed runs may; new
    arguments get defaults."""
    free = (CHANGEABLE_ON_RESUME | {"preview"}) - {"num_steps"}
    defaults = json.loads(
        json.dumps({name: value for name, value in vars(RLArgs()).items() if name not in free})
    )
    arms = {
        arm: {name: args.get(name, defaults[name]) for name in defaults}
        for arm, args in facts.get("arms", {}).items()
    }
    settings = {"match": facts.get("match", "steps")} | {
        name: facts.get(name) for name in ("hold", "tie", "alpha")
    }
    return settings | {"arms": arms}


def warm_up(design: Design, executor: Executor, output_dir: str, console: Console) -> None:
    """Make the warm starts that the arms share and that do not exist yet. Raises `UserError` where
    that fails."""
    arms = {arm.sft_base: arm for arm in design.arms.values() if arm.auto_sft and arm.sft_base}
    for base, arm in arms.items():
        if Path(base).exists():
            continue
        console.print(f"{base} is not there yet: warming up by SFT, once", markup=False)
        args = replace(
            as_command(SFTArgs, arm), seed=RLArgs.seed, run_name="", output_dir=output_dir
        )
        log = design.folder / "logs" / "sft.log"
        executor.submit(
            "sft",
            partial(
                start_command, "alignment.sft", command_line(args), Path.cwd() / log, Path.cwd()
            ),
        )
        with console.status("warming up"):
            while not (codes := executor.finished(1.0)):
                pass
        if codes["sft"]:
            raise UserError(f"warming up failed; its output is in {log}")


def run_all(design: Design, executor: Executor, states: Sequence[State], console: Console) -> None:
    """Bring every run to its end. A run that fails is tried once more; a second failure is printed
    and noted in its state."""
    for state in states:
        if not is_done(design, state):
            submit(design, executor, state)
    by_name = {state.name: state for state in states}
    with Live(
        progress_table(design, states), console=console, refresh_per_second=2, transient=True
    ) as live:
        while any(state.status == "running" for state in states):
            for name, code in executor.finished(1.0).items():
                settle(design, executor, by_name[name], code, console)
            live.update(progress_table(design, states))
    console.print(progress_table(design, states))


def submit(design: Design, executor: Executor, state: State) -> None:
    """Give a run to the executor."""
    state.status = "running"
    state.attempts += 1
    flags = command_line(replace(design.arms[state.arm], seed=state.seed, run_name=state.name))
    run, log = (
        Path.cwd() / design.folder / name for name in (state.name, f"logs/{state.name}.log")
    )
    executor.submit(state.name, partial(start_run, flags, run, log, Path.cwd()))


def start_run(
    flags: Sequence[str], run: Path, log: Path, folder: Path, threads: int | None = None
) -> subprocess.Popen:
    """Start `train_rl`, with --resume where the run has a folder by now: a job may have waited, or
    begun before, elsewhere."""
    resume = ["--resume"] * (run / "args.json").exists()
    return start_command("alignment.train_rl", [*flags, *resume], log, folder, threads)


def settle(design: Design, executor: Executor, state: State, code: int, console: Console) -> None:
    """Note the end of a run's process and the last that it said, and try a failed run again, once,
    where that may help."""
    if is_done(design, state):  # whatever the exit code: what follows the summary changes no result
        return
    # 2 is a mistake in the arguments, or in the user's code that they name, which a second attempt
    # would repeat.
    retry = state.attempts < ATTEMPTS and code != 2
    log = design.folder / "logs" / f"{state.name}.log"
    state.status, state.note = (
        "failed",
        "its worker or machine is gone" if code == LOST else f"exit code {code}",
    )
    state.reason = (
        "" if code == LOST or not log.exists() else last_line(log)[-500:].removeprefix("error: ")
    )
    message = f"{state.name}: {state.note}{'; trying again' if retry else ''} ({log})"
    message += f": {state.reason}" if state.reason else ""
    console.print(message, style="red", markup=False, soft_wrap=True)
    if retry:
        submit(design, executor, state)


def is_done(design: Design, state: State) -> bool:
    """Whether the run has written its summary, which its state then notes."""
    if done := (design.folder / state.name / "summary.json").exists():
        state.status = "done"
    return done


def progress_table(design: Design, states: Sequence[State]) -> Table:
    """A row for each arm and a cell for each seed: the run's step, or its final accuracy."""
    seeds = sorted({state.seed for state in states})
    title = f"{sum(state.status == 'done' for state in states)} of {len(states)} runs done"
    cells = {(state.arm, state.seed): _progress(design, state) for state in states}
    rows = [(arm, *(cells.get((arm, seed), "") for seed in seeds)) for arm in design.arms]
    return make_table(title, ("arm", *(f"seed {seed}" for seed in seeds)), rows)


def _progress(design: Design, state: State) -> str:
    folder = design.folder / state.name
    if state.status == "done":
        return f"{read_jsonl(folder / 'evals.jsonl')[-1]['avg_all_rewards']:.3f}"
    if state.status == "failed":
        return f"[red]failed[/red] ({state.note})"
    if not (steps := read_jsonl(folder / "metrics.jsonl")):
        return "waiting"
    return (
        f"step {steps[-1]['step']} of {design.arms[state.arm].num_steps}, reward"
        f" {steps[-1]['reward']:.2f}"
    )


def next_runs(states: Sequence[State], comparisons: Sequence, max_seeds: int) -> list[State]:
    """The runs that bring the arms of every undecided `Comparison` to one seed more than any arm
    has. [] at `max_seeds`, and where every comparison is decided, has an arm with a failed run, or
    needs questions rather than seeds."""
    seeds = sorted({state.seed for state in states})
    if len(seeds) >= max_seeds:
        return []
    failed = {state.arm for state in states if state.status == "failed"}
    undecided = [c for c in comparisons if c.more_seeds is not None and failed.isdisjoint(c.arms)]
    present = {(state.arm, state.seed) for state in states}
    arms = dict.fromkeys(arm for comparison in undecided for arm in comparison.arms)
    return [
        State(arm, seed)
        for seed in [*seeds, seeds[-1] + 1]
        for arm in arms
        if (arm, seed) not in present
    ]


def make_executor(
    kind: str, address: str, cpus: int | None, gpus: int | None, slurm: Mapping, folder: Path
) -> Executor:
    """The executor of --executor; auto is Ray if installed, else local. Raises `UserError` without
    its package or cluster."""
    if kind == "auto":
        kind = "ray" if find_spec("ray") or address else "local"
    package = {"ray": "ray", "slurm": "submitit"}.get(kind)
    if package and not find_spec(package):
        raise UserError(
            f"--executor {kind} needs {package}, which is not installed: start with `uv run --extra"
            f" {kind} ...`"
        )
    made = {"local": lambda: LocalExecutor(cpus), "ray": lambda: RayExecutor(address, cpus, gpus)}
    return (made | {"slurm": lambda: SlurmExecutor(folder, slurm, cpus)})[kind]()


@contextmanager
def working_in(folder: Path, resources: tuple, console: Console) -> Iterator[Executor]:
    """Hold the folder's lock, with an executor of these `resources`, the first arguments of
    `make_executor`."""
    try:
        with closing(make_executor(*resources, folder)) as executor:
            folder.mkdir(parents=True, exist_ok=True)
            with lock_run_folder(folder):
                yield executor
    except signals.Interrupted:
        console.print("stopped; the same command continues")
        raise


class LocalExecutor:
    """One job after another, with all cores and GPUs of this machine."""

    def __init__(self, cpus: int | None = None):
        self.cpus, self.queue, self.process = cpus, [], None

    def submit(self, name: str, command: Command) -> None:
        self.queue.append((name, command))

    def finished(self, seconds: float) -> dict[str, int]:
        """Exit codes by name of the jobs that have ended; waits for one for at most `seconds`."""
        if self.process is None and self.queue:
            self.process = self.queue[0][1](threads=self.cpus)
        with suppress(subprocess.TimeoutExpired):
            if self.process is not None:
                code, self.process = self.process.wait(seconds), None
                return {self.queue.pop(0)[0]: code}
        return {}

    def close(self) -> None:
        """End the jobs under way."""
        if self.process is not None:
            end_command(self.process)


class RayExecutor:
    """Jobs as Ray tasks: as many at a time as the cluster has cores, or whole GPUs, for. Ray gives
    a task its GPUs by CUDA_VISIBLE_DEVICES, so the run sees them as cuda:0 and up and places its
    roles on them. Signals are deferred while Ray's own code runs, which does not survive an
    exception of a signal handler."""

    @signals.deferred_signals()
    def __init__(self, address: str, cpus: int | None, gpus: int | None):
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:  # Ray itself would try for minutes
            if host:
                socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise UserError(
                f"--ray_address {address}: no Ray cluster answers there ({error})"
            ) from None
        # the nodes' own environments run the jobs
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        import ray

        self.ray = ray
        handler = signal.getsignal(signal.SIGTERM)
        try:
            # a running cluster has its own setting
            own = {} if address else {"include_dashboard": False}
            nodes = {"env_vars": {"PYTHONPATH": str(ROOT)}}
            ray.init(
                address or "local",
                runtime_env=nodes,
                log_to_driver=False,
                logging_level="ERROR",
                **own,
            )
        except (
            Exception
        ) as error:  # Ray raises many kinds, a bare Exception where a node is slow to start
            where = f"--ray_address {address}" if address else "Ray could not start here"
            raise UserError(
                f"{where}: {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from None
        # only the main thread may; Ray has put a handler of its own in its place
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, handler)
        gpus = gpus if gpus is not None else int(ray.cluster_resources().get("GPU", 0) > 0)
        self.cpus, self.under_way = cpus or 1, {}
        # Not repeated by Ray: the sweep counts attempts, and goes on from the last checkpoint. It
        # returns the exit code.
        task = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=0)
        self.task = task(lambda command, cpus: command(threads=cpus).wait())
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(
            node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= gpus for node in nodes
        ):
            ray.shutdown()
            has = ", ".join(
                f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes
            )
            raise UserError(
                f"--cpus_per_run {self.cpus} --gpus_per_run {gpus}: no machine has them (there are:"
                f" {has})"
            )

    @signals.deferred_signals()
    def submit(self, name: str, command: Command) -> None:
        self.under_way[self.task.remote(command, self.cpus)] = name

    @signals.deferred_signals()
    def finished(self, seconds: float) -> dict[str, int]:
        done, _ = (
            self.ray.wait(list(self.under_way), num_returns=1, timeout=seconds)
            if self.under_way
            else ([], [])
        )
        codes = {}
        for reference in done:
            name = self.under_way.pop(reference)
            try:
                codes[name] = self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                raise (
                    error.cause if isinstance(error.cause, OSError) else error
                ) from None  # it could not be started
            except self.ray.exceptions.RayError:
                codes[name] = LOST
        return codes

    def close(self) -> None:
        self.ray.shutdown()


@dataclass
class SlurmJob:
    """A command as submitit calls it on a machine of the cluster. It returns the command's exit
    code."""

    command: Command
    threads: int | None
    process = None  # of the command, once it has begun

    def __call__(self) -> int:
        self.process = self.command(threads=self.threads)
        return self.process.wait()

    def checkpoint(self):
        """Called by submitit near the job's time limit or when SLURM takes its machine: the run
        saves its last step and ends. Returns what the requeued job does, which is the same again,
        and so resumes the run."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            # it has ended; or it takes too long, and resumes from its last checkpoint
            with suppress(psutil.Error):
                run = psutil.Process(self.process.pid)
                run.terminate()
                run.wait(SAVE_SECONDS)
        return DelayedSubmission(SlurmJob(self.command, self.threads))


@contextmanager
def _package_on_the_path() -> Iterator[None]:
    """Processes and jobs that begin within the block, which get this process's environment, find
    the package."""
    own = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), own]))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if own is not None:
            os.environ["PYTHONPATH"] = own


class SlurmExecutor:
    """Jobs of a SLURM cluster, whose machines share `folder`; those that wait together are one job
    array. `parameters` are submitit's, under sbatch's names. Tests give submitit's own `cluster`
    "local"."""

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, int | str],
        cpus: int | None,
        cluster: str = "slurm",
    ):
        import submitit

        self.cpus, self.waiting, self.under_way = cpus, {}, {}
        given = {
            f"slurm_{name}": value
            for name, value in {"job_name": folder.name, **parameters}.items()
        }
        try:
            self.slurm = submitit.AutoExecutor(
                folder / "logs" / "slurm", cluster, slurm_max_num_timeout=REQUEUES
            )
            self.slurm.update_parameters(**given)
        except (RuntimeError, NameError) as error:  # no SLURM here; an unknown parameter
            raise UserError(f"--executor slurm: {str(error).splitlines()[0]}") from None

    def submit(self, name: str, command: Command) -> None:
        self.waiting[name] = SlurmJob(command, self.cpus)

    @signals.deferred_signals()
    def finished(self, seconds: float) -> dict[str, int]:
        if self.waiting:
            try:
                with _package_on_the_path():
                    jobs = self.slurm.submit_array(list(self.waiting.values()))
                self.under_way |= zip(self.waiting, jobs, strict=True)
            except RuntimeError as error:
                raise UserError(
                    f"--slurm: sbatch refused the jobs: {str(error).strip().splitlines()[-1]}"
                ) from None
            self.waiting = {}
        time.sleep(seconds)
        done = {
            name: self.under_way.pop(name)
            for name, job in list(self.under_way.items())
            if job.done()
        }
        return {name: LOST if job.exception() else job.result() for name, job in done.items()}

    def close(self) -> None:
        """Cancel the jobs under way."""
        for job in self.under_way.values():
            job.cancel(check=False)


Executor = LocalExecutor | RayExecutor | SlurmExecutor
