"""Executors of a sweep's runs: one after another on this machine, or side by side on a Ray cluster's free cores or GPUs."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec

from alignment.system import signals
from alignment.system.errors import UserError
from alignment.system.processes import ROOT, end_command

Command = Callable[..., subprocess.Popen]
"""Starts a command when it is called with its number of `threads`: `start_command` with all other arguments given."""


def make_executor(address: str, cpus: int | None, gpus: int | None) -> "Executor":
    """Ray where it is installed, else one run after another. Raises `UserError` for a cluster's address without Ray."""
    if find_spec("ray"):
        return RayExecutor(address, cpus, gpus)
    if address:
        raise UserError(f"--ray_address {address}: Ray is not installed; add --extra ray to `uv run`")
    return LocalExecutor(cpus)


class LocalExecutor:
    """One job after another, with all cores and GPUs of this machine."""

    def __init__(self, cpus: int | None = None):
        self.cpus, self.queue = cpus, []
        self.current: tuple[str, subprocess.Popen] | None = None

    def submit(self, name: str, command: Command) -> None:
        self.queue.append((name, command))

    def finished(self, seconds: float) -> dict[str, int]:
        """Exit codes by name of the jobs that have ended; waits for one for at most `seconds`."""
        if self.current is None and self.queue:
            name, command = self.queue.pop(0)
            self.current = name, command(threads=self.cpus)
        if self.current is None:
            return {}
        name, process = self.current
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {}
        self.current = None
        return {name: code}

    def close(self) -> None:
        """End the jobs under way."""
        if self.current is not None:
            end_command(self.current[1])


class RayExecutor:
    """Jobs as Ray tasks: as many at a time as the cluster has cores, or whole GPUs, for. Ray gives a task its GPUs by
    CUDA_VISIBLE_DEVICES, so the run sees them as cuda:0 and up and places its roles on them. Signals are deferred while Ray's
    own code runs, which does not survive an exception of a signal handler."""

    @signals.deferred_signals()
    def __init__(self, address: str, cpus: int | None, gpus: int | None):
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:  # Ray itself would try for minutes
            if host:
                socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise UserError(f"--ray_address {address}: no Ray cluster answers there ({error})") from None
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # the nodes' own environments run the jobs
        import ray

        self.ray = ray
        handler = signal.getsignal(signal.SIGTERM)
        try:
            own = {} if address else {"include_dashboard": False}  # a running cluster has its own setting
            nodes = {"env_vars": {"PYTHONPATH": str(ROOT)}}
            ray.init(address or "local", runtime_env=nodes, log_to_driver=False, logging_level="ERROR", **own)
        except Exception as error:  # Ray raises many kinds, a bare Exception where a node is slow to start
            where = f"--ray_address {address}" if address else "Ray could not start here"
            raise UserError(f"{where}: {(str(error) or type(error).__name__).splitlines()[0]}") from None
        with suppress(ValueError):  # only the main thread may; Ray has put a handler of its own in its place
            signal.signal(signal.SIGTERM, handler)
        gpus = gpus if gpus is not None else int(ray.cluster_resources().get("GPU", 0) > 0)
        self.cpus = cpus or 1
        # A task is not repeated by Ray: the sweep counts the attempts, and continues the run from its last checkpoint.
        self.task = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_retries=0)(execute)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= gpus for node in nodes):
            ray.shutdown()
            has = ", ".join(f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise UserError(f"--cpus_per_run {self.cpus} --gpus_per_run {gpus}: no machine has them (there are: {has})")
        self.under_way: dict[object, str] = {}

    @signals.deferred_signals()
    def submit(self, name: str, command: Command) -> None:
        self.under_way[self.task.remote(command, self.cpus)] = name

    @signals.deferred_signals()
    def finished(self, seconds: float) -> dict[str, int]:
        done, _ = self.ray.wait(list(self.under_way), num_returns=1, timeout=seconds) if self.under_way else ([], [])
        codes = {}
        for reference in done:
            name = self.under_way.pop(reference)
            try:
                codes[name] = self.ray.get(reference)
            except self.ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, OSError) else error) from None  # it could not be started
            except self.ray.exceptions.RayError:
                codes[name] = LOST
        return codes

    def close(self) -> None:
        self.ray.shutdown()


Executor = LocalExecutor | RayExecutor
LOST = -1000  # exit code of a job whose machine or worker process is gone


def execute(command: Command, cpus: int) -> int:
    """Run a command to its end and return its exit code. It ends with this process."""
    return command(threads=cpus).wait()
