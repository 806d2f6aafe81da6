"""Presets and flags."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import (
    PRESETS,
    EvaluateArgs,
    GradientsArgs,
    PlanArgs,
    RLArgs,
    SFTArgs,
    as_command,
    from_preset,
    parse,
    preset_names,
)
from alignment.system.errors import UserError

REFERENCE = "qwen2.5_math_1.5b_gsm8k_8gpu"


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("cls", [EvaluateArgs, SFTArgs, RLArgs, PlanArgs])
def test_every_preset_fits_every_command(name, cls):
    assert from_preset(cls, name).preset == name


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_what_it_takes_and_gives(name):
    head = (PRESETS / f"{name}.toml").read_text().partition("\ntask = ")[0]
    for words in ("uv run ", "Hardware: ", "Time: ", "Score: "):
        assert words in head, words


def test_the_reference_recipe():
    args = from_preset(RLArgs, REFERENCE)
    assert (args.group_size, args.cliprange, args.sampling_temperature, args.sampling_top_p) == (4, 0.2, 1.0, 0.9)
    assert (args.train_mini_batch_size, args.sft_base, args.model) == (8, "checkpoints/math_sft", "Qwen/Qwen2.5-Math-1.5B")
    assert (args.sample_device, args.reference_model_device, args.eval_device) == (("cuda:7",), "cuda:6", "cuda:5")
    assert args.updates_per_rollout == args.prompts_per_rollout * 4 // 8


def test_flags_override_the_preset_wherever_it_stands():
    for argv in (["--preset", REFERENCE, "--group_size", "2"], ["--group_size", "2", f"--preset={REFERENCE}"]):
        args = parse(RLArgs, argv)
        assert (args.group_size, args.cliprange, args.preset) == (2, 0.2, REFERENCE)


def test_another_commands_arguments_share_the_common_ones():
    rl = from_preset(RLArgs, "tiny", seed=5, sft_base="elsewhere")
    args = as_command(SFTArgs, rl)
    assert (args.seed, args.sft_base, args.curriculum) == (5, "elsewhere", True)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.integers(0, 400))
def test_updates_per_rollout_count_a_remainder(prompts, group, epochs, mini):
    size = prompts * group
    sizes = {"prompts_per_rollout": prompts, "group_size": group, "epochs_per_rollout": epochs, "train_mini_batch_size": mini}
    args = RLArgs(loss_type="no_baseline", **sizes)
    cuts = range(0, size, mini) if mini else [0]
    assert args.updates_per_rollout == epochs * len(cuts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_numbers_that_cannot_work_are_refused(value):
    for name in ("learning_rate", "max_grad_norm", "max_sampler_mismatch"):
        with pytest.raises(UserError, match=f"--{name}"):
            RLArgs(**{name: value})


def test_arguments_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_preset(RLArgs, "tiny").group_size = 3


@pytest.mark.parametrize("values", [{"prompts": 1}, {"group_size": (1, 4)}, {"group_size": (3, 8)}, {"group_size": ()}])
def test_gradients_need_several_prompts_and_groups_that_divide(values):
    with pytest.raises(UserError, match="--"):
        GradientsArgs(**values)
