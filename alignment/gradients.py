"""A microscope for gradients: on one frozen set of rollouts, what does each estimator's gradient look like?

uv run -m alignment.gradients --preset tiny
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from alignment.args import LossNormalization, LossType, RLArgs, from_preset
from alignment.core.advantages import normalize_group_rewards
from alignment.core.losses import USES_OLD_POLICY
from alignment.core.tokens import pad_token_id, take_rows
from alignment.core.train_step import grpo_microbatch_train_step, loss_denominator
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.policy.loading import compute_dtype, load_model, load_tokenizer, make_optimizer, policy_log_probs, roles_of
from alignment.policy.memory import fit
from alignment.rewards.reward import find_reward
from alignment.rollouts.batches import collate_groups
from alignment.rollouts.collect import rollout_sampling
from alignment.rollouts.prompts import problems_of_step
from alignment.sampling.sampler import make_sampler
from alignment.system.errors import UserError, run_command
from alignment.system.terminal import make_console
from alignment.train_rl import warm_start
from alignment.training.update import update


@dataclass(frozen=True)
class GradientsArgs:
    """Sample one set of rollouts, and compare the gradients that losses, normalisations and group sizes make of it."""

    preset: str = "tiny"
    """Named set of arguments: task, model, devices, sampling."""
    prompts: int = 32
    """Prompts; each one's gradient is one observation."""
    group_size: tuple[int, ...] = (2, 4, 8, 16)
    """Group sizes to compare: each prompt's responses are cut into such groups."""
    updates: Literal[0, 1] = 1
    """1: clipped losses are also looked at after one update on these rollouts, where the ratio is no longer 1."""
    seed: int = 0
    """Seed of prompts and samples."""
    output_dir: str = "checkpoints"
    """Folder that holds the warm start."""

    def __post_init__(self) -> None:
        if self.prompts < 2:
            raise UserError(f"--prompts {self.prompts}: must be at least 2, to have a variance")
        if min(self.group_size, default=0) < 2:
            raise UserError(f"--group_size {min(self.group_size, default=0)}: must be at least 2")
        if any(max(self.group_size) % size for size in self.group_size):
            raise UserError(f"--group_size: every size must divide the largest, {max(self.group_size)}")


@dataclass(frozen=True)
class Estimator:
    """One way of making a gradient of rewarded responses."""

    loss_type: LossType
    group_size: int
    normalize_by_std: bool
    loss_normalization: LossNormalization
    stale: bool = False
    """After an update on the same rollouts, so that the ratio to the old policy is not 1."""


@dataclass(frozen=True)
class Statistics:
    """What a set of per-prompt gradients says. All of the whole batch's gradient G, the sum over its P prompts.

    norm: |G|. std: square root of the trace of its covariance, from the spread of the P terms. cosine: mean cosine between
    one prompt's gradient and G, prompts without gradient left out. snr: (|G|^2 - std^2) / std^2, in which the first is the
    unbiased square of the expectation's norm; negative where there is no signal. effective: (sum |w|)^2 / sum w^2 of the
    responses' weights, how many equally weighted responses would say as much. silent: share of prompts without gradient.
    """

    norm: float
    std: float
    cosine: float
    snr: float
    effective: float
    silent: float


def estimators(group_sizes: Sequence[int], updates: int) -> Iterator[Estimator]:
    """Those that are compared: losses, baselines and normalisations at the largest group size, and the group sizes."""
    largest, norms = max(group_sizes), ("sequence_mean", "token_mean", "constant")
    yield from (Estimator("no_baseline", largest, False, norm) for norm in norms)
    yield from (
        Estimator("reinforce_with_baseline", largest, std, norm) for std, norm in itertools.product((False, True), norms)
    )
    yield from (Estimator("grpo_clip", largest, True, "sequence_mean", stale) for stale in (False, True)[: updates + 1])
    others = ("grpo_no_clip", "gspo", "cispo")  # which at ratio 1 are all the same
    yield from (Estimator(loss, largest, True, "sequence_mean", True) for loss in others[: 3 * min(updates, 1)])
    yield from (Estimator("grpo_clip", size, True, "sequence_mean") for size in sorted(group_sizes) if size != largest)


