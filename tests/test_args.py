"""Presets and flags."""

import dataclasses
import json
import math
import re
import sys
import tomllib
from pathlib import PurePosixPath
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import (
    PRESETS,
    AskArgs,
    ClaimsArgs,
    EvaluateArgs,
    GradientsArgs,
    PipelineArgs,
    PlanArgs,
    RejectionArgs,
    RLArgs,
    SFTArgs,
    SweepArgs,
    VerifyArgs,
    as_command,
    as_toml,
    command_line,
    flags_of,
    from_preset,
    parse,
    preset_names,
    swept_values,
)
from alignment.builders.checks import default_run_name
from alignment.builders.evaluations import eval_sampling
from alignment.builders.held_out import held_out_arguments
from alignment.config import presets
from alignment.config.command_line import GROUPS, args_of_run
from alignment.config.flag import Flag, flags_of_class, hints_of_flags
from alignment.config.words import OTHER_NAMES
from alignment.core.advantages import ADVANTAGES
from alignment.core.losses import LOSSES
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import POLICIES
from alignment.rollouts.source import open_source
from alignment.sampling.sampler import SAMPLERS
from alignment.system.errors import UserError
from alignment.system.registry import OTHER_VALUES

REFERENCE = "qwen2.5_math_1.5b_gsm8k_8gpu"


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("cls", [EvaluateArgs, SFTArgs, RLArgs, PlanArgs])
def test_every_preset_fits_every_command(name, cls):
    assert from_preset(cls, name).preset == name


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_what_it_takes_and_gives(name):
    text = (PRESETS / f"{name}.toml").read_text()
    assert "uv run " in text.partition("\ntask = ")[0]
    assert list(tomllib.loads(text)["about"]) == ["hardware", "time", "score"]


def test_the_reference_recipe():
    args = from_preset(RLArgs, REFERENCE)
    assert (args.group_size, args.cliprange, args.sampling_temperature, args.sampling_top_p) == (
        4,
        0.2,
        1.0,
        0.9,
    )
    assert (args.train_mini_batch_size, args.sft_base, args.model) == (
        8,
        "checkpoints/math_sft",
        "Qwen/Qwen2.5-Math-1.5B",
    )
    assert args.updates_per_rollout == args.prompts_per_rollout * 4 // 8


def test_flags_override_the_preset_wherever_it_stands():
    for argv in (
        ["--preset", REFERENCE, "--group_size", "2"],
        ["--group_size", "2", f"--preset={REFERENCE}"],
    ):
        args = parse(RLArgs, argv)
        assert (args.group_size, args.cliprange, args.preset) == (2, 0.2, REFERENCE)


def test_another_commands_arguments_share_the_common_ones():
    rl = from_preset(RLArgs, "tiny", seed=5, sft_base="elsewhere")
    args = as_command(SFTArgs, rl)
    assert (args.seed, args.sft_base, args.curriculum) == (5, "elsewhere", True)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.integers(0, 400))
