"""Every family against its own forward pass, row by row: log-probs, gradients, decoding; the
self-check; what is refused."""

import copy
import dataclasses
import json
import shutil

import pytest
import torch
from rollout_helpers import open_tiny
from transformers import (
    AutoConfig,
    BertConfig,
    BertLMHeadModel,
    Gemma3Config,
    MambaConfig,
    T5Config,
)

from alignment.core.records import Batch, Distribution, SamplingConfig
from alignment.model import attention, log_probs, packing, self_check
from alignment.model.device_map import partition_layers
from alignment.model.frozen import FrozenModel, MicroBatchedModel
from alignment.model.loading import load_config, load_model, load_tokenizer, spread
from alignment.model.log_probs import get_response_log_probs, sampling_logits
from alignment.model.packing import (
    OWN_ATTENTION,
    attention_named,
    take_plain_path,
    takes_plain_path,
)
from alignment.model.self_check import choose_path, self_check_mode
from alignment.model.shape import ModelShape
from alignment.policy.policy import Objective
from alignment.sampling import transformers as sampling_module
from alignment.sampling.transformers import TransformersSampler, choose_decoding
from alignment.system import terminal
from alignment.system.errors import UserError
from benchmarks.families import (
    FAMILIES,
    NoTokenizer,
    decoding_difference,
    family_model,
    gradients,
    rows_of,
    training_differences,
)
from tests.some_families import by_speed

PLAIN = {"stablelm", "gptj", "bloom", "falcon", "mpt", "codegen"}


@pytest.fixture(autouse=True)
def forget_lines():
    terminal.say_once.cache_clear()


@pytest.mark.parametrize("family", by_speed(FAMILIES))
def test_log_probs_gradients_and_decoding_are_those_of_the_models_own_forward_pass(family):
    model = family_model(family)
    choose_path(model)
    assert takes_plain_path(model) == (family in PLAIN)
    assert training_differences(model).largest < 2e-5
    assert decoding_difference(model) < 2e-5
    sampler = TransformersSampler(model, NoTokenizer(), 64)
    choose_decoding(sampler)
    assert sampler.plain_path == (family in PLAIN)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "llama"])
def test_pieces_of_the_queries_give_the_same(family, monkeypatch):
    """Windows, caps, sinks and grouped queries, five tokens at a time."""
    monkeypatch.setattr(attention, "QUERIES_AT_A_TIME", 5)
    assert training_differences(family_model(family)).largest < 2e-5


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "granite", "phi"])
def test_pieces_of_the_head_give_the_same(family, monkeypatch):
    monkeypatch.setattr(log_probs, "LOGITS_IN_MEMORY", 64 * 5)  # five rows at a time
    assert training_differences(family_model(family)).largest < 2e-5


@pytest.mark.parametrize(
    "distribution", [Distribution(0.7), Distribution(0.7, top_p=0.8), Distribution(1.3, top_k=5)]
)
def test_scales_and_caps_come_before_the_temperature(distribution):
    """Cohere's scale is folded into the temperature, Gemma's cap is not: both give the distribution
    of their own logits."""
    for family in ("cohere", "granite", "gemma2"):
        model = family_model(family)
        ids = torch.randint(3, 64, (2, 14), generator=torch.Generator().manual_seed(0))
        labels, mask = ids.roll(-1, dims=1), torch.ones(2, 14, dtype=torch.bool)
        ours = get_response_log_probs(model, ids, labels, True, mask, **vars(distribution))
        with attention_named(model, OWN_ATTENTION):
            logits = model(ids).logits.flatten(0, 1)
        kept = sampling_logits(logits, *vars(distribution).values(), keep=labels.flatten())
        expected = kept.log_softmax(-1).gather(-1, labels.flatten()[:, None]).view(2, 14)
        torch.testing.assert_close(ours["log_probs"], expected, rtol=0, atol=2e-5)
        entropy = (
            torch.distributions.Categorical(logits=logits / distribution.temperature)
            .entropy()
            .view(2, 14)
        )
        torch.testing.assert_close(ours["token_entropy"], entropy, rtol=0, atol=2e-5)


