"""Does a policy of several processes compute what one process does?

    uv run -m benchmarks.ranks --ranks 4
    torchrun --nnodes 2 --nproc_per_node 2 ... -m benchmarks.ranks

Relative differences of gradients, losses and gradient norms (every loss and normalisation, special
cases, what an update prepares, SFT), then of log-probs and weights after an optimiser step, for
each kind of policy with ranks, on CPUs in float32, on made-up groups; and whether every kind reads
the others' checkpoints to the bit. Two machines by torchrun test hybrid sharding. Exit code 1 where
a difference is beyond 1e-5 or a checkpoint is not the same.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from safetensors.torch import load_file

from alignment.args import RLArgs, from_preset
from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LOSSES, NORMALIZATIONS
from alignment.core.records import Rollout
from alignment.data.embedded import embedded_model
from alignment.policy.policy import POLICIES, Objective, Policy, PolicyConfig, open_policy
from alignment.policy.single_device import read_parts
from alignment.rollouts.config import UpdateConfig
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.runs.run_folder import TRAINER
from alignment.system.terminal import make_table
from alignment.system.torchrun import PROCESSES, PROCESSES_HERE, followed
from alignment.training.preparation import prepare_update
from alignment.training.sft import batch_loss
from alignment.training.update import rollout_objective, rows_with_gradient
from benchmarks.workloads import equal_scores, make_group, make_score, random_ids

VOCABULARY = 60
TOLERANCE = 1e-5
GROUP_SIZE = 4
LOG_PROB = -4.0  # of a made-up token, in nats
RANKED = tuple(name for name, kind in POLICIES.items() if kind.ranked)
DEVICES = {
    "single": ("cpu",),
    "layer_split": ("cpu", "cpu:0"),
}
"""Of a kind without ranks; two names of one CPU. Other kinds have a device for each rank."""
QUANTITIES = ("gradient", "loss", "norm", "after a step")
"""What the names of quantities have in them."""


# --- what is computed -----------------------------------------------------------------------------


def make_rollout(prompts: int, silent: int) -> Rollout:
    """Groups of random tokens; the first `silent` of them have equal rewards. Old, reference and
    sampler log-probs are near each other."""
    rng = random.Random(prompts)
    groups = []
    for index in range(prompts):
        prompt_ids = random_ids(rng, rng.randint(3, 12), VOCABULARY)
        responses = []
        for _ in range(GROUP_SIZE):
            responses.append(random_ids(rng, rng.randint(1, 20), VOCABULARY))
        scores = equal_scores(GROUP_SIZE)
        if index >= silent:
            scores = tuple(make_score(float(number % 3 == 0)) for number in range(GROUP_SIZE))
        groups.append(make_group(prompt_ids, responses, scores, LOG_PROB))
    args = from_preset(RLArgs, "tiny", group_size=GROUP_SIZE, prompts_per_rollout=prompts)
    collated = collate_groups(groups, args.rollout_config, 0)
    rollout = with_advantages(collated, AdvantageConfig(group_size=GROUP_SIZE))

    generator = torch.Generator().manual_seed(1)
    mask_BT = rollout.batch.response_mask

    def near_log_probs() -> torch.Tensor:
        noise_BT = torch.randn(mask_BT.shape, generator=generator) / 10
        return (LOG_PROB + noise_BT) * mask_BT

    return replace(
        rollout,
        old_log_probs_BT=near_log_probs(),
        reference_log_probs_BT=near_log_probs(),
        sampler_log_probs_BT=near_log_probs(),
    )


@dataclass(frozen=True)
class Task:
    """An objective, and the rows of a rollout that have a gradient of it."""

    name: str
    rollout: Rollout
    rows: list[int]
    objective: Objective


def base_config() -> UpdateConfig:
    return from_preset(RLArgs, "tiny", group_size=GROUP_SIZE, epochs_per_rollout=2).update_config


def loss_task(
    rollout: Rollout,
    loss: str,
    normalization: str,
    beta: float = 0.0,
    correction: str = "none",
) -> Task:
    """The task of a loss with this normalisation, KL penalty and correction of the sampler."""
    base = base_config()
    config = replace(
        base,
        loss=replace(
            base.loss,
            loss=LOSSES[loss],
            loss_normalization=normalization,
            beta=beta,
            sampler_correction=correction,
        ),
    )
    every_row = range(len(rollout.lengths))
    prompts = len(every_row) // GROUP_SIZE
    name = f"{loss}, {normalization}, {prompts} prompts, KL {beta}, correction {correction}"
    objective = rollout_objective(rollout, every_row, config)
    return Task(name, rollout, rows_with_gradient(rollout, config), objective)


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
"""Settings of a loss for which an update first makes a pass of all its rows, whichever ranks have
them."""


def prepared_task(policy: Policy, rollout: Rollout, settings: dict[str, Any]) -> Task:
    """The task of a loss with these settings, after the policy's pass for it."""
    base = base_config()
    config = replace(base, loss=replace(base.loss, **settings))
    every_row = range(len(rollout.lengths))
    prepared = prepare_update(policy, rollout, every_row, config, 1)
    objective = rollout_objective(prepared.rollout, every_row, config)
    return Task(str(settings), rollout, rows_with_gradient(rollout, config), objective)


