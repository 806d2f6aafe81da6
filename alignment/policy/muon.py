"""Muon for the hidden matrices of a model, AdamW for all else."""

import torch

MOMENTUM = 0.95
# of the quintic whose five iterations bring singular values to between 0.7 and 1.2
COEFFICIENTS = (
    3.4445,
    -4.775,
    2.0315,
)
ITERATIONS = 5
# The root mean square of AdamW's usual steps, in units of the learning rate.
RMS_OF_STEPS = 0.2


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the step of a hidden matrix is
    its Nesterov momentum with all singular values near 1, times 0.2 sqrt(max(rows, columns)), so
    that AdamW's learning rates fit (Liu et al. 2025, arXiv:2502.16982, section 2.2). Embeddings,
    output head and vectors take AdamW's step, as both recommend, and so does a stack of experts. A
    group's "hidden" says which of its parameters are hidden matrices. `torch.optim.Muon` multiplies
    in bfloat16, which many CPUs do slowly."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter, is_hidden in zip(group["params"], group["hidden"], strict=True):
                if is_hidden and parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group)
                    # AdamW, below, passes parameters without a gradient by
                    parameter.grad = None
        super().step()

    def _step_matrix(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict) -> None:
        """Change a hidden matrix [rows, columns] and its momentum in place."""
        state = self.state[weight]
        if not state:
            # AdamW looks for a step when it loads
            state["step"] = torch.zeros(())
            state["momentum"] = torch.zeros_like(weight)
        # M <- mu M + (1 - mu) G, and Nesterov's look ahead: mu M + (1 - mu) G once more
        momentum = state["momentum"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = orthogonalize(gradient.lerp(momentum, MOMENTUM))
        # No step without a gradient, as where no row of a batch has one: the momentum that is left
        # would make one as long as any, again and again. The factor is 1 or 0.
        norm = gradient.norm()
        direction.mul_(norm / norm.clamp(min=torch.finfo(norm.dtype).tiny))
        # W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) direction
        scale = RMS_OF_STEPS * max(weight.shape) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-scale * group["lr"])


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T, roughly, of a matrix U S V^T [rows, columns], by Newton-Schulz iterations
    X <- a X + (b X X^T + c (X X^T)^2) X."""
    a, b, c = COEFFICIENTS
    # X X^T is smallest where X has fewer rows than columns
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix
    if is_tall:
        wide = matrix.T
    # Iterations converge for singular values of at most 1: none exceeds the Frobenius norm.
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    if is_tall:
        return x.T
    return x
