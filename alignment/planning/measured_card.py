"""What one H200 did, and the coefficients that follow: h200.toml, from which both `alignment.plan`
and `benchmarks.gpu_cost` have a GPU's seconds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.system.files import read_toml

MEASURED: Mapping[str, Any] = read_toml(Path(__file__).with_name("h200.toml"), "h200.toml")
"""The tables of h200.toml."""
