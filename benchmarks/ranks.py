"""A policy of several processes against one process: gradients, log-probs, a step, and checkpoints
of every kind.

uv run -m benchmarks.ranks --ranks 4 torchrun --nnodes 2 --nproc_per_node 2 ... -m benchmarks.ranks
# hybrid sharding, two machines
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from alignment.args import RLArgs, from_preset
from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LOSSES, NORMALIZATIONS
from alignment.core.records import Completion, Group, Problem, Rollout
from alignment.data.embedded import embedded_model
from alignment.policy.policy import POLICIES, Objective, Policy, PolicyConfig, open_policy
from alignment.policy.single_device import read_parts
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.runs.run_folder import TRAINER
from alignment.system.torchrun import PROCESSES_HERE, followed
from alignment.training.preparation import prepare_update
from alignment.training.sft import batch_loss
from alignment.training.update import rollout_objective, rows_with_gradient

VOCABULARY, TOLERANCE = 60, 1e-5
GROUP_SIZE = 4
# two names of one CPU; other kinds have one a rank
DEVICES = {
    "single": ("cpu",),
    "layer_split": ("cpu", "cpu:0"),
}


def made_up(prompts: int, silent: int) -> Rollout:
    """Groups of random tokens; `silent` of them have equal rewards. Old, reference and sampler
    log-probs are near each other."""
    rng = random.Random(prompts)
    groups = []
    for index in range(prompts):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(3, 12)))
        ids = [
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20)))
            for _ in range(GROUP_SIZE)
        ]
        completions = tuple(
            Completion(prompt, row, (-4.0,) * len(row), "", "stop", 0) for row in ids
        )
        rewards = [1.0 if index < silent else float(i % 3 == 0) for i in range(GROUP_SIZE)]
        scores = tuple(
            {"reward": reward, "format_reward": 1.0, "answer_reward": reward} for reward in rewards
        )
        groups.append(Group(Problem("", "", "", ""), completions, scores))
    args = from_preset(RLArgs, "tiny", group_size=GROUP_SIZE, prompts_per_rollout=prompts)
    rollout = with_advantages(
        collate_groups(groups, args.rollout_config, 0), AdvantageConfig(group_size=GROUP_SIZE)
    )
    noise = torch.Generator().manual_seed(1)

    def near() -> torch.Tensor:
        return (
            -4 + torch.randn(rollout.batch.labels.shape, generator=noise) / 10
        ) * rollout.batch.response_mask

    return dataclasses.replace(
        rollout, old_log_probs_BT=near(), reference_log_probs_BT=near(), sampler_log_probs_BT=near()
    )


# What an update prepares by a pass of all its rows, whichever ranks have them.
PREPARED: tuple[dict[str, Any], ...] = (
    {"entropy_coefficient": 0.05},
    {"token_selection": "top_entropy"},
    {
        "token_selection": "clip_cov",
        "selected_share": 0.05,
        "covariance_low": 0.01,
        "covariance_high": 0.5,
    },
    {"token_selection": "kl_cov", "selected_share": 0.1},
)


def objectives(policy: Policy) -> Iterator[tuple[str, Rollout, list[int], Objective]]:
    """(name, rollout, rows with a gradient, objective) of every loss and normalisation, of special
    cases, and of what `policy` prepares."""
    base = from_preset(RLArgs, "tiny", group_size=GROUP_SIZE, epochs_per_rollout=2).update_config
    usual = made_up(prompts=7, silent=2)
    cases = [
        (loss, norm, usual, 0.0, "none") for loss, norm in itertools.product(LOSSES, NORMALIZATIONS)
    ]
    cases += [
        ("grpo_clip", "token_mean", usual, 0.05, "none"),
        ("grpo_clip", "sequence_mean", usual, 0.0, "token_truncate"),
    ]
    # ranks without rows
    cases += [("grpo_clip", "sequence_mean", made_up(prompts=1, silent=0), 0.0, "none")]
    # no rows at all
    cases += [("grpo_clip", "sequence_mean", made_up(prompts=3, silent=3), 0.0, "none")]
    for name, norm, rollout, beta, correction in cases:
        numbers = {"loss_normalization": norm, "beta": beta, "sampler_correction": correction}
        config = dataclasses.replace(
            base, loss=dataclasses.replace(base.loss, loss=LOSSES[name], **numbers)
        )
        rows = rows_with_gradient(rollout, config)
        words = (
            f"{name}, {norm}, {len(rollout.lengths) // GROUP_SIZE} prompts, KL {beta}, correction"
            f" {correction}"
        )
        yield words, rollout, rows, rollout_objective(rollout, range(len(rollout.lengths)), config)
    for numbers in PREPARED:
        config = dataclasses.replace(base, loss=dataclasses.replace(base.loss, **numbers))
        every_row = range(len(usual.lengths))
        prepared = prepare_update(policy, usual, every_row, config, 1)
        rows = rows_with_gradient(usual, config)
        objective = rollout_objective(prepared.rollout, every_row, config)
        yield f"{numbers}", usual, rows, objective
    yield (
        "SFT",
        usual,
        list(range(len(usual.lengths))),
        Objective(partial(batch_loss, 100), entropy=False),
    )


def measured(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """What all kinds of policy must agree on: gradients of every objective, then after a step
    log-probs and weights. Adapters, where there are any, are random ones: where B is 0, A has no
    gradient."""
    policy.use_adapters("random")
    for name, rollout, rows, objective in objectives(policy):
        loss = sum(
            result.sums["loss"].double()
            for result in policy.accumulate(rollout.batch, rows, objective)
        )
        yield f"gradient: {name}", policy.gradient()
        yield f"loss: {name}", torch.as_tensor(loss, dtype=torch.float64)
        yield f"norm: {name}", policy.clip_gradient(1.0).detach()
        policy.drop_gradient()
    for _ in policy.accumulate(rollout.batch, rows, objective):
        pass
    policy.clip_gradient(1.0)
    policy.step(1e-4)
    yield "log-probs after a step", policy.log_probs(rollout.batch, objective.distribution)
    yield (
        "log-probs of the base after a step",
        policy.base_log_probs(rollout.batch, objective.distribution),
    )
    yield (
        "weights after a step",
        torch.cat([tensor.detach().flatten() for _, tensor in policy.weights()]),
    )


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, relative to that of `one` where this is not 0."""
    return ((one - other).norm() / (one.norm() or 1)).item()


