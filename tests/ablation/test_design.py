"""The design of sweeps: which arms a command line means, and what the linter says of them."""

import dataclasses

import pytest
from rich.console import Console

from alignment.ablation import design
from alignment.ablation.design import canonical, fixed_facts, lint, with_controls
from alignment.args import RLArgs, SweepArgs, command_line, from_preset, parse, swept_values
from alignment.data.tasks import TASKS
from alignment.sweep import make_design, print_design
from alignment.system.errors import UserError


def sweep(*flags: str):
    return parse(SweepArgs, list(flags))


def grid(args) -> dict[str, RLArgs]:
    return design.grid(args.preset, swept_values(args), args.hold)


def named_arms(args) -> dict[str, RLArgs]:
    return design.named_arms(args.sweep_file, args.preset, swept_values(args))


def arm(**values) -> RLArgs:
    return from_preset(RLArgs, "tiny", **values)


def test_the_grid_is_the_product():
    arms = grid(
        sweep(
            "--loss_type",
            "no_baseline",
            "grpo_clip",
            "--learning_rate",
            "1e-4",
            "2e-4",
            "--num_steps",
            "7",
        )
    )
    assert list(arms) == [
        "no_baseline_learning_rate0.0001",
        "no_baseline_learning_rate0.0002",
        "grpo_clip_learning_rate0.0001",
        "grpo_clip_learning_rate0.0002",
    ]
    assert {(a.loss_type, a.learning_rate) for a in arms.values()} == {
        (loss, rate) for loss in ("no_baseline", "grpo_clip") for rate in (1e-4, 2e-4)
    }
    assert {a.num_steps for a in arms.values()} == {7}


def test_both_forms_of_group_size():
    held = {a.group_size: a for a in grid(sweep("--group_size", "4", "16")).values()}
    # 256 responses each
    assert {size: a.prompts_per_rollout for size, a in held.items()} == {
        4: 64,
        16: 16,
    }
    free = {
        a.group_size: a
        for a in grid(sweep("--group_size", "4", "16", "--hold", "prompts")).values()
    }
    # 32 prompts each
    assert {size: a.rollout_size for size, a in free.items()} == {
        4: 128,
        16: 512,
    }


def test_group_sizes_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="--group_size 3 --hold rollouts: 256 responses"):
        grid(sweep("--group_size", "3", "4"))


def test_booleans_and_names():
    arms = grid(sweep("--normalize_by_std", "True", "False"))
    assert {name: a.normalize_by_std for name, a in arms.items()} == {
        "normalize_by_std": True,
        "no_normalize_by_std": False,
    }


def test_an_arm_that_cannot_work_is_refused():
    with pytest.raises(UserError, match="--cliprange"):
        grid(sweep("--cliprange", "0.2", "2"))


def test_stale_rollouts_are_another_thing():
    """The ratio is to older weights: with one update a clipped loss is no REINFORCE. k = 0 is the
    synchronous run."""
    plain, stale = arm(train_mini_batch_size=0), arm(train_mini_batch_size=0, rollouts="async")
    assert (
        canonical(plain)["loss_type"] == "reinforce_with_baseline" != canonical(stale)["loss_type"]
    )
    assert canonical(arm(rollouts="async", max_staleness=0)) == canonical(arm())
    assert canonical(arm(rollouts="async", max_staleness=1)) == canonical(arm(rollouts="async"))


def test_flags_of_adapters_play_no_part_without_them():
    assert canonical(arm(lora_alpha=8, lora_targets="q_proj")) == canonical(arm())
    assert (
        canonical(arm(lora_rank=2, lora_alpha=8)) != canonical(arm(lora_rank=2)) != canonical(arm())
    )


