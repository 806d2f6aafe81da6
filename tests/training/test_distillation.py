"""On-policy distillation: advantages of tokens, their gradient against an oracle in float64, and
what is refused."""

import dataclasses
import json
import math

import pytest
import torch
from rollout_helpers import ARGS, open_tiny, sample_rollout
from transformers import AutoModelForCausalLM

from alignment.builders.checks import check_teacher
from alignment.builders.devices import roles_of
from alignment.builders.prediction import MOST_SHARES, predict, work_of_phases
from alignment.builders.run_plan import PlannedMachines
from alignment.core.losses import LOSSES, Loss, LossConfig, LossInputs, micro_batch_loss
from alignment.model.frozen import FrozenModel
from alignment.model.vocabulary import Vocabulary, read_vocabulary, refuse_other_vocabulary
from alignment.planning.placement import Roles, with_teacher
from alignment.rollouts.source import with_advantages
from alignment.system.clock import Clock
from alignment.system.errors import UserError
from alignment.training import update as updates
from alignment.training.microscope import compute_gradient
from alignment.training.trial import try_loss
from alignment.training.update import LogProbSource, References, rollout_objective
from alignment.verification.paper_distillation import (
    SampledByStudent,
    paper_distillation_derivatives,
)

DISTILLED = dataclasses.replace(ARGS, teacher="tiny", advantage="none")


def with_made_up(rollout, config):
    """The rollout with log-probs of a made-up old policy and teacher."""
    generator = torch.Generator().manual_seed(3)
    noise_2BT = 0.1 * torch.randn(2, *rollout.batch.labels.shape, generator=generator)
    old_BT, teacher_BT = rollout.sampler_log_probs_BT + noise_2BT * rollout.batch.response_mask
    rollout = dataclasses.replace(rollout, old_log_probs_BT=old_BT)
    rollout = with_advantages(rollout, config.advantage)
    return updates.with_teacher(rollout, teacher_BT, config.teacher_weight)


def test_the_loss_of_tokens_by_hand():
    """Two responses, the second of one token. A = 0.5 and -1; weight 2; log pi_T - log pi_old is
    0.3, -0.1 and 0.25: the tokens' advantages are 1.1, 0.3 and -0.5. The ratios are 1.5 (clipped to
    1.2, as 1.1 > 0), 1 and 0.9."""
    old_BT = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
    mask_BT = torch.tensor([[True, True], [True, False]])
    advantages_BT = torch.tensor([[0.5], [-1.0]]) + 2 * torch.tensor([[0.3, -0.1], [0.25, 0.0]])
    log_probs_BT = old_BT + torch.tensor([[math.log(1.5), 0.0], [math.log(0.9), 0.0]])

    def loss_of(name):
        config = LossConfig(LOSSES[name])
        inputs = LossInputs(
            config, log_probs_BT, mask_BT, advantages=advantages_BT, old_log_probs=old_BT
        )
        return micro_batch_loss(inputs, 2.0)[0].item()

    first = -(1.1 * 1.2 + 0.3 * 1.0) / 2
    second = 0.5 * 0.9
    assert loss_of("grpo_clip") == pytest.approx((first + second) / 2, abs=1e-6)
    first = -(1.1 * 1.5 + 0.3) / 2
    assert loss_of("grpo_no_clip") == pytest.approx((first + second) / 2, abs=1e-6)
    first = -(1.1 * (-1 + math.log(1.5)) + 0.3 * -2) / 2
    second = 0.5 * (-0.5 + math.log(0.9))
    assert loss_of("reinforce_with_baseline") == pytest.approx((first + second) / 2, abs=1e-6)


def test_a_teacher_adds_its_advantages_to_the_trained_tokens(sampler):
    config = dataclasses.replace(ARGS, teacher="tiny", teacher_weight=0.5).update_config
    rollout = sample_rollout(sampler)
    uncounted_B1 = rollout.counted_B1.clone()
    uncounted_B1[5] = False
    rollout = dataclasses.replace(rollout, counted_B1=uncounted_B1)
    teacher_BT = rollout.sampler_log_probs_BT - 0.2
    annotated = updates.with_teacher(rollout, teacher_BT, config.teacher_weight)
    mask_BT = rollout.batch.response_mask & uncounted_B1
    expected_BT = (rollout.advantages_B1 - 0.1).expand_as(mask_BT).where(mask_BT, 0)
    torch.testing.assert_close(annotated.advantages, expected_BT)
    assert rollout.advantages is rollout.advantages_B1
    assert updates.teacher_report(annotated)["teacher_kl"] == pytest.approx(0.2, abs=1e-6)
    assert updates.teacher_report(rollout) == {}
    # The old policy's log-probs, where they are known, are the student's.
    older = dataclasses.replace(rollout, old_log_probs_BT=teacher_BT + 0.7)
    annotated = updates.with_teacher(older, teacher_BT, config.teacher_weight)
    assert updates.teacher_report(annotated)["teacher_kl"] == pytest.approx(0.7, abs=1e-6)


