"""Gradients of whole updates against formulas that share no code with training: a model's log-probs
and entropies in float64 by transformers' own forward pass, weighed by the papers' derivatives
(`alignment.verification.papers`)."""

import dataclasses

import pytest
import torch
from rollout_helpers import ARGS, open_tiny, sample_rollout
from transformers import AutoModelForCausalLM

from alignment.config.settings import replaced
from alignment.core.losses import CORRECTIONS, LOSSES
from alignment.core.records import Rollout
from alignment.core.selection import SELECTIONS
from alignment.model.loading import load_tokenizer
from alignment.sampling.transformers import TransformersSampler
from alignment.system.clock import Clock
from alignment.training.preparation import prepare_update
from alignment.training.update import (
    References,
    rollout_objective,
    rows_with_gradient,
    update,
)
from alignment.verification.checks import own_values
from alignment.verification.papers import PaperLogProbs, paper_values

# Two updates of the same responses, so that the second one's ratios are not 1.
BASE = {"epochs_per_rollout": 2, "warmup_steps": 0, "learning_rate": 1e-3}
OBJECTIVES = {
    "entropy_bonus": {"entropy_coefficient": 0.05},
    # The untrained model's entropy is about 5.5 nats.
    "entropy_target": {"entropy_coefficient": 0.05, "entropy_target": 8.0, "entropy_delta": 0.02},
    "entropy_above_target": {"entropy_coefficient": 0.05, "entropy_target": 1.0},
    "two_sided_mask": {
        "loss_type": "reinforce_with_baseline",
        "sampler_correction": "token_mask",
        "correction_floor": 0.9,
        "correction_cap": 1.1,
    },
    "geometric_truncate": {
        "sampler_correction": "geometric_truncate",
        "correction_floor": 0.98,
        "correction_cap": 1.01,
    },
    "geometric_mask": {
        "loss_type": "grpo_no_clip",
        "sampler_correction": "geometric_mask",
        "correction_floor": 0.98,
        "correction_cap": 1.01,
    },
    "sequence_truncate": {
        "loss_type": "cispo",
        "sampler_correction": "sequence_truncate",
        "correction_floor": 0.8,
        "correction_cap": 1.2,
    },
    "sequence_mask": {
        "loss_type": "gspo",
        # Wide, so that the second update, too, has a gradient.
        "cliprange": 0.9,
        "sampler_correction": "sequence_mask",
        "correction_floor": 0.8,
        "correction_cap": 1.2,
    },
    "token_truncate": {
        "loss_type": "no_baseline",
        "sampler_correction": "token_truncate",
        "correction_floor": 0.9,
        "correction_cap": 1.1,
    },
    "sapo": {"loss_type": "sapo"},
    "gmpo": {"loss_type": "gmpo"},
    "dppo": {"loss_type": "dppo"},
    "dppo_of_kl": {"loss_type": "dppo", "loss.divergence": "kl"},
    "top_entropy": {"token_selection": "top_entropy"},
    "clip_cov": {
        "token_selection": "clip_cov",
        "selected_share": 1.0,
        "covariance_low": 0.1,
        "covariance_high": 0.5,
    },
    "kl_cov": {"token_selection": "kl_cov", "selected_share": 0.1},
    "kl_cov_of_reinforce": {
        "loss_type": "reinforce_with_baseline",
        "token_selection": "kl_cov",
        "loss_normalization": "token_mean",
        "entropy_coefficient": 0.01,
    },
}


def arguments(name: str):
    return replaced(ARGS, **BASE, **OBJECTIVES[name])


def test_every_entry_has_a_row():
    """Each loss, selection and correction of the tables, and each choice of a loss's own."""

    def chosen(flag: str) -> set[object]:
        return {getattr(arguments(name), flag) for name in OBJECTIVES}

    assert chosen("loss_type") == set(LOSSES)
    assert chosen("token_selection") == {"none", *SELECTIONS}
    assert chosen("sampler_correction") == set(CORRECTIONS)
    divergences = {arguments(name).update_config.loss.settings for name in ("dppo", "dppo_of_kl")}
    assert {settings.divergence for settings in divergences} == {"tv", "kl"}


@pytest.fixture(scope="module")
def rollout(tiny_folder, loaded_model) -> Rollout:
    """Responses of the untrained model, which no test changes."""
    tokenizer = load_tokenizer(str(tiny_folder))
    return sample_rollout(TransformersSampler(loaded_model, tokenizer, context=256))