def test_updates_per_rollout_count_a_remainder(prompts, group, epochs, mini):
    size = prompts * group
    sizes = {
        "prompts_per_rollout": prompts,
        "group_size": group,
        "epochs_per_rollout": epochs,
        "train_mini_batch_size": mini,
    }
    args = RLArgs(loss_type="no_baseline", **sizes)
    cuts = range(0, size, mini) if mini else [0]
    assert args.updates_per_rollout == epochs * len(cuts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_numbers_that_cannot_work_are_refused(value):
    # at 0 a control trains nothing
    for name in (
        "max_sampler_mismatch",
        *["learning_rate", "max_grad_norm"] * (value != 0),
    ):
        with pytest.raises(UserError, match=f"--{name}"):
            RLArgs(**{name: value})
    assert RLArgs(learning_rate=0).learning_rate == 0


@pytest.mark.parametrize(
    ("words", "stop"),
    [
        ([], ("</answer>",)),
        (["--stop", "none"], ()),
        (["--stop", "</answer>", "\n\n"], ("</answer>", "\n\n")),
    ],
)
def test_one_flag_says_what_ends_a_response(tmp_path, words, stop):
    """In training, in evaluations, on other tasks, and in a resumed run."""
    args = parse(RLArgs, [*words, "--eval_tasks", "countdown_small"])
    (tmp_path / "args.json").write_text(json.dumps({"args": args.recorded_values}))
    for run in (args, args_of_run(RLArgs, tmp_path)):
        of_tasks = held_out_arguments(run).values()
        assert [eval_sampling(of_task).stop for of_task in of_tasks] == [stop, stop]
        assert open_source(run.rollout_config, None).task.stop == stop
    assert eval_sampling(parse(EvaluateArgs, words)).stop == stop


@pytest.mark.parametrize("stop", [("",), ("none", "</answer>")])
def test_what_can_end_no_response_is_refused(stop):
    with pytest.raises(UserError, match="^--stop .*: must be strings of a character or more, or"):
        RLArgs(stop=stop)


ALONE = [
    ("lora_alpha", 64, "lora_rank"),
    ("lora_targets", "q_proj,v_proj", "lora_rank"),
    ("correction_cap", 5.0, "sampler_correction"),
    ("correction_floor", 0.5, "sampler_correction"),
    ("teacher_weight", 0.5, "teacher"),
    ("entropy_delta", 0.01, "entropy_target"),
    ("kl_estimator", "k1", "beta"),
    ("selected_share", 0.3, "token_selection"),
    ("covariance_low", 0.5, "token_selection"),
    ("covariance_high", 6.0, "token_selection"),
]
"""Flag, a value, and the flag without which it plays no part."""


@pytest.mark.parametrize(("name", "value", "other"), ALONE)
def test_a_flag_that_plays_no_part_is_refused(name, value, other, tmp_path):
    """A user who names adapters' layers does not mean to train all weights. But a preset may state
    the value for other commands, and who gives both flags knows."""
    for refused in (
        lambda: parse(RLArgs, [f"--{name}", str(value)]),
        lambda: parse(PlanArgs, [f"--{name}={value}"]),
        lambda: RLArgs(**{name: value}),
    ):
        with pytest.raises(UserError) as refusal:
            refused()
        words = f"--{name} {value}: must be left out, or go with --{other}"
        assert str(refusal.value) == words
    default = flags_of({other: getattr(RLArgs, other)})
    both = parse(RLArgs, [f"--{name}", str(value), *default])
    assert parse(RLArgs, command_line(both)) == both
    assert both == RLArgs(**{name: value, other: getattr(RLArgs, other)})
    assert getattr(parse(RLArgs, flags_of({name: getattr(RLArgs, name)})), name) != value
    file = tmp_path / "mine.toml"
    file.write_text(f"[train_rl]\n{name} = {json.dumps(value)}\n")
    of_preset = parse(RLArgs, ["--preset", str(file)])
    assert getattr(of_preset, name) == value
    assert parse(RLArgs, command_line(of_preset)) == of_preset


def test_a_run_that_began_with_a_flag_that_plays_no_part_resumes(tmp_path):
    run = from_preset(RLArgs, "tiny", lora_alpha=64, run_name=tmp_path.name)
    (tmp_path / "args.json").write_text(json.dumps({"args": run.recorded_values}))
    assert parse(RLArgs, ["--resume", str(tmp_path)]).lora_alpha == 64


def test_what_needs_adapters_is_refused_in_sft_and_let_be_where_nothing_trains():
    with pytest.raises(UserError, match="^--lora_alpha 64: must be left out, or go with --lora_r"):
        parse(SFTArgs, ["--lora_alpha", "64"])
    assert parse(EvaluateArgs, ["--lora_alpha", "64"]).lora_alpha == 64


TRUNCATED = {"log_probs_of": "full", "sampling_top_p": 0.9}


@pytest.mark.parametrize(
    ("settings", "user"),
    [
        ({"rollouts": "async"}, "the ratio of --loss_type grpo_clip"),
        ({"sampler_correction": "token_mask"}, "--sampler_correction token_mask"),
        ({"teacher": "tiny", "train_mini_batch_size": 0}, "--teacher"),
    ],
)
def test_log_probs_of_the_full_softmax_do_not_meet_the_samplers(settings, user):
    with pytest.raises(UserError, match=f"^--log_probs_of full: must be sampled, .*: {user} takes"):
        RLArgs(loss_type="grpo_clip", **TRUNCATED, **settings)
    assert RLArgs(loss_type="grpo_clip", log_probs_of="full", **settings)
    assert RLArgs(loss_type="grpo_clip", epochs_per_rollout=2, **TRUNCATED)


MY_PRESET = """
task = "countdown_small"

[train_rl]
group_size = 3
"loss.positive" = 1.5
loss_type = "sapo"
"""


def test_a_preset_may_be_a_file_of_ones_own(tmp_path, monkeypatch):
    """By a path, which is kept whole: other processes may run elsewhere."""
    file = tmp_path / "mine.toml"
    file.write_text(MY_PRESET)
    monkeypatch.chdir(tmp_path)
    args = parse(RLArgs, ["--preset", "mine.toml", "--num_steps", "4"])
    assert (args.task, args.group_size, args.num_steps) == ("countdown_small", 3, 4)
    assert args.preset == str(file) and default_run_name(args) == "mine_sapo_seed0"
    monkeypatch.chdir("/")
    assert parse(RLArgs, command_line(args)) == args
    assert args == RLArgs(preset=str(file), num_steps=4)
    # as those that ship, a command reads its own table alone
    assert parse(SFTArgs, ["--preset", str(file)]).task == "countdown_small"


def test_a_presets_own_settings_count_before_other_flags_are_checked(tmp_path):
    """Groups of 3 are enough for the preset's k of 2, and not for the estimator's default of 4."""
    file = tmp_path / "pairs.toml"
    file.write_text('[train_rl]\nadvantage = "pass_at_k"\ngroup_size = 3\n"advantage.k" = 2\n')
    args = parse(RLArgs, ["--preset", str(file), "--num_steps", "4"])
    assert args.update_config.advantage.smallest_group == args.group_size == 3
    assert parse(RLArgs, ["--preset", str(file), "--advantage", "opo"]).own_settings == ()
    with pytest.raises(UserError, match="at least 4, as --advantage pass_at_k needs"):
        parse(RLArgs, ["--preset", str(file), "--advantage.k", "3"])
    # Nor need a preset be valid by itself.
    file.write_text('[train_rl]\nadvantage = "pass_at_k"\ngroup_size = 4\n')
    args = parse(RLArgs, ["--preset", str(file), "--advantage.k", "2"])
    assert parse(RLArgs, command_line(args)) == args


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lr = 1", "--lr: there is no such flag; write --learning_rate"),
        ("[train_rl]\ngroup_sise = 4", "--group_sise: there is no such .*--group_size"),
        ("[train]\ngroup_size = 4", r"\[train\] is no command's table .*train_rl"),
        ("task = ", "must be a TOML file"),
    ],
)
def test_a_preset_of_ones_own_is_checked(tmp_path, text, error):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"^--preset {file}: ?.*{error}"):
        parse(RLArgs, ["--preset", str(file)])
    with pytest.raises(UserError, match="there is no such file"):
        parse(RLArgs, ["--preset", str(tmp_path / "no.toml")])


