"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from alignment.core.importance_weights import sampler_weights
from alignment.core.kl import kl_penalty
from alignment.core.losses import Metadata, compute_policy_gradient_loss
from alignment.core.tokens import masked_mean, masked_normalize

# --- from per-token losses to one number ------------------------------------------------------------------------------

SUMS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sequence_mean": lambda loss_BT, mask_BT: masked_mean(loss_BT, mask_BT, dim=1).sum(),
    "token_mean": lambda loss_BT, mask_BT: masked_normalize(loss_BT, mask_BT),
    "constant": lambda loss_BT, mask_BT: masked_normalize(loss_BT, mask_BT),
}


def loss_denominator(loss_normalization: str, response_lengths: Sequence[int], max_new_tokens: int) -> float:
    """What the summed loss of one optimiser step is divided by, counted over the whole step.

    sequence_mean: the number of sequences, each weighing the same (GRPO, arXiv:2402.03300, eq. 3). token_mean: the
    number of response tokens, each weighing the same (DAPO, arXiv:2503.14476, eq. 8). constant: sequences times the
    most tokens one may have, so that length changes no token's weight (Dr. GRPO, arXiv:2503.20783, section 3.2).
    """
    return float(
        {
            "sequence_mean": len(response_lengths),
            "token_mean": sum(response_lengths),
            "constant": len(response_lengths) * max_new_tokens,
        }[loss_normalization]
    )


def grpo_microbatch_train_step(
    policy_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    cliprange: float | None = None,
    loss_normalization: str = "sequence_mean",
    denominator: float | None = None,
    *,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    reference_log_probs: torch.Tensor | None = None,
    sampler_correction: str = "none",
    correction_cap: float = 2.0,
    sampler_log_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metadata]:
    """Loss and backward of one micro-batch; gradients add up over the micro-batches of an optimiser step.

    The loss of a token is its policy-gradient loss, weighted by `sampler_weights`, plus `beta` times `kl_penalty`.

    `denominator` counts the whole optimiser step (`loss_denominator`), so that any cut into micro-batches gives the same
    gradient. Without it all `gradient_accumulation_steps` micro-batches are taken to be alike: sequence_mean divides by
    batch * steps, token_mean by this micro-batch's tokens * steps; "constant" has no such default (ValueError).

    Returns the scalar loss, detached, and sums over response tokens for the caller to add up, all on the device of the
    inputs (nothing here waits for it): "response_tokens", for losses with a ratio "ratio_sum", "ratio_max" and
    "clipped_tokens", with a reference "kl_sum", with a correction "weight_sum".
    """
    if denominator is None:
        counts = {"sequence_mean": response_mask.shape[0], "token_mean": response_mask.sum()}
        if loss_normalization not in counts:
            raise ValueError(f'loss_normalization "{loss_normalization}" needs a denominator')
        denominator = counts[loss_normalization] * gradient_accumulation_steps
    loss_BT, per_token = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange, response_mask, cliprange_high, dual_clip
    )
    if sampler_correction != "none":
        weight_BT = sampler_weights(old_log_probs, sampler_log_probs, response_mask, sampler_correction, correction_cap)
        loss_BT, per_token = loss_BT * weight_BT, {**per_token, "weight": weight_BT}
    if beta:
        kl_BT = kl_penalty(policy_log_probs, reference_log_probs, kl_estimator)
        loss_BT, per_token = loss_BT + beta * kl_BT, {**per_token, "kl": kl_BT.detach()}
    loss = SUMS[loss_normalization](loss_BT, response_mask) / denominator
    loss.backward()
    return loss.detach(), _token_sums(per_token, response_mask)


def _token_sums(per_token: Metadata, response_mask: torch.Tensor) -> Metadata:
    sums = {"response_tokens": response_mask.sum()}
    if "ratio" in per_token:
        ratio_BT = torch.where(response_mask, per_token["ratio"], 0)
        sums |= {
            "ratio_sum": ratio_BT.sum(),
            "ratio_max": ratio_BT.max(),
            "clipped_tokens": (per_token["clipped"] & response_mask).sum(),
        }
    for name in per_token.keys() & {"kl", "weight"}:
        sums[f"{name}_sum"] = masked_normalize(per_token[name], response_mask)
    return sums


def sft_microbatch_train_step(
    policy_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[torch.Tensor, Metadata]:
    """Negative log-likelihood of the response tokens and its backward.

    loss = sum over responses of -log pi / normalize_constant, averaged over the batch and over
    `gradient_accumulation_steps`. Returns the detached scalar loss and {"response_tokens"}.
    """
    per_sequence_B = -masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=-1)
    loss = per_sequence_B.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), _token_sums({}, response_mask)
