"""Batched decoding with a Hugging Face model. The n responses to a prompt share the prompt's keys
and values, and finished responses are dropped from the batch.

A "row" is a response; a "line" is a line of the tensors, one for each row that is still decoded. A
model for which shared prompts are not exact takes the "plain path": its own attention and cache,
one prompt at a time."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from alignment.core.records import Completion, SamplingConfig
from alignment.core.text import ResponseReader
from alignment.model.activations import CACHE_BYTES, key_value_bytes
from alignment.model.attention import soft_capped
from alignment.model.huggingface import Cache, DynamicCache, PreTrainedModel, StaticLayer
from alignment.model.loading import copy_weights, end_ids_of, first_device, load_model, mlp_width
from alignment.model.log_probs import cumulative, head_logits, sampling_logits
from alignment.model.packing import (
    OWN_ATTENTION,
    attention_by_layout,
    attention_named,
    pack,
    takes_plain_path,
)
from alignment.model.parallel_micro_batches import PARALLEL, may_run_in_parallel, run_parallel
from alignment.model.self_check import (
    PROMPT_TOKENS,
    disagreement,
    own_log_probs,
    random_pieces,
    run_check_once,
    self_check_mode,
)
from alignment.policy.policy import Policy
from alignment.sampling.arrival import HeldWeights, NamedTensors, weight_checksum
from alignment.sampling.sampler import Completions, OnResponseEnd, SamplerConfig, encode_prompts
from alignment.system.errors import UserError
from alignment.system.terminal import say_once

# The sampler drops finished rows once fewer than this share of the rows in flight are unfinished:
# dropping copies the keys and values of the rows that stay.
LIVE_SHARE = 0.8
# Tokens of a response in the self-check: more than `self_check.WINDOW`, its attention window.
CHECK_TOKENS = 6
# Tokens of each row that are drawn before the host looks at them. Each look waits for a GPU.
STEPS_UNSEEN = {
    "cpu": 1,
    "cuda": 16,
}
# A CPU gets one thread for so many floating-point operations of a layer's largest matrix product
# (benchmarks/decoding.md).
WORK_A_THREAD = 2**25
# Waves are decoded in parallel if that product of each has so many floating-point operations.
WORK_A_WAVE = 2**24


@dataclass
class _Row:
    """A response that is being decoded."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool


class Waves(NamedTuple):
    """Prompts in waves. All rows of a wave are decoded as one batch."""

    prompts: list[list[int]]  # For each wave, the indices of its prompts.
    parallel: int  # Waves that are decoded at once, each by its share of torch's threads.


class DrawnTokens(NamedTuple):
    """One token of each line, and its log-probs under the distribution that it was drawn from."""

    token_ids: torch.Tensor  # int64 [lines]
    log_probs: torch.Tensor  # [lines], in nats


