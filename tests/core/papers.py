"""Advantages and losses, slowly, as the papers write them: one response at a time, in no code that training runs."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.functional import jacobian

from alignment.core.advantages import AdvantageConfig, group_advantages
from alignment.core.losses import CORRECTIONS, LOSSES, LossConfig, LossInputs, loss_denominator, micro_batch_loss

LONGEST = 6  # tokens that a made-up response may have


@dataclass(frozen=True)
class PaperResponse:
    """One response: log-probs [t] of the policy and of those that it is compared with, its reward and its advantage."""

    log_probs: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    sampler: torch.Tensor
    reward: float
    advantage: float


PAPER_BASELINES: Mapping[str, Callable[[list[float], int], float]] = {
    "group_mean": lambda group, place: statistics.fmean(group),
    "leave_one_out": lambda group, place: statistics.fmean(group[:place] + group[place + 1 :]),
}
PAPER_DEVIATIONS: Mapping[str, Callable[[list[float], list[float]], float]] = {
    "group": lambda group, rewards: statistics.stdev(group),
    "group_population": lambda group, rewards: statistics.pstdev(group),
    "batch": lambda group, rewards: statistics.stdev(rewards),
}


def paper_advantages(rewards: list[float], config: AdvantageConfig) -> list[float]:
    """The advantages of `group_advantages`, whose sources it names, one response at a time."""
    advantages = []
    for index, reward in enumerate(rewards):
        place, start = index % config.group_size, index - index % config.group_size
        group = rewards[start : start + config.group_size]
        scale = PAPER_DEVIATIONS[config.std_of](group, rewards) + config.advantage_eps if config.normalize_by_std else 1.0
        advantages.append((reward - PAPER_BASELINES[config.baseline](group, place)) / scale)
    return advantages


def _surrogate(ratio: torch.Tensor, response: PaperResponse, config: LossConfig) -> torch.Tensor:
    advantage, high = response.advantage, config.cliprange if config.cliprange_high is None else config.cliprange_high
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - config.cliprange, 1 + high) * advantage)
    return -(surrogate.clamp(min=config.dual_clip * advantage) if config.dual_clip and advantage < 0 else surrogate)


def _capped_weight(response: PaperResponse, config: LossConfig) -> torch.Tensor:
    high = config.cliprange if config.cliprange_high is None else config.cliprange_high
    return (response.log_probs.detach() - response.old).exp().clamp(1 - config.cliprange, 1 + high)


PAPER_LOSSES: Mapping[str, Callable[[PaperResponse, LossConfig], torch.Tensor]] = {
    "no_baseline": lambda r, config: -r.reward * r.log_probs,
    "reinforce_with_baseline": lambda r, config: -r.advantage * r.log_probs,
    "grpo_clip": lambda r, config: _surrogate(torch.exp(r.log_probs - r.old), r, config),
    "grpo_no_clip": lambda r, config: -torch.exp(r.log_probs - r.old) * r.advantage,
    "gspo": lambda r, config: _surrogate(torch.exp((r.log_probs - r.old).mean()).expand(len(r.old)), r, config),
    "cispo": lambda r, config: -_capped_weight(r, config) * r.advantage * r.log_probs,
}
"""--loss_type -> the loss of each token of a response; the sources are those of `LOSSES`."""
PAPER_KL: Mapping[str, Callable[[PaperResponse], torch.Tensor]] = {
    "k1": lambda r: r.log_probs - r.reference,
    "k2": lambda r: (r.log_probs - r.reference) ** 2 / 2,
    "k3": lambda r: torch.exp(r.reference - r.log_probs) - 1 - (r.reference - r.log_probs),
}
PAPER_WEIGHTS: Mapping[str, Callable[[int, Sequence[int], int], float]] = {
    "sequence_mean": lambda length, lengths, longest: 1 / (length * len(lengths)),
    "token_mean": lambda length, lengths, longest: 1 / sum(lengths),
    "constant": lambda length, lengths, longest: 1 / (longest * len(lengths)),
}
"""--loss_normalization -> what a token counts, by its response's length, all lengths, and --max_new_tokens."""


def paper_correction(response: PaperResponse, name: str, cap: float) -> torch.Tensor:
    """The weight of each token [t] by --sampler_correction: see `sampler_weights`."""
    if name == "none":
        return torch.ones_like(response.old)
    ratio = response.old - response.sampler
    ratio = torch.exp(ratio if name.startswith("token") else ratio.sum().expand(len(ratio)))
    return ratio.clamp(max=cap) if name.endswith("truncate") else ratio * (ratio <= cap)


