"""From groups of completions to the batch that updates are made from."""

import dataclasses
from collections.abc import Sequence

import torch

from alignment.core.advantages import AdvantageConfig, group_advantages, overlong_penalty
from alignment.core.records import Completion, Group, Rollout
from alignment.core.tokens import collate
from alignment.rollouts.config import RolloutConfig


def collate_groups(groups: Sequence[Group], config: RolloutConfig, pad_token_id: int) -> Rollout:
    """All completions as one padded batch with their rewards, length penalties included, and without advantages."""
    completions = [completion for group in groups for completion in group.completions]
    batch = collate([c.prompt_ids for c in completions], [c.token_ids for c in completions], pad_token_id)
    rewards_B1 = torch.tensor([[score["reward"]] for group in groups for score in group.scores], dtype=torch.float32)
    penalties_B1 = torch.tensor([length_penalty(completion, config) for completion in completions])[:, None]
    sampler_BT = torch.zeros(batch.labels.shape)
    sampler_BT[batch.response_mask] = torch.tensor([log_prob for c in completions for log_prob in c.log_probs])
    counted_B1 = torch.tensor([[is_counted(completion, config)] for completion in completions])
    return Rollout(batch, rewards_B1 + penalties_B1, counted_B1, sampler_BT)


def with_advantages(rollout: Rollout, config: AdvantageConfig) -> Rollout:
    """The rollout with `advantages_B1`; groups of one response have none."""
    if config.group_size == 1:
        return rollout
    advantages_B1 = group_advantages(rollout.raw_rewards_B1, config, rollout.counted_B1)
    return dataclasses.replace(rollout, advantages_B1=advantages_B1)


def length_penalty(completion: Completion, config: RolloutConfig) -> float:
    """What is added to a completion's reward for its length, 0 or less."""
    return overlong_penalty(len(completion.token_ids), config.sampling.max_new_tokens, config.overlong_buffer)


def is_counted(completion: Completion, config: RolloutConfig) -> bool:
    """Whether a completion enters baselines and updates: with --skip_unfinished those that were cut off do not."""
    return not config.skip_unfinished or completion.finish_reason == "stop"
