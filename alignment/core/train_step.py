"""The loss of one micro-batch: the policy-gradient loss, weighted, plus the KL penalty, summed over tokens."""

import torch

from alignment.core.losses import LOSSES, NORMALIZATIONS, LossConfig, LossInputs, kl_penalty, masked_normalize, sampler_weights

Sums = dict[str, torch.Tensor]


def micro_batch_loss(inputs: LossInputs, denominator: float | torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """The scalar loss of one micro-batch, with its graph, and sums over its response tokens.

    The loss of a token is its policy-gradient loss, weighted by `sampler_weights`, plus `beta` times `kl_penalty`.
    `denominator` counts the whole optimiser step (`loss_denominator`), so that any cut into micro-batches gives the same
    gradient. The sums are on the device of the inputs, and nothing here waits for it: "response_tokens", for losses with a
    ratio "ratio_sum", "ratio_max" and "clipped_tokens", with a reference "kl_sum", with a correction "weight_sum"."""
    config = inputs.config
    loss_BT, per_token = config.loss.function(inputs)
    if config.sampler_correction != "none":
        weight_BT = sampler_weights(
            inputs.old_log_probs, inputs.sampler_log_probs, inputs.mask, config.sampler_correction, config.correction_cap
        )
        loss_BT, per_token = loss_BT * weight_BT, {**per_token, "weight": weight_BT}
    if config.beta:
        kl_BT = kl_penalty(inputs.log_probs, inputs.reference_log_probs, config.kl_estimator)
        loss_BT, per_token = loss_BT + config.beta * kl_BT, {**per_token, "kl": kl_BT.detach()}
    total = NORMALIZATIONS[config.loss_normalization].total(loss_BT, inputs.mask)
    return total / denominator, _token_sums(per_token, inputs.mask)


def _token_sums(per_token: dict[str, torch.Tensor], response_mask: torch.Tensor) -> Sums:
    sums = {"response_tokens": response_mask.sum()}
    if "ratio" in per_token:
        ratio_BT = per_token["ratio"].where(response_mask, 0)
        sums |= {"ratio_sum": ratio_BT.sum(), "ratio_max": ratio_BT.max()}
        sums["clipped_tokens"] = (per_token["clipped"] & response_mask).sum()
    for name in per_token.keys() & {"kl", "weight"}:
        sums[f"{name}_sum"] = masked_normalize(per_token[name], response_mask)
    return sums


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
    reference_log_probs: torch.Tensor | None = None,
    sampler_log_probs: torch.Tensor | None = None,
    **numbers,
) -> tuple[torch.Tensor, Sums]:
    """Loss and backward of one micro-batch (`micro_batch_loss`); gradients add up over the micro-batches of an optimiser step.

    Without `denominator` all `gradient_accumulation_steps` micro-batches are taken to be alike: sequence_mean divides by
    batch * steps, token_mean by this micro-batch's tokens * steps; "constant" has no such default (ValueError). `numbers` are
    further fields of `LossConfig`: cliprange_high, dual_clip, beta, kl_estimator, sampler_correction, correction_cap.

    Returns the scalar loss, detached, and sums over response tokens."""
    if denominator is None:
        counts = {"sequence_mean": response_mask.shape[0], "token_mean": response_mask.sum()}
        if loss_normalization not in counts:
            raise ValueError(f'loss_normalization "{loss_normalization}" needs a denominator')
        denominator = counts[loss_normalization] * gradient_accumulation_steps
    config = LossConfig(LOSSES[loss_type], cliprange, loss_normalization=loss_normalization, **numbers)
    rows = (raw_rewards, advantages, old_log_probs, reference_log_probs, sampler_log_probs)
    loss, sums = micro_batch_loss(LossInputs(config, policy_log_probs, response_mask, *rows), denominator)
    loss.backward()
    return loss.detach(), sums


def sft_microbatch_train_step(
    policy_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[torch.Tensor, Sums]:
    """Negative log-likelihood of the response tokens and its backward.

    loss = sum over responses of -log pi / normalize_constant, averaged over the batch and over
    `gradient_accumulation_steps`. Returns the detached scalar loss and {"response_tokens"}."""
    per_sequence_B = -masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=-1)
    loss = per_sequence_B.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), _token_sums({}, response_mask)
