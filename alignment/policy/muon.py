"""Muon for the hidden matrices of a model, AdamW for all else."""

import torch

MOMENTUM = 0.95
# of the quintic whose five iterations bring singular values to between 0.7 and 1.2
COEFFICIENTS = (
    3.4445,
    -4.775,
    2.0315,
)


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the step of a hidden matrix is
    its Nesterov momentum with all singular values near 1, times 0.2 sqrt(max(rows, columns)), so
    that AdamW's learning rates fit (Liu et al. 2025, arXiv:2502.16982, section 2.2). Embeddings,
    output head and vectors take AdamW's step, as both recommend. A group's "hidden" says which of
    its parameters are hidden matrices. `torch.optim.Muon` multiplies in bfloat16, which many CPUs
    do slowly."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p, hidden in zip(group["params"], group["hidden"], strict=True):
                if not hidden or p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    # AdamW looks for a step when it loads
                    state |= {
                        "step": torch.zeros(()),
                        "momentum": torch.zeros_like(p),
                    }
                momentum = state["momentum"].lerp_(p.grad, 1 - MOMENTUM)
                direction = orthogonalised(p.grad.lerp(momentum, MOMENTUM))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction, alpha=-0.2 * max(p.shape) ** 0.5 * group["lr"])
                p.grad = None  # AdamW passes parameters without a gradient by
        super().step()


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T, roughly, of a matrix U S V^T, by Newton-Schulz iterations: X <- a X + (b X X^T + c (X
    X^T)^2) X."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
