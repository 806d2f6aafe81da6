"""SAPO, GMPO and DPPO by hand, in value and gradient."""

import math

import pytest
import torch

from alignment.core.losses import (
    LOSSES,
    DPPOSettings,
    GMPOSettings,
    LossConfig,
    LossInputs,
    SAPOSettings,
)

QUARTER = math.log(0.25)


def loss_and_gradient(name: str, ratios: list[float], advantage: float, settings=None):
    """Losses, their gradients by each token's log-prob, and which tokens count as clipped, of one
    response whose tokens had the probability 1/4."""
    old = torch.full((1, len(ratios)), QUARTER, dtype=torch.float64)
    new = old + torch.tensor([ratios], dtype=torch.float64).log()
    new.requires_grad_()
    inputs = LossInputs(
        LossConfig(LOSSES[name], settings=settings),
        new,
        torch.ones(1, len(ratios), dtype=torch.bool),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        old_log_probs=old,
    )
    loss_BT, logged = LOSSES[name].function(inputs)
    loss_BT.mean().backward()
    gradient = new.grad[0] * len(ratios)
    return loss_BT[0].tolist(), gradient.tolist(), logged["clipped"][0].tolist()


def close(values: list[float], expected: list[float]) -> None:
    assert values == pytest.approx(expected, abs=1e-14)


def test_sapo_is_a_gate_of_the_signs_temperature():
    """Its slope is 4 s (1 - s) with the sigmoid s: 1 at ratio 1."""
    loss, gradient, clipped = loss_and_gradient("sapo", [1.0, 1.5], 2.0, SAPOSettings(2.0, 4.0))
    s = 1 / (1 + math.exp(-1))
    close(loss, [-2.0, -2 * 2 * s])
    close(gradient, [-2.0, -2 * 1.5 * 4 * s * (1 - s)])
    assert clipped == [False, False]
    loss, gradient, _ = loss_and_gradient("sapo", [1.25], -1.0, SAPOSettings(2.0, 4.0))
    close(loss, [s])
    close(gradient, [1.25 * 4 * s * (1 - s)])


@pytest.mark.parametrize(
    ("advantage", "mean", "moving"),
    # Ratios 4, 1 and 1/4, clipped to 1/2 and 2: for a positive advantage 2, 1 and 1/4, of
    # geometric mean (1/2)^(1/3); for a negative one 4, 1 and 1/2, of mean 2^(1/3).
    [(3.0, 0.5 ** (1 / 3), [0, 1, 1]), (-3.0, 2 ** (1 / 3), [1, 1, 0]), (0.0, 1.0, [0, 0, 0])],
)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(advantage, mean, moving):
    settings = GMPOSettings(clip_low=math.log(2), clip_high=math.log(2))
    loss, gradient, clipped = loss_and_gradient("gmpo", [4.0, 1.0, 0.25], advantage, settings)
    close(loss, [-advantage * mean] * 3)
    # Each token has a third of the response's log-ratio, and three tokens have its loss.
    close(gradient, [-advantage * mean * moves for moves in moving])
    assert clipped == [advantage != 0 and not moves for moves in moving]


@pytest.mark.parametrize(
    ("advantage", "kept"),
    # Probabilities 1/2, 3/8, 1/8 and 1/16: 1/4, 1/8, 1/8 and 3/16 from the old 1/4.
    [(2.0, [False, True, True, True]), (-2.0, [True, True, True, False])],
)
def test_dppo_masks_what_moves_away_beyond_its_total_variation(advantage, kept):
    ratios = [2.0, 1.5, 0.5, 0.25]
    loss, gradient, clipped = loss_and_gradient("dppo", ratios, advantage, DPPOSettings("tv", 0.15))
    expected = [
        -ratio * advantage if is_kept else 0.0 for ratio, is_kept in zip(ratios, kept, strict=True)
    ]
    close(loss, expected)
    close(gradient, expected)
    assert clipped == [not is_kept for is_kept in kept]


def test_dppo_of_the_divergence_of_two_outcomes():
    """From 1/4 to 1/2: 1/4 log 1/2 + 3/4 log 3/2 = 0.1308."""
    divergence = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    for threshold, loss in ((divergence + 1e-12, -2.0), (divergence - 1e-12, 0.0)):
        found, _, _ = loss_and_gradient("dppo", [2.0], 1.0, DPPOSettings("kl", threshold))
        close(found, [loss])


@pytest.mark.parametrize(
    ("divergence", "ratios"),
    # From 1/4 to 0.44 and 0.46: 0.19 and 0.21, thresholds 0.2. From 1/4 to 0.4 and 0.405: 1/4 log
    # 5/8 + 3/4 log 5/4 = 0.0499, and 0.0531; threshold 0.05.
    [("tv", [1.76, 1.84]), ("kl", [1.6, 1.62])],
)
def test_dppo_has_a_threshold_for_each_divergence(divergence, ratios):
    _, _, clipped = loss_and_gradient("dppo", ratios, 1.0, DPPOSettings(divergence))
    assert clipped == [False, True]


def test_a_probability_that_rounds_to_one_has_a_finite_divergence():
    found, gradient, _ = loss_and_gradient("dppo", [4.0], 1.0, DPPOSettings("kl", 0.1))
    assert (found, gradient) == ([0.0], [0.0])
