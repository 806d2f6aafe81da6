"""How far is our path through a model from its own forward pass, for each family of transformers?

Differences of log-probs, gradients and greedy decoding, of tiny models with random weights, in
float32. `benchmarks.architectures` prints them; tests bound them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from alignment.core.records import Batch, SamplingConfig
from alignment.core.text import ResponseReader
from alignment.core.tokens import collate
from alignment.model.kernels import fuse_layers, use_fused_kernels
from alignment.model.log_probs import get_response_log_probs
from alignment.model.packing import ATTENTION, OWN_ATTENTION, attention_named
from alignment.model.self_check import own_log_probs
from alignment.sampling.transformers import TransformersSampler, choose_decoding

WINDOW = 6  # shorter than every row below
SLIDING = "sliding_attention"
FULL = "full_attention"
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
MIXTURES = {
    "qwen3_moe_dense": {"model_type": "qwen3_moe", "mlp_only_layers": [0], **MOE},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": None,
    },
}
"""Mixtures of experts of which some layers have a dense or a shared MLP. DeepSeek-V3's router has a
buffer."""
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
    options = SHAPE | (FAMILIES | MIXTURES).get(name, {})
    model_type = options.pop("model_type", name)
    # None is for what a family's configuration does not take
    taken = {key: value for key, value in options.items() if value is not None}
    return AutoConfig.for_model(model_type, **taken)


def family_model(name: str, std: float = 0.3) -> PreTrainedModel:
    """A model of a family with weights so large that windows, caps and scales make a difference."""
    config = family_config(name)
    attention = OWN_ATTENTION
    # newer families look theirs up in a table
    if AutoModelForCausalLM._model_mapping[type(config)]._supports_attention_backend:
        attention = ATTENTION
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return model


def rows_of(lengths: Sequence[tuple[int, int]], repeats: int) -> Batch:
    """`repeats` rows of each prompt; `lengths` are of prompt and longest response, each further
    response is two tokens shorter."""
    prompts = []
    for prompt_tokens, _ in lengths:
        prompts += [random_ids(prompt_tokens)] * repeats
    responses = []
    for _, longest in lengths:
        responses += [random_ids(longest - 2 * number) for number in range(repeats)]
    return collate(prompts, responses, pad_token_id=0)


def random_ids(tokens: int) -> list[int]:
    """Ids of the families' vocabulary, none of which is a special token."""
    return torch.randint(3, 64, (tokens,)).tolist()


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss by all weights, flat."""
    model.zero_grad()
    loss.backward()
    flat = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        flat.append(gradient.flatten())
    return torch.cat(flat)


@dataclass(frozen=True)
class TrainingDifferences:
    """How far training's path through a model is from its own forward pass."""

    log_probs: float
    """The largest difference of a token's, in nats."""
    gradient: float
    """The largest difference of a weight's, over the largest gradient."""

    @property
    def largest(self) -> float:
        return max(self.log_probs, self.gradient)


def training_differences(model: PreTrainedModel) -> TrainingDifferences:
    """Our log-probs, and the gradient of a random sum of them, against each row's own forward
    pass."""
    torch.manual_seed(1)
    batch = rows_of([(11, 12), (3, 9), (5, 8)], repeats=3)
    mask_BT = batch.response_mask
    input_ids = batch.input_ids.tolist()
    labels = batch.labels.tolist()
    own = []
    for row, mask_T in enumerate(mask_BT):
        places = mask_T.nonzero().flatten().tolist()
        first = places[0]
        end = places[-1] + 1
        prompt = input_ids[row][: first + 1]
        own.append(own_log_probs(model, [(prompt, labels[row][first:end])]))
    own_N = torch.cat(own)
    weights_N = torch.randn(len(own_N))
    expected = gradients(model, weights_N @ own_N)
    outputs = get_response_log_probs(model, batch.input_ids, batch.labels, response_mask=mask_BT)
    ours_N = outputs["log_probs"].cpu()[mask_BT]
    difference = gradients(model, weights_N @ ours_N) - expected
    return TrainingDifferences(
        log_probs=float((ours_N - own_N).detach().abs().max()),
        gradient=float(difference.abs().max() / expected.abs().max()),
    )


def bfloat16_error(family: str, is_fused: bool, seed: int) -> float:
    """How far the gradient of a random sum of log-probs, with products in bfloat16, is from that in
    float64, relative to its norm; `is_fused`: by fused kernels."""
    flat = []
    for is_exact in (True, False):
        model = family_model(family, std=0.05)
        # The kernel for all experts at once has no float64.
        model.config._experts_implementation = "eager"
        if is_exact:
            model = model.double()
        elif is_fused:
            fuse_layers(model)
            use_fused_kernels(model)
        torch.manual_seed(seed)
        batch = rows_of([(11, 12), (3, 9), (5, 8)], repeats=3)
        weights = torch.randn(batch.labels.shape)
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact):
            log_probs = get_response_log_probs(model, **vars(batch))["log_probs"]
        flat.append(gradients(model, (weights.to(log_probs) * log_probs).sum()).double())
    exact, rounded = flat
    return float((rounded - exact).norm() / exact.norm())


class NoTokenizer:
    """What decoding by token ids needs of a tokenizer."""

    eos_token_id = None
    pad_token_id = None


def decoding_difference(model: PreTrainedModel, tokens: int = 12) -> float:
    """Greedy tokens and their log-probs against each row's own forward pass: the largest difference
    in nats, infinite where a token is not its forward pass's most likely one (by more than
    rounding)."""
    sampler = TransformersSampler(model, NoTokenizer(), 64)
    sampler.responses = ResponseReader(sampler.tokenizer, ())
    choose_decoding(sampler)
    ids = torch.randint(3, 64, (3, 11)).tolist()
    prompts = [ids[0], ids[1][:4], ids[2][:1]]
    sampling = SamplingConfig(n=2, temperature=0, max_new_tokens=tokens, stop=())
    waves = [[0, 1, 2]]
    if sampler.plain_path:
        waves = [[0], [1], [2]]
    largest = 0.0
    with torch.inference_mode():
        rows = []
        for wave in waves:
            uniforms = torch.zeros(sampling.n * len(wave), tokens)
            rows += sampler.decode_wave(prompts, wave, uniforms, sampling, None)
        for index, row in enumerate(rows):
            prompt = prompts[index // sampling.n]
            input_ids = torch.tensor([prompt + row.token_ids])
            with attention_named(model, OWN_ATTENTION):
                logits_BTV = model(input_ids=input_ids, use_cache=False).logits
            # place t has the log-prob of token t + 1
            best_T = logits_BTV[0, len(prompt) - 1 : -1].log_softmax(dim=-1).amax(dim=-1)
            own_T = own_log_probs(model, [(prompt, row.token_ids)])
            difference = float((torch.tensor(row.log_probs) - own_T).abs().max())
            shortfall = float((best_T - own_T).max())
            largest = max(largest, difference, shortfall)
    return largest
