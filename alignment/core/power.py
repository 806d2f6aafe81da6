"""How much a mean accuracy varies, and the smallest difference of two that can be shown: pure
numbers."""

import math
from statistics import NormalDist

CHANCE = 0.8  # with which a smallest difference would be found


def score_std(seed_std: float, questions: float, accuracy: float = 0.5) -> float:
    """The standard deviation of a run's accuracy on a number of questions.

    `seed_std` is the deviation between runs of different seeds, were every question asked for ever.
    """
    sampling_variance = accuracy * (1 - accuracy) / questions
    return math.sqrt(seed_std**2 + sampling_variance)


def detectable_difference(std: float, alpha: float = 0.05) -> float:
    """The smallest difference that a two-sided test at `alpha` finds with a chance of CHANCE.

    The two scores are independent and normal with standard deviation `std`: the difference is
    (z(1 - alpha / 2) + z(CHANCE)) sqrt(2) std (Cohen 1988).
    """
    z = NormalDist().inv_cdf
    return (z(1 - alpha / 2) + z(CHANCE)) * math.sqrt(2) * std
