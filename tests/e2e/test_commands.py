"""Whole commands on the embedded default, shrunk: what they write, that they repeat, and what they
refuse."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment import evaluate, gradients, rejection_sample, sft, train_rl
from alignment.builders.verified_runs import TIMINGS
from alignment.core.losses import LOSSES
from alignment.data.tasks import arithmetic
from alignment.rewards.rules import RULES
from alignment.runs.run_folder import claim_run_folder
from alignment.system.files import read_jsonl
from alignment.system.terminal import printable
from tests.command_line import exit_code
from tests.files import digest

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick_ends(undrawn_curve):
    """A run's end takes no longer than its steps."""


MAIN = {
    "evaluate": evaluate.main,
    "gradients": gradients.main,
    "rejection_sample": rejection_sample.main,
    "sft": sft.main,
    "train_rl": train_rl.main,
}
SMALL = [
    "--prompts_per_rollout",
    "4",
    "--group_size",
    "4",
    "--train_mini_batch_size",
    "8",
    "--max_problems",
    "16",
    "--num_problems",
    "64",  # of 23,677, all of which every start would encode
]


def run(monkeypatch, command: str, *flags: str) -> int:
    """Run a command in this process; returns its exit code."""
    return exit_code(monkeypatch, MAIN[command], f"alignment.{command}", *flags)


@pytest.fixture(scope="module")
def warm(warm_start):
    """The shared warm start."""
    return warm_start


@pytest.fixture
def made_up_reward(monkeypatch):
    """Rewards that a barely trained model earns now and then, so that a few steps have something to
    learn from."""

    def reward_fn(text: str, truth: str) -> dict[str, float]:
        return {
            "reward": float(len(text) % 2),
            "format_reward": 1.0,
            "answer_reward": float(len(text) % 2),
        }

    monkeypatch.setitem(RULES, "r1_zero", reward_fn)


def rl_flags(warm: Path, output: Path, *more: str) -> list[str]:
    return ["--sft_base", str(warm / "sft"), "--output_dir", str(output), *SMALL, *more]


def without_timings(path: Path) -> list[dict]:
    return [
        {k: v for k, v in record.items() if not k.startswith(TIMINGS)}
        for record in read_jsonl(path)
    ]


def test_sft_writes_a_model_and_its_record(warm):
    assert "avg_all_rewards" in (warm / "log").read_text()
    assert AutoModelForCausalLM.from_pretrained(warm / "sft").config.hidden_size == 128
    assert AutoTokenizer.from_pretrained(warm / "sft").eos_token == "<|endoftext|>"
    losses = [
        record["validation_loss"]
        for record in read_jsonl(warm / "sft" / "metrics.jsonl")
        if "validation_loss" in record
    ]
    assert 0 < losses[-1] < 4  # an untrained model starts at ln 307 = 5.7
    assert json.loads((warm / "sft" / "args.json").read_text())["args"]["num_steps"] == 100
    assert not list(warm.glob(".*"))  # no half-made folder is left


def test_sft_overwrites_nothing(warm, monkeypatch, capsys):
    before = digest(warm / "sft" / "model.safetensors")
    assert run(monkeypatch, "sft", "--sft_base", str(warm / "sft"), "--output_dir", str(warm)) == 2
    assert "exists already" in capsys.readouterr().err
    assert digest(warm / "sft" / "model.safetensors") == before


