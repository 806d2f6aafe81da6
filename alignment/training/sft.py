"""Supervised fine-tuning on worked solutions, response tokens only."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from alignment.core.losses import masked_normalize
from alignment.core.records import Distribution
from alignment.core.text import prompt_token_ids, response_token_ids
from alignment.core.tokens import collate
from alignment.policy.policy import Objective, Policy
from alignment.rollouts.config import derived_seed
from alignment.system.errors import UserError
from alignment.system.terminal import say_once

Example = tuple[tuple[int, ...], tuple[int, ...]]  # Prompt ids, response ids.
VALIDATION_EXAMPLES = 256


@dataclass(frozen=True)
class SFTConfig:
    """How the policy is fine-tuned. The fields are those of the flags of the same names."""

    num_steps: int
    batch_size: int
    curriculum: bool
    learning_rate: float
    warmup_steps: int
    max_grad_norm: float
    eval_interval: int
    seed: int


class SFTData(NamedTuple):
    """Token ids of the examples to train on, and to validate on; and the id that pads them."""

    train: Sequence[Example]
    validation: Sequence[Example]
    pad_token_id: int


def fine_tune(
    policy: Policy,
    data: SFTData,
    config: SFTConfig,
    on_step: Callable[[dict, str], None],
    done: int = 0,
    step_context: Callable[[int], AbstractContextManager] = nullcontext,
) -> None:
    """Make optimiser steps `done` + 1 to `num_steps` on the mean negative log-likelihood of a
    batch's response tokens. `on_step` gets each step's record with words for the user. Each step,
    and its `on_step`, run in `step_context(step)`."""
    words, rest = "", itertools.islice(batches(data.train, config), done, None)
    for step, examples in zip(range(done + 1, config.num_steps + 1), rest, strict=False):
        with step_context(step):
            # of dropout: a resumed run draws what an undisturbed one does
            torch.manual_seed(derived_seed(config.seed, step))
            fall = 1 - 0.9 * (step - config.warmup_steps) / max(
                1, config.num_steps - config.warmup_steps
            )
            rate = config.learning_rate * (
                step / config.warmup_steps if step <= config.warmup_steps else fall
            )
            batch, tokens = (
                collate(*zip(*examples, strict=True), data.pad_token_id),
                sum(len(response) for _, response in examples),
            )
            results = policy.accumulate(
                batch, range(len(examples)), Objective(partial(batch_loss, tokens), entropy=False)
            )
            loss = sum(result.sums["loss"] for result in results)
            grad_norm = policy.clip_gradient(config.max_grad_norm)
            policy.step(rate)
            record = {
                "step": step,
                "loss": loss.item(),
                "grad_norm": grad_norm.item(),
                "learning_rate": rate,
            }
            if step % config.eval_interval == 0 or step == config.num_steps:
                record["validation_loss"] = validation_loss(
                    policy, data.validation, data.pad_token_id
                )
                taken = (
                    f", after {min(1, step * config.batch_size / len(data.train)):.0%} of the"
                    " curriculum" * config.curriculum
                )
                words = f"validation loss {record['validation_loss']:.3f}{taken}"
            on_step(record, words)


def tokenise(pairs: Sequence[tuple[str, str]], tokenizer, context: int) -> list[Example]:
    """Token ids of (prompt, response) pairs, the prompts as samplers encode them, one EOS after
    each response; says what was repaired. Raises `UserError` for a pair beyond the context."""
    # many come up more than once
    prompts, responses = (list(dict.fromkeys(texts)) for texts in zip(*pairs, strict=True))
    encoded = prompt_token_ids(tokenizer, prompts)
    for line in encoded.repairs:
        say_once(line)
    prompt_ids = dict(zip(prompts, map(tuple, encoded.ids), strict=True))
    response_ids = dict(zip(responses, response_token_ids(tokenizer, responses), strict=True))
    examples = [(prompt_ids[prompt], response_ids[response]) for prompt, response in pairs]
    for number, (prompt, response) in enumerate(examples):
        if (tokens := len(prompt) + len(response)) > context:
            fault = (
                f"demonstration {number} has {tokens} tokens, more than the model's context of"
                f" {context}"
            )
            raise UserError(f"{fault}. It begins: {pairs[number][0][:60]!r}")
    return examples


def batches(examples: Sequence[Example], config: SFTConfig) -> Iterator[list[Example]]:
    """Endless batches, pass after pass, shuffled unless --curriculum keeps the order: sorted, each
    would be of one kind."""
    for epoch in itertools.count():
        shuffled = list(examples)
        if not config.curriculum:
            random.Random(f"sft {config.seed} {epoch}").shuffle(shuffled)
        yield from (
            shuffled[start : start + config.batch_size]
            for start in range(0, len(shuffled), config.batch_size)
        )


def batch_loss(tokens: int, rows: Sequence[int], log_probs_bt: torch.Tensor, mask_bt: torch.Tensor):
    """The negative log-likelihood of a micro-batch, divided by the response `tokens` of its whole
    batch."""
    return -masked_normalize(log_probs_bt, mask_bt, tokens), {}


def validation_loss(policy: Policy, examples: Sequence[Example], pad_token_id: int) -> float:
    """Mean negative log-likelihood, in nats a response token, of the first `VALIDATION_EXAMPLES`
    examples."""
    examples = examples[:VALIDATION_EXAMPLES]
    log_probs_BT = policy.log_probs(
        collate(*zip(*examples, strict=True), pad_token_id), Distribution()
    )
    return -log_probs_BT.sum(dtype=torch.float64).item() / sum(
        len(response) for _, response in examples
    )
