"""SAPO: a smooth gate in place of the clip, with a temperature for each sign of the advantage (Gao
et al. 2025, arXiv:2511.20347)."""

from dataclasses import dataclass

from alignment.core.flag import flag
from alignment.core.losses import Loss, LossInputs


@dataclass(frozen=True)
class Temperatures:
    positive: float = flag(1.0, above=0)
    """Temperature of the gate where the advantage is positive."""
    negative: float = flag(1.05, above=0)
    """Temperature where it is negative; higher: tokens count less, the further they have moved."""


def sapo(inputs: LossInputs):
    """-(4 / t) * sigmoid(t * (rho - 1)) * A, per token, where t is the sign's temperature: the
    gradient at rho = 1 is that of -rho * A."""
    advantages_B1, old_log_probs_BT = inputs.require("advantages", "old_log_probs")
    ratio_BT = (inputs.log_probs - old_log_probs_BT).exp()
    positive_B1 = advantages_B1 > 0
    temperature_B1 = advantages_B1.new_full((), inputs.settings.negative).where(
        ~positive_B1, inputs.settings.positive
    )
    gate_BT = (temperature_B1 * (ratio_BT - 1)).sigmoid() * 4 / temperature_B1
    return -gate_BT * advantages_B1, {}


entry = Loss(
    sapo,
    uses_ratio=True,
    at_ratio_one="reinforce_with_baseline",
    settings=Temperatures,
)
