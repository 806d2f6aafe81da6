"""Invariants of rollouts and updates: silent where they hold, one warning where they do not."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from rollout_helpers import ARGS, parity_reward, problems_of, rollout_of
from safetensors.torch import save_file

from alignment.builders.data_checks import trained_test_questions
from alignment.core.records import Completion, Endless, Group, Problem, SamplingConfig
from alignment.core.tokens import collate
from alignment.model.loading import load_tokenizer
from alignment.policy.policy import MicroBatchResult, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rewards.rules import score_groups
from alignment.rollouts.source import length_warning
from alignment.runs.moments import zero_moments
from alignment.sampling.transformers import TransformersSampler
from alignment.training import invariants
from alignment.training.invariants import (
    clip_warning,
    equal_answers_warning,
    first_kl_warning,
    ratio_warnings,
    sampled_entropy_warning,
    step_warning,
)
from alignment.training.update import first_warnings, update

POLICY_RATIO = dataclasses.replace(ARGS, epochs_per_rollout=2).update_config


@dataclass
class Answers:
    """What `equal_answers_warning` reads of a rollout."""

    batch: object
    sampler_log_probs_BT: torch.Tensor


def answers_of(responses: list[list[int]], log_prob: float) -> Answers:
    """Responses to one prompt, each token of which has a log-prob."""
    batch = collate([[1, 2]] * len(responses), responses, pad_token_id=0)
    return Answers(batch, log_prob * batch.response_mask)


def test_the_chance_of_equal_answers_by_hand():
    """Of probability 1/4, two pairs of two equal ones: m = 1/2 and x = 2, so that Chernoff's bound
    is exp(3/2) / 16."""
    assert invariants._log_tail(2, 0.5) == pytest.approx(1.5 - math.log(16), abs=1e-12)
    equal = answers_of([[5, 6]] * 4, log_prob=-math.log(2))
    assert equal_answers_warning(equal, group_size=4) == {}
    improbable = answers_of([[5, 6]] * 4, log_prob=-10.0)
    (name,) = warning = equal_answers_warning(improbable, group_size=4)
    assert name == "equal_answers"
    assert warning[name].startswith("2 of 2 pairs of answers are the same")


def test_answers_of_other_groups_are_not_compared():
    """Three answers of a group make one pair, and a fourth belongs to the next group."""
    rows = answers_of([[5], [6], [7], [7], [8], [9]], log_prob=-50.0)
    assert equal_answers_warning(rows, group_size=3) == {}
    assert list(equal_answers_warning(rows, group_size=6)) == ["equal_answers"]


def test_likely_answers_may_be_equal():
    """300 rollouts of 32 short answers by a sampler that is sure of most tokens: no false alarm."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.tensor([0.9, 0.05, 0.03, 0.02])
    for _ in range(300):
        drawn = torch.multinomial(probabilities.expand(32, 4), 3, True, generator=generator)
        rows = answers_of(drawn.tolist(), log_prob=0.0)
        log_probs = probabilities.log()[drawn].flatten()
        rows.sampler_log_probs_BT[rows.batch.response_mask] = log_probs
        assert equal_answers_warning(rows, group_size=8) == {}


def results_of(ratio_sum: float, ratio_max: float, tokens: int = 10) -> list[MicroBatchResult]:
    sums = {"ratio_sum": ratio_sum, "ratio_max": ratio_max, "response_tokens": tokens}
    return [MicroBatchResult([0], torch.zeros(1, 1), sums)]


def test_ratios_by_hand():
    one = results_of(10.0, 1.0)
    moved = results_of(10.01, 1.05)
    wrong = results_of(11.0, 2.0)

    def names(*mini_batches, dtype=torch.float32, has_moved=True, config=POLICY_RATIO):
        return list(ratio_warnings(mini_batches, config, dtype, has_moved))

    assert names(one, moved) == []
    assert names(wrong, moved) == ["first_ratio"]
    assert names(one, one) == ["later_ratio"]
    assert names(one, one, has_moved=False) == []
    assert names(one, one, dtype=torch.bfloat16) == []
    # The momentum of a first update without rows has moved the weights.
    assert names([], wrong) == []
    assert names(wrong, moved, config=dataclasses.replace(ARGS).update_config) == []


