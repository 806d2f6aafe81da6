"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) with its moments beside the weights, on the CPU, or in 8 bits; and Muon.
Importing this module loads no torch, so that arguments and plans can read `OPTIMIZERS` at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Optimizer:
    """One optimiser: its class, made from parameter groups, lr and betas, and the memory that a trained parameter takes."""

    path: str  # package.module:name of the class.
    device_bytes: int  # Bytes a parameter on its device: weight and gradient in fp32, and the moments that are kept there.
    host_bytes: int = 0  # Bytes a parameter of the moments that stay on the CPU.
    options: Mapping[str, object] = field(default_factory=dict)
    package: str = ""  # The package that it needs, which is an extra of the same name.


OPTIMIZERS: Mapping[str, Optimizer] = {  # --optimizer -> the optimiser.
    "adamw": Optimizer("torch.optim:AdamW", device_bytes=16, options={"fused": True}),
    "adamw_cpu_offload": Optimizer("alignment.policy.adamw_cpu_offload:CPUOffloadAdamW", device_bytes=8, host_bytes=8),
    # Moments of a byte each, and an fp32 scale for every 256 of them, which is left out here.
    "adamw_8bit": Optimizer("alignment.policy.adamw_8bit:AdamW8bit", device_bytes=10, package="torchao"),
    # 12 for hidden matrices, which have one moment.
    "muon": Optimizer("alignment.policy.muon:Muon", device_bytes=16, options={"fused": True}),
}
