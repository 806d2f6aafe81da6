"""Batched decoding over a Hugging Face model: prompts prefilled once a group, finished rows dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from alignment.log_probs import cumulative, sampling_logits
from alignment.records import Completion, Sampling
from alignment.samplers import encode_prompts
from alignment.tokens import pad_token_id

CACHE_BYTES = {"cpu": 2 * 2**30, "cuda": 16 * 2**30}  # keys and values of the rows in flight, at most
LIVE_SHARE = 0.8  # rows are dropped once fewer than this share of those in flight are unfinished


@dataclass
class _Row:
    """A response in the making."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool


class TransformersSampler:
    """A `Sampler` that runs the model itself.

    `model` may be the policy being trained (it is only read): `load_weights` then finds its own tensors and copies
    nothing. The model sits whole on one device.
    """

    def __init__(self, model: PreTrainedModel, tokenizer, context: int, policy_version: int = 0):
        self.model = model
        self.tokenizer = tokenizer
        self.context = context
        self.policy_version = policy_version
        self.restarts = 0
        self._device = model.get_input_embeddings().weight.device
        self._eos = {tokenizer.eos_token_id, *_as_list(model.generation_config.eos_token_id)} - {None}
        self._may_end: dict[tuple[str, ...], torch.Tensor] = {}

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy every weight over, in place, with a cast where the types differ."""
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named_tensors:
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor, non_blocking=True)
        self.policy_version = version

    def close(self) -> None:
        """Let go of the model."""
        self.model = None

    @torch.inference_mode()
    def sample(self, prompts: Sequence[str], sampling: Sampling) -> list[list[Completion]]:
        """See `Sampler.sample`. Each row has random numbers of its own, so waves and dropped rows change no other row."""
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        generator = torch.Generator().manual_seed(sampling.seed)
        uniforms = torch.rand(len(prompts), sampling.n, sampling.max_new_tokens, generator=generator)
        was_training = self.model.training
        self.model.eval()
        groups: list[list[Completion]] = [[] for _ in prompts]
        for wave in self._waves(encoded, sampling):
            rows = self._decode([encoded[i] for i in wave], uniforms[wave].flatten(0, 1).to(self._device), sampling)
            texts = self.tokenizer.batch_decode([row.token_ids for row in rows], skip_special_tokens=True)
            for position, (row, text) in enumerate(zip(rows, texts, strict=True)):
                index = wave[position // sampling.n]
                groups[index].append(self._completion(encoded[index], row, _up_to_stop(text, sampling.stop)))
        self.model.train(was_training)
        return groups

    def _completion(self, prompt_ids: list[int], row: _Row, text: str) -> Completion:
        return Completion(
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(row.token_ids),
            log_probs=tuple(row.log_probs),
            text=text,
            finish_reason="stop" if row.finished else "length",
            policy_version=self.policy_version,
        )

    def _waves(self, encoded: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Prompts cut into lots of similar length whose keys and values fit in the cache."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self.model.dtype.itemsize
        group_bytes = sampling.n * (max(map(len, encoded)) + sampling.max_new_tokens) * token_bytes
        size = max(1, CACHE_BYTES[self._device.type] // group_bytes)
        by_length = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        return [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def _decode(self, encoded: Sequence[Sequence[int]], uniforms: torch.Tensor, sampling: Sampling) -> list[_Row]:
        """Decode `sampling.n` rows of each prompt together; `uniforms` [rows, max_new_tokens] decide every draw."""
        width = max(map(len, encoded))
        capacity = width + sampling.max_new_tokens
        padding = torch.tensor([width - len(prompt) for prompt in encoded], device=self._device)
        visible = torch.arange(capacity, device=self._device)[None] >= padding[:, None]  # [prompts, capacity]
        cache = Cache(layers=[_PreallocatedLayer(capacity) for _ in range(self.model.config.num_hidden_layers)])
        logits = self._prefill(encoded, padding, visible, cache)

        cache.batch_repeat_interleave(sampling.n)
        logits, visible, padding = (t.repeat_interleave(sampling.n, dim=0) for t in (logits, visible, padding))
        padded = any(len(prompt) < width for prompt in encoded)
        may_end = self._tokens_that_may_end(sampling.stop)
        rows = [_Row([], [], False) for _ in range(len(encoded) * sampling.n)]
        live = list(range(len(rows)))  # the row that each line of the tensors belongs to
        for step in range(sampling.max_new_tokens):
            tokens, log_probs = draw(logits, uniforms[:, step], sampling)
            drawn = zip(live, tokens.tolist(), log_probs.tolist(), may_end[tokens].tolist(), strict=True)
            for index, token, log_prob, suspect in drawn:
                if not rows[index].finished:
                    rows[index].token_ids.append(token)
                    rows[index].log_probs.append(log_prob)
                    rows[index].finished = suspect and self._has_ended(rows[index].token_ids, sampling.stop)
            unfinished = [line for line, index in enumerate(live) if not rows[index].finished]
            if not unfinished or step + 1 == sampling.max_new_tokens:
                break
            if len(unfinished) < LIVE_SHARE * len(live):
                keep = torch.tensor(unfinished, device=self._device)
                live = [live[line] for line in unfinished]
                tokens, uniforms, visible, padding = (t[keep] for t in (tokens, uniforms, visible, padding))
                cache.batch_select_indices(keep)
            mask = visible[:, None, None, : width + step + 1] if padded else None
            logits = self._forward(tokens[:, None], mask, (width + step - padding)[:, None], cache)
        return rows

    def _prefill(self, encoded, padding: torch.Tensor, visible: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Fill the cache with the left-padded prompts and return the logits after each, [prompts, vocabulary]."""
        width = max(map(len, encoded))
        pad = pad_token_id(self.tokenizer)
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in encoded], device=self._device)
        place = torch.arange(width, device=self._device)
        # A padded query sees itself: attention with nothing to see would be NaN, and NaN would spread.
        mask = (place[:, None] >= place[None]) & visible[:, None, :width] | (place[:, None] == place[None])
        return self._forward(ids, mask[:, None], (place[None] - padding[:, None]).clamp(min=0), cache)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits after the last token of each line, [lines, vocabulary]."""
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _tokens_that_may_end(self, stop: tuple[str, ...]) -> torch.Tensor:
        """Bool [vocabulary]: tokens after which a response can be over, because they are EOS or complete a stop string.

        Decoding text at every step would cost more than a tiny model's forward pass; this table spares nearly all of it.
        """
        if stop not in self._may_end:
            size = self.model.get_output_embeddings().weight.shape[0]
            texts = self.tokenizer.batch_decode([[token] for token in range(size)])
            last_letters = {string[-1] for string in stop}
            flags = [token in self._eos or not last_letters.isdisjoint(text) for token, text in enumerate(texts)]
            self._may_end[stop] = torch.tensor(flags, device=self._device)
        return self._may_end[stop]

    def _has_ended(self, token_ids: list[int], stop: tuple[str, ...]) -> bool:
        if token_ids[-1] in self._eos:
            return True
        longest = max(map(len, stop), default=0)
        tail = self.tokenizer.decode(token_ids[-longest - 1 :], skip_special_tokens=True)
        return any(string in tail for string in stop)


def draw(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each line of `logits` [lines, vocabulary], by inverting the distribution's CDF at `uniforms` [lines].

    Returns (tokens [lines], their log-probabilities [lines] under the distribution drawn from). Greedy decoding draws
    from a point mass, whose log-probability says nothing; it reports the untempered model's instead.
    """
    if sampling.temperature == 0:
        log_probs = logits.float().log_softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        log_probs = sampling_logits(logits, sampling.temperature, sampling.top_p, sampling.top_k).log_softmax(dim=-1)
        cdf = cumulative(log_probs.exp())
        # right=True finds the first place where the CDF exceeds the target, which always has some probability.
        tokens = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(1)


def _up_to_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to and with the first stop string; the last token may carry letters beyond it."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]


class _PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values, [lines, heads, capacity, head size], written in place instead of grown by copying."""

    is_sliding = False

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], self.capacity, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.keys, self.values = (t.repeat_interleave(repeats, dim=0) for t in (self.keys, self.values))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.keys, self.values = self.keys[indices], self.values[indices]
