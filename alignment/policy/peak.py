"""The most memory that a run has held in each phase of its steps, beside what was predicted."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from alignment.policy.memory import DevicePeak
from alignment.policy.policy import Policy
from alignment.system.processes import trim_heap

Peaks = dict[str, dict[str, list[int | None]]]  # place -> phase -> measured and predicted bytes


class PeakMeter:
    """Measures from a phase's beginning to that of the next: on a CPU the bytes of each of the policy's processes that were
    resident (VmHWM, on Linux), on a GPU those that torch had allocated in this process."""

    def __init__(self, policy: Policy, expected: Sequence[DevicePeak]):
        ranks = getattr(policy, "ranks", None)
        pids = [os.getpid(), *(child.process.pid for child in ranks.children)] if ranks else [os.getpid()]
        names = [f"rank {rank}, {device}" if ranks else device for rank, device in enumerate(policy.devices)]
        self.pids = dict(zip(names, pids)) if policy.devices[0] == "cpu" else {}
        own = zip(names, policy.devices[:1] if ranks else policy.devices)
        self.devices = {name: device for name, device in own if device != "cpu"}
        self.expected = {peak.name: {phase: sum(kinds.values()) for phase, kinds in peak.phases.items()} for peak in expected}
        self.phase, self.run, self.step = "", Peaks(), Peaks()  # of the whole run, and since `take`
        self.begin("")

    def begin(self, phase: str) -> None:
        """End the phase before, and start one."""
        for name, pid in self.pids.items():
            with suppress(OSError, ValueError):  # the process is lost, or the system is another
                (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
                self._note(name, 1024 * int(line.split()[1]))
                trim_heap()
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins anew at what is resident now
        for name, device in self.devices.items():
            self._note(name, torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
        self.phase = phase

    def _note(self, name: str, measured: int) -> None:
        for peaks in (self.run, self.step) if self.phase else ():
            before, _ = peaks.setdefault(name, {}).get(self.phase, (0, None))
            peaks[name][self.phase] = [max(before, measured), self.expected.get(name, {}).get(self.phase)]

    def take(self) -> Peaks:
        """What was measured since the last call."""
        self.begin(self.phase)
        taken, self.step = self.step, Peaks()
        return taken
