"""Old and reference log-probs: when the loss needs them, and that they are those of the right
weights."""

import dataclasses
import threading

import pytest
import torch
from rollout_helpers import ARGS, sample_rollout, with_old_log_probs

from alignment.builders.prediction import step_shape
from alignment.model.frozen import FrozenModel, MicroBatchedModel
from alignment.planning.placement import Roles
from alignment.policy.policy import PolicyConfig
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


@pytest.mark.parametrize("own", [{"compile": True}, {"use_liger_kernel": True}, {"lora_rank": 2}])
def test_no_copy_is_the_old_policy_where_the_policy_has_kernels_or_adapters_of_its_own(own):
    several_updates = dataclasses.replace(ARGS, train_mini_batch_size=ARGS.rollout_size // 2)
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