def test_samples_that_are_all_alike_are_warned_of(warm, tmp_path, monkeypatch, capsys):
    flags = [
        "--model",
        str(warm / "sft"),
        "--output_dir",
        str(tmp_path),
        "--max_problems",
        "2",
        "--num_samples",
        "2",
    ]
    assert (
        run(monkeypatch, "evaluate", *flags, "--sampling_temperature", "0", "--reward", "accuracy")
        == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "makes all samples alike: pass@k is pass@1" in printed
    assert "--reward accuracy is a training reward: this grades by r1_zero" in printed


def test_evaluate(warm, tmp_path, monkeypatch, capsys):
    flags = [
        "--model",
        str(warm / "sft"),
        "--output_dir",
        str(tmp_path),
        "--max_problems",
        "8",
        "--num_samples",
        "4",
    ]
    assert run(monkeypatch, "evaluate", *flags) == 0
    printed = capsys.readouterr().out
    for words in (
        "avg_format_rewards",
        "avg_answer_rewards",
        "avg_all_rewards",
        "95 % interval",
        "pass@2",
        "maj@4",
        "format only",
    ):
        assert words in printed
    (folder,) = tmp_path.iterdir()
    lines = read_jsonl(folder / "completions" / "eval_000000.jsonl")
    assert len(lines) == 8 * 4
    held_out = {problem.id for problem in arithmetic.problems("test")}
    assert {line["problem"] for line in lines} <= held_out
    summary = json.loads((folder / "summary.json").read_text())
    assert sum(summary["categories"].values()) == 32
    assert summary["avg_all_rewards"] == sum(line["score"]["reward"] for line in lines) / 32


@pytest.mark.parametrize("loss_type", ["no_baseline", "reinforce_with_baseline", "grpo_clip"])
def test_train_rl_writes_the_run_folder(
    loss_type, warm, tmp_path, monkeypatch, capsys, made_up_reward, real_figures
):
    flags = [
        "--loss_type",
        loss_type,
        "--num_steps",
        "2",
        "--eval_interval",
        "1",
        "--save_interval",
        "1",
    ]
    assert run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path, *flags)) == 0
    printed = capsys.readouterr().out
    for words in (
        "accuracy",
        "format rate",
        "finished (share)",
        "before",
        "after",
        "learning_curve.png",
    ):
        assert words in printed
    folder = tmp_path / f"tiny_{loss_type}_seed0"
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2]
    assert all(record["updates"] == 2 for record in metrics)
    assert all(record["sampler_mismatch"] < 1e-4 for record in metrics)
    assert ("clip_fraction" in metrics[0]) == (loss_type == "grpo_clip")
    assert [record["step"] for record in read_jsonl(folder / "evals.jsonl")] == [0, 1, 2]
    rollout = read_jsonl(folder / "completions" / "rollout_000002.jsonl")
    assert len(rollout) == 16
    assert {record["policy_version"] for record in rollout} == {1}
    # The trainer computes the log-probs of what carries a gradient.
    rewards = [record["score"]["reward"] for record in rollout]
    for row, record in enumerate(rollout):
        group = rewards[row // 4 * 4 : row // 4 * 4 + 4]
        computed = rewards[row] != 0 if loss_type == "no_baseline" else len(set(group)) > 1
        assert len(record["token_ids"]) == len(record["log_probs"])
        assert len(record["trainer_log_probs"]) == len(record["token_ids"]) * computed
    assert 0 < metrics[1]["rows_with_gradient"] <= 16
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events.*"))
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    start, end = (
        load_file(warm / "sft" / "model.safetensors"),
        load_file(folder / "final" / "model.safetensors"),
    )
    assert any(not torch.equal(start[name], end[name]) for name in start)
    assert AutoModelForCausalLM.from_pretrained(folder / "step_000002").config.hidden_size == 128


def test_a_resumed_run_ends_as_the_undisturbed_one(warm, tmp_path, monkeypatch, made_up_reward):
    def train(output: str, *flags: str) -> Path:
        assert (
            run(
                monkeypatch,
                "train_rl",
                *rl_flags(warm, tmp_path / output, "--save_interval", "2", *flags),
            )
            == 0
        )
        return tmp_path / output / "tiny_grpo_clip_seed0"

    straight = train("straight", "--num_steps", "4")
    broken = train("broken", "--num_steps", "3")
    # As if it had been killed during step 4: step 3 is logged but in no checkpoint, the last line
    # is half written.
    for name in ("step_000003", "final"):
        (broken / name).rename(tmp_path / name)
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert train("broken", "--num_steps", "4", "--resume") == broken
    for name in ("metrics.jsonl", "evals.jsonl"):
        ours, theirs = without_timings(broken / name), without_timings(straight / name)
        assert [r for r in ours if r["step"] != 3 or name == "metrics.jsonl"] == theirs
    for name in ("model.safetensors", "trainer/optimizer.safetensors"):
        one, other = (
            load_file(broken / "step_000004" / name),
            load_file(straight / "step_000004" / name),
        )
        assert all(torch.equal(one[key], other[key]) for key in other)
    last = "completions/rollout_000004.jsonl"
    assert (broken / last).read_text() == (straight / last).read_text()


def test_one_update_a_rollout_needs_no_old_policy_and_says_so(
    warm, tmp_path, monkeypatch, capsys, made_up_reward
):
    flags = ["--num_steps", "1", "--train_mini_batch_size", "0"]
    assert run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path, *flags)) == 0
    assert "On-policy (one update per rollout)" in capsys.readouterr().out
    (record,) = read_jsonl(tmp_path / "tiny_grpo_clip_seed0" / "metrics.jsonl")
    assert record["ratio_mean"] == record["ratio_max"] == 1
    assert record["clip_fraction"] == 0
    assert "seconds_old_log_probs" not in record


