"""TODO."""

from __future__ import annotations

import torch

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_weights(
    old_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, mask: torch.Tensor, correction: str, cap: float
) -> torch.Tensor:
    """Importance weights of the policy as the trainer computes it, to the one that the sampler drew from, [batch, sequence].

    w = pi_old / pi_sampler of each token, or of the whole response (the product over its tokens). "truncate" takes
    min(w, cap) (Ionides 2008; V-trace, Espeholt et al. 2018, arXiv:1802.01561, eq. 1), "mask" w where it is at most cap,
    else 0. Without gradient.
    """
    if correction == "none":
        return torch.ones_like(old_log_probs)
    log_weight_BT = torch.where(mask, old_log_probs - sampler_log_probs, 0).detach()
    level, _, how = correction.partition("_")
    if level == "sequence":
        log_weight_BT = log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)
    weight_BT = log_weight_BT.exp()
    return weight_BT.clamp(max=cap) if how == "truncate" else torch.where(weight_BT <= cap, weight_BT, 0)
