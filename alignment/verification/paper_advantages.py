"""Estimators of advantages as the papers write them, one response at a time, in Python's own
numbers, without any of the code that trains. A `setting` maps the name of a flag to its value."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class PaperResponse(NamedTuple):
    """A response of a group, and all responses of the step."""

    setting: Mapping
    index: int  # In its group.
    rewards: Sequence[float]  # Of its group.
    lengths: Sequence[int]  # Of its group.
    groups: Sequence[Sequence[float]]  # Rewards of the step's groups.

    @property
    def reward(self) -> float:
        return self.rewards[self.index]

    @property
    def centred(self) -> float:
        return self.reward - statistics.fmean(self.rewards)


def _std(values: Sequence[float]) -> float:
    """The unbiased standard deviation; 0 of a single value, and of none."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _group_baseline(response: PaperResponse) -> float:
    """The reward minus the mean reward of its group (GRPO, arXiv:2402.03300, section 4.1.2) or of
    the group's other responses (RLOO, arXiv:2402.14740, eq. 8). This is divided by the std of the
    group's rewards or of all rewards (arXiv:2508.08221), or by nothing (Dr. GRPO, arXiv:2503.20783,
    section 3.2). A response that is the only one of its group to count has no baseline: 0."""
    setting, index, group, _, groups = response
    if len(group) == 1:
        return 0.0
    others = [*group[:index], *group[index + 1 :]]
    averaged = {"group_mean": group, "leave_one_out": others}
    centred = group[index] - statistics.fmean(averaged[setting["baseline"]])
    if not setting["normalize_by_std"]:
        return centred
    stds = {
        "group": _std(group),
        "group_population": statistics.pstdev(group),
        "batch": _std(list(itertools.chain.from_iterable(groups))),
    }
    return centred / (stds[setting["std_of"]] + setting["advantage_eps"])


def _reinforce_plus_plus(response: PaperResponse) -> float:
    """arXiv:2501.03262, eqs. 6 and 7: rewards minus their group's mean, normalised over the batch's
    responses."""
    differences = []
    for group in response.groups:
        differences += [reward - statistics.fmean(group) for reward in group]
    numerator = response.centred - statistics.fmean(differences)
    return numerator / (_std(differences) + response.setting["advantage_eps"])


def _opo(response: PaperResponse) -> float:
    """arXiv:2505.23585, as verl's core_algos.compute_opo_outcome_advantage has it: the baseline is
    the mean reward weighted by lengths."""
    pairs = zip(response.rewards, response.lengths, strict=True)
    weighted = sum(reward * length for reward, length in pairs)
    return response.reward - weighted / sum(response.lengths)


def _positive_only(response: PaperResponse) -> float:
    """arXiv:2506.01347, PSR, as RLVR-Decomposed's core_algos has it."""
    is_right = response.reward > response.setting["advantage.threshold"]
    return 1.0 if is_right else -response.setting["advantage.negative_weight"]


def _negative_only(response: PaperResponse) -> float:
    """arXiv:2506.01347, NSR and W-REINFORCE, as RLVR-Decomposed's core_algos has them."""
    is_right = response.reward > response.setting["advantage.threshold"]
    return response.setting["advantage.positive_weight"] if is_right else -1.0


def _pass_at_k(response: PaperResponse) -> float:
    """arXiv:2508.10751, section 2.4, by enumeration of all sets of k responses: the reward of a set
    is 1 where any of it is right; a response's advantage is the mean of those of the sets that it
    is in, each normalised by mean and std over all sets."""
    k = response.setting["advantage.k"]
    is_right = [reward > response.setting["advantage.threshold"] for reward in response.rewards]
    sets = list(itertools.combinations(range(len(is_right)), k))
    if not sets:
        return 0.0
    rewards = [float(any(is_right[member] for member in members)) for members in sets]
    mean = statistics.fmean(rewards)
    std = statistics.pstdev(rewards)
    if std == 0:
        return 0.0
    own = []
    for members, reward in zip(sets, rewards, strict=True):
        if response.index in members:
            own.append((reward - mean) / std)
    return statistics.fmean(own)


def _maxrl(response: PaperResponse) -> float:
    """arXiv:2602.02710, eq. 10: r_i / K - 1 / N, times N, where K of N responses are right; 0 where
    none is (algorithm 1)."""
    number = len(response.rewards)
    successes = sum(response.rewards)
    if successes <= 0:
        return 0.0
    return number * (response.reward / successes - 1 / number)


def _problem_average(response: PaperResponse) -> float:
    """Williams 1992, section 5, in the first step, whose baseline is the group's mean."""
    return response.centred


def _none(response: PaperResponse) -> float:
    """No gradient by rewards."""
    return 0.0


ESTIMATORS: Mapping[str, Callable[[PaperResponse], float]] = {
    "group_baseline": _group_baseline,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus,
    "opo": _opo,
    "positive_only": _positive_only,
    "negative_only": _negative_only,
    "pass_at_k": _pass_at_k,
    "maxrl": _maxrl,
    "problem_average": _problem_average,
    "none": _none,
}


def paper_advantages(
    setting: Mapping, rewards: Sequence[float], lengths: Sequence[int]
) -> list[float]:
    """The advantage of each response of a step, group after group, all of which count."""
    size = setting["group_size"]
    starts = range(0, len(rewards), size)
    groups = [rewards[start : start + size] for start in starts]
    lengths_of_groups = [lengths[start : start + size] for start in starts]
    of_groups = paper_advantages_of_groups(setting, groups, lengths_of_groups)
    return list(itertools.chain.from_iterable(of_groups))


def paper_advantages_of_groups(
    setting: Mapping, groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> list[list[float]]:
    """The advantages of a step's groups, from the rewards and lengths of the responses that
    count."""
    advantages = []
    for group, own_lengths in zip(groups, lengths, strict=True):
        responses = [
            PaperResponse(setting, index, group, own_lengths, groups) for index in range(len(group))
        ]
        advantages.append([ESTIMATORS[setting["advantage"]](response) for response in responses])
    return advantages
