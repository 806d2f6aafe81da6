"""Advantages, losses and gradients as the papers write them: one response and one token at a time,
in Python's own numbers, by none of the code that trains. A `setting` has the value of each flag by
its name; responses are lists [B][t], without padding.

The derivative by a log-prob x is Im f(x + ih) / h, to the last digit where h is tiny (Squire &
Trapp 1998, "Using complex variables to estimate derivatives of real functions"), so log-probs are
complex; where papers stop gradients, real parts."""

import cmath
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

H = 1e-30  # nats
Rows = Sequence[Sequence[complex]]
real = operator.attrgetter("real")


class Token(NamedTuple):
    """The log-probs of one token under each policy."""

    policy: complex
    old: complex
    reference: complex
    sampler: complex


class Response(NamedTuple):
    """What a loss may know of the whole response of a token: its reward and advantage, its length
    in tokens, and its log-probs under three policies."""

    reward: float
    advantage: float
    length: int
    policy: complex
    old: complex
    sampler: complex


def paper_values(
    setting: Mapping, rewards: Sequence[float], policy: Rows, *others: Rows
) -> list[float]:
    """The advantage of each response, the loss of an optimiser step on them all, and its gradient
    by each log-prob of the policy, one response after another. `others` are the log-probs of the
    old policy, the reference and the sampler."""
    advantages = [paper_advantage(setting, place, rewards) for place in range(len(rewards))]

    def slope(place: int, token: int) -> float:
        rows = [list(row) for row in policy]
        rows[place][token] += 1j * H
        return paper_loss(setting, rewards, advantages, rows, *others).imag / H

    gradient = []
    for place, row in enumerate(policy):
        gradient += [slope(place, token) for token in range(len(row))]
    loss = paper_loss(setting, rewards, advantages, policy, *others).real
    return [*advantages, loss, *gradient]


def paper_advantage(setting: Mapping, place: int, rewards: Sequence[float]) -> float:
    """GRPO's (arXiv:2402.03300, section 4.1.2) or RLOO's (arXiv:2402.14740, eq. 8) of the response
    at a place, over the std of its group or of all rewards (arXiv:2508.08221), or over none (Dr.
    GRPO, arXiv:2503.20783, section 3.2)."""
    start = place - place % setting["group_size"]
    end = start + setting["group_size"]
    group = rewards[start:end]
    others = [*rewards[start:place], *rewards[place + 1 : end]]
    baselines = {"group_mean": group, "leave_one_out": others}
    centred = rewards[place] - statistics.fmean(baselines[setting["baseline"]])
    if not setting["normalize_by_std"]:
        return centred
    stds = {
        "group": statistics.stdev(group),
        "group_population": statistics.pstdev(group),
        "batch": statistics.stdev(rewards),
    }
    return centred / (stds[setting["std_of"]] + setting["advantage_eps"])


def paper_loss(
    setting: Mapping, rewards: Sequence[float], advantages: Sequence[float], *policies: Rows
) -> complex:
    """The loss of an optimiser step. `policies` are those of `paper_values`."""
    lengths = [len(row) for row in policies[0]]
    total: complex = 0.0
    for reward, advantage, *rows in zip(rewards, advantages, *policies, strict=True):
        policy, old, _, sampler = map(sum, rows)
        response = Response(reward, advantage, len(rows[0]), policy, old, sampler)
        denominator = paper_denominator(setting, response.length, lengths)
        for log_probs in zip(*rows, strict=True):
            token = Token(*log_probs)
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
    constant_ratio = cmath.exp(token.policy.real - token.old)  # without gradient
    losses = {
        # REINFORCE: Williams 1992, section 4
        "no_baseline": -response.reward * token.policy,
        # the same section
        "reinforce_with_baseline": -advantage * token.policy,
        # arXiv:2402.03300, eq. 3
        "grpo_clip": -paper_surrogate(setting, ratio, advantage),
        # the same without its clip
        "grpo_no_clip": -ratio * advantage,
        # arXiv:2507.18071, eqs. 5 and 7
        "gspo": -paper_surrogate(setting, response_ratio, advantage),
        # arXiv:2506.13585, eqs. 4 and 5
        "cispo": -paper_clip(setting, constant_ratio).real * advantage * token.policy,
    }
    return losses[setting["loss"]]


def paper_clip(setting: Mapping, ratio: complex) -> complex:
    """The ratio within 1 - cliprange and 1 + cliprange, or DAPO's upper bound (arXiv:2503.14476,
    eq. 10)."""
    upper_range = setting["cliprange_high"]
    if upper_range is None:
        upper_range = setting["cliprange"]
    return sorted((1 - setting["cliprange"], ratio, 1 + upper_range), key=real)[1]


def paper_surrogate(setting: Mapping, ratio: complex, advantage: float) -> complex:
    """PPO's clipped objective (arXiv:1707.06347, eq. 7), of negative advantages at least
    `dual_clip` times the advantage (arXiv:1912.09729, eq. 5)."""
    worse = min(ratio * advantage, paper_clip(setting, ratio) * advantage, key=real)
    if setting["dual_clip"] and advantage < 0:
        return max(worse, setting["dual_clip"] * advantage, key=real)
    return worse


def paper_weight(setting: Mapping, response: Response, token: Token) -> float:
    """The importance weight of the old policy over the sampler. Above the cap it is cut to it
    (V-trace, arXiv:1802.01561, eq. 1), or the token is left out."""
    level, _, bound = setting["sampler_correction"].partition("_")
    log_ratios = {
        "none": 0.0,
        "token": token.old - token.sampler,
        "sequence": response.old - response.sampler,
    }
    weight = cmath.exp(log_ratios[level]).real
    cap = setting["correction_cap"]
    if weight <= cap:
        return weight
    return cap if bound == "truncate" else 0.0


def paper_kl(setting: Mapping, token: Token) -> complex:
    """An estimate of the KL divergence from the reference (Schulman 2020, "Approximating KL
    divergence"; k3 also arXiv:2402.03300, eq. 4)."""
    log_ratio = token.reference - token.policy
    estimates = {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": cmath.exp(log_ratio) - log_ratio - 1,
    }
    return estimates[setting["kl_estimator"]]


def paper_denominator(setting: Mapping, length: int, lengths: Sequence[int]) -> int:
    """What the loss of a token is divided by, where its response has `length` tokens and all
    responses have `lengths`."""
    denominators = {
        # arXiv:2402.03300, eq. 3
        "sequence_mean": length * len(lengths),
        # arXiv:2503.14476, eq. 8
        "token_mean": sum(lengths),
        # arXiv:2503.20783, section 3.2
        "constant": setting["max_new_tokens"] * len(lengths),
    }
    return denominators[setting["loss_normalization"]]