def weights(rewards_B1: torch.Tensor, estimator: Estimator, eps: float) -> torch.Tensor:
    """What multiplies each response's score function: its reward or its advantage, [B, 1]."""
    if estimator.loss_type == "no_baseline":
        return rewards_B1
    return normalize_group_rewards(rewards_B1, estimator.group_size, eps, estimator.normalize_by_std)


def gradient(
    log_probs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    weights_B1: torch.Tensor,
    estimator: Estimator,
    denominator: float,
    parameters: Sequence[torch.Tensor],
    old_log_probs_BT: torch.Tensor | None = None,
    cliprange: float = 0.2,
) -> torch.Tensor:
    """The flat gradient [D] that these responses add to the batch's, by the very step that training takes."""
    for parameter in parameters:
        parameter.grad = None
    old = log_probs_BT.detach() if old_log_probs_BT is None else old_log_probs_BT
    grpo_microbatch_train_step(
        log_probs_BT,
        mask_BT,
        gradient_accumulation_steps=1,
        loss_type=estimator.loss_type,
        raw_rewards=weights_B1,
        advantages=weights_B1,
        old_log_probs=old if estimator.loss_type in USES_OLD_POLICY else None,
        cliprange=cliprange,
        loss_normalization=estimator.loss_normalization,
        denominator=denominator,
    )
    # A split policy has its parameters on several devices.
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu() for p in parameters])


def statistics(gradients_PD: torch.Tensor, weights_B1: torch.Tensor) -> Statistics:
    """Summarise the gradients of P prompts, and the weights of their responses."""
    prompts = gradients_PD.shape[0]
    total_D = gradients_PD.sum(dim=0)
    norms_P, norm = gradients_PD.norm(dim=1), total_D.norm()
    # G is a sum of P independent terms: its covariance is P times theirs.
    variance = prompts * (gradients_PD - total_D / prompts).square().sum() / (prompts - 1)
    heard = norms_P > 0
    cosines = gradients_PD[heard] @ total_D / (norms_P[heard] * norm)
    size = weights_B1.abs().sum().square() / weights_B1.square().sum()
    return Statistics(
        norm=norm.item(),
        std=variance.sqrt().item(),
        cosine=cosines.mean().item(),
        snr=((norm.square() - variance) / variance).item(),
        effective=size.item(),
        silent=1 - heard.float().mean().item(),
    )


