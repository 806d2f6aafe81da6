"""Batched decoding over a Hugging Face model: a group shares its prompt's keys and values, finished
rows are dropped."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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
    checking,
    disagreement,
    once,
    own_log_probs,
    random_pieces,
)
from alignment.policy.policy import Policy
from alignment.sampling.arrival import Held, NamedTensors, tensor_checksum
from alignment.sampling.sampler import Completions, OnResponseEnd, SamplerConfig, encode_prompts
from alignment.system.errors import UserError
from alignment.system.terminal import say_once

LIVE_SHARE = 0.8  # rows are dropped once fewer than this share of those in flight are unfinished
CHECK_TOKENS = 6  # of a row of the self-check: more than `self_check.WINDOW`
# tokens of each row that are drawn before the host looks at them: it waits for a GPU
STEPS_UNSEEN = {
    "cpu": 1,
    "cuda": 16,
}
# floating-point operations of a product, from which a thread of its own pays
# (benchmarks/decoding.md)
WORK_A_THREAD = 2**25
WORK_A_WAVE = 2**24  # those from which a wave of its own pays, decoded beside another


@dataclass
class _Row:
    """A response in the making."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool


class TransformersSampler:
    """Runs a model on one device, which may be the policy's own: it is only read, and
    `load_weights` then copies nothing."""

    def __init__(self, model: PreTrainedModel, tokenizer, context: int, policy_version: int = 0):
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.policy_version, self.restarts, self.dtype = policy_version, 0, model.dtype
        self.plain_path = takes_plain_path(model)
        self._device = first_device(model)
        self.responses = ResponseReader(tokenizer, end_ids_of(model, tokenizer))

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        copy_weights(self.model, named_tensors)
        self.policy_version = version

    def weight_checksums(self, version: int) -> Held:
        return {
            name: ([name], tensor_checksum(tensor, version, self.dtype))
            for name, tensor in self.model.named_parameters()
        }

    def close(self) -> None:
        """Let go of the model."""
        self.model = None

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        """See `Sampler.sample`. Each row has random numbers of its own, so waves and dropped rows
        change no other row."""
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        generator = torch.Generator().manual_seed(sampling.seed)
        last = sampling.first_prompt + len(prompts)
        uniforms = torch.rand(last, sampling.n, sampling.max_new_tokens, generator=generator)[
            sampling.first_prompt :
        ]
        was_training = self.model.training
        self.model.eval()
        groups: Completions = [[] for _ in prompts]
        (waves, parallel), stopped = self._waves(encoded, sampling), threading.Event()

        @torch.inference_mode()  # which each thread has for itself
        def decode(wave: Sequence[int]) -> list[_Row]:
            lines = uniforms[wave].flatten(0, 1).to(self._device)
            return self._decode(encoded, wave, lines, sampling, on_response_end, stopped)

        for wave, rows in zip(
            waves, run_parallel(decode, waves, parallel, stop=stopped.set), strict=True
        ):
            for position, row in enumerate(rows):
                index, reason = wave[position // sampling.n], "stop" if row.finished else "length"
                drawn = (tuple(encoded[index]), tuple(row.token_ids), tuple(row.log_probs))
                text = self.responses.text(row.token_ids, sampling.stop)
                groups[index].append(Completion(*drawn, text, reason, self.policy_version))
        self.model.train(was_training)
        return groups

    def _waves(
        self, encoded: Sequence[Sequence[int]], sampling: SamplingConfig
    ) -> tuple[list[list[int]], int]:
        """Prompts cut into waves of similar length, and how many of these are decoded at once, each
        by some of torch's threads: two where each has enough work. The keys and values of all these
        fit in the cache."""
        token_bytes = key_value_bytes(self.model.config, self.model.dtype.itemsize)
        group_bytes = (max(map(len, encoded)) + sampling.n * sampling.max_new_tokens) * token_bytes
        fitting = max(1, CACHE_BYTES[self._device.type] // group_bytes)
        parallel = (
            1
            if self.plain_path or not may_run_in_parallel(self.model)
            else min(PARALLEL, torch.get_num_threads())
        )
        # The plain path has no padding on the left, so prompts of a wave would have to be equally
        # long.
        size = 1 if self.plain_path else min(fitting // parallel, -(-len(encoded) // parallel))
        if parallel > 1 and largest_product(self.model, size * sampling.n) < WORK_A_WAVE:
            parallel, size = 1, fitting
        by_length = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
        return [
            by_length[start : start + size] for start in range(0, len(by_length), size)
        ], parallel

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        wave: Sequence[int],
        uniforms: torch.Tensor,
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd,
        stopped: threading.Event | None = None,
    ) -> list[_Row]:
        """Decode `sampling.n` rows of each of a wave's prompts; `uniforms` [rows, max_new_tokens]
        decide every draw. The rows are cut short once `stopped` is set."""
        start = _OwnDecoding if self.plain_path else _SharedDecoding
        decoding = start(self.model, [prompts[number] for number in wave], sampling)
        logits = decoding.first_logits
        rows = [_Row([], [], False) for _ in range(len(wave) * sampling.n)]
        live = list(range(len(rows)))  # the row that each line of the tensors belongs to
        unseen: list[tuple[torch.Tensor, torch.Tensor]] = []
        with few_threads(self.model, len(rows)):
            for step in range(sampling.max_new_tokens):
                tokens, log_probs = draw(logits, uniforms[:, step], sampling)
                unseen.append((tokens, log_probs))
                last = step + 1 == sampling.max_new_tokens
                if last or len(unseen) == STEPS_UNSEEN[self._device.type]:
                    drawn = zip(
                        live,
                        *(torch.stack(each, dim=1).tolist() for each in zip(*unseen, strict=True)),
                        strict=True,
                    )
                    for index, ids, values in drawn:
                        has_ended = self._extend(rows[index], ids, values, sampling.stop)
                        if on_response_end and (has_ended or last and not rows[index].finished):
                            text = self.responses.text(rows[index].token_ids, sampling.stop)
                            on_response_end(wave[index // sampling.n], text)
                    unseen = []
                    unfinished = [
                        line for line, index in enumerate(live) if not rows[index].finished
                    ]
                    if last or not unfinished or stopped and stopped.is_set():
                        break
                    # models' own caches may drop none
                    if not self.plain_path and len(unfinished) < LIVE_SHARE * len(live):
                        keep = torch.tensor(unfinished, device=self._device)
                        live = [live[line] for line in unfinished]
                        tokens, uniforms = tokens[keep], uniforms[keep]
                        decoding.keep_lines(keep, [index // sampling.n for index in live])
                logits = decoding.next_logits(tokens)
        return rows

    def _extend(
        self, row: _Row, ids: list[int], log_probs: list[float], stop: tuple[str, ...]
    ) -> bool:
        """Add what was drawn for a row, up to its end, which the host may see late. Returns whether
        that was among it."""
        if row.finished:
            return False
        for token, log_prob in zip(ids, log_probs, strict=True):
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
            row.finished = self.responses.is_finished(row.token_ids, stop)
            if row.finished:
                break
        return row.finished


class _SharedDecoding:
    """Decodes `sampling.n` lines of each prompt: the first logits, then the next. It is a layout:
    each of L lines, one token long, sees its group's prompt and then its own cache. A prompt's keys
    and values are there once: attention to them is one matrix product a group, of the queries of M
    lines, some of which stand for none."""

    def __init__(
        self, model: PreTrainedModel, encoded: Sequence[Sequence[int]], sampling: SamplingConfig
    ):
        self.model, self.applied, device = model, [], first_device(model)
        packing, cache = pack([(tuple(prompt), ()) for prompt in encoded]), DynamicCache()
        hidden = self._hidden(
            packing.input_ids_1N.to(device), packing.position_ids_1N.to(device), cache, packing
        )[0]
        places_GP = packing.spots_BT.to(device)
        lengths_G = torch.tensor([len(prompt) for prompt in encoded], device=device)
        ends_G = places_GP.gather(1, lengths_G[:, None] - 1).squeeze(1)

        def taken(x_1HND):
            return (
                x_1HND[0]
                .index_select(1, places_GP.flatten())
                .unflatten(1, places_GP.shape)
                .transpose(0, 1)
            )

        # of each layer, [G, H, P, D]
        self.keys = [taken(layer.keys).contiguous() for layer in cache.layers]
        self.values = [taken(layer.values).contiguous() for layer in cache.layers]
        # padding behind a prompt
        self.outside_GP = torch.arange(places_GP.shape[1], device=device) >= lengths_G[:, None]
        self._share_among([group for group in range(len(encoded)) for _ in range(sampling.n)])
        self.positions = lengths_G.repeat_interleave(sampling.n)
        self.cache = Cache(
            layers=[_PreallocatedLayer(sampling.max_new_tokens) for _ in cache.layers]
        )
        self.first_logits = head_logits(model, hidden[ends_G]).repeat_interleave(sampling.n, dim=0)

    def keep_lines(self, keep: torch.Tensor, groups: Sequence[int]) -> None:
        """Go on with some lines only, whose prompts are `groups`."""
        self.positions = self.positions[keep]
        self.cache.batch_select_indices(keep)
        self._share_among(groups)

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [lines, vocabulary] after one more token of each line."""
        hidden = self._hidden(tokens[:, None], self.positions[:, None], self.cache, self)[:, -1]
        self.positions = self.positions + 1
        return head_logits(self.model, hidden)

    def _hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, cache: Cache, layout
    ) -> torch.Tensor:
        with attention_by_layout(self.model, layout):
            inputs = {
                "input_ids": input_ids,
                "position_ids": position_ids,
                "past_key_values": cache,
            }
            return self.model.get_decoder()(
                **inputs, use_cache=True, layout=layout
            ).last_hidden_state

    def _share_among(self, groups_L: Sequence[int]) -> None:
        """Say which group each line belongs to; a group's lines stand together."""
        device, held = (
            self.outside_GP.device,
            torch.tensor(groups_L).bincount(minlength=len(self.outside_GP)).tolist(),
        )
        seats, most = [seat for lines in held for seat in range(lines)], max(held)
        self.seat_L = torch.tensor(
            [g * most + seat for g, seat in zip(groups_L, seats, strict=True)], device=device
        )
        line_S = torch.zeros(len(held) * most, dtype=torch.int64, device=device)
        self.line_GM = line_S.scatter(
            0, self.seat_L, torch.arange(len(groups_L), device=device)
        ).view(-1, most)
        self.full = seats == list(range(most)) * len(held)  # every seat is taken, in order

    def attend(self, module, query, key, value, rule) -> torch.Tensor:
        """See `attention_by_layout`; [L, heads, 1, D] -> [L, 1, heads, D]. R heads of queries share
        each of H heads of keys."""
        keys_GHPD, values_GHPD = self.keys[module.layer_idx], self.values[module.layer_idx]
        q_LHRD = query.view(len(query), key.shape[1], -1, query.shape[-1]) * rule.scaling
        to_prompt_GHSP = soft_capped(
            self._by_group(q_LHRD) @ keys_GHPD.transpose(2, 3), rule.soft_cap
        )
        to_own_LHRT = soft_capped(q_LHRD @ key.transpose(2, 3), rule.soft_cap)
        outside_GP, drawn = self.outside_GP, key.shape[2]
        if rule.window is not None:
            # Token t of a prompt is (prompt's tokens - t) + drawn - 1 positions before the last
            # token drawn.
            places_P, lengths_G = (
                torch.arange(outside_GP.shape[1], device=key.device),
                (~outside_GP).sum(dim=1),
            )
            outside_GP = outside_GP | (places_P <= lengths_G[:, None] + drawn - 1 - rule.window)
            if drawn > rule.window:
                before_T = torch.arange(drawn, device=key.device) < drawn - rule.window
                to_own_LHRT = to_own_LHRT.masked_fill(before_T, -torch.inf)
        to_prompt_LHRP = self._by_line(
            to_prompt_GHSP.masked_fill(outside_GP[:, None, None], -torch.inf)
        )
        weights = rule.softmax(torch.cat([to_prompt_LHRP, to_own_LHRT], dim=3)).to(value.dtype)
        of_prompt_LHRP, of_own_LHRT = weights.split(
            [to_prompt_LHRP.shape[3], to_own_LHRT.shape[3]], dim=3
        )
        return (
            self._by_line(self._by_group(of_prompt_LHRP) @ values_GHPD) + of_own_LHRT @ value
        ).flatten(1, 2)[:, None]

    def _by_group(self, lines_LHRX: torch.Tensor) -> torch.Tensor:
        """[L, H, R, X] -> [G, H, M * R, X]."""
        lines_GMHRX = (
            lines_LHRX.unflatten(0, self.line_GM.shape) if self.full else lines_LHRX[self.line_GM]
        )
        return lines_GMHRX.transpose(1, 2).flatten(2, 3)

    def _by_line(self, groups_GHSX: torch.Tensor) -> torch.Tensor:
        """[G, H, M * R, X] -> [L, H, R, X]."""
        seats_SHRX = (
            groups_GHSX.unflatten(2, (self.line_GM.shape[1], -1)).transpose(1, 2).flatten(0, 1)
        )
        return seats_SHRX if self.full else seats_SHRX[self.seat_L]


class _OwnDecoding:
    """Decoding of one prompt's lines by the model's own attention, and its own cache if it returns
    one."""

    def __init__(
        self, model: PreTrainedModel, encoded: Sequence[Sequence[int]], sampling: SamplingConfig
    ):
        (prompt,), device = encoded, first_device(model)
        self.model, self.cache, self.ids = (
            model,
            None,
            torch.zeros(sampling.n, 0, dtype=torch.int64, device=device),
        )
        self.first_logits = self.next_logits(torch.tensor([prompt] * sampling.n, device=device))

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [lines, vocabulary] after one more token of each line."""
        self.ids = torch.cat([self.ids, tokens.view(len(self.ids), -1)], dim=1)
        news = self.ids if self.cache is None else tokens[:, None]
        with attention_named(self.model, OWN_ATTENTION):
            outputs = self.model(input_ids=news, past_key_values=self.cache, use_cache=True)
        self.cache = outputs.get("past_key_values")
        return outputs.logits[:, -1]


@contextmanager
def few_threads(model: PreTrainedModel, rows: int) -> Iterator[None]:
    """On a CPU, as many threads as a layer's largest product has work for: dealing out a step of
    few rows costs more."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, largest_product(model, rows) // WORK_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest_product(model: PreTrainedModel, rows: int) -> int:
    """Floating-point operations of the largest product of a layer that decodes a token of each of
    so many rows."""
    return 2 * rows * model.config.hidden_size * mlp_width(model.config)


def draw(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each line of `logits` [lines, vocabulary], by inverting the CDF at `uniforms`
    [lines]. Returns (tokens [lines], log-probs [lines] under the distribution drawn from; greedy:
    the untempered one, as a point mass says nothing)."""
    if sampling.temperature == 0:
        log_probs = logits.float().log_softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        log_probs = sampling_logits(
            logits, sampling.temperature, sampling.top_p, sampling.top_k
        ).log_softmax(dim=-1)
        cdf = cumulative(log_probs.exp())
        # right=True finds the first place where the CDF exceeds the target, which always has some
        # probability.
        tokens = (
            torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
            .squeeze(1)
            .clamp(max=cdf.shape[1] - 1)
        )
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(1)


class _PreallocatedLayer(StaticLayer):
    """One layer's keys and values, [lines, heads, capacity, head size], filled in place; gives the
    filled part, so no mask."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.keys = key_states.new_empty(
                *key_states.shape[:2], self.max_cache_len, key_states.shape[3]
            )
            self.values = value_states.new_empty(
                *value_states.shape[:2], self.max_cache_len, value_states.shape[3]
            )
            self.is_initialized, self.cumulative_length = True, 0
        start, end = self.cumulative_length, self.cumulative_length + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.cumulative_length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:  # not yet where rows end with their first token
            self.keys, self.values = self.keys[indices], self.values[indices]


def open_transformers(
    config: SamplerConfig, tokenizer, policy: Policy | None = None
) -> TransformersSampler:
    """A sampler that reads the policy's own model where that sits whole on the device in the right
    type, else loads a copy. Raises `UserError` as `load_model` does, and for a model that decodes
    other log-probs than its forward pass has."""
    dtype = getattr(torch, config.dtype)
    model = policy.model_on(config.device, dtype) if policy is not None else None
    model = load_model(config.model_path, (config.device,), dtype) if model is None else model
    sampler = TransformersSampler(
        model, tokenizer, model.config.max_position_embeddings, config.policy_version
    )
    sampler.plain_path |= once("decoding", model, lambda: choose_decoding(sampler))
    return sampler


def choose_decoding(sampler: TransformersSampler) -> bool:
    """Have a sampler take the plain path if lines that share a prompt do not get the log-probs of
    the model's own forward pass. Returns whether it does. Raises `UserError` where the plain path
    is no better."""
    family = sampler.model.config.model_type
    with checking(sampler.model):
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
    """`disagreement` over two rows of each of two prompts."""
    sampling = SamplingConfig(n=2, max_new_tokens=CHECK_TOKENS, stop=())
    prompts = random_pieces(sampler.model, PROMPT_TOKENS[:2])
    uniforms = torch.rand(4, CHECK_TOKENS, generator=torch.Generator().manual_seed(0)).to(
        sampler.model.device
    )
    waves = [[0], [1]] if sampler.plain_path else [[0, 1]]

    def difference() -> torch.Tensor:
        rows = [
            row
            for wave in waves
            for row in sampler._decode(prompts, wave, uniforms[-2 * len(wave) :], sampling, None)
        ]
        own = own_log_probs(
            sampler.model, [(prompts[index // 2], row.token_ids) for index, row in enumerate(rows)]
        )
        return torch.tensor([value for row in rows for value in row.log_probs]) - own

    return disagreement(torch.zeros(()), difference)
