"""What benchmarks compute on: rewards, scores, groups and batches that are made, not sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from alignment.core.records import Batch, Completion, Group, Problem, Score
from alignment.core.tokens import collate

FILLER_ID = 7
"""The token id of which made prompts and responses consist."""


def parity(response: str, ground_truth: str) -> Score:
    """The reward 1 for a response of an odd number of characters: nearly every group then has a
    gradient, the case in which an update can leave out least."""
    return make_score(float(len(response) % 2))


def make_score(reward: float) -> Score:
    """A reward, as a reward function returns it."""
    return {"reward": reward, "format_reward": 0.0, "answer_reward": 0.0}


def alternating_scores(group_size: int) -> tuple[Score, ...]:
    """Rewards of 0 and 1 by turns: every response of the group has a gradient."""
    return tuple(make_score(float(number % 2)) for number in range(group_size))


def equal_scores(group_size: int) -> tuple[Score, ...]:
    """Rewards of 1: the group has no gradient."""
    return tuple(make_score(1.0) for _ in range(group_size))


def random_ids(rng: random.Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    """So many random token ids below `vocabulary`."""
    return tuple(rng.randrange(vocabulary) for _ in range(tokens))


def make_group(
    prompt_ids: tuple[int, ...],
    responses: Sequence[tuple[int, ...]],
    scores: tuple[Score, ...],
    log_prob: float,
) -> Group:
    """The group of a prompt's responses, each of whose tokens was sampled at this log-prob, in
    nats."""
    completions = []
    for token_ids in responses:
        log_probs = (log_prob,) * len(token_ids)
        completions.append(Completion(prompt_ids, token_ids, log_probs, "", "stop", 0))
    return Group(Problem("", "", "", ""), tuple(completions), scores)


def make_batch(groups: int, rows: int, prompt: int, response: int, first_ids: int) -> Batch:
    """`groups` groups of `rows` responses, all of the same lengths in tokens.

    A prompt's first two ids tell it from the other groups' prompts; each is one of `first_ids`.
    """
    prompts = []
    for number in range(groups):
        first_two = [5 + number % first_ids, 5 + number // first_ids]
        prompt_ids = [*first_two, *[FILLER_ID] * (prompt - 2)]
        prompts += [prompt_ids] * rows
    responses = [[FILLER_ID] * response] * len(prompts)
    return collate(prompts, responses, pad_token_id=0)


def negative_log_likelihood(
    rows: Sequence[int], log_probs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, dict]:
    """The loss of a `policy.Objective`, summed over response tokens, and no statistics."""
    return -(log_probs_BT * mask_BT).sum(), {}
