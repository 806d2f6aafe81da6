"""What losses, grader, policy and sampler compute, against the papers, known answers and
transformers' own model in float32."""

import dataclasses
import functools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from alignment.core.advantages import BASELINES, DEVIATIONS, AdvantageConfig, group_advantages
from alignment.core.losses import (
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
    LossConfig,
    LossInputs,
    loss_denominator,
    micro_batch_loss,
)
from alignment.core.records import Batch, Group, Rollout
from alignment.core.tokens import collate
from alignment.model.packing import take_plain_path
from alignment.policy.policy import Objective, Policy, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rewards.rules import find_rule
from alignment.rollouts.config import UpdateConfig, problems_of_step
from alignment.rollouts.source import RolloutSource, collate_groups, with_advantages
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import Sampler
from alignment.system.errors import RunStopped
from alignment.system.files import read_jsonl
from alignment.training.update import (
    first_log_probs,
    rollout_loss,
    rollout_objective,
    rows_with_gradient,
    sampler_mismatch,
)
from alignment.verification.papers import paper_values

Pair = tuple[float, float]
PROMPTS = 4
GROUP, LONGEST = 3, 6  # --group_size and --max_new_tokens of responses by chance
LIMITS = {torch.float32: (1e-3, 1e-4, 0.02), torch.bfloat16: (0.1, 0.5, 0.75)}
"""Type of matrix products -> how far log-probs may be from the plain ones, in mean nats a token; a
gradient, as the norm of the difference over its norm; and a step's change of weights, likewise:
Adam's first step goes by signs, near 0 by chance."""


SAME_BITS = ("cpu",)
"""Kinds of devices whose kernels give the same bits in every run. A GPU's do with --deterministic
only: there the order of some sums depends on timing."""


def promises_bits(devices: Iterable[str], deterministic: bool) -> bool:
    """Whether a run on these devices is to give the same bits again."""
    return deterministic or all(device.partition(":")[0] in SAME_BITS for device in devices)


@dataclass(frozen=True)
class Check:
    """A quantity, or the names of what differs, whose number counts; and the limit that it may not
    exceed, which is infinite where nothing is promised. `quantity` raises `RunStopped` where a run
    would. Where it is not 0, a run is reproducible `at_best` "to rounding", or "statistical", in
    the distribution of its results."""

    what: str
    limit: float
    quantity: Callable[[], float | list[str]]
    at_best: str = ""
    # Whether a run's results may be others where it fails; a plan may be wrong about a run.
    of_results: bool = True


def paper_settings(seed: int) -> Iterator[tuple[str, LossConfig, AdvantageConfig]]:
    """Every loss with every normalisation and correction; the other choices take turns, in an order
    by chance."""
    others = [
        *product((None, 0.28), (0.0, 1.5), KL_ESTIMATORS, BASELINES, (True, False), DEVIATIONS)
    ]
    turns = cycle(random.Random(seed).sample(others, len(others)))
    for choice, (high, dual_clip, kl, *advantage) in zip(
        product(LOSSES, NORMALIZATIONS, CORRECTIONS), turns, strict=False
    ):
        name, *rest = choice
        yield (
            name,
            LossConfig(LOSSES[name], 0.2, high, dual_clip, 0.1, kl, *rest, 1.1),
            AdvantageConfig(GROUP, *advantage),
        )