def test_an_argument_that_plays_no_part_in_any_arm_is_refused(tmp_path):
    with pytest.raises(UserError, match="^--lora_alpha 16 64: must be left out, or go with"):
        grid(sweep("--lora_alpha", "16", "64"))
    with pytest.raises(UserError, match="^--correction_cap 5.0: must be left out, or go"):
        grid(sweep("--correction_cap", "5", "--loss_type", "grpo_clip", "no_baseline"))
    arms = grid(sweep("--lora_rank", "0", "8", "--lora_alpha", "64"))
    assert {arm.lora_alpha for arm in arms.values()} == {64}
    for args in arms.values():
        assert parse(RLArgs, command_line(args)) == args
    file = tmp_path / "arms.toml"
    tables = "[arms.a]\nsampler_correction = 'token_mask'\n[arms.b]\n"
    file.write_text(f"correction_cap = 5.0\n{tables}")
    made = named_arms(sweep("--sweep_file", str(file)))
    assert [arm.correction_cap for arm in made.values()] == [5.0, 5.0]
    file.write_text("correction_cap = 5.0\n[arms.a]\n[arms.b]\nbeta = 0.1\n")
    with pytest.raises(UserError, match="^--correction_cap 5.0: must be left out, or go"):
        named_arms(sweep("--sweep_file", str(file)))
    file.write_text(f"{tables}correction_cap = 5.0\n")
    with pytest.raises(UserError, match="arms.toml: arm b: --correction_cap 5.0: must be left out"):
        named_arms(sweep("--sweep_file", str(file)))
    file.write_text(f"{tables}correction_cap = 5.0\nsampler_correction = 'none'\n")
    assert len(named_arms(sweep("--sweep_file", str(file)))) == 2


def test_refills_cost_samples():
    (warning,) = said({"a": arm(), "b": arm(max_refills=4)})["confounded"]
    assert "--max_refills also changes draws of a group, at most" in warning


def test_every_arm_survives_its_command_line():
    for args in grid(
        sweep("--loss_type", "no_baseline", "grpo_clip", "--normalize_by_std", "True", "False")
    ).values():
        placed = dataclasses.replace(
            args, run_name="x", resume=True, policy_devices=("cuda:0", "cuda:1")
        )
        assert parse(RLArgs, command_line(placed)) == placed


def test_controls():
    arms = with_controls({"a": arm()})
    assert {name: a.reward for name, a in arms.items()} == {
        "a": "auto",
        "control_random": "random",
        "control_format_only": "format_only",
        "control_inverted": "inverted",
        "control_majority_vote": "majority_vote",
        "control_no_training": "auto",
    }
    assert arms["control_no_training"] == dataclasses.replace(arms["a"], learning_rate=0.0)
    with pytest.raises(UserError, match="--controls adds an arm control_random, and the sweep has"):
        with_controls({"a": arm(), "control_random": arm()})
    assert all(
        args.learning_rate == arms["a"].learning_rate
        for name, args in arms.items()
        if name != "control_no_training"
    )


# --- files of arms --------------------------------------------------------------------------------


def test_named_arms(tmp_path):
    file = tmp_path / "dr.toml"
    file.write_text(
        "num_steps = 5\n[arms.grpo]\n[arms.dr_grpo]\nnormalize_by_std = false\nloss_normalization ="
        ' "constant"\n'
    )
    arms = named_arms(sweep("--sweep_file", str(file), "--group_size", "4"))
    assert arms == {
        "grpo": arm(num_steps=5, group_size=4),
        "dr_grpo": arm(
            num_steps=5, group_size=4, normalize_by_std=False, loss_normalization="constant"
        ),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"needs a table \[arms.NAME\]"),
        ("arms = 3", r"needs a table \[arms.NAME\]"),
        ("[arms.a", "Expected"),
        ("[arms.a]\nlos_type = 'grpo_clip'", "arm a: los_type is no argument of an arm"),
        ("[arms.a]\nseed = 3", "arm a: seed is no argument of an arm"),
        ("[arms.a]\nloss_type = 'ppo'", "arm a: loss_type = 'ppo': choose one of no_baseline"),
        ("[arms.a]\ngroup_size = '4'", "arm a: group_size = '4': must be a whole number"),
        ("[arms.a]\ngroup_size = true", "arm a: group_size = True: must be a whole number"),
        ("[arms.a]\nnormalize_by_std = 1", "arm a: normalize_by_std = 1: must be true or false"),
        ("[arms.a]\ngroup_size = 0", "--group_size"),
        ("[arms.'../up']", "arm '../up': use letters"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        named_arms(sweep("--sweep_file", str(tmp_path / "x.toml")))


def test_no_file_and_several_values_beside_a_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        named_arms(sweep("--sweep_file", str(tmp_path / "none.toml")))
    with pytest.raises(UserError, match="--group_size: with --sweep_file"):
        named_arms(sweep("--sweep_file", "x.toml", "--group_size", "2", "4"))


# --- the linter -----------------------------------------------------------------------------------


def said(arms, seeds=(0, 1)) -> dict[str, list[str]]:
    words = {"same": "mathematically the same", "confounded": "also changes", "seeds": "one seed"}
    found = {
        kind: [warning for warning in lint(arms, seeds) if said in warning]
        for kind, said in words.items()
    }
    assert sum(map(len, found.values())) == len(lint(arms, seeds))
    return {kind: warnings for kind, warnings in found.items() if warnings}


def test_clipping_without_a_second_update_is_reinforce():
    once = {"train_mini_batch_size": 0}
    arms = {
        "a": arm(loss_type="grpo_clip", **once),
        "b": arm(loss_type="reinforce_with_baseline", **once),
    }
    (same,) = said(arms)["same"]
    assert same.startswith("a, b: mathematically the same") and "ratio is 1" in same
    assert "same" not in said(
        {"a": arm(loss_type="grpo_clip"), "b": arm(loss_type="reinforce_with_baseline")}
    )


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (
            {"loss_type": "no_baseline"},
            {"loss_type": "no_baseline", "normalize_by_std": False},
            True,
        ),
        ({"loss_type": "grpo_clip"}, {"loss_type": "grpo_clip", "normalize_by_std": False}, False),
        (
            {"loss_type": "reinforce_with_baseline"},
            {"loss_type": "reinforce_with_baseline", "cliprange": 0.3},
            True,
        ),
        ({"normalize_by_std": False}, {"normalize_by_std": False, "advantage_eps": 0.1}, True),
        ({"advantage_eps": 1e-6}, {"advantage_eps": 0.1}, False),
        ({"train_mini_batch_size": 0}, {"train_mini_batch_size": 256}, True),
        ({"train_mini_batch_size": 0}, {"train_mini_batch_size": 255}, False),
        ({}, {"micro_batch_tokens": 99}, True),
        ({"loss_type": "grpo_clip"}, {"loss_type": "grpo_clip", "old_log_probs": "sampler"}, False),
        (
            {"loss_type": "no_baseline"},
            {"loss_type": "no_baseline", "old_log_probs": "sampler"},
            True,
        ),
        ({}, {"learning_rate": 1e-3}, False),
    ],
)
def test_what_plays_no_part(a, b, same):
    assert (canonical(arm(**a)) == canonical(arm(**b))) is same
    assert ("same" in said({"a": arm(**a), "b": arm(**b)})) is same


