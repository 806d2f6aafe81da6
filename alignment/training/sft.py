"""Supervised fine-tuning on worked solutions, response tokens only."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from alignment.core.losses import masked_normalize
from alignment.core.records import Batch, Distribution
from alignment.core.schedules import LearningRate
from alignment.core.text import prompt_token_ids, response_token_ids
from alignment.core.tokens import collate
from alignment.policy.policy import Objective, Policy
from alignment.rollouts.config import derived_seed
from alignment.system.errors import RunStopped, UserError
from alignment.system.terminal import say_once
from alignment.training.update import is_finite

Example = tuple[tuple[int, ...], tuple[int, ...]]  # Prompt ids, response ids.
MAX_BAD_STEPS = 3  # Training stops after so many steps in a row that are not finite.
VALIDATION_EXAMPLES = 256  # The validation loss is that of the first so many.


@dataclass(frozen=True)
class SFTConfig:
    """How the policy is fine-tuned. Each field is the value of the flag with its name."""

    num_steps: int
    batch_size: int
    curriculum: bool
    learning_rate: float
    warmup_steps: int
    max_grad_norm: float
    eval_interval: int
    seed: int
    lr_schedule: str = "linear"

    @property
    def norm_limit(self) -> float:
        """The norm that gradients are scaled down to; infinite where --max_grad_norm is 0."""
        return self.max_grad_norm or math.inf


class SFTData(NamedTuple):
    """The examples to train on, those to validate on, and the token id that pads both."""

    train: Sequence[Example]
    validation: Sequence[Example]
    pad_token_id: int


def fine_tune(
    policy: Policy,
    data: SFTData,
    config: SFTConfig,
    on_step: Callable[[dict, str], bool | None],
    steps_done: int = 0,
    step_context: Callable[[int], AbstractContextManager] = nullcontext,
) -> None:
    """Train the policy from step `steps_done` + 1 to step `num_steps`. A step minimises the mean
    negative log-likelihood of the response tokens of one batch. A step whose loss or gradient is
    not finite changes nothing.

    After each step, `on_step(record, message)` gets the numbers of the step and a message that
    tells the user the last validation loss. The step and this call run inside
    `step_context(step)`. Training ends after a step for which it returns True. Raises `RunStopped`
    after `MAX_BAD_STEPS` steps in a row that changed nothing."""
    message = ""
    bad_steps = 0
    steps = range(steps_done + 1, config.num_steps + 1)
    # A resumed run skips the batches that it has trained on.
    remaining_batches = itertools.islice(batches(data.train, config), steps_done, None)
    for step, examples in zip(steps, remaining_batches, strict=False):
        with step_context(step):
            record = train_batch(policy, examples, data.pad_token_id, config, step)
            bad_steps = bad_steps + 1 if record["bad_updates"] else 0
            if step % config.eval_interval == 0 or step == config.num_steps:
                record["validation_loss"] = validation_loss(
                    policy, data.validation, data.pad_token_id
                )
                message = f"validation loss {record['validation_loss']:.3f}"
                if config.curriculum:
                    share = min(1, step * config.batch_size / len(data.train))
                    message += f", after {share:.0%} of the curriculum"
            is_over = on_step(record, message)
        if bad_steps == MAX_BAD_STEPS:
            raise RunStopped(
                f"{bad_steps} steps in a row, the last of them {step}, had no finite loss and"
                " gradient, and were left out: start anew with a lower --learning_rate, and look"
                " at the examples with --preview"
            )
        if is_over:
            break


def train_batch(
    policy: Policy, examples: Sequence[Example], pad_token_id: int, config: SFTConfig, step: int
) -> dict[str, float | None]:
    """Make the update of one step, unless its loss or gradient is not finite. Returns the numbers
    of the step, None for a loss and a norm that are not finite."""
    # Dropout draws from a seed of the step alone, so that a resumed run draws what an uninterrupted
    # one does.
    torch.manual_seed(derived_seed(config.seed, step))
    micro_batch_loss = partial(batch_loss, count_response_tokens(examples))
    objective = Objective(micro_batch_loss, entropy=False)
    batch = collate_examples(examples, pad_token_id)
    results = list(policy.accumulate(batch, range(len(examples)), objective))
    loss = sum(result.sums["loss"] for result in results)
    grad_norm = policy.clip_gradient(config.norm_limit)
    rate = learning_rate(config, step)
    is_good = is_finite(grad_norm, results)
    if is_good:
        policy.step(rate)
    else:
        policy.drop_gradient()
    return {
        "step": step,
        "loss": torch.as_tensor(loss).item() if is_good else None,
        "grad_norm": grad_norm.item() if is_good else None,
        "learning_rate": rate,
        "bad_updates": int(not is_good),
    }


def best_step(accuracies: Mapping[int, float]) -> int:
    """The first step with the highest accuracy of some steps; the last where all are 0, of which
    the one that has learnt most is not known."""
    if not any(accuracies.values()):
        return max(accuracies)
    return min(accuracies, key=lambda step: (-accuracies[step], step))


def is_patience_over(accuracies: Mapping[int, float], patience: int) -> bool:
    """Whether the accuracies of some steps have `patience` (0: never) after the best. An accuracy
    of 0, as before anything is learnt, is not one to wait after."""
    if not patience or not any(accuracies.values()):
        return False
    best = best_step(accuracies)
    return sum(step > best for step in accuracies) >= patience


def learning_rate(config: SFTConfig, step: int) -> float:
    """The learning rate of a step, of which the first is number 1."""
    rate = LearningRate(
        config.learning_rate, config.warmup_steps, config.lr_schedule, config.num_steps
    )
    return rate.of_update(step)


def collate_examples(examples: Sequence[Example], pad_token_id: int) -> Batch:
    """The examples as one right-padded batch."""
    prompts = [prompt for prompt, _ in examples]
    responses = [response for _, response in examples]
    return collate(prompts, responses, pad_token_id)


def count_response_tokens(examples: Sequence[Example]) -> int:
    """The number of response tokens, which are the ones that the loss counts."""
    return sum(len(response) for _, response in examples)


def tokenise(pairs: Sequence[tuple[str, str]], tokenizer, context: int) -> list[Example]:
    """Token ids of (prompt, response) pairs. Prompts are encoded as samplers encode them, and one
    EOS ends each response.

    Prints a line for each kind of special token that `prompt_token_ids` had to remove. Raises
    `UserError` for a pair of more than `context` tokens."""
    # Many texts occur more than once; each is encoded once.
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
    """Batches without end, one epoch after another. Every epoch is shuffled anew, because the
    examples of a sorted file would make batches of one kind each; --curriculum keeps the order of
    the file."""
    for epoch in itertools.count():
        ordered = list(examples)
        if not config.curriculum:
            random.Random(f"sft {config.seed} {epoch}").shuffle(ordered)
        for start in range(0, len(ordered), config.batch_size):
            yield ordered[start : start + config.batch_size]


def batch_loss(
    batch_tokens: int, rows: Sequence[int], log_probs_bt: torch.Tensor, mask_bt: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The negative log-likelihood of a micro-batch, divided by the number of response tokens of the
    whole batch, so that micro-batches add up to the batch's mean. It reports no other sums, and
    needs no row numbers: they are there because an `Objective` passes them."""
    return -masked_normalize(log_probs_bt, mask_bt, batch_tokens), {}


def validation_loss(policy: Policy, examples: Sequence[Example], pad_token_id: int) -> float:
    """Mean negative log-likelihood, in nats per response token, of the first `VALIDATION_EXAMPLES`
    examples."""
    examples = examples[:VALIDATION_EXAMPLES]
    batch = collate_examples(examples, pad_token_id)
    # Prompts and padding have log-probs of 0.
    log_probs_BT = policy.log_probs(batch, Distribution())
    return -log_probs_BT.sum(dtype=torch.float64).item() / count_response_tokens(examples)