def test_gradients_say_which_arms_of_a_sweep_differ(
    warm, tmp_path, monkeypatch, capsys, made_up_reward
):
    """With two updates a rollout, and with one, where the bounds of a ratio that is 1 do
    nothing."""
    arms = {
        "usual": "",
        "bound": "cliprange = 0.001",
        "longer": "num_steps = 7",
        "short": "overlong_buffer = 48",
        "no_std": "normalize_by_std = false",
    }
    said = {}
    monkeypatch.setenv("COLUMNS", "160")
    for updates in (1, 2):
        shared = (
            f"sft_base = '{warm / 'sft'}'\ngroup_size = 4\nepochs_per_rollout ="
            f" {updates}\ntrain_mini_batch_size = 0\n"
        )
        file = tmp_path / "arms.toml"
        file.write_text(shared + "".join(f"[arms.{name}]\n{own}\n" for name, own in arms.items()))
        assert run(monkeypatch, "gradients", "--sweep_file", str(file), "--prompts", "4") == 0
        rows = (line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines())
        said[updates] = {
            row[0]: " ".join(row[1 + 2 * updates :]) for row in rows if row and row[0] in arms
        }
    same = {"longer": "not looked at --num_steps", "short": "other", "no_std": "other"}
    assert said == {1: {"bound": "changes nothing"} | same, 2: {"bound": "other"} | same}


def test_bfloat16_is_borne_by_the_check_of_the_sampler(
    warm, tmp_path, monkeypatch, capsys, made_up_reward
):
    """The sampler's weights are rounded, the trainer's are not."""
    flags = ["--num_steps", "2", "--dtype", "bfloat16"]
    assert run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path, *flags)) == 0
    assert "Computing in bfloat16 on " in capsys.readouterr().out
    folder = tmp_path / "tiny_grpo_clip_seed0"
    differences = [record["sampler_mismatch"] for record in read_jsonl(folder / "metrics.jsonl")]
    # and within the preset's limit, or the run had stopped
    assert len(differences) == 2 and min(differences) > 1e-4
    assert {
        tensor.dtype for tensor in load_file(folder / "final" / "model.safetensors").values()
    } == {torch.float32}


def test_unknown_flags_exit_with_2_and_help_with_0(monkeypatch, capsys):
    assert run(monkeypatch, "train_rl", "--los_type", "grpo_clip") == 2
    assert "--los_type" in capsys.readouterr().err
    assert run(monkeypatch, "train_rl", "--help") == 0
    printed = capsys.readouterr().out
    assert "--loss_type " in printed and all(name in printed for name in LOSSES)


def test_a_second_run_gets_a_folder_of_its_own_and_a_taken_name_is_refused(
    warm, tmp_path, monkeypatch, capsys
):
    for _ in range(2):
        assert run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path, "--num_steps", "1")) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tiny_grpo_clip_seed0",
        "tiny_grpo_clip_seed0-2",
    ]
    assert (
        run(
            monkeypatch, "train_rl", *rl_flags(warm, tmp_path, "--run_name", "tiny_grpo_clip_seed0")
        )
        == 2
    )
    assert "continue it with --resume or name another" in capsys.readouterr().err


