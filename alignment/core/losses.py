"""Advantages and losses of the policy-gradient family. Tensors in, tensors out.

Axes: P prompts, G samples of a prompt (the group), B = P * G responses, T tokens. Notation: r rewards, A advantages,
pi the policy, pi_old the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import einx
import torch

from alignment.core.tokens import masked_mean

Metadata = dict[str, torch.Tensor]


# --- losses: each returns (per-token loss [batch, sequence], per-token metadata) --------------------------------------


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: torch.Tensor, policy_log_probs: torch.Tensor
) -> tuple[torch.Tensor, Metadata]:
    """-A * log pi(o_t | q, o_<t), REINFORCE (Williams 1992). Shapes [batch, 1] and [batch, sequence]."""
    return -einx.multiply("b 1, b t -> b t", raw_rewards_or_advantages, policy_log_probs), {}


def compute_grpo_clip_loss(
    advantages: torch.Tensor,
    policy_log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Metadata]:
    """-min(rho * A, clip(rho, 1 - c, 1 + c_high) * A) with rho = pi / pi_old, per token.

    PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with group advantages (arXiv:2402.03300, eq. 3).
    `cliprange_high` (None: `cliprange`) clips higher than lower (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 10). With
    `dual_clip` d > 1 the surrogate of a negative advantage is at least d * A (Ye et al. 2020, arXiv:1912.09729, eq. 5).
    Metadata: "ratio" float and "clipped" bool (a bound is what counts, so the gradient is zero).
    """
    return _clipped(advantages, torch.exp(policy_log_probs - old_log_probs), cliprange, cliprange_high, dual_clip)


def _clipped(
    advantages: torch.Tensor, ratio_BT: torch.Tensor, low: float, high: float | None, dual: float
) -> tuple[torch.Tensor, Metadata]:
    free_BT = einx.multiply("b 1, b t -> b t", advantages, ratio_BT)
    bounds = (1 - low, 1 + (low if high is None else high))
    bounded_BT = einx.multiply("b 1, b t -> b t", advantages, ratio_BT.clamp(*bounds))
    surrogate_BT, clipped_BT = torch.minimum(free_BT, bounded_BT), bounded_BT < free_BT
    if dual:
        floor_BT = torch.where(advantages < 0, dual * advantages, -torch.inf).expand_as(surrogate_BT)
        clipped_BT = clipped_BT | (floor_BT > surrogate_BT)
        surrogate_BT = torch.maximum(surrogate_BT, floor_BT)
    return -surrogate_BT, {"ratio": ratio_BT.detach(), "clipped": clipped_BT.detach()}


@dataclass(frozen=True)
class LossInputs:
    """What a loss may need: log-probs and mask [batch, sequence], rewards and advantages [batch, 1]; None where not given."""

    log_probs: torch.Tensor
    mask: torch.Tensor | None = None
    raw_rewards: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    cliprange: float | None = None
    cliprange_high: float | None = None
    dual_clip: float = 0.0

    def given(self, *names: str) -> list:
        """The inputs of these names. Raises ValueError for one that is lacking."""
        for name in names:
            if getattr(self, name) is None:
                raise ValueError(f"this loss needs {name}")
        return [getattr(self, name) for name in names]


def _no_baseline(inputs: LossInputs) -> tuple[torch.Tensor, Metadata]:
    """REINFORCE with the raw reward."""
    return compute_naive_policy_gradient_loss(*inputs.given("raw_rewards"), inputs.log_probs)


def _reinforce_with_baseline(inputs: LossInputs) -> tuple[torch.Tensor, Metadata]:
    """REINFORCE with the group's advantage."""
    return compute_naive_policy_gradient_loss(*inputs.given("advantages"), inputs.log_probs)


