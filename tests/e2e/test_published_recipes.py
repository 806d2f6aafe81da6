"""The presets that are other code bases' recipes: what their authors state, number by number, and
that each trains."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from alignment import train_rl
from alignment.args import PRESETS, RLArgs, from_preset
from alignment.system.files import read_jsonl
from tests.command_line import exit_code

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Preset -> flag -> what its authors state.
STATED = {
    "countdown_qwen2.5_3b": {
        "model": "Qwen/Qwen2.5-3B-Instruct",
        "dtype": "bfloat16",
        "seed": 1337,
        "max_problems": 128,
        "max_prompt_tokens": 256,
        "max_new_tokens": 1024,
        "prompts_per_rollout": 32,
        "group_size": 8,
        "train_mini_batch_size": 0,
        "sampling_temperature": 1.0,
        "sampling_top_p": 1.0,
        "sampling_top_k": 0,
        "stop": ("none",),
        "loss_type": "reinforce_with_baseline",
        "loss_normalization": "token_mean",
        "normalize_by_std": True,
        "std_of": "group_population",
        "advantage_eps": 1e-4,
        "beta": 0.0,
        "reward": "grpo_zero_format:0.1,grpo_zero_answer:1.0",
        "learning_rate": 1e-5,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "skip_unfinished": False,
        "eval_interval": 10,
        "eval_max_new_tokens": 2048,
        "save_interval": 100,
        "keep_checkpoints": 0,
    },
    "single_gpu_gsm8k_kl": {
        "task": "gsm8k",
        "num_problems": 1024,
        "max_prompt_tokens": 300,
        "max_solution_tokens": 200,
        "max_new_tokens": 1024 - 300,
        "sampling_temperature": 1.0,
        "sampling_top_p": 0.9,
        "sampling_top_k": 50,
        "log_probs_of": "full",
        "loss_type": "grpo_clip",
        "cliprange": 0.2,
        "beta": 0.04,
        "kl_estimator": "k3",
        "loss_normalization": "sequence_mean",
        "normalize_by_std": True,
        "std_of": "group",
        "advantage_eps": 1e-8,
        "max_grad_norm": 0.0,
        "stop": ("none",),
        "reward": "open_r1_format:0.5,open_r1_tag_count:0.5,accuracy:1.0",
    },
    "async_gsm8k": {
        "task": "gsm8k",
        "prompts_per_rollout": 5,
        "group_size": 8,
        "train_mini_batch_size": 8,
        "sampling_temperature": 0.9,
        "sampling_top_p": 1.0,
        "max_new_tokens": 700,
        "stop": ("none",),
        "loss_type": "grpo_clip",
        "cliprange": 0.2,
        "beta": 0.04,
        "kl_estimator": "k3",
        "loss_normalization": "sequence_mean",
        "std_of": "group",
        "advantage_eps": 1e-4,
        "learning_rate": 1e-6,
        "num_steps": 1000 // 5,
        "save_interval": 200 // 5,
        "reward": "simple_grpo_correct,simple_grpo_format",
    },
    "qwen2.5_math_1.5b_gsm8k_8gpu": {
        "model": "Qwen/Qwen2.5-Math-1.5B",
        "sft_base": "checkpoints/math_sft",
        "policy_parallelism": "layer_split",
        "group_size": 4,
        "train_mini_batch_size": 8,
        "normalize_by_std": False,
        "sampling_temperature": 1.0,
        "sampling_top_p": 0.9,
        "log_probs_of": "full",
        "cliprange": 0.2,
        "task": "gsm8k",
        "resolved_reward": "r1_zero",
    },
    "qwen2.5_0.5b_gsm8k_trl": {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "dtype": "bfloat16",
        "rollout_size": 16 * 4,
        "group_size": 8,
        "max_prompt_tokens": 256,
        "max_new_tokens": 300,
        "num_steps": 7473 // 8,
        "warmup_steps": round(0.1 * 7473 / 8),
        "learning_rate": 5e-6,
        "lr_schedule": "cosine",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "save_interval": 100,
        "prompt": "reasoning_answer",
        "reward": "soft_format:2.0,strict_format:4.0,correct_in_text:1.0",
    },
}
# What is smaller in a run of the tiny model, whose tokens are letters; all else is the preset's.
SMALL = ["--sft_base", "", "--model", "chat", "--sampler", "transformers", "--dtype", "float32"]
SMALL += ["--prompts_per_rollout", "2", "--max_new_tokens", "8", "--eval_max_new_tokens", "8"]
SMALL += ["--max_prompt_tokens", "0", "--max_problems", "2", "--num_problems", "4"]
SMALL += ["--num_steps", "2", "--warmup_steps", "1", "--save_interval", "2"]
SMALL += ["--output_dir", ".", "--run_name", "run", "--max_sampler_mismatch", "1"]


@pytest.mark.parametrize("preset", STATED)
def test_a_preset_has_its_authors_numbers(preset):
    args = from_preset(RLArgs, preset)
    stated = STATED[preset]
    assert {name: getattr(args, name) for name in stated} == stated


@pytest.mark.parametrize("preset", STATED)
def test_a_recipes_header_says_what_differs_and_what_is_not_stated(preset):
    header = " ".join((PRESETS / f"{preset}.toml").read_text().split("\ntask = ")[0].split("\n# "))
    assert "Every number of its author" in header and "Not stated by" in header
    assert "not measured" in header


def test_the_published_gsm8k_recipe_divides_by_a_deviation_by_choice():
    config = from_preset(RLArgs, "qwen2.5_math_1.5b_gsm8k_8gpu").update_config.advantage
    assert config.normalize_by_std is False and config.group_size == 4
    other = from_preset(RLArgs, "qwen2.5_math_1.5b_gsm8k_8gpu", normalize_by_std=True)
    assert other.update_config.advantage.normalize_by_std is True


@pytest.mark.slow
@pytest.mark.parametrize("preset", STATED)
def test_a_recipe_trains_in_a_small_form(
    tiny_folder, tmp_path, monkeypatch, capsys, preset, undrawn_curve
):
    """Two steps of the tiny model by the preset's own loss, rewards, prompt, sampling, optimiser
    and ways of sampling."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "chat")
    config = Path("chat/config.json")
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096})
    )
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("chat")
    args = from_preset(RLArgs, preset)
    flags = []
    if args.task == "gsm8k":
        flags = ["--dataset_path", "data"]
        Path("data").mkdir()
        for split, first in (("train", 1), ("test", 20)):
            rows = []
            for number in range(first, first + 6):
                answer = f"{number} + 1 = {number + 1}\n#### {number + 1}"
                rows.append(json.dumps({"question": f"{number} + 1?", "answer": answer}))
            Path("data", f"{split}.jsonl").write_text("\n".join(rows))
    words = ["--preset", preset, *SMALL, *flags]
    code = exit_code(monkeypatch, train_rl.main, "alignment.train_rl", *words)
    assert code == 0, capsys.readouterr().err
    steps = [line for line in read_jsonl(Path("run/metrics.jsonl")) if "loss" in line]
    assert len(steps) == 2
    assert all(step["bad_updates"] == 0 for step in steps)
    record = json.loads(Path("run/args.json").read_text())["args"]
    assert record["reward"] == args.resolved_reward and tuple(record["stop"]) == args.stop
