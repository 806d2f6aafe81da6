"""The gradient microscope against a two-action bandit, whose moments are known in closed form."""

import dataclasses
import math

import pytest
import torch
from rollout_helpers import ARGS, open_tiny, sample_rollout, with_old_log_probs

from alignment.args import RLArgs, from_preset
from alignment.core.advantages import AdvantageConfig, group_advantages
from alignment.core.losses import LOSSES, NORMALIZATIONS
from alignment.core.records import Rollout
from alignment.core.tokens import collate, take_rows
from alignment.model.loading import load_tokenizer
from alignment.rollouts.source import with_advantages
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import SAMPLERS, SamplerConfig
from alignment.system.errors import UserError
from alignment.system.signals import signals_are_deferred
from alignment.training.microscope import (
    Estimator,
    arm_gradients,
    estimators,
    gradient_statistics,
    inspect,
    refuse_too_many_gradients,
    statistics,
)
from alignment.training.update import update

P = 0.3  # of the action that is rewarded
GROUPS = 200_000


def bandit(estimator: Estimator, group_size: int, groups: int = GROUPS):
    """Per-group gradients [groups, 1] with respect to the logit of action 1, divided by all
    responses.

    One token a response; pi(1) = sigmoid(theta) = P; reward 1 for action 1. d log pi(a) / d theta =
    a - P.
    """
    generator = torch.Generator().manual_seed(0)
    actions_B1 = (
        torch.rand(groups * group_size, 1, generator=generator, dtype=torch.float64) < P
    ).double()
    weights_B1 = weights_of(actions_B1, estimator)
    scores_B1 = weights_B1 * (actions_B1 - P) / len(actions_B1)
    return -scores_B1.reshape(groups, group_size).sum(dim=1, keepdim=True), weights_B1, actions_B1


def weights_of(rewards_B1, estimator: Estimator):
    """What multiplies each response's score function: its reward or its advantage."""
    if estimator.loss_type == "no_baseline":
        return rewards_B1
    return group_advantages(
        rewards_B1,
        AdvantageConfig(estimator.group_size, normalize_by_std=estimator.normalize_by_std),
    )


class BanditPolicy:
    """The part of a `Policy` that the microscope uses, with a single weight; remembers the
    gradients that were read."""

    def __init__(self):
        self.theta = torch.tensor(math.log(P / (1 - P)), dtype=torch.float64, requires_grad=True)
        self.gradients = []

    def accumulate(self, batch, rows, objective):
        part = take_rows(batch, rows)
        sign = 2 * part.labels - 1
        loss, _ = objective.loss(
            rows, torch.nn.functional.logsigmoid(sign * self.theta), part.response_mask
        )
        loss.backward()
        yield loss

    def gradient(self):
        self.gradients.append(self.theta.grad[None])
        return self.gradients[-1]

    def drop_gradient(self):
        self.theta.grad = None


def test_the_step_that_training_takes_gives_that_gradient():
    estimator = Estimator("reinforce_with_baseline", 8, False, "sequence_mean")
    per_group, weights_B1, actions_B1 = bandit(estimator, 8, groups=2)
    batch = collate([[0]] * 16, [[int(action)] for action in actions_B1], pad_token_id=0)
    rollout = Rollout(batch, actions_B1, torch.ones(16, 1, dtype=torch.bool), torch.zeros(16, 1))
    policy, config = BanditPolicy(), from_preset(RLArgs, "tiny", group_size=8).update_config
    measured = gradient_statistics(policy, rollout, estimator, config)
    torch.testing.assert_close(torch.stack(policy.gradients), per_group, rtol=0, atol=1e-12)
    assert measured == statistics(torch.stack(policy.gradients), weights_B1)


def kept_gradients(policy) -> list[torch.Tensor]:
    """A list that gets each gradient that the policy clips from now on."""
    gradients = []
    clip = policy.clip_gradient

    def clip_and_keep(max_norm: float) -> torch.Tensor:
        if math.isfinite(max_norm):  # Else the norm is only measured.
            gradients.append(policy.gradient())
        return clip(max_norm)

    policy.clip_gradient = clip_and_keep
    return gradients


