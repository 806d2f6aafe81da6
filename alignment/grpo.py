"""Advantages and losses of the policy-gradient family. Tensors in, tensors out.

Axes: P prompts, G samples of a prompt (the group), B = P * G responses, T tokens. Notation: r rewards, A advantages,
pi the policy, pi_old the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import einx
import torch

from alignment.records import Score
from alignment.tokens import masked_mean, masked_normalize

Metadata = dict[str, torch.Tensor]


# --- advantages ---------------------------------------------------------------------------------------------------


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Score],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Score every response and normalise within its group of `group_size` neighbours.

    Returns (advantages [batch, 1], raw_rewards [batch, 1], metadata). Raises ValueError as `normalize_group_rewards`.
    """
    scores = [reward_fn(r, g) for r, g in zip(rollout_responses, repeated_ground_truths, strict=True)]
    raw_rewards_B1 = torch.tensor([[score["reward"]] for score in scores], dtype=torch.float32)
    advantages_B1 = normalize_group_rewards(raw_rewards_B1, group_size, advantage_eps, normalize_by_std)
    return advantages_B1, raw_rewards_B1, group_statistics(raw_rewards_B1, group_size)


def normalize_group_rewards(
    raw_rewards_B1: torch.Tensor, group_size: int, advantage_eps: float, normalize_by_std: bool
) -> torch.Tensor:
    """A = r - mean(group), and with `normalize_by_std` A = (r - mean(group)) / (std(group) + eps), std unbiased.

    GRPO: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2. Without the division: Dr. GRPO, Liu et al. 2025
    (arXiv:2503.20783), section 3.2. Shapes [batch, 1] -> [batch, 1]. Raises ValueError where groups are not whole, and
    for groups of one, whose baseline is the reward itself and whose std is undefined.
    """
    if group_size < 2:
        raise ValueError(f"a group baseline needs at least 2 samples a prompt, not {group_size}")
    if raw_rewards_B1.shape[0] % group_size:
        raise ValueError(f"{raw_rewards_B1.shape[0]} rewards are not whole groups of {group_size}")
    rewards_PG = einx.id("(p g) 1 -> p g", raw_rewards_B1, g=group_size)
    centred_PG = einx.subtract("p g, p -> p g", rewards_PG, einx.mean("p [g]", rewards_PG))
    if normalize_by_std:
        std_P = rewards_PG.std(dim=1, correction=1)
        centred_PG = einx.divide("p g, p -> p g", centred_PG, std_P + advantage_eps)
    return einx.id("p g -> (p g) 1", centred_PG)


def group_statistics(raw_rewards_B1: torch.Tensor, group_size: int) -> dict[str, float]:
    """Mean, std, extremes of the rewards, and the share of groups whose rewards are all equal (they teach nothing)."""
    rewards_PG = einx.id("(p g) 1 -> p g", raw_rewards_B1, g=group_size)
    flat_P = (rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).float()
    return {
        "reward_mean": rewards_PG.mean().item(),
        "reward_std": rewards_PG.std(correction=0).item(),
        "reward_max": rewards_PG.max().item(),
        "reward_min": rewards_PG.min().item(),
        "flat_groups": flat_P.mean().item(),
    }


# --- losses: each returns (per-token loss [batch, sequence], per-token metadata) --------------------------------------


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: torch.Tensor, policy_log_probs: torch.Tensor
) -> tuple[torch.Tensor, Metadata]:
    """-A * log pi(o_t | q, o_<t), REINFORCE (Williams 1992). Shapes [batch, 1] and [batch, sequence]."""
    return -einx.multiply("b 1, b t -> b t", raw_rewards_or_advantages, policy_log_probs), {}


def compute_grpo_clip_loss(
    advantages: torch.Tensor, policy_log_probs: torch.Tensor, old_log_probs: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, Metadata]:
    """-min(rho * A, clip(rho, 1 - c, 1 + c) * A) with rho = pi / pi_old, per token.

    PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with group advantages (arXiv:2402.03300, eq. 3).
    Metadata: "ratio" float and "clipped" bool (the clipped branch is the smaller one, so the gradient is zero).
    """
    ratio_BT = torch.exp(policy_log_probs - old_log_probs)
    free_BT = einx.multiply("b 1, b t -> b t", advantages, ratio_BT)
    bounded_BT = einx.multiply("b 1, b t -> b t", advantages, ratio_BT.clamp(1 - cliprange, 1 + cliprange))
    metadata = {"ratio": ratio_BT.detach(), "clipped": (bounded_BT < free_BT).detach()}
    return -torch.minimum(free_BT, bounded_BT), metadata


LOSSES: Mapping[str, Callable[..., tuple[torch.Tensor, Metadata]]] = {
    "no_baseline": lambda log_probs, r, A, old, c: compute_naive_policy_gradient_loss(_given(r, "raw_rewards"), log_probs),
    "reinforce_with_baseline": lambda log_probs, r, A, old, c: compute_naive_policy_gradient_loss(
        _given(A, "advantages"), log_probs
    ),
    "grpo_clip": lambda log_probs, r, A, old, c: compute_grpo_clip_loss(
        _given(A, "advantages"), log_probs, _given(old, "old_log_probs"), _given(c, "cliprange")
    ),
}

USES_OLD_POLICY = frozenset({"grpo_clip"})


def _given(value, name: str):
    if value is None:
        raise ValueError(f"this loss needs {name}")
    return value


def compute_policy_gradient_loss(
    policy_log_probs: torch.Tensor,
    loss_type: str,
    raw_rewards: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[torch.Tensor, Metadata]:
    """The per-token loss named `loss_type` in `LOSSES`. Raises KeyError for an unknown name, ValueError for a lacking input."""
    return LOSSES[loss_type](policy_log_probs, raw_rewards, advantages, old_log_probs, cliprange)


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
) -> tuple[torch.Tensor, Metadata]:
    """Loss and backward of one micro-batch; gradients add up over the micro-batches of an optimiser step.

    `denominator` counts the whole optimiser step (`loss_denominator`), so that any cut into micro-batches gives the same
    gradient. Without it all `gradient_accumulation_steps` micro-batches are taken to be alike: sequence_mean divides by
    batch * steps, token_mean by this micro-batch's tokens * steps; "constant" has no such default (ValueError).

    Returns the scalar loss, detached, and sums over response tokens for the caller to add up, all on the device of the
    inputs (nothing here waits for it): "response_tokens", and for clipped losses "ratio_sum", "ratio_max",
    "clipped_tokens".
    """
    if denominator is None:
        counts = {"sequence_mean": response_mask.shape[0], "token_mean": response_mask.sum()}
        if loss_normalization not in counts:
            raise ValueError(f'loss_normalization "{loss_normalization}" needs a denominator')
        denominator = counts[loss_normalization] * gradient_accumulation_steps
    loss_BT, per_token = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
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
