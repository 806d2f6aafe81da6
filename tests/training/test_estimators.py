"""The gradient that each estimator of advantages gives the tiny model, against the papers' formulas
and transformers' own model in float64, however the batch is cut."""

import dataclasses

import pytest
import torch
from rollout_helpers import ARGS, open_tiny, sample_rollout
from transformers import AutoModelForCausalLM

from alignment.config.settings import replaced
from alignment.core.advantages import ADVANTAGES
from alignment.rollouts.source import with_advantages
from alignment.training.microscope import compute_gradient
from alignment.training.update import rollout_objective
from alignment.verification.paper_advantages import paper_advantages


@pytest.fixture(scope="module")
def policies(tiny_folder):
    """The tiny model, as policies that cut a batch in different ways."""
    return [open_tiny(tiny_folder, micro_batch_tokens=tokens) for tokens in (0, 1, 60)]


@pytest.fixture
def rollout(sampler):
    """Four prompts with four responses each; in some of the groups rewards differ."""
    return sample_rollout(sampler)


def oracle_gradient(folder, rollout, advantages):
    """The gradient of -mean over responses of A * (mean over tokens of log pi), in float64, by the
    names of the weights. No token sees the padding, which stands behind the rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    batch = rollout.batch
    log_probs_BTV = model(batch.input_ids).logits.log_softmax(dim=-1)
    log_probs_BT = log_probs_BTV.gather(2, batch.labels[:, :, None])[:, :, 0]
    sums_B = (log_probs_BT * batch.response_mask).sum(dim=1)
    means_B = sums_B / batch.response_mask.sum(dim=1)
    (-(torch.tensor(advantages, dtype=torch.float64) * means_B).mean()).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "none"])
def test_the_gradient_is_the_papers_however_the_batch_is_cut(name, policies, rollout, tiny_folder):
    own_settings = {}
    if name == "pass_at_k":  # Groups have four responses.
        own_settings["advantage.k"] = 2
    args = replaced(ARGS, advantage=name, loss_type="reinforce_with_baseline", **own_settings)
    config = args.update_config
    settings = {"group_size": 4, "advantage": name, **vars(config.advantage)}
    own = config.advantage.settings
    if own is not None:
        settings |= {f"advantage.{field}": value for field, value in vars(own).items()}
    advantages = paper_advantages(settings, rollout.raw_rewards_B1[:, 0].tolist(), rollout.lengths)
    expected = oracle_gradient(tiny_folder, rollout, advantages)
    rollout = with_advantages(dataclasses.replace(rollout, advantages_B1=None), config.advantage)
    assert_gradients_equal(policies, rollout, config, expected)


def test_the_second_steps_baseline_is_the_first_steps_mean(policies, rollout, tiny_folder):
    """`problem_average`, the only estimator with a state, asked for the same problems again: the
    average of a problem is 0.5 m + 0.5 m, its mean m in the first step. Rewards are then 1 - r."""
    settings = {"advantage": "problem_average", "advantage.decay": 0.5}
    config = replaced(ARGS, loss_type="reinforce_with_baseline", **settings).update_config
    rewards_PG = rollout.raw_rewards_B1.reshape(4, 4).double()
    advantages_PG = (1 - rewards_PG) - rewards_PG.mean(dim=1, keepdim=True)
    expected = oracle_gradient(tiny_folder, rollout, advantages_PG.flatten().tolist())
    first = with_advantages(dataclasses.replace(rollout, advantages_B1=None), config.advantage)
    second = dataclasses.replace(rollout, raw_rewards_B1=1 - rollout.raw_rewards_B1)
    second = with_advantages(second, config.advantage, first.advantage_state, step=2)
    assert_gradients_equal(policies, second, config, expected)


def assert_gradients_equal(policies, rollout, config, expected) -> None:
    rows = rollout.trained_rows
    for policy in policies:
        objective = rollout_objective(rollout, rows, config)
        gradient_D = compute_gradient(policy, rollout.batch, rows, objective)
        names = [weight_name for weight_name, _ in policy.weights()]
        expected_D = torch.cat([expected[weight_name].flatten() for weight_name in names])
        assert expected_D.norm() > 0.01
        torch.testing.assert_close(gradient_D.double(), expected_D, atol=1e-6, rtol=0)
