"""Estimators of advantages: what a response's gradient is multiplied with, from the rewards of a
step.

Every fact about an estimator is in its entry of `ADVANTAGES`. Responses that do not count change no
other response's advantage.

Axes: P prompts, G samples of a prompt (the group), B = P * G responses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alignment.core.flag import flag
from alignment.core.records import Score

if TYPE_CHECKING:
    from torch import Tensor

    AdvantageFunction = Callable[["AdvantageInputs", Any], tuple[Tensor, Any]]

# Functions import torch themselves: the arguments need the tables below, and must not wait for
# torch to load.


# The flags that only some estimators use, `--advantage` itself included: a loss without advantages
# uses none of them.
ADVANTAGE_ARGUMENTS = frozenset(
    {"advantage", "baseline", "normalize_by_std", "std_of", "advantage_eps"}
)


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may need of one step: P problems with a group of G responses each."""

    rewards_PG: Tensor
    """Raw rewards, penalties for length included, float64."""
    counted_PG: Tensor
    """Bool: whether a response counts. Those that do not (cut off, with --skip_unfinished, or
    without a score) are not trained on; their advantages are set to 0."""
    lengths_PG: Tensor
    """Response tokens, int64."""
    problems: tuple[str, ...]
    """The key of each group's problem: equal keys ask the same question."""
    step: int
    """The number of the step."""
    config: AdvantageConfig
    """The values of the flags of advantages, such as --baseline and --std_of."""

    @property
    def settings(self) -> Any:
        """The estimator's own settings, an instance of its `Advantage.settings`; None where it has
        none."""
        return settings_or_defaults(self.config.estimator.settings, self.config.settings)


@dataclass(frozen=True)
class Advantage:
    """One estimator of advantages, with every fact about it that other modules need."""

    function: AdvantageFunction
    """`function(inputs, state)` returns the advantages [P, G] and the state that the next step's
    call gets; the first call gets None. A state that is not None is saved in checkpoints: numbers,
    texts, true, false, None, tensors, and lists and dicts (with texts as keys) of these."""
    arguments: frozenset[str] = frozenset()
    """Which of the flags --baseline, --normalize_by_std, --std_of and --advantage_eps it uses."""
    settings: type | None = None
    """A frozen dataclass of its own settings: each of its fields is a flag, --advantage.FIELD. The
    function reads them from `AdvantageInputs.settings`."""
    silent_groups: bool = False
    """Whether a group whose counted rewards are all equal may have advantages other than 0. Such
    groups are then worth training on, and no refill may replace them."""
    smallest_group: int | Callable[[Any], int] = 2
    """The fewest responses of a group that it works with, or what gives them from the settings."""

    def fewest_responses(self, settings: Any) -> int:
        """`smallest_group`, given the estimator's own settings or None."""
        if isinstance(self.smallest_group, int):
            return self.smallest_group
        return self.smallest_group(settings_or_defaults(self.settings, settings))


@dataclass(frozen=True)
class AdvantageConfig:
    """An estimator of advantages and its settings, which have the names of their flags."""

    group_size: int
    baseline: str = "group_mean"
    normalize_by_std: bool = True
    std_of: str = "group"
    advantage_eps: float = 1e-6
    estimator: Advantage = field(default_factory=lambda: ADVANTAGES["group_baseline"])
    settings: Any = None
    """The estimator's own settings, an instance of `Advantage.settings`; None: their defaults."""

    @property
    def smallest_group(self) -> int:
        """The fewest responses of a group that the estimator works with."""
        return self.estimator.fewest_responses(self.settings)


def settings_or_defaults(settings_class: type | None, settings: Any) -> Any:
    """`settings`, or where they are None the defaults of their class; None without a class."""
    if settings is None and settings_class is not None:
        return settings_class()
    return settings


def _group_mean(centred_PG: Tensor, number_P1: Tensor) -> Tensor:
    """r - mean(r)."""
    return centred_PG


def _leave_one_out(centred_PG: Tensor, number_P1: Tensor) -> Tensor:
    """r - (n * mean(r) - r) / (n - 1) = (r - mean(r)) * n / (n - 1)."""
    others_P1 = (number_P1 - 1).clamp(min=1)
    return centred_PG * number_P1 / others_P1


# --baseline -> rewards minus the baseline, from rewards minus their group's mean and each group's
# number of responses.
BASELINES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
}


