"""TODO."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from alignment.args import RLArgs
from alignment.core.advantages import normalize_group_rewards, overlong_penalty
from alignment.core.records import Completion, Group
from alignment.core.rollout import Rollout
from alignment.core.tokens import collate


def overlong_fine(length: int, args: RLArgs) -> float:
    """What is added to the reward of a response of so many tokens, 0 or less."""
    return overlong_penalty(length, args.max_new_tokens, args.overlong_buffer)


def _counts(completion: Completion, args: RLArgs) -> bool:
    return not args.skip_unfinished or completion.finish_reason == "stop"


def make_rollout(groups: Sequence[Group], args: RLArgs, pad: int) -> Rollout:
    """Collate the completions, fine those that are too long, and normalise rewards within each group."""
    rollout = collate_groups(groups, pad)
    fines = [overlong_fine(length, args) for length in rollout.lengths]
    raw_B1 = rollout.raw_rewards_B1 + torch.tensor(fines)[:, None]
    drawn = [completion for group in groups for completion in group.completions]
    counted_B1 = torch.tensor([[_counts(completion, args)] for completion in drawn])
    advantages_B1 = None
    if args.group_size > 1:
        advantages_B1 = normalize_group_rewards(
            raw_B1, args.group_size, args.advantage_eps, args.normalize_by_std, args.baseline, args.std_of, counted_B1
        )
    rows = tuple(counted_B1.squeeze(1).nonzero().squeeze(1).tolist())
    return dataclasses.replace(rollout, raw_rewards_B1=raw_B1, advantages_B1=advantages_B1, trained_rows=rows)


def collate_groups(groups: Sequence[Group], pad: int) -> Rollout:
    """The completions as one batch, without advantages."""
    drawn = [completion for group in groups for completion in group.completions]
    batch = collate([c.prompt_ids for c in drawn], [c.token_ids for c in drawn], pad)
    raw_B1 = torch.tensor([[score["reward"]] for group in groups for score in group.scores], dtype=torch.float32)
    sampler_BT = torch.zeros(batch.labels.shape)
    sampler_BT[batch.response_mask] = torch.tensor([log_prob for c in drawn for log_prob in c.log_probs])
    return Rollout(batch, raw_B1, None, sampler_BT, tuple(range(len(drawn))))


def per_response(values_BT: torch.Tensor, rollout: Rollout, rows: Iterable[int]) -> Iterable[list[float]]:
    """Each row's values at its response tokens; none for those that are not among `rows`."""
    chosen = set(rows)
    every = enumerate(zip(values_BT, rollout.batch.response_mask, strict=True))
    return (values[mask].tolist() if row in chosen else [] for row, (values, mask) in every)
