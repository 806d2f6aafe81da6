"""AdamW with its moments and its step on the CPU."""

import torch
from torch.optim.adamw import adamw


class CPUOffloadAdamW(torch.optim.AdamW):
    """AdamW with moments and step on the CPU: a GPU holds 8 bytes a parameter, weight and gradient,
    not 16 (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840). Weight and gradient come to the CPU
    one parameter at a time, torch's fused AdamW steps there, and the weight goes back: 12 bytes a
    parameter over the bus; the host holds 8, the moments. Devices may be mixed. torchao's
    `CPUOffloadOptimizer` copies gradients in backward, before they are clipped or found finite, and
    needs a GPU."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self._step_of(p, group)

    def _step_of(self, p: torch.Tensor, group: dict) -> None:
        """Step one parameter, on the CPU, if it has a gradient."""
        if p.grad is None:
            return
        weight = p.cpu()
        gradient = p.grad.cpu()
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        beta1, beta2 = group["betas"]
        adamw(
            [weight],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],  # no maxima of moments, which are AMSGrad's
            [state["step"]],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            fused=True,
            amsgrad=False,
            maximize=False,
        )
        p.copy_(weight)

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, which would move the moments to where the parameters are."""
        super().load_state_dict({**state_dict, "state": {}})
        params = [p for group in self.param_groups for p in group["params"]]
        self.state.update(
            {params[index]: dict(values) for index, values in state_dict["state"].items()}
        )
