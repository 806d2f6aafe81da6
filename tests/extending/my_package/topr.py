"""TOPR: REINFORCE whose negative examples count less the less likely they have become (Le Roux et
al. 2025, arXiv:2503.14286)."""

from alignment.core.losses import Loss, LossInputs


def topr(inputs: LossInputs):
    """-w * A * log pi, per token, where w is 1 for A >= 0, and the ratio pi / pi_old, at most 1,
    for A < 0."""
    advantages_B1, old_log_probs_BT = inputs.require("advantages", "old_log_probs")
    ratio_BT = (inputs.log_probs.detach() - old_log_probs_BT).exp()
    weight_BT = ratio_BT.clamp(max=1).where(advantages_B1 < 0, 1.0)
    loss_BT = -weight_BT * advantages_B1 * inputs.log_probs
    return loss_BT, {"ratio": ratio_BT, "clipped": (ratio_BT > 1) & (advantages_B1 < 0)}


entry = Loss(topr, uses_ratio=True, at_ratio_one="reinforce_with_baseline")
