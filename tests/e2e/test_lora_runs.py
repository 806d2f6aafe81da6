"""Whole runs with LoRA: killed and resumed to the same bits, with the base as the reference model of a KL penalty."""

import signal
import sys

import torch
from safetensors.torch import load_file

from alignment import sft
from alignment.data.embedded import embedded_model
from alignment.system.files import read_jsonl
from alignment.verify_resume import digests
from tests.e2e.conftest import NAME, said

FLAGS = ("--lora_rank", "4", "--beta", "0.1", "--learning_rate", "1e-2")


def test_a_run_with_adapters_learns_and_a_killed_one_resumes_to_its_bits(warm, launcher, tmp_path):
    flags = ("--sft_base", str(warm), *FLAGS)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert launcher.run(straight, *flags) == 0, said(straight)
    run = straight / NAME
    steps = read_jsonl(run / "metrics.jsonl")
    assert all(step["sampler_mismatch"] < 1e-5 for step in steps)  # the sampler has the merged weights
    assert steps[0]["kl"] < steps[-1]["kl"]
    base, final = load_file(warm / "model.safetensors"), load_file(run / "final" / "model.safetensors")
    changed = {name for name in base if not base[name].equal(final[name])}
    assert len(changed) == 14 and all("_proj.weight" in name for name in changed)
    assert len(load_file(run / "final" / "adapter" / "adapter_model.safetensors")) == 28
    assert launcher.run(killed, *flags, phase="update", nth=3) == -signal.SIGKILL
    assert launcher.run(killed, *flags, "--resume") == 0, said(killed)
    assert digests(killed / NAME) == digests(run)


def test_sft_saves_the_merged_model_and_the_adapter(tmp_path, monkeypatch):
    target = tmp_path / "sft"
    flags = ["--sft_base", str(target), "--output_dir", str(tmp_path), "--num_steps", "2", "--batch_size", "4"]
    flags += [
        "--max_problems",
        "4",
        "--max_new_tokens",
        "4",
        "--warmup_steps",
        "0",
        "--lora_rank",
        "2",
        "--lora_targets",
        "q_proj",
    ]
    monkeypatch.setattr(sys, "argv", ["alignment.sft", *flags])
    sft.main()
    base, merged = (load_file(f"{folder}/model.safetensors") for folder in (embedded_model("tiny", str(tmp_path)), target))
    adapter = load_file(target / "adapter" / "adapter_model.safetensors")
    for layer in (0, 1):
        name = f"model.layers.{layer}.self_attn.q_proj"
        a, b = (adapter[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
        assert b.any() and torch.allclose(merged.pop(f"{name}.weight"), base[f"{name}.weight"] + 2 * b @ a, atol=1e-6)
    assert all(tensor.equal(base[name]) for name, tensor in merged.items()) and len(adapter) == 4
