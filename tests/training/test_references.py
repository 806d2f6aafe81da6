"""Old and reference log-probs: when the loss needs them, and that they are those of the right
weights."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from rollout_helpers import ARGS, sample_rollout, with_old_log_probs

from alignment.ablation.design import canonical
from alignment.builders.prediction import step_shape
from alignment.core.schedules import last_reset
from alignment.model import kernels
from alignment.model.frozen import FrozenModel, MicroBatchedModel
from alignment.model.kernels import has_fused_kernels
from alignment.model.loading import load_tokenizer
from alignment.planning.placement import Roles
from alignment.policy.policy import PolicyConfig, open_policy
from alignment.policy.single_device import SingleDevicePolicy
from alignment.system.clock import Clock
from alignment.system.errors import UserError
from alignment.training.update import LogProbSource, References, rows_with_gradient, update


def test_the_samplers_log_probs_replace_the_old_ones_with_the_flag():
    several_updates = dataclasses.replace(ARGS, epochs_per_rollout=2)
    assert several_updates.needs_old_policy and not several_updates.trusts_sampler
    assert several_updates.update_config.old_log_probs == "policy"
    trusting = dataclasses.replace(several_updates, old_log_probs="sampler")
    assert trusting.trusts_sampler and not trusting.needs_old_policy
    assert trusting.update_config.old_log_probs == "sampler"
    # REINFORCE has no ratio, so nothing replaces an old policy; its correction for the sampler
    # still needs one.
    for correction, needed in (("none", False), ("token_truncate", True)):
        other = dataclasses.replace(
            trusting, loss_type="no_baseline", sampler_correction=correction
        )
        assert not other.trusts_sampler and other.needs_old_policy is needed
    with pytest.raises(
        UserError, match="--old_log_probs sampler: the ratio of --loss_type grpo_clip"
    ):
        dataclasses.replace(trusting, sampler_correction="token_mask")


def test_old_log_probs_are_computed_where_the_loss_or_the_samplers_correction_needs_them():
    several_updates = dataclasses.replace(ARGS, train_mini_batch_size=4)
    reinforce = dataclasses.replace(several_updates, loss_type="reinforce_with_baseline")
    assert several_updates.needs_old_policy and not reinforce.needs_old_policy
    assert dataclasses.replace(reinforce, sampler_correction="token_truncate").needs_old_policy
    assert not dataclasses.replace(
        ARGS, sampler_correction="token_truncate"
    ).needs_old_policy  # one update a rollout


@pytest.mark.parametrize(
    "own",
    [{"compile": True}, {"use_liger_kernel": True}, {"kernels": "liger"}, {"lora_rank": 2}],
)
def test_no_copy_is_the_old_policy_where_the_policy_has_kernels_or_adapters_of_its_own(own):
    several_updates = dataclasses.replace(
        ARGS, train_mini_batch_size=ARGS.rollout_size // 2, kernels="eager"
    )
    assert several_updates.copies_old_policy and not ARGS.copies_old_policy
    changed = dataclasses.replace(several_updates, **own)
    assert changed.needs_old_policy and not changed.copies_old_policy
    roles = Roles(policy=("cuda:0",), sample=("cuda:3",), eval="cuda:1", reference="cuda:2")
    assert [step_shape(args, roles, 8e10, True).frozen for args in (several_updates, changed)] == [
        1,
        0,
    ]


def test_an_old_policy_on_another_device_gives_the_same_log_probs(policy, sampler, tiny_folder):
    with torch.no_grad():
        for _, weight in policy.weights():
            weight.mul_(1.1)  # the other model was loaded with weights that are now out of date
    rollout = sample_rollout(sampler)
    old_policy = FrozenModel(str(tiny_folder), "cpu", torch.float32)
    apart, shared = (
        with_old_log_probs(rollout, policy, ARGS, old).old_log_probs_BT
        for old in (old_policy, None)
    )
    assert torch.equal(apart, shared)
    # Rows without a gradient need no old log-probs.
    informative = rows_with_gradient(rollout, ARGS.update_config)
    assert 0 < len(informative) < 16
    mask = rollout.batch.response_mask.clone()
    assert shared[informative][mask[informative]].lt(0).all()
    mask[informative] = False
    assert shared[mask].eq(0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_old_policy_has_the_policys_kernels(dtype, sampler, tiny_folder, monkeypatch):
    """By fused functions, which are not compiled here, a copy computes what the policy does, bit
    for bit, and something else than by the model's own code in 16 bits."""
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    monkeypatch.setattr(kernels, "FUSED", {})
    folder = str(tiny_folder)
    config = PolicyConfig(folder, ("cpu",), dtype, micro_batch_tokens=1000, kernels="compiled")
    policy = SingleDevicePolicy(config)
    batch = sample_rollout(sampler).batch
    distribution = ARGS.update_config.distribution
    own = policy.log_probs(batch, distribution)
    copy = FrozenModel(folder, "cpu", getattr(torch, dtype), policy.kernels)
    assert torch.equal(own, copy.log_probs(batch, distribution, 1000))
    copy.reload(folder)
    assert torch.equal(own, copy.log_probs(batch, distribution, 1000))
    plain = FrozenModel(folder, "cpu", getattr(torch, dtype))
    assert has_fused_kernels(copy.model) and not has_fused_kernels(plain.model)


