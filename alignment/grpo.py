"""Advantages and losses of the policy-gradient family. Tensors in, tensors out.

Axes: P prompts, G samples of a prompt (the group), B = P * G responses, T tokens. Notation: r rewards, A advantages,
pi the policy, pi_old the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    raw_rewards_B1: torch.Tensor,
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
    baseline: str = "group_mean",
    std_of: str = "group",
    counted_B1: torch.Tensor | None = None,
) -> torch.Tensor:
    """A = r - b, and with `normalize_by_std` A = (r - b) / (std + eps). Shapes [batch, 1] -> [batch, 1].

    `baseline`: "group_mean" (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without the division Dr. GRPO, Liu et
    al. 2025, arXiv:2503.20783, section 3.2) or "leave_one_out", the mean of the group's other rewards (RLOO, Kool et al.
    2019; Ahmadian et al. 2024, arXiv:2402.14740, eq. 8). `std_of`: "group" (unbiased), "group_population" (divided by the
    group's size), or "batch", the unbiased deviation of all rewards (Liu et al. 2025, arXiv:2508.08221).

    Responses that `counted_B1` (bool) leaves out are in no mean or deviation, and get 0; so does one that is alone in its
    group. Raises ValueError where groups are not whole, and for groups of one, whose baseline is the reward itself.
    """
    if group_size < 2:
        raise ValueError(f"a group baseline needs at least 2 samples a prompt, not {group_size}")
    if raw_rewards_B1.shape[0] % group_size:
        raise ValueError(f"{raw_rewards_B1.shape[0]} rewards are not whole groups of {group_size}")
    counted_B1 = torch.ones_like(raw_rewards_B1, dtype=torch.bool) if counted_B1 is None else counted_B1
    # In float64 equal float32 rewards have exactly their own value for a mean, and so advantages of exactly 0.
    rewards_B1 = raw_rewards_B1.double()
    rewards_PG, counted_PG = (einx.id("(p g) 1 -> p g", t, g=group_size) for t in (rewards_B1, counted_B1))
    number_P1 = counted_PG.sum(dim=1, keepdim=True)
    mean_P1 = torch.where(counted_PG, rewards_PG, 0).sum(dim=1, keepdim=True) / number_P1.clamp(min=1)
    centred_PG = torch.where(counted_PG, rewards_PG - mean_P1, 0)
    # r - (n * mean - r) / (n - 1) = (r - mean) * n / (n - 1)
    advantages_PG = {"group_mean": centred_PG, "leave_one_out": centred_PG * number_P1 / (number_P1 - 1).clamp(min=1)}[baseline]
    if normalize_by_std:
        squares_P1 = centred_PG.square().sum(dim=1, keepdim=True)
        std = {
            "group": lambda: (squares_P1 / (number_P1 - 1).clamp(min=1)).sqrt(),
            "group_population": lambda: (squares_P1 / number_P1.clamp(min=1)).sqrt(),
            "batch": lambda: rewards_B1[counted_B1].std(correction=1).nan_to_num(),
        }[std_of]()
        advantages_PG = advantages_PG / (std + advantage_eps)
    return einx.id("p g -> (p g) 1", advantages_PG).to(raw_rewards_B1.dtype)


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


# --- what is added to a loss, or weighs it ----------------------------------------------------------------------------

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


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """What a response is fined for its length: 0 outside the last `buffer` tokens, in them linearly down to -1.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13); a buffer of 0 fines nothing.
    """
    return -max(0, length - (max_new_tokens - buffer)) / buffer if buffer else 0.0


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
