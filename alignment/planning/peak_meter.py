"""The most bytes that each device holds in each phase of a training step, as measured."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from alignment.planning.peaks import DevicePeak
from alignment.policy.policy import Policy
from alignment.system.processes import trim_heap

WHOLE = ", all processes"
"""Follows a GPU's name where all that is in use there counts, whoever holds it."""


class PhasePeak(NamedTuple):
    """Bytes of a phase at most."""

    measured: int
    predicted: int | None  # None: nothing was predicted.


Peaks = dict[str, dict[str, PhasePeak]]
"""Place -> phase -> its peak."""


class PeakMeter:
    """Measures from a phase's beginning to that of the next. On a CPU: what each of the policy's
    processes had resident at most (VmHWM, on Linux). On a GPU: what torch's allocator had handed
    out at most in this process; and, by the driver, what all processes hold of the device when the
    phase ends, which is near its peak, since torch and engines give back little between.

    `expected(tokens)` predicts peaks for micro-batches of so many tokens (0: as many as may be)."""

    def __init__(self, policy: Policy, expected: Callable[[int], Sequence[DevicePeak]]):
        ranks = getattr(policy, "ranks", None)
        devices = list(policy.devices)
        pids = [os.getpid()]
        names = devices
        own_devices = devices
        if ranks:
            pids += [child.process.pid for child in ranks.children]
            names = [f"rank {rank}, {device}" for rank, device in enumerate(devices)]
            own_devices = devices[:1]  # other ranks' allocators are in other processes
        self.pids = {}
        if devices[0] == "cpu":
            self.pids = dict(zip(names, pids, strict=False))
        named = zip(names, own_devices, strict=False)
        self.devices = {name: device for name, device in named if device != "cpu"}
        self.expected = expected
        self.run: Peaks = {}
        self._step: dict[str, dict[str, int]] = {}  # Place -> phase -> measured bytes since `take`.
        self.phase = ""
        self.begin("")

    def begin(self, phase: str) -> None:
        """End the phase before, and start one. Bytes of the phase "" are nobody's."""
        for name, pid in self.pids.items():
            with suppress(OSError, ValueError):  # the process is lost, or the system is another
                status = Path(f"/proc/{pid}/status").read_text().splitlines()
                # The most that the process had resident, in KiB: "VmHWM:    12345 kB".
                [line] = [line for line in status if line.startswith("VmHWM")]
                self._note(name, 1024 * int(line.split()[1]))
                trim_heap()
                # begins anew at what is resident now
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        for name, device in self.devices.items():
            self._note(name, torch.cuda.max_memory_allocated(device))
            free, total = torch.cuda.mem_get_info(device)
            self._note(name + WHOLE, total - free)
            torch.cuda.reset_peak_memory_stats(device)
        self.phase = phase

    def _note(self, name: str, measured: int) -> None:
        if self.phase:
            phases = self._step.setdefault(name, {})
            phases[self.phase] = max(measured, phases.get(self.phase, 0))

    def take(self, tokens: int = 0) -> Peaks:
        """Measured and predicted bytes since the last call, in which the largest micro-batch had so
        many tokens; 0: unknown."""
        self.begin(self.phase)
        taken = {name: dict(phases) for name, phases in self._step.items()}
        self._step = {}
        predictions: dict[str, Callable[[str], int | None]] = {}
        for peak in self.expected(tokens):
            predictions[peak.name] = peak.of_trainer
            predictions[peak.name + WHOLE] = peak.of_device
        peaks: Peaks = {}
        for name, phases in taken.items():
            for phase, size in phases.items():
                predicted = predictions[name](phase) if name in predictions else None
                peak = PhasePeak(size, predicted)
                peaks.setdefault(name, {})[phase] = peak
                largest = self.run.setdefault(name, {})
                if size > largest.get(phase, PhasePeak(0, None)).measured:
                    largest[phase] = peak
        return peaks