def test_the_plain_path_gives_what_the_packed_one_gives():
    """Micro-batches of the plain path count every row's prompt: 160 tokens are four rows of 40, and
    15 rows of one packed."""
    model = family_model("llama")
    torch.manual_seed(0)
    batch = rows_of([(20, 20), (20, 18)], repeats=4)
    batch = Batch(input_ids=batch.input_ids, labels=batch.labels, response_mask=batch.response_mask)
    packed = MicroBatchedModel(model, torch.float32, 160).log_probs(batch, Distribution(0.8))
    take_plain_path(model)
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    again = MicroBatchedModel(model, torch.float32, 160).log_probs(batch, Distribution(0.8))
    torch.testing.assert_close(again, packed, rtol=0, atol=2e-5)
    assert len(sizes) == 2 and max(sizes) <= 160


FAULTS = {
    "mistral": {"window": None},
    "gemma2": {"soft_cap": None},
    "gpt_oss": {"sinks": None},
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAULTS)
def test_the_self_check_notices_what_attention_leaves_out(family, dtype, monkeypatch, capsys):
    """In bfloat16 as in float32: rounding alone makes four times the difference of Gemma's cap,
    0.01 nats a token."""
    real = packing.AttentionRule
    monkeypatch.setattr(
        packing, "AttentionRule", lambda *told: dataclasses.replace(real(*told), **FAULTS[family])
    )
    model = family_model(family).to(dtype)
    sampler = TransformersSampler(model, NoTokenizer(), 64)
    choose_decoding(sampler)
    assert sampler.plain_path and not takes_plain_path(model)
    choose_path(model)
    assert takes_plain_path(model)
    assert (
        dtype != torch.float32
        or max(training_differences(model).largest, decoding_difference(model)) < 2e-5
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(
        line.startswith(f"{family}: log-probs of ") and "nats a token" in line for line in lines
    )


@pytest.mark.parametrize("family", ["mixtral", "smollm3"])
def test_rounding_to_16_bits_is_no_fault(family, capsys):
    """Weights so large that rounding makes more difference than most faults do; the check does not
    see it."""
    model = family_model(family, std=1.0).bfloat16()
    torch.manual_seed(0)
    batch = rows_of([(11, 12), (3, 9)], repeats=2)
    padded = Batch(batch.input_ids, batch.labels, batch.response_mask)
    packed = MicroBatchedModel(model, torch.bfloat16, 1000).log_probs(padded, Distribution())
    choose_path(model)
    sampler = TransformersSampler(model, NoTokenizer(), 64)
    choose_decoding(sampler)
    assert not takes_plain_path(model) and not sampler.plain_path and not capsys.readouterr().err
    take_plain_path(model)
    own = MicroBatchedModel(model, torch.bfloat16, 1000).log_probs(padded, Distribution())
    assert (own - packed)[batch.response_mask].abs().mean() > 0.15


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "gpt2", "gpt_oss"])
def test_a_check_computes_in_float32_and_leaves_the_weights_in_16_bits(family):
    model = family_model(family).bfloat16()
    whole = copy.deepcopy(model).float()
    stored = {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    batch, log_probs = rows_of([(9, 8), (3, 5)], repeats=2), []
    for each in (model, whole):
        with self_check_mode(each):
            log_probs.append(
                get_response_log_probs(
                    each, batch.input_ids, batch.labels, response_mask=batch.response_mask
                )
            )
            log_probs[-1]["own"] = self_check.own_log_probs(each, [([3, 4], [5, 6]), ([7], [8])])
    assert all(torch.equal(log_probs[0][name], log_probs[1][name]) for name in ("log_probs", "own"))
    assert {name: (p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == stored


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_the_self_check_notices_what_the_head_leaves_out(family, monkeypatch, capsys):
    model = family_model(family)
    monkeypatch.setattr(log_probs, "logit_scale_and_cap", lambda config: (1.0, None))
    choose_path(model)
    assert takes_plain_path(model) and "nats a token" in capsys.readouterr().err


def test_no_path_that_agrees_is_refused(monkeypatch):
    model = family_model("mistral")
    monkeypatch.setattr(
        log_probs, "padded_logits", lambda model, ids, mask: torch.zeros(int(mask.sum()), 64)
    )
    take_plain_path(model)
    with pytest.raises(
        UserError,
        match="mistral cannot be trained: log-probs of padded rows differ by [0-9.]+ nats a token",
    ):
        choose_path(model)
    sampler = TransformersSampler(model, NoTokenizer(), 64)
    monkeypatch.setattr(
        sampling_module._OwnDecoding, "next_logits", lambda self, tokens: torch.zeros(2, 64)
    )
    with pytest.raises(UserError, match="mistral cannot be sampled from: .* try --sampler vllm"):
        choose_decoding(sampler)


def test_a_check_leaves_a_model_and_the_generators_as_they_are():
    model = family_model("gemma2").train()
    before = torch.get_rng_state(), model.config.to_dict()
    windows = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert windows == [6, None]
    with self_check_mode(model):
        assert (
            model.config.sliding_window == 4
            and model.model.layers[0].self_attn.sliding_window == 4
            and not model.training
        )
    choose_path(model)
    choose_decoding(TransformersSampler(model, NoTokenizer(), 64))
    assert (
        torch.equal(torch.get_rng_state(), before[0])
        and model.config.to_dict() == before[1]
        and model.training
    )
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == windows


def test_prompts_of_a_model_without_attention_are_cut_into_waves():
    """RWKV has no attention heads, by which the bytes of a token are counted."""
    sampler = TransformersSampler(family_model("rwkv"), NoTokenizer(), 64)
    assert sorted(sum(sampler.cut_into_waves([[3, 4], [5]], SamplingConfig(n=2)).prompts, [])) == [
        0,
        1,
    ]


REFUSED = {
    "encoder and a decoder": lambda: T5Config(),
    "nests its text model": lambda: Gemma3Config(),
    "does not say how many tokens": lambda: MambaConfig(),
    "no family that transformers loads": lambda: AutoConfig.for_model("vit"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_configurations_of_no_causal_language_model_are_refused(reason, tmp_path):
    REFUSED[reason]().save_pretrained(tmp_path)
    for load in (
        load_config,
        load_tokenizer,
        lambda folder: load_model(folder, ("cpu",), torch.float32),
    ):
        with pytest.raises(UserError, match=reason):
            load(str(tmp_path))


@pytest.mark.parametrize(
    ("std", "dtype"), [(0.5, torch.float32), (0.15, torch.float32), (0.15, torch.bfloat16)]
)
def test_a_model_that_sees_later_tokens_is_refused(std, dtype):
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    torch.manual_seed(0)
    model = BertLMHeadModel(BertConfig(**shape, initializer_range=std)).to(dtype)
    with pytest.raises(UserError, match="bert sees later tokens"):
        choose_path(model)


def test_a_forward_pass_that_fails_for_some_rows_is_not_taken_for_one_that_sees_later_tokens():
    model = family_model("llama")

    def need_seventeen_tokens(module, args, kwargs):
        kwargs["input_ids"][0, 16]

    model.register_forward_pre_hook(need_seventeen_tokens, with_kwargs=True)
    with pytest.raises(
        UserError, match="llama's own forward pass fails .index 16 is out of bounds"
    ):
        choose_path(model)


def test_a_folder_is_checked_once_a_process(tmp_path, monkeypatch):
    """Whatever the type of its weights; another folder, and the same with another model, are
    checked for themselves."""
    checks = []
    own = self_check.own_log_probs
    monkeypatch.setattr(
        self_check, "own_log_probs", lambda *arguments: checks.append(1) or own(*arguments)
    )

    def number(family: str, folder: str, dtype=torch.float32, plain: bool = False) -> int:
        if not (tmp_path / folder).exists():
            family_model(family).save_pretrained(tmp_path / folder)
        before = len(checks)
        assert takes_plain_path(load_model(str(tmp_path / folder), ("cpu",), dtype)) == plain
        return len(checks) - before

    first = number("llama", "a")
    assert first and number("llama", "a") == number("llama", "a", torch.bfloat16) == 0
    FrozenModel(str(tmp_path / "a"), "cpu", torch.bfloat16)
    assert len(checks) == first
    assert number("llama", "b") == first
    shutil.rmtree(tmp_path / "a")
    assert number("qwen2", "a") == first
    assert number("bloom", "c", plain=True) and number("bloom", "c", plain=True) == 0


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    load_tokenizer(str(tiny_folder))
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with pytest.raises(
        UserError, match="token ids up to [0-9]+, its config.json says vocab_size 50"
    ):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt_oss"])
def test_a_forward_pass_without_a_layout_leaves_nothing_out_in_silence(family):
    with pytest.raises(
        ValueError, match="attention without a layout has no window, soft cap or sinks"
    ):
        family_model(family)(torch.arange(9)[None])


def test_plain_decoding_draws_what_shared_decoding_draws(sampler):
    prompts = ["User: What is 2 + 3?", "What", "User: 4 * 5"]
    sampling = SamplingConfig(n=3, max_new_tokens=12, stop=("7",), seed=3)
    shared = sampler.sample(prompts, sampling)
    sampler.plain_path = True
    for ours, theirs in zip(sampler.sample(prompts, sampling), shared, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (
                other.token_ids,
                other.text,
                other.finish_reason,
            )
            torch.testing.assert_close(
                torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-4
            )


def test_a_check_of_damaged_weights_says_nothing_of_whole_ones(monkeypatch):
    monkeypatch.setattr(self_check, "OUTCOMES", {})
    model = family_model("stablelm")  # which takes the plain path
    head, good = (
        model.get_output_embeddings().weight,
        model.get_output_embeddings().weight.detach().clone(),
    )
    head.data.fill_(torch.nan)
    assert (
        not self_check.run_check_once("path", model, lambda: choose_path(model))
        and not self_check.OUTCOMES
    )
    head.data.copy_(good)
    assert (
        self_check.run_check_once("path", model, lambda: choose_path(model))
        and len(self_check.OUTCOMES) == 1
    )


def out_of_a_gpus_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_the_hosts_memory():
    return torch.empty(2**60)


@pytest.mark.parametrize("compute", [out_of_a_gpus_memory, out_of_the_hosts_memory])
def test_memory_that_runs_out_in_a_check_is_not_the_families_fault(compute):
    model = family_model("llama")
    with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory"):
        self_check.disagreement(torch.zeros(3), compute)
    model.forward = lambda **inputs: compute()
    with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory"):
        choose_path(model)


@pytest.mark.parametrize("family", by_speed(FAMILIES.keys() - {"gpt_bigcode"}))
def test_a_split_model_computes_what_the_whole_one_does(family):
    """Two names for the CPU stand for two devices: all moves are made."""
    model = family_model(family)
    device_map = partition_layers(ModelShape.of(model), ("cpu", "cpu:0"))
    assert set(device_map.values()) == {"cpu", "cpu:0"}
    choose_path(spread(model, device_map))
    assert takes_plain_path(model) == (family in PLAIN)
    assert training_differences(model).largest < 2e-5


def log_prob_sum(rows, log_probs_bt, mask_bt):
    return (log_probs_bt * mask_bt).sum(), {}


def test_a_policy_on_the_plain_path_has_the_packed_ones_gradient(tiny_folder):
    policy = open_tiny(tiny_folder)
    policy.micro_batch_tokens = 120
    torch.manual_seed(0)
    batch = rows_of([(20, 20), (10, 18)], repeats=3)
    objective = Objective(log_prob_sum, Distribution(0.9))
    found, tokens = [], []
    for take in (lambda model: None, take_plain_path):
        take(policy.model)
        results = list(policy.accumulate(batch, range(6), objective))
        tokens.append(sum(result.sums["tokens"] for result in results))
        found.append(policy.gradient())
        policy.drop_gradient()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5 * float(found[0].abs().max()))
    # The plain path computes 2 x 20 and 2 x 10 tokens of prompts more.
    assert tokens[1] - tokens[0] == 60


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "cohere2"])
def test_layers_that_are_run_again_in_backward_give_the_same_gradient(family):
    model = family_model(family)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(0)
    batch = rows_of([(9, 8)], repeats=3)
    found = []
    for checkpointing in (True, False):
        if not checkpointing:
            model.gradient_checkpointing_disable()
        out = get_response_log_probs(
            model, batch.input_ids, batch.labels, response_mask=batch.response_mask
        )
        found.append(gradients(model, out["log_probs"].sum()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5 * float(found[1].abs().max()))
