"""RL computes without what a model does at random in training mode, of any family; SFT computes
with it, repeatably."""

import pytest
import torch
from command_line import exit_code
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    StableLmConfig,
)

from alignment import train_rl
from alignment.core.records import Batch, Distribution
from alignment.core.tokens import collate
from alignment.model.dropout import random_settings
from alignment.model.loading import load_tokenizer
from alignment.policy.micro_batches import MicroBatchSize
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
NARROW = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
FAMILIES = {
    "gpt2": GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2),
    "opt": OPTConfig(
        **SIZES,
        ffn_dim=48,
        word_embed_proj_dim=32,
        layerdrop=0.3,
        activation_dropout=0.2,
        dropout=0.1,
    ),
    "falcon": FalconConfig(**SIZES, hidden_dropout=0.2, attention_dropout=0.1),
    "phi": PhiConfig(**NARROW, embd_pdrop=0.2, resid_pdrop=0.3),
    "stablelm": StableLmConfig(**NARROW, hidden_dropout=0.2),
    "llama": LlamaConfig(**NARROW, attention_dropout=0.4),
}
SETTINGS = {
    "gpt2": {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "opt": {"layerdrop": 0.3, "activation_dropout": 0.2, "dropout": 0.1},
    "falcon": {"hidden_dropout": 0.2, "attention_dropout": 0.1},
    "phi": {"embd_pdrop": 0.2, "resid_pdrop": 0.3},
    "stablelm": {"hidden_dropout": 0.2},
    "llama": {"attention_dropout": 0.4},
}


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    """A folder with a model of a family that computes at random in training mode, named as the
    family."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(
            tmp_path / request.param
        )
    return tmp_path / request.param


def six_rows() -> Batch:
    """Three responses to each of two prompts."""
    draw = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(2, 64, (length,), generator=draw).tolist()

    prompts, responses = (
        [ids(9)] * 3 + [ids(7)] * 3,
        [ids(8) for _ in range(3)] + [ids(5) for _ in range(3)],
    )
    return collate(prompts, responses, 0)


def opened(folder, **settings) -> SingleDevicePolicy:
    return SingleDevicePolicy(
        PolicyConfig(str(folder), ("cpu",), "float32", micro_batch_tokens=64, **settings)
    )


def trained_log_probs(policy: SingleDevicePolicy, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs that gradients are computed with, and the gradient, whatever has been drawn
    before."""
    torch.manual_seed(seed)
    batch = six_rows()
    objective = Objective(
        lambda rows, log_probs, mask: (-log_probs.where(mask, 0).sum(), {}), entropy=False
    )
    log_probs_BT = torch.zeros(batch.labels.shape)
    for result in policy.accumulate(batch, range(6), objective):
        log_probs_BT[result.rows, : result.log_probs.shape[1]] = result.log_probs
    gradient = policy.gradient()
    policy.drop_gradient()
    return log_probs_BT, gradient


def test_rl_trains_on_the_log_probs_that_it_evaluates(folder):
    policy = opened(folder)
    first, second = (trained_log_probs(policy, seed) for seed in (1, 2))
    evaluated_BT = policy.log_probs(six_rows(), Distribution())
    torch.testing.assert_close(first[0], evaluated_BT, rtol=0, atol=1e-5)
    assert torch.equal(first[1], second[1])


def test_layers_computed_again_give_the_same_gradient_and_keep_less(folder, monkeypatch):
    kept, recomputed = opened(folder), opened(folder)
    monkeypatch.setattr(
        "alignment.policy.single_device.choose_micro_batch_tokens",
        lambda *given: MicroBatchSize(64, checkpointing=True),
    )
    recomputed.micro_batch_tokens = 0
    assert "gradient checkpointing" in recomputed.choose_micro_batch_tokens(longest=17)
    passes = []
    for policy in (kept, recomputed):
        layer = next(
            child
            for child in policy.model.get_decoder().children()
            if isinstance(child, torch.nn.ModuleList)
        )[0]
        norm = next(module for module in layer.modules() if "Norm" in type(module).__name__)
        counted = []
        norm.register_forward_hook(lambda *given, counted=counted: counted.append(1))
        passes.append((trained_log_probs(policy, 1), counted))
    ((log_probs, gradient), once), ((again, same_gradient), twice) = passes
    torch.testing.assert_close(again, log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        same_gradient, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max())
    )
    assert len(twice) == 2 * len(once)


def test_sft_computes_with_it_and_the_same_seed_repeats_it(folder):
    policy = opened(folder, dropout=True)
    (first, gradient), (again, same_gradient), (other, _) = (
        trained_log_probs(policy, seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and torch.equal(gradient, same_gradient)
    # Our packed attention leaves its own dropout out, and it is all that this Llama has.
    assert torch.equal(first, other) == (folder.name == "llama")


def test_the_settings_are_named(folder):
    assert random_settings(opened(folder).config) == SETTINGS[folder.name]


def test_a_model_without_has_none():
    assert random_settings(Qwen2Config()) == {}


@pytest.mark.slow
def test_a_run_from_gpt2_trains_and_says_what_is_off_once(
    tiny_folder, tmp_path, monkeypatch, capsys
):
    """With the dropout of its config the first step would stop it: the log-probs are .1 nats a
    token from the sampler's."""
    tokenizer = load_tokenizer(str(tiny_folder))
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = [
        "--num_steps",
        "2",
        "--prompts_per_rollout",
        "4",
        "--group_size",
        "4",
        "--max_new_tokens",
        "8",
    ]
    few = [
        "--max_problems",
        "2",
        "--reward",
        "random",
        "--max_sampler_mismatch",
        "1e-4",
        "--trackers",
        "--output_dir",
    ]
    model = ["--sft_base", "", "--model", str(folder)]
    monkeypatch.setenv("COLUMNS", "300")
    assert (
        exit_code(
            monkeypatch, train_rl.main, "alignment.train_rl", *model, *sizes, *few, str(tmp_path)
        )
        == 0
    )
    off = (
        "RL computes without the dropout of the model's config (resid_pdrop 0.1, embd_pdrop 0.1,"
        " attn_pdrop 0.1)"
    )
    assert capsys.readouterr().out.count(off) == 1
