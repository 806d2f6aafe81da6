"""How a step's time grows with group size, response length and depth: an exponent each, fitted by
least squares of logarithms.

uv run -m benchmarks.scaling
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from alignment.args import RLArgs, from_preset
from alignment.core.records import Group, SamplingConfig
from alignment.data.embedded import embedded_model
from alignment.data.tasks import find_task
from alignment.model.loading import load_config, load_tokenizer
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.sampling.transformers import TransformersSampler
from alignment.training.update import update

SWEEPS = {
    "group_size": (2, 4, 8, 16, 32, 64),
    "max_new_tokens": (8, 16, 32, 64, 128),
    "layers": (1, 2, 4, 8, 16),
}
BASE = {"group_size": 8, "max_new_tokens": 32, "layers": 2}


def main(repeats: int = 5, hidden: int = 128) -> None:
    """Print seconds of sampling and update at each size, and the exponents."""
    table = Table(
        title=f"a step of 8 prompts, a tiny model of width {hidden}; medians of {repeats}, by turns"
    )
    for heading in (
        "varied",
        "sizes",
        "sampling, s",
        "update, s",
        "exponent, sampling",
        "update",
        "step",
        "last doubling",
    ):
        table.add_column(heading, justify="left" if heading in ("varied", "sizes") else "right")
    for name, sizes in SWEEPS.items():
        steps = [Step(**{**BASE, name: size}, hidden=hidden) for size in sizes]
        # [repeats, sizes, 2]
        seconds = np.array([[step.take() for step in steps] for _ in range(repeats + 1)])[1:]
        medians = np.array(
            [
                [statistics.median(seconds[:, i, phase]) for phase in (0, 1)]
                for i in range(len(sizes))
            ]
        )
        total = medians.sum(axis=1)
        table.add_row(
            name,
            " ".join(map(str, sizes)),
            " ".join(f"{s:.2f}" for s in medians[:, 0]),
            " ".join(f"{s:.2f}" for s in medians[:, 1]),
            *(f"{exponent(sizes, each):.2f}" for each in (*medians.T, total)),
            f"{math.log2(total[-1] / total[-2]):.2f}",
        )
    Console(width=170).print(table)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


class Step:
    """One size's model, and steps of it."""

    def __init__(self, group_size: int, max_new_tokens: int, layers: int, hidden: int):
        from transformers import AutoModelForCausalLM

        self.args = from_preset(
            RLArgs,
            "tiny",
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            prompts_per_rollout=8,
            train_mini_batch_size=0,
            max_sampler_mismatch=1e9,
        )
        base = str(embedded_model("tiny", tempfile.gettempdir()))
        config = load_config(base)
        config.num_hidden_layers, config.layer_types, config.hidden_size = (
            layers,
            ["full_attention"] * layers,
            hidden,
        )
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            self.policy = SingleDevicePolicy(
                PolicyConfig(folder, ("cpu",), "float32", micro_batch_tokens=16384)
            )
        self.sampler = TransformersSampler(self.policy.model, load_tokenizer(base), context=1024)
        task = find_task("arithmetic")
        self.problems = problems_of_step(task.problems("train", ""), 8, 0, 1)

    def take(self) -> tuple[float, float]:
        """Seconds of sampling and of the update."""
        start = time.perf_counter()
        sampling = SamplingConfig(
            n=self.args.group_size, max_new_tokens=self.args.max_new_tokens, stop=()
        )
        completions = self.sampler.sample([problem.prompt for problem in self.problems], sampling)
        sampled = time.perf_counter()
        scores = [
            {"reward": float(i % 2), "format_reward": 0.0, "answer_reward": 0.0}
            for i in range(self.args.group_size)
        ]
        groups = [
            Group(p, tuple(own), tuple(scores))
            for p, own in zip(self.problems, completions, strict=True)
        ]
        rollout = with_advantages(
            collate_groups(groups, self.args.rollout_config, 0), self.args.update_config.advantage
        )
        update(self.policy, rollout, self.args.update_config, 1)
        return sampled - start, time.perf_counter() - sampled


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
