"""Two rollouts' updates against the papers': the unchanged program passes, and each planted fault
fails a line."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from rollout_helpers import ARGS
from transformers import AutoConfig, AutoModelForCausalLM

from alignment.args import configuration
from alignment.builders.run_plan import plan_run
from alignment.builders.verified_updates import VerifiedParts, plan_updates
from alignment.config.settings import replaced
from alignment.core import losses
from alignment.core.losses import loss_denominator
from alignment.model.loading import load_model, load_tokenizer
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy, make_optimizer
from alignment.rollouts.source import RolloutSource, open_source
from alignment.sampling.transformers import TransformersSampler
from alignment.system.errors import RunStopped
from alignment.training import update
from alignment.training.update import References, RolloutLoss
from alignment.verification import two_rollouts
from alignment.verification.two_rollouts import TwoRollouts
from alignment.verification.whole_update import (
    PlainModel,
    PlainResponse,
    PlainRollout,
    TrainedState,
    adam_direction,
    cut_family,
    is_decayed,
    kept_tokens,
    learning_rate,
    make_learner,
    mini_batch_faults,
    paper_length_reward,
)
from alignment.verify import report
from benchmarks.families import family_model

Planted = contextlib.AbstractContextManager
WARM_START = {"sft_base": ARGS.sft_base}


@functools.cache
def source_of(folder: Path) -> RolloutSource:
    """The prompts for the model of a folder, which are those of every test here."""
    return open_source(ARGS.rollout_config, load_tokenizer(str(folder)))


def updates_of(folder: Path, **settings) -> TwoRollouts:
    """The updates of a policy on the CPU, with a sampler of its own; those of a warm start too
    where `sft_base` is given."""
    changes = {"max_new_tokens": 10, "dtype": "float32", "weight_decay": 0.5, "sft_base": ""}
    changes |= settings
    args = replaced(ARGS, micro_batch_tokens=60, **changes)
    policy = SingleDevicePolicy(
        configuration(
            PolicyConfig, args, model_path=str(folder), devices=("cpu",), dtype=args.dtype
        )
    )
    tokenizer = load_tokenizer(str(folder))
    model = load_model(str(folder), ("cpu",), torch.float32)
    sampler = TransformersSampler(model, tokenizer, context=128)
    source = dataclasses.replace(source_of(folder), config=args.rollout_config)
    parts = VerifiedParts(policy, sampler, PlainModel(folder), source)
    return plan_updates(args, plan_run(args, str(folder)), parts)


def records_of(updates: TwoRollouts) -> dict[str, dict]:
    """The record of each line, by its name."""
    return {record["what"]: record for record in report(updates.checks(), Console(quiet=True))}


def changed(owner: object, name: str, change: Callable) -> Planted:
    """Within the block, `change(the function, *its arguments)` stands in a function's place."""
    real = getattr(owner, name)

    def planted(*arguments, **named):
        return change(real, *arguments, **named)

    return patch.object(owner, name, planted)


def other_optimizer(policy: SingleDevicePolicy, **options) -> Planted:
    def step(real, *arguments):
        for group in policy.optimizer.param_groups:
            group.update(options)
        real(*arguments)

    return changed(policy, "step", step)


def other_betas(policy: SingleDevicePolicy) -> Planted:
    return other_optimizer(policy, betas=(0.8, 0.99))


def late_old_log_probs(policy: SingleDevicePolicy) -> Planted:
    """The first update of a rollout, whose ratio is 1, is as it was."""
    seen: list[torch.Tensor] = []

    def objective(real, rollout, mini_batch, config):
        if any(seen_before is rollout.old_log_probs_BT for seen_before in seen):
            late_BT = policy.log_probs(rollout.batch, config.distribution)
            rollout = dataclasses.replace(rollout, old_log_probs_BT=late_BT)
        else:
            seen.append(rollout.old_log_probs_BT)
        return real(rollout, mini_batch, config)

    return changed(update, "rollout_objective", objective)