def look(args: GradientsArgs, console: Console) -> list[tuple[Estimator, Statistics]]:
    """Sample the rollouts and look at every estimator. Raises `UserError` where no response is right, or memory is short."""
    rl = from_preset(RLArgs, args.preset, seed=args.seed, output_dir=args.output_dir)
    # One loss by itself: what is added to it, or weighs it, is left out.
    alone = dict(beta=0.0, sampler_correction="none", max_refills=0)
    rl = dataclasses.replace(rl, group_size=max(args.group_size), prompts_per_rollout=args.prompts, **alone)
    roles, base, task = roles_of(rl), warm_start(rl, console), find_task(rl.task)
    tokenizer, dtype = load_tokenizer(base), compute_dtype(rl, roles.policy[0])
    reward = find_reward(rl.reward, task.rules)
    policy = load_model(base, roles.policy, torch.float32)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    refuse_what_does_not_fit(args.prompts, sum(p.numel() for p in parameters))
    sampler = make_sampler(rl, base, tokenizer, roles.sample, roles, policy)
    try:
        with console.status(f"sampling {args.prompts} prompts x {rl.group_size}"):
            asked = prompted(
                problems_of_step(task.problems("train", rl.dataset_path), rl, 1), rl.prompt or task.prompt, tokenizer
            )
            drawn = sampler.sample([problem.prompt for problem in asked], rollout_sampling(task.stop, rl, 1))
    finally:
        sampler.close()
    rollout = collate_groups(reward.score(asked, drawn), pad_token_id(tokenizer))
    rl = fit(policy, rl, rollout.batch.labels.shape[1], console, dtype)
    if not rollout.raw_rewards_B1.any():
        raise UserError("no sampled response is right, so every gradient is zero: take more --prompts, or a warmer start")
    rows = [list(range(p * rl.group_size, (p + 1) * rl.group_size)) for p in range(args.prompts)]
    found = []
    old: list[torch.Tensor] = []
    planned = sorted(estimators(args.group_size, args.updates), key=lambda estimator: estimator.stale)
    for estimator in track(planned, "looking", console=console, transient=True):
        if estimator.stale:
            with torch.no_grad():
                old = [_log_probs(policy, rollout, part, rl, dtype) for part in rows]
            once = dataclasses.replace(rl, train_mini_batch_size=0, epochs_per_rollout=1, warmup_steps=0)
            advantages_B1 = weights(rollout.raw_rewards_B1, estimator, rl.advantage_eps)
            optimizer = make_optimizer(policy, rl.learning_rate, rl.weight_decay)
            update(policy, optimizer, dataclasses.replace(rollout, advantages_B1=advantages_B1), once, 1, dtype)
        weights_B1 = weights(rollout.raw_rewards_B1, estimator, rl.advantage_eps)
        denominator = loss_denominator(estimator.loss_normalization, rollout.lengths, rl.max_new_tokens)
        gradients = []
        for p, part in enumerate(rows):
            log_probs_BT = _log_probs(policy, rollout, part, rl, dtype)
            mask_BT = take_rows(rollout.batch, part).response_mask.to(log_probs_BT.device)
            before = old[p] if estimator.stale else None
            scale_B1 = weights_B1[part].to(log_probs_BT.device)
            gradients.append(
                gradient(log_probs_BT, mask_BT, scale_B1, estimator, denominator, parameters, before, rl.cliprange)
            )
        found.append((estimator, statistics(torch.stack(gradients), weights_B1)))
    return found


def refuse_what_does_not_fit(prompts: int, parameters: int) -> None:
    """Raise `UserError` where one gradient a prompt, in float32 and twice while they are stacked, exceeds the free memory."""
    needed, free = 2 * 4 * prompts * parameters, psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--prompts {prompts}: their gradients take {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are free;"
            f" take at most {max(2, free // (8 * parameters))}"
        )


def _log_probs(policy, rollout, rows: Sequence[int], rl: RLArgs, dtype: torch.dtype) -> torch.Tensor:
    return policy_log_probs(policy, take_rows(rollout.batch, rows), dtype, temperature=rl.sampling_temperature)["log_probs"]


def print_statistics(found: Sequence[tuple[Estimator, Statistics]], console: Console) -> None:
    """A row for each estimator."""
    table = Table(title="gradients on one frozen set of rollouts")
    for heading in ("loss", "length", "/ std", "group", "norm", "spread", "SNR", "cosine", "ESS", "silent"):
        table.add_column(heading, justify="left" if heading in ("loss", "length", "/ std") else "right", no_wrap=True)
    for e, s in found:
        std = "" if e.loss_type == "no_baseline" else "yes" if e.normalize_by_std else "no"
        cells = f"{s.norm:.2g}", f"{s.std:.2g}", f"{s.snr:+.2f}", f"{s.cosine:.2f}", f"{s.effective:.0f}", f"{s.silent:.0%}"
        table.add_row(e.loss_type + (" (2nd update)" if e.stale else ""), e.loss_normalization, std, str(e.group_size), *cells)
    console.print(table)
    console.print(
        "norm and spread are of the whole batch's gradient; SNR, its squared expectation over its variance, is what may be"
        " compared between estimators, since an optimiser like Adam takes the scale away. cosine: a prompt's gradient with the"
        " batch's. ESS: how many equally weighted responses would say as much."
        " silent: prompts without any gradient.",
        soft_wrap=True,
    )


def main() -> None:
    args = tyro.cli(GradientsArgs, use_underscores=True)
    console = make_console()
    print_statistics(look(args, console), console)


if __name__ == "__main__":
    run_command(main)