def saved(
    policy: Policy, folder: Path, tokenizer, parameters: list[torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The weights and the optimiser's state that a policy writes to a folder, unsharded."""
    policy.save(folder, tokenizer)
    (folder / TRAINER).mkdir()
    policy.save_optimizer(folder / TRAINER)
    state = read_parts(folder / TRAINER, parameters)
    adapters = {
        name: tensor
        for file in folder.glob("adapter/*.safetensors")
        for name, tensor in load_file(file).items()
    }
    return {**load_file(folder / "model.safetensors"), **adapters, **state}


def reopened(
    policy: Policy, config: PolicyConfig, kinds: list[str], tokenizer
) -> Iterator[tuple[str, bool]]:
    """Whether each kind of policy reads a checkpoint of `policy` and writes the same bits again,
    adapters included."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        single = open_policy("single", dataclasses.replace(config, devices=config.devices[:1]))
        parameters = [
            parameter for group in single.optimizer.param_groups for parameter in group["params"]
        ]
        want = saved(policy, folder / "0", tokenizer, parameters)
        for number, kind in enumerate(kinds, start=1):
            again = dataclasses.replace(config, devices=DEVICES.get(kind, config.devices))
            checkpoint = (
                {"checkpoint": str(folder / "0")}
                if config.lora_rank
                else {"model_path": str(folder / "0")}
            )
            again = open_policy(kind, dataclasses.replace(again, **checkpoint))
            again.load_optimizer(folder / "0" / TRAINER)
            found = saved(again, folder / str(number), tokenizer, parameters)
            yield (
                kind,
                want.keys() == found.keys()
                and all(torch.equal(want[key], found[key]) for key in want),
            )


RANKED = tuple(name for name, kind in POLICIES.items() if kind.ranked)


def main(ranks: int = 0, kinds: tuple[str, ...] = RANKED, lora_rank: int = 0):
    """Print the largest differences of each kind; exit code 1 beyond 1e-5. `ranks`: on this
    machine; 0: torchrun's."""
    if followed(60):
        return
    from alignment.model.loading import load_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = str(embedded_model("tiny", folder))
        config = PolicyConfig(
            path,
            ("cpu",) * (PROCESSES_HERE or ranks),
            "float32",
            micro_batch_tokens=64,
            lora_rank=lora_rank,
        )
        world = int(os.environ.get("WORLD_SIZE", ranks))
        single = open_policy("single", dataclasses.replace(config, devices=("cpu",)))
        want = dict(measured(single))
        table = Table(
            title=(
                f"{world} processes against one: largest relative difference of {len(want)}"
                " quantities"
            )
        )
        for heading in (
            "kind",
            "gradient",
            "loss",
            "norm",
            "after a step",
            "of",
            "checkpoints read to the bit",
        ):
            table.add_column(heading)
        worst = 0.0
        for kind in kinds:
            policy = open_policy(
                kind, dataclasses.replace(config, devices=DEVICES.get(kind, config.devices))
            )
            found = {name: difference(want[name], value) for name, value in measured(policy)}
            parts = {
                part: max(v for n, v in found.items() if part in n)
                for part in ("gradient", "loss", "norm", "after a step")
            }
            same = dict(
                reopened(policy, config, ["single", "layer_split", *kinds], load_tokenizer(path))
            )
            worst = max(worst, *found.values(), *(0.0 if ok else 1.0 for ok in same.values()))
            name = max(found, key=lambda name: found[name])
            table.add_row(kind, *(f"{value:.1e}" for value in parts.values()), name, str(same))
    Console(width=160).print(table)
    if worst > TOLERANCE:
        sys.exit(f"a difference of {worst:.1e}, more than {TOLERANCE}")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