def difference_from_papers(
    settings: Iterable[tuple[str, LossConfig, AdvantageConfig]], seed: int
) -> float:
    """The largest difference of training's advantages, losses and gradients, on responses [B, t] by
    chance, from papers.py."""
    draw, double, worst = (
        random.Random(seed),
        functools.partial(torch.tensor, dtype=torch.float64),
        0.0,
    )
    for name, config, advantage in settings:
        lengths = [draw.randint(1, LONGEST) for _ in range(2 * GROUP)]
        rewards = [reward for _ in range(2) for reward in draw.sample((0.0, 0.25, 0.5, 1.0), GROUP)]
        policies = [
            [[draw.gauss(-1, 0.3) for _ in range(length)] for length in lengths] for _ in range(4)
        ]
        log_probs_BT, *others = (
            pad_sequence([*map(double, rows)], batch_first=True) for rows in policies
        )
        mask_BT, rewards_B1 = log_probs_BT != 0, double(rewards)[:, None]
        rows = mask_BT, rewards_B1, group_advantages(rewards_B1, advantage), *others
        denominator = loss_denominator(config.loss_normalization, lengths, LONGEST)

        def loss_of(log_probs_BT, config=config, rows=rows, denominator=denominator):
            return micro_batch_loss(LossInputs(config, log_probs_BT, *rows), denominator)[0]

        gradient_BT, loss = torch.func.grad_and_value(loss_of)(log_probs_BT)
        values = torch.cat([rows[2][:, 0], loss[None], gradient_BT[mask_BT]])
        setting = {**vars(config), **vars(advantage), "loss": name, "max_new_tokens": LONGEST}
        worst = max(
            worst, (values - double(paper_values(setting, rewards, *policies))).abs().max().item()
        )
    return worst


def wrong_rewards() -> int:
    """How many responses of answers.jsonl, some of which try to deceive, get another reward than is
    stated there."""
    rows = read_jsonl(Path(__file__).with_name("answers.jsonl"))
    return sum(
        find_rule(row["rule"])(row["response"], row["ground_truth"])["reward"] != row["reward"]
        for row in rows
    )


def checks_without_model(config: UpdateConfig) -> Iterator[Check]:
    """The checks that are the same for all models: of a run's own loss, unless it is a function of
    the user's; of all; and of the grader."""
    advantage = dataclasses.replace(config.advantage, group_size=GROUP)
    own = [
        (name, config.loss, advantage) for name, loss in LOSSES.items() if loss == config.loss.loss
    ]
    if own:
        yield Check(
            "this run's loss and gradient: from papers'",
            1e-9,
            lambda: difference_from_papers(own, config.seed),
        )
    settings = paper_settings(config.seed)
    yield Check(
        "losses, gradients, advantages: from papers'",
        1e-9,
        lambda: difference_from_papers(settings, config.seed),
    )
    yield Check("grader: wrong rewards of known answers", 0.0, wrong_rewards)


def checks_of_plan(
    peaks: Mapping[str, Pair], seconds: Mapping[str, tuple[float, Pair]]
) -> Iterator[Check]:
    """The worst device and phase beside `plan`'s prediction. `peaks` are measured and predicted
    bytes by device, `seconds` the measured ones by phase, and their predicted range. Seconds have
    no limit: other work on the machine decides them, too."""
    times = {
        phase: max(taken / high, low / taken) for phase, (taken, (low, high)) in seconds.items()
    }
    memory = {device: measured / predicted for device, (measured, predicted) in peaks.items()}
    for what, limit, ratios in (
        ("peak / plan's: ", 1.1, memory),
        ("seconds / plan's range: ", math.inf, times),
    ):
        if ratios:
            worst = max(ratios, key=ratios.get)
            yield Check(what + worst, limit, functools.partial(ratios.get, worst), of_results=False)


def plain_policy(config: PolicyConfig) -> Policy:
    """A policy that computes one padded row at a time by transformers' own model, in float32 on the
    CPU."""
    plain = {"devices": ("cpu",), "dtype": "float32", "optimizer": "adamw", "micro_batch_tokens": 1}
    policy = SingleDevicePolicy(dataclasses.replace(config, **plain))
    take_plain_path(policy.model)
    return policy


def other_answers(groups: Sequence[Group], others: Sequence[Group]) -> int:
    """How many groups have other tokens than their counterparts."""
    pairs = zip(groups, others, strict=True)
    return sum(
        [c.token_ids for c in one.completions] != [c.token_ids for c in other.completions]
        for one, other in pairs
    )


def copied_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in policy.weights()}


