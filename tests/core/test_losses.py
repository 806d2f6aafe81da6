"""Advantages and losses against numbers worked by hand, and the properties that micro-batching
relies on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment import args as arguments
from alignment import llm_from_scratch
from alignment.config.flag import flags_of_class
from alignment.core.advantages import (
    BASELINES,
    DEVIATIONS,
    AdvantageConfig,
    compute_group_normalized_rewards,
    group_advantages,
    group_statistics,
    overlong_penalty,
)
from alignment.core.losses import (
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    kl_penalty,
    loss_denominator,
    sampler_weights,
    sft_microbatch_train_step,
)
from alignment.rewards.rules import CONTROLS

WITH_RATIO = sorted(name for name, loss in LOSSES.items() if loss.uses_ratio)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def close(actual, expected):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=1e-9
    )


def test_names_on_the_command_line_are_the_keys_of_the_tables():
    assert all(arguments.RLArgs(loss_type=name).loss is loss for name, loss in LOSSES.items())
    choices = {name: facts.choices for name, facts in flags_of_class(arguments.RLArgs).items()}
    assert choices["loss_normalization"] == tuple(NORMALIZATIONS)
    assert choices["baseline"] == tuple(BASELINES) and choices["std_of"] == tuple(DEVIATIONS)
    assert choices["kl_estimator"] == tuple(KL_ESTIMATORS)
    assert arguments.CONTROLS is CONTROLS
    assert choices["sampler_correction"] == tuple(CORRECTIONS)
    assert {name for name, loss in LOSSES.items() if loss.at_ratio_one} == set(WITH_RATIO)


def test_mean_baseline():
    # Groups (1, 0) and (3, 1): means 0.5 and 2.
    close(
        group_advantages(column(1, 0, 3, 1), AdvantageConfig(2, normalize_by_std=False)),
        column(0.5, -0.5, 1, -1),
    )


def test_unbiased_std():
    # Group (1, 0, 0, 0): mean 1/4; unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2.
    close(
        group_advantages(column(1, 0, 0, 0), AdvantageConfig(4, advantage_eps=0)),
        column(1.5, -0.5, -0.5, -0.5),
    )


def test_eps_is_added_to_the_std():
    # Group (1, 0): deviations +-1/2, std sqrt(1/2).
    expected = 0.5 / (math.sqrt(0.5) + 0.1)
    close(
        group_advantages(column(1, 0), AdvantageConfig(2, advantage_eps=0.1)),
        column(expected, -expected),
    )


def test_equal_rewards_have_no_advantage():
    close(group_advantages(column(1, 1, 0, 0), AdvantageConfig(2)), column(0, 0, 0, 0))


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 2**31), st.booleans())
def test_advantages_sum_to_zero_in_each_group_and_ignore_other_groups(group, prompts, seed, by_std):
    rewards = torch.rand(
        prompts * group, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    whole = group_advantages(rewards, AdvantageConfig(group, normalize_by_std=by_std))
    close(whole.view(prompts, group).sum(1), torch.zeros(prompts))
    close(
        group_advantages(rewards[:group], AdvantageConfig(group, normalize_by_std=by_std)),
        whole[:group],
    )


def test_leave_one_out():
    # Group (1, 0, 0): the others' means 0, 1/2, 1/2.
    close(
        group_advantages(
            column(1, 0, 0), AdvantageConfig(3, normalize_by_std=False, baseline="leave_one_out")
        ),
        column(1, -0.5, -0.5),
    )


def test_standard_deviation_of_group_population_and_batch():
    # Groups (2, 0) and (1, 1): deviations +-1 and 0. Unbiased: sqrt(2); population: 1; all four
    # rewards: mean 1, squares 1, 1, 0, 0, unbiased variance 2/3.
    rewards = column(2, 0, 1, 1)
    for std_of, std in (
        ("group", math.sqrt(2)),
        ("group_population", 1.0),
        ("batch", math.sqrt(2 / 3)),
    ):
        expected = 1 / (std + 1e-4)
        close(
            group_advantages(rewards, AdvantageConfig(2, std_of=std_of, advantage_eps=1e-4)),
            column(expected, -expected, 0, 0),
        )


def test_uncounted_responses_enter_no_mean_and_get_no_advantage():
    # Of group (1, 0, 5) the last does not count: mean 1/2. Of (3, 0, 0) one is left alone.
    counted = column(1, 1, 0, 1, 0, 0).bool()
    advantages = group_advantages(
        column(1, 0, 5, 3, 0, 0), AdvantageConfig(3, normalize_by_std=False), counted
    )
    close(advantages, column(0.5, -0.5, 0, 0, 0, 0))
    advantages = group_advantages(
        column(1, 0, 5, 3, 0, 0),
        AdvantageConfig(3, baseline="leave_one_out", std_of="group_population", advantage_eps=0.1),
        counted,
    )
    close(advantages, column(1 / 0.6, -1 / 0.6, 0, 0, 0, 0))


def test_equal_rewards_that_are_no_binary_fractions_have_exactly_no_advantage():
    rewards = torch.full((7, 1), 0.1)
    assert group_advantages(rewards, AdvantageConfig(7)).eq(0).all()


@pytest.mark.parametrize(
    ("rewards", "size", "words"), [((1, 0), 1, "at least 2"), ((1, 0, 1), 2, "not whole groups")]
)
def test_impossible_groups_are_refused(rewards, size, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(column(*rewards), AdvantageConfig(size, normalize_by_std=False))


def test_rewards_are_scored_and_normalised():
    def reward_fn(response, truth):
        return {"reward": float(response == truth), "format_reward": 1.0, "answer_reward": 0.0}

    advantages, raw, metadata = compute_group_normalized_rewards(
        reward_fn, ["a", "b", "c", "c"], ["a", "a", "c", "c"], 2, 1e-6, normalize_by_std=False
    )
    assert raw.tolist() == [[1], [0], [1], [1]]
    assert advantages.tolist() == [[0.5], [-0.5], [0], [0]]
    assert metadata == {
        "reward_mean": 0.75,
        "reward_std": pytest.approx(math.sqrt(3) / 4),
        "reward_max": 1,
        "reward_min": 0,
        "frac_reward_zero_std": 0.5,
    }


def test_rewards_in_the_shapes_and_by_the_defaults_of_llm_from_scratch():
    def reward_fn(response, truth):
        return {"reward": float(response == truth), "format_reward": 1.0, "answer_reward": 0.0}

    truths = ["a"] * 4 + ["c"] * 4
    advantages, raw, metadata = llm_from_scratch.compute_group_normalized_rewards(
        reward_fn, ["a", "b", "b", "b", "c", "c", "c", "c"], truths, 4
    )
    # Mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4: (1 - 1/4) / (1/2 + 1e-6).
    assert advantages.shape == raw.shape == (8,)
    first = 1.5 / (1 + 2e-6)
    assert advantages[:4].tolist() == pytest.approx([first, -first / 3, -first / 3, -first / 3])
    assert advantages[4:].tolist() == [0, 0, 0, 0]
    assert raw.tolist() == [1, 0, 0, 0, 1, 1, 1, 1]
    assert metadata["mean_advantages"] == pytest.approx(0, abs=1e-7)
    assert metadata["reward_mean"] == 5 / 8


@pytest.mark.parametrize(
    ("passage", "answer"),
    [(r"\boxed{3}, so \boxed{\frac{1}{2}}", r"\frac{1}{2}"), ("so 5", None), (r"\boxed{5", None)],
)
def test_the_last_box_of_a_passage(passage, answer):
    assert llm_from_scratch.extract_answer(passage) == answer


def test_group_statistics_of_a_single_sample_a_group():
    assert group_statistics(torch.tensor([[1.0], [0.0]]), 1)["frac_reward_zero_std"] == 1


def test_reinforce_loss():
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    loss, metadata = compute_naive_policy_gradient_loss(torch.tensor([[2.0], [-1.0]]), log_probs)
    assert loss.tolist() == [[2, 4], [-3, -4]]
    assert metadata == {}


def test_clip_loss():
    # Ratios 1.5, 0.5 and 1.1 with range 0.2, for A = 2 and A = -1:
    # A =  2: min(3.0, 2.4) = 2.4 clipped; min(1.0, 1.6) = 1.0 free;         min(2.2, 2.2) = 2.2
    # free
    # A = -1: min(-1.5, -1.2) = -1.5 free; min(-0.5, -0.8) = -0.8 clipped;   min(-1.1, -1.1) = -1.1
    # free
    new = torch.tensor([[1.5, 0.5, 1.1]] * 2, dtype=torch.float64).log()
    loss, metadata = compute_grpo_clip_loss(column(2, -1), new, torch.zeros_like(new), 0.2)
    close(loss, [[-2.4, -1.0, -2.2], [1.5, 0.8, 1.1]])
    assert metadata["clipped"].tolist() == [[True, False, False], [False, True, False]]
    close(metadata["ratio"], [[1.5, 0.5, 1.1]] * 2)


def test_clipped_tokens_have_no_gradient_and_free_ones_have_ratio_times_advantage():
    new = torch.tensor([[1.5, 0.5, 1.1]], dtype=torch.float64).log().requires_grad_()
    loss, _ = compute_grpo_clip_loss(column(2), new, torch.zeros_like(new), 0.2)
    loss.sum().backward()
    close(new.grad, [[0, -1.0, -2.2]])  # d(-A * rho) / d(log pi) = -A * rho


RATIOS = torch.tensor([[1.5, 0.5, 1.1, 4.0]] * 2, dtype=torch.float64)


def test_clip_higher():
    # Range (0.8, 1.4): A = 2: min(3, 2.8), min(1, 1.6), 2.2, min(8, 2.8); A = -1: -1.5, min(-.5,
    # -.8), -1.1, min(-4, -1.4).
    loss, metadata = compute_grpo_clip_loss(
        column(2, -1), RATIOS.log(), torch.zeros_like(RATIOS), 0.2, cliprange_high=0.4
    )
    close(loss, [[-2.8, -1.0, -2.2, -2.8], [1.5, 0.8, 1.1, 4.0]])
    assert metadata["clipped"].tolist() == [[True, False, False, True], [False, True, False, False]]


def test_dual_clip():
    # As above with range 0.2; a surrogate of A = -1 is at least 3 * -1.
    loss, metadata = compute_grpo_clip_loss(
        column(2, -1), RATIOS.log(), torch.zeros_like(RATIOS), 0.2, dual_clip=3.0
    )
    close(loss, [[-2.4, -1.0, -2.2, -2.4], [1.5, 0.8, 1.1, 3.0]])
    assert metadata["clipped"].tolist() == [[True, False, False, True], [False, True, False, True]]


def worked(loss_type, **options):
    """Loss and gradient at log-probs (ln 2, ln 1/2, garbage) with old ones 0, of which the last is
    no response's."""
    new = torch.tensor([[2.0, 0.5, 9.0]], dtype=torch.float64).log().requires_grad_()
    mask = torch.tensor([[True, True, False]])
    options = {
        "cliprange": 0.2,
        "response_mask": mask,
        "old_log_probs": torch.zeros_like(new),
        **options,
    }
    loss, metadata = compute_policy_gradient_loss(new, loss_type, advantages=column(3), **options)
    loss[mask].sum().backward()
    return loss[mask], new.grad, metadata


