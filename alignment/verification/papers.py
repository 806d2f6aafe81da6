"""Advantages, losses and gradients as the papers write them: one response and one token at a time,
in Python's own numbers, without any of the code that trains. A `setting` maps the name of a flag to
its value. Log-probs of responses are lists [B][t], without padding.

Gradients come from complex steps: for a tiny h, the derivative of a real function f at x is
Im f(x + ih) / h, exact to rounding (Squire & Trapp 1998, "Using complex variables to estimate
derivatives of real functions"). So log-probs are complex numbers here. The imaginary part carries
the derivative; where a paper stops the gradient, the code takes the real part."""

import cmath
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from alignment.verification.paper_advantages import paper_advantages

STEP = 1e-30  # the h above, in nats
# Responses of one prompt begin with tokens of one entropy, but for rounding.
TIE = 1e-5
LogProbs = Sequence[Sequence[complex]]  # [B][t]
real = operator.attrgetter("real")


class Token(NamedTuple):
    """The log-prob of one token under each policy, the entropy of the policy's distribution there,
    and whether `paper_selected` has the token."""

    policy: complex
    old: complex
    reference: complex
    sampler: complex

    entropy: complex = 0.0
    is_selected: bool = False


class Response(NamedTuple):
    """What the loss of a token needs of its whole response: the reward, the advantage, the length
    in tokens, the log-prob of the response under three policies, and the log-ratio of each of its
    tokens to the old policy."""

    reward: float
    advantage: float
    length: int
    policy: complex
    old: complex
    sampler: complex
    log_ratios: Sequence[complex]


class PaperLogProbs(NamedTuple):
    """The log-probs of each response's tokens under each of the policies, and the entropies of the
    policy's distributions there."""

    policy: LogProbs
    old: LogProbs
    reference: LogProbs
    sampler: LogProbs
    entropies: LogProbs


class PaperPart(NamedTuple):
    """One response of an optimiser step: all that its part of the step's loss is computed from."""

    setting: Mapping
    reward: float
    advantages: Sequence[float]
    """Of each token; all alike, but with a teacher."""
    log_probs: Sequence[Sequence[complex]]
    """The rows [t] of `PaperLogProbs`, in its order, that are the response's."""
    selected: Sequence[bool]
    lengths: Sequence[int]
    """Of all responses of the step."""
    share: float
    """Of the step's tokens, those that are selected."""


class PaperSlopes(NamedTuple):
    """The derivatives of a step's loss by the policy's log-prob of each token of a response, and by
    the entropy of its distribution there, [t]."""

    log_probs: list[float]
    entropies: list[float]


# The papers' shares of tokens, where --selected_share names none: arXiv:2506.01939, section 5.2,
# and arXiv:2505.22617, section 4.3.
SELECTED_SHARES = {"top_entropy": 0.2, "clip_cov": 2e-4, "kl_cov": 2e-3}
# The losses in which the loss of a token depends on all tokens of its response.
OF_WHOLE_RESPONSES = ("gspo", "gmpo")


def paper_values(setting: Mapping, rewards: Sequence[float], values: PaperLogProbs) -> list[float]:
    """The advantage of each response, then the loss of one optimiser step on all responses, then
    the derivatives of this loss by the policy's log-probs, one response after another, then those
    by its entropies."""
    advantages = paper_advantages(setting, rewards, [len(row) for row in values.policy])
    loss = paper_loss(setting, rewards, advantages, values).real
    by_log_probs: list[float] = []
    by_entropies: list[float] = []
    for part in paper_parts(setting, rewards, token_advantages(advantages, values), values):
        slopes = paper_slopes(part)
        by_log_probs += slopes.log_probs
        by_entropies += slopes.entropies
    return [*advantages, loss, *by_log_probs, *by_entropies]


def token_advantages(advantages: Sequence[float], log_probs: PaperLogProbs) -> list[list[float]]:
    """The advantage of each token [B][t], which is its response's."""
    pairs = zip(advantages, log_probs.policy, strict=True)
    return [[advantage] * len(row) for advantage, row in pairs]


def paper_loss(
    setting: Mapping,
    rewards: Sequence[float],
    advantages: Sequence[float],
    log_probs: PaperLogProbs,
) -> complex:
    """The loss of one optimiser step."""
    of_tokens = token_advantages(advantages, log_probs)
    total: complex = 0.0
    for part in paper_parts(setting, rewards, of_tokens, log_probs):
        total += paper_part_loss(part, range(len(part.selected)))
    return total