class Oracle:
    """A model in float64, and what it computes of a rollout."""

    def __init__(self, folder, rollout, args):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.model.eval()
        self.rollout = rollout
        self.args = args
        self.initial = self.rows(self.values()[0])

    def values(self) -> torch.Tensor:
        """Log-probs and entropies [2, N] of the response tokens, by a pass of all rows. No token
        sees the padding, which stands behind them."""
        batch = self.rollout.batch
        log_p_NV = self.model(batch.input_ids).logits[batch.response_mask].log_softmax(-1)
        of_labels_N = log_p_NV.gather(-1, batch.labels[batch.response_mask][:, None])[:, 0]
        return torch.stack([of_labels_N, -(log_p_NV.exp() * log_p_NV).sum(-1)])

    def rows(self, values: torch.Tensor) -> list[list[float]]:
        lengths = self.rollout.lengths
        return [row.tolist() for row in values.detach().split(lengths)]

    def gradient(self, weights, coefficient: float) -> torch.Tensor:
        """The gradient [D] at these weights, with that entropy coefficient."""
        self.model.load_state_dict(
            {name: tensor.double() for name, tensor in weights}, strict=False
        )
        self.model.zero_grad()
        values = self.values()
        rollout = self.rollout
        sampler = rollout.sampler_log_probs_BT[rollout.batch.response_mask].double()
        policy, entropies = values
        log_probs = PaperLogProbs(
            self.rows(policy),
            self.initial,
            self.rows(policy),
            self.rows(sampler),
            self.rows(entropies),
        )
        config = self.args.update_config
        setting = {**vars(config.loss), **vars(config.advantage)}
        setting |= {"loss": self.args.loss_type, "advantage": self.args.advantage}
        setting["max_new_tokens"] = self.args.max_new_tokens
        setting["entropy_coefficient"] = coefficient
        setting |= own_values("loss", config.loss.loss.settings, config.loss.settings)
        if setting["selected_share"] is None:
            setting["selected_share"] = {"top_entropy": 0.2, "kl_cov": 0.002}.get(
                self.args.token_selection
            )
        rewards = rollout.raw_rewards_B1[:, 0].tolist()
        derivatives = paper_values(setting, rewards, log_probs)[len(rewards) + 1 :]
        values.backward(torch.tensor(derivatives, dtype=torch.float64).view(2, -1))
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])


def two_updates(policy, rollout, args) -> list[tuple[list, float, torch.Tensor]]:
    """Weights, entropy coefficient and gradient of the two updates, made as `update` makes them."""
    config = args.update_config
    rollout = References(config, None, None, Clock()).annotate(rollout, policy, 1)
    rows = range(len(rollout.lengths))
    made = []
    for number in (1, 2):
        weights = [(name, tensor.clone()) for name, tensor in policy.weights()]
        prepared = prepare_update(policy, rollout, rows, config, number)
        objective = rollout_objective(prepared.rollout, rows, prepared.config)
        list(policy.accumulate(rollout.batch, rows_with_gradient(rollout, config), objective))
        made.append((weights, prepared.config.loss.entropy_coefficient, policy.gradient()))
        policy.step(1e-3)
        config = prepared.next_config
    return made


# The coefficients of both updates, where they are not those of the flags.
COEFFICIENTS = {"entropy_target": [0.05, 0.07], "entropy_above_target": [0.0, 0.0]}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_two_gradients_are_the_papers_however_the_batch_is_cut(
    name, tiny_folder, rollout
):
    args = arguments(name)
    if args.sampler_correction != "none":
        # A sampler that is off by some percent.
        noise_BT = 0.1 * torch.randn(rollout.batch.labels.shape, generator=torch.manual_seed(0))
        moved_BT = rollout.sampler_log_probs_BT + noise_BT.where(rollout.batch.response_mask, 0)
        rollout = dataclasses.replace(rollout, sampler_log_probs_BT=moved_BT)
    oracle = Oracle(tiny_folder, rollout, args)
    for micro_batch_tokens in (100_000, 150):
        made = two_updates(open_tiny(tiny_folder, micro_batch_tokens), rollout, args)
        for (weights, coefficient, gradient), number in zip(made, (0, 1), strict=True):
            wanted = COEFFICIENTS.get(name, [args.entropy_coefficient] * 2)[number]
            assert coefficient == pytest.approx(wanted, abs=1e-15)
            exact = oracle.gradient(weights, coefficient)
            assert exact.abs().max() > 1e-3
            torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=1e-6)


# `update` makes those of a loss alone in `tests/verification/test_whole_update.py`.
OF_MORE_THAN_A_LOSS = [
    name for name, flags in OBJECTIVES.items() if flags.keys() - {"loss_type", "loss.divergence"}
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_MORE_THAN_A_LOSS)
def test_a_few_steps_train(name, policy, rollout):
    """By `update` itself: what it reports, and the coefficient that the next step begins with."""
    args = dataclasses.replace(arguments(name), max_sampler_mismatch=10.0)
    config = args.update_config
    before = [tensor.clone() for _, tensor in policy.weights()]
    for step in (1, 2):
        annotated = References(config, None, None, Clock()).annotate(rollout, policy, step)
        result = update(policy, annotated, config, step)
        config = result.config
        assert result.report["bad_updates"] == 0 and result.report["updates"] == 2
        if args.token_selection != "none":
            assert 0 < result.report["selected_fraction"] < 1
    if args.entropy_target:
        following = {"entropy_target": 0.05 + 4 * 0.02, "entropy_above_target": 0.05 - 4 * 0.005}
        assert config.loss.entropy_coefficient == pytest.approx(following[name], abs=1e-15)
        assert result.report["entropy_coefficient_next"] == config.loss.entropy_coefficient
    after = [tensor for _, tensor in policy.weights()]
    assert not all(torch.equal(*pair) for pair in zip(before, after, strict=True))