def test_grpo_without_clipping():
    loss, gradient, _ = worked("grpo_no_clip")
    close(loss, [-6.0, -1.5])  # -rho * A
    close(gradient, [[-6.0, -1.5, 0]])


def test_gspo_has_one_ratio_a_response():
    # s = exp((ln 2 + ln 1/2) / 2) = 1, so each token's loss is -A, and its gradient, of both
    # tokens, -A * s / 2 each.
    loss, gradient, metadata = worked("gspo")
    close(loss, [-3.0, -3.0])
    close(gradient, [[-3.0, -3.0, 0]])
    close(metadata["ratio"], [[1.0] * 3])
    # With old log-probs (0, ln 1/4): s = exp((ln 2 + ln 2) / 2) = 2, clipped to 1.2.
    old = torch.tensor([[1.0, 0.25, 1.0]], dtype=torch.float64).log()
    loss, gradient, metadata = worked("gspo", old_log_probs=old)
    close(loss, [-3.6, -3.6])
    close(gradient, [[0.0, 0.0, 0.0]])
    assert metadata["clipped"].all()


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    # Weights clip(2) = 1.2 and clip(1/2) = 0.8: -w * A * log pi, gradient -w * A.
    loss, gradient, metadata = worked("cispo")
    close(loss, [-3.6 * math.log(2), -2.4 * math.log(0.5)])
    close(gradient, [[-3.6, -2.4, 0]])
    assert metadata["clipped"].tolist()[0][:2] == [True, True]
    # bounded from above only
    close(worked("cispo", cliprange=1.0, cliprange_high=5.0)[1], [[-6.0, -1.5, 0]])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # pi = 1/2, pi_ref = 1/4: l = -ln 2.
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 + math.log(2) - 1)],
)
def test_kl_estimators(estimator, expected):
    policy, reference = (torch.tensor([[p]], dtype=torch.float64).log() for p in (0.5, 0.25))
    close(kl_penalty(policy, reference, estimator), [[expected]])
    close(kl_penalty(policy, policy, estimator), [[0.0]])


