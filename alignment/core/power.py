"""The standard deviation of a mean accuracy, and the smallest difference of two accuracies that a
test detects."""

import math
from statistics import NormalDist

POWER = 0.8  # Chance that a test detects the smallest detectable difference.


def score_std(seed_std: float, questions: float, accuracy: float = 0.5) -> float:
    """The standard deviation of a run's accuracy, which is measured with one answer to each of
    `questions` questions.

    `seed_std` is the standard deviation between seeds of the accuracy on unlimited questions. The
    answers add the variance of a Bernoulli mean.
    """
    sampling_variance = accuracy * (1 - accuracy) / questions
    return math.sqrt(seed_std**2 + sampling_variance)


def detectable_difference(std: float, alpha: float = 0.05) -> float:
    """The smallest difference that a two-sided test at level `alpha` detects with power POWER.

    The two scores are independent and normal, each with standard deviation `std`. The difference is
    (z(1 - alpha / 2) + z(POWER)) sqrt(2) std, where z is the normal quantile (Cohen 1988).
    """
    z = NormalDist().inv_cdf
    return (z(1 - alpha / 2) + z(POWER)) * math.sqrt(2) * std


def wilson_interval(p: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval (Wilson 1927) of the mean p of n independent scores of 0 or 1."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)