def test_how_often_it_evaluates_changes_nothing_that_is_trained(
    warm, tmp_path, monkeypatch, made_up_reward
):
    """A run that is resumed by its folder, with an evaluation after each step, trains what an
    undisturbed one trains."""
    assert run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path / "a", "--num_steps", "3")) == 0
    assert run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path / "b", "--num_steps", "1")) == 0
    straight, resumed = (tmp_path / name / "tiny_grpo_clip_seed0" for name in "ab")
    assert (
        run(
            monkeypatch,
            "train_rl",
            "--resume",
            str(resumed),
            "--num_steps",
            "3",
            "--eval_interval",
            "1",
        )
        == 0
    )
    assert without_timings(straight / "metrics.jsonl") == without_timings(resumed / "metrics.jsonl")
    weights = [digest(folder / "final" / "model.safetensors") for folder in (straight, resumed)]
    assert weights[0] == weights[1]
    evaluated = [
        [record["step"] for record in read_jsonl(folder / "evals.jsonl")]
        for folder in (straight, resumed)
    ]
    assert evaluated == [[0, 3], [0, 1, 2, 3]]


@pytest.fixture(scope="module")
def one_step(warm, tmp_path_factory) -> Path:
    """The folder of a run of one step."""
    output = tmp_path_factory.mktemp("one_step")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("alignment.runs.summary.plot_learning_curve", lambda *arguments: None)
        assert run(patched, "train_rl", *rl_flags(warm, output, "--num_steps", "1")) == 0
    return output / "tiny_grpo_clip_seed0"


def test_a_resume_with_other_arguments_names_them(warm, one_step, tmp_path, monkeypatch, capsys):
    shutil.copytree(one_step, tmp_path / one_step.name)
    more = rl_flags(warm, tmp_path, "--num_steps", "2", "--resume", "--cliprange", "0.3")
    assert run(monkeypatch, "train_rl", *more) == 2
    assert "--cliprange was 0.2, now 0.3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("args.json", "args.json is damaged"),
        (
            "step_000001/trainer/optimizer.safetensors",
            "step_000001 is damaged: trainer/optimizer.safetensors has",
        ),
        ("step_000001/model.safetensors", "step_000001 is damaged: model.safetensors has"),
        ("step_000001/config.json", "step_000001 is damaged: config.json has"),
        (
            "step_000001/manifest.sha256.json",
            "step_000001 is damaged: its manifest.sha256.json is missing or damaged",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named(
    damage, message, warm, one_step, tmp_path, monkeypatch, capsys
):
    shutil.copytree(one_step, tmp_path / one_step.name)
    file = tmp_path / one_step.name / damage
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert (
        run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path, "--num_steps", "2", "--resume")) == 2
    )
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    metrics = read_jsonl(tmp_path / "tiny_grpo_clip_seed0" / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1]


def test_what_the_file_system_refuses_is_one_clear_line(warm, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    flags = [
        "--model",
        str(warm / "sft"),
        "--output_dir",
        str(tmp_path / "file"),
        "--max_problems",
        "2",
    ]
    assert run(monkeypatch, "evaluate", *flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and str(tmp_path / "file") in said and said.count("\n") == 1


def test_missing_weights_are_not_made_up(warm, tmp_path, monkeypatch, capsys):
    shutil.copytree(warm / "sft", tmp_path / "part")
    weights = load_file(tmp_path / "part" / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "layers.1" not in k},
        tmp_path / "part" / "model.safetensors",
        {"format": "pt"},
    )
    flags = [
        "--model",
        str(tmp_path / "part"),
        "--output_dir",
        str(tmp_path / "out"),
        "--max_problems",
        "2",
    ]
    assert run(monkeypatch, "evaluate", *flags) == 2
    assert "model.safetensors has 1012144 bytes instead of 1867936" in capsys.readouterr().err
    (tmp_path / "part" / "manifest.sha256.json").unlink()
    assert run(monkeypatch, "evaluate", *flags) == 2
    assert (
        "weights are missing or of another shape, such as model.layers.1" in capsys.readouterr().err
    )


def test_training_beyond_the_context_is_refused_before_it_starts(
    warm, tmp_path, monkeypatch, capsys
):
    assert run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path, "--max_new_tokens", "250")) == 2
    assert (
        run(
            monkeypatch,
            "sft",
            "--sft_base",
            str(tmp_path / "sft"),
            "--output_dir",
            str(warm),
            "--max_new_tokens",
            "250",
        )
        == 2
    )
    assert capsys.readouterr().err.count("do not fit in the model's context") == 2
    assert not list(tmp_path.iterdir())