def make_tasks(policy: Policy, losses: Sequence[str]) -> Iterator[Task]:
    """Each of `losses`, every normalisation, special cases, what `policy` prepares, and at last
    SFT.

    A loss is a function of a token or a response, and a normalisation a sum over all of them: no
    pair of the two needs a comparison of its own.
    """
    rollout = make_rollout(prompts=7, silent=2)
    for loss in losses:
        yield loss_task(rollout, loss, "token_mean")
    for normalization in NORMALIZATIONS:
        yield loss_task(rollout, "grpo_clip", normalization)
    yield loss_task(rollout, "grpo_clip", "token_mean", beta=0.05)
    yield loss_task(rollout, "grpo_clip", "sequence_mean", correction="token_truncate")
    # ranks without rows
    yield loss_task(make_rollout(prompts=1, silent=0), "grpo_clip", "sequence_mean")
    # no rows at all
    yield loss_task(make_rollout(prompts=3, silent=3), "grpo_clip", "sequence_mean")
    for settings in PREPARED:
        yield prepared_task(policy, rollout, settings)
    sft = Objective(partial(batch_loss, 100), entropy=False)
    yield Task("SFT", rollout, list(range(len(rollout.lengths))), sft)


def measure(policy: Policy, losses: Sequence[str]) -> dict[str, torch.Tensor]:
    """What all kinds of policy must agree on, by name: gradient, loss and norm of every task, then
    log-probs and weights after a step of the last one.

    Adapters, where there are any, are random ones: where B is 0, A has no gradient.
    """
    policy.use_adapters("random")
    values = {}
    for task in make_tasks(policy, losses):
        loss = 0.0
        for result in policy.accumulate(task.rollout.batch, task.rows, task.objective):
            loss += float(result.sums["loss"])
        values[f"gradient: {task.name}"] = policy.gradient()
        values[f"loss: {task.name}"] = torch.tensor(loss, dtype=torch.float64)
        values[f"norm: {task.name}"] = policy.clip_gradient(1.0).detach()
        policy.drop_gradient()

    batch = task.rollout.batch
    distribution = task.objective.distribution
    for _ in policy.accumulate(batch, task.rows, task.objective):
        pass
    policy.clip_gradient(1.0)
    policy.step(1e-4)
    values["log-probs after a step"] = policy.log_probs(batch, distribution)
    values["log-probs of the base after a step"] = policy.base_log_probs(batch, distribution)
    weights = [tensor.detach().flatten() for _, tensor in policy.weights()]
    values["weights after a step"] = torch.cat(weights)
    return values


def relative_difference(expected: torch.Tensor, value: torch.Tensor) -> float:
    """The norm of the difference, relative to that of `expected` where this is not 0."""
    norm = expected.norm() or 1
    return ((expected - value).norm() / norm).item()


# --- checkpoints ----------------------------------------------------------------------------------


def kind_config(kind: str, config: PolicyConfig) -> PolicyConfig:
    """The configuration of a kind of policy over the devices of `config`, or over its own."""
    return replace(config, devices=DEVICES.get(kind, config.devices))


