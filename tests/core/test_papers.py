"""The formulas of the papers (papers.py) by hand, the table that is made of them, and training's losses against it."""

import dataclasses
import json
import math

import pytest
from papers import LENGTHS, REWARDS, TABLE, paper_advantage, paper_loss, settings, table

from alignment.core import advantages, losses
from alignment.core.advantages import BASELINES, DEVIATIONS
from alignment.core.losses import CORRECTIONS, KL_ESTIMATORS, LOSSES, NORMALIZATIONS
from alignment.verification.checks import difference_from_papers


def test_training_computes_what_the_papers_say():
    assert difference_from_papers() < 1e-9


def test_the_table_is_what_the_formulas_give():
    written, made = json.loads(TABLE.read_text()), json.loads(json.dumps(table()))
    values = [setting.pop("values") for setting in made["settings"]]
    assert [setting.pop("values") for setting in written["settings"]] == [pytest.approx(row, abs=2e-10) for row in values]
    assert written == made


def test_the_table_has_every_choice():
    chosen = [{**loss, **advantage} for loss, advantage in settings()]
    values = lambda name: {setting[name] for setting in chosen}
    assert values("loss") == set(LOSSES) and values("loss_normalization") == set(NORMALIZATIONS)
    assert values("kl_estimator") == set(KL_ESTIMATORS) and values("sampler_correction") == set(CORRECTIONS)
    assert values("baseline") == set(BASELINES) and values("std_of") == set(DEVIATIONS)
    assert values("dual_clip") == {0.0, 1.5} and values("cliprange_high") == {None, 0.28}


def test_a_biased_deviation_is_noticed(monkeypatch):
    monkeypatch.setitem(advantages.DEVIATIONS, "group", advantages.DEVIATIONS["group_population"])
    assert difference_from_papers() > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_in_an_entrys_place_is_noticed(name, monkeypatch):
    function = losses._reinforce if name != "reinforce_with_baseline" else LOSSES["cispo"].function
    weight = "raw_rewards" if name != "no_baseline" else "advantages"
    monkeypatch.setitem(LOSSES, name, dataclasses.replace(LOSSES[name], function=function, weight=weight))
    assert difference_from_papers() > 0.01


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_another_kl_estimator_is_noticed(estimator, monkeypatch):
    monkeypatch.setitem(KL_ESTIMATORS, estimator, lambda log_ratio: log_ratio)
    assert difference_from_papers() > 1e-3


def test_the_formulas_by_hand():
    """Two of four responses right: mean 1/2, unbiased deviation 1/sqrt(3). A ratio of 2 is clipped at 1.2."""
    config = {"group_size": 4, "baseline": "group_mean", "normalize_by_std": True, "std_of": "group", "advantage_eps": 0.0}
    rewards = [1.0, 1.0, 0.0, 0.0]
    of_all = [paper_advantage(place, rewards, config) for place in range(4)]
    assert of_all == pytest.approx([3**0.5 / 2] * 2 + [-(3**0.5) / 2] * 2)
    loo = config | {"group_size": 2, "baseline": "leave_one_out", "normalize_by_std": False}
    assert [paper_advantage(place, [1.0, 0.0], loo) for place in range(2)] == [1.0, -1.0]
    loss = {"loss": "grpo_clip", "loss_normalization": "token_mean", "kl_estimator": "k3", "sampler_correction": "none"}
    loss |= {"cliprange": 0.2, "cliprange_high": None, "dual_clip": 0.0, "beta": 0.0, "correction_cap": 2.0}
    twice, zeros = ([[number] * length for length in LENGTHS] for number in (math.log(2), 0.0))
    half = [0.5] * len(REWARDS)
    assert paper_loss(loss, half, twice, twice, zeros, zeros, zeros) == pytest.approx(-0.6)
    assert paper_loss(loss | {"loss": "grpo_no_clip"}, half, twice, twice, zeros, zeros, zeros) == pytest.approx(-1.0)
    assert paper_loss(loss | {"dual_clip": 1.5}, [-0.5] * 6, twice, twice, zeros, zeros, zeros) == pytest.approx(0.75)
