"""Estimators of advantages: what a response's gradient is multiplied with, from the rewards of a
step.

Every fact about an estimator is in its entry of `ADVANTAGES`. Responses that do not count change no
other response's advantage.

Axes: P prompts, G samples of a prompt (the group), B = P * G responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    config: AdvantageConfig

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
    smallest_group: int = 2
    """The fewest responses of a group that it works with."""


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
    # In float64 the mean of equal float32 rewards is exact, so that their advantages are exactly 0.
    mean_P1 = _counted_mean(inputs)
    centred_PG = (inputs.rewards_PG - mean_P1).where(counted_PG, 0)
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


# --advantage -> the estimator.
ADVANTAGES: Mapping[str, Advantage] = {
    "group_baseline": Advantage(group_baseline, arguments=ADVANTAGE_ARGUMENTS - {"advantage"}),
}


def compute_advantages(inputs: AdvantageInputs, state: Any) -> tuple[Tensor, Any]:
    """The advantages [P, G] that the config's estimator gives, 0 for responses that do not count,
    and its next state. Raises ValueError for groups smaller than the estimator works with."""
    config = inputs.config
    if config.group_size < config.estimator.smallest_group:
        raise ValueError(
            f"a group baseline needs at least {config.estimator.smallest_group} samples a prompt,"
            f" not {config.group_size}"
        )
    advantages_PG, state = config.estimator.function(inputs, state)
    return advantages_PG.where(inputs.counted_PG, 0), state


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