def save_checkpoint(
    policy: Policy, folder: Path, tokenizer, parameters: list[torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The weights, adapters and optimiser's state that a policy writes to a folder, unsharded."""
    policy.save(folder, tokenizer)
    (folder / TRAINER).mkdir()
    policy.save_optimizer(folder / TRAINER)
    tensors = load_file(folder / "model.safetensors")
    for file in folder.glob("adapter/*.safetensors"):
        tensors |= load_file(file)
    return tensors | read_parts(folder / TRAINER, parameters)


def compare_checkpoints(
    policy: Policy, config: PolicyConfig, kinds: Sequence[str], tokenizer
) -> dict[str, bool]:
    """Whether each kind of policy reads a checkpoint of `policy` and writes the same bits again,
    adapters included."""
    # whose order of parameters names the optimiser's state
    single = open_policy("single", kind_config("single", config))
    parameters = []
    for group in single.optimizer.param_groups:
        parameters += group["params"]
    is_same = {}
    with tempfile.TemporaryDirectory() as name:
        first = Path(name) / "0"
        expected = save_checkpoint(policy, first, tokenizer, parameters)
        for number, kind in enumerate(kinds, start=1):
            again = kind_config(kind, config)
            if config.lora_rank:
                again = replace(again, checkpoint=str(first))
            else:
                again = replace(again, model_path=str(first))
            reader = open_policy(kind, again)
            reader.load_optimizer(first / TRAINER)
            written = save_checkpoint(reader, Path(name) / str(number), tokenizer, parameters)
            is_same[kind] = have_same_bits(expected, written)
    return is_same


def have_same_bits(expected: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> bool:
    if expected.keys() != written.keys():
        return False
    return all(torch.equal(tensor, written[name]) for name, tensor in expected.items())


# --- command --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How near a kind of policy is to one process."""

    kind: str
    differences: dict[str, float]
    """Of each quantity, relative."""
    reads_checkpoint: dict[str, bool]
    """Whether each kind of policy reads this one's checkpoints to the bit."""

    @property
    def worst(self) -> float:
        """The largest difference; 1 where a checkpoint is not the same."""
        if not all(self.reads_checkpoint.values()):
            return max(1.0, *self.differences.values())
        return max(self.differences.values())

    def row(self) -> list[str]:
        """Kind, largest difference by sort of quantity, the quantity with the largest, and the
        kinds that read its checkpoints."""
        cells = []
        for part in QUANTITIES:
            of_part = [value for name, value in self.differences.items() if part in name]
            cells.append(f"{max(of_part):.1e}")
        worst_name = max(self.differences, key=self.differences.__getitem__)
        return [self.kind, *cells, worst_name, str(self.reads_checkpoint)]


def compare_kinds(kinds: Sequence[str], config: PolicyConfig) -> list[Agreement]:
    """Compare each kind of policy with one process.

    A loss is a function of log-probs, whichever weights these are of. So adapters are compared by
    every task of `make_tasks` but those of single losses.
    """
    from alignment.model.loading import load_tokenizer

    losses = () if config.lora_rank else tuple(LOSSES)
    expected = measure(open_policy("single", kind_config("single", config)), losses)
    tokenizer = load_tokenizer(config.model_path)
    agreements = []
    for kind in kinds:
        policy = open_policy(kind, kind_config(kind, config))
        differences = {}
        for name, value in measure(policy, losses).items():
            differences[name] = relative_difference(expected[name], value)
        readers = ["single", "layer_split", *kinds]
        reads_checkpoint = compare_checkpoints(policy, config, readers, tokenizer)
        agreements.append(Agreement(kind, differences, reads_checkpoint))
    return agreements


def main(ranks: int = 0, kinds: tuple[str, ...] = RANKED, lora_rank: int = 0):
    """Print a row for each kind.

    Args:
        ranks: Processes on this machine; 0: torchrun's.
        kinds: Kinds of policy.
        lora_rank: Train adapters of this rank; 0: all weights.
    """
    # a process that torchrun started beside rank 0 computes what this one says, until it ends
    if followed(60):
        return
    with tempfile.TemporaryDirectory() as folder:
        config = PolicyConfig(
            str(embedded_model("tiny_student", folder)),
            ("cpu",) * (PROCESSES_HERE or ranks),
            "float32",
            micro_batch_tokens=64,
            lora_rank=lora_rank,
        )
        agreements = compare_kinds(kinds, config)
    title = (
        f"{PROCESSES or ranks} processes against one: largest relative difference of"
        f" {len(agreements[0].differences)} quantities"
    )
    headings = ("kind", *QUANTITIES, "of", "checkpoints read to the bit")
    rows = [agreement.row() for agreement in agreements]
    Console(width=160).print(make_table(title, headings, rows))
    worst = max(agreement.worst for agreement in agreements)
    if worst > TOLERANCE:
        sys.exit(f"a difference of {worst:.1e}, more than {TOLERANCE}")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