def paper_loss(response: PaperResponse, config: LossConfig, lengths: Sequence[int], longest: int) -> torch.Tensor:
    """What one response adds to an optimiser step's loss. A user's own loss function is called with this response alone."""
    name = next((name for name, loss in LOSSES.items() if loss == config.loss), "")
    if name:
        loss = PAPER_LOSSES[name](response, config)
    else:
        numbers = (torch.tensor([[number]]) for number in (response.reward, response.advantage))
        rows = (row[None] for row in (response.old, response.reference, response.sampler))
        mask = torch.ones(1, len(response.old), dtype=torch.bool)
        loss = config.loss.function(LossInputs(config, response.log_probs[None], mask, *numbers, *rows))[0][0]
    loss = loss * paper_correction(response, config.sampler_correction, config.correction_cap)
    if config.beta:
        loss = loss + config.beta * PAPER_KL[config.kl_estimator](response)
    return loss.sum() * PAPER_WEIGHTS[config.loss_normalization](len(response.old), lengths, longest)


def advantages_difference() -> float:
    """The largest difference of the advantages from the papers', over all baselines and deviations."""
    rewards = [1.0, 0.0, 0.0, 0.5, 0.25, 0.0, 1.0, 1.0]
    settings = itertools.product(PAPER_BASELINES, (True, False), PAPER_DEVIATIONS)
    configs = [AdvantageConfig(4, *setting) for setting in settings]
    ours = [group_advantages(torch.tensor(rewards, dtype=torch.float64)[:, None], config)[:, 0] for config in configs]
    papers = [torch.tensor(paper_advantages(rewards, config), dtype=torch.float64) for config in configs]
    return (torch.stack(ours) - torch.stack(papers)).abs().max().item()


def losses_difference() -> float:
    """The largest relative difference of losses and their gradients from the papers', in float64 on made-up log-probs, over all
    losses and normalisations, KL estimators and corrections."""
    generator, lengths = torch.Generator().manual_seed(0), [3, 5, 1, 4]
    start_BT, *others = -1 + 0.3 * torch.randn(4, 4, 5, dtype=torch.float64, generator=generator)
    numbers_B2 = torch.tensor([[1.0, 0.7], [0.0, -1.3], [0.5, 0.4], [0.25, -0.2]], dtype=torch.float64)  # reward, advantage
    base, worst = LossConfig(LOSSES["grpo_clip"], cliprange_high=0.28, dual_clip=1.5, beta=0.1, correction_cap=1.1), 0.0
    settings = [(loss, norm, "k3", "none") for loss in LOSSES.values() for norm in PAPER_WEIGHTS]
    settings += [(base.loss, "token_mean", kl, correction) for kl in PAPER_KL for correction in CORRECTIONS]
    for loss, norm, kl, correction in settings:
        fields = {"loss_normalization": norm, "kl_estimator": kl, "sampler_correction": correction}
        config = dataclasses.replace(base, loss=loss, **fields)
        computed = []
        for total in (our_total, paper_total):
            of = functools.partial(total, numbers_B2, others, config, lengths)
            computed.append((of(start_BT), jacobian(of, start_BT)))
        worst = max(worst, *(((one - other).norm() / other.norm()).item() for one, other in zip(*computed, strict=True)))
    return worst


def our_total(numbers_B2, others, config, lengths, log_probs_BT) -> torch.Tensor:
    """The loss that training computes of responses with these rewards and advantages [B, 2] and other log-probs [B, T]."""
    mask_BT = torch.arange(log_probs_BT.shape[1]) < torch.tensor(lengths)[:, None]
    inputs = LossInputs(config, log_probs_BT, mask_BT, *numbers_B2.split(1, dim=1), *others)
    return micro_batch_loss(inputs, loss_denominator(config.loss_normalization, lengths, LONGEST))[0]


def paper_total(numbers_B2, others, config, lengths, log_probs_BT) -> torch.Tensor:
    """The same, added up response by response."""
    total = torch.zeros((), dtype=torch.float64)
    for length, numbers, *rows in zip(lengths, numbers_B2.tolist(), log_probs_BT, *others, strict=True):
        total = total + paper_loss(PaperResponse(*(row[:length] for row in rows), *numbers), config, lengths, LONGEST)
    return total
