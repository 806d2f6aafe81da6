"""Runs a sweep: claims its folder, makes the warm starts that arms share, brings every run to its
end, and plans more seeds for undecided comparisons. An executor starts the runs: one after another
on this machine, side by side on a Ray cluster, or as SLURM jobs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table

from alignment.ablation.design import REPORTED, Design, fixed_facts, reported_seeds
from alignment.args import (
    Resources,
    RLArgs,
    SFTArgs,
    as_command,
    command_line,
)
from alignment.system import signals
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl, write_json
from alignment.system.locks import lock_run_folder
from alignment.system.processes import ROOT, end_command, last_line, start_command
from alignment.system.terminal import make_table
from alignment.system.versions import versions

ATTEMPTS = 2  # Times that a run is started before it counts as failed.
LOG_SECONDS = 300.0  # between two lines on runs that train, where the output is no terminal
LOST = -1000  # Exit code of a job whose machine or worker process is gone.
REQUEUES = 50  # Times that a SLURM job goes back to the queue at its time limit.
# For a run to save its last step when SLURM ends its job, which submitit announces 90 s before.
SAVE_SECONDS = 60
Command = Callable[..., subprocess.Popen]
"""A function that starts a process, called as `command(threads=...)` on the machine that runs the
job. It names folders by absolute paths: that machine may have another working directory."""


@dataclass
class State:
    """The state of one run: waiting, running, done or failed."""

    arm: str
    seed: int
    status: str = "waiting"
    attempts: int = 0
    note: str = ""
    reason: str = ""  # The last line that a failed run printed.
    is_announced: bool = False  # Whether its start has been printed.

    @property
    def name(self) -> str:
        return f"{self.arm}_seed{self.seed}"


def refuse_other_design(design: Design) -> None:
    """Raise `UserError` where the folder's sweep.json holds another design."""
    file = design.folder / "sweep.json"
    if file.exists() and fixed_facts(read_json(file)) != fixed_facts(design.facts()):
        raise UserError(f"{design.folder} holds a sweep of another design; give another --run_name")


def claim_folder(design: Design, command: Sequence[str]) -> None:
    """Write sweep.json, with the seeds of earlier commands added. Raises `UserError` where it holds
    another design."""
    refuse_other_design(design)
    file = design.folder / "sweep.json"
    seeds = set(design.seeds)
    reported: list[int] = []
    if file.exists():
        before = read_json(file)
        seeds |= set(before.get("seeds", ()))
        reported = reported_seeds(before, file)
    content = {
        **design.facts(),
        "seeds": sorted(seeds),
        "warnings": list(design.warnings),
        "command": list(command),
        "versions": versions(),
        REPORTED: reported,
    }
    write_json(file, content)


def note_report(folder: Path, seeds: Iterable[int]) -> None:
    """Note in sweep.json after how many seeds verdicts have been reported: of these and its own."""
    file = folder / "sweep.json"
    content = read_json(file)
    number = len({*seeds, *content["seeds"]})
    content[REPORTED] = sorted({*reported_seeds(content, file), number})
    write_json(file, content)


def later_looks(folder: Path, seeds: Iterable[int]) -> tuple[str, ...]:
    """A warning where a sweep's verdicts were reported before with fewer seeds than these and its
    own together: each report has a chance of a false verdict of its own. Raises `UserError` where
    sweep.json is damaged."""
    file = folder / "sweep.json"
    if not file.exists():
        return ()
    before = read_json(file)
    own = before.get("seeds")
    if not isinstance(own, list):
        raise UserError(f"{file} is damaged: it needs seeds")
    numbers = {*reported_seeds(before, file), len({*seeds, *own})}
    if REPORTED not in before and (folder / "report.html").exists():
        numbers.add(len(own))  # of an older version, which noted nothing
    numbers.discard(1)  # which gives no verdict
    if len(numbers) < 2:
        return ()
    words = ", then ".join(map(str, sorted(numbers)))
    return (
        f"verdicts were made after {words} seeds, each time with a chance of 5 % of a false one:"
        " where a report decides whether seeds are added, only --until_decided, given from the"
        " start, keeps to 5 % in all",
    )