def test_every_setting_of_an_update_is_one_of_the_microscope(tiny_folder, sampler):
    """The prompts' gradients add up to an update's, the first and the second, under all settings
    that change them. In the second the ratio is clipped."""
    settings = {
        "sampling_top_p": 0.9,
        "sampling_top_k": 50,
        "cliprange": 0.02,
        "cliprange_high": 0.05,
        "dual_clip": 1.02,
        "std_of": "batch",
        "baseline": "leave_one_out",
        "loss_normalization": "token_mean",
        "epochs_per_rollout": 2,
        "max_grad_norm": 1e9,
        "warmup_steps": 0,
        "learning_rate": 0.3,
    }
    args = dataclasses.replace(ARGS, **settings)
    config = args.update_config
    rollout = sample_rollout(sampler, top_p=0.9, top_k=50)
    # --skip_unfinished
    counted_B1 = torch.ones_like(rollout.counted_B1).index_fill(0, torch.tensor([2, 7]), False)
    rollout = with_advantages(dataclasses.replace(rollout, counted_B1=counted_B1), config.advantage)
    trained, looked_at = open_tiny(tiny_folder), open_tiny(tiny_folder)
    for policy in (trained, looked_at):
        policy.optimizer = torch.optim.SGD(policy.model.parameters())
    of_updates = kept_gradients(trained)
    of_prompts = []
    read = looked_at.gradient
    looked_at.gradient = lambda: (of_prompts.append(read()), of_prompts[-1])[1]
    report = update(trained, with_old_log_probs(rollout, trained, args), config, 1).report
    assert report["clip_fraction"] > 0.1
    planned = [Estimator("grpo_clip", 4, True, "token_mean", second) for second in (False, True)]
    assert len(list(inspect(looked_at, rollout, planned, config))) == 2
    assert len(of_updates) == 2 and len(of_prompts) == 8
    for whole, prompts in zip(of_updates, (of_prompts[:4], of_prompts[4:]), strict=True):
        assert whole.norm() > 0.01
        torch.testing.assert_close(torch.stack(prompts).sum(dim=0), whole, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_arms_have_the_gradients_of_their_first_two_updates(tiny_folder, sampler):
    """Those that `update` makes of all responses at once. Bounds of the ratio tell arms apart in
    the second update only, and a learning rate in neither."""
    settings = {
        "epochs_per_rollout": 2,
        "max_grad_norm": 1e9,
        "warmup_steps": 0,
        "learning_rate": 0.3,
        "cliprange": 0.02,
    }
    args = dataclasses.replace(ARGS, **settings)
    arms = {
        "narrow": args,
        "wide": dataclasses.replace(args, cliprange=0.2),
        "slow": dataclasses.replace(args, learning_rate=0.1),
    }
    arms |= {"penalty": dataclasses.replace(args, beta=0.5, kl_estimator="k3")}
    rollout, trained, looked_at = (
        sample_rollout(sampler),
        open_tiny(tiny_folder),
        open_tiny(tiny_folder),
    )
    for policy in (trained, looked_at):
        policy.optimizer = torch.optim.SGD(policy.model.parameters())
    of_updates = kept_gradients(trained)
    update(trained, with_old_log_probs(rollout, trained, args), args.update_config, 1)
    found = arm_gradients(
        looked_at, {name: (rollout, arm.update_config) for name, arm in arms.items()}, 2
    )
    for whole, mine in zip(of_updates, found["narrow"], strict=True):
        assert whole.norm() > 0.01
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-6)
    apart = {
        name: [(a - b).norm().item() for a, b in zip(found[name], found["narrow"], strict=True)]
        for name in arms
    }
    assert apart["slow"] == [0, 0] and apart["wide"][0] == 0 and apart["wide"][1] > 0.01
    # at the reference, the gradient of k3 is 0 (Schulman 2020)
    assert apart["penalty"][0] < 1e-6 < 0.01 < apart["penalty"][1]


def test_reinforce_without_baseline_agrees_with_its_closed_form():
    # g = r (a - p) / B: mean p (1 - p) / B, variance p (1 - p)^2 - p^2 (1 - p)^2 = p (1 - p)^3 over
    # B^2, B terms.
    per_group, weights_B1, _ = bandit(Estimator("no_baseline", 1, False, "sequence_mean"), 1)
    measured = statistics(per_group, weights_B1)
    assert measured.norm == pytest.approx(P * (1 - P), rel=0.01)
    assert measured.std == pytest.approx(math.sqrt(P * (1 - P) ** 3 / GROUPS), rel=0.01)
    # the rewarded responses, all alike
    assert measured.effective == pytest.approx(P * GROUPS, rel=0.01)
    assert measured.silent == pytest.approx(1 - P, rel=0.01)


