"""The meter of a run's peaks, on this process."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from alignment.policy.memory import DevicePeak, PeakMeter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")


def test_a_phase_has_its_own_peak_and_what_was_predicted():
    """300 MB that live and die within a phase are not the next one's."""
    meter = PeakMeter(SimpleNamespace(devices=("cpu",)), [DevicePeak("cpu", None, {"update": {"weights": 7, "logits": 5}})])
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


def test_a_rank_that_is_lost_is_left_out():
    """A process that has ended has no VmHWM, whether or not its exit code was read."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    ranks = SimpleNamespace(children=[SimpleNamespace(process=child)])
    meter = PeakMeter(SimpleNamespace(devices=("cpu", "cpu"), ranks=ranks), [])
    meter.begin("update")
    child.wait()
    assert list(meter.take()) == ["rank 0, cpu"]
