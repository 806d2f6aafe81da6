"""Which tokens of a step are selected, by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment.core.losses import LOSSES, LossConfig, LossInputs, micro_batch_loss
from alignment.core.selection import StepTokens, covariances, number_selected, select_tokens


def tokens_of(log_probs, entropies, advantages, draws=None) -> StepTokens:
    draws = [0.5] * len(log_probs) if draws is None else draws
    return StepTokens(
        *(
            torch.tensor(values, dtype=torch.float64)
            for values in (log_probs, entropies, advantages, draws)
        )
    )


def selected(selection: str, tokens: StepTokens, **numbers) -> list[int]:
    config = LossConfig(LOSSES["grpo_clip"], token_selection=selection, **numbers)
    return select_tokens(tokens, config).nonzero().flatten().tolist()


# Means: log-prob -2, A 1/4. Covariances: 1 * 3/4, -1 * 3/4, 2 * -5/4, -2 * -1/4 = 0.75, -0.75,
# -2.5, 0.5.
TOKENS = tokens_of(
    [-1.0, -3.0, 0.0, -4.0],
    [0.2, 0.9, 0.1, 0.9 - 5e-6],
    [1.0, 1.0, -1.0, 0.0],
    [0.7, 0.1, 0.2, 0.3],
)


def test_covariances_by_hand():
    assert covariances(TOKENS).tolist() == pytest.approx([0.75, -0.75, -2.5, 0.5], abs=1e-15)


def test_shares_are_rounded_down_but_select_something():
    assert [number_selected(10, share) for share in (0.01, 0.2, 0.39, 1.0)] == [1, 2, 3, 10]


def test_the_tokens_of_the_highest_entropy_with_those_that_tie():
    """One of four: the fourth is 5e-6 below the second, which is rounding."""
    assert selected("top_entropy", TOKENS, selected_share=0.25) == [1, 3]
    assert selected("top_entropy", TOKENS, selected_share=0.75) == [0, 1, 3]
    assert selected("top_entropy", TOKENS) == [1, 3]  # 0.2 of four tokens: one


def test_the_tokens_of_the_highest_covariance():
    assert selected("kl_cov", TOKENS) == [0]
    assert selected("kl_cov", TOKENS, selected_share=0.5) == [0, 3]


def test_tokens_within_bounds_of_covariance_are_drawn():
    numbers = {"covariance_low": 0.4, "covariance_high": 1.0}
    assert selected("clip_cov", TOKENS, selected_share=0.5, **numbers) == [0, 3]
    # Of the two the one with the smaller random number.
    assert selected("clip_cov", TOKENS, selected_share=0.25, **numbers) == [3]
    # Bounds are closed; those by default select none here.
    assert selected("clip_cov", TOKENS, covariance_low=0.75, covariance_high=0.75) == [0]
    assert selected("clip_cov", TOKENS) == []


@given(st.permutations(range(12)), st.sampled_from(["top_entropy", "clip_cov", "kl_cov"]))
def test_the_order_of_the_tokens_does_not_matter(order, selection):
    drawn = torch.Generator().manual_seed(0)
    values = torch.rand(4, 12, generator=drawn, dtype=torch.float64)
    config = LossConfig(
        LOSSES["grpo_clip"],
        token_selection=selection,
        selected_share=0.3,
        covariance_low=-0.05,
        covariance_high=0.1,
    )
    chosen = select_tokens(StepTokens(*values), config)
    assert torch.equal(select_tokens(StepTokens(*values[:, order]), config), chosen[order])


@pytest.mark.parametrize(
    ("selection", "expected"),
    # Ratios 2 and 1/2 at advantage 1, unclipped: losses -2 and -1/2, gradients the same; the first
    # token is selected, one of two. Its divergence has the derivative 2 - 1.
    [
        ("top_entropy", [-2.0 * 2, 0.0]),
        ("clip_cov", [0.0, -0.5]),
        ("kl_cov", [-2.0 + 0.3, -0.5]),
    ],
)
def test_what_the_loss_does_with_the_selected_tokens(selection, expected):
    old = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    new = old + torch.tensor([[2.0, 0.5]], dtype=torch.float64).log()
    new.requires_grad_()
    config = LossConfig(LOSSES["grpo_no_clip"], token_selection=selection, kl_cov_coefficient=0.3)
    inputs = LossInputs(
        config,
        new,
        torch.ones(1, 2, dtype=torch.bool),
        advantages=torch.ones(1, 1, dtype=torch.float64),
        old_log_probs=old,
        selected=torch.tensor([[True, False]]),
        selected_share=0.5,
    )
    loss, sums = micro_batch_loss(inputs, 1.0)
    loss.backward()
    # sequence_mean: the mean over the response's two tokens.
    assert (2 * new.grad[0]).tolist() == pytest.approx(expected, abs=1e-15)
    assert sums["selected_tokens"] == 1


def test_only_tokens_of_high_entropy_count_in_the_denominator():
    """Three tokens at advantages 1 and -4, of which two are selected: (-1 + 4) / 2. The KL penalty
    is a mean over all three (k1: 0.3 each)."""
    log_probs = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    config = LossConfig(
        LOSSES["grpo_no_clip"],
        token_selection="top_entropy",
        loss_normalization="token_mean",
        beta=1.0,
        kl_estimator="k1",
    )
    inputs = LossInputs(
        config,
        log_probs,
        mask,
        advantages=torch.tensor([[1.0], [-4.0]], dtype=torch.float64),
        old_log_probs=log_probs.detach(),
        reference_log_probs=log_probs.detach() - 0.3,
        selected=torch.tensor([[False, True], [True, False]]),
        selected_share=2 / 3,
    )
    loss, _ = micro_batch_loss(inputs, 3.0)
    assert loss.item() == pytest.approx(1.5 + 0.3, abs=1e-15)


def test_the_entropy_bonus_lowers_the_loss_of_every_token():
    log_probs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    entropies = torch.tensor([[0.5, 1.5]], dtype=torch.float64, requires_grad=True)
    config = LossConfig(LOSSES["reinforce_with_baseline"], entropy_coefficient=0.1)
    inputs = LossInputs(
        config,
        log_probs,
        torch.ones(1, 2, dtype=torch.bool),
        advantages=torch.zeros(1, 1, dtype=torch.float64),
        entropies=entropies,
    )
    loss, _ = micro_batch_loss(inputs, 4.0)
    loss.backward()
    assert loss.item() == pytest.approx(-0.1 * (0.5 + 1.5) / 2 / 4, abs=1e-16)
    assert entropies.grad.tolist() == [[pytest.approx(-0.1 / 2 / 4, abs=1e-16)] * 2]
    assert log_probs.grad.tolist() == [[0.0, 0.0]]
