"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with its moments beside the weights, on the
CPU, or in 8 bits; and Muon.

Importing this module loads no torch, so that arguments and plans can read `OPTIMIZERS` at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AdamSettings:
    """Adam's numbers (Kingma & Ba 2015, arXiv:1412.6980, algorithm 1), of whichever optimiser has a
    part of it."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    @property
    def longest_step(self) -> float:
        """The longest step of a weight, in learning rates, without decay; infinite where none is
        known.

        The bias-corrected first moment is the sum of u_i g_i over the gradients g_i, the second of
        v_i g_i^2, with weights that sum to 1. By Cauchy and Schwarz's inequality the first over the
        root of the second is at most the root of the sum of u_i^2 / v_i. With the number of updates
        this grows to (1 - beta1)^2 / ((1 - beta2) (1 - beta1^2 / beta2)), if beta1^2 < beta2."""
        if self.beta1**2 >= self.beta2:
            return math.inf
        square = (1 - self.beta1) ** 2 / ((1 - self.beta2) * (1 - self.beta1**2 / self.beta2))
        return math.sqrt(square)


@dataclass(frozen=True)
class Optimizer:
    """One optimiser: its class, and the memory that a trained parameter takes."""

    path: str
    """package.module:name of the class, made from parameter groups, lr, betas and eps."""
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
