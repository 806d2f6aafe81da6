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
from alignment.core.records import Batch, Distribution
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
    words = ""
    later_batches = itertools.islice(batches(data.train, config), done, None)
    for step, examples in zip(range(done + 1, config.num_steps + 1), later_batches, strict=False):
        with step_context(step):
            # of dropout: a resumed run draws what an undisturbed one does
            torch.manual_seed(derived_seed(config.seed, step))
            objective = Objective(partial(batch_loss, response_tokens(examples)), entropy=False)
            batch = collate_examples(examples, data.pad_token_id)
            results = policy.accumulate(batch, range(len(examples)), objective)
            loss = sum(result.sums["loss"] for result in results)
            grad_norm = policy.clip_gradient(config.max_grad_norm)
            rate = learning_rate(config, step)
            policy.step(rate)
            record = {
                "step": step,
                "loss": torch.as_tensor(loss).item(),
                "grad_norm": grad_norm.item(),
                "learning_rate": rate,
            }
            if step % config.eval_interval == 0 or step == config.num_steps:
                record["validation_loss"] = validation_loss(
                    policy, data.validation, data.pad_token_id
                )
                words = f"validation loss {record['validation_loss']:.3f}"
                if config.curriculum:
                    share = min(1, step * config.batch_size / len(data.train))
                    words += f", after {share:.0%} of the curriculum"
            on_step(record, words)


def learning_rate(config: SFTConfig, step: int) -> float:
    """Linear warm-up over `warmup_steps`, then a linear fall to a tenth at the last step. `step`
    starts at 1."""
    if step <= config.warmup_steps:
        return config.learning_rate * (step / config.warmup_steps)
    falling_steps = max(1, config.num_steps - config.warmup_steps)
    return config.learning_rate * (1 - 0.9 * (step - config.warmup_steps) / falling_steps)


def collate_examples(examples: Sequence[Example], pad_token_id: int) -> Batch:
    """The examples as one right-padded batch."""
    prompts = [prompt for prompt, _ in examples]
    responses = [response for _, response in examples]
    return collate(prompts, responses, pad_token_id)


def response_tokens(examples: Sequence[Example]) -> int:
    """The number of tokens that are trained."""
    return sum(len(response) for _, response in examples)


def tokenise(pairs: Sequence[tuple[str, str]], tokenizer, context: int) -> list[Example]:
    """Token ids of (prompt, response) pairs, the prompts as samplers encode them, one EOS after
    each response.

    Prints what was repaired. Raises `UserError` for a pair beyond the context."""
    # Each different text is encoded once: many come up more than once.
    prompts = list(dict.fromkeys(prompt for prompt, _ in pairs))
    responses = list(dict.fromkeys(response for _, response in pairs))
    encoded = prompt_token_ids(tokenizer, prompts)
    for line in encoded.repairs:
        say_once(line)
    prompt_ids = dict(zip(prompts, map(tuple, encoded.ids), strict=True))
    response_ids = dict(zip(responses, response_token_ids(tokenizer, responses), strict=True))
    examples = [(prompt_ids[prompt], response_ids[response]) for prompt, response in pairs]
    for number, (prompt, response) in enumerate(examples):
        tokens = len(prompt) + len(response)
        if tokens > context:
            fault = (
                f"demonstration {number} has {tokens} tokens, more than the model's context of"
                f" {context}"
            )
            raise UserError(f"{fault}. It begins: {pairs[number][0][:60]!r}")
    return examples


def batches(examples: Sequence[Example], config: SFTConfig) -> Iterator[list[Example]]:
    """Endless batches, pass after pass, shuffled unless --curriculum keeps the order: in the order
    of a sorted file, each batch would be of one kind."""
    for epoch in itertools.count():
        ordered = list(examples)
        if not config.curriculum:
            random.Random(f"sft {config.seed} {epoch}").shuffle(ordered)
        for start in range(0, len(ordered), config.batch_size):
            yield ordered[start : start + config.batch_size]


def batch_loss(tokens: int, rows: Sequence[int], log_probs_bt: torch.Tensor, mask_bt: torch.Tensor):
    """The negative log-likelihood of a micro-batch, divided by the response `tokens` of its whole
    batch."""
    return -masked_normalize(log_probs_bt, mask_bt, tokens), {}


def validation_loss(policy: Policy, examples: Sequence[Example], pad_token_id: int) -> float:
    """Mean negative log-likelihood, in nats a response token, of the first `VALIDATION_EXAMPLES`
    examples."""
    examples = examples[:VALIDATION_EXAMPLES]
    batch = collate_examples(examples, pad_token_id)
    log_probs_BT = policy.log_probs(batch, Distribution())
    return -log_probs_BT.sum(dtype=torch.float64).item() / response_tokens(examples)
