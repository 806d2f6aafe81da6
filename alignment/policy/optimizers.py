"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with its moments beside the weights, on the CPU, or in 8 bits. Importing
this module loads no torch, so that arguments and plans can read `OPTIMIZERS` at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alignment.system.registry import import_object

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Optimizer:
    """One optimiser: its class, made from parameter groups, lr and betas, and the memory that a trained parameter takes."""

    path: str  # package.module:name of the class.
    device_bytes: int  # Bytes a parameter on its device: weight and gradient in fp32, and the moments that are kept there.
    host_bytes: int = 0  # Bytes a parameter of the moments that stay on the CPU.
    options: Mapping[str, object] = field(default_factory=dict)
    package: str = ""  # The package that it needs, which is an extra of the same name.

    @property
    def moment_bytes(self) -> int:
        """Bytes a parameter of the moments, wherever they are."""
        return self.device_bytes - 8 + self.host_bytes


OPTIMIZERS: Mapping[str, Optimizer] = {  # --optimizer -> the optimiser.
    "adamw": Optimizer("torch.optim:AdamW", device_bytes=16, options={"fused": True}),
    "adamw_cpu_offload": Optimizer("alignment.policy.adamw_cpu_offload:CPUOffloadAdamW", device_bytes=8, host_bytes=8),
    # Moments of a byte each, and an fp32 scale for every 256 of them, which is left out here.
    "adamw_8bit": Optimizer("alignment.policy.adamw_8bit:AdamW8bit", device_bytes=10, package="torchao"),
}


def make_optimizer(model: torch.nn.Module, lr: float, weight_decay: float, kind: str = "adamw") -> torch.optim.Optimizer:
    """The optimiser of that kind, of what needs a gradient, with betas 0.9 and 0.95; only matrices decay."""
    entry = OPTIMIZERS[kind]
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return import_object("--optimizer", entry.path)(groups, lr=lr, betas=(0.9, 0.95), **entry.options)