def paper_parts(
    setting: Mapping,
    rewards: Sequence[float],
    advantages: Sequence[Sequence[float]],
    log_probs: PaperLogProbs,
) -> list[PaperPart]:
    """The parts of the loss of one optimiser step, with the advantages of tokens [B][t]."""
    selected = paper_selected(setting, advantages, log_probs)
    lengths = [len(row) for row in log_probs.policy]
    share = sum(map(sum, selected)) / sum(lengths)
    parts = []
    for index, reward in enumerate(rewards):
        rows = [of_policy[index] for of_policy in log_probs]
        own = (advantages[index], rows, selected[index])
        parts.append(PaperPart(setting, reward, *own, lengths, share))
    return parts


def paper_part_loss(part: PaperPart, positions: Sequence[int]) -> complex:
    """The sum of the losses of a response's tokens at some positions, each over the step's
    denominator."""
    setting = part.setting
    policy, old, _, sampler, _ = part.log_probs
    length = len(policy)
    response = Response(
        part.reward,
        0.0,
        length,
        sum(policy),
        sum(old),
        sum(sampler),
        [new - before for new, before in zip(policy, old, strict=True)],
    )
    denominator = paper_denominator(setting, length, part.lengths)
    total: complex = 0.0
    for position in positions:
        response = response._replace(advantage=part.advantages[position])
        values = [row[position] for row in part.log_probs]
        token = Token(*values, is_selected=part.selected[position])
        loss = paper_token_loss(setting, response, token)
        loss = paper_selection_change(setting, token, loss, part.share)
        weight = paper_weight(setting, response, token)
        penalty = paper_kl(setting, token)
        # The bonus of PPO, arXiv:1707.06347, eq. 9.
        bonus = setting["entropy_coefficient"] * token.entropy
        total += (weight * loss + setting["beta"] * penalty - bonus) / denominator
    return total


def paper_slopes(part: PaperPart) -> PaperSlopes:
    """The derivatives of the step's loss by the values of one response. Its part alone depends on
    them, and of that, unless a loss is of whole responses, the token's own term alone. Which tokens
    are selected has no derivative."""
    policy, *others, entropies = part.log_probs
    every_position = range(len(policy))
    slopes = PaperSlopes([], [0.0] * len(policy))
    for position in every_position:
        moved = part._replace(log_probs=[_moved(policy, position), *others, entropies])
        positions: Sequence[int] = (position,)
        if part.setting["loss"] in OF_WHOLE_RESPONSES:
            positions = every_position
        slopes.log_probs.append(paper_part_loss(moved, positions).imag / STEP)
        if part.setting["entropy_coefficient"]:
            moved = part._replace(log_probs=[policy, *others, _moved(entropies, position)])
            slopes.entropies[position] = paper_part_loss(moved, (position,)).imag / STEP
    return slopes


def is_near_edge(part: PaperPart, distance: float) -> bool:
    """Whether a token's slope jumps within a `distance`, in nats, of the policy's log-probs: where
    a ratio stands on the bound of a clip, rounding decides on which side."""
    policy, *others = part.log_probs
    both: list[list[float]] = []
    for change in (-distance, distance):
        moved = [value + change for value in policy]
        both.append(paper_slopes(part._replace(log_probs=[moved, *others])).log_probs)
    largest = max(map(abs, both[0] + both[1]))
    pairs = zip(*both, strict=True)
    # Without a jump they differ by a few times the distance.
    return any(abs(below - above) > 0.01 * largest for below, above in pairs)


def _moved(row: Sequence[complex], position: int) -> list[complex]:
    """The row, one value of which has a complex step."""
    moved = list(row)
    moved[position] += 1j * STEP
    return moved


def paper_selected(
    setting: Mapping, advantages: Sequence[Sequence[float]], log_probs: PaperLogProbs
) -> list[list[bool]]:
    """Whether each token is one of the step's selected tokens: of the highest entropy
    (arXiv:2506.01939, eq. 6); of a covariance within bounds (arXiv:2505.22617, eq. 11, where the
    share is so large that all of them are drawn); or of the highest covariance (the same, eq.
    13). Values as near as `TIE` are equal but for rounding."""
    selection = setting["token_selection"]
    if selection == "none":
        return [[False] * len(row) for row in log_probs.policy]
    mean_log_prob = statistics.fmean(value.real for row in log_probs.policy for value in row)
    mean_advantage = statistics.fmean(value for row in advantages for value in row)
    entropies = [[value.real for value in row] for row in log_probs.entropies]
    covariances = []
    for weights, row in zip(advantages, log_probs.policy, strict=True):
        pairs = zip(weights, row, strict=True)
        covariances.append(
            [(value.real - mean_log_prob) * (weight - mean_advantage) for weight, value in pairs]
        )
    if selection == "clip_cov":
        low = setting["covariance_low"]
        high = setting["covariance_high"]
        return [[low <= value <= high for value in row] for row in covariances]
    ranked = entropies if selection == "top_entropy" else covariances
    tokens = sum(len(row) for row in ranked)
    share = setting["selected_share"]
    if share is None:
        share = SELECTED_SHARES[selection]
    number = max(1, int(tokens * share))
    threshold = sorted(value for row in ranked for value in row)[-number]
    return [[value >= threshold - TIE for value in row] for row in ranked]