def test_arguments_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        from_preset(RLArgs, "tiny").group_size = 3


@pytest.mark.parametrize(
    "values", [{"prompts": 1}, {"group_size": (1, 4)}, {"group_size": (3, 8)}, {"group_size": ()}]
)
def test_gradients_need_several_prompts_and_groups_that_divide(values):
    with pytest.raises(UserError, match="--"):
        GradientsArgs(**values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--group-sise", "3"], "--group-sise: there is no such flag (did you mean --group_size?)"),
        (["--zzz=3"], "--zzz: there is no such flag; --help lists all"),
        (["--no_group_size"], "--no_group_size: there is no such flag"),
        (
            ["--optimizer", "adamw_8it"],
            (
                "--optimizer adamw_8it: choose one of adamw, adamw_cpu_offload, adamw_8bit, muon"
                " (did you mean"
            ),
        ),
        (
            ["--preset", "tinny"],
            "--preset tinny: there is no such preset (did you mean tiny?); choose one of ",
        ),
        (["--lr", "1"], "--lr: there is no such flag; write --learning_rate"),
        (["--use-peft"], "--use-peft: there is no such flag; write --lora_rank 16"),
        (["--num_steps", "many"], "--num_steps many: must be a whole number"),
        (
            ["--seed", "1", "--cliprange_high=much", "--cliprange", "0.1"],
            "--cliprange_high much: must be a number",
        ),
        (["--num_steps"], "--num_steps (no value): must be a whole number"),
        (["--dtype", "int3"], "--dtype int3: choose one of auto, float32, bfloat16"),
        (["--seed", "1", "2"], "2: there is no such flag"),
        (
            ["+algorithm.adv_estimator=grpo"],
            "+algorithm.adv_estimator: there is no such flag; write --loss_type",
        ),
    ],
)
def test_a_misspelt_word_is_told_with_what_was_meant(flags, message):
    with pytest.raises(UserError) as error:
        parse(RLArgs, flags)
    assert (
        str(error.value).startswith(message)
        or message.startswith("(")
        and str(error.value).endswith(message)
    )


