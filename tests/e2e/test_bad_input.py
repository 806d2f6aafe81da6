"""What users get wrong, at every command: one line that says what, where and what to do; exit code
2; nothing written."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Gemma3Config, XLNetConfig

from alignment import __main__ as alignment_main
from alignment import (
    ask,
    download,
    evaluate,
    gradients,
    pipeline,
    plan,
    rejection_sample,
    report,
    sft,
    sweep,
    train_rl,
    verify,
)
from alignment.builders.base_models import check_model_path
from alignment.system.errors import UserError, run_command
from benchmarks import audit_grader

MAIN = {
    module.__name__.removeprefix("alignment."): module.main
    for module in (
        ask,
        download,
        evaluate,
        gradients,
        pipeline,
        plan,
        rejection_sample,
        report,
        sft,
        sweep,
        train_rl,
        verify,
    )
} | {"audit_grader": audit_grader.main}

TWO_CPUS = ["--sampler", "transformers", "--sample_device", "cpu", "cpu"]
ROW = '{"question": "Two and three?", "answer": "5 eggs. #### 5"}\n'


def break_model(folder: Path, name: str, change) -> None:
    shutil.copytree(folder / "whole", folder / name)
    change(folder / name)


def without_eos(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tiny_folder, tmp_path_factory):
    """Files and folders that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(tiny_folder, folder / "whole")
    break_model(folder, "no_config", lambda f: (f / "config.json").unlink())
    break_model(folder, "bad_config", lambda f: (f / "config.json").write_text("{"))
    break_model(
        folder, "unknown_kind", lambda f: (f / "config.json").write_text('{"model_type": "abacus"}')
    )
    for name, config in {"nested": Gemma3Config(), "any_length": XLNetConfig()}.items():
        break_model(folder, name, config.save_pretrained)
    break_model(folder, "no_weights", lambda f: (f / "model.safetensors").unlink())
    break_model(folder, "cut_weights", lambda f: (f / "model.safetensors").write_bytes(b"\0" * 100))
    break_model(folder, "no_tokenizer", lambda f: [file.unlink() for file in f.glob("*token*")])
    break_model(folder, "no_eos", without_eos)
    break_model(
        folder,
        "changed",
        lambda f: (f / "manifest.sha256.json").write_text(
            '{"config.json": {"bytes": 1, "sha256": ""}}'
        ),
    )
    for name, text in {
        "cut": ROW + '{"question": "Two',
        "keys": ROW + '{"query": "?"}\n',
        "number": '{"question": [7], "answer": "#### 5"}\n',
        "unanswered": '{"question": "?", "answer": "five"}\n',
        "empty": "",
        "deep": "[" * 100_000 + "\n",
        "giant": json.dumps({"question": "why? " * 200_000, "answer": "#### 5"}) + "\n",
        "binary": b"\xff\xfe\x00",
    }.items():
        (folder / f"data_{name}").mkdir()
        for split in ("train", "test"):
            (folder / f"data_{name}" / f"{split}.jsonl").write_bytes(
                text if isinstance(text, bytes) else text.encode()
            )
    for name, text in {
        "cut": "[arms.a\n",
        "no_arms": "x = 1\n",
        "unknown": '[arms.a]\nloss = "x"\n',
        "choice": '[arms.a]\nloss_type = "ppo"\n',
        "type": '[arms.a]\ngroup_size = "four"\n',
        "seed_type": '[arms.a]\ndata_seed = "four"\n',
        "name": '[arms."../a"]\ncliprange = 0.1\n',
        "value": "[arms.a]\ncliprange = 7\n",
        "binary": b"\xff\xfe",
    }.items():
        (folder / f"arms_{name}.toml").write_bytes(
            text if isinstance(text, bytes) else text.encode()
        )
    for name, args in {"damaged": "{", "list": "[]"}.items():
        (folder / f"run_{name}").mkdir()
        (folder / f"run_{name}" / "args.json").write_text(args)
    (folder / "sweep_damaged").mkdir()
    (folder / "sweep_damaged" / "sweep.json").write_text('{"arms": 1}')
    (folder / "a_file").write_text("")
    (folder / "a_run" / "final").mkdir(parents=True)
    (folder / "a_run" / "final" / "config.json").write_text("{}")
    for name, stage in {
        "command": 'command = "dance"',
        "unknown": 'command = "sft"\nmodel = "{b}"',
        "argument": 'command = "sft"\nsteps = 3',
        "value": 'command = "sft"\nnum_steps = 0',
        "reward": 'command = "sft"\nreward = "acuracy"',
        "own": 'command = "sft"\nsft_base = "x"',
    }.items():
        (folder / f"stages_{name}.toml").write_text(f"[stages.a]\n{stage}\n")
    shown = '{"prompt": "2 + 3 =", "response": " 5"}\n'
    (folder / "shown_prompt.jsonl").write_text(shown)
    turn = '{"role": "%s", "content": "x"}'
    shown_turns = ", ".join(turn % role for role in ("system", "user", "assistant"))
    (folder / "shown_chat.jsonl").write_text(f'{{"messages": [{shown_turns}]}}\n' * 2)
    (folder / "shown_cut.jsonl").write_text(shown + '{"prompt": ')
    (folder / "completions.jsonl").write_text('{"text": 7}\n')
    return folder