def test_a_longer_run_replaces_what_the_shorter_one_ended_with(
    warm, tmp_path, monkeypatch, made_up_reward
):
    def train(*flags: str) -> int:
        return run(monkeypatch, "train_rl", *rl_flags(warm, tmp_path, *flags))

    folder = tmp_path / "tiny_grpo_clip_seed0"
    assert train("--num_steps", "1") == 0
    (folder / "summary.json").unlink()  # as if killed before its report
    assert train("--num_steps", "1", "--resume") == 0
    assert train("--num_steps", "1", "--resume") == 2  # it is done
    assert train("--num_steps", "2", "--resume") == 0
    final, step = (
        load_file(folder / name / "model.safetensors") for name in ("final", "step_000002")
    )
    assert all(torch.equal(final[key], step[key]) for key in step)
    assert json.loads((folder / "summary.json").read_text())["after"]["step"] == 2


def test_two_commands_never_share_a_folder(tmp_path):
    def claim(_) -> Path:
        return claim_run_folder(str(tmp_path), "", "run", {}, {})

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(claim, range(8)))
    assert sorted(path.name for path in folders) == ["run", *(f"run-{n}" for n in range(2, 9))]


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\n\x07[red]") == "a\\x1b[2Jb\n\\x07[red]"


def test_training_takes_the_problems_of_a_band_of_measured_pass_rates(
    warm, tmp_path, made_up_reward, monkeypatch, capsys
):
    """`rejection_sample` measures, `train_rl` selects; with other rates the run does not go on."""
    monkeypatch.chdir(tmp_path)
    sampling = ["--num_problems", "24", "--num_samples", "4", "--min_consistency", "0"]
    model = ["--model", str(warm / "sft")]
    assert run(monkeypatch, "rejection_sample", *model, *sampling, "--output", "kept.jsonl") == 0
    rows = read_jsonl(Path("kept.pass_rates.jsonl"))
    assert len(rows) == 24 and {row["samples"] for row in rows} == {4}
    banded = {row["id"] for row in rows if row["correct"] in (1, 2)}
    assert 0 < len(banded) < 24
    flags = rl_flags(warm, tmp_path, "--num_steps", "2", "--run_name", "banded")
    flags += ["--pass_rates", "kept.pass_rates.jsonl", "--pass_rate_band", "0.25-0.5"]
    capsys.readouterr()
    assert run(monkeypatch, "train_rl", *flags) == 0
    assert f"0.25-0.5 keeps {len(banded)} of " in capsys.readouterr().err
    rollouts = [Path(f"banded/completions/rollout_{step:06d}.jsonl") for step in (1, 2)]
    trained = {line["problem"] for file in rollouts for line in read_jsonl(file)}
    assert trained and trained <= banded
    listed = read_jsonl(Path("banded/training_problems.jsonl"))
    assert {line["id"] for line in listed} == banded
    assert {line["pass_rate"] for line in listed} <= {0.25, 0.5}
    Path("kept.pass_rates.jsonl").write_text(json.dumps(rows[0]) + "\n")
    wider = [*flags, "--pass_rate_band", "0-1", "--resume"]
    assert run(monkeypatch, "train_rl", *wider) == 2
    assert "--sha256_of_pass_rates was" in capsys.readouterr().err
