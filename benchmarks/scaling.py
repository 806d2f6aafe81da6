"""How does a step's time grow with group size, response length and depth?

    uv run -m benchmarks.scaling

Seconds of sampling and of the update of a step of 8 prompts of a tiny model on the CPU, medians by
turns in one process, at each size of `SWEEPS` (the other two as in `BASE`); and of each sweep the
exponent of seconds over size, by least squares of logarithms, and that of the last doubling alone.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from rich.console import Console
from transformers import AutoModelForCausalLM

from alignment.args import RLArgs, from_preset
from alignment.core.records import Completion, Group, SamplingConfig
from alignment.data.embedded import embedded_model
from alignment.data.tasks import find_task
from alignment.model.loading import load_config, load_tokenizer
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.sampling.transformers import TransformersSampler
from alignment.system.terminal import make_table
from alignment.training.update import update
from benchmarks.measuring import take_turns
from benchmarks.workloads import alternating_scores

PROMPTS = 8
SWEEPS = {
    "group_size": (2, 4, 8, 16, 32, 64),
    "max_new_tokens": (8, 16, 32, 64, 128),
    "layers": (1, 2, 4, 8, 16),
}
NUMBERS = (
    "sampling, s",
    "update, s",
    "exponent, sampling",
    "update",
    "step",
    "last doubling",
)


@dataclass(frozen=True)
class Size:
    """What is varied."""

    group_size: int = 8
    max_new_tokens: int = 32
    layers: int = 2


BASE = Size()


@dataclass(frozen=True)
class StepSeconds:
    """What the two halves of a step took."""

    sampling: float
    update: float

    @property
    def step(self) -> float:
        return self.sampling + self.update


class Step:
    """A model of one size, and steps of it."""

    def __init__(self, size: Size, hidden: int):
        self.args = from_preset(
            RLArgs,
            "tiny",
            group_size=size.group_size,
            max_new_tokens=size.max_new_tokens,
            prompts_per_rollout=PROMPTS,
            train_mini_batch_size=0,
            max_sampler_mismatch=1e9,
        )
        base = str(embedded_model("tiny", tempfile.gettempdir()))
        config = load_config(base)
        config.num_hidden_layers = size.layers
        config.layer_types = ["full_attention"] * size.layers
        config.hidden_size = hidden
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            self.policy = SingleDevicePolicy(
                PolicyConfig(folder, ("cpu",), "float32", micro_batch_tokens=16384)
            )
        self.sampler = TransformersSampler(self.policy.model, load_tokenizer(base), context=1024)
        self.problems = problems_of_step(
            find_task("arithmetic").problems("train", ""), PROMPTS, data_seed=0, step=1
        )

    def take(self) -> StepSeconds:
        """Sample, and make an update in which every response has a gradient."""
        start = time.perf_counter()
        completions = self._sample()
        sampled = time.perf_counter()
        self._update(completions)
        return StepSeconds(sampled - start, time.perf_counter() - sampled)

    def _sample(self) -> list[list[Completion]]:
        sampling = SamplingConfig(
            n=self.args.group_size, max_new_tokens=self.args.max_new_tokens, stop=()
        )
        return self.sampler.sample([problem.prompt for problem in self.problems], sampling)

    def _update(self, completions: Sequence[Sequence[Completion]]) -> None:
        scores = alternating_scores(self.args.group_size)
        groups = []
        for problem, own in zip(self.problems, completions, strict=True):
            groups.append(Group(problem, tuple(own), scores))
        rollout = collate_groups(groups, self.args.rollout_config, 0)
        config = self.args.update_config
        update(self.policy, with_advantages(rollout, config.advantage), config, 1)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def measure_sweep(varied: str, repeats: int, hidden: int) -> list[StepSeconds]:
    """Median seconds at each size of a sweep, by turns."""
    turns = {}
    for size in SWEEPS[varied]:
        step = Step(dataclasses.replace(BASE, **{varied: size}), hidden)
        turns[str(size)] = step.take
    medians = []
    for steps in take_turns(turns, repeats).values():
        sampling = statistics.median(step.sampling for step in steps)
        medians.append(StepSeconds(sampling, statistics.median(step.update for step in steps)))
    return medians


def format_row(varied: str, medians: Sequence[StepSeconds]) -> list[str]:
    """The row of a sweep: its sizes, seconds at each, and exponents."""
    sizes = SWEEPS[varied]
    sampling = [step.sampling for step in medians]
    updates = [step.update for step in medians]
    steps = [step.step for step in medians]
    exponents = [exponent(sizes, seconds) for seconds in (sampling, updates, steps)]
    # each size is twice the one before
    last_doubling = math.log2(steps[-1] / steps[-2])
    return [
        varied,
        " ".join(map(str, sizes)),
        " ".join(f"{seconds:.2f}" for seconds in sampling),
        " ".join(f"{seconds:.2f}" for seconds in updates),
        *(f"{value:.2f}" for value in exponents),
        f"{last_doubling:.2f}",
    ]


def main(repeats: int = 5, hidden: int = 128) -> None:
    """Print a row for each sweep.

    Args:
        repeats: Steps at each size that count; one before them warms up.
        hidden: Width of the model.
    """
    rows = []
    for varied in SWEEPS:
        rows.append(format_row(varied, measure_sweep(varied, repeats, hidden)))
    title = (
        f"a step of {PROMPTS} prompts, a tiny model of width {hidden}; medians of {repeats}, by"
        " turns"
    )
    table = make_table(title, ("varied", "sizes", *NUMBERS), rows, numbers=NUMBERS)
    Console(width=170).print(table)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
