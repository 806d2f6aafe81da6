"""torchao's 8-bit AdamW, made to look like any other optimiser. The one module that imports
torchao."""

import torch
import torchao.optim
from torchao.optim.subclass_8bit import OptimState8bit

from alignment.system.terminal import say_once


class AdamW8bit(torchao.optim.AdamW8bit):
    """AdamW whose moments are 8-bit codes with an fp32 scale for each block of 256 (Dettmers et al.
    2022, arXiv:2110.02861): 2.03 bytes a parameter instead of 8. Moments of fewer than 4096
    numbers, or of no whole blocks, stay in fp32. On GPUs the first step compiles a kernel for each
    shape of parameter; on CPUs, where that needs a C++ compiler, steps are slow."""

    def __init__(self, groups: list[dict], lr: float, **how):
        super().__init__(groups, lr=lr, **how)
        self.param_groups = [group | {"lr": lr} for group in self.param_groups]

    def step(self, closure: None = None) -> None:
        groups = self.param_groups
        on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
        # Compiled code takes the rate as a tensor, since a new number would be compiled anew; all
        # else here takes numbers.
        self.param_groups = [group | {"lr": torch.tensor(group["lr"])} for group in groups]
        if not on_cpu:
            say_once(
                "adamw_8bit: the first step compiles a kernel for each shape of parameter, which"
                " may take minutes"
            )
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
            super().step()
        self.param_groups = groups

    def state_dict(self) -> dict:
        """As torch's, of plain tensors, which safetensors can hold: "exp_avg" is "exp_avg.codes",
        ".scale" and ".qmap"."""
        whole = super().state_dict()
        return {
            **whole,
            "state": {index: _opened(values) for index, values in whole["state"].items()},
        }

    def load_state_dict(self, state_dict: dict) -> None:
        state = {index: _closed(values) for index, values in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


def _opened(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    moments = {key: tensor for key, tensor in values.items() if isinstance(tensor, OptimState8bit)}
    parts = {
        f"{key}.{part}": getattr(codes, part)
        for key, codes in moments.items()
        for part in codes.tensor_attrs
    }
    return {key: tensor for key, tensor in values.items() if key not in moments} | parts


def _closed(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    plain = {name: tensor for name, tensor in values.items() if "." not in name}
    for key in {name.partition(".")[0] for name in values.keys() - plain.keys()}:
        parts = {part: values[f"{key}.{part}"] for part in OptimState8bit.tensor_attrs}
        plain[key] = OptimState8bit(**parts, signed=key == "exp_avg", dtype=torch.float32)
    return plain
