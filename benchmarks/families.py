"""Families of transformers, tiny and with random weights, and how far our path is from each one's
own forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from alignment.core.records import Batch, SamplingConfig
from alignment.core.text import ResponseReader
from alignment.core.tokens import collate
from alignment.model.log_probs import get_response_log_probs
from alignment.model.packing import ATTENTION, OWN_ATTENTION, attention_named
from alignment.model.self_check import own_log_probs
from alignment.sampling.transformers import TransformersSampler, choose_decoding

WINDOW = 6  # shorter than every row below
SLIDING, FULL = "sliding_attention", "full_attention"
MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
FAMILIES = {
    "llama": {},
    "llama_biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen2_windowed": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {},
    "qwen3_moe": MOE,
    "mistral": {"sliding_window": WINDOW},
    "mixtral": dict(sliding_window=WINDOW, **MOE),
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
        "layer_types": [SLIDING, FULL],
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "final_logit_softcapping": 4.0,
        "layer_types": [SLIDING, FULL],
    },
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL]},
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "gpt_oss": dict(sliding_window=WINDOW, layer_types=[SLIDING, FULL], **MOE),
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]},
    "smollm3": {},
    "glm": {},
    "glm4": {},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {},
    "gpt_neox": {},
    "gpt2": {"n_inner": 48},
    "opt": {"ffn_dim": 48},
    "gpt_bigcode": {"n_inner": 48},
    "gptj": {"rotary_dim": 4},
    "bloom": {},
    "falcon": {"head_dim": None},
    "mpt": {},
    "codegen": {"rotary_dim": 4},
}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def family_config(name: str) -> PretrainedConfig:
    """The configuration of a tiny model of a family."""
    options = SHAPE | FAMILIES.get(name, {})
    kind = options.pop("model_type", name)
    return AutoConfig.for_model(
        kind, **{key: value for key, value in options.items() if value is not None}
    )


def family_model(name: str, std: float = 0.3) -> PreTrainedModel:
    """A model of a family with weights so large that windows, caps and scales make a difference."""
    config = family_config(name)
    has_table = AutoModelForCausalLM._model_mapping[type(config)]._supports_attention_backend
    attention = ATTENTION if has_table else OWN_ATTENTION
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return model


def rows_of(lengths: Sequence[tuple[int, int]], repeats: int) -> Batch:
    """`repeats` rows of each prompt; `lengths` are of prompt and longest response, the others end
    earlier."""

    def ids(number):
        return torch.randint(3, 64, (number,)).tolist()

    prompts = [prompt for length, _ in lengths for prompt in [ids(length)] * repeats]
    return collate(
        prompts, [ids(most - 2 * r) for _, most in lengths for r in range(repeats)], pad_token_id=0
    )


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss by all weights, flat."""
    model.zero_grad()
    loss.backward()
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in model.parameters()
        ]
    )


def training_differences(model: PreTrainedModel) -> tuple[float, float]:
    """Our log-probs against each row's own forward pass: the largest difference in nats, and that
    of gradients over the largest gradient."""
    torch.manual_seed(1)
    batch = rows_of([(11, 12), (3, 9), (5, 8)], repeats=3)
    mask = batch.response_mask
    own = []
    for ids, labels, response in zip(
        batch.input_ids.tolist(), batch.labels.tolist(), mask, strict=True
    ):
        first, last = response.nonzero()[0].item(), response.nonzero()[-1].item()
        own.append(own_log_probs(model, [(ids[: first + 1], labels[first : last + 1])]))
    own_N = torch.cat(own)
    weights_N = torch.randn(len(own_N))
    expected = gradients(model, weights_N @ own_N)
    ours_N = get_response_log_probs(model, batch.input_ids, batch.labels, response_mask=mask)[
        "log_probs"
    ].cpu()[mask]
    difference = gradients(model, weights_N @ ours_N) - expected
    return float((ours_N - own_N).detach().abs().max()), float(
        difference.abs().max() / expected.abs().max()
    )


class NoTokenizer:
    """What decoding by token ids needs of a tokenizer."""

    eos_token_id = pad_token_id = None


def decoding_difference(model: PreTrainedModel, tokens: int = 12) -> float:
    """Greedy tokens and their log-probs against each row's own forward pass: the largest difference
    in nats, infinite where a token is not its forward pass's most likely one (by more than
    rounding)."""
    sampler = TransformersSampler(model, NoTokenizer(), 64)
    sampler.responses = ResponseReader(sampler.tokenizer, ())
    choose_decoding(sampler)
    prompts = [
        row[:length]
        for row, length in zip(torch.randint(3, 64, (3, 11)).tolist(), (11, 4, 1), strict=True)
    ]
    sampling = SamplingConfig(n=2, temperature=0, max_new_tokens=tokens, stop=())
    waves = [[0], [1], [2]] if sampler.plain_path else [[0, 1, 2]]
    with torch.inference_mode():
        rows = [
            row
            for wave in waves
            for row in sampler.decode_wave(
                prompts, wave, torch.zeros(2 * len(wave), tokens), sampling, None
            )
        ]
        largest = 0.0
        for index, row in enumerate(rows):
            prompt = prompts[index // 2]
            with attention_named(model, OWN_ATTENTION):
                logits = model(
                    input_ids=torch.tensor([prompt + row.token_ids]), use_cache=False
                ).logits[0, len(prompt) - 1 : -1]
            best_T = logits.log_softmax(dim=-1).max(dim=-1).values
            own_T = own_log_probs(model, [(prompt, row.token_ids)])
            largest = max(
                largest,
                float((torch.tensor(row.log_probs) - own_T).abs().max()),
                float((best_T - own_T).max()),
            )
    return largest