def coupled_decay(policy: SingleDevicePolicy) -> Planted:
    def step(real, rate):
        for group in policy.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad += group["weight_decay"] * parameter.detach()
        decays = [group["weight_decay"] for group in policy.optimizer.param_groups]
        for group in policy.optimizer.param_groups:
            group["weight_decay"] = 0.0
        real(rate)
        for group, decay in zip(policy.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    return changed(policy, "step", step)


def clip_by_value(policy: SingleDevicePolicy) -> Planted:
    def clip(real, limit):
        norm = real(float("inf"))
        largest = max(parameter.grad.abs().max() for parameter in policy.model.parameters())
        torch.nn.utils.clip_grad_value_(policy.model.parameters(), limit * largest.item() / norm)
        return norm

    return changed(policy, "clip_gradient", clip)


def gradient_that_stays(policy: SingleDevicePolicy) -> Planted:
    def step(real, rate):
        for group in policy.optimizer.param_groups:
            group["lr"] = rate
        policy.optimizer.step()
        if not rate:
            policy.drop_gradient()

    return changed(policy, "step", step)


def dropped_mini_batch(policy: SingleDevicePolicy) -> Planted:
    return changed(update, "mini_batches", lambda real, *arguments: real(*arguments)[::2])


def swapped_divergence(policy: SingleDevicePolicy) -> Planted:
    return changed(
        losses, "kl_penalty", lambda real, policys, other, name: real(other, policys, name)
    )


def samplers_log_probs(policy: SingleDevicePolicy) -> Planted:
    """In the place of the old policy's, from which only rounding tells them apart."""

    def annotate(real, *arguments):
        rollout = real(*arguments)
        return dataclasses.replace(rollout, old_log_probs_BT=rollout.sampler_log_probs_BT)

    return changed(References, "annotate", annotate)


def moments_that_are_not_loaded(policy: SingleDevicePolicy) -> Planted:
    return changed(policy, "load_optimizer", lambda real, folder: None)


def advantages_of_other_rows(policy: SingleDevicePolicy) -> Planted:
    def with_advantages(real, *arguments):
        rollout = real(*arguments)
        return dataclasses.replace(rollout, advantages_B1=rollout.advantages_B1.roll(1, dims=0))

    return changed(two_rollouts, "with_advantages", with_advantages)


def denominator_of_micro_batch(policy: SingleDevicePolicy) -> Planted:
    def call(real, loss, rows, *arguments):
        lengths = [loss.rollout.lengths[row] for row in rows]
        denominator = loss_denominator("sequence_mean", lengths, 1)
        return real(dataclasses.replace(loss, denominator=denominator), rows, *arguments)

    return changed(RolloutLoss, "__call__", call)


def shifted_mask(policy: SingleDevicePolicy) -> Planted:
    """The first token of each response is left out."""

    def collate_groups(real, *arguments):
        rollout = real(*arguments)
        mask = rollout.batch.response_mask
        batch = dataclasses.replace(rollout.batch, response_mask=mask & mask.roll(1, dims=1))
        return dataclasses.replace(rollout, batch=batch)

    return changed(two_rollouts, "collate_groups", collate_groups)


WEIGHTS = "8 updates, weights: from papers' in float64"
MOMENTS = "8 updates, moments: from papers' in float64"
GRADIENT = "8 updates, first gradient: from papers'"
SCALE = "8 updates, first gradient: scale, off papers'"
MINI_BATCHES = "8 updates, mini-batches: faults"
STATE = {WEIGHTS, MOMENTS}
ALL_BUT_ROWS = {*STATE, GRADIENT, SCALE}
# What is planted -> the lines that fail.
SEEN_BY = {
    late_old_log_probs: STATE,
    other_betas: STATE,
    coupled_decay: STATE,
    clip_by_value: STATE,
    gradient_that_stays: STATE,
    dropped_mini_batch: STATE,
    swapped_divergence: {MOMENTS},
    samplers_log_probs: STATE,
    advantages_of_other_rows: ALL_BUT_ROWS,
    denominator_of_micro_batch: ALL_BUT_ROWS,
    shifted_mask: ALL_BUT_ROWS,
}


@pytest.mark.slow
@pytest.mark.parametrize("planted", SEEN_BY, ids=lambda planted: planted.__name__)
def test_a_planted_fault_is_seen(small_folder, planted):
    updates = updates_of(small_folder, epochs_per_rollout=2, beta=0.05)
    with planted(updates.policy):
        records = records_of(updates)
    failed = {what for what, record in records.items() if record["passed"] is False}
    assert failed >= SEEN_BY[planted], records


@pytest.mark.slow
def test_moments_that_are_not_loaded_end_the_check(small_folder):
    updates = updates_of(small_folder, epochs_per_rollout=2, beta=0.05, **WARM_START)
    with (
        moments_that_are_not_loaded(updates.policy),
        pytest.raises(RunStopped, match="the optimiser does not hold the moments of the file"),
    ):
        records_of(updates)


@pytest.mark.slow
def test_mini_batches_that_leave_rows_out_are_seen_by_their_line(small_folder):
    """Also where the papers are given the same ones."""
    updates = updates_of(small_folder, epochs_per_rollout=2)
    with (
        dropped_mini_batch(updates.policy),
        changed(two_rollouts, "mini_batches", lambda real, *arguments: real(*arguments)[::2]),
    ):
        records = records_of(updates)
    failed = {what for what, record in records.items() if record["passed"] is False}
    assert MINI_BATCHES in failed
    assert records[MINI_BATCHES]["measured"] > 0


# With the choices that no other entry has, by turns; a warm start has its own optimiser, schedule
# and type of numbers alone.
HEALTHY = (
    {"beta": 0.05, "sampling_temperature": 0.8, "sampling_top_p": 0.9},
    {"loss_type": "no_baseline", "group_size": 1},
    {"loss_type": "reinforce_with_baseline", "loss_normalization": "constant"},
    {"loss_type": "grpo_no_clip", "loss_normalization": "token_mean", "std_of": "batch"},
    {"loss_type": "gspo", "cliprange": 3e-3, "advantage": "opo"},
    {"loss_type": "cispo", "advantage": "maxrl"},
    {"loss_type": "sapo", "advantage": "positive_only", "entropy_target": 2.0},
    WARM_START
    | {"loss_type": "gmpo", "advantage": "negative_only", "lr_schedule": "cosine", "num_steps": 3},
    {"loss_type": "dppo", "old_log_probs": "sampler", "rollouts": "async"},
    {"token_selection": "top_entropy", "advantage": "problem_average"},
    WARM_START
    | {"token_selection": "kl_cov", "sampler_correction": "sequence_mask", "lora_rank": 4},
    WARM_START
    | {"token_selection": "clip_cov", "covariance_low": 0.1, "optimizer": "adamw_cpu_offload"},
    {"advantage": "pass_at_k", "advantage.k": 2},
    WARM_START | {"optimizer": "adamw_8bit", "advantage": "reinforce_plus_plus_baseline"},
    WARM_START | {"dtype": "bfloat16", "entropy_coefficient": 0.01},
    WARM_START | {"adam_beta1": 0.8, "adam_beta2": 0.999, "adam_eps": 1e-4, "optimizer": "muon"},
    WARM_START | {"max_grad_norm": 0.0, "log_probs_of": "full", "sampling_top_k": 20, "beta": 0.05},
)


@pytest.mark.slow
def test_no_false_alarm(small_folder):
    """Of several updates of a rollout, for losses, estimators, optimisers and adapters."""
    for settings in HEALTHY:
        records = records_of(updates_of(small_folder, epochs_per_rollout=2, **settings))
        others = {name: one for name, one in records.items() if one["verdict"] != "passed"}
        assert len(records) >= 5 and not others, (settings, others)


@pytest.mark.slow
def test_groups_of_equal_answers_stop_nothing(small_folder):
    """Rounding alone is left of their gradient; a rate chosen by that would destroy the weights."""

    def sample(real, *arguments):
        return [[completions[0]] * len(completions) for completions in real(*arguments)]

    updates = updates_of(small_folder, **WARM_START)
    with changed(updates.sampler, "sample", sample):
        records = records_of(updates)
    assert len(records) == 16
    assert not any(record["error"] for record in records.values()), records


def test_one_update_of_a_rollout_is_compared_too(small_folder):
    records = records_of(updates_of(small_folder, **WARM_START))
    assert [record["verdict"] for record in records.values()] == ["passed"] * 16
    assert WEIGHTS.replace("8", "2") in records and WEIGHTS in records
    assert "decay 0.5" in records[WEIGHTS]["note"]


def test_a_model_is_cut_to_two_layers(tiny_folder, tmp_path):
    config = AutoConfig.from_pretrained(tiny_folder)
    config.num_hidden_layers = 3
    config.layer_types = ["full_attention"] * 3
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    cut_family(str(tmp_path / "whole"), tmp_path / "cut")
    whole = PlainModel(tmp_path / "whole").base
    cut = PlainModel(tmp_path / "cut").base
    assert 0 < len(cut) < len(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in cut.items())
    assert {name.split(".")[2] for name in cut if ".layers." in name} == {"0", "1"}


def test_adams_first_step_by_hand():
    """A gradient of 2: the moments are 0.1 x 2 and 0.05 x 4, unbiased 2 and 4."""
    zero = torch.zeros(1, dtype=torch.float64)
    moments = {"exp_avg": zero, "exp_avg_sq": zero}
    setting = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    direction, moments = adam_direction(zero + 2, moments, 1, setting)
    assert moments["exp_avg"].item() == pytest.approx(0.2)
    assert moments["exp_avg_sq"].item() == pytest.approx(0.2)
    assert direction.item() == pytest.approx(2 / (2 + 1e-8), rel=1e-14)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stacked_biases_are_neither_decayed_nor_numbered_among_the_matrices(kind, tmp_path):
    model = family_model("gpt_oss")
    model.save_pretrained(tmp_path)
    plain = PlainModel(tmp_path)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in plain.base.items()}
    moments = {}
    for name, tensor in zeros.items():
        moments[name] = dict.fromkeys(("exp_avg", "exp_avg_sq", "momentum"), tensor)
    setting = {"optimizer": kind, "weight_decay": 0.1, "entropy_coefficient": 0.0}
    setting |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    learner = make_learner(plain, TrainedState(plain.base, moments, 0), setting)
    learner.take_step(zeros, 0.1)
    kept = {n for n, tensor in learner.weights.items() if torch.equal(tensor, plain.base[n])}
    assert kept == {n for n, tensor in plain.base.items() if tensor.ndim == 1 or "bias" in n}
    assert not kept & plain.hidden_matrices(plain.base)
    names = {parameter: name for name, parameter in model.named_parameters()}
    numbered = []
    for group in make_optimizer(model, 0.1, 0.1, kind).param_groups:
        numbered += [names[parameter] for parameter in group["params"]]
    assert plain.in_order_of_optimizer(plain.base) == numbered
    assert not is_decayed("model.layers.0.mamba.A_log", torch.ones(3, 2))


