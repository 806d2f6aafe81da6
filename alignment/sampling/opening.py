"""A sampler that opens in a thread, beside the loading of the trainer's models. Its processes
start, and import what they need, at once. They take memory of their devices when the trainer allows
it: vLLM measures a GPU's free memory from its start to the end of its profiling, and refuses to go
on, or makes room for too few keys and values, where others take or release some meanwhile
(`determine_available_memory` in vllm/v1/worker/gpu_worker.py)."""

import threading
import time
from collections.abc import Callable, Iterable

import torch
from rich.console import Console

from alignment.policy.policy import Policy
from alignment.sampling.sampler import Sampler, Start
from alignment.system.clock import start_in_background
from alignment.system.errors import RunStopped
from alignment.system.processes import ChildProcess

LINE_SECONDS = 30  # from one plain line to the next, where the output is no terminal


class PolicyToCome:
    """What an engine needs of a policy that is still being loaded: its devices, and later, by
    `policy`, its weights."""

    def __init__(self, devices: tuple[str, ...]):
        self.devices = devices
        self.policy: Policy | None = None

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        if self.policy is None:
            raise RuntimeError("the policy is not loaded yet")
        return self.policy.weights()


class Opening(Start):
    """Runs `open_sampler` in a thread, which gets this object as its `SamplerConfig.start`. `name`
    is the engine's, for the user."""

    def __init__(self, name: str, open_sampler: Callable[["Opening"], Sampler]):
        self.name = name
        self._allowed = threading.Event()  # The engines may take memory of their devices.
        self._idle = threading.Event()  # This process imports nothing else.
        self._is_closed = False
        self._processes: list[ChildProcess] = []
        self._sampler = start_in_background(lambda: open_sampler(self))

    def allow(self) -> None:
        """Let the engines take memory of their devices: others will take none until they are
        open."""
        self._allowed.set()

    def result(self, console: Console) -> Sampler:
        """Wait for the sampler and return it. Prints what is waited for on the console. Raises what
        `open_sampler` raised."""
        self.allow()
        self._idle.set()
        if self._finished_within(0):
            return self._sampler.result()
        began = time.monotonic()
        printed = 0  # Plain lines so far.
        with console.status(f"waiting for {self.name}") as status:
            while not self._finished_within(1.0):
                seconds = int(time.monotonic() - began)
                line = f"waiting for {self.name}: {seconds} s{self._stage()}"
                status.update(line)
                if not console.is_terminal and seconds // LINE_SECONDS > printed:
                    printed = seconds // LINE_SECONDS
                    console.print(line, markup=False, soft_wrap=True)
        return self._sampler.result()

    def close(self) -> None:
        """End the processes of engines that are not open yet. One that is open is its user's to
        close."""
        self._is_closed = True
        self._allowed.set()
        self._idle.set()
        if not self._sampler.done():
            for process in list(self._processes):
                process.kill()

    def wait_for_memory(self, process: ChildProcess) -> None:
        """See `Start.wait_for_memory`. Raises `RunStopped` where nobody wants the engine any
        more."""
        self._processes.append(process)
        self._allowed.wait()
        self._stop_if_closed()

    def wait_to_import(self) -> None:
        """See `Start.wait_to_import`."""
        self._idle.wait()
        self._stop_if_closed()

    def _stop_if_closed(self) -> None:
        if self._is_closed:
            raise RunStopped(f"{self.name} is not needed any more")

    def _finished_within(self, seconds: float) -> bool:
        try:
            self._sampler.exception(seconds)
        except TimeoutError:
            return False
        return True

    def _stage(self) -> str:
        """What the engine that began last is busy with, in parentheses; "" where it does not
        say."""
        if not self._processes:
            return ""
        stage = self._processes[-1].last_logged("stage: ")
        if not stage:
            return ""
        return f" ({stage})"
