"""The formulas of the papers (papers.py) by hand, and training's losses against them."""

import dataclasses
import math
from collections.abc import Callable
from itertools import islice, product
from types import SimpleNamespace

import pytest
from rollout_helpers import ARGS

from alignment.core import advantages, losses
from alignment.core.advantages import ADVANTAGES, BASELINES, DEVIATIONS, AdvantageConfig
from alignment.core.losses import (
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
    DPPOSettings,
    GMPOSettings,
    LossConfig,
    SAPOSettings,
)
from alignment.core.selection import SELECTIONS
from alignment.verification.checks import (
    PaperSetting,
    checks_without_model,
    difference_from_papers,
    own_values,
    paper_settings,
)
from alignment.verification.paper_advantages import paper_advantages
from alignment.verification.papers import (
    PaperLogProbs,
    paper_loss,
    paper_parts,
    paper_slopes,
    paper_values,
)

ADVANTAGE = {
    "group_size": 4,
    "baseline": "group_mean",
    "normalize_by_std": True,
    "std_of": "group",
    "advantage_eps": 0.0,
    "advantage": "group_baseline",
}
LOSS = {
    "loss": "grpo_clip",
    "loss_normalization": "token_mean",
    "kl_estimator": "k3",
    "sampler_correction": "none",
}
LOSS |= {
    "cliprange": 0.2,
    "cliprange_high": None,
    "dual_clip": 0.0,
    "beta": 0.0,
    "correction_cap": 2.0,
    "correction_floor": 0.0,
    "entropy_coefficient": 0.0,
    "token_selection": "none",
    "selected_share": 0.5,
    "covariance_low": 0.1,
    "covariance_high": 0.2,
    "kl_cov_coefficient": 1.0,
    "max_new_tokens": 4,
}


def every_setting(setting: PaperSetting) -> bool:
    return True


def difference(
    seed: int = 0, concerns: Callable[[PaperSetting], bool] = every_setting, most: int | None = None
) -> float:
    """Over the settings that `concerns` takes, or the first `most` of them."""
    settings = filter(concerns, paper_settings(seed))
    return difference_from_papers(islice(settings, most), seed)


@pytest.mark.parametrize("seed", range(3))
def test_training_computes_what_the_papers_say(seed):
    assert difference(seed) < 1e-14


@pytest.mark.parametrize("seed", range(3))
def test_every_choice_is_compared(seed):
    chosen = [
        vars(config) | vars(advantage) | {"loss": name}
        for name, config, _, advantage in paper_settings(seed)
    ]

    def values(name):
        return {setting[name] for setting in chosen}

    every = {(s["loss"], s["loss_normalization"], s["sampler_correction"]) for s in chosen}
    assert every == set(product(LOSSES, NORMALIZATIONS, CORRECTIONS)) and len(chosen) == len(every)
    assert values("kl_estimator") == set(KL_ESTIMATORS) and values("normalize_by_std") == {
        True,
        False,
    }
    assert len({id(setting["estimator"]) for setting in chosen}) == len(ADVANTAGES)
    assert values("baseline") == set(BASELINES) and values("std_of") == set(DEVIATIONS)
    assert values("dual_clip") == {0.0, 1.5} and values("cliprange_high") == {None, 0.28}
    assert values("correction_floor") == {0.0, 0.9}
    assert values("entropy_coefficient") == {0.0, 0.02}
    assert values("token_selection") == {"none", *SELECTIONS}
    assert (
        values("beta") == {0.1}
        and values("correction_cap") == {1.1}
        and values("cliprange") == {0.2}
    )


def test_another_seed_makes_other_numbers(monkeypatch):
    monkeypatch.setitem(KL_ESTIMATORS, "k3", lambda log_ratio: log_ratio)
    assert difference(0, most=5) == difference(0, most=5) != difference(1, most=5)


def test_a_biased_deviation_is_noticed(monkeypatch):
    monkeypatch.setitem(advantages.DEVIATIONS, "group", advantages.DEVIATIONS["group_population"])
    assert difference(concerns=lambda setting: setting.advantage.std_of == "group") > 0.1


