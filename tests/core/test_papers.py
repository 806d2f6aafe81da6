"""Losses, gradients and advantages against the papers' formulas (papers.py), and the formulas by hand."""

import dataclasses

import pytest
import torch
from papers import PAPER_LOSSES, PaperResponse, advantages_difference, losses_difference, paper_advantages

from alignment.core import advantages, losses
from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LOSSES, LossConfig


def test_advantages_are_those_of_the_papers():
    assert advantages_difference() < 1e-12


def test_losses_and_their_gradients_are_those_of_the_papers():
    assert losses_difference() < 1e-12


def test_a_biased_deviation_is_noticed(monkeypatch):
    monkeypatch.setitem(advantages.DEVIATIONS, "group", advantages.DEVIATIONS["group_population"])
    assert advantages_difference() > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_in_an_entrys_place_is_noticed(name, monkeypatch):
    function = losses._reinforce if name != "reinforce_with_baseline" else LOSSES["cispo"].function
    weight = "raw_rewards" if name != "no_baseline" else "advantages"
    monkeypatch.setitem(LOSSES, name, dataclasses.replace(LOSSES[name], function=function, weight=weight))
    assert losses_difference() > 0.01


def test_the_formulas_by_hand():
    """Two of four responses right: mean 1/2, unbiased deviation 1/sqrt(3). A ratio of 2 is clipped at 1.2."""
    config = AdvantageConfig(4, normalize_by_std=True, advantage_eps=0.0)
    assert paper_advantages([1.0, 1.0, 0.0, 0.0], config) == pytest.approx([3**0.5 / 2] * 2 + [-(3**0.5) / 2] * 2)
    assert paper_advantages([1.0, 0.0], AdvantageConfig(2, "leave_one_out", False)) == [1.0, -1.0]
    row = torch.tensor([2.0]).log()
    response = PaperResponse(row, torch.zeros(1), torch.zeros(1), torch.zeros(1), reward=1.0, advantage=0.5)
    config = LossConfig(LOSSES["grpo_clip"])
    assert PAPER_LOSSES["grpo_clip"](response, config).item() == pytest.approx(-0.6)
    assert PAPER_LOSSES["grpo_no_clip"](response, config).item() == pytest.approx(-1.0)