def test_learning_rates_by_hand():
    setting = {"learning_rate": 0.5, "warmup_steps": 5, "num_steps": 3, "epochs_per_rollout": 5}
    setting |= {"prompts_per_rollout": 2, "group_size": 4, "train_mini_batch_size": 0}
    rates = {
        name: [learning_rate(setting | {"lr_schedule": name}, number) for number in (2, 5, 10, 15)]
        for name in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == pytest.approx([0.2, 0.5, 0.5, 0.5])
    assert rates["linear"] == pytest.approx([0.2, 0.5, 0.275, 0.05])
    assert rates["cosine"] == pytest.approx([0.2, 0.5, 0.275, 0.05])


def test_rewards_of_lengths_by_hand():
    setting = {"max_new_tokens": 20, "overlong_buffer": 8}
    rewards = [paper_length_reward(length, setting) for length in (1, 12, 16, 20, 21)]
    assert rewards == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert paper_length_reward(20, setting | {"overlong_buffer": 0}) == 0.0


def test_what_top_k_and_top_p_keep_by_hand():
    """Probabilities 0.5, 0.3 and 0.2; within the two most likely ones 0.625 and 0.375."""
    logits_TV = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()

    def kept(top_k: int, top_p: float) -> list[bool]:
        setting = {"sampling_top_k": top_k, "sampling_top_p": top_p}
        return kept_tokens(logits_TV, setting)[0].tolist()

    assert kept(0, 1.0) == [True, True, True]
    assert kept(0, 0.6) == [False, True, True]
    assert kept(2, 1.0) == [False, True, True]
    assert kept(2, 0.6) == [False, True, False]


@pytest.mark.parametrize(
    ("mini_batches", "faults"),
    [
        ([[0, 1], [2]], []),
        ([[2], [0, 1]], ["epoch 1 has mini-batches of other sizes"]),
        ([[0, 1], [1]], ["epoch 1 does not take each row once"]),
        ([[0, 2], [1]], ["epoch 1 tears groups apart"]),
    ],
)
def test_faults_of_mini_batches(mini_batches, faults):
    """Of two groups of two rows, one of which does not count."""
    responses = [PlainResponse((1,), (2,), 0.0, row < 3, (-1.0,)) for row in range(4)]
    rollout = PlainRollout(responses, mini_batches)
    assert mini_batch_faults(rollout, epochs=1, size=2, group_size=2) == faults


def test_mini_batches_of_one_order_by_every_data_seed(monkeypatch):
    config = dataclasses.replace(ARGS, epochs_per_rollout=2).update_config
    assert two_rollouts.fixed_orders(config) == 0
    real = two_rollouts.mini_batches
    monkeypatch.setattr(
        two_rollouts,
        "mini_batches",
        lambda rollout, config, step: real(rollout, dataclasses.replace(config, data_seed=0), step),
    )
    assert two_rollouts.fixed_orders(config) == 4  # two epochs of two steps
