"""Rows of a batch as one sequence without padding, in which rows of one prompt share it, and attention over that. Models for
which this is not exact take the plain path: rows padded, a model's own attention, its own logits."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from alignment.core.tokens import Row, rows_by_prompt
from alignment.policy.huggingface import ALL_ATTENTION_FUNCTIONS, AttentionInterface

QUERIES_AT_A_TIME = 256  # of each row, where attention needs a bias


@dataclass
class Packing:
    """N tokens in one sequence without padding: first S prefixes, then R suffixes. A prompt of several rows is a prefix, their
    responses its suffixes; any other row is a prefix as a whole. A token sees those before it in its suffix and prefix."""

    input_ids_1N: torch.Tensor
    position_ids_1N: torch.Tensor
    spots_BT: torch.Tensor  # The place in the sequence of token t of row b of the batch; 0 beyond the row's end
    prefixes_SL: torch.Tensor  # Places of each prefix's tokens, right-padded with 0
    prefix_tokens: torch.Tensor  # Which of the flattened [S * L] are tokens
    suffixes_RQ: torch.Tensor | None = None  # Places of each suffix's tokens, right-padded with 0; None without suffixes
    seen_RK: torch.Tensor | None = None
    """Places of what they see: the prefix, left-padded with 0, then the suffix itself, right-padded."""
    padding_R: torch.Tensor | None = None  # How many zeros stand before each of these prefixes; None where all are equal
    suffix_tokens: torch.Tensor | None = None  # Which of the flattened [R * Q] are tokens
    applied: list[bool] = field(default_factory=list)
    copies: dict[torch.device, "Packing"] = field(default_factory=dict)
    biases: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def attend(self, module, query, key, value, rule) -> torch.Tensor:
        """See `attention_by_layout`; there is one row, of N tokens."""
        here = self.to(query.device)
        qkv_NHD = tuple(t[0].transpose(0, 1) for t in (query, key, value))
        prefixes = _attend(qkv_NHD, here.prefixes_SL, here.prefixes_SL, None, rule, here.biases)
        out = [prefixes.index_select(0, here.prefix_tokens)]
        if here.suffixes_RQ is not None:
            suffixes = _attend(qkv_NHD, here.suffixes_RQ, here.seen_RK, here.padding_R, rule, here.biases)
            out.append(suffixes.index_select(0, here.suffix_tokens))
        return torch.cat(out)[None]

    def to(self, device: torch.device | str) -> "Packing":
        """The same on another device, copied there once however many layers ask."""
        device = torch.device(device)
        if device == self.prefixes_SL.device:
            return self
        if device not in self.copies:
            moved = {name: send(value, device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
            self.copies[device] = replace(self, **moved, biases={}, copies={})
        return self.copies[device]


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on its way to a device. The host does not wait for the copy, for which the memory must be pinned."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # what comes to a CPU must have arrived


def pack(rows: Sequence[Row]) -> Packing:
    """Pack rows, on the CPU: those of one prompt together."""
    prompt_groups = rows_by_prompt(rows)
    # Each piece of the sequence has token ids, the position of the first of them, and rows. Prefixes come first.
    pieces = [(prompt + rows[own[0]][1] if len(own) == 1 else prompt, 0, own) for prompt, own in prompt_groups.items()]
    members = [(prefix, row) for prefix, own in enumerate(prompt_groups.values()) for row in own if len(own) > 1]
    sharing = [(prefix, row) for prefix, row in members if rows[row][1]]
    pieces += [(rows[row][1], len(rows[row][0]), [row]) for _, row in sharing]

    ends = itertools.accumulate(len(ids) for ids, *_ in pieces)
    ranges = [torch.arange(end - len(ids), end) for (ids, *_), end in zip(pieces, ends, strict=True)]
    spots_BT = torch.zeros(len(rows), max(len(prompt) + len(response) for prompt, response in rows), dtype=torch.int64)
    for (ids, first, own), places in zip(pieces, ranges, strict=True):
        spots_BT[own, first : first + len(ids)] = places
    input_ids_1N = torch.tensor([[token for ids, *_ in pieces for token in ids]])
    position_ids_1N = torch.cat([torch.arange(first, first + len(ids)) for ids, first, _ in pieces])[None]
    prefixes_SL = _padded(ranges[: len(prompt_groups)])
    sequence = input_ids_1N, position_ids_1N, spots_BT, prefixes_SL.clamp(min=0), _real(prefixes_SL)
    if not sharing:
        return Packing(*sequence)
    suffixes, prefixes = ranges[len(prompt_groups) :], [ranges[prefix] for prefix, _ in sharing]
    suffixes_RQ, prefixes_RP = _padded(suffixes), _padded(prefixes, "left")
    seen_RK = torch.cat([prefixes_RP, suffixes_RQ], dim=1).clamp(min=0)
    padding_R = None if len(set(map(len, prefixes))) == 1 else (prefixes_RP < 0).sum(dim=1)
    return Packing(*sequence, suffixes_RQ.clamp(min=0), seen_RK, padding_R, _real(suffixes_RQ))


def _padded(places: Sequence[torch.Tensor], side: str = "right") -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True, padding_value=-1, padding_side=side)


def _real(padded: torch.Tensor) -> torch.Tensor:
    return (padded.flatten() >= 0).nonzero().squeeze(1)


def soft_capped(values: torch.Tensor, cap: float | None) -> torch.Tensor:
    """c * tanh(v / c), or v without a cap (Gemma 2, arXiv:2408.00118)."""
    return values if cap is None else cap * torch.tanh(values / cap)


@dataclass(frozen=True)
class AttentionRule:
    """What one layer makes of the products of queries and keys, besides who sees whom: transformers' arguments to attention."""

    scaling: float
    window: int | None = None  # a token sees those less than so many positions before it (Mistral, arXiv:2310.06825)
    soft_cap: float | None = None  # of scores: `soft_capped`
    sinks: torch.Tensor | None = None  # [heads of queries]; exp(sink) joins the denominator (gpt-oss, arXiv:2508.10925)

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of scaled products."""
        return self.soft_cap is None and self.sinks is None

    def softmax(self, scores_XHSK: torch.Tensor) -> torch.Tensor:
        """Attention weights in fp32. The S queries of a head of keys are each of its heads of queries, one after another."""
        if self.sinks is None:
            return scores_XHSK.softmax(dim=3, dtype=torch.float32)
        sinks_HG = self.sinks.view(scores_XHSK.shape[1], -1)
        sinks_HS = sinks_HG.repeat_interleave(scores_XHSK.shape[2] // sinks_HG.shape[1], dim=1)
        column = sinks_HS[None, :, :, None].expand(len(scores_XHSK), -1, -1, 1).to(scores_XHSK.dtype)
        return torch.cat([scores_XHSK, column], dim=3).softmax(dim=3, dtype=torch.float32)[..., :-1]


def attention(module, query, key, value, attention_mask, scaling=None, layout=None, **kwargs):
    """(Output, None) of scaled dot-product attention as transformers calls it, by a layout where one is given. Raises
    ValueError for arguments that it does not know, such as a position bias, and for those that only a layout knows."""
    window, soft_cap, sinks = (kwargs.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    if layout is None:
        if soft_cap is not None or sinks is not None or (window is not None and key.shape[2] > window):
            raise ValueError("attention without a layout has no window, soft cap or sinks: use attention_named")
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Of the numbers and tensors beside its scaling a layout knows positions, and it leaves out dropout.
    known = {"sliding_window", "softcap", "s_aux", "dropout", "position_ids", "cache_position"}
    unknown = [name for name, told in kwargs.items() if isinstance(told, torch.Tensor | float) and name not in known]
    if unknown:
        raise ValueError(f"attention is told {unknown[0]}, which is not supported")
    layout.applied.append(True)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(module, query, key, value, AttentionRule(scaling, window, soft_cap, sinks)), None


ATTENTION = "layout"  # without "sdpa" in it: transformers then refuses models whose attention torch's cannot compute
# Without a mask, for which transformers would wait for the device in each pass: micro-batches could not overlap.
AttentionInterface.register(ATTENTION, attention)
OWN_ATTENTION = "eager"  # which every family of transformers has, and which leaves out none of the family's features


def takes_plain_path(model: torch.nn.Module) -> bool:
    """Whether `take_plain_path` was called with this model."""
    return getattr(model, "takes_plain_path", False)


def take_plain_path(model: torch.nn.Module) -> None:
    """Have a model's log-probs and decoding go by the plain path from now on."""
    model.takes_plain_path = True
    model.config._attn_implementation = OWN_ATTENTION