def refuse_further_looks(
    folder: Path, seeds: Collection[int], alpha: float, question: Collection[str]
) -> None:
    """Raise `UserError` where a sweep's looks, of which each has `alpha`, began with other seeds or
    another question: there would be more looks in all than share the chance of a false verdict."""
    file = folder / "sweep.json"
    if not file.exists():
        return
    before = read_json(file)
    if before.get("alpha") != alpha:
        return  # another design, which `claim_folder` refuses
    own = before.get("seeds")
    if isinstance(own, list) and set(own) != set(seeds):
        first = " ".join(map(str, own))
        raise UserError(
            f"--until_decided: {folder} began its looks with --seed {first}, and they share the 5 %"
            " with none that are added; give these seeds, or another --run_name"
        )
    # Versions before this entry did not keep the question.
    asked = before.get("question", sorted(question))
    if asked != sorted(question):
        first = f"--question {' '.join(asked)}" if asked else "no --question"
        raise UserError(
            f"--until_decided: {folder} began its looks with {first}, and they share the 5 % with"
            " none of another question; give the same, or another --run_name"
        )


def warm_up(design: Design, executor: Executor, output_dir: str, console: Console) -> None:
    """Make the warm starts that the arms share and that do not exist yet. Raises `UserError` where
    that fails."""
    arms_by_base: dict[str, RLArgs] = {}
    for arm in design.arms.values():
        if arm.sft_base and arm.auto_sft:
            arms_by_base[arm.sft_base] = arm
    for base, arm in arms_by_base.items():
        if Path(base).exists():
            continue
        log = design.folder / "logs" / "sft.log"
        console.print(
            f"{base} is not there yet: warming up by SFT, once: {log}", markup=False, soft_wrap=True
        )
        args = replace(
            as_command(SFTArgs, arm),
            seed=RLArgs.seed,
            lora_rank=0,
            run_name="",
            output_dir=output_dir,
        )
        folder = Path.cwd()
        command = partial(start_command, "alignment.sft", command_line(args), folder / log, folder)
        executor.submit("sft", command)
        codes: dict[str, int] = {}
        with console.status("warming up"):
            while not codes:
                codes = executor.finished(1.0)
        if codes["sft"]:
            raise UserError(f"warming up failed; its output is in {log}")


def run_all(design: Design, executor: Executor, states: Sequence[State], console: Console) -> None:
    """Bring every run to its end. A run that fails is tried once more; a second failure is printed
    and noted in its state."""
    for state in states:
        if is_done(design, state):
            state.status = "done"
        else:
            submit(design, executor, state)
    began = time.time()
    by_name = {state.name: state for state in states}
    table = progress_table(design, states)
    printed_at = time.monotonic()
    with Live(table, console=console, refresh_per_second=2, transient=True) as live:
        while any(state.status == "running" for state in states):
            ended = executor.finished(1.0)
            if not console.is_terminal:
                print_started(design, states, began, console)
            for name, code in ended.items():
                settle(design, executor, by_name[name], code, console)
            live.update(progress_table(design, states))
            # A log shows no table that moves, but a line for each run that ends, and in between.
            is_due = bool(ended) or time.monotonic() - printed_at > LOG_SECONDS
            if is_due and not console.is_terminal:
                printed_at = time.monotonic()
                console.print(progress_words(design, states), markup=False, soft_wrap=True)
    console.print(progress_table(design, states))


def print_started(design: Design, states: Sequence[State], since: float, console: Console) -> None:
    """Print each run that has written to its log since an instant, in seconds since the epoch, and
    the log's path, once."""
    for state in states:
        log = design.folder / "logs" / f"{state.name}.log"
        if state.status != "running" or state.is_announced or not log.exists():
            continue
        # An earlier sweep of this folder may have left a log.
        if log.stat().st_mtime >= since:
            state.is_announced = True
            console.print(f"{state.name} has started: {log}", markup=False, soft_wrap=True)


def progress_words(design: Design, states: Sequence[State]) -> str:
    """How many runs are done, and how far those are that train, in one line."""
    done = sum(state.status == "done" for state in states)
    words = f"{done} of {len(states)} runs done"
    failed = sum(state.status == "failed" for state in states)
    if failed:
        words += f", {failed} failed"
    under_way = []
    for state in states:
        progress = _progress(design, state)
        if state.status == "running" and progress != "waiting":
            under_way.append(f"{state.name}: {progress}")
    return "; ".join([words, *under_way])