def test_group_size_is_confounded_either_way():
    (held,) = said(grid(sweep("--group_size", "4", "16")))["confounded"]
    assert held.endswith("--group_size also changes prompts a step")
    (free,) = said(grid(sweep("--group_size", "4", "16", "--hold", "prompts")))["confounded"]
    assert free.endswith(
        "--group_size also changes responses a step, responses in all, optimiser updates"
    )


def test_losses_alone_are_not_confounded():
    assert said({"a": arm(loss_type="grpo_clip"), "b": arm(loss_type="no_baseline")}) == {}


def test_other_ways_of_evaluating_are_warned_of():
    for field, values in (
        ("reward", ("r1_zero", "r1_zero_strict")),
        ("sampling_temperature", (0.5, 1.0)),
        ("prompt", ("tiny", "question")),
        ("system_prompt", ("Be brief.", "Think.")),
        ("few_shot", ("one.jsonl", "two.jsonl")),
    ):
        (warning,) = said({"a": arm(**{field: values[0]}), "b": arm(**{field: values[1]})})[
            "confounded"
        ]
        assert "how the evaluation samples or scores" in warning
    assert {name: task.rules[0] for name, task in TASKS.items()} == {
        name: arm(task=name).evaluation_rule for name in TASKS
    }
    assert "confounded" not in said(with_controls({"a": arm()}))  # controls are scored by r1_zero
    assert "confounded" in said(with_controls({"a": arm(reward="r1_zero_strict")}))


def test_arms_that_leave_out_other_questions_are_refused():
    with pytest.raises(UserError, match="--max_prompt_tokens 10 20: .* answer different questions"):
        make_design(sweep("--sft_base", "", "--max_prompt_tokens", "10", "20"))