def oracle_gradient(folder, rollout, derivatives):
    """The gradient [D] of a loss with such derivatives by the log-probs of tokens, through
    transformers' own model in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    total = torch.zeros((), dtype=torch.float64)
    for row, of_tokens in enumerate(derivatives):
        log_probs_t = model_log_probs(model, rollout.batch, row)
        total = total + (torch.tensor(of_tokens, dtype=torch.float64) * log_probs_t).sum()
    total.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def model_log_probs(model, batch, row):
    """The log-probs [t] of a row's response."""
    mask_T = batch.response_mask[row]
    width = int(mask_T.nonzero().max()) + 1
    logits_TV = model(batch.input_ids[row : row + 1, :width]).logits[0]
    log_probs_TV = logits_TV.log_softmax(dim=-1)
    return log_probs_TV.gather(1, batch.labels[row, :width, None])[:, 0][mask_T[:width]]


@pytest.mark.parametrize(
    ("advantage", "normalization"),
    [
        ("none", "sequence_mean"),
        ("group_baseline", "token_mean"),
        pytest.param("group_baseline", "sequence_mean", marks=pytest.mark.slow),
        pytest.param("none", "token_mean", marks=pytest.mark.slow),
        pytest.param("group_baseline", "constant", marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_the_oracles_however_the_batch_is_cut(
    advantage, normalization, sampler, tiny_folder
):
    args = dataclasses.replace(
        DISTILLED,
        advantage=advantage,
        loss_normalization=normalization,
        teacher_weight=0.7,
        cliprange=0.05,
        epochs_per_rollout=2,
    )
    config = args.update_config
    rollout = with_made_up(sample_rollout(sampler), config)
    every_row = range(len(rollout.lengths))
    student = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()
    with torch.no_grad():
        present = [model_log_probs(student, rollout.batch, row).tolist() for row in every_row]

    def lists(values_BT):
        return list(rollout.response_values(values_BT, every_row))

    responses = SampledByStudent(
        present, lists(rollout.old_log_probs_BT), lists(rollout.teacher_log_probs_BT)
    )
    setting = {**vars(config.loss), "teacher_weight": 0.7, "max_new_tokens": args.max_new_tokens}
    advantages = rollout.advantages_B1[:, 0].tolist()
    derivatives = paper_distillation_derivatives(setting, advantages, responses)
    assert any(0.0 in row for row in derivatives)  # Some tokens are clipped.
    expected = oracle_gradient(tiny_folder, rollout, derivatives)
    rows = updates.rows_with_gradient(rollout, config)
    assert rows == list(every_row)
    for tokens in (0, 1, 60):
        policy = open_tiny(tiny_folder, micro_batch_tokens=tokens)
        objective = rollout_objective(rollout, rows, config)
        gradient_D = compute_gradient(policy, rollout.batch, rows, objective)
        expected_D = torch.cat([expected[name].flatten() for name, _ in policy.weights()])
        assert expected_D.norm() > 1e-3
        torch.testing.assert_close(gradient_D.double(), expected_D, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_updates_towards_a_teacher_lower_the_divergence(policy, sampler, tiny_folder):
    """The policy's first weights are the teacher of weights that have been moved away."""
    teacher = FrozenModel(str(tiny_folder), "cpu", torch.float32)
    with torch.no_grad():
        for _, weight in policy.weights():
            weight.mul_(1.5)
    args = dataclasses.replace(
        DISTILLED, loss_type="reinforce_with_baseline", learning_rate=3e-3, warmup_steps=0
    )
    references = References(
        args.update_config, None, None, Clock(), LogProbSource(teacher.log_probs)
    )
    divergences = []
    for step in range(1, 9):
        sampler.load_weights(policy.weights(), version=step)
        rollout = with_advantages(sample_rollout(sampler), args.update_config.advantage)
        rollout = references.annotate(rollout, policy, step)
        report = updates.update(policy, rollout, args.update_config, step).report
        assert report["rows_with_gradient"] == 16
        divergences.append(report["teacher_kl"])
    assert divergences[0] > 0.1 and divergences[-1] < 0.5 * divergences[0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"teacher": "", "advantage": "none"}, "--advantage none: must be another estimator"),
        ({"teacher": "", "advantage": "opo", "teacher_device": "cpu"}, "--teacher_device cpu"),
        ({"loss_type": "gspo"}, "--loss_type gspo: must be a loss with a ratio for each token"),
        ({"loss_type": "no_baseline"}, "--loss_type no_baseline: must be a loss of advantages"),
        ({"max_refills": 1}, "--max_refills 1: must be 0 with --teacher"),
        ({"teacher_weight": 0.0}, "--teacher_weight 0.0: must be a number above 0"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(UserError) as refusal:
        dataclasses.replace(DISTILLED, **changes)
    assert str(refusal.value).startswith(message)


POLICY = Vocabulary({"a": 0, "b": 1}, 4)


@pytest.mark.parametrize(
    "teacher, message",
    [
        (Vocabulary({"a": 1, "b": 0}, 4), r"gives 2 of the policy's 2 tokens another id or none"),
        (Vocabulary({"a": 0}, 4), r"1 of the policy's 2 .* such as 'b' \(.* 1, the teacher's none"),
        (Vocabulary({"a": 0, "b": 1}, 3), "has 3 log-probs a token, and the policy 4"),
    ],
)
def test_a_teacher_of_other_ids_is_refused(teacher, message):
    with pytest.raises(UserError, match=message):
        refuse_other_vocabulary("other", teacher, POLICY)


def test_a_teacher_may_have_further_tokens():
    refuse_other_vocabulary("larger", Vocabulary({"a": 0, "b": 1, "c": 4}, 8), POLICY)


def test_a_folders_files_say_its_ids(tiny_folder, tmp_path):
    assert check_teacher(ARGS) is None
    vocabulary = read_vocabulary(tiny_folder)
    tokenizer = json.loads((tiny_folder / "tokenizer.json").read_text())
    assert vocabulary.ids["<|pad|>"] == 1
    assert vocabulary.size == len(vocabulary.ids)
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    assert read_vocabulary(tmp_path) is None
    args = dataclasses.replace(DISTILLED, model=str(tiny_folder), teacher=str(tmp_path))
    check_teacher(args)  # Without its tokenizer's file it is compared where it is loaded.
    ids = tokenizer["model"]["vocab"]
    ids["e"], ids["f"] = ids["f"], ids["e"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="gives 2 of the policy's"):
        check_teacher(args)
    pieces = [["x", -1.0], ["y", -2.0]]
    unigram = {"model": {"vocab": pieces}, "added_tokens": [{"content": "z", "id": 7}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert read_vocabulary(tmp_path).ids == {"x": 0, "y": 1, "z": 7}


def test_the_teacher_is_beside_the_reference_unless_it_is_placed():
    roles = Roles(("cuda:0", "cuda:1"), ("cuda:4",), "cuda:3", "cuda:2")
    assert with_teacher(roles, None, 5).teacher == "cuda:3"
    placed = with_teacher(roles, "cuda:1", 5)
    assert (placed.policy, placed.teacher) == (("cuda:0",), "cuda:1")
    assert with_teacher(roles, "cuda:1", 5, policy_is_named=True).policy == roles.policy
    with pytest.raises(UserError, match="--teacher_device cuda:7, but only 5 GPUs"):
        with_teacher(roles, "cuda:7", 5)
    assert roles_of(ARGS, 0).teacher == "" and roles_of(DISTILLED, 0).teacher == "cpu"


def test_the_plan_counts_a_teachers_bytes_and_seconds(tiny_folder):
    args = dataclasses.replace(DISTILLED, model=str(tiny_folder), teacher=str(tiny_folder))
    alone = dataclasses.replace(args, teacher="", advantage="group_baseline")
    machines = PlannedMachines(0, 8e9)
    with_one, without = predict(args, machines), predict(alone, machines)
    # The linear layers, the embedding and the norms, each number in float32.
    weights = 4 * sum(with_one.shape.parameters.values())
    (peak,), (other,) = with_one.peaks, without.peaks
    assert peak.phases["sync"]["teacher"] == weights and other.phases["sync"]["teacher"] == 0
    assert "teacher" in peak.phases and "teacher" not in other.phases
    works, others = (work_of_phases(which, 1, MOST_SHARES) for which in (with_one, without))
    # A pass over all rows has a third of the work of an update of all rows, but for casts.
    assert 3 * works["teacher"].operations == pytest.approx(works["update"].operations)
    assert works.keys() - others.keys() == {"teacher"}


def test_a_loss_of_ones_own_is_tried_with_advantages_of_tokens():
    def of_responses_alone(inputs):
        weights_B = inputs.advantages.squeeze(1)
        return -(weights_B[:, None] * inputs.log_probs), {}

    config = LossConfig(Loss(of_responses_alone, weight=None))
    try_loss("mine:loss", config)
    with pytest.raises(UserError, match="whose tokens have advantages of their own"):
        try_loss("mine:loss", config, has_teacher=True)
