"""What an update needs to know of all its tokens before it begins: which of them are selected, and
the coefficient of its entropy bonus."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from alignment.core.records import Rollout
from alignment.core.selection import StepTokens, select_tokens
from alignment.policy.policy import Policy
from alignment.rollouts.config import UpdateConfig, derived_seed


@dataclass(frozen=True)
class PreparedUpdate:
    """The rollout and the configuration of one update, and the configuration of the next one."""

    rollout: Rollout
    config: UpdateConfig
    next_config: UpdateConfig


def prepare_update(
    policy: Policy, rollout: Rollout, mini_batch: Sequence[int], config: UpdateConfig, number: int
) -> PreparedUpdate:
    """The update of a mini-batch, the `number`-th of the run.

    With --token_selection or --entropy_target the policy makes a forward pass of the mini-batch's
    rows, all of them together, so that micro-batches and ranks change nothing. That is about a
    third more computation than the update takes alone. Without these flags there is no pass, and
    nothing changes."""
    if config.loss.token_selection == "none" and not config.entropy_target:
        return PreparedUpdate(rollout, config, config)
    rows = list(mini_batch)
    log_probs_BT, entropies_BT = policy.log_probs_and_entropies(
        rollout.batch, config.loss_distribution, rows
    )
    mask_BT = torch.zeros_like(rollout.batch.response_mask)
    mask_BT[rows] = rollout.batch.response_mask[rows]
    entropies_N = entropies_BT[mask_BT].double()
    if config.loss.token_selection != "none":
        generator = torch.Generator().manual_seed(derived_seed("selection", config.seed, number))
        draws_BT = torch.rand(mask_BT.shape, generator=generator)
        advantages_N = torch.zeros_like(entropies_N)
        if rollout.advantages is not None:
            advantages_N = rollout.advantages.expand_as(mask_BT)[mask_BT].double()
        tokens = StepTokens(
            log_probs_BT[mask_BT].double(), entropies_N, advantages_N, draws_BT[mask_BT]
        )
        selected_BT = torch.zeros_like(mask_BT)
        is_selected_N = select_tokens(tokens, config.loss)
        selected_BT[mask_BT] = is_selected_N
        share = is_selected_N.double().mean().item()
        rollout = dataclasses.replace(rollout, selected_BT=selected_BT, selected_share=share)
    if not config.entropy_target:
        return PreparedUpdate(rollout, config, config)
    return adapt_entropy_bonus(rollout, config, entropies_N.mean().item())


def adapt_entropy_bonus(rollout: Rollout, config: UpdateConfig, entropy: float) -> PreparedUpdate:
    """The update whose policy has that mean entropy, in nats a token.

    With the coefficient c, the target and the step delta, the update's own coefficient is c where
    the entropy is at most the target, else 0; the next c is c + delta below the target, and
    max(0, c - delta) above (Skywork-OR1, He et al. 2025, arXiv:2505.22312, section 3.2.5, eq. 3.2,
    where c begins at 0, the target is 0.2 and delta 0.005). Eq. 3.2 has no bound of c; the 0 is
    that of the authors' code (Skywork-OR1, core_algos.EntController), whose scripts also have a
    largest c of 0.005 and a delta of 1e-4. The paper and its code change c once a rollout, here and
    in TRL each update does; the code also applies it a step later."""
    coefficient = config.loss.entropy_coefficient
    following = coefficient
    if entropy < config.entropy_target:
        following = coefficient + config.entropy_delta
    if entropy > config.entropy_target:
        following = max(0.0, coefficient - config.entropy_delta)
    applied = coefficient if entropy <= config.entropy_target else 0.0
    return PreparedUpdate(
        rollout,
        with_entropy_coefficient(config, applied),
        with_entropy_coefficient(config, following),
    )


def with_entropy_coefficient(config: UpdateConfig, coefficient: float) -> UpdateConfig:
    """The same configuration with another entropy coefficient."""
    loss = dataclasses.replace(config.loss, entropy_coefficient=coefficient)
    return dataclasses.replace(config, loss=loss)


def has_entropy_bonus(config: UpdateConfig) -> bool:
    """Whether a loss may have an entropy bonus, now or later."""
    return bool(config.entropy_target or config.loss.entropy_coefficient)


def resumed_config(config: UpdateConfig, record: Mapping[str, Any]) -> UpdateConfig:
    """The configuration of a resumed run's next update. `record` is the line of metrics.jsonl of
    the step that it resumes after, empty for a new run. It has the coefficient, digit for
    digit."""
    if not config.entropy_target or not record:
        return config
    return with_entropy_coefficient(config, record["entropy_coefficient_next"])


def entropy_report(config: UpdateConfig, coefficient: float) -> dict[str, float]:
    """The metrics of an entropy bonus: the coefficient of the last update, and that of the next
    one, which `config` has. Empty where there is none."""
    if not has_entropy_bonus(config):
        return {}
    following = config.loss.entropy_coefficient
    return {"entropy_coefficient": coefficient, "entropy_coefficient_next": following}