@pytest.mark.parametrize("name", ADVANTAGES)
def test_another_estimator_in_an_entrys_place_is_noticed(name, monkeypatch):
    other = "opo" if name != "opo" else "maxrl"
    entry = dataclasses.replace(ADVANTAGES[name], function=ADVANTAGES[other].function)
    monkeypatch.setitem(ADVANTAGES, name, entry)
    assert difference(concerns=lambda setting: setting.estimator == name) > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_in_an_entrys_place_is_noticed(name, monkeypatch):
    function = losses._reinforce if name != "reinforce_with_baseline" else LOSSES["cispo"].function
    weight = "raw_rewards" if name != "no_baseline" else "advantages"
    monkeypatch.setitem(
        LOSSES, name, dataclasses.replace(LOSSES[name], function=function, weight=weight)
    )
    assert difference(concerns=lambda setting: setting.name == name) > 0.01


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_another_kl_estimator_is_noticed(estimator, monkeypatch):
    monkeypatch.setitem(KL_ESTIMATORS, estimator, lambda log_ratio: log_ratio)
    assert difference(concerns=lambda setting: setting.loss.kl_estimator == estimator) > 1e-3


@pytest.mark.parametrize(
    ("loss", "number"), [("grpo_clip", 2), ("cispo", 2), ("alignment.core.losses:_gspo", 1)]
)
def test_a_runs_own_settings_are_compared_first(loss, number):
    """A function of the user's own stands in no paper."""
    config = dataclasses.replace(
        ARGS, loss_type=loss, beta=0.3, std_of="batch", correction_cap=1.5
    ).update_config
    checks = list(checks_without_model(config))
    assert len(checks) == number and all(check.quantity() <= check.limit for check in checks)


def test_a_fault_of_a_runs_own_setting_is_noticed_by_its_line(monkeypatch):
    """A clip at twice the range is no fault of the entries that the other line takes."""
    config = dataclasses.replace(ARGS, loss_type="grpo_clip", cliprange=0.1).update_config
    real = losses._clip_range

    def clip_range(config):
        return (0.8, 1.2) if config.cliprange == 0.1 else real(config)

    monkeypatch.setattr(losses, "_clip_range", clip_range)
    of_run, of_all = checks_without_model(config)
    assert of_run.quantity() > 1e-3 and of_all.quantity() <= of_all.limit


def test_a_runs_own_estimator_that_needs_large_groups_is_compared(monkeypatch):
    """The default of pass@k takes groups of five at least."""
    config = dataclasses.replace(ARGS, advantage="pass_at_k", group_size=8).update_config
    of_run, _ = checks_without_model(config)
    assert of_run.quantity() <= of_run.limit

    def too_many(number: int, k: int) -> int:
        return math.comb(number, k) + 1

    changed = SimpleNamespace(comb=too_many, sqrt=math.sqrt)
    monkeypatch.setattr(advantages, "math", changed)
    assert of_run.quantity() > 1e-3


def test_advantages_by_hand():
    """Two of four responses right: mean 1/2, unbiased deviation 1/sqrt(3)."""
    of_all = paper_advantages(ADVANTAGE, [1.0, 1.0, 0.0, 0.0], [1] * 4)
    assert of_all == pytest.approx([3**0.5 / 2] * 2 + [-(3**0.5) / 2] * 2)
    loo = ADVANTAGE | {"group_size": 2, "baseline": "leave_one_out", "normalize_by_std": False}
    assert paper_advantages(loo, [1.0, 0.0], [1, 1]) == [1.0, -1.0]
    other = {"group_size": 3, "advantage_eps": 0.0, "advantage.threshold": 0.5}
    # One of three is right; two of the three pairs have it, so that m = 2/3 and s = sqrt(2)/3.
    pairs = other | {"advantage": "pass_at_k", "advantage.k": 2}
    assert paper_advantages(pairs, [1.0, 0.0, 0.0], [1, 1, 1]) == pytest.approx(
        [0.5**0.5, -(0.5**0.5) / 2, -(0.5**0.5) / 2]
    )
    opo = other | {"advantage": "opo"}
    assert paper_advantages(opo, [1.0, 0.0, 0.0], [3, 1, 2]) == [0.5, -0.5, -0.5]
    maxrl = other | {"advantage": "maxrl"}
    assert paper_advantages(maxrl, [1.0, 0.0, 0.0], [3, 1, 2]) == pytest.approx([2, -1, -1])