def _grpo_clip(inputs: LossInputs) -> tuple[torch.Tensor, Metadata]:
    """`compute_grpo_clip_loss`."""
    advantages, old_log_probs, cliprange = inputs.given("advantages", "old_log_probs", "cliprange")
    return compute_grpo_clip_loss(
        advantages, inputs.log_probs, old_log_probs, cliprange, inputs.cliprange_high, inputs.dual_clip
    )


def _grpo_no_clip(inputs: LossInputs) -> tuple[torch.Tensor, Metadata]:
    """-rho * A, per token: GRPO's surrogate (arXiv:2402.03300, eq. 3) without its clipping."""
    advantages, old_log_probs = inputs.given("advantages", "old_log_probs")
    ratio_BT = torch.exp(inputs.log_probs - old_log_probs)
    loss_BT = -einx.multiply("b 1, b t -> b t", advantages, ratio_BT)
    return loss_BT, {"ratio": ratio_BT.detach(), "clipped": torch.zeros_like(ratio_BT, dtype=torch.bool)}


def _gspo(inputs: LossInputs) -> tuple[torch.Tensor, Metadata]:
    """-min(s * A, clip(s, 1 - c, 1 + c_high) * A) with one s a response, s = exp(mean over its tokens of log pi / pi_old).

    GSPO, Zheng et al. 2025 (arXiv:2507.18071), eqs. 5 and 7, written to every token of the response, so that with
    sequence_mean each response counts once. Its clip ranges are orders of magnitude smaller than GRPO's (3e-4 there).
    """
    advantages, old_log_probs, cliprange, mask = inputs.given("advantages", "old_log_probs", "cliprange", "mask")
    mean_B = masked_mean(inputs.log_probs - old_log_probs, mask, dim=1)
    ratio_BT = mean_B.exp()[:, None].expand_as(inputs.log_probs)
    return _clipped(advantages, ratio_BT, cliprange, inputs.cliprange_high, inputs.dual_clip)


def _cispo(inputs: LossInputs) -> tuple[torch.Tensor, Metadata]:
    """-sg(clip(rho, 1 - c, 1 + c_high)) * A * log pi: the weight is clipped, so no token loses its gradient.

    CISPO, MiniMax 2025 (arXiv:2506.13585), eqs. 4 and 5, which bounds the ratio from above only (`cliprange` 1).
    """
    advantages, old_log_probs, cliprange = inputs.given("advantages", "old_log_probs", "cliprange")
    ratio_BT = torch.exp(inputs.log_probs.detach() - old_log_probs)
    high = cliprange if inputs.cliprange_high is None else inputs.cliprange_high
    weight_BT = ratio_BT.clamp(1 - cliprange, 1 + high)
    loss_BT = -einx.multiply("b 1, b t, b t -> b t", advantages, weight_BT, inputs.log_probs)
    return loss_BT, {"ratio": ratio_BT, "clipped": weight_BT != ratio_BT}


LOSSES: Mapping[str, Callable[[LossInputs], tuple[torch.Tensor, Metadata]]] = {
    "no_baseline": _no_baseline,
    "reinforce_with_baseline": _reinforce_with_baseline,
    "grpo_clip": _grpo_clip,
    "grpo_no_clip": _grpo_no_clip,
    "gspo": _gspo,
    "cispo": _cispo,
}

USES_OLD_POLICY = frozenset({"grpo_clip", "grpo_no_clip", "gspo", "cispo"})


def compute_policy_gradient_loss(
    policy_log_probs: torch.Tensor,
    loss_type: str,
    raw_rewards: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    cliprange: float | None = None,
    response_mask: torch.Tensor | None = None,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
) -> tuple[torch.Tensor, Metadata]:
    """The per-token loss named `loss_type` in `LOSSES`. Raises KeyError for an unknown name, ValueError for a lacking input."""
    inputs = LossInputs(
        policy_log_probs, response_mask, raw_rewards, advantages, old_log_probs, cliprange, cliprange_high, dual_clip
    )
    return LOSSES[loss_type](inputs)