def submit(design: Design, executor: Executor, state: State) -> None:
    """Give a run to the executor."""
    state.status = "running"
    state.attempts += 1
    flags = command_line(replace(design.arms[state.arm], seed=state.seed, run_name=state.name))
    sweep = Path.cwd() / design.folder
    run = sweep / state.name
    log = sweep / "logs" / f"{state.name}.log"
    executor.submit(state.name, partial(start_run, flags, run, log, Path.cwd()))


def start_run(
    flags: Sequence[str], run: Path, log: Path, folder: Path, threads: int | None = None
) -> subprocess.Popen:
    """Start `train_rl`, with --resume if the run's folder has begun. This is decided when the job
    starts, since an earlier attempt may have begun it on another machine meanwhile."""
    words = list(flags)
    if (run / "args.json").exists():
        words.append("--resume")
    return start_command("alignment.train_rl", words, log, folder, threads)


def settle(design: Design, executor: Executor, state: State, code: int, console: Console) -> None:
    """Update a run's state after its process has ended with exit code `code`. Prints a failure, and
    submits the run once more where that may help."""
    # The summary is written last. A process that fails after it has changed no result.
    if is_done(design, state):
        state.status = "done"
        return
    # Exit code 2 is a mistake in the arguments or in the user's code: a second attempt would repeat
    # it.
    retry = state.attempts < ATTEMPTS and code != 2
    log = design.folder / "logs" / f"{state.name}.log"
    state.status = "failed"
    state.note = f"exit code {code}"
    state.reason = ""
    if code == LOST:
        state.note = "its worker or machine is gone"
    elif log.exists():
        state.reason = last_line(log)[-500:].removeprefix("error: ")
    message = f"{state.name}: {state.note}"
    if retry:
        message += "; trying again"
    message += f" ({log})"
    if state.reason:
        message += f": {state.reason}"
    console.print(message, style="red", markup=False, soft_wrap=True)
    if retry:
        submit(design, executor, state)


def is_done(design: Design, state: State) -> bool:
    """Whether the run has written its summary."""
    return (design.folder / state.name / "summary.json").exists()


def progress_table(design: Design, states: Sequence[State]) -> Table:
    """A row for each arm and a cell for each seed: the run's step, or its final accuracy."""
    seeds = sorted({state.seed for state in states})
    done = [state for state in states if state.status == "done"]
    cells = {(state.arm, state.seed): _progress(design, state) for state in states}
    rows = []
    for arm in design.arms:
        rows.append((arm, *(cells.get((arm, seed), "") for seed in seeds)))
    columns = ("arm", *(f"seed {seed}" for seed in seeds))
    return make_table(f"{len(done)} of {len(states)} runs done", columns, rows)


def _progress(design: Design, state: State) -> str:
    """The cell of one run."""
    folder = design.folder / state.name
    if state.status == "done":
        last_evaluation = read_jsonl(folder / "evals.jsonl")[-1]
        return f"{last_evaluation['avg_all_rewards']:.3f}"
    if state.status == "failed":
        return f"[red]failed[/red] ({state.note})"
    steps = read_jsonl(folder / "metrics.jsonl")
    if not steps:
        return "waiting"
    last = steps[-1]
    num_steps = design.arms[state.arm].num_steps
    return f"step {last['step']} of {num_steps}, reward {last['reward']:.2f}"


class HasMoreSeeds(Protocol):
    """The fields of `statistics.Comparison` that `next_runs` reads. To import the class itself
    would load scipy."""

    @property
    def more_seeds(self) -> int | None: ...

    @property
    def arms(self) -> tuple[str, ...]: ...


def next_runs(
    states: Sequence[State], comparisons: Sequence[HasMoreSeeds], max_seeds: int
) -> list[State]:
    """The runs that would help to decide the undecided comparisons: one new seed for all of their
    arms, and the earlier seeds that these arms lack.

    Leaves out comparisons with a failed run, and those that more seeds would not decide
    (`more_seeds` is None). Empty where none is left, or where there are `max_seeds` seeds."""
    seeds = sorted({state.seed for state in states})
    if len(seeds) >= max_seeds:
        return []
    failed = {state.arm for state in states if state.status == "failed"}
    present = {(state.arm, state.seed) for state in states}
    arms: dict[str, None] = {}
    for comparison in comparisons:
        if comparison.more_seeds is not None and failed.isdisjoint(comparison.arms):
            arms |= dict.fromkeys(comparison.arms)
    added = []
    for seed in [*seeds, seeds[-1] + 1]:
        added += [State(arm, seed) for arm in arms if (arm, seed) not in present]
    return added


