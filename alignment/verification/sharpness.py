"""Is a distribution sharper or flatter than the plain model's, by the log-probs of drawn tokens?

A distribution that is proportional to a power of the plain one, as that of another temperature is,
gives a token the log-prob log p + (power - 1) d, where d = log p - sum of p log p over all tokens,
in the first order of power - 1. d is 0 on average, so that a shift of all log-probs changes no
estimate of the power, and rounding, which is another one at every token, changes it little."""

import math

import torch
from scipy.special import stdtrit

# Of the power of the distribution, by how much it may differ from 1: rounding of weights, if any.
MOST_SHARPER = 0.02
# The chance that rounding alone, whose effect on the responses is independent, reaches this.
CHANCE = 1e-7


def sure_change_of_power(off_BT: torch.Tensor, slopes_BT: torch.Tensor) -> float:
    """By how much the power of a distribution differs from 1 at least, but for a chance of
    `CHANCE`; 0 where nothing is certain. Log-probs are `off_BT` from the plain ones, whose
    derivatives by the power are `slopes_BT`; both are 0 where there is no token.

    The estimate is that of least squares. Its error is that of the estimates without one response
    each (the jackknife), times the quantile of Student's t."""
    products_B = (off_BT.double() * slopes_BT.double()).sum(1)
    squares_B = slopes_BT.double().square().sum(1)
    responses = len(squares_B)
    if responses < 2:
        return 0.0
    change = products_B.sum() / squares_B.sum()
    # Not by subtraction from the sums, which would leave a response's rounding.
    others_BB = 1 - torch.eye(responses, dtype=torch.float64)
    changes_B = (others_BB @ products_B) / (others_BB @ squares_B)
    variance = (changes_B - change).square().sum() * (responses - 1) / responses
    error = stdtrit(responses - 1, 1 - CHANCE / 2) * math.sqrt(variance)
    least = abs(change.item()) - error
    # No number where no token, or one response alone, has a choice.
    return max(least, 0.0) if math.isfinite(least) else 0.0
