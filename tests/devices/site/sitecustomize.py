"""Python runs this as it starts: the process, and those that it starts, see SIMULATED_GPUS GPUs
(`simulated_gpus`)."""

import os
import sys
from pathlib import Path

DEVICES = Path(__file__).resolve().parents[1]
# The last: the package is that of PYTHONPATH.
sys.path += [str(DEVICES), str(DEVICES.parents[1])]

if number := os.environ.get("SIMULATED_GPUS"):
    # The package says how threads wait, which it must before torch is loaded.
    import alignment  # noqa: F401

    # isort: split
    from simulated_gpus import simulated_gpus

    simulation = simulated_gpus(int(number))
    simulation.__enter__()  # until the process ends