def distance(policy: Policy, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The norm of the difference between a policy's weights and others."""
    return sum(
        (tensor.cpu() - weights[name]).square().sum() for name, tensor in policy.weights()
    ).sqrt()


@dataclass(frozen=True)
class Verified:
    """A policy, the sampler that gets its weights, a `plain` policy of the same weights, and a
    run's rollouts and updates."""

    policy: Policy
    sampler: Sampler
    plain: Policy
    source: RolloutSource
    config: UpdateConfig
    exact: bool  # Whether the devices are to give the same bits again.
    batch_invariant: bool = False
    """Whether the engine is to give the same bits whatever shares a batch."""

    def checks(self) -> Iterator[Check]:
        """Every check, to be measured before the next one is made. The last ones change the
        weights."""
        nats, relative, after_step = LIMITS[self.policy.dtype]
        bits, in_batches = (
            0.0 if exact else math.inf for exact in (self.exact, self.batch_invariant)
        )
        sampled = self.sample()
        groups, again = sampled[:PROMPTS], sampled[PROMPTS:]
        yield Check(
            "prompts asked twice: share of same answers",
            0.9,
            lambda: 1 - other_answers(groups, again) / PROMPTS,
        )
        yield Check(
            "same seed again: other answers",
            bits,
            lambda: other_answers(sampled, self.sample()),
            "statistical",
        )
        yield Check(
            "half the prompts: other answers",
            in_batches,
            lambda: other_answers(groups, self.sample(times=1)),
        )
        rollout, completions = (
            self.made_up(groups),
            [completion for group in groups for completion in group.completions],
        )
        batch = collate(
            [c.prompt_ids for c in completions], [c.token_ids for c in completions], pad_token_id=0
        )
        plain_BT, sampler_BT = self.plain_log_probs(rollout, batch), rollout.sampler_log_probs_BT

        def log_probs():
            return self.policy.log_probs(rollout.batch, self.config.distribution)

        policy_BT, synced = functools.cache(log_probs), functools.cache(self.synced)

        # masks count, too
        def from_plain(log_probs_BT):
            return (log_probs_BT - plain_BT).abs().sum() / batch.response_mask.sum()

        yield Check("policy's log-probs: nats from plain", nats, lambda: from_plain(policy_BT()))
        yield Check("sampler's log-probs: nats from plain", nats, lambda: from_plain(sampler_BT))
        yield Check(
            "sampler's largest nats from policy",
            math.inf,
            lambda: (policy_BT() - sampler_BT).abs().max(),
        )
        want, gradient = self.plain.gradient(), self.gradient(rollout)
        yield Check(
            "gradient: from one row at a time",
            relative,
            lambda: (gradient - want).norm() / want.norm(),
        )

        def scale():
            return (
                gradient @ want / want.norm() ** 2 - 1
            ).abs()  # rounding is nearly at right angles to the gradient

        yield Check("gradient: scale, off that one's", min(relative, 0.1), scale)
        self.policy.drop_gradient()
        yield Check(
            "gradient again: change",
            bits,
            lambda: (self.gradient(rollout) - gradient).abs().max(),
            "to rounding",
        )
        before = copied_weights(self.plain)
        for policy in (self.policy, self.plain):
            self.step(policy, self.config.learning_rate)
        after, change = dict(self.plain.weights()), distance(self.plain, before)
        yield Check(
            "step: from one row at a time",
            after_step,
            lambda: distance(self.policy, after) / change,
        )
        yield Check(
            "after updates, weights sent: tensors that differ",
            0.0,
            lambda: self.sent(rollout, 2 * nats),
        )
        yield Check("after updates, sampler: nats from policy", nats, synced)
        before = copied_weights(self.policy)
        yield Check(
            "learning rate 0: growth of mismatch in 3 steps",
            nats / 10,
            lambda: self.growth(rollout) - synced(),
        )
        yield Check(
            "learning rate 0: change of weights", 0.0, lambda: distance(self.policy, before)
        )

    def sample(self, times: int = 2) -> list[Group]:
        """Each problem's responses, `times` over, with made-up rewards: 0 in the first group, 0 and
        1 in the others."""
        config = self.source.config
        problems = problems_of_step(self.source.problems, PROMPTS, config.data_seed, step=1) * times
        sampling = config.sampling_of_step(self.source.task.stop, step=1)
        sampled = self.sampler.sample([problem.prompt for problem in problems], sampling)
        rewards = [float(place % 3 == 0) for place in range(sampling.n)]
        return [
            Group(
                problem,
                tuple(completions),
                tuple({"reward": reward * (number > 0)} for reward in rewards),
            )
            for number, (problem, completions) in enumerate(zip(problems, sampled, strict=True))
        ]

    def made_up(self, groups: Sequence[Group]) -> Rollout:
        """The rollout of some groups; its old and reference log-probs are the sampler's with some
        noise."""
        rollout, generator = (
            collate_groups(groups, self.source.config, pad_token_id=0),
            torch.Generator().manual_seed(0),
        )
        sampler_BT = rollout.sampler_log_probs_BT
        noise = (
            0.2
            * torch.randn(2, *sampler_BT.shape, generator=generator)
            * rollout.batch.response_mask
        )
        old_BT, reference_BT = sampler_BT + noise
        rollout = dataclasses.replace(
            rollout, old_log_probs_BT=old_BT, reference_log_probs_BT=reference_BT
        )
        return with_advantages(rollout, self.config.advantage)

    def plain_log_probs(self, rollout: Rollout, batch: Batch) -> torch.Tensor:
        """The plain policy's log-probs [B, T]. All rows' gradient of the run's loss is kept, for a
        step."""
        lengths = batch.response_mask.sum(dim=1).tolist()
        denominator = loss_denominator(
            self.config.loss.loss_normalization, lengths, self.config.max_new_tokens
        )
        objective = Objective(
            functools.partial(rollout_loss, rollout, self.config, denominator),
            self.config.distribution,
        )
        return first_log_probs(
            list(self.plain.accumulate(batch, range(len(lengths)), objective)), rollout
        )

    def gradient(self, rollout: Rollout) -> torch.Tensor:
        """The policy's gradient [D] of the run's loss, made as in an update; it is kept for a
        step."""
        self.accumulate(
            rollout, rows_with_gradient(rollout, self.config), range(len(rollout.lengths))
        )
        return self.policy.gradient()

    def accumulate(self, rollout: Rollout, rows: Sequence[int], mini_batch: Sequence[int]) -> None:
        deque(
            self.policy.accumulate(
                rollout.batch, rows, rollout_objective(rollout, mini_batch, self.config)
            ),
            maxlen=0,
        )

    def update(self, rollout: Rollout, learning_rate: float) -> None:
        """Make an optimiser step on the last rows, of one prompt, that have a gradient."""
        rows = rows_with_gradient(rollout, self.config)[-self.source.config.sampling.n :]
        self.accumulate(rollout, rows, rows)
        self.step(self.policy, learning_rate)

    def step(self, policy: Policy, learning_rate: float) -> None:
        policy.clip_gradient(self.config.max_grad_norm)
        policy.step(learning_rate)

    def sent(self, rollout: Rollout, wanted: float) -> float:
        """0 once the sampler has the weights of updates that move log-probs by `wanted` nats at
        least; else `RunStopped`."""
        # one of each prompt
        rows, moved = (
            range(0, len(rollout.lengths), self.source.config.sampling.n),
            0.0,
        )

        def log_probs():
            return self.policy.log_probs(rollout.batch, self.config.distribution, rows)

        before, tokens = log_probs(), sum(rollout.lengths[row] for row in rows)
        for power in range(8):
            if moved < wanted:
                self.update(rollout, self.config.learning_rate * 2**power)
                moved = ((log_probs() - before).abs().sum() / tokens).item()
        if not moved >= wanted:
            raise RunStopped(
                f"eight updates moved log-probs by {moved:.2g} nats a token only: take a higher"
                " --learning_rate"
            )
        load_proven(self.sampler, self.policy.weights(), 1)
        return 0.0

    def synced(self, version: int = 1) -> float:
        """Mean difference of sampler and policy, after a transfer of the weights, on new responses
        to the prompts as before, so that keys and values of older weights, if the engine still had
        them, would show."""
        self.sampler.load_weights(self.policy.weights(), version)
        rollout = self.made_up(self.sample(times=1))
        return sampler_mismatch(self.policy, rollout, self.config.distribution, math.inf)[
            "sampler_mismatch"
        ]

    def growth(self, rollout: Rollout) -> float:
        """`synced` after three steps at a learning rate of 0, each with its transfer."""
        for version in (2, 3):
            self.update(rollout, 0.0)
            self.sampler.load_weights(self.policy.weights(), version)
        self.update(rollout, 0.0)
        return self.synced(version=4)