def test_losses_by_hand():
    """A ratio of 2 is clipped at 1.2."""
    twice, zeros = ([[number], [number] * 3] for number in (math.log(2), 0.0))

    def loss_of(half, **changed):
        log_probs = PaperLogProbs(twice, zeros, zeros, zeros, zeros)
        return paper_loss(LOSS | changed, [0.0] * 2, [half] * 2, log_probs)

    assert loss_of(0.5) == pytest.approx(-0.6)
    assert loss_of(0.5, loss="grpo_no_clip") == pytest.approx(-1.0)
    assert loss_of(-0.5, dual_clip=1.5) == pytest.approx(0.75)
    assert loss_of(0.5, loss="grpo_no_clip", loss_normalization="constant") == pytest.approx(-4 / 8)
    assert loss_of(
        0.5, loss="reinforce_with_baseline", loss_normalization="sequence_mean"
    ) == pytest.approx(-math.log(2) / 2)
    # k3 of twice the reference's probability: 1/2 - log(1/2) - 1
    assert loss_of(0.0, beta=0.1) == pytest.approx(0.1 * (0.5 + math.log(2) - 1))


def test_gradients_by_hand():
    """Two responses of one token, with rewards 1 and 0: the advantages are 1/2 and -1/2. A ratio's
    derivative is the ratio."""
    plain = {**LOSS, **ADVANTAGE, "group_size": 2, "normalize_by_std": False}
    twice, zeros = ([[number], [number]] for number in (math.log(2), 0.0))

    def gradient_of(**changed):
        values = [twice, zeros, zeros, zeros, zeros]
        return paper_values({**plain, **changed}, [1.0, 0.0], PaperLogProbs(*values))[3:5]

    assert gradient_of(loss="grpo_no_clip") == pytest.approx([-0.5, 0.5])
    # the better one is clipped at 1.2
    assert gradient_of(loss="grpo_clip") == pytest.approx([0.0, 0.5])
    assert gradient_of(loss="grpo_clip", dual_clip=1.5) == pytest.approx([0.0, 0.0])
    # 1.2 times reinforce's: no gradient of the weight
    assert gradient_of(loss="cispo") == pytest.approx([-0.3, 0.3])
    assert gradient_of(loss="reinforce_with_baseline") == pytest.approx([-0.25, 0.25])
    # both weights are pi_old / pi_sampler = 1, under the cap; the gradient of k2 is the log-ratio
    assert gradient_of(loss="no_baseline", beta=1.0, kl_estimator="k2") == pytest.approx(
        [x + math.log(2) / 2 for x in (-0.5, 0)]
    )


