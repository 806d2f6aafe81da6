"""The meter of a run's peaks, on this process."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from alignment.planning.peak_meter import PeakMeter
from alignment.planning.peaks import DevicePeak

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")


@on_linux
def test_a_phase_has_its_own_peak_and_what_was_predicted():
    """300 MB that live and die within a phase are not the next one's."""
    peaks = [DevicePeak("cpu", None, {"update": {"weights": 7, "logits": 5, "engine": 100}})]
    meter = PeakMeter(SimpleNamespace(devices=("cpu",)), lambda tokens: peaks)
    meter.begin("update")
    held = bytearray(300_000_000)
    held[::4096] = b"1" * len(held[::4096])
    del held
    meter.begin("sync")
    taken = meter.take()["cpu"]
    assert taken["update"][1] == 12 and taken["sync"][1] is None
    assert taken["update"][0] > taken["sync"][0] + 200_000_000
    assert list(meter.take()["cpu"]) == ["sync"]  # the phase that goes on
    assert set(meter.run["cpu"]) == {"update", "sync"}


@on_linux
def test_a_rank_that_is_lost_is_left_out():
    """A process that has ended has no VmHWM, whether or not its exit code was read."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    ranks = SimpleNamespace(children=[SimpleNamespace(process=child)])
    meter = PeakMeter(SimpleNamespace(devices=("cpu", "cpu"), ranks=ranks), lambda tokens: [])
    meter.begin("update")
    child.wait()
    assert list(meter.take()) == ["rank 0, cpu"]


def test_a_gpus_allocator_is_compared_with_the_trainer_and_the_driver_with_the_device(monkeypatch):
    """Of 1,000 bytes an engine that sleeps has 90, and torch 310 in its pool, of which 300 were
    allocated at most. The prediction is that of the step's largest micro-batch; of the run's peaks
    each one keeps the prediction that it was compared with."""
    allocated, used = {"update": 300, "sync": 70}, {"update": 400, "sync": 600}
    now = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated[now[-1]])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - used[now[-1]], 1000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)

    def expected(tokens: int) -> list[DevicePeak]:
        update = {"weights": 50, "activations": tokens, "context": 20, "engine": 90}
        return [
            DevicePeak(
                "cuda:0",
                None,
                {"update": update, "sync": {"weights": 50, "context": 20, "engine": 500}},
            )
        ]

    def step(meter: PeakMeter, tokens: int):
        for phase in ("update", "sync"):
            meter.begin(phase)
            now.append(phase)
        return meter.take(tokens)

    now.append("update")
    meter = PeakMeter(SimpleNamespace(devices=("cuda:0",)), expected)
    assert step(meter, 260) == {
        "cuda:0": {"update": (300, 310), "sync": (70, 50)},
        "cuda:0, all processes": {"update": (400, 420), "sync": (600, 570)},
    }
    allocated["update"] = 200
    assert step(meter, 160)["cuda:0"]["update"] == (200, 210)
    assert meter.run["cuda:0"] == {"update": (300, 310), "sync": (70, 50)}
