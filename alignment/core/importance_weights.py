"""Importance weights that correct for a sampler whose probabilities differ from the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Correction:
    """One way to weigh tokens: the level at which the ratio is taken, and what bounds it."""

    level: Literal["token", "sequence"]
    bound: Callable[[torch.Tensor, float], torch.Tensor]


def _truncate(weight_BT: torch.Tensor, cap: float) -> torch.Tensor:
    return weight_BT.clamp(max=cap)


def _mask(weight_BT: torch.Tensor, cap: float) -> torch.Tensor:
    return weight_BT.where(weight_BT <= cap, 0)


CORRECTIONS: Mapping[str, Correction | None] = {
    "none": None,
    "token_truncate": Correction("token", _truncate),
    "token_mask": Correction("token", _mask),
    "sequence_truncate": Correction("sequence", _truncate),
    "sequence_mask": Correction("sequence", _mask),
}


def sampler_weights(
    old_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, mask: torch.Tensor, correction: str, cap: float
) -> torch.Tensor:
    """Importance weights of the policy as the trainer computes it, to the one that the sampler drew from, [batch, sequence].

    w = pi_old / pi_sampler of each token, or of the whole response (the product over its tokens). "truncate" takes
    min(w, cap) (Ionides 2008; V-trace, Espeholt et al. 2018, arXiv:1802.01561, eq. 1), "mask" w where it is at most cap,
    else 0. Without gradient.
    """
    if (entry := CORRECTIONS[correction]) is None:
        return old_log_probs.new_ones(old_log_probs.shape)
    log_weight_BT = (old_log_probs - sampler_log_probs).where(mask, 0).detach()
    if entry.level == "sequence":
        log_weight_BT = log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)
    return entry.bound(log_weight_BT.exp(), cap)