def make_executor(resources: Resources, folder: Path) -> Executor:
    """The executor that --executor names; "auto" is Ray if that is installed, else "local". Raises
    `UserError` where the executor's package or cluster is missing."""
    kind = resources.executor
    if kind == "auto":
        kind = "ray" if find_spec("ray") or resources.ray_address else "local"
    package = {"ray": "ray", "slurm": "submitit"}.get(kind)
    if package and not find_spec(package):
        raise UserError(
            f"--executor {kind} needs {package}, which is not installed: start with `uv run --extra"
            f" {kind} ...`"
        )
    if kind == "ray":
        return RayExecutor(resources.ray_address, resources.cpus_per_run, resources.gpus_per_run)
    if kind == "slurm":
        return SlurmExecutor(folder, resources.slurm_parameters, resources.cpus_per_run)
    return LocalExecutor(resources.cpus_per_run)


@contextmanager
def open_executor(folder: Path, resources: Resources, console: Console) -> Iterator[Executor]:
    """An executor for the runs in `folder`, which is locked until the block ends."""
    try:
        with closing(make_executor(resources, folder)) as executor:
            folder.mkdir(parents=True, exist_ok=True)
            with lock_run_folder(folder):
                yield executor
    except signals.Interrupted as stop:
        console.print(f"stopped ({stop}); the same command continues")
        stop.is_reported = not console.quiet
        raise


class LocalExecutor:
    """One job after another, with all cores and GPUs of this machine."""

    def __init__(self, cpus: int | None = None):
        self.cpus = cpus
        self.queue: list[tuple[str, Command]] = []
        self.process: subprocess.Popen | None = None  # of the first job of the queue

    def submit(self, name: str, command: Command) -> None:
        self.queue.append((name, command))

    def finished(self, seconds: float) -> dict[str, int]:
        """Exit codes by name of the jobs that have ended; waits for one for at most `seconds`."""
        if not self.queue:
            return {}
        name, command = self.queue[0]
        if self.process is None:
            self.process = command(threads=self.cpus)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {}
        self.process = None
        del self.queue[0]
        return {name: code}

    def close(self) -> None:
        """End the jobs under way."""
        if self.process is not None:
            end_command(self.process)