def _group_std(squares_P1: Tensor, number_P1: Tensor, rewards: Tensor) -> Tensor:
    return (squares_P1 / (number_P1 - 1).clamp(min=1)).sqrt()


def _population_std(squares_P1: Tensor, number_P1: Tensor, rewards: Tensor) -> Tensor:
    return (squares_P1 / number_P1.clamp(min=1)).sqrt()


def _batch_std(squares_P1: Tensor, number_P1: Tensor, rewards: Tensor) -> Tensor:
    return rewards.std(correction=1).nan_to_num()


# --std_of -> the standard deviation, from (squared deviations summed by group, responses by group,
# all rewards).
DEVIATIONS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "group": _group_std,
    "group_population": _population_std,
    "batch": _batch_std,
}


def group_baseline(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """A = r - b, and with `normalize_by_std` A = (r - b) / (std + eps).

    `baseline`: "group_mean" (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without the
    division Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2) or "leave_one_out", the mean
    of the group's other rewards (RLOO, Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740,
    eq. 8). `std_of`: "group" (unbiased), "group_population" (divided by the group's size), or
    "batch", the unbiased deviation of all rewards (Liu et al. 2025, arXiv:2508.08221).

    Responses that do not count enter no mean or deviation; a group's only counted one has the
    advantage 0.
    """
    config = inputs.config
    counted_PG = inputs.counted_PG
    number_P1 = counted_PG.sum(dim=1, keepdim=True)
    centred_PG = _centred_rewards(inputs)
    advantages_PG = BASELINES[config.baseline](centred_PG, number_P1)
    if config.normalize_by_std:
        squares_P1 = centred_PG.square().sum(dim=1, keepdim=True)
        std = DEVIATIONS[config.std_of](squares_P1, number_P1, inputs.rewards_PG[counted_PG])
        advantages_PG = advantages_PG / (std + config.advantage_eps)
    return advantages_PG, None


def _counted_mean(inputs: AdvantageInputs) -> Tensor:
    """The mean reward [P, 1] of each group's counted responses; 0 without any."""
    number_P1 = inputs.counted_PG.sum(dim=1, keepdim=True)
    sum_P1 = inputs.rewards_PG.where(inputs.counted_PG, 0).sum(dim=1, keepdim=True)
    return sum_P1 / number_P1.clamp(min=1)


def _centred_rewards(inputs: AdvantageInputs) -> Tensor:
    """Rewards minus the mean of their group's counted ones [P, G]; 0 where a response does not
    count."""
    # In float64 the mean of equal float32 rewards is exact, so that their advantages are exactly 0.
    return (inputs.rewards_PG - _counted_mean(inputs)).where(inputs.counted_PG, 0)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """A = (r - mean of the group) / (std of these differences over the batch + eps).

    REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262, section 3.2, eqs. 6 and 7). Mean
    and std of eq. 7 are over responses here, each of which weighs the same, and the std is
    unbiased. So the mean is 0, since the differences sum to 0 in each group, and groups of equal
    rewards have the advantage 0. The authors' code takes both over the batch's tokens, and the std
    of the population (OpenRLHF, experience_maker.compute_advantages_and_returns; verl's is over
    tokens, too): long responses weigh more there, and groups of equal rewards have -mean / std.
    Responses that do not count enter no mean and not the std.
    """
    centred_PG = _centred_rewards(inputs)
    number = inputs.counted_PG.sum()
    std = (centred_PG.square().sum() / (number - 1).clamp(min=1)).sqrt()
    return centred_PG / (std + inputs.config.advantage_eps), None


def optimal_baseline(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """A = r - b, where b is the mean of the group's rewards weighted by length: sum(l * r) /
    sum(l).

    OPO (Hao et al. 2025, arXiv:2505.23585): the baseline of least variance, where the squared norm
    of a response's gradient is taken to be proportional to its length l. Nothing divides by a std.
    The formula is that of the authors' code, which is part of verl
    (core_algos.compute_opo_outcome_advantage); of the paper the abstract was read. Responses that
    do not count have the weight 0.
    """
    weights_PG = inputs.lengths_PG.double().where(inputs.counted_PG, 0)
    total_P1 = weights_PG.sum(dim=1, keepdim=True)
    # Differences from the group's mean, so that equal rewards have exactly 0.
    centred_PG = _centred_rewards(inputs)
    shift_P1 = (weights_PG * centred_PG).sum(dim=1, keepdim=True) / total_P1.clamp(min=1)
    return centred_PG - shift_P1, None


@dataclass(frozen=True)
class PositiveOnlySettings:
    """The settings of `positive_only`."""

    negative_weight: float = flag(0.0, at_least=0)
    """Weight of wrong responses; 0: they are not trained on."""
    threshold: float = 0.5
    """A response is right where its reward is above."""


def positive_only(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """A = 1 for right responses and -negative_weight for wrong ones, without a baseline.

    Positive sample reinforcement (Zhu et al. 2025, arXiv:2506.01347, PSR), as the authors' code has
    it (RLVR-Decomposed, core_algos.compute_psr_nsr_outcome_advantage); of the paper the abstract
    was read. That code leaves wrong responses out of the batch before the loss; here they count in
    its denominator, as in an expectation over all responses. No response moves another's advantage.
    """
    settings = inputs.settings
    return _signed(inputs, 1.0, settings.negative_weight, settings.threshold), None


@dataclass(frozen=True)
class NegativeOnlySettings:
    """The settings of `negative_only`."""

    positive_weight: float = flag(0.0, at_least=0)
    """Weight of right responses; 0: they are not trained on. W-REINFORCE has 0.1."""
    threshold: float = 0.5
    """A response is right where its reward is above."""


def negative_only(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """A = -1 for wrong responses and positive_weight for right ones, without a baseline.

    Negative sample reinforcement (Zhu et al. 2025, arXiv:2506.01347, NSR), and with a
    positive_weight W-REINFORCE, whose lambda it is; 0.1 is what the authors' code recommends. For
    the source, and for what NSR does with right responses, see `positive_only`.
    """
    settings = inputs.settings
    return _signed(inputs, settings.positive_weight, 1.0, settings.threshold), None


def _signed(inputs: AdvantageInputs, positive: float, negative: float, threshold: float) -> Tensor:
    """`positive` for right responses, -`negative` for the others [P, G]."""
    is_right_PG = inputs.rewards_PG > threshold
    return inputs.rewards_PG.new_full(is_right_PG.shape, positive).where(is_right_PG, -negative)


@dataclass(frozen=True)
class PassAtKSettings:
    """The settings of `pass_at_k`."""

    k: int = flag(4, at_least=1)
    """Responses of which one must be right; fewer than --group_size."""
    threshold: float = 0.5
    """A response is right where its reward is above."""


def more_than_k(settings: PassAtKSettings) -> int:
    """The fewest responses of a group that `pass_at_k` learns from: of k there is one set, whose
    reward is the mean of all sets."""
    return settings.k + 1


def pass_at_k(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """The advantages of a reward that k responses share, 1 where any of them is right.

    With m = 1 - C(W, k) / C(N, k), the mean over all sets of k of the group's N responses, W of
    them wrong, and s = sqrt(m (1 - m)): A = (1 - m) / s for right ones and A = (1 - m - C(W - 1, k
    - 1) / C(N - 1, k - 1)) / s for wrong ones (Chen et al. 2025, arXiv:2508.10751, section 2.4,
    eqs. 11, 12, 14 and 15). A is 0 where s is: where all are wrong, or fewer than k. The authors'
    code (Passk_Training, passk_adv.calc_adv) adds 1e-6 to s. Responses that do not count are in no
    set; with fewer than k left, A is 0.
    """
    k = inputs.settings.k
    is_right_PG = inputs.rewards_PG > inputs.settings.threshold
    advantages_PG = inputs.rewards_PG.new_zeros(is_right_PG.shape)
    for row, (is_right_G, counted_G) in enumerate(zip(is_right_PG, inputs.counted_PG, strict=True)):
        number = int(counted_G.sum())
        wrong = int((counted_G & ~is_right_G).sum())
        if wrong < k or wrong == number:
            continue
        mean = 1 - math.comb(wrong, k) / math.comb(number, k)
        std = math.sqrt(mean * (1 - mean))
        # The share of a wrong response's sets in which all others are wrong, too.
        failing = math.comb(wrong - 1, k - 1) / math.comb(number - 1, k - 1)
        advantages_PG[row] = (1 - mean - failing) / std
        advantages_PG[row, is_right_G] = (1 - mean) / std
    return advantages_PG, None


def maximum_likelihood(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """A = (r - mean of the group) / mean of the group; 0 where that mean is not above 0.

    MaxRL (Tajwar et al. 2026, arXiv:2602.02710, eq. 10 and algorithm 1): the mean of right
    responses' gradients, with the mean of all as control variate, for rewards of 0 and 1. The
    authors' code (maxrl, core_algos.compute_maxrl_outcome_advantage) adds 1e-6 to the divisor.
    Responses that do not count enter no mean.
    """
    mean_P1 = _counted_mean(inputs)
    has_success_P1 = mean_P1 > 0
    ratio_PG = (inputs.rewards_PG - mean_P1) / mean_P1.where(has_success_P1, 1)
    return ratio_PG.where(has_success_P1, 0), None


@dataclass(frozen=True)
class ProblemAverageSettings:
    """The settings of `problem_average`."""

    decay: float = flag(0.9, at_least=0, below=1)
    """Share of a problem's average that stays when it is asked again."""


def problem_average(
    inputs: AdvantageInputs, state: dict[str, float] | None
) -> tuple[Tensor, dict[str, float]]:
    """A = r - b, where b is the moving average of the problem's mean rewards in earlier steps, b <-
    decay * b + (1 - decay) * mean (reinforcement comparison, Sutton 1984; Williams 1992, section
    5).

    A problem that is asked for the first time has its group's mean as the baseline. The state has
    the average of each problem by its key. A problem that a step asks twice has the average before
    the step both times. Responses that do not count enter no mean; a group without any leaves the
    average as it is.
    """
    averages = dict(state or {})
    means = _counted_mean(inputs)[:, 0].tolist()
    numbers = inputs.counted_PG.sum(dim=1).tolist()
    baselines = []
    for problem, mean in zip(inputs.problems, means, strict=True):
        baselines.append(averages.get(problem, mean))
    baseline_P1 = inputs.rewards_PG.new_tensor(baselines).unsqueeze(1)
    decay = inputs.settings.decay
    for problem, mean, number in zip(inputs.problems, means, numbers, strict=True):
        if number:
            averages[problem] = decay * averages.get(problem, mean) + (1 - decay) * mean
    return inputs.rewards_PG - baseline_P1, averages


def no_advantage(inputs: AdvantageInputs, state: None) -> tuple[Tensor, None]:
    """A = 0: rewards have no gradient. They are logged, and a teacher's advantages are alone."""
    return inputs.rewards_PG.new_zeros(inputs.rewards_PG.shape), None


def distillation_advantages(
    advantages: Tensor | None, teacher_log_probs: Tensor, student_log_probs: Tensor, weight: float
) -> Tensor:
    """A_t = A + weight * (log pi_teacher(y_t) - log pi_student(y_t)) [batch, sequence].

    The added term is minus an unbiased estimate of the reverse divergence KL(student, teacher) at
    each token that the student has sampled; a token is credited for nothing after it. On-policy
    distillation (Lu & Thinking Machines Lab 2025, "On-Policy Distillation", section "Pseudocode";
    tinker-cookbook, train_on_policy.incorporate_kl_penalty, whose weight is 1 and discount 0 by
    default): the gradient of the divergence on the student's own samples, through which no gradient
    passes, as in GKD (Agarwal et al. 2024, arXiv:2306.13649). MiniLLM (Gu et al. 2024,
    arXiv:2306.08543) also credits a token for the divergence of later ones. `advantages` are
    [batch, 1], or None for 0.
    """
    from_teacher = weight * (teacher_log_probs - student_log_probs).detach()
    if advantages is None:
        return from_teacher
    return advantages + from_teacher


# --advantage -> the estimator.
ADVANTAGES: Mapping[str, Advantage] = {
    "group_baseline": Advantage(group_baseline, arguments=ADVANTAGE_ARGUMENTS - {"advantage"}),
    "reinforce_plus_plus_baseline": Advantage(
        reinforce_plus_plus_baseline, arguments=frozenset({"advantage_eps"})
    ),
    "opo": Advantage(optimal_baseline),
    "positive_only": Advantage(
        positive_only, settings=PositiveOnlySettings, silent_groups=True, smallest_group=1
    ),
    "negative_only": Advantage(
        negative_only, settings=NegativeOnlySettings, silent_groups=True, smallest_group=1
    ),
    "pass_at_k": Advantage(pass_at_k, settings=PassAtKSettings, smallest_group=more_than_k),
    "maxrl": Advantage(maximum_likelihood),
    "problem_average": Advantage(
        problem_average, settings=ProblemAverageSettings, silent_groups=True, smallest_group=1
    ),
    "none": Advantage(no_advantage, smallest_group=1),
}


def compute_advantages(inputs: AdvantageInputs, state: Any) -> tuple[Tensor, Any]:
    """The advantages [P, G] that the config's estimator gives, 0 for responses that do not count,
    and its next state. Raises ValueError for groups smaller than the estimator works with."""
    config = inputs.config
    if config.group_size < config.smallest_group:
        raise ValueError(
            f"a group baseline needs at least {config.smallest_group} samples a prompt, not"
            f" {config.group_size}"
        )
    # A copy, since a step that is interrupted must leave the state as it was.
    advantages_PG, next_state = config.estimator.function(inputs, copy.deepcopy(state))
    return advantages_PG.where(inputs.counted_PG, 0), next_state


def group_advantages(
    raw_rewards_B1: Tensor, config: AdvantageConfig, counted_B1: Tensor | None = None
) -> Tensor:
    """The advantages of one step's rewards, by an estimator that needs neither lengths nor problems
    nor a state; by default `group_baseline`.

    Shapes [batch, 1] -> [batch, 1]. Raises ValueError for incomplete groups and as
    `compute_advantages`.
    """
    import torch

    if counted_B1 is None:
        counted_B1 = torch.ones_like(raw_rewards_B1, dtype=torch.bool)
    inputs = advantage_inputs(raw_rewards_B1, counted_B1, config)
    advantages_PG, _ = compute_advantages(inputs, None)
    return advantages_PG.reshape(-1, 1).to(raw_rewards_B1.dtype)


def advantage_inputs(
    raw_rewards_B1: Tensor,
    counted_B1: Tensor,
    config: AdvantageConfig,
    lengths: Sequence[int] = (),
    problems: Sequence[str] = (),
    step: int = 1,
) -> AdvantageInputs:
    """The inputs of an estimator, from those of each response [B], group after group. `lengths` are
    1 where they are not given, and each group's problem another one. Raises ValueError for
    incomplete groups."""
    import torch

    if raw_rewards_B1.shape[0] % config.group_size:
        raise ValueError(
            f"{raw_rewards_B1.shape[0]} rewards are not whole groups of {config.group_size}"
        )
    shape = (-1, config.group_size)
    rewards_PG = raw_rewards_B1.double().reshape(shape)
    lengths_B = torch.ones(rewards_PG.numel(), dtype=torch.int64)
    if lengths:
        lengths_B = torch.tensor(lengths)
    return AdvantageInputs(
        rewards_PG,
        counted_B1.reshape(shape),
        lengths_B.reshape(shape),
        tuple(problems[:: config.group_size]) or tuple(map(str, range(rewards_PG.shape[0]))),
        step,
        config,
    )


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], Score],
    rollout_responses: Sequence[str],
    repeated_ground_truths: Sequence[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Score every response and normalise within its group of `group_size` consecutive responses.

    Returns (advantages [batch, 1], raw_rewards [batch, 1], metadata). Raises ValueError like
    `group_advantages`.
    """
    import torch

    pairs = zip(rollout_responses, repeated_ground_truths, strict=True)
    scores = [reward_fn(response, ground_truth) for response, ground_truth in pairs]
    raw_rewards_B1 = torch.tensor([[score["reward"]] for score in scores], dtype=torch.float32)
    config = AdvantageConfig(
        group_size, normalize_by_std=normalize_by_std, advantage_eps=advantage_eps
    )
    advantages_B1 = group_advantages(raw_rewards_B1, config)
    return advantages_B1, raw_rewards_B1, group_statistics(raw_rewards_B1, group_size)


def group_statistics(raw_rewards_B1: Tensor, group_size: int) -> dict[str, float]:
    """Mean, std and extremes of the rewards, and the share of groups whose rewards are all equal,
    under TRL's name for it."""
    rewards_PG = raw_rewards_B1.reshape(-1, group_size)
    equal_P = (rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).float()
    statistics = {
        "reward_mean": rewards_PG.mean(),
        "reward_std": rewards_PG.std(correction=0),
        "reward_max": rewards_PG.max(),
        "reward_min": rewards_PG.min(),
        "frac_reward_zero_std": equal_P.mean(),
    }
    return {name: value.item() for name, value in statistics.items()}


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, added to the reward (Yu et al. 2025, arXiv:2503.14476, eq.
    13).

    It is 0 up to max_new_tokens - buffer tokens, then falls linearly to -1 at max_new_tokens. A
    buffer of 0 turns it off.
    """
    if buffer == 0:
        return 0.0
    excess = max(0, length - (max_new_tokens - buffer))
    return -excess / buffer