@pytest.mark.parametrize("values", [("prompt", "question", "tiny"), ("dtype", "float32", "auto")])
def test_arms_that_would_be_taught_otherwise_share_no_warm_start_that_sft_makes(tmp_path, values):
    field, *given = values
    base = tmp_path / "sft"
    flags = ("--sft_base", str(base), "--seed", "0", "1", f"--{field}", *given)
    with pytest.raises(UserError, match=f"^--sft_base .*/sft: .* differ in --{field}, and SFT"):
        make_design(sweep(*flags))
    # what has no part in it
    others = ("--loss_type", "no_baseline", "grpo_clip", "--sampling_temperature", "0.6", "1")
    assert len(make_design(sweep(*flags[:5], *others, "--eval_temperature", "1")).arms) == 4
    assert make_design(sweep(*flags[:5], "--controls", "--prompt", "tiny")).warnings == ()
    same = (*flags[:5], "--prompt", "", "tiny")  # the task's own prompt
    assert len(make_design(sweep(*same)).arms) == 2
    # each its own, or none, or one that is there
    tables = []
    for value in given:
        tables.append(f"[arms.{value}]\n{field} = '{value}'\nsft_base = '{tmp_path / value}'\n")
    (tmp_path / "arms.toml").write_text("".join(tables))
    assert len(make_design(sweep("--sweep_file", str(tmp_path / "arms.toml"))).arms) == 2
    assert len(make_design(sweep(*flags[2:], "--sft_base", "")).arms) == 2
    base.mkdir()
    assert len(make_design(sweep(*flags)).arms) == 2


def test_more_steps_are_not_confounded_with_their_updates():
    assert said({"a": arm(num_steps=10), "b": arm(num_steps=20)}) == {}


def test_a_single_seed_is_warned_of():
    assert "one seed" in said({"a": arm()}, seeds=(0,))["seeds"][0]


@pytest.mark.parametrize(
    ("hold", "said"),
    [("rollouts", "--hold rollouts: --prompts_per_rollout is 32 16;"), ("prompts", "")],
)
def test_the_design_says_how_many_prompts_each_arm_has(hold, said, capsys):
    """8 prompts of the preset's 8 responses are 64 responses a step: 32 prompts of 2, 16 of 4."""
    args = sweep(
        "--prompts_per_rollout", "8", "--group_size", "2", "4", "--sft_base", "", "--hold", hold
    )
    print_design(make_design(args), args, Console(width=200))
    printed = capsys.readouterr().out
    assert said in printed if said else "--hold" not in printed


def test_a_sweep_goes_on_with_what_a_run_may_change_and_from_an_older_version():
    def facts(*flags):
        return make_design(sweep("--loss_type", "no_baseline", "grpo_clip", *flags)).facts()

    before = facts()
    older = {
        **before,
        "arms": {name: dict(args, reference_url="") for name, args in before["arms"].items()},
    }
    for args in older["arms"].values():
        del args["trackers"], args["preview"]
    assert (
        fixed_facts(older)
        == fixed_facts(before)
        == fixed_facts(facts("--trackers", "--reward_timeout", "5"))
    )
    assert fixed_facts(before) != fixed_facts(facts("--num_steps", "3"))
    assert fixed_facts(before) == fixed_facts(
        {name: value for name, value in before.items() if name != "match"}
    )
    assert fixed_facts(before) != fixed_facts(facts("--match", "tokens"))
    assert fixed_facts({}) != fixed_facts(before)


TWO_LOSSES = (
    "--loss_type",
    "no_baseline",
    "grpo_clip",
    "--sft_base",
    "",
    "--num_steps",
    "40",
    "--seed",
    "0",
    "1",
)


@pytest.mark.parametrize(("every", "most"), [("40", 5), ("20", 5)])
def test_too_few_evaluations_for_equal_amounts_are_refused_before_training(every, most):
    """40 steps: an arm that is compared between evaluations needs four, one of whose intervals has
    two neighbours."""
    flags = (*TWO_LOSSES, "--eval_interval", every)
    times = 1 + 40 // int(every)
    reason = f"--eval_interval {every}: no_baseline is evaluated {times} times"
    with pytest.raises(UserError, match=f"{reason} .*give --eval_interval {most}"):
        make_design(sweep(*flags, "--match", "tokens"))
    # equal steps of equal responses: all last evaluations come at equal amounts
    for match in (
        "steps",
        "samples",
    ):
        assert make_design(sweep(*flags, "--match", match)).warnings == ()
    with pytest.raises(UserError, match="--match samples"):
        make_design(
            sweep(
                *flags, "--match", "samples", "--loss_type", "grpo_clip", "--max_refills", "0", "2"
            )
        )


def test_evaluations_far_apart_are_warned_of_where_arms_are_compared_between_them():
    flags = (*TWO_LOSSES, "--match", "seconds")
    (warning,) = make_design(sweep(*flags, "--eval_interval", "10")).warnings
    assert (
        warning.startswith("no_baseline, grpo_clip: --match seconds")
        and "--eval_interval 5 or less" in warning
    )
    assert make_design(sweep(*flags, "--eval_interval", "5")).warnings == ()
    with pytest.raises(UserError, match="--strict: .*--eval_interval 5"):
        make_design(sweep(*flags, "--eval_interval", "10", "--strict"))
