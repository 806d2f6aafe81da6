"""Runs that train adapters, as a user starts them: resumed to the bit, after SFT, sharded, ahead,
and with a deaf sampler."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from alignment import sft
from alignment.builders.verified_runs import digests
from alignment.sampling.transformers import open_transformers
from alignment.system.files import read_jsonl
from alignment.system.manifests import find_damage
from tests.command_line import exit_code
from tests.e2e.conftest import NAME, said
from tests.e2e.test_ranked_runs import cut_after_step_2, ranks

pytestmark = pytest.mark.slow

ADAPTERS = ["--lora_rank", "2", "--beta", "0.1", "--learning_rate", "1e-2"]
# With one update a step, so that the first step after a reset has no divergence.
SHARDED_WITH_RESETS = [*ranks("sharded", 2), "--reference_reset_interval", "2"]
SHARDED_WITH_RESETS += ["--train_mini_batch_size", "0", "--warmup_steps", "0"]


class Deaf:
    """A sampler that keeps its first weights, and does not say what it holds."""

    def __init__(self, config, tokenizer, policy=None):
        self.own, self.restarts, self.policy_version = (
            open_transformers(config, tokenizer),
            0,
            config.policy_version,
        )
        self.sample, self.close = self.own.sample, self.own.close

    def load_weights(self, named_tensors, version: int) -> None:
        self.policy_version = self.own.policy_version = version


@pytest.mark.parametrize(
    ("flags", "steps_at_the_reference"),
    [([], []), (SHARDED_WITH_RESETS, [1, 3])],
    ids=["one process", "sharded"],
)
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(
    flags, steps_at_the_reference, warm, launcher, tmp_path
):
    whole = tmp_path / "whole"
    words = ["--sft_base", str(warm), "--keep_checkpoints", "0", *ADAPTERS, *flags]
    assert launcher.run(whole, *words) == 0, said(whole)
    cut = cut_after_step_2(whole / NAME, tmp_path)
    assert launcher.run(tmp_path, *words, "--resume") == 0, said(tmp_path)
    assert digests(cut) == digests(whole / NAME)
    final, started = cut / "final", AutoModelForCausalLM.from_pretrained(warm)
    assert find_damage(final) is None and "adapter/adapter_model.safetensors" in json.loads(
        (final / "manifest.sha256.json").read_text()
    )
    merged = PeftModel.from_pretrained(started, final / "adapter").merge_and_unload()
    plain = load_file(final / "model.safetensors")
    assert all(torch.equal(plain[name], weight) for name, weight in merged.named_parameters())
    # one, or each rank's
    parts = (load_file(file) for file in (cut / "step_000004" / "trainer").glob("*.safetensors"))
    sizes = sum(
        tensor.numel()
        for part in parts
        for name, tensor in part.items()
        if name.endswith("exp_avg")
    )
    assert sizes == sum(
        matrix.numel()
        for matrix in load_file(final / "adapter" / "adapter_model.safetensors").values()
    )
    divergences = [step["kl"] for step in read_jsonl(cut / "metrics.jsonl")]
    # The reference is the base, at which the adapters begin, and after a reset the whole weights,
    # from which W + B A differs by rounding.
    assert abs(divergences[0]) < 0.1 * divergences[-1]
    near = [step for step, divergence in enumerate(divergences, start=1) if divergence < 1e-6]
    assert near == steps_at_the_reference


def test_rl_goes_on_from_a_model_fine_tuned_by_adapters(warm, launcher, tmp_path, monkeypatch):
    flags = [
        "--num_steps",
        "3",
        "--batch_size",
        "8",
        "--max_problems",
        "4",
        "--max_new_tokens",
        "16",
        "--output_dir",
        ".",
        "--model",
        str(warm),
        "--sft_base",
        "tuned",
        "--lora_rank",
        "2",
    ]
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, sft.main, "alignment.sft", *flags) == 0
    before, tuned = (
        load_file(folder / "model.safetensors") for folder in (warm, tmp_path / "tuned")
    )
    changed = {name for name in tuned if not torch.equal(tuned[name], before[name])}
    assert tuned.keys() == before.keys() and changed == {
        name for name in tuned if "proj.weight" in name
    }
    flags = ["--sft_base", str(tmp_path / "tuned"), *ADAPTERS]
    flags += ["--num_steps", "1", "--train_mini_batch_size", "0"]
    assert launcher.run(tmp_path, *flags) == 0, said(tmp_path)
    assert abs(read_jsonl(tmp_path / NAME / "metrics.jsonl")[0]["kl"]) < 1e-6
    assert (tmp_path / "tuned" / "adapter" / "adapter_config.json").exists()


def test_a_sampler_that_adapters_do_not_reach_ends_the_run_before_it_trains(
    warm, launcher, tmp_path
):
    flags = ["--sft_base", str(warm), *ADAPTERS, "--sampler", "tests.e2e.test_lora_runs:Deaf"]
    assert launcher.run(tmp_path, *flags) == 1, said(tmp_path)
    refusal = "adapters do not reach the sampler: with random ones its log-probs are"
    assert refusal in said(tmp_path)
    assert not (tmp_path / NAME).exists()
