"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with its moments beside the weights, on the
CPU, or in 8 bits; and Muon.

Importing this module loads no torch, so that arguments and plans can read `OPTIMIZERS` at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Optimizer:
    """One optimiser: its class, and the memory that a trained parameter takes."""

    path: str
    """package.module:name of the class, made from parameter groups, lr and betas."""
    device_bytes: int
    """Bytes a parameter on its device: weight and gradient in fp32, and the moments that are kept
    there."""
    host_bytes: int = 0
    """Bytes a parameter of the moments that stay on the CPU."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Further keyword arguments of the class."""


# --optimizer -> the optimiser
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer("torch.optim:AdamW", device_bytes=16, options={"fused": True}),
    "adamw_cpu_offload": Optimizer(
        "alignment.policy.adamw_cpu_offload:CPUOffloadAdamW", device_bytes=8, host_bytes=8
    ),
    # Two moments of a byte each; the fp32 scale of every 256 numbers is left out.
    "adamw_8bit": Optimizer("alignment.policy.adamw_8bit:AdamW8bit", device_bytes=10),
    # As AdamW's; hidden matrices, which have one moment, take 12.
    "muon": Optimizer("alignment.policy.muon:Muon", device_bytes=16, options={"fused": True}),
}