@contextmanager
def attention_named(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Have a model compute attention by the entry `name` of transformers' table, whatever it was loaded with."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def attention_by_layout(model: torch.nn.Module, layout) -> Iterator[None]:
    """Have a model's attention go by a layout: its `attend(module, query, key, value, rule)` makes [rows, tokens, heads, D] of
    [rows, heads, tokens, D]; its list `applied` is not empty once it has: a model that ignores it would mix up its rows in
    silence. Raises ValueError if the model drops it, or would on recomputing layers."""
    if model.config._attn_implementation != ATTENTION and getattr(model, "is_gradient_checkpointing", False):
        raise ValueError(f"load the model with attn_implementation={ATTENTION!r}: its layers are run again in backward")
    with attention_named(model, ATTENTION):
        yield
    if not layout.applied:
        name = type(model).__name__
        raise ValueError(f"{name} does not pass keyword arguments to its attention, so it cannot be told a layout")


def _attend(qkv_NHD, queries_RQ, keys_RK, padding_R, rule: AttentionRule, biases: dict[tuple, torch.Tensor]) -> torch.Tensor:
    """Causal attention of places to others, the last Q of which are the same: [R * Q, H, D]. A row's first `padding_R` keys are
    nobody's. Many queries go in pieces, whose biases backward makes again: no tensor grows with their square."""
    q_NHD, k_NHD, v_NHD = qkv_NHD
    (rows, width), heads, groups = queries_RQ.shape, k_NHD.shape[1], q_NHD.shape[1] // k_NHD.shape[1]
    q = q_NHD.index_select(0, queries_RQ.flatten()).view(rows, width, heads, groups, -1)
    k, v = (t.index_select(0, keys_RK.flatten()).view(rows, -1, heads, t.shape[2]).transpose(1, 2) for t in (k_NHD, v_NHD))
    before = keys_RK.shape[1] - width
    if before == 0 and rule.is_plain and (rule.window is None or rule.window >= width):
        q = q.flatten(2, 3).transpose(1, 2)
        grouped = groups > 1
        if grouped and q.is_cuda and q.dtype == torch.float32:  # grouped fp32 has only a kernel that keeps all scores
            k, v, grouped = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), False
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scaling, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)

    def attend_piece(q, k, v) -> torch.Tensor:
        return _attend_with_bias(q, k, v, causal_bias(padding_R, q.shape[1], rule.window, k).repeat(1, 1, groups, 1), rule)

    if width <= QUERIES_AT_A_TIME:  # all layers keep the same bias for their backward
        made = (before, width, rule.window, q.dtype, groups)
        if made not in biases:
            biases[made] = causal_bias(padding_R, width, rule.window, k).repeat(1, 1, groups, 1)
        return _attend_with_bias(q, k, v, biases[made], rule).flatten(0, 1)
    pieces = []
    for start in range(0, width, QUERIES_AT_A_TIME):
        end = min(start + QUERIES_AT_A_TIME, width)
        inputs = (q[:, start:end], k[:, :, : before + end], v[:, :, : before + end])
        pieces.append(checkpoint(attend_piece, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(pieces, dim=1).flatten(0, 1)


def causal_bias(padding_R: torch.Tensor | None, queries: int, window: int | None, keys: torch.Tensor) -> torch.Tensor:
    """0 where a query sees a key, else -inf: [R or 1, 1, Q, K], in the type of `keys` [R, H, K, D]. The last keys are the
    queries' own; each sees those up to its own and less than `window` before it, but none of a row's first `padding_R`."""
    places_K = torch.arange(keys.shape[2], device=keys.device)
    distance_QK = places_K[-queries:, None] - places_K
    unseen_RQK = ((distance_QK < 0) | (distance_QK >= (window or len(places_K))))[None]
    if padding_R is not None:
        unseen_RQK = unseen_RQK | (places_K < padding_R[:, None, None])
    return torch.zeros(unseen_RQK.shape, dtype=keys.dtype, device=keys.device).masked_fill(unseen_RQK, -torch.inf)[:, None]


def _attend_with_bias(q, k, v, bias, rule: AttentionRule) -> torch.Tensor:
    """Attention of q [R, Q, H, G, D] to k and v [R, H, K, D] with a bias [R or 1, 1, G * Q, K]: [R, Q, H * G, D]."""
    # The queries that share a head of keys are as so many more rows of queries, so that keys need not be repeated.
    width, groups = q.shape[1], q.shape[3]
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
    if rule.is_plain:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=rule.scaling)
    else:
        out = rule.softmax(soft_capped(q @ k.transpose(2, 3) * rule.scaling, rule.soft_cap) + bias).to(v.dtype) @ v
    return out.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4).flatten(2, 3)
