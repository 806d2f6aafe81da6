"""Estimates of the KL divergence between the policy and the reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: log_ratio.exp() - log_ratio - 1,
}


def kl_penalty(policy_log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of KL(pi, pi_ref) in nats at each sampled token, [batch, sequence], with l = log pi_ref - log pi:

    k1 = -l, k2 = l^2 / 2, k3 = exp(l) - l - 1 (Schulman 2020, "Approximating KL divergence"; k3 is GRPO's,
    arXiv:2402.03300, eq. 4). Averaged over samples of pi, k1 and k3 are the divergence. As terms of a loss they differ:
    the expected gradient of k1 is zero, that of k2 is the divergence's own (Tang & Munos 2025, arXiv:2506.09477).
    """
    return KL_ESTIMATORS[estimator](reference_log_probs - policy_log_probs)