def test_choices_of_several_values_and_of_optional_ones_are_checked_too():
    with pytest.raises(UserError, match="--std_of grop: choose one of .*did you mean group"):
        parse(SweepArgs, ["--std_of", "batch", "grop", "--seed", "0"])
    with pytest.raises(UserError, match="--optimizer adam: .*did you mean adamw"):
        parse(PlanArgs, ["--optimizer", "adam"])
    assert parse(SweepArgs, ["--std_of", "batch", "group"]).std_of == ("batch", "group")


@pytest.mark.parametrize(
    ("facts", "words", "admitted", "refused"),
    [
        ({"above": 0}, "a number above 0", [1e-9, 5.0], [0.0, -1.0, math.inf, math.nan]),
        ({"at_least": 1}, "at least 1", [1.0, 7.0], [0.5, 0.0]),
        ({"at_least": 0}, "0 or more", [0.0, 3.0], [-1e-9, math.inf]),
        ({"at_least": 0, "zero": "all"}, "0 (all) or more", [0.0, 3.0], [-1.0]),
        ({"at_least": 0, "at_most": 1}, "from 0 to 1", [0.0, 1.0], [-0.1, 1.1]),
        ({"above": 0, "at_most": 1}, "above 0 and at most 1", [0.1, 1.0], [0.0, 1.1]),
        ({"above": 0, "below": 1}, "between 0 and 1", [0.5], [0.0, 1.0]),
        ({"at_least": 0, "below": 1}, "0 or below 1", [0.0, 0.9], [1.0]),
        ({"at_least": 2, "because": "so"}, "at least 2, so", [2.0], [1.0]),
    ],
)
def test_a_bound_admits_what_its_words_say(facts, words, admitted, refused):
    declared = Flag(**facts)
    assert declared.bound_in_words(float) == words
    assert all(declared.admits(number) for number in admitted)
    assert not any(declared.admits(number) for number in refused)


def test_a_bound_of_whole_numbers_says_so():
    assert Flag(above=0).bound_in_words(int) == "a whole number above 0"
    with pytest.raises(UserError, match="^--group_size 0: must be a whole number above 0$"):
        RLArgs(group_size=0)


def test_rejection_sampling_asks_at_least_one_problem():
    """0 is no word for all: the task's problems may be endless."""
    assert RejectionArgs(num_problems=1).num_problems == 1
    with pytest.raises(UserError, match="^--num_problems 0: must be at least 1$"):
        RejectionArgs(num_problems=0)


@pytest.mark.parametrize("dual_clip", [0.5, 1.0, -1.0, math.inf, math.nan])
def test_a_number_beside_its_bound_s_exception_is_refused(dual_clip):
    assert RLArgs(dual_clip=0).dual_clip == 0 and RLArgs(dual_clip=1.5).dual_clip == 1.5
    with pytest.raises(UserError, match=f"^--dual_clip {dual_clip}: must be 0 .none. or above 1$"):
        RLArgs(dual_clip=dual_clip)


def test_what_other_libraries_flags_are_told_to_be_exists():
    fields = {f.name for f in dataclasses.fields(RLArgs)}
    other = tomllib.loads(OTHER_NAMES.read_text())
    assert not fields & {name for names in other.values() for name in names}
    for remedy in other:
        assert {word.removeprefix("no_") for word in re.findall(r"--(\w+)", remedy)} <= fields, (
            remedy
        )