@pytest.mark.parametrize("group_size", [2, 4])
def test_a_group_baseline_agrees_with_its_closed_form(group_size):
    """A group's gradient is m (1 - m) with m its share of action 1, whose moments follow from the
    binomial distribution."""
    g, q = group_size, 1 - P
    chances = [math.comb(g, k) * P**k * q ** (g - k) for k in range(g + 1)]
    values = [(k / g) * (1 - k / g) for k in range(g + 1)]
    mean = sum(c * v for c, v in zip(chances, values, strict=True))
    assert mean == pytest.approx(P * q * (g - 1) / g, rel=1e-12)  # unbiased up to (G - 1) / G
    variance = sum(c * v * v for c, v in zip(chances, values, strict=True)) - mean**2
    per_group, weights_B1, _ = bandit(
        Estimator("reinforce_with_baseline", g, False, "sequence_mean"), g
    )
    measured = statistics(per_group, weights_B1)
    assert measured.norm == pytest.approx(mean, rel=0.01)
    assert measured.std == pytest.approx(math.sqrt(variance / GROUPS), rel=0.01)
    assert measured.snr == pytest.approx(mean**2 / (variance / GROUPS), rel=0.03)
    assert measured.silent == pytest.approx(P**g + q**g, rel=0.01)


def test_a_baseline_lowers_the_variance():
    """At equal responses, and for a likely action, where rewards are large and advantages small."""
    without, _, _ = bandit(Estimator("no_baseline", 8, False, "sequence_mean"), 8)
    with_, _, _ = bandit(Estimator("reinforce_with_baseline", 8, False, "sequence_mean"), 8)
    ones = torch.ones(8, 1)
    assert statistics(with_, ones).snr > statistics(without, ones).snr


def test_statistics_by_hand():
    # Two prompts, gradients (3, 0) and (0, 4): G = (3, 4), norm 5; deviations +-(1.5, -2) from the
    # mean: sum of squares 12.5, times P / (P - 1) = 25. Cosines 3/5 and 4/5. Weights 1, 1, 2: (4)^2
    # / 6.
    measured = statistics(
        torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[1.0], [-1.0], [2.0]])
    )
    assert measured.norm == pytest.approx(5)
    assert measured.std == pytest.approx(5)
    assert measured.cosine == pytest.approx(0.7)
    assert measured.snr == pytest.approx(0)
    assert measured.effective == pytest.approx(16 / 6)
    assert measured.silent == 0


def test_all_losses_and_normalisations_are_compared():
    planned = list(estimators((2, 8), updates=1))
    assert {e.loss_type for e in planned} == set(LOSSES)
    assert {e.loss_normalization for e in planned} == set(NORMALIZATIONS)
    assert {e.group_size for e in planned} == {2, 8}
    # Of the losses with a ratio, all seven.
    assert sum(e.second_update for e in planned) == 7
    assert len(planned) == len(set(planned))


def test_too_many_gradients_are_refused_before_they_are_computed():
    refuse_too_many_gradients("--prompts 2", 2, 1000)
    with pytest.raises(UserError, match="--prompts 1000: their gradients take .* GiB"):
        refuse_too_many_gradients("--prompts 1000", 1000, 10**12)


def test_the_second_update_ignores_the_sampler_and_delivers_signals(tiny_folder):
    """The rollout's log-probs of the sampler are none of this policy's; a run would stop at
    them."""
    policy, estimator = (
        open_tiny(tiny_folder, 1000),
        Estimator("grpo_clip", 4, True, "sequence_mean", second_update=True),
    )
    config, tokenizer = (
        SamplerConfig(str(tiny_folder), "cpu", "float32"),
        load_tokenizer(str(tiny_folder)),
    )
    sampler = open_sampler(SAMPLERS["transformers"], config, tokenizer)
    rollout = sample_rollout(sampler)
    rollout = dataclasses.replace(rollout, sampler_log_probs_BT=rollout.sampler_log_probs_BT - 9)
    ((_, measured),) = inspect(policy, rollout, [estimator], ARGS.update_config)
    assert measured.norm > 0 and not signals_are_deferred()