def test_the_bonus_and_the_selections_by_hand():
    """Two responses of one and of three tokens, A = 1/2 and -1/2 (mean -1/4), with log-probs of 0.4
    and 0 (mean 0.1): covariances are 0.3 * 0.75 = 0.225 and three times -0.1 * -0.25 = 0.025."""
    policy = [[0.4], [0.0, 0.0, 0.0]]
    old = [[0.0], [0.0, 0.0, 0.0]]
    entropies = [[0.3], [0.1, 0.9, 0.2]]

    def loss_of(**changed):
        log_probs = PaperLogProbs(policy, old, old, old, entropies)
        setting = LOSS | {"loss": "grpo_no_clip"} | changed
        return paper_loss(setting, [0.0] * 2, [0.5, -0.5], log_probs)

    ratio = math.exp(0.4)
    whole = (-0.5 * ratio + 1.5) / 4
    assert loss_of() == pytest.approx(whole, abs=1e-15)
    assert loss_of(entropy_coefficient=0.2) == pytest.approx(whole - 0.2 * 1.5 / 4, abs=1e-15)
    # The two of the highest entropy: the first response's token, and one of the other's.
    top = loss_of(token_selection="top_entropy")
    assert top == pytest.approx((-0.5 * ratio + 0.5) / 2, abs=1e-15)
    # Between 0.1 and 0.3 is the first response's covariance alone.
    clipped = loss_of(token_selection="clip_cov", covariance_high=0.3)
    assert clipped == pytest.approx(1.5 / 4, abs=1e-15)
    penalised = loss_of(token_selection="kl_cov", selected_share=0.25, kl_cov_coefficient=2.0)
    assert penalised == pytest.approx(whole + 2 * (ratio - 1.4) / 4, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sapo", SAPOSettings(3.0, 0.5)),
        ("gmpo", GMPOSettings(0.05, 0.1)),
        ("dppo", DPPOSettings("tv", 0.05)),
        ("dppo", DPPOSettings("kl", 0.02)),
        ("dppo", DPPOSettings("kl")),
    ],
)
def test_losses_with_settings_of_their_own_are_the_papers(name, settings):
    """With other numbers than their defaults, and not without them."""
    config = LossConfig(LOSSES[name], settings=settings)
    advantage = AdvantageConfig(group_size=3)
    setting = PaperSetting(name, config, "group_baseline", advantage)
    assert difference_from_papers([setting] * 5, seed=0) < 1e-14
    defaults = setting._replace(loss=dataclasses.replace(config, settings=None))
    flags = own_values("loss", LOSSES[name].settings, settings)
    assert flags != own_values("loss", LOSSES[name].settings, None)
    assert difference_from_papers([defaults] * 5, seed=0) < 1e-14


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_run_that_names_no_share_has_the_papers(name):
    changes = {"token_selection": name, "covariance_low": 0.02, "epochs_per_rollout": 2}
    of_run, *_ = checks_without_model(dataclasses.replace(ARGS, **changes).update_config)
    assert of_run.quantity() < 1e-9


@pytest.mark.parametrize("name", SELECTIONS)
def test_another_selection_in_an_entrys_place_is_noticed(name, monkeypatch):
    other = "clip_cov" if name == "top_entropy" else "top_entropy"
    changed = dataclasses.replace(SELECTIONS[name], choose=SELECTIONS[other].choose)
    monkeypatch.setitem(SELECTIONS, name, changed)
    assert difference(concerns=lambda setting: setting.loss.token_selection == name) > 1e-3


def whole_derivatives(setting, rewards, values: PaperLogProbs, name: str) -> list[float]:
    """The derivatives of the loss of the whole step, for advantages of 1/2 and -1/2, by each of
    some values."""
    derivatives = []
    rows = getattr(values, name)
    for index, row in enumerate(rows):
        for position in range(len(row)):
            moved = [list(of_response) for of_response in rows]
            moved[index][position] += 1e-30j
            loss = paper_loss(setting, rewards, [0.5, -0.5], values._replace(**{name: moved}))
            derivatives.append(loss.imag / 1e-30)
    return derivatives


@pytest.mark.parametrize("loss", LOSSES)
def test_slopes_of_a_response_alone_are_those_of_the_whole_loss(loss):
    """Each token's own term, or its response's where a loss is of whole responses, has all of the
    derivative."""
    setting = {**LOSS, **ADVANTAGE, "group_size": 2, "normalize_by_std": False, "loss": loss}
    setting |= {"beta": 0.1, "entropy_coefficient": 0.02, "sampler_correction": "token_truncate"}
    for settings in (SAPOSettings(), GMPOSettings(), DPPOSettings()):
        setting |= own_values("loss", type(settings), settings)
    policy = [[-0.5, -1.2, -0.9], [-1.1, -0.7]]
    old = [[-0.6, -1.1, -0.8], [-1.0, -0.9]]
    other = [[-0.4, -1.3, -0.7], [-0.9, -0.8]]
    values = PaperLogProbs(policy, old, other, other, [[0.5, 1.0, 0.2], [0.3, 0.8]])
    rewards = [1.0, 0.0]
    expected = [
        *whole_derivatives(setting, rewards, values, "policy"),
        *whole_derivatives(setting, rewards, values, "entropies"),
    ]
    advantages = [[0.5] * 3, [-0.5] * 2]
    slopes = [paper_slopes(part) for part in paper_parts(setting, rewards, advantages, values)]
    by_log_probs = [slope for of_response in slopes for slope in of_response.log_probs]
    by_entropies = [slope for of_response in slopes for slope in of_response.entropies]
    assert by_log_probs + by_entropies == pytest.approx(expected, abs=1e-15)