def test_what_other_libraries_values_are_told_to_be_exists():
    known = {
        "loss_type": set(LOSSES),
        "advantage": set(ADVANTAGES),
        "optimizer": set(OPTIMIZERS),
        "policy_parallelism": set(POLICIES),
        "sampler": set(SAMPLERS),
    }
    for flag in ("dtype", "kl_estimator", "lr_schedule"):
        choices = flags_of_class(RLArgs)[flag].choices
        known[flag] = set(choices or get_args(hints_of_flags(RLArgs)[flag]))
    fields = {f.name for f in dataclasses.fields(RLArgs)}
    other = tomllib.loads(OTHER_VALUES.read_text())
    assert set(other) <= set(known)
    for flag, remedies in other.items():
        assert not known[flag] & set(remedies)
        for remedy in remedies.values():
            named = re.match(r"write (\w+)", remedy)
            assert named is None or named[1] in known[flag], remedy
            flags = {word.removeprefix("no_") for word in re.findall(r"--(\w+)", remedy)}
            assert flags <= fields, remedy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--delta", "3"], "--delta: there is no such flag; write --dual_clip"),
        (["--load_in_4bit"], "there is none, because the sampler would draw"),
        (["--config", "config.yaml"], "--config: there is no such flag; write --preset and the"),
        (["--num_pre_Q", "8"], "--num_pre_Q: there is no such flag; write --group_size"),
        (["--clip_param", "0.2"], "--clip_param: there is no such flag; write --cliprange"),
        (["--gen_update_steps", "16"], "there is no such flag; write --sync_every, in rollouts"),
        (["--num_questions_per_batch", "32"], "such flag; write --prompts_per_rollout"),
        (["--adv_estimator", "grpo"], "there is no such flag; write --loss_type, --baseline and"),
        (["--save_total_limit", "2"], "there is no such flag; write --keep_checkpoints"),
        (["--packing"], "there is none, because packed rows hold no padding"),
        (["--vllm_made_up"], "^--vllm_made_up: there is no such flag; --help lists all$"),
        (["--preset"], "^--preset .no value.: must be given a value$"),
        (["--loss_type", "GRPO"], r"\(GRPO of other libraries: write grpo_clip"),
        (["--dtype", "fp16"], r"\(fp16 of other libraries: there is none, because it needs"),
        (["--kl_estimator", "low_var_kl"], r"\(low_var_kl of other libraries: write k3\)"),
        (["--loss_type", "grpo"], r"\(grpo of other libraries: write grpo_clip"),
        (["--advantage", "gae"], r"\(gae of other libraries: there is none, because"),
        (["--optimizer", "adamw_torch"], r"\(adamw_torch of other libraries: write adamw\)"),
        (
            ["--normalize_by_std", "False"],
            "^--normalize_by_std False: takes no value; write --normalize_by_std or --no_norm",
        ),
        (["--normalize_by_std", "true"], "--normalize_by_std true: takes no value"),
        (["--normalize_by_std", "x"], "^x: there is no such flag"),
    ],
)
def test_words_of_other_libraries_are_answered(words, message):
    with pytest.raises(UserError, match=message):
        parse(RLArgs, words)


