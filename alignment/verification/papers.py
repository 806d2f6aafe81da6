"""Advantages, losses and gradients as the papers write them: one response and one token at a time,
in Python's own numbers, without any of the code that trains. A `setting` maps the name of a flag to
its value. Log-probs of responses are lists [B][t], without padding.

Gradients come from complex steps: for a tiny h, the derivative of a real function f at x is
Im f(x + ih) / h, exact to rounding (Squire & Trapp 1998, "Using complex variables to estimate
derivatives of real functions"). So log-probs are complex numbers here. The imaginary part carries
the derivative; where a paper stops the gradient, the code takes the real part."""

import cmath
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alignment.verification.paper_advantages import paper_advantages

STEP = 1e-30  # the h above, in nats
LogProbs = Sequence[Sequence[complex]]  # [B][t]
real = operator.attrgetter("real")


class Token(NamedTuple):
    """The log-prob of one token under each policy."""

    policy: complex
    old: complex
    reference: complex
    sampler: complex


class Response(NamedTuple):
    """What the loss of a token needs of its whole response: the reward, the advantage, the length
    in tokens, and the log-prob of the response under three policies."""

    reward: float
    advantage: float
    length: int
    policy: complex
    old: complex
    sampler: complex


def paper_values(
    setting: Mapping,
    rewards: Sequence[float],
    policy: LogProbs,
    old: LogProbs,
    reference: LogProbs,
    sampler: LogProbs,
) -> list[float]:
    """The advantage of each response, then the loss of one optimiser step on all responses, then
    the derivatives of this loss by the policy's log-probs, one response after another. The last
    four arguments are log-probs under the policy, the old policy, the reference and the sampler."""
    advantages = paper_advantages(setting, rewards, [len(row) for row in policy])

    def loss_of(log_probs: LogProbs) -> complex:
        every_policy = PaperLogProbs(log_probs, old, reference, sampler)
        return paper_loss(setting, rewards, advantages, every_policy)

    def derivative(index: int, position: int) -> float:
        moved = [list(row) for row in policy]
        moved[index][position] += 1j * STEP
        return loss_of(moved).imag / STEP

    gradient = []
    for index, row in enumerate(policy):
        gradient += [derivative(index, position) for position in range(len(row))]
    return [*advantages, loss_of(policy).real, *gradient]


class PaperLogProbs(NamedTuple):
    """The log-probs of each response's tokens under each of the policies."""

    policy: LogProbs
    old: LogProbs
    reference: LogProbs
    sampler: LogProbs


def paper_loss(
    setting: Mapping,
    rewards: Sequence[float],
    advantages: Sequence[float],
    log_probs: PaperLogProbs,
) -> complex:
    """The loss of one optimiser step."""
    policy, old, reference, sampler = log_probs
    lengths = [len(row) for row in policy]
    total: complex = 0.0
    for index, length in enumerate(lengths):
        response = Response(
            rewards[index],
            advantages[index],
            length,
            sum(policy[index]),
            sum(old[index]),
            sum(sampler[index]),
        )
        denominator = paper_denominator(setting, length, lengths)
        rows = (policy[index], old[index], reference[index], sampler[index])
        for of_token in zip(*rows, strict=True):
            token = Token(*of_token)
            loss = paper_token_loss(setting, response, token)
            weight = paper_weight(setting, response, token)
            penalty = paper_kl(setting, token)
            total += (weight * loss + setting["beta"] * penalty) / denominator
    return total