GSM8K, ASYNC = ["--task", "gsm8k"], ["--rollouts", "async"]
FEW_PROBLEMS = ["--num_problems", "64"]  # of 23,677, all of which would be encoded
WHOLE = ["--sft_base", "{world}/whole"]
CASES = [
    # numbers out of range, and what does not go together
    ("train_rl", ["--group_size", "1"], "--group_size 1: must be at least 2"),
    ("train_rl", ["--group_size", "0"], "--group_size 0: must be a whole number above 0"),
    ("train_rl", ["--prompts_per_rollout", "-3"], "--prompts_per_rollout -3"),
    ("train_rl", ["--num_steps", "0"], "--num_steps 0"),
    ("train_rl", ["--epochs_per_rollout", "0"], "--epochs_per_rollout 0"),
    ("train_rl", ["--cliprange", "-0.2"], "--cliprange -0.2: must be above 0 and at most 1"),
    ("train_rl", ["--train_mini_batch_size", "-1"], "--train_mini_batch_size -1"),
    ("train_rl", ["--micro_batch_tokens", "-1"], "--micro_batch_tokens -1"),
    ("train_rl", ["--advantage_eps", "0"], "--advantage_eps 0.0"),
    ("train_rl", ["--weight_decay", "nan"], "--weight_decay nan"),
    ("train_rl", ["--learning_rate", "inf"], "--learning_rate inf"),
    ("train_rl", ["--warmup_steps", "-1"], "--warmup_steps -1"),
    ("train_rl", ["--seed", "99999999999999999999"], "--seed 99999999999999999999"),
    ("train_rl", ["--data_seed", "-1"], "--data_seed -1"),
    ("train_rl", ["--sampling_seed", "-1"], "--sampling_seed -1"),
    ("train_rl", ["--sampling_temperature", "0"], "--sampling_temperature 0"),
    ("train_rl", ["--sampling_top_p", "1.5"], "--sampling_top_p 1.5"),
    ("train_rl", ["--max_new_tokens", "0"], "--max_new_tokens 0"),
    ("train_rl", ["--max_new_tokens", "256"], "--max_new_tokens 256: the context of tiny is 256"),
    ("sft", ["--max_new_tokens", "9000"], "--max_new_tokens 9000: the context of tiny is 256"),
    ("evaluate", ["--max_new_tokens", "300"], "--max_new_tokens 300: the context of tiny is 256"),
    (
        "train_rl",
        ["--eval_max_new_tokens", "300"],
        "--eval_max_new_tokens 300: the context of tiny is 256",
    ),
    (
        "train_rl",
        [*FEW_PROBLEMS, "--max_new_tokens", "250"],
        "do not fit in the model's context of 256",
    ),
    ("train_rl", ["--max_bad_steps", "0"], "--max_bad_steps 0"),
    ("train_rl", ["--cliprange_high", "0"], "--cliprange_high 0.0"),
    ("train_rl", ["--dual_clip", "1"], "--dual_clip 1.0: must be 0 (none) or above 1"),
    ("train_rl", ["--beta", "-1"], "--beta -1.0"),
    (
        "train_rl",
        ["--overlong_buffer", "49"],
        "--overlong_buffer 49: must be from 0 (none) to --max_new_tokens",
    ),
    ("train_rl", ["--max_refills", "-1"], "--max_refills -1"),
    ("train_rl", ["--num_problems", "-1"], "--num_problems -1"),
    (
        "train_rl",
        ["--sft_base", "{world}/whole", "--max_prompt_tokens", "3"],
        "--max_prompt_tokens 3: every prompt is longer",
    ),
    ("train_rl", ["--sampling_top_k", "-1"], "--sampling_top_k -1"),
    ("train_rl", ["--correction_cap", "0"], "--correction_cap 0.0"),
    (
        "train_rl",
        ["--token_selection", "kl_cov", "--train_mini_batch_size", "0"],
        "--token_selection kl_cov: must be none with one update a rollout",
    ),
    (  # a loss without a ratio does not take the log-probs of the older policy
        "train_rl",
        ["--token_selection", "kl_cov", "--train_mini_batch_size", "0", "--rollouts", "async"]
        + ["--loss_type", "reinforce_with_baseline"],
        "--token_selection kl_cov: must be none with one update a rollout",
    ),
    (
        "train_rl",
        ["--covariance_low", "6", "--token_selection", "clip_cov"],
        "--covariance_low 6.0: must be below --covariance_high 5.0",
    ),
    (
        "train_rl",
        ["--correction_floor", "2"],
        "--correction_floor 2.0: must be below --correction_cap 2.0",
    ),
    (
        "train_rl",
        [*FEW_PROBLEMS, *WHOLE, "--eval_max_new_tokens", "250"],
        "do not fit in the model's context of 256",
    ),
    ("evaluate", ["--compare", "tiny"], "--compare tiny: must be two models"),
    (
        "rejection_sample",
        ["--output", "x.jsonl", "--num_samples", "0"],
        "--num_samples 0: must be at least 1",
    ),
    (
        "rejection_sample",
        ["--output", "x.jsonl", "--min_consistency", "2"],
        "--min_consistency 2.0: must be from 0 to 1",
    ),
    ("train_rl", ["--max_grader_failures", "2"], "--max_grader_failures 2.0"),
    ("train_rl", ["--sampler_timeout", "0"], "--sampler_timeout 0.0"),
    ("train_rl", ["--keep_checkpoints", "-1"], "--keep_checkpoints -1"),
    (
        "train_rl",
        ["--max_staleness", "2"],
        "--max_staleness 2: must be 0, or go with --rollouts async",
    ),
    ("train_rl", ["--sync_every", "2"], "--sync_every 2: must be 1, or go with --rollouts async"),
    ("train_rl", [*ASYNC, "--max_staleness", "-1"], "--max_staleness -1: must be 0 or more"),
    (
        "train_rl",
        [*ASYNC, "--sync_every", "3"],
        "--sync_every 3: must be at most 2: later weights would come too late",
    ),
    (
        "train_rl",
        [*ASYNC, "--sampler_correction", "token_mask"],
        "--sampler_correction token_mask: must be none with",
    ),
    (
        "train_rl",
        [*WHOLE, "--sampler_url", "here"],
        "--sampler_url here: give it as http://HOST:PORT",
    ),
    (
        "train_rl",
        [*WHOLE, "--sampler_url", "http://127.0.0.1:9"],
        "--sampler_url: the vLLM server at http://127.0.0.1:9 cannot",
    ),
    (
        "train_rl",
        ["--reward", "signed_accuracy", "--task", "countdown_small"],
        "--reward signed_accuracy: it looks for a number",
    ),
    ("train_rl", ["--gpu_memory_utilization", "1.2"], "--gpu_memory_utilization 1.2"),
    (
        "train_rl",
        [*FEW_PROBLEMS, *WHOLE, "--lora_rank", "2", "--lora_targets", "lm_head"],
        "--lora_targets lm_head: 'lm_head' is none of this",
    ),
    (
        "train_rl",
        ["--lora_targets", "q_proj,v_proj"],
        "--lora_targets q_proj,v_proj: must be left out, or go with --lora_rank",
    ),
    ("train_rl", ["--lora_rank", "-1"], "--lora_rank -1: must be 0 (none) or more"),
    (
        "sft",
        ["--lora_rank", "2", "--lora_alpha", "0", "--sft_base", "x"],
        "--lora_alpha 0: must be at least 1",
    ),
    (
        "train_rl",
        ["--policy_ranks", "4", "--policy_parallelism", "single"],
        "--policy_ranks 4: a policy that is single is one",
    ),
    (
        "sft",
        ["--policy_parallelism", "shard"],
        "--policy_parallelism shard: there is no such policy parallelism",
    ),
    (
        "train_rl",
        ["--policy_parallelism", "sharded", "--optimizer", "adamw_8bit"],
        "--optimizer adamw_8bit: a sharded policy",
    ),
    ("train_rl", ["--rank_timeout", "0"], "--rank_timeout 0"),
    ("evaluate", ["--num_samples", "0"], "--num_samples 0"),
    ("evaluate", ["--max_problems", "-1"], "--max_problems -1"),
    ("evaluate", ["--max_new_tokens", "250"], "do not fit in the model's context of 256"),
    ("sft", ["--learning_rate", "-1"], "--learning_rate -1.0: must be 0 (trains nothing) or more"),
    ("sft", ["--batch_size", "0"], "--batch_size 0"),
    ("plan", ["--num_gpus", "-1"], "--num_gpus -1"),
    (
        "plan",
        ["--json", "nowhere/plan.json"],
        "--json nowhere/plan.json: name a file in a folder that exists, such as plan.json",
    ),
    ("gradients", ["--prompts", "1"], "--prompts 1: must be at least 2"),
    (
        "gradients",
        ["--group_size", "3", "4"],
        "--group_size: every size must divide the largest, 4",
    ),
    ("verify", ["--kill_after", "-1"], "--kill_after -1: must be 0 (none) or more"),
    (
        "verify",
        ["--batch_invariant"],
        (
            "--batch_invariant: only vLLM on a GPU has kernels that give the same bits whatever"
            " shares a batch"
        ),
    ),
    # flags
    (
        "train_rl",
        ["--group_sise", "3"],
        "error: --group_sise: there is no such flag (did you mean --group_size?)",
    ),
    ("evaluate", ["--lr", "1"], "error: --lr: there is no such flag; write --learning_rate"),
    (
        "train_rl",
        ["actor_rollout_ref.rollout.n=4"],
        "error: actor_rollout_ref.rollout.n: there is no such flag; write --group_size",
    ),
    (
        "plan",
        ["--optimizer", "adam"],
        (
            "--optimizer adam: choose one of adamw, adamw_cpu_offload, adamw_8bit, muon (did you"
            " mean adamw?)"
        ),
    ),
    (
        "train_rl",
        ["--resume", "{world}/whole"],
        "--resume {world}/whole: must be a run's folder, which has an args.json",
    ),
    ("train_rl", ["--resume", "{world}/run_damaged"], "args.json is damaged"),
    (
        "train_rl",
        ["--loss_type", "sapo", "--no_loss.positive", "0.3"],
        "--no_loss.positive 0.3: takes no value; write --no_loss.positive alone, or --loss",
    ),
    # names
    ("train_rl", ["--preset", "tinny"], "(did you mean tiny?)"),
    ("train_rl", ["--loss_type", "gpro_clip"], "(did you mean grpo_clip?)"),
    ("train_rl", ["--task", "arithmatic"], "(did you mean arithmetic?)"),
    ("train_rl", ["--sampler", "vlm"], "(did you mean vllm?)"),
    ("train_rl", ["--reward", "acuracy"], "(did you mean accuracy?)"),
    ("evaluate", ["--reward", "acuracy"], "(did you mean accuracy?)"),
    ("evaluate", ["--task", "countdown", "--reward", "cuontdown"], "(did you mean countdown?)"),
    ("evaluate", ["--reward", "format:0.5,acuracy"], "--reward acuracy: there is no such reward"),
    ("evaluate", ["--reward", "no_module:f"], "--reward no_module:f: cannot be imported"),
    (
        "evaluate",
        ["--reward", "r1_zero:much"],
        "--reward r1_zero:much: the weight 'much' is no number",
    ),
    (
        "evaluate",
        ["--eval_tasks", "gsm8k", "--reward", "r1_zero_strickt"],
        "(did you mean r1_zero_strict?)",
    ),
    ("sft", ["--reward", "acuracy", "--sft_base", "x"], "(did you mean accuracy?)"),
    ("plan", ["--reward", "acuracy"], "(did you mean accuracy?)"),
    ("plan", ["--reward", "json:no_function"], "--reward json:no_function: cannot be imported"),
    ("plan", ["--task", "poetry"], "--task poetry: there is no such task"),
    ("rejection_sample", ["--reward", "acuracy", "--output", "x"], "(did you mean accuracy?)"),
    ("verify", ["--reward", "acuracy"], "(did you mean accuracy?)"),
    ("train_rl", ["--preset", "huge"], "--preset huge: there is no such preset; choose one of"),
    ("train_rl", ["--preset", "../tiny"], "--preset ../tiny: there is no such preset"),
    ("train_rl", ["--task", "poetry"], "--task poetry: there is no such task"),
    ("train_rl", ["--run_name", "../up"], "--run_name ../up: must be a plain folder name"),
    ("train_rl", ["--run_name", "größe/ü"], "--run_name größe/ü: must be a plain folder name"),
    (
        "train_rl",
        ["--run_name", "n" * 300],
        "a plain folder name without slashes, of at most 150 bytes",
    ),
    ("train_rl", ["--resume"], "--resume: there is no run"),
    ("train_rl", ["--reward", "praise"], "--reward praise: there is no such reward; choose one of"),
    (
        "train_rl",
        ["--reward", "format:0.5,format:1"],
        "--reward format:0.5,format:1: a part is named twice",
    ),
    ("train_rl", ["--reward", "no_module:f"], "--reward no_module:f: cannot be imported"),
    ("train_rl", ["--reward", "countdown"], "--reward countdown: it does not fit this --task"),
    ("evaluate", ["--prompt", "ode"], "--prompt ode: there is no such template; choose one of"),
    (
        "evaluate",
        ["--prompt", "countdown_zh"],
        "--prompt countdown_zh: it is a chat, and the tokenizer of this model has no chat",
    ),
    (
        "sft",
        ["--task", "countdown", "--sft_base", "x"],
        "--task countdown has no worked solutions to learn from",
    ),
    ("rejection_sample", [], "--output: name the file to write"),
    ("ask", ["--gold", "7"], "--gold 7: must be left out without --question"),
    ("ask", ["--models", "tiny", "/nowhere", "--question", "x"], "--models /nowhere"),
    ("rejection_sample", ["--output", "{world}/a_file"], "a_file exists already"),
    (
        "rejection_sample",
        ["--output", "x.jsonl", "--few_shot", "nowhere"],
        "nowhere does not exist",
    ),
    (
        "rejection_sample",
        ["--output", "x.jsonl", "--few_shot", "{world}/shown_prompt.jsonl"],
        'every example needs a "question"',
    ),
    ("train_rl", ["--sft_base", "{world}/a_file"], "--sft_base {world}/a_file: no model folder"),
    (
        "train_rl",
        ["--no_auto_sft", "--sft_base", "nowhere"],
        "--sft_base nowhere does not exist: make it with",
    ),
    ("sft", ["--sft_base", ""], "--sft_base"),
    ("sft", ["--sft_base", "{world}/whole"], "exists already: delete it, or name another folder"),
    ("report", ["--runs", "nowhere"], "nowhere is no run's folder: it has no args.json"),
    ("report", ["--runs", "{world}/a_file"], "a_file is no run's folder"),
    ("report", ["--runs", "{world}/run_damaged"], "args.json is damaged"),
    ("report", ["--runs", "{world}/run_list"], "args.json is damaged"),
    ("report", ["--runs", "{world}/sweep_damaged"], "sweep.json is damaged"),
    ("audit_grader", ["--completions", "nowhere"], "nowhere"),
    ("audit_grader", ["--completions", "{world}/completions.jsonl"], "completions.jsonl:1"),
    ("download", ["--folder", "{world}/a_file/x"], "a_file/x"),
    (
        "download",
        ["--folder", "data", "--source", "nonsense"],
        "nonsense/train.jsonl: could not be fetched",
    ),
    # devices
    ("train_rl", ["--sample_device", "cuda:7"], "--sample_device cuda:7"),
    ("train_rl", ["--sample_device", "gpu"], "--sample_device 'gpu' is not a device"),
    (
        "train_rl",
        ["--sample_device", "cpu", "cuda:1"],
        "--sample_device cuda:1, but no GPU is visible",
    ),
    ("train_rl", ["--sample_device", "cpu,cpu", "gpu"], "--sample_device 'gpu' is not a device"),
    ("train_rl", ["--sample_device", "cpu,"], "--sample_device '' is not a device"),
    (
        "plan",
        ["--num_gpus", "4", "--sample_device", "cuda:2", "cuda:2"],
        "--sample_device lists cuda:2 2 times",
    ),
    (
        "train_rl",
        ["--sampler_tensor_parallel", "0"],
        "--sampler_tensor_parallel 0: must be at least 1",
    ),
    (
        "train_rl",
        [*TWO_CPUS, "--sampler_tensor_parallel", "2"],
        "only vLLM takes several devices; choose --sampler vllm",
    ),
    (
        "plan",
        [
            "--num_gpus",
            "8",
            "--sampler",
            "vllm",
            "--sample_device",
            "cuda:5,cuda:6,cuda:7",
            "--sampler_tensor_parallel",
            "2",
        ],
        (
            "--sampler_tensor_parallel 2: --sample_device names 3 (cuda:5 cuda:6 cuda:7); name 2"
            " for each engine"
        ),
    ),
    (
        "train_rl",
        ["--sampler_url", "http://127.0.0.1:1,ftp://127.0.0.1:1"],
        "--sampler_url ftp://127.0.0.1:1: give it as",
    ),
    ("train_rl", ["--policy_devices", "cuda:0", "cuda:0"], "--policy_devices"),
    ("evaluate", ["--eval_device", "cuda:-1"], "--eval_device 'cuda:-1' is not a device"),
    ("plan", ["--num_gpus", "2", "--sample_device", "cuda:2"], "--sample_device cuda:2"),
    # models
    ("evaluate", ["--model", "no/such/folder"], "--model no/such/folder: no model folder"),
    ("evaluate", ["--model", "{world}/no_config"], "no model folder (with a config.json) is there"),
    ("evaluate", ["--model", "{world}/bad_config"], "bad_config: cannot be loaded"),
    ("evaluate", ["--model", "{world}/unknown_kind"], "unknown_kind: cannot be loaded"),
    ("evaluate", ["--model", "{world}/no_weights"], "no_weights: cannot be loaded"),
    ("evaluate", ["--model", "{world}/cut_weights"], "cut_weights: cannot be loaded"),
    (
        "evaluate",
        ["--model", "{world}/no_tokenizer"],
        "its folder has no tokenizer (none of tokenizer.json, ",
    ),
    (
        "sft",
        ["--model", "{world}/a_run", "--sft_base", "x"],
        "--model {world}/a_run: is a run's folder; name the model in it, {world}/a_run/final",
    ),
    (
        "evaluate",
        ["--compare", "{world}/a_run", "tiny"],
        "--model {world}/a_run: is a run's folder; name the model in it",
    ),
    ("evaluate", ["--model", "{world}/a_run"], "{world}/a_run/final: its folder has no tokenizer"),
    (
        "evaluate",
        ["--eval_tasks", "math5000"],
        "--eval_tasks math5000: there is no such eval task (did you mean math500?); choose one of",
    ),
    (
        "evaluate",
        ["--eval_tasks", "aime24", "--dataset_path", "{world}"],
        "--dataset_path {world}: has no folder aime24",
    ),
    (
        "evaluate",
        ["--run_name", "a_run", "--output_dir", "{world}"],
        "--run_name a_run: it exists in {world}; name another",
    ),
    ("evaluate", ["--model", "{world}/no_eos"], "its tokenizer has no EOS token"),
    ("evaluate", ["--model", "{world}/changed"], "config.json has"),
    (
        "train_rl",
        ["--sft_base", "{world}/nested"],
        "nested (gemma3) nests its text model in a larger one (text_config)",
    ),
    (
        "sft",
        ["--model", "{world}/nested", "--sft_base", "x"],
        "nested (gemma3) nests its text model in a larger one (text_config)",
    ),
    (
        "evaluate",
        ["--model", "{world}/any_length"],
        "any_length (xlnet) does not say how many tokens it takes",
    ),
    ("train_rl", ["--sft_base", "{world}/no_eos"], "its tokenizer has no EOS token"),
    # data
    ("evaluate", [*GSM8K, "--dataset_path", "nowhere"], "nowhere/test.jsonl does not exist"),
    (
        "sft",
        [*GSM8K, "--dataset_path", "{world}/data_cut", "--sft_base", "x"],
        "jsonl:2: not a JSON object",
    ),
    (
        "evaluate",
        [*GSM8K, "--dataset_path", "{world}/data_keys"],
        'test.jsonl:2: there is no "question"',
    ),
    (
        "evaluate",
        [*GSM8K, "--dataset_path", "{world}/data_number"],
        'test.jsonl:1: "question" must hold text or a number',
    ),
    ("evaluate", [*GSM8K, "--dataset_path", "{world}/data_unanswered"], "test.jsonl:1"),
    ("evaluate", [*GSM8K, "--dataset_path", "{world}/data_empty"], "test.jsonl holds no row"),
    ("evaluate", [*GSM8K, "--dataset_path", "{world}/data_deep"], "test.jsonl:1"),
    (
        "evaluate",
        [*GSM8K, "--dataset_path", "{world}/data_giant"],
        "do not fit in the model's context of 256",
    ),
    ("evaluate", [*GSM8K, "--dataset_path", "{world}/data_binary"], "test.jsonl: not UTF-8 text"),
    (
        "evaluate",
        ["--task", "countdown", "--dataset_path", "{world}", "--prompt", "tiny"],
        "holds no .parquet file",
    ),
    ("sft", ["--sft_base", "x", "--demonstrations", "nowhere"], "nowhere does not exist"),
    (
        "sft",
        ["--sft_base", "x", "--demonstrations", "{world}/data_keys/train.jsonl"],
        'train.jsonl:1: there is no "response"',
    ),
    (
        "sft",
        ["--sft_base", "x", "--demonstrations", "{world}/shown_cut.jsonl"],
        "shown_cut.jsonl:2: not a JSON object",
    ),
    (
        "sft",
        ["--sft_base", "x", "--demonstrations", "{world}/shown_chat.jsonl"],
        "it is a chat, and the tokenizer of this model has",
    ),
    (
        "rejection_sample",
        ["--output", "x", "--few_shot", "{world}/shown_chat.jsonl"],
        'every example needs a "question"',
    ),
    (
        "sft",
        ["--sft_base", "x", "--demonstrations", "{world}/shown_prompt.jsonl"],
        "1 rows are too few to train on",
    ),
    # data of the user's own
    ("evaluate", ["--task", "file:nowhere.csv"], "nowhere.csv does not exist"),
    (
        "train_rl",
        ["--task", "file:{world}/data_cut/train.jsonl"],
        "train.jsonl:2: not a JSON object",
    ),
    (
        "sft",
        ["--task", "file:{world}/data_keys/test.jsonl", "--sft_base", "x"],
        'test.jsonl:2: there is no "question"',
    ),
    (
        "rejection_sample",
        ["--task", "file:{world}", "--output", "x.jsonl"],
        "{world} is a folder: name a file in it",
    ),
    ("train_rl", ["--task", "file:x", "--answer_pattern", "("], "x does not exist"),
    (
        "evaluate",
        ["--question_column", "q"],
        "--task arithmetic has rows of its own: --question_column, --answer_col",
    ),
    ("evaluate", ["--prompt", "{world}/a_file"], "a_file: the file has no place for the question"),
    # stages
    ("pipeline", ["--file", "none.toml"], "--file none.toml: there is no such file"),
    ("pipeline", ["--file", "{world}/arms_cut.toml"], "arms_cut.toml: must be a TOML file"),
    ("pipeline", ["--file", "{world}/arms_no_arms.toml"], "has no [stages.NAME]"),
    (
        "pipeline",
        ["--file", "{world}/stages_command.toml"],
        "stage a: command 'dance': must be one of",
    ),
    ("pipeline", ["--file", "{world}/stages_unknown.toml"], "stage a: {b} is no earlier stage"),
    ("pipeline", ["--file", "{world}/stages_argument.toml"], "stage a: sft has no argument steps"),
    ("pipeline", ["--file", "{world}/stages_value.toml"], "stage a: --num_steps 0"),
    (
        "pipeline",
        ["--file", "{world}/stages_reward.toml"],
        "stage a: --reward acuracy: there is no such reward",
    ),
    (
        "pipeline",
        ["--file", "{world}/stages_own.toml"],
        "stage a: sft_base: the pipeline sets it itself",
    ),
    # arms
    ("sweep", ["--sweep_file", "none.toml"], "--sweep_file none.toml: there is no such file"),
    ("sweep", ["--sweep_file", "{world}/arms_cut.toml"], "arms_cut.toml: "),
    (
        "sweep",
        ["--sweep_file", "{world}/arms_no_arms.toml"],
        "needs a table [arms.NAME] for each arm",
    ),
    ("sweep", ["--sweep_file", "{world}/arms_unknown.toml"], "loss is no argument of an arm"),
    ("sweep", ["--sweep_file", "{world}/arms_choice.toml"], "loss_type = 'ppo': choose one of"),
    (
        "sweep",
        ["--sweep_file", "{world}/arms_type.toml"],
        "group_size = 'four': must be a whole number",
    ),
    (
        "sweep",
        ["--sweep_file", "{world}/arms_seed_type.toml"],
        "data_seed = 'four': must be a whole number",
    ),
    ("sweep", ["--sweep_file", "{world}/arms_name.toml"], "use letters, digits"),
    ("sweep", ["--sweep_file", "{world}/arms_value.toml"], "--cliprange 7"),
    ("sweep", ["--sweep_file", "{world}/arms_binary.toml"], "arms_binary.toml: "),
    ("sweep", ["--reward", "r1_zero", "praise"], "--reward praise: there is no such reward"),
    # the file system
    ("evaluate", ["--model", "{world}/whole", "--output_dir", "{world}/a_file"], "a_file"),
    (
        "evaluate",
        ["--model", "{world}/whole", "--output_dir", "/proc/nothing_is_written_here"],
        "/proc/nothing_is_written_here",
    ),
    ("train_rl", ["--sft_base", "{world}/whole", "--output_dir", "{world}/a_file"], "a_file"),
    ("train_rl", ["--output_dir", "/proc/version"], "--output_dir /proc/version: is a file"),
    # servers and warm starts
    ("train_rl", ["--sampler", "vllm_server"], "--sampler vllm_server: give the server's address"),
    (
        "train_rl",
        ["--sampler_url", "localhost:8000"],
        "--sampler_url localhost:8000: give it as http://HOST:PORT",
    ),
    (
        "train_rl",
        ["--auto_sft", "--sft_base", "made_first", "--model", "./nowhere"],
        "--model ./nowhere: no model folder",
    ),
]