@pytest.mark.parametrize("command", [RLArgs, SweepArgs, EvaluateArgs])
def test_the_version_is_printed(command, capsys):
    with pytest.raises(SystemExit) as end:
        parse(command, ["--seed", "0", "--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"alignment \d+\.\d+\.\d+\S*( \(\S+\))?\n", capsys.readouterr().out)


def test_a_folder_after_resume_stands_for_the_flags_of_its_run(tmp_path, monkeypatch):
    run = from_preset(
        RLArgs,
        "tiny",
        cliprange=0.3,
        sample_device=("cpu", "cpu"),
        normalize_by_std=False,
        output_dir="elsewhere",
    )
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "args.json").write_text(
        json.dumps({"args": {**dataclasses.asdict(run), "of_an_older_version": 1}})
    )
    resumed = dataclasses.replace(run, output_dir=str(tmp_path), run_name="run", resume=True)
    assert parse(RLArgs, ["--resume", str(folder)]) == resumed
    words = ["--eval_interval", "3", "--resume", f"{folder}/", "--cliprange", "0.1"]
    monkeypatch.setattr("sys.argv", ["train_rl.py", *words])
    changed = dataclasses.replace(resumed, eval_interval=3, cliprange=0.1)
    assert parse(RLArgs) == changed
    # what args.json records
    assert parse(RLArgs, sys.argv[1:]) == changed and not {str(folder), f"{folder}/"} & set(
        sys.argv
    )
    assert parse(RLArgs, ["--resume", "--cliprange", "0.1"]) == from_preset(
        RLArgs, "tiny", resume=True, cliprange=0.1
    )


@pytest.mark.parametrize("cls", [RLArgs, PlanArgs, VerifyArgs])
@pytest.mark.parametrize("is_one_word", [False, True])
@pytest.mark.parametrize("remains", [None, "task = ", '[train_rl]\n"loss.positve" = 1\n'])
def test_a_run_resumes_without_the_file_of_its_preset(
    cls, is_one_word, remains, tmp_path, monkeypatch
):
    """args.json has every value; the file may be gone, or another one by now."""
    file = tmp_path / "mine.toml"
    file.write_text(MY_PRESET)
    run = parse(RLArgs, ["--preset", str(file), "--num_steps", "4", "--loss.negative", "2"])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"args": run.recorded_values}))
    file.unlink()
    if remains is not None:
        file.write_text(remains)
    words = [f"--resume={folder}"] if is_one_word else ["--resume", str(folder)]
    monkeypatch.setattr("sys.argv", ["train_rl.py", *words, "--eval_interval", "3"])
    resumed = parse(cls)
    changes = {"resume": True, "output_dir": str(tmp_path), "run_name": "run", "eval_interval": 3}
    expected = run.recorded_values | changes
    assert {name: resumed.recorded_values[name] for name in expected} == expected
    # What is recorded of the command gives them too, on top of a preset that is there.
    again = parse(cls, sys.argv[1:])
    assert dataclasses.replace(again, preset=str(file)) == resumed
    with pytest.raises(UserError, match="there is no such preset"):
        parse(cls, [*words, "--preset", "tinny"])
    assert parse(cls, [*words, "--preset", "tiny"]).preset == "tiny"


@given(st.sampled_from(preset_names()), st.booleans())
def test_the_flags_of_a_run_give_its_arguments_back(name, without_devices):
    """What a preset states may be taken back, an empty list among it."""
    args = from_preset(
        RLArgs,
        name,
        resume=True,
        reward="accuracy",
        **({"sample_device": ()} if without_devices else {}),
    )
    assert parse(RLArgs, command_line(args)) == args


