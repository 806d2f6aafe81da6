"""torchao's 8-bit AdamW, made to look like any other optimiser. The one module that imports
torchao."""

from collections.abc import Sequence

import torch
import torchao.optim
from torchao.optim.subclass_8bit import OptimState8bit

from alignment.system.terminal import say_once


class AdamW8bit(torchao.optim.AdamW8bit):
    """AdamW whose moments are 8-bit codes with an fp32 scale for each block of 256 (Dettmers et al.
    2022, arXiv:2110.02861): 2.03 bytes a parameter instead of 8. Moments of fewer than 4096
    numbers, or of no whole blocks, stay in fp32. On GPUs the first step compiles a kernel for each
    shape of parameter; on CPUs, where that needs a C++ compiler, steps are slow."""

    def __init__(self, groups: list[dict], lr: float, **options):
        super().__init__(groups, lr=lr, **options)
        # torchao has made a tensor of the rate
        self.param_groups = [group | {"lr": lr} for group in self.param_groups]

    def step(self, closure: None = None) -> None:
        stance = "default"
        if _are_on_cpu(self.param_groups):
            stance = "force_eager"
        else:
            say_once(
                "adamw_8bit: the first step compiles a kernel for each shape of parameter, which"
                " may take minutes"
            )
        # Compiled code takes the rate as a tensor, since a new number would be compiled anew; all
        # else here takes numbers.
        groups = self.param_groups
        self.param_groups = [group | {"lr": torch.tensor(group["lr"])} for group in groups]
        with torch.compiler.set_stance(stance):
            super().step()
        self.param_groups = groups

    def state_dict(self) -> dict:
        """As torch's, of plain tensors, which safetensors can hold: "exp_avg" is "exp_avg.codes",
        ".scale" and ".qmap"."""
        saved = super().state_dict()
        state = {index: _split_moments(values) for index, values in saved["state"].items()}
        return saved | {"state": state}

    def load_state_dict(self, state_dict: dict) -> None:
        state = {index: _join_moments(values) for index, values in state_dict["state"].items()}
        super().load_state_dict(state_dict | {"state": state})


def _are_on_cpu(groups: Sequence[dict]) -> bool:
    """Whether all parameters of these groups are."""
    for group in groups:
        if any(parameter.device.type != "cpu" for parameter in group["params"]):
            return False
    return True


def _split_moments(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A parameter's state with each 8-bit moment as the plain tensors that it consists of."""
    plain = {}
    parts = {}
    for name, tensor in values.items():
        if not isinstance(tensor, OptimState8bit):
            plain[name] = tensor
            continue
        for part in tensor.tensor_attrs:
            parts[f"{name}.{part}"] = getattr(tensor, part)
    return plain | parts


def _join_moments(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `_split_moments`."""
    state = {}
    for name, tensor in values.items():
        moment, dot, _ = name.partition(".")
        if not dot:
            state[name] = tensor
        elif moment not in state:
            parts = {part: values[f"{moment}.{part}"] for part in OptimState8bit.tensor_attrs}
            # the second moment, a mean of squares, has no sign
            is_signed = moment == "exp_avg"
            state[moment] = OptimState8bit(**parts, signed=is_signed, dtype=torch.float32)
    return state