def test_k1_and_k3_average_to_the_divergence_and_k2_has_its_gradient():
    """Over three actions, weighed by their probabilities: no sampling."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    policy, reference = (
        logits.log_softmax(0),
        torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log(),
    )
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        close(
            (policy.exp() * kl_penalty(policy, reference, estimator)).sum().detach(),
            divergence.detach(),
        )
    (true,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for estimator, gradient in (("k2", true), ("k1", torch.zeros(3))):
        penalty = (policy.exp().detach() * kl_penalty(policy, reference, estimator)).sum()
        close(torch.autograd.grad(penalty, logits, retain_graph=True)[0], gradient)


@pytest.mark.parametrize(
    ("correction", "expected"),
    # Trainer's over sampler's: 3 and 1/2 of the response's tokens, 1.5 together; the last token is
    # no response's.
    [
        ("token_truncate", [2, 0.5, 1]),
        ("token_mask", [0, 0.5, 1]),
        ("sequence_truncate", [1.5, 1.5, 1.5]),
        ("sequence_mask", [1.5, 1.5, 1.5]),
        ("geometric_truncate", [math.sqrt(1.5)] * 3),
        ("geometric_mask", [math.sqrt(1.5)] * 3),
    ],
)
def test_importance_weights_of_the_samplers_distribution(correction, expected):
    old = torch.tensor([[0.6, 0.1, 0.9]], dtype=torch.float64).log()
    sampler = torch.tensor([[0.2, 0.2, 0.1]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]])
    close(sampler_weights(old, sampler, mask, correction, 2.0), [expected])
    cut = {"sequence_truncate": 1.2, "sequence_mask": 0.0}
    if correction in cut:
        close(sampler_weights(old, sampler, mask, correction, 1.2), [[cut[correction]] * 3])


@pytest.mark.parametrize(
    ("correction", "expected"),
    # Weights 3, 1/2 and 1; their product is 1.5, their geometric mean the cube root of that, 1.145.
    [
        ("token_truncate", [2, 0.8, 1]),
        ("token_mask", [0, 0, 1]),
        ("sequence_truncate", [1.5] * 3),
        ("geometric_mask", [1.5 ** (1 / 3)] * 3),
    ],
)
def test_importance_weights_are_bounded_from_below_too(correction, expected):
    old = torch.tensor([[0.6, 0.1, 0.9]], dtype=torch.float64).log()
    sampler = torch.tensor([[0.2, 0.2, 0.9]], dtype=torch.float64).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    close(sampler_weights(old, sampler, mask, correction, 2.0, 0.8), [expected])
    # Above every weight of a response: the floor itself, or nothing.
    beyond = {
        "sequence_truncate": [[1.6] * 3],
        "geometric_mask": [[0.0] * 3],
    }
    if correction in beyond:
        close(sampler_weights(old, sampler, mask, correction, 2.0, 1.6), beyond[correction])


def test_the_two_sided_mask_keeps_its_bounds():
    """IcePop's interval is closed: weights of exactly 1/2 and 2 stay, and both gradients with
    them."""
    old = torch.tensor([[0.25, 0.5, 0.125]], dtype=torch.float64).log()
    sampler = torch.tensor([[0.5, 0.25, 0.5]], dtype=torch.float64).log()
    weights = sampler_weights(old, sampler, torch.ones(1, 3).bool(), "token_mask", 2.0, 0.5)
    close(weights, [[0.5, 2.0, 0.0]])


def test_weights_and_divergence_enter_the_step():
    # Tokens' losses -A * 1 weighed by 2 and 1/2, plus 0.1 * k3 of 1/2 and 1/4: (2 + 1/2) / 2 + 0.1
    # * (ln 2 - 1/2).
    new = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    loss, sums = grpo_microbatch_train_step(
        new,
        torch.ones(1, 2, dtype=torch.bool),
        1,
        "grpo_clip",
        advantages=column(-1),
        old_log_probs=old,
        cliprange=0.2,
        beta=0.1,
        reference_log_probs=old - math.log(2),
        sampler_correction="token_truncate",
        correction_cap=2.0,
        sampler_log_probs=torch.tensor([[0.125, 1.0]], dtype=torch.float64).log(),
    )
    close(loss, 1.25 + 0.1 * (math.log(2) - 0.5))
    close(sums["kl_sum"], 2 * (math.log(2) - 0.5))
    close(sums["weight_sum"], 2.5)
    # d loss: (-A * w + beta * (1 - pi_ref / pi)) / 2 a token.
    close(new.grad, [[(2 + 0.1 * 0.5) / 2, (0.5 + 0.1 * 0.5) / 2]])


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_mask_of_zeros_and_ones_is_one_of_truth_values(loss_type, dtype):
    """Its type changes no bit of the loss, the gradient and the sums."""
    generator = torch.Generator().manual_seed(0)
    new, old, sampler, reference = torch.rand(4, 2, 5, generator=generator).log()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()

    def step(response_mask):
        log_probs = new.clone().requires_grad_()
        loss, sums = grpo_microbatch_train_step(
            log_probs,
            response_mask,
            2,
            loss_type,
            raw_rewards=torch.tensor([[1.0], [0.5]]),
            advantages=torch.tensor([[1.0], [-0.5]]),
            old_log_probs=old,
            cliprange=0.2,
            loss_normalization="token_mean",
            beta=0.1,
            reference_log_probs=reference,
            sampler_correction="geometric_mask",
            sampler_log_probs=sampler,
            correction_cap=10.0,
        )
        return loss, log_probs.grad, sums

    torch.testing.assert_close(step(mask.to(dtype)), step(mask), rtol=0, atol=0)
    assert step(mask)[1].any()


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_sft_takes_a_mask_of_zeros_and_ones_too(dtype):
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]]).bool()

    def step(response_mask):
        log_probs = torch.full((2, 3), -0.7).requires_grad_()
        loss, sums = sft_microbatch_train_step(log_probs, response_mask, 1)
        return loss, log_probs.grad, sums

    torch.testing.assert_close(step(mask.to(dtype)), step(mask), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("length", "buffer", "expected"),
    [(10, 4, 0), (16, 4, 0), (18, 4, -0.5), (20, 4, -1), (20, 0, 0)],
)
def test_overlong_penalty(length, buffer, expected):
    assert overlong_penalty(length, 20, buffer) == expected


def test_each_loss_uses_its_own_weights():
    log_probs = torch.tensor([[-1.0]])
    inputs = {
        "raw_rewards": torch.tensor([[5.0]]),
        "advantages": torch.tensor([[7.0]]),
        "old_log_probs": log_probs,
        "cliprange": 0.2,
        "response_mask": torch.tensor([[True]]),
    }
    losses = {
        name: compute_policy_gradient_loss(log_probs, name, **inputs)[0].item() for name in LOSSES
    }
    assert losses == {
        "no_baseline": 5,
        "reinforce_with_baseline": 7,
        "grpo_clip": -7,
        "grpo_no_clip": -7,
        "gspo": -7,
        "cispo": 7,
        # The gate at ratio 1 is 2 over the temperature.
        "sapo": -14,
        "gmpo": -7,
        "dppo": -7,
    }


@pytest.mark.parametrize(
    ("loss_type", "given_inputs", "missing"),
    [
        ("no_baseline", {}, "raw_rewards"),
        ("reinforce_with_baseline", {}, "advantages"),
        ("grpo_clip", {"advantages": torch.ones(1, 1)}, "old_log_probs"),
        (
            "grpo_clip",
            {"advantages": torch.ones(1, 1), "old_log_probs": torch.zeros(1, 1)},
            "cliprange",
        ),
        (
            "gspo",
            {"advantages": torch.ones(1, 1), "old_log_probs": torch.zeros(1, 1), "cliprange": 0.2},
            "mask",
        ),
    ],
)
def test_a_missing_input_is_named(loss_type, given_inputs, missing):
    with pytest.raises(ValueError, match=missing):
        compute_policy_gradient_loss(torch.zeros(1, 1), loss_type, **given_inputs)


MASK = torch.tensor([[True, True, True, True], [True, False, False, False]])


@pytest.mark.parametrize(
    ("normalization", "expected"),
    # Rewards 1 and 2 make per-token losses (1, 1, 1, 1) and (4): row means 1 and 4, token sum 8.
    [("sequence_mean", (1 + 4) / 2), ("token_mean", 8 / 5), ("constant", 8 / (2 * 10))],
)
def test_normalisations(normalization, expected):
    log_probs = torch.tensor([[-1.0] * 4, [-2.0] + [-99.0] * 3], requires_grad=True)
    denominator = loss_denominator(normalization, [4, 1], max_new_tokens=10)
    loss, sums = grpo_microbatch_train_step(
        log_probs,
        MASK,
        1,
        "no_baseline",
        raw_rewards=torch.tensor([[1.0], [2.0]]),
        loss_normalization=normalization,
        denominator=denominator,
    )
    assert loss.item() == pytest.approx(expected)
    assert sums["response_tokens"].item() == 5
    assert log_probs.grad[~MASK].eq(0).all()


def test_default_denominators_split_evenly_over_accumulation_steps():
    def loss(steps, **options):
        log_probs = torch.full((2, 4), -1.0, requires_grad=True)
        return grpo_microbatch_train_step(
            log_probs, MASK, steps, "no_baseline", raw_rewards=torch.ones(2, 1), **options
        )[0].item()

    assert loss(1) == pytest.approx(1)
    assert loss(4) == pytest.approx(1 / 4)
    assert loss(4, loss_normalization="token_mean") == pytest.approx(1 / 4)
    with pytest.raises(ValueError, match="denominator"):
        loss(1, loss_normalization="constant")


def test_ratio_sums_cover_response_tokens_only():
    new = torch.tensor([[1.5, 0.5, 9.0]]).log().requires_grad_()
    mask = torch.tensor([[True, True, False]])
    _, sums = grpo_microbatch_train_step(
        new,
        mask,
        1,
        "grpo_clip",
        advantages=torch.tensor([[1.0]]),
        old_log_probs=torch.zeros(1, 3),
        cliprange=0.2,
    )
    assert sums["ratio_sum"].item() == pytest.approx(2.0)
    assert sums["ratio_max"].item() == pytest.approx(1.5)
    assert sums["clipped_tokens"].item() == 1


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=8),
    st.sampled_from(sorted(NORMALIZATIONS)),
    st.sampled_from(sorted(LOSSES)),
    st.integers(0, 2**31),
    st.data(),
)
def test_any_cut_into_micro_batches_gives_the_same_gradient(
    lengths, normalization, loss_type, seed, data
):
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    new = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    old = new + 0.3 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weights = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    denominator = loss_denominator(normalization, lengths, max_new_tokens=6)

    def gradient(pieces):
        leaf, total = new.clone().requires_grad_(), 0
        for piece in pieces:
            loss, _ = grpo_microbatch_train_step(
                leaf[piece],
                mask[piece],
                1,
                loss_type,
                weights[piece],
                weights[piece],
                old[piece],
                0.2,
                normalization,
                denominator,
            )
            total += loss.item()
        return leaf.grad, total

    cut = data.draw(st.integers(1, rows - 1))
    (whole, loss), (parts, summed) = (
        gradient([list(range(rows))]),
        gradient([list(range(cut)), list(range(cut, rows))]),
    )
    close(parts, whole)
    assert summed == pytest.approx(loss)


@pytest.mark.parametrize("loss_type", WITH_RATIO)
@pytest.mark.parametrize("normalization", sorted(NORMALIZATIONS))
def test_at_ratio_one_losses_with_a_ratio_have_the_gradient_of_reinforce(normalization, loss_type):
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(2, 4, generator=generator, dtype=torch.float64)

    def gradient(loss_type):
        leaf = new.clone().requires_grad_()
        grpo_microbatch_train_step(
            leaf,
            MASK,
            1,
            loss_type,
            advantages=column(0.7, -1.3),
            old_log_probs=new,
            cliprange=0.2,
            loss_normalization=normalization,
            denominator=3.0,
        )
        return leaf.grad

    close(gradient(loss_type), gradient("reinforce_with_baseline"))


def test_sft_step():
    # Rows sum to 1 + 2 = 3 and 4; over a constant 2: 1.5 and 2; mean 1.75; over 2 steps 0.875.
    log_probs = torch.tensor([[-1.0, -2.0], [-4.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, sums = sft_microbatch_train_step(log_probs, mask, 2, normalize_constant=2.0)
    assert loss.item() == pytest.approx(0.875)
    assert log_probs.grad.tolist() == [[-0.125, -0.125], [-0.125, 0]]
    assert sums["response_tokens"].item() == 3