def test_the_usage_line_is_a_command_not_a_file(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/somewhere/alignment/train_rl.py", "--help"])
    with pytest.raises(SystemExit):
        parse(RLArgs)
    assert capsys.readouterr().out.startswith("usage: python -m alignment.train_rl [-h]")


def test_several_values_and_a_missing_flag_are_told_of_in_a_line():
    with pytest.raises(UserError, match=r"^--cliprange 0\.1 much: must be a number$"):
        parse(SweepArgs, ["--cliprange", "0.1", "much", "--seed", "0"])
    with pytest.raises(UserError, match="^--file: must be given"):
        parse(PipelineArgs, [])


@pytest.mark.parametrize(("cls", "flag"), [(SweepArgs, "--sweep_name"), (PipelineArgs, "--name")])
def test_run_name_has_its_older_names(cls, flag):
    needed = ["--file", "x"] if cls is PipelineArgs else []
    assert (
        parse(cls, [*needed, flag, "mine"]).run_name
        == parse(cls, [*needed, "--run_name", "mine"]).run_name
        == "mine"
    )


WITH_TABLES = {
    "train_rl": RLArgs,
    "verify": VerifyArgs,
    "sft": SFTArgs,
    "evaluate": EvaluateArgs,
    "plan": PlanArgs,
}
WITH_TABLES["rejection_sample"] = RejectionArgs
WITH_TABLES["ask"] = AskArgs


def help_of(cls, monkeypatch, capsys, columns="100") -> str:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as stop:
        parse(cls, ["--seed", "1", "--help"])
    assert not stop.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("command", WITH_TABLES)
def test_help_has_each_flag_of_a_command_once_in_its_group(command, monkeypatch, capsys):
    cls = WITH_TABLES[command]
    unused = getattr(cls, "UNUSED_FLAGS", ())
    printed = help_of(cls, monkeypatch, capsys)
    fields = set(flags_of_class(cls))
    shown = re.findall(r"^  --(\w+)", printed, re.MULTILINE)
    assert sorted(shown) == sorted(fields - set(unused)) and set(unused) <= fields
    assert shown[:10] == list(cls.FIRST_FLAGS)
    assert max(map(len, printed.splitlines())) <= 100
    groups = re.findall(r"^(\w[\w ]*):$", printed, re.MULTILINE)
    assert groups == [
        "what matters first",
        *(name for name in GROUPS if name in groups),
    ], "a flag has no group"
    assert {"model", "data", "rollouts", "devices", "run"} <= set(groups)


@pytest.mark.parametrize("command", WITH_TABLES)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_ten_flags_are_what_is_seen_first(command, is_terminal, monkeypatch, capsys, tmp_path):
    """On a terminal of 24 lines the end of the help would be on the screen: a pager shows its
    beginning. Elsewhere, as in a pipe, there is none."""
    cls = WITH_TABLES[command]
    pages = tmp_path / "pages"
    monkeypatch.setenv("PAGER", f"tee {pages}")
    monkeypatch.setenv("LINES", "24")
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    printed = help_of(cls, monkeypatch, capsys)
    assert pages.exists() == is_terminal
    if is_terminal:
        printed = pages.read_text()
    first, _, rest = printed.partition("\nmodel:\n")
    assert re.findall(r"^  --(\w+)", first, re.MULTILINE) == list(cls.FIRST_FLAGS)
    assert first.startswith("usage: ")
    assert len(cls.FIRST_FLAGS) == 10 and rest


def test_help_of_few_flags_has_no_groups_and_fits_a_narrow_terminal(monkeypatch, capsys):
    printed = help_of(GradientsArgs, monkeypatch, capsys, columns="60")
    assert max(map(len, printed.splitlines())) <= 60
    shown = re.findall(r"^  --(\w+)", printed.partition("\nflags:\n")[2], re.MULTILINE)
    assert set(shown) == set(flags_of_class(GradientsArgs))


@pytest.mark.parametrize("command", [SweepArgs, ClaimsArgs])
def test_a_sweep_takes_every_argument_that_arms_may_differ_in(command):
    """Each takes several values, of the type that train_rl's flag has."""
    swept = {name: facts for name, facts in flags_of_class(RLArgs).items() if facts.swept}
    hints = hints_of_flags(command)
    assert {name: hints[name] for name in swept} == {
        name: tuple[hint, ...] for name, hint in hints_of_flags(RLArgs).items() if name in swept
    }
    args = parse(command, ["--group_size", "2", "4", "--std_of", "batch", "--seed", "7", "8"])
    assert swept_values(args) == {"group_size": (2, 4), "std_of": ("batch",)}
    assert args.seed == (7, 8)


def test_the_help_of_a_sweep_begins_with_its_own_flags(monkeypatch, capsys):
    printed = help_of(SweepArgs, monkeypatch, capsys)
    assert max(map(len, printed.splitlines())) <= 100
    own = printed.partition("\nsweep:\n")[2].partition("\nmodel:\n")[0]
    assert (
        "  --until_decided" in own
        and "  --group_size" not in own
        and "  --group_size [INT [INT ...]]\n" in printed
    )
    assert "\nflags:\n" not in printed, "a flag has no group"


@pytest.mark.parametrize("command", WITH_TABLES)
def test_printed_arguments_are_a_preset(command, tmp_path, monkeypatch, capsys):
    """Strings with quotes and backslashes, lists, numbers and truth values come back."""
    cls, words = (
        WITH_TABLES[command],
        ["--seed", "7", "--sample_device", "cpu", "cpu", "--prompt", 'a "b" \\c é\n'],
    )
    given = parse(cls, words)
    with pytest.raises(SystemExit) as stop:
        parse(cls, [*words[:1], "7", "--print_config", *words[2:]])
    printed = capsys.readouterr().out
    assert not stop.value.code and printed == as_toml(given) + "\n"
    (tmp_path / "mine.toml").write_text(printed)
    monkeypatch.setattr(presets, "PRESETS", tmp_path)
    assert dataclasses.replace(from_preset(cls, "mine"), preset=given.preset) == given


@pytest.mark.parametrize("words", [["--trackers"], ["--stop", "none", "--sample_device"]])
def test_an_empty_list_is_printed_where_the_default_is_another(words, tmp_path):
    given = parse(RLArgs, words)
    file = tmp_path / "mine.toml"
    file.write_text(as_toml(given))
    assert dataclasses.replace(parse(RLArgs, ["--preset", str(file)]), preset="tiny") == given
    assert parse(RLArgs, ["--trackers"]).trackers == ()


def test_other_commands_with_presets_print_their_arguments_too(capsys):
    for cls, words in (
        (SweepArgs, ["--loss_type", "gspo", "cispo"]),
        (GradientsArgs, ["--prompts", "4"]),
    ):
        with pytest.raises(SystemExit):
            parse(cls, [*words, "--print_config"])
        printed = tomllib.loads(capsys.readouterr().out)
        assert (
            printed.get("loss_type", ["gspo", "cispo"]) == ["gspo", "cispo"]
            and printed.get("prompts", 4) == 4
        )
    with pytest.raises(UserError, match="--print_config: there is no such flag"):
        parse(PipelineArgs, ["--file", "x", "--print_config"])


@pytest.mark.parametrize("cls", [EvaluateArgs, SFTArgs, RLArgs, VerifyArgs])
def test_arguments_made_in_python_are_those_of_the_command_line(cls):
    assert cls() == parse(cls, [])
    name = "countdown_tiny"
    assert cls(preset=name, seed=3) == parse(cls, ["--preset", name, "--seed", "3"])
    assert cls(preset=name, seed=3) == from_preset(cls, name, seed=3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"group_sise": 4}, "--group_sise: there is no such flag (did you mean --group_size?)"),
        ({"num_generations": 4}, "--num_generations: there is no such flag; write --group_size"),
        ({"no_normalize_by_std": True}, "write normalize_by_std=False"),
        ({"preset": "tny"}, "(did you mean tiny?)"),
        ({"num_steps": "5"}, "--num_steps '5': must be a whole number"),
        ({"num_steps": True}, "--num_steps True: must be a whole number"),
        ({"num_steps": None}, "--num_steps None: must be a whole number"),
        ({"max_staleness": 0.5}, "--max_staleness 0.5: must be a whole number"),
        ({"learning_rate": "1e-3"}, "--learning_rate '1e-3': must be a number"),
        ({"auto_sft": 1}, "--auto_sft 1: must be true or false"),
        ({"trackers": ["wandb"]}, "--trackers ['wandb']: must be a tuple, such as ('wandb',)"),
        ({"trackers": (1,)}, "--trackers 1: must be a text"),
        ({"rollouts": "asink"}, "choose one of sync, async (did you mean async?)"),
        ({"output_dir": PurePosixPath("a/b")}, "must be a text, such as 'a/b'"),
        ({"num_steps": 0}, "--num_steps 0: must be a whole number above 0"),
    ],
    ids=str,
)
def test_what_python_code_gives_wrongly_is_refused_as_on_the_command_line(given, words):
    with pytest.raises(UserError) as refused:
        RLArgs(**given)
    assert words in str(refused.value)