def test_in_bfloat16_the_reference_computes_exactly_what_the_policy_does(sampler, tiny_folder):
    """The KL divergence of a run's first step is 0. Weights all in bfloat16 gave 3e-4 to 5e-4
    nats."""
    policy = SingleDevicePolicy(
        PolicyConfig(str(tiny_folder), ("cpu",), "bfloat16", micro_batch_tokens=1000)
    )
    reference = FrozenModel(str(tiny_folder), "cpu", torch.bfloat16)
    kept = {parameter.dtype for parameter in reference.model.parameters()}
    assert kept == {torch.bfloat16, torch.float32}
    for frozen, trained in zip(
        reference.model.parameters(), policy.model.parameters(), strict=True
    ):
        assert torch.equal(frozen.bfloat16(), trained.bfloat16())
    batch, config = sample_rollout(sampler).batch, dataclasses.replace(ARGS, beta=0.1).update_config
    ours, theirs = (
        policy.log_probs(batch, config.distribution),
        reference.log_probs(batch, config.distribution, 1000),
    )
    assert ours.lt(0).any() and torch.equal(ours, theirs)
    other = MicroBatchedModel(policy.model.bfloat16(), torch.bfloat16, 1000).log_probs(
        batch, config.distribution
    )
    assert not torch.equal(ours, other)  # as all in bfloat16


def test_the_reference_keeps_the_weights_that_training_began_with(policy, sampler, tiny_folder):
    config = dataclasses.replace(ARGS, beta=0.1).update_config
    frozen, reports = FrozenModel(str(tiny_folder), "cpu", torch.float32), []
    references = References(config, None, LogProbSource(frozen.log_probs), Clock())
    for step in (1, 2):
        rollout = references.annotate(sample_rollout(sampler), policy, step)
        reports.append(update(policy, rollout, config, step).report)
        sampler.load_weights(policy.weights(), version=step)
    assert reports[0]["kl"] == pytest.approx(0, abs=1e-6) and reports[1]["kl"] > 1e-4


@pytest.mark.parametrize(
    ("kind", "devices", "dtype"),
    [
        ("single", ("cpu",), "float32"),
        pytest.param("single", ("cpu",), "bfloat16", marks=pytest.mark.slow),
        pytest.param("layer_split", ("cpu", "cpu:0"), "float32", marks=pytest.mark.slow),
    ],
)
def test_right_after_a_reset_the_divergence_is_0(
    kind, devices, dtype, sampler, tiny_folder, tmp_path
):
    """Of 5 steps with resets after 2 and 4: steps 1, 3 and 5 begin with the reference's weights,
    and one update a rollout leaves k3 no other log-probs than these."""
    config = with_resets(2).update_config
    config = dataclasses.replace(config, max_sampler_mismatch=1.0)  # The sampler's are in float32.
    own = PolicyConfig(str(tiny_folder), devices, dtype, micro_batch_tokens=1000)
    policy = open_policy(kind, own)
    frozen = FrozenModel(str(tiny_folder), "cpu", policy.dtype)
    source = LogProbSource(frozen.log_probs, reload=frozen.reload)
    references, divergences = References(config, None, source, Clock()), []
    tokenizer = load_tokenizer(str(tiny_folder))
    for step in range(1, 6):
        rollout = references.annotate(sample_rollout(sampler), policy, step)
        if step in (3, 5):
            current_BT = policy.log_probs(rollout.batch, config.distribution)
            assert torch.equal(rollout.reference_log_probs_BT, current_BT)
        divergences.append(update(policy, rollout, config, step).report["kl"])
        sampler.load_weights(policy.weights(), version=step)
        checkpoint = tmp_path / str(step)
        policy.save(checkpoint, tokenizer)
        if step == last_reset(step, config.reference_reset_interval):
            references.reset(step, checkpoint)
    first, second, third, fourth, fifth = divergences
    assert first == third == fifth == 0
    assert second > 1e-4 and fourth > 1e-4


def with_resets(interval: int, **flags):
    return dataclasses.replace(ARGS, beta=0.1, reference_reset_interval=interval, **flags)