def all_cases() -> list:
    """All mistakes; every third is a slow test."""
    cases = []
    for number, (command, flags, message) in enumerate(CASES):
        marks = [pytest.mark.slow] if number % 3 == 2 else []
        name = f"{command} {' '.join(flags)}"[:70]
        cases.append(pytest.param(command, flags, message, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(("command", "flags", "message"), all_cases())
def test_one_clear_line_exit_2_and_nothing_written(
    command, flags, message, world, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = sorted(world.rglob("*"))
    monkeypatch.setattr(
        sys, "argv", [command, *(flag.replace("{world}", str(world)) for flag in flags)]
    )
    with pytest.raises(SystemExit) as stop:
        run_command(MAIN[command])
    said = capsys.readouterr().err
    assert stop.value.code == 2, said
    assert (
        message.replace("{world}", str(world)) in said
        and said.startswith("error: ")
        and said.count("\n") == 1
    )
    written = [
        path for path in tmp_path.rglob("*") if path.is_file() and "tiny_base" not in path.parts
    ]
    assert written == [] and sorted(world.rglob("*")) == before


def test_a_missing_folder_of_ones_own_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    """Two words with a slash are a name on the hub, unless the first is a folder here."""
    monkeypatch.chdir(tmp_path)
    assert check_model_path("checkpoints/typo", "--model") is None
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="--model checkpoints/typo: no model folder"):
        check_model_path("checkpoints/typo", "--model")


def test_a_misspelt_command_is_told_with_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["alignment", "trian_rl"])
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stop:
            alignment_main.main()
    finally:
        signal.signal(signal.SIGINT, handler)
    said = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and said.count("\n") == 1
        and said.endswith("(did you mean train_rl?)\n")
    )


def test_there_are_at_least_sixty():
    assert len(CASES) >= 60 and {command for command, _, _ in CASES} == set(MAIN)


def test_the_console_command_sees_the_modules_of_the_working_folder(tmp_path):
    """As `python -m` does; the module is found, and the function that it lacks is not."""
    (tmp_path / "own_reward.py").write_text("def score(response, truth):\n    return 1.0\n")
    words = ["train_rl", "--reward", "own_reward:other"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = "import sys; sys.path[0] = '/nowhere'; sys.argv[0] = 'alignment';"
    script = f"{start} from alignment.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "own_reward:other: cannot be imported (AttributeError" in done.stderr


def test_a_pipeline_of_the_package_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert pipeline.pipeline_file("r1_tiny").is_file()
    with pytest.raises(UserError, match="the package has r1_tiny .did you mean r1_tiny"):
        pipeline.pipeline_file("r1_tny")
    (tmp_path / "r1_tiny").write_text("")  # a file of the user's own comes first
    assert pipeline.pipeline_file("r1_tiny") == Path("r1_tiny")
