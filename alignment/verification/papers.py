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

H = 1e-30  # nats
Rows = Sequence[Sequence[complex]]
real = operator.attrgetter("real")


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

    gradient = [
        slope(place, token) for place, row in enumerate(policy) for token in range(len(row))
    ]
    return [*advantages, paper_loss(setting, rewards, advantages, policy, *others).real, *gradient]


def paper_advantage(setting: Mapping, place: int, rewards: Sequence[float]) -> float:
    """GRPO's (arXiv:2402.03300, section 4.1.2) or RLOO's (arXiv:2402.14740, eq. 8) of the response
    at a place, over the std of its group or of all rewards (arXiv:2508.08221), or over none (Dr.
    GRPO, arXiv:2503.20783, section 3.2)."""
    start = place - place % setting["group_size"]
    end = start + setting["group_size"]
    group, others = rewards[start:end], [*rewards[start:place], *rewards[place + 1 : end]]
    centred = rewards[place] - statistics.fmean(
        {"group_mean": group, "leave_one_out": others}[setting["baseline"]]
    )
    stds = {
        "group": statistics.stdev(group),
        "group_population": statistics.pstdev(group),
        "batch": statistics.stdev(rewards),
    }
    return (
        centred / (stds[setting["std_of"]] + setting["advantage_eps"])
        if setting["normalize_by_std"]
        else centred
    )


def paper_loss(
    setting: Mapping, rewards: Sequence[float], advantages: Sequence[float], *policies: Rows
) -> complex:
    """The loss of an optimiser step. `policies` are those of `paper_values`."""
    lengths, low, dual_clip = (
        [len(row) for row in policies[0]],
        1 - setting["cliprange"],
        setting["dual_clip"],
    )
    high = 1 + (
        setting["cliprange"] if setting["cliprange_high"] is None else setting["cliprange_high"]
    )
    level, _, bound = setting["sampler_correction"].partition("_")
    cap, total = setting["correction_cap"], 0.0

    def clip(ratio: complex) -> complex:
        # DAPO's upper bound: arXiv:2503.14476, eq. 10
        return sorted((low, ratio, high), key=real)[1]

    def surrogate(ratio: complex, advantage: float) -> complex:
        # PPO: arXiv:1707.06347, eq. 7
        worse = min(ratio * advantage, clip(ratio) * advantage, key=real)
        # arXiv:1912.09729, eq. 5
        return max(worse, dual_clip * advantage, key=real) if dual_clip and advantage < 0 else worse

    for length, reward, advantage, *rows in zip(
        lengths, rewards, advantages, *policies, strict=True
    ):
        of_policy, of_old, _, of_sampler = map(sum, rows)
        for log_prob, old, reference, sampler in zip(*rows, strict=True):
            loss = {
                "no_baseline": -reward * log_prob,  # REINFORCE: Williams 1992, section 4
                "reinforce_with_baseline": -advantage * log_prob,  # the same section
                "grpo_clip": -surrogate(
                    cmath.exp(log_prob - old), advantage
                ),  # arXiv:2402.03300, eq. 3
                "grpo_no_clip": -cmath.exp(log_prob - old) * advantage,  # the same without its clip
                "gspo": -surrogate(
                    cmath.exp((of_policy - of_old) / length), advantage
                ),  # arXiv:2507.18071, eqs. 5 and 7
                "cispo": (
                    -clip(cmath.exp(log_prob.real - old)).real * advantage * log_prob
                ),  # arXiv:2506.13585, eqs. 4 and 5
            }[setting["loss"]]
            # V-trace's truncation (arXiv:1802.01561, eq. 1), or weights beyond the cap left out
            weight = cmath.exp(
                {"none": 0.0, "token": old - sampler, "sequence": of_old - of_sampler}[level]
            ).real
            weight = weight if weight <= cap else cap if bound == "truncate" else 0.0
            # Schulman 2020, "Approximating KL divergence"; k3: arXiv:2402.03300, eq. 4
            to = reference - log_prob
            kl = {"k1": -to, "k2": to**2 / 2, "k3": cmath.exp(to) - to - 1}[setting["kl_estimator"]]
            per = {
                "sequence_mean": length * len(lengths),  # arXiv:2402.03300, eq. 3
                "token_mean": sum(lengths),  # arXiv:2503.14476, eq. 8
                "constant": (
                    setting["max_new_tokens"] * len(lengths)
                ),  # arXiv:2503.20783, section 3.2
            }[setting["loss_normalization"]]
            total += (weight * loss + setting["beta"] * kl) / per
    return total