def test_a_batch_of_a_step_after_a_reset_waits_for_it(policy, sampler, wait_for):
    """Rollouts are sampled ahead: step 3's is there while the reference is still that of step 0."""
    config, rollout = with_resets(2).update_config, sample_rollout(sampler)
    requested, reference_step = [], [0]

    def log_probs(batch, distribution, micro_batch_tokens):
        requested.append(reference_step[0])
        return -batch.response_mask.float()

    def reload(folder):
        reference_step[0] = 2

    source = LogProbSource(log_probs, in_background=True, reload=reload)
    references = References(config, None, source, Clock())
    for step in (2, 3):
        references.request(step, rollout.batch, policy.micro_batch_tokens)
    references.annotate(rollout, policy, 2)
    assert requested == [0]
    references.reset(2, Path("step_000002"))
    references.request(4, rollout.batch, policy.micro_batch_tokens)
    wait_for(lambda: len(requested) == 2)
    references.annotate(rollout, policy, 3)
    assert requested == [0, 2, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"reference_reset_interval": 5}, "--reference_reset_interval 5: must be 0 without --beta"),
        (
            {"beta": 0.1, "reference_reset_optimizer": True},
            "--reference_reset_optimizer True: must be left out, or go with --reference_reset_int",
        ),
        ({"reference_reset_interval": -1}, "--reference_reset_interval -1: must be 0"),
    ],
)
def test_resets_without_a_reference_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(ARGS, **flags)


def test_adapters_have_a_model_beside_them_where_the_reference_is_reset():
    roles = Roles(policy=("cuda:0",), sample=("cuda:3",), eval="cuda:1", reference="cuda:2")
    adapters = dataclasses.replace(ARGS, beta=0.1, lora_rank=2)
    reset = dataclasses.replace(adapters, reference_reset_interval=5)
    frozen = [step_shape(args, roles, 8e10, True).frozen for args in (adapters, reset)]
    assert frozen == [0, 1]
    whole = dataclasses.replace(ARGS, beta=0.1)
    shapes = [step_shape(args, roles, 8e10, True) for args in (whole, with_resets(5))]
    assert shapes[0] == shapes[1]


def test_resets_that_come_after_the_last_step_play_no_part():
    assert canonical(with_resets(ARGS.num_steps)) == canonical(with_resets(0))
    assert canonical(with_resets(5)) != canonical(with_resets(0))


class ReferenceElsewhere:
    """Log-probs of -1, once it may answer."""

    def __init__(self):
        self.asked, self.may_answer = [], threading.Event()

    def log_probs(self, batch, distribution, micro_batch_tokens):
        self.asked.append((batch, distribution, micro_batch_tokens))
        assert self.may_answer.wait(30)
        return -batch.response_mask.float()


def test_a_reference_in_another_process_computes_while_the_trainer_does_something_else(
    policy, sampler, wait_for
):
    config = dataclasses.replace(ARGS, beta=0.1, epochs_per_rollout=2).update_config
    rollout, elsewhere = sample_rollout(sampler), ReferenceElsewhere()
    references = References(
        config, None, LogProbSource(elsewhere.log_probs, in_background=True), Clock()
    )
    references.request(3, rollout.batch, policy.micro_batch_tokens)  # as soon as it is sampled
    wait_for(lambda: len(elsewhere.asked) == 1)
    elsewhere.may_answer.set()
    annotated = references.annotate(rollout, policy, step=3)
    assert torch.equal(annotated.reference_log_probs_BT, -rollout.batch.response_mask.float())
    # and not again
    assert elsewhere.asked == [(rollout.batch, config.distribution, policy.micro_batch_tokens)]

    def old_log_probs(*question):
        """The old policy's pass, during which the reference must be at work already."""
        wait_for(lambda: len(elsewhere.asked) == 2)
        elsewhere.may_answer.set()
        return annotated.old_log_probs_BT

    elsewhere.may_answer.clear()
    policy.log_probs = old_log_probs
    assert torch.equal(
        references.annotate(rollout, policy, step=4).reference_log_probs_BT,
        annotated.reference_log_probs_BT,
    )
    assert len(elsewhere.asked) == 2


def test_a_reference_in_this_process_is_asked_when_its_log_probs_are_needed(policy, sampler):
    asked, rollout = [], sample_rollout(sampler)

    def reference(*question):
        return asked.append(question) or -rollout.batch.response_mask.float()

    references = References(
        dataclasses.replace(ARGS, beta=0.1).update_config, None, LogProbSource(reference), Clock()
    )
    references.request(1, rollout.batch, policy.micro_batch_tokens)
    assert asked == []
    assert (
        references.annotate(rollout, policy, step=1).reference_log_probs_BT.lt(0).any()
        and len(asked) == 1
    )
