"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with its moments beside the weights, on the
CPU, or in 8 bits; and Muon. Importing this module loads no torch, so that arguments and plans can
read `OPTIMIZERS` at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from alignment.system.files import read_toml


@dataclass(frozen=True)
class Optimizer:
    """One optimiser: its class, made from parameter groups, lr and betas, and the memory that a
    trained parameter takes."""

    path: str  # package.module:name of the class.
    # Bytes a parameter on its device: weight and gradient in fp32, and the moments that are kept
    # there.
    device_bytes: int
    host_bytes: int = 0  # Bytes a parameter of the moments that stay on the CPU.
    options: Mapping[str, object] = field(default_factory=dict)


ENTRIES = read_toml(Path(__file__).with_name("optimizers.toml"), "--optimizer")
# --optimizer -> the optimiser
OPTIMIZERS = {name: Optimizer(**entry) for name, entry in ENTRIES.items()}