def test_without_a_limit_no_gradient_is_too_long():
    config = dataclasses.replace(ARGS, max_grad_norm=0.0).update_config
    assert clip_warning([torch.tensor(1e9)], config.norm_limit) == {}


def test_clipped_gradients_are_as_short_as_the_limit():
    assert clip_warning([torch.tensor(1.0), torch.tensor(0.3)], 1.0) == {}
    assert list(clip_warning([torch.tensor(0.3), torch.tensor(1.2)], 1.0)) == ["gradient_clip"]


def warnings_of_update(folder, **changed) -> dict[str, str]:
    """The warnings of an update of the tiny model on its own samples."""
    args = dataclasses.replace(
        ARGS,
        epochs_per_rollout=2,
        loss_type="grpo_clip",
        learning_rate=1e-3,
        warmup_steps=0,
        max_grad_norm=1e-2,
        **changed,
    )
    policy = SingleDevicePolicy(
        PolicyConfig(str(folder), ("cpu",), "float32", micro_batch_tokens=200)
    )
    sampler = TransformersSampler(policy.model, load_tokenizer(str(folder)), context=256)
    problems = problems_of(args)
    sampling = SamplingConfig(n=args.group_size, max_new_tokens=8, seed=1)
    completions = sampler.sample([problem.prompt for problem in problems], sampling)
    rollout = rollout_of(score_groups(problems, completions, parity_reward), args)
    old_BT = policy.log_probs(rollout.batch, args.update_config.distribution)
    rollout = dataclasses.replace(rollout, old_log_probs_BT=old_BT)
    return update(policy, rollout, args.update_config, step=1).warnings


def test_a_sound_update_has_no_warning(tiny_folder):
    assert warnings_of_update(tiny_folder) == {}


def test_planted_faults_are_named(tiny_folder, monkeypatch):
    with monkeypatch.context() as planted:
        planted.setattr(SingleDevicePolicy, "clip_gradient", clip_by_value)
        assert list(warnings_of_update(tiny_folder)) == ["gradient_clip"]
    with monkeypatch.context() as planted:
        planted.setattr(
            "alignment.sampling.transformers.draw_uniforms",
            lambda prompts, sampling: torch.rand(1, 1, sampling.max_new_tokens).expand(
                prompts, sampling.n, -1
            ),
        )
        assert list(warnings_of_update(tiny_folder)) == ["equal_answers"]