class TransformersSampler:
    """Samples from a model on one device. The model may be the policy's own: the sampler only reads
    it, and `load_weights` then copies nothing."""

    def __init__(self, model: PreTrainedModel, tokenizer, context: int, policy_version: int = 0):
        self._model: PreTrainedModel | None = model
        self.tokenizer = tokenizer
        self.context = context
        self.policy_version = policy_version
        self.restarts = 0
        self.dtype = model.dtype
        self.plain_path = takes_plain_path(model)
        self.responses = ResponseReader(tokenizer, end_ids_of(model, tokenizer))
        self._device = first_device(model)

    @property
    def model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("the sampler is closed")
        return self._model

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        copy_weights(self.model, named_tensors)
        self.policy_version = version

    def weight_checksums(self, version: int) -> HeldWeights:
        held = {}
        for name, tensor in self.model.named_parameters():
            held[name] = ([name], weight_checksum(tensor, version, self.dtype))
        return held

    def close(self) -> None:
        """Let go of the model."""
        self._model = None

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        """See `Sampler.sample`. Each row has random numbers of its own, so a row does not depend on
        its wave or on when other rows finish."""
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        uniforms = draw_uniforms(len(prompts), sampling)
        stopped = threading.Event()

        @torch.inference_mode()  # Each thread has a mode of its own.
        def decode(wave: Sequence[int]) -> list[_Row]:
            uniforms_of_rows = uniforms[wave].flatten(0, 1).to(self._device)
            return self.decode_wave(
                encoded, wave, uniforms_of_rows, sampling, on_response_end, stopped
            )

        was_training = self.model.training
        self.model.eval()
        groups: Completions = [[] for _ in prompts]
        waves = self.cut_into_waves(encoded, sampling)
        decoded = run_parallel(decode, waves.prompts, waves.parallel, stop=stopped.set)
        for wave, rows in zip(waves.prompts, decoded, strict=True):
            for number, row in enumerate(rows):
                prompt = wave[number // sampling.n]
                groups[prompt].append(self._completion(encoded[prompt], row, sampling.stop))
        self.model.train(was_training)
        return groups

    def _completion(
        self, prompt_ids: Sequence[int], row: _Row, stop: tuple[str, ...]
    ) -> Completion:
        finish_reason: Literal["stop", "length"] = "stop" if row.finished else "length"
        return Completion(
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(row.token_ids),
            log_probs=tuple(row.log_probs),
            text=self.responses.text(row.token_ids, stop),
            finish_reason=finish_reason,
            policy_version=self.policy_version,
        )

    def cut_into_waves(self, encoded: Sequence[Sequence[int]], sampling: SamplingConfig) -> Waves:
        """Cut prompts, given as token ids, into waves of similar length.

        Several waves are decoded at once where each has enough work. The keys and values of all
        that are decoded at once fit in the cache."""
        longest = max(len(prompt_ids) for prompt_ids in encoded)
        token_bytes = key_value_bytes(self.model.config, self.model.dtype.itemsize)
        group_bytes = (longest + sampling.n * sampling.max_new_tokens) * token_bytes
        fitting_groups = max(1, CACHE_BYTES[self._device.type] // group_bytes)
        if self.plain_path:
            # The plain path cannot left-pad, so prompts of unequal lengths cannot share a batch.
            size = 1
            parallel = 1
        elif may_run_in_parallel(self.model):
            parallel = min(PARALLEL, torch.get_num_threads())
            size = min(fitting_groups // parallel, math.ceil(len(encoded) / parallel))
        else:
            parallel = 1
            size = min(fitting_groups, len(encoded))
        if parallel > 1 and largest_product(self.model, size * sampling.n) < WORK_A_WAVE:
            parallel = 1
            size = fitting_groups
        by_length = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
        waves = [by_length[start : start + size] for start in range(0, len(by_length), size)]
        return Waves(waves, parallel)

    def decode_wave(
        self,
        prompts: Sequence[Sequence[int]],
        wave: Sequence[int],
        uniforms: torch.Tensor,
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
        stopped: threading.Event | None = None,
    ) -> list[_Row]:
        """Decode `sampling.n` rows for each prompt of a wave; `wave` has the indices of its prompts
        in `prompts`.

        The random numbers `uniforms` [rows, max_new_tokens] decide every draw. Once `stopped` is
        set, all rows are cut short."""
        decoding = self._start_decoding([prompts[number] for number in wave], sampling)
        logits = decoding.first_logits
        rows = [_Row([], [], finished=False) for _ in range(len(wave) * sampling.n)]
        live = list(range(len(rows)))  # For each line of the tensors, the number of its row.
        unseen: list[DrawnTokens] = []  # Drawn, but not yet copied to the host.

        def report_ends(numbers: Sequence[int]) -> None:
            if on_response_end is None:
                return
            for number in numbers:
                text = self.responses.text(rows[number].token_ids, sampling.stop)
                on_response_end(wave[number // sampling.n], text)

        with few_threads(self.model, len(rows)):
            for step in range(sampling.max_new_tokens):
                drawn = draw(logits, uniforms[:, step], sampling)
                unseen.append(drawn)
                tokens = drawn.token_ids
                is_last = step + 1 == sampling.max_new_tokens
                if not is_last and len(unseen) < STEPS_UNSEEN[self._device.type]:
                    logits = decoding.next_logits(tokens)
                    continue
                under_way = [number for number in live if not rows[number].finished]
                self._extend_rows([rows[number] for number in live], unseen, sampling.stop)
                unseen = []
                report_ends([number for number in under_way if rows[number].finished or is_last])
                unfinished = [line for line, number in enumerate(live) if not rows[number].finished]
                is_stopped = stopped is not None and stopped.is_set()
                if is_last or is_stopped or not unfinished:
                    break
                few_are_left = len(unfinished) < LIVE_SHARE * len(live)
                # A model's own cache may be unable to drop lines.
                if few_are_left and isinstance(decoding, _SharedDecoding):
                    keep = torch.tensor(unfinished, device=self._device)
                    live = [live[line] for line in unfinished]
                    tokens = tokens[keep]
                    uniforms = uniforms[keep]
                    decoding.keep_lines(keep, [number // sampling.n for number in live])
                logits = decoding.next_logits(tokens)
        return rows

    def _start_decoding(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> "_SharedDecoding | _OwnDecoding":
        if self.plain_path:
            return _OwnDecoding(self.model, prompts, sampling)
        return _SharedDecoding(self.model, prompts, sampling)

    def _extend_rows(
        self, rows: Sequence[_Row], drawn: Sequence[DrawnTokens], stop: tuple[str, ...]
    ) -> None:
        """Add to each row the tokens that were drawn for it, up to the row's end. Waits for the
        device.

        The device draws several tokens before the host looks at them, so there may be tokens after
        a row's end; these are dropped."""
        token_ids = torch.stack([step.token_ids for step in drawn], dim=1).tolist()
        log_probs = torch.stack([step.log_probs for step in drawn], dim=1).tolist()
        for row, row_ids, row_log_probs in zip(rows, token_ids, log_probs, strict=True):
            for token, log_prob in zip(row_ids, row_log_probs, strict=True):
                if row.finished:
                    break
                row.token_ids.append(token)
                row.log_probs.append(log_prob)
                row.finished = self.responses.is_finished(row.token_ids, stop)


def draw_uniforms(prompts: int, sampling: SamplingConfig) -> torch.Tensor:
    """Random numbers [prompts, n, max_new_tokens], uniform on [0, 1).

    Prompts are numbered from `sampling.first_prompt`. A prompt's random numbers depend on its
    number and the seed alone, so splitting the prompts over several calls changes no draw."""
    generator = torch.Generator().manual_seed(sampling.seed)
    end = sampling.first_prompt + prompts
    uniforms = torch.rand(end, sampling.n, sampling.max_new_tokens, generator=generator)
    return uniforms[sampling.first_prompt :]


class _SharedDecoding:
    """Decodes `sampling.n` lines for each of G prompts, and stores each prompt's keys and values
    once.

    The model's attention calls `attend` of this object (`attention_by_layout`). Each of the L lines
    has one query token, which sees the prompt of its group and then the line's own earlier tokens.
    Attention to a prompt is one matrix product for the whole group: its lines' queries stand in
    the group's M seats. M is the number of lines of the largest group, so other groups have empty
    seats.

    Axes: G groups, M seats of a group, C = G * M seats in all, L lines, P tokens of the longest
    prompt, T tokens of a line so far, H heads of keys, R heads of queries for each of them, D size
    of a head, S = M * R queries of a group, X the size of what is moved between lines and seats."""

    def __init__(
        self, model: PreTrainedModel, encoded: Sequence[Sequence[int]], sampling: SamplingConfig
    ):
        device = first_device(model)
        self.model = model
        self.applied = []  # `attention_by_layout` checks that `attend` was called.
        packing = pack([(tuple(prompt_ids), ()) for prompt_ids in encoded])
        cache = DynamicCache()
        input_ids = packing.input_ids_1N.to(device)
        position_ids = packing.position_ids_1N.to(device)
        hidden_NE = self._hidden(input_ids, position_ids, cache, packing)[0]
        # The prompts are packed into one sequence of N tokens; place of token p of prompt g in it.
        places_GP = packing.spots_BT.to(device)
        lengths_G = torch.tensor([len(prompt_ids) for prompt_ids in encoded], device=device)
        last_places_G = places_GP.gather(1, lengths_G[:, None] - 1).squeeze(1)

        def by_prompt(packed_1HND: torch.Tensor) -> torch.Tensor:
            """[1, H, N, D] -> [G, H, P, D]."""
            chosen_HND = packed_1HND[0].index_select(1, places_GP.flatten())
            return chosen_HND.unflatten(1, places_GP.shape).transpose(0, 1).contiguous()

        filled_layers: list[Any] = cache.layers  # The prompts' keys and values of each layer.
        self.keys = [by_prompt(layer.keys) for layer in filled_layers]
        self.values = [by_prompt(layer.values) for layer in filled_layers]
        # The padding behind each prompt.
        self.outside_GP = torch.arange(places_GP.shape[1], device=device) >= lengths_G[:, None]
        self._give_seats(torch.arange(len(encoded)).repeat_interleave(sampling.n).tolist())
        self.positions = lengths_G.repeat_interleave(sampling.n)
        self.cache = Cache(
            layers=[_PreallocatedLayer(sampling.max_new_tokens) for _ in cache.layers]
        )
        logits_GV = head_logits(model, hidden_NE[last_places_G])
        self.first_logits = logits_GV.repeat_interleave(sampling.n, dim=0)

    def keep_lines(self, keep: torch.Tensor, groups: Sequence[int]) -> None:
        """Drop all lines except `keep` [L], whose groups are `groups` [L]."""
        self.positions = self.positions[keep]
        self.cache.batch_select_indices(keep)
        self._give_seats(groups)

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [lines, vocabulary] after one more token of each line."""
        hidden = self._hidden(tokens[:, None], self.positions[:, None], self.cache, self)[:, -1]
        self.positions = self.positions + 1
        return head_logits(self.model, hidden)

    def _hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Cache, layout: Any
    ) -> torch.Tensor:
        """The last layer's hidden states [rows, tokens, E]. `cache` gets the keys and values."""
        with attention_by_layout(self.model, layout):
            outputs = self.model.get_decoder()(
                input_ids=input_ids,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                layout=layout,
            )
        return outputs.last_hidden_state

    def _give_seats(self, groups_L: Sequence[int]) -> None:
        """Give each line a seat in its group; `groups_L` has the group of each line, in ascending
        order."""
        device = self.outside_GP.device
        number_of_groups = len(self.outside_GP)
        lines_G = torch.tensor(groups_L).bincount(minlength=number_of_groups).tolist()
        most = max(lines_G)
        seats: list[int] = []
        for lines in lines_G:
            seats += range(lines)
        # The seat of each line among all seats, and the line of each seat. An empty seat gets the
        # queries of line 0; its results are never read.
        self.seat_L = torch.tensor(
            [group * most + seat for group, seat in zip(groups_L, seats, strict=True)],
            device=device,
        )
        lines_L = torch.arange(len(groups_L), device=device)
        line_C = torch.zeros(number_of_groups * most, dtype=torch.int64, device=device)
        self.line_GM = line_C.scatter(0, self.seat_L, lines_L).view(-1, most)
        # Where every seat is taken, lines are in the order of seats: nothing has to be gathered.
        self.full = seats == list(range(most)) * number_of_groups

    def attend(self, module, query, key, value, rule) -> torch.Tensor:
        """Attention of the lines' latest tokens, [L, heads, 1, D] -> [L, 1, heads, D]; see
        `attention_by_layout`. R heads of queries share each of the H heads of keys. `rule` has the
        layer's scaling, window, soft cap and softmax."""
        keys_GHPD = self.keys[module.layer_idx]
        values_GHPD = self.values[module.layer_idx]
        lines, heads, drawn, _ = key.shape
        query_LHRD = query.view(lines, heads, -1, query.shape[-1]) * rule.scaling

        # Scores of the prompt's keys, computed by group, and of the line's own T keys.
        prompt_scores_GHSP = soft_capped(
            self._by_group(query_LHRD) @ keys_GHPD.transpose(2, 3), rule.soft_cap
        )
        outside_GP = self._unseen_prompt(drawn, rule.window)
        prompt_scores_LHRP = self._by_line(
            prompt_scores_GHSP.masked_fill(outside_GP[:, None, None], -torch.inf)
        )
        own_scores_LHRT = soft_capped(query_LHRD @ key.transpose(2, 3), rule.soft_cap)
        if rule.window is not None and drawn > rule.window:
            before_window_T = torch.arange(drawn, device=key.device) < drawn - rule.window
            own_scores_LHRT = own_scores_LHRT.masked_fill(before_window_T, -torch.inf)

        # One softmax over both, then the weighted sum of both's values.
        scores = torch.cat([prompt_scores_LHRP, own_scores_LHRT], dim=3)
        weights = rule.softmax(scores).to(value.dtype)
        prompt_weights_LHRP, own_weights_LHRT = weights.split(
            [prompt_scores_LHRP.shape[3], drawn], dim=3
        )
        from_prompt_LHRD = self._by_line(self._by_group(prompt_weights_LHRP) @ values_GHPD)
        attended_LHRD = from_prompt_LHRD + own_weights_LHRT @ value
        return attended_LHRD.flatten(1, 2)[:, None]

    def _unseen_prompt(self, drawn: int, window: int | None) -> torch.Tensor:
        """Mask [G, P] of the prompts' places that a line's latest token does not see: padding, and
        what lies before its window. The token is the `drawn`-th of its line."""
        if window is None:
            return self.outside_GP
        # Token p of a prompt of length l is l - p + drawn - 1 positions before the latest one.
        places_P = torch.arange(self.outside_GP.shape[1], device=self.outside_GP.device)
        lengths_G = (~self.outside_GP).sum(dim=1)
        return self.outside_GP | (places_P <= lengths_G[:, None] + drawn - 1 - window)

    def _by_group(self, lines_LHRX: torch.Tensor) -> torch.Tensor:
        """From lines to seats: [L, H, R, X] -> [G, H, M * R, X]."""
        if self.full:
            seats_GMHRX = lines_LHRX.unflatten(0, self.line_GM.shape)
        else:
            seats_GMHRX = lines_LHRX[self.line_GM]
        return seats_GMHRX.transpose(1, 2).flatten(2, 3)

    def _by_line(self, groups_GHSX: torch.Tensor) -> torch.Tensor:
        """From seats back to lines: [G, H, M * R, X] -> [L, H, R, X]."""
        most = self.line_GM.shape[1]
        seats_CHRX = groups_GHSX.unflatten(2, (most, -1)).transpose(1, 2).flatten(0, 1)
        if self.full:
            return seats_CHRX
        return seats_CHRX[self.seat_L]


class _OwnDecoding:
    """The plain path: decodes the lines of one prompt with the model's own attention, and with its
    own cache if it returns one."""

    def __init__(
        self, model: PreTrainedModel, encoded: Sequence[Sequence[int]], sampling: SamplingConfig
    ):
        (prompt_ids,) = encoded
        device = first_device(model)
        self.model = model
        self.cache = None
        self.ids = torch.zeros(sampling.n, 0, dtype=torch.int64, device=device)
        prompts = torch.tensor([prompt_ids] * sampling.n, device=device)
        self.first_logits = self.next_logits(prompts)

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [lines, vocabulary] after one more token of each line."""
        self.ids = torch.cat([self.ids, tokens.view(len(self.ids), -1)], dim=1)
        # Without a cache the model reads each line from its beginning.
        new_ids = self.ids
        if self.cache is not None:
            new_ids = tokens[:, None]
        with attention_named(self.model, OWN_ATTENTION):
            outputs = self.model(input_ids=new_ids, past_key_values=self.cache, use_cache=True)
        self.cache = outputs.get("past_key_values")
        return outputs.logits[:, -1]


@contextmanager
def few_threads(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """Within the block torch uses only as many CPU threads as the largest matrix product of a layer
    has work for. With few rows, splitting the work costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, largest_product(model, rows) // WORK_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest_product(model: PreTrainedModel, rows: int) -> int:
    """Floating-point operations of a layer's largest matrix product, that of the MLP, for one token
    of each of `rows` rows."""
    return 2 * rows * model.config.hidden_size * mlp_width(model.config)


def draw(logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingConfig) -> DrawnTokens:
    """Draw one token for each line of `logits` [lines, vocabulary], by inverting the CDF at
    `uniforms` [lines].

    Log-probs are those of the distribution that the tokens are drawn from. With temperature 0,
    where every greedy token has probability 1, they are those of the model at temperature 1."""
    if sampling.temperature == 0:
        log_probs = logits.float().log_softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        log_probs = sampling_logits(
            logits, sampling.temperature, sampling.top_p, sampling.top_k
        ).log_softmax(dim=-1)
        cdf = cumulative(log_probs.exp())
        targets = uniforms[:, None] * cdf[:, -1:]
        # right=True finds the first token whose CDF exceeds the target. A token of probability 0
        # does not raise the CDF, so it is never drawn.
        places = torch.searchsorted(cdf, targets, right=True).squeeze(1)
        tokens = places.clamp(max=cdf.shape[1] - 1)
    return DrawnTokens(tokens, log_probs.gather(-1, tokens[:, None]).squeeze(1))


class _PreallocatedLayer(StaticLayer):
    """One layer's cache of keys and values, [lines, heads, capacity, head size], filled in place.
    `update` returns the filled part only, so attention needs no mask."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.keys = self._allocate(key_states)
            self.values = self._allocate(value_states)
            self.is_initialized = True
            self.cumulative_length = 0
        start = self.cumulative_length
        end = start + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.cumulative_length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:  # Rows may end with their first token, before there is a cache.
            self.keys = self.keys[indices]
            self.values = self.values[indices]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        lines, heads, _, head_size = states.shape
        return states.new_empty(lines, heads, self.max_cache_len, head_size)


def open_transformers(
    config: SamplerConfig, tokenizer, policy: Policy | None = None
) -> TransformersSampler:
    """A sampler of the policy's own model, if all of that is on the sampler's device in its dtype;
    else of a copy that it loads. Raises `UserError` as `load_model` does, and for a model whose
    decoding gives other log-probs than its forward pass."""
    dtype = getattr(torch, config.dtype)
    model = None
    if policy is not None:
        model = policy.model_on(config.device, dtype)
    if model is None:
        model = load_model(config.model_path, (config.device,), dtype)
    context = model.config.max_position_embeddings
    sampler = TransformersSampler(model, tokenizer, context, config.policy_version)
    sampler.plain_path |= run_check_once("decoding", model, lambda: choose_decoding(sampler))
    return sampler


def choose_decoding(sampler: TransformersSampler) -> bool:
    """Check the log-probs of sampled tokens against the model's own forward pass. If decoding with
    shared prompts disagrees with it, the sampler takes the plain path from now on.

    Returns whether it takes the plain path. Raises `UserError` if that disagrees too."""
    family = sampler.model.config.model_type
    with self_check_mode(sampler.model):
        if not sampler.plain_path and (reason := _decoding_disagreement(sampler)):
            say_once(
                f"{family}: log-probs of tokens drawn {reason}; its own cache decodes, prompt by"
                " prompt: slow, but exact"
            )
            sampler.plain_path = True
        if sampler.plain_path and (reason := _decoding_disagreement(sampler)):
            raise UserError(
                f"--model: {family} cannot be sampled from: log-probs of tokens drawn {reason}; try"
                " --sampler vllm"
            )
    return sampler.plain_path


def _decoding_disagreement(sampler: TransformersSampler) -> str:
    """How the log-probs of sampled tokens differ from the model's own, over two rows of each of two
    prompts; "" if they do not (`disagreement`)."""
    sampling = SamplingConfig(n=2, max_new_tokens=CHECK_TOKENS, stop=())
    prompts = random_pieces(sampler.model, PROMPT_TOKENS[:2])
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(4, CHECK_TOKENS, generator=generator).to(sampler.model.device)
    waves = [[0, 1]]
    if sampler.plain_path:
        waves = [[0], [1]]

    def difference() -> torch.Tensor:
        rows: list[_Row] = []
        for wave in waves:
            # Waves of one prompt both draw with the last numbers, which does no harm to a check.
            uniforms_of_rows = uniforms[-sampling.n * len(wave) :]
            rows += sampler.decode_wave(prompts, wave, uniforms_of_rows, sampling)
        pairs: list[tuple[list[int], list[int]]] = []
        sampled_log_probs: list[float] = []
        for number, row in enumerate(rows):
            pairs.append((prompts[number // sampling.n], row.token_ids))
            sampled_log_probs += row.log_probs
        own_log_probs_N = own_log_probs(sampler.model, pairs)
        return torch.tensor(sampled_log_probs) - own_log_probs_N

    return disagreement(torch.zeros(()), difference)
