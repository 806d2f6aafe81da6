"""The estimate of a distribution's power, on numbers that are worked out by hand and on draws."""

import math

import pytest
import torch

from alignment.verification.sharpness import MOST_SHARPER, sure_change_of_power


def test_the_estimate_and_its_error_by_hand():
    # Of squares 1 and 1, the products 0.1 + e and 0.1 - e say 0.1; without one response, 0.1 - e
    # and 0.1 + e. The squared errors sum to 2 e e, times (2 - 1) / 2: the error is e. Student's t
    # of one degree of freedom is Cauchy's, of which a share of 5e-8 is beyond 1 / (5e-8 pi).
    error = 1e-9
    off_BT = torch.tensor([[0.1 + error, 0.0], [0.1 - error, 0.0]], dtype=torch.float64)
    slopes_BT = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    quantile = 1 / (5e-8 * math.pi)
    expected = pytest.approx(0.1 - quantile * error, rel=1e-6)
    assert sure_change_of_power(off_BT, slopes_BT) == expected
    assert sure_change_of_power(-off_BT, slopes_BT) == expected


def test_what_says_nothing_is_no_change():
    ones_BT = torch.ones(1, 3)
    assert sure_change_of_power(ones_BT, ones_BT) == 0  # one response
    certain_BT = torch.zeros(4, 3)
    assert sure_change_of_power(certain_BT, certain_BT) == 0
    # One token alone has a choice, so that its rounding would be the whole estimate.
    slopes_BT = torch.zeros(4, 3)
    slopes_BT[0, 0] = 0.5
    assert sure_change_of_power(0.1 * slopes_BT, slopes_BT) == 0


def drawn(power: float, rounding: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How far the log-probs of 16 responses of 24 tokens are off, by a sampler whose logits are
    `power` times the plain ones and have some noise, from which it draws; and their slopes."""
    generator = torch.Generator().manual_seed(seed)
    logits_BTV = 2 * torch.randn(16, 24, 32, generator=generator)
    plain_BTV = logits_BTV.log_softmax(-1)
    noise_BTV = rounding * torch.randn(logits_BTV.shape, generator=generator)
    sampler_BTV = (power * logits_BTV + noise_BTV).log_softmax(-1)
    uniform_BTV = torch.rand(logits_BTV.shape, generator=generator)
    tokens_BT1 = (sampler_BTV - (-uniform_BTV.log()).log()).argmax(-1, keepdim=True)  # Gumbel's
    plain_BT = plain_BTV.gather(-1, tokens_BT1)[..., 0]
    sampler_BT = sampler_BTV.gather(-1, tokens_BT1)[..., 0]
    entropy_BT = torch.special.entr(plain_BTV.exp()).sum(-1)
    return sampler_BT - plain_BT, plain_BT + entropy_BT


@pytest.mark.parametrize("rounding", [0.0, 0.05])
@pytest.mark.parametrize("power", [1 / 1.1, 1.1])
def test_another_temperature_is_seen_behind_rounding(power, rounding):
    for seed in range(20):
        assert sure_change_of_power(*drawn(power, rounding, seed)) > MOST_SHARPER


def test_rounding_alone_is_no_change():
    assert max(sure_change_of_power(*drawn(1.0, 0.1, seed)) for seed in range(200)) == 0