def clip_by_value(policy: SingleDevicePolicy, max_norm: float) -> torch.Tensor:
    parameters = list(policy.model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grad_value_(parameters, max_norm)
    return norm


def test_a_step_is_as_long_as_adam_can_make_it():
    """Of a rate of 0.01, AdamW moves a weight of 2 by 0.01 * (1.2 + 0.5 * 2) = 0.022 at most."""

    def names(change: float, norm: float = 1.0) -> list[str]:
        weights = {"w": torch.tensor([2.0, 0.0], dtype=torch.float64)}
        moved = {"w": weights["w"] + torch.tensor([change, 0.0])}
        config = PolicyConfig("", ("cpu",), "float32", weight_decay=0.5)
        return list(step_warning(weights, moved, rate=0.01, config=config, norm=norm))

    assert names(0.0219) == [] and names(-0.0219) == []
    assert names(0.0222) == ["step_length"]
    assert names(0.0) == ["step_length"] and names(0.0, norm=0.0) == []


def test_a_step_of_another_rate_is_named(tiny_folder, monkeypatch):
    step = SingleDevicePolicy.step
    monkeypatch.setattr(SingleDevicePolicy, "step", lambda policy, rate: step(policy, 2 * rate))
    assert list(warnings_of_update(tiny_folder)) == ["step_length"]
    monkeypatch.setattr(SingleDevicePolicy, "step", lambda policy, rate: step(policy, 0.0))
    assert set(warnings_of_update(tiny_folder)) == {"step_length", "later_ratio"}


def test_moments_of_a_checkpoint_that_are_zero(tmp_path):
    moments = {"0.step": torch.tensor(3.0), "0.exp_avg": torch.zeros(200, 2)}
    assert not zero_moments(tmp_path)  # Nothing is known of a policy that writes no tensors.
    save_file(moments, tmp_path / "optimizer.safetensors")
    assert zero_moments(tmp_path)
    save_file(moments | {"1.exp_avg": torch.full((1,), 1e-9)}, tmp_path / "optimizer.safetensors")
    assert not zero_moments(tmp_path)


def test_questions_that_are_trained():
    train = [Problem(str(number), f"Q{number}", "", "1") for number in range(4)]
    assert trained_test_questions(train, [Problem("a", "Q7", "", "1")]) == ""
    assert trained_test_questions(train, [Problem("a", " q2", "", "1")]).startswith(
        "1 of 4 training"
    )
    endless = Endless(lambda index: train[index % 4])
    assert trained_test_questions(endless, train[:1]).startswith("128 of 512 training")


def test_a_first_kl_by_hand():
    """Of 10 tokens at 0.002 nats: more than rounding in float32, and not in 16 bits."""
    config = dataclasses.replace(POLICY_RATIO, reference_reset_interval=2)
    sums = {"kl_sum": 0.02, "response_tokens": 10}
    apart = [[MicroBatchResult([0], torch.zeros(1, 1), sums)]]

    def names(step, mini_batches=apart, dtype=torch.float32):
        return list(first_kl_warning(mini_batches, config, dtype, step))

    assert names(1) == names(3) == ["first_kl"]  # The reference is reset after step 2.
    assert names(2) == names(1, dtype=torch.bfloat16) == names(1, [[], apart[0]]) == []
    together = [[MicroBatchResult([0], torch.zeros(1, 1), sums | {"kl_sum": 1e-4})]]
    assert names(1, together) == []


@pytest.mark.parametrize(("surprise", "is_seen"), [(0.5, False), (0.45, False), (0.1, True)])
def test_a_surprise_below_the_entropy(surprise, is_seen):
    """20,000 tokens of an entropy of 0.5 nats: 10,000 nats in all, which draws miss by 4,240 with a
    chance of 10^-9 at most."""
    rows = 200
    rollout = answers_of([[5] * 100] * rows, log_prob=-surprise)
    sums = {"sampling_entropy_sum": 10_000.0, "response_tokens": 100 * rows}
    results = [MicroBatchResult(list(range(rows)), torch.zeros(1, 1), sums)]
    found = sampled_entropy_warning([results], rollout)
    assert list(found) == ["sampled_entropy"] * is_seen


@pytest.mark.parametrize(("log_probs_of", "is_seen"), [("sampled", True), ("full", False)])
def test_the_entropy_of_the_full_softmax_is_not_compared_with_a_truncated_surprise(
    log_probs_of, is_seen
):
    rows = 200
    rollout = answers_of([[5] * 100] * rows, log_prob=-0.1)
    rollout.counted_B1 = torch.ones(rows, 1, dtype=torch.bool)
    sums = {"sampling_entropy_sum": 10_000.0, "response_tokens": 100 * rows, "kl_sum": 0.0}
    results = [MicroBatchResult(list(range(rows)), torch.zeros(1, 1), sums)]
    config = dataclasses.replace(
        ARGS, beta=0.1, sampling_top_p=0.9, log_probs_of=log_probs_of
    ).update_config
    found = first_warnings(rollout, config, torch.float32, [results], step=2, steps_old=0)
    assert list(found) == ["sampled_entropy"] * is_seen


def test_responses_that_are_cut_short():
    def group(lengths):
        completions = tuple(
            Completion((1,), (5,) * length, (-1.0,) * length, "", reason, 0)
            for length, reason in lengths
        )
        return Group(Problem("a", "", "", ""), completions, ())

    assert length_warning([group([(8, "length"), (3, "stop")])], 8) == {}
    assert list(length_warning([group([(7, "length"), (3, "stop")])], 8)) == ["cut_short"]
    assert list(length_warning([group([(9, "stop")])], 8)) == ["cut_short"]