def paper_selection_change(setting: Mapping, token: Token, loss: complex, share: float) -> complex:
    """The loss of a token that may be selected, before `paper_denominator` divides it: it is kept,
    where the denominator counts selected tokens alone, the `share` of all (arXiv:2506.01939, eq.
    6), or left out, or gets the divergence from the old policy, KL(pi_old, pi) (arXiv:2505.22617,
    eq. 14), as samples of the old policy estimate it (k3 in Schulman 2020, "Approximating KL
    divergence")."""
    ratio = cmath.exp(token.policy - token.old)
    penalised = loss + setting["kl_cov_coefficient"] * (ratio - 1 - cmath.log(ratio))
    losses = {
        "none": loss,
        "top_entropy": loss / share if token.is_selected else 0.0,
        "clip_cov": 0.0 if token.is_selected else loss,
        "kl_cov": penalised if token.is_selected else loss,
    }
    return losses[setting["token_selection"]]


def paper_token_loss(setting: Mapping, response: Response, token: Token) -> complex:
    """The policy-gradient loss of one token, or, where a loss is of whole responses, of its
    response."""
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
    own_settings = {"sapo": paper_sapo, "gmpo": paper_gmpo, "dppo": paper_dppo}
    if setting["loss"] in own_settings:
        return own_settings[setting["loss"]](setting, response, token)
    return losses[setting["loss"]]


def paper_sapo(setting: Mapping, response: Response, token: Token) -> complex:
    """SAPO's gate 4 / tau * sigmoid(tau * (ratio - 1)) in place of the ratio (arXiv:2511.20347, as
    verl's core_algos.compute_policy_loss_sapo has it)."""
    tau = setting["loss.positive"] if response.advantage > 0 else setting["loss.negative"]
    ratio = cmath.exp(token.policy - token.old)
    sigmoid = 1 / (1 + cmath.exp(-tau * (ratio - 1)))
    return -(4 / tau) * sigmoid * response.advantage


def paper_gmpo(setting: Mapping, response: Response, token: Token) -> complex:
    """GMPO's geometric mean of the tokens' clipped ratios (arXiv:2507.20673, eq. 4): for a positive
    advantage they are bounded from above, for a negative one from below."""
    product: complex = 1.0
    for log_ratio in response.log_ratios:
        ratio = cmath.exp(log_ratio)
        if response.advantage > 0:
            ratio = min(ratio, math.exp(setting["loss.clip_high"]), key=real)
        if response.advantage < 0:
            ratio = max(ratio, math.exp(-setting["loss.clip_low"]), key=real)
        product *= ratio
    return -response.advantage * product ** (1 / response.length)


def paper_dppo(setting: Mapping, response: Response, token: Token) -> complex:
    """DPPO's ratio, masked where it moves away from the old policy beyond a divergence
    (arXiv:2602.04879, eqs. 12, 13 and 14; thresholds of appendix E)."""
    p = min(math.exp(token.old.real), 1 - 2**-23)
    q = min(math.exp(token.policy.real), 1 - 2**-23)
    divergences = {
        "tv": abs(math.exp(token.policy.real) - math.exp(token.old.real)),
        "kl": p * (token.old.real - token.policy.real) + (1 - p) * math.log((1 - p) / (1 - q)),
    }
    ratio = cmath.exp(token.policy - token.old)
    rises = response.advantage > 0 and ratio.real > 1
    falls = response.advantage < 0 and ratio.real < 1
    threshold = setting["loss.threshold"]
    if threshold is None:
        threshold = {"tv": 0.2, "kl": 0.05}[setting["loss.divergence"]]
    is_far = divergences[setting["loss.divergence"]] > threshold
    if is_far and (rises or falls):
        return 0.0
    return -ratio * response.advantage


def paper_cosine_reward(
    length: int, longest: int, is_right: bool, right: Sequence[float], wrong: Sequence[float]
) -> float:
    """The cosine reward of a response that is not cut off (arXiv:2502.03373, section 4.2 and eq.
    1): CosFn(t, T, a, b) = a + (b - a) / 2 * (1 + cos(t pi / T)). `right` and `wrong` are the
    rewards at length 0 and at the longest."""
    at_start, at_end = right if is_right else wrong
    return at_end + 0.5 * (at_start - at_end) * (1.0 + math.cos(length * math.pi / longest))


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
    out (IcePop, arXiv:2510.18855, eq. 2)."""
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