def _refuse_silent_address(address: str) -> None:
    """Raise `UserError` where nothing answers at a cluster's address; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--ray_address {address}: no Ray cluster answers there ({error})"
        ) from None


def _run_command(command: Command, cpus: int) -> int:
    """Run a command to its end; returns its exit code."""
    return command(threads=cpus).wait()


class RayExecutor:
    """Runs jobs as Ray tasks, as many at a time as the cluster has cores and whole GPUs for.

    Ray sets CUDA_VISIBLE_DEVICES for each task, so its run sees its GPUs as cuda:0 and up. Signals
    are deferred while Ray's code runs: an exception from a signal handler would break it."""

    @signals.deferred_signals()
    def __init__(self, address: str, cpus: int | None, gpus: int | None):
        _refuse_silent_address(address)
        # Jobs run in the Python environment of their node, not in a copy of this one.
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        import ray

        self.ray: Any = ray
        self._connect(address)
        if gpus is None:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            gpus = 1 if has_gpus else 0
        self.cpus = cpus or 1
        self.under_way: dict[Any, str] = {}  # a task's reference -> the job's name
        # Ray must not retry a task: the sweep counts attempts, and resumes from the last
        # checkpoint.
        task = self.ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=0)
        self.task = task(_run_command)
        self._refuse_small_machines(gpus)

    def _connect(self, address: str) -> None:
        """Join the cluster, or start one here. Raises `UserError` where that fails."""
        handler = signal.getsignal(signal.SIGTERM)
        settings: dict[str, Any] = {
            "runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}},
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        if not address:
            settings["include_dashboard"] = False  # a running cluster has its own setting
        try:
            self.ray.init(address or "local", **settings)
        except Exception as error:
            # Ray raises many kinds, a bare Exception where a node is slow to start
            where = f"--ray_address {address}" if address else "Ray could not start here"
            message = str(error) or type(error).__name__
            raise UserError(f"{where}: {message.splitlines()[0]}") from None
        # Ray has replaced the handler of SIGTERM. Only the main thread may set it back; another one
        # gets a ValueError.
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, handler)

    def _refuse_small_machines(self, gpus: int) -> None:
        """Leave the cluster and raise `UserError` where no machine has the resources of a run."""
        resources = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        for node in resources:
            if node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= gpus:
                return
        self.ray.shutdown()
        machines = []
        for node in resources:
            machines.append(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs")
        raise UserError(
            f"--cpus_per_run {self.cpus} --gpus_per_run {gpus}: no machine has them (there are:"
            f" {', '.join(machines)})"
        )

    @signals.deferred_signals()
    def submit(self, name: str, command: Command) -> None:
        self.under_way[self.task.remote(command, self.cpus)] = name

    @signals.deferred_signals()
    def finished(self, seconds: float) -> dict[str, int]:
        if not self.under_way:
            return {}
        done, _ = self.ray.wait(list(self.under_way), num_returns=1, timeout=seconds)
        codes = {}
        for reference in done:
            name = self.under_way.pop(reference)
            try:
                codes[name] = self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                # An OSError: the command could not be started.
                if isinstance(error.cause, OSError):
                    raise error.cause from None
                raise error from None
            except self.ray.exceptions.RayError:
                codes[name] = LOST
        return codes

    def close(self) -> None:
        self.ray.shutdown()


@dataclass
class SlurmJob:
    """A job of submitit, which calls the object on a machine of the cluster. The call runs the
    command and returns its exit code."""

    command: Command
    threads: int | None
    process: subprocess.Popen | None = field(default=None, init=False)  # once it has begun

    def __call__(self) -> int:
        self.process = self.command(threads=self.threads)
        return self.process.wait()

    def checkpoint(self) -> Any:
        """End the run so that it saves its last step. submitit calls this near the job's time limit
        and when SLURM preempts the job. Returns the job to queue again: the same command, which
        resumes the run."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            # Errors that are ignored: the run has ended already; or it saves for too long, and will
            # resume from its last checkpoint.
            with suppress(psutil.Error):
                run = psutil.Process(self.process.pid)
                run.terminate()
                run.wait(SAVE_SECONDS)
        return DelayedSubmission(SlurmJob(self.command, self.threads))


@contextmanager
def _package_on_the_path() -> Iterator[None]:
    """Put this package on PYTHONPATH during the block, so that jobs submitted within it, which get
    this process's environment, can import the package."""
    own = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), own]))
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if own is not None:
            os.environ["PYTHONPATH"] = own


class SlurmExecutor:
    """Runs jobs on a SLURM cluster whose machines share `folder`. Jobs that are submitted together
    form one job array. `parameters` are options of sbatch. With `cluster` "local" submitit runs the
    jobs on this machine, for tests."""

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, int | str],
        cpus: int | None,
        cluster: str = "slurm",
    ):
        import submitit

        self.cpus = cpus
        self.waiting: dict[str, SlurmJob] = {}
        self.under_way: dict[str, Any] = {}  # submitit's jobs by name
        named = {"job_name": folder.name, **parameters}
        try:
            self.slurm = submitit.AutoExecutor(
                folder / "logs" / "slurm", cluster, slurm_max_num_timeout=REQUEUES
            )
            self.slurm.update_parameters(
                **{f"slurm_{name}": value for name, value in named.items()}
            )
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
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[-1]
                raise UserError(f"--slurm: sbatch refused the jobs: {reason}") from None
            self.under_way |= zip(self.waiting, jobs, strict=True)
            self.waiting = {}
        time.sleep(seconds)
        codes = {}
        for name, job in list(self.under_way.items()):
            if job.done():
                del self.under_way[name]
                codes[name] = LOST if job.exception() else job.result()
        return codes

    def close(self) -> None:
        """Cancel the jobs under way."""
        for job in self.under_way.values():
            job.cancel(check=False)


Executor = LocalExecutor | RayExecutor | SlurmExecutor