def test_an_int_is_a_number_and_arguments_have_names():
    assert RLArgs(learning_rate=1).learning_rate == 1
    with pytest.raises(UserError, match="by name"):
        RLArgs("tiny")


def test_a_replaced_argument_leaves_the_others_as_they_are():
    """Even those that differ from the preset."""
    args = RLArgs(num_steps=3)
    assert dataclasses.replace(args, seed=1) == RLArgs(num_steps=3, seed=1)


def test_a_run_resumes_with_its_own_arguments_whatever_the_preset_says_today(tmp_path):
    """What args.json lacks, of an older version, had the field's default then."""
    folder = tmp_path / "run"
    folder.mkdir()
    began = RLArgs(num_steps=3, trackers=())
    recorded = {name: value for name, value in vars(began).items() if name != "eval_interval"}
    (folder / "args.json").write_text(json.dumps({"args": recorded}))
    resumed = args_of_run(RLArgs, folder, num_steps=5)
    assert resumed == dataclasses.replace(
        began,
        num_steps=5,
        resume=True,
        output_dir=str(tmp_path),
        run_name="run",
        eval_interval=RLArgs.eval_interval,
    )
    assert RLArgs().eval_interval != RLArgs.eval_interval, "the preset tells them apart"
    with pytest.raises(UserError, match="must be a run's folder"):
        args_of_run(RLArgs, tmp_path)