def paper_token_loss(setting: Mapping, response: Response, token: Token) -> complex:
    """The policy-gradient loss of one token."""
    advantage = response.advantage
    ratio = cmath.exp(token.policy - token.old)
    response_ratio = cmath.exp((response.policy - response.old) / response.length)
    constant_ratio = cmath.exp(token.policy.real - token.old)  # CISPO stops its gradient
    losses = {
        # REINFORCE: Williams 1992, section 4
        "no_baseline": -response.reward * token.policy,
        # Williams 1992, section 4
        "reinforce_with_baseline": -advantage * token.policy,
        # arXiv:2402.03300, eq. 3
        "grpo_clip": -paper_surrogate(setting, ratio, advantage),
        # arXiv:2402.03300, eq. 3, without the clip
        "grpo_no_clip": -ratio * advantage,
        # arXiv:2507.18071, eqs. 5 and 7
        "gspo": -paper_surrogate(setting, response_ratio, advantage),
        # arXiv:2506.13585, eqs. 4 and 5
        "cispo": -paper_clip(setting, constant_ratio).real * advantage * token.policy,
    }
    return losses[setting["loss"]]


def paper_clip(setting: Mapping, ratio: complex) -> complex:
    """The ratio, clipped to [1 - cliprange, 1 + cliprange]. If `cliprange_high` is set, the upper
    bound is 1 + cliprange_high instead, as in DAPO (arXiv:2503.14476, eq. 10)."""
    upper_range = setting["cliprange_high"]
    if upper_range is None:
        upper_range = setting["cliprange"]
    # The middle one of a number and two bounds is the clipped number.
    _, clipped, _ = sorted((1 - setting["cliprange"], ratio, 1 + upper_range), key=real)
    return clipped


def paper_surrogate(setting: Mapping, ratio: complex, advantage: float) -> complex:
    """PPO's clipped objective (arXiv:1707.06347, eq. 7). If `dual_clip` is not 0 and the advantage
    is negative, it is at least `dual_clip` * advantage (arXiv:1912.09729, eq. 5)."""
    objective = min(ratio * advantage, paper_clip(setting, ratio) * advantage, key=real)
    if setting["dual_clip"] and advantage < 0:
        return max(objective, setting["dual_clip"] * advantage, key=real)
    return objective


def paper_weight(setting: Mapping, response: Response, token: Token) -> float:
    """The importance weight that corrects for the sampler: the probability of the token, or of its
    whole response, under the old policy over that under the sampler, or the geometric mean of its
    tokens' weights (as in GSPO, arXiv:2507.18071, eq. 7). A weight beyond the cap or the floor
    becomes that bound (V-trace, arXiv:1802.01561, eq. 1, has the cap), or 0, which leaves the token
    out (IcePop, arXiv:2510.18855)."""
    # "none", or a level and what is done beyond the bounds, such as "token_truncate".
    level, _, bound = setting["sampler_correction"].partition("_")
    log_ratios = {
        "none": 0.0,
        "token": token.old - token.sampler,
        "sequence": response.old - response.sampler,
        "geometric": (response.old - response.sampler) / response.length,
    }
    weight = cmath.exp(log_ratios[level]).real
    if level == "none":
        return weight
    floor = setting["correction_floor"]
    cap = setting["correction_cap"]
    if floor <= weight <= cap:
        return weight
    if bound == "mask":
        return 0.0
    return cap if weight > cap else floor


def paper_kl(setting: Mapping, token: Token) -> complex:
    """An estimate, at one token, of the KL divergence of the policy from the reference (Schulman
    2020, "Approximating KL divergence"; k3 also arXiv:2402.03300, eq. 4)."""
    log_ratio = token.reference - token.policy
    estimates = {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": cmath.exp(log_ratio) - log_ratio - 1,
    }
    return estimates[setting["kl_estimator"]]


def paper_denominator(setting: Mapping, length: int, lengths: Sequence[int]) -> int:
    """The divisor of a token's loss. Its response has `length` tokens; `lengths` are those of all
    responses of the step."""
    denominators = {
        # arXiv:2402.03300, eq. 3
        "sequence_mean": length * len(lengths),
        # arXiv:2503.14476, eq. 8
        "token_mean": sum(lengths),
        # arXiv:2503.20783, section 3.2
        "constant": setting["max_new_tokens"] * len(lengths),
    }
    return denominators[setting["loss_normalization"]]
